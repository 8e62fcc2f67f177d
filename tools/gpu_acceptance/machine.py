"""Checks 1, 2 and 27: what this machine is and whether the product can be imported on it; the tests that need a GPU."""

import importlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rolecall.training.account.peaks import peak_flops
from rolecall.training.ranks.device import attends_packed, memory_bytes, name_of, near_cores, stay_near, wait_for
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage

_ROOT = Path(__file__).parents[2]
_IMPORTED = (
    "services.actor.ranks",
    "services.critic.ranks",
    "services.reference.ranks",
    "services.rollout.scripted",
    "rolecall.training.sft.train",
)
_COMPILED = _ROOT / "tests" / "integration" / "test_torch_compile.py"
"""Tests that compile layers: minutes, in which the others take one."""
_TESTS_S = 500.0
"""Longest run of the tests; the part's own clock ends the check before."""


def check_machine(found: Findings, folder: Path) -> None:
    """Imports every trainer, names the device and finds its cores."""
    for module in _IMPORTED:
        importlib.import_module(module)
    stage = Stage.of(found, folder)
    found.figure("torch", torch.__version__)
    found.figure("transformers", transformers.__version__)
    found.figure("device", name_of(stage.device))
    found.figure("GiB", memory_bytes(stage.device)[1] / 2**30)
    found.require(
        "the device's name is not in rolecall/training/account/peaks.py",
        peak_flops(name_of(stage.device), torch.bfloat16) is not None,
        on_device=True,
    )
    found.require(
        "torch has no variable-length attention here", attends_packed(stage.device, torch.bfloat16), on_device=True
    )
    before = os.sched_getaffinity(0)
    stay_near(stage.device)
    after = os.sched_getaffinity(0)
    found.figure("cores", f"{len(after)} of {len(before)}")
    found.require("no core is left", bool(after))
    if stage.device.type == "cuda":
        _describe_cuda(stage)
    product = torch.ones(256, 256, device=stage.device, dtype=torch.bfloat16) @ torch.ones(
        256, 256, device=stage.device, dtype=torch.bfloat16
    )
    wait_for(stage.device)
    found.require("a product of ones is not 256", bool((product == 256).all()))


def _describe_cuda(stage: Stage) -> None:
    properties: Any = torch.cuda.get_device_properties(stage.device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    stage.found.figure("CUDA", torch.version.cuda)
    stage.found.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    stage.found.figure("PCI", address)
    stage.found.figure("cores of its NUMA node", len(near_cores(address)) or "not said")
    stage.found.figure("multiprocessors", properties.multi_processor_count)


def check_tests(found: Findings, folder: Path) -> None:
    """Runs `pytest -m gpu` over the files that have such tests, but those of compiled layers; on CPUs all of them are
    skipped.
    """
    files = [path for path in (_ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    _run_tests(found, folder, sorted(path for path in files if path != _COMPILED))


def check_compiled(found: Findings, folder: Path) -> None:
    """Runs `pytest -m gpu` over the tests of compiled layers; on CPUs all of them are skipped."""
    _run_tests(found, folder, [_COMPILED])


def _run_tests(found: Findings, folder: Path, files: Sequence[Path]) -> None:
    report = folder / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *map(str, files),
    ]
    # Warnings of other releases of torch are no failures here.
    done = subprocess.run(command, cwd=_ROOT, timeout=_TESTS_S, check=False)
    suite = ElementTree.parse(report).getroot()[0]
    total, failed, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    found.figure("tests", f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped")
    for case in suite:
        if any(child.tag in ("failure", "error") for child in case):
            found.require(f"{case.get('name')} failed", False)
    found.require(f"pytest ended with {done.returncode}", done.returncode == 0)
    found.require("there is no such test", total > 0)
    found.require("every test was skipped", total > failed + skipped, on_device=True)
