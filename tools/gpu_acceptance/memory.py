"""Check 18: an engine that runs out of memory in its forward pass says it in one sentence and a file, and the exit code
tells whether another start can help.

The role is a process of its own: `python -m tools.gpu_acceptance.memory MODEL OUT [--after-success] [--dry]`, run as
every role is (rolecall/rpc/role_process.py).
Its memory is limited, by the device's allocator or, on CPUs, by the kernel, so that it is really exhausted.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from rolecall.rpc.role_process import FINAL, RESTART, run
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.ranks.device import memory_bytes
from rolecall.training.serving.device_thread import DeviceThread
from tests.tiny_models import write_qwen3
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, make_engine, make_rows, packed

_RUN_S = 100.0
_VOCAB = 4096
_ROOM_BYTES = 512 * 2**20
"""What the process may still take once its model is loaded."""


def check_out_of_memory(found: Findings, folder: Path) -> None:
    """The first forward pass, and one after a pass that went well."""
    write_qwen3(folder / "model", hidden=256, num_layers=2, heads=4, kv_heads=2, vocab=_VOCAB)
    for name, words, expected in (("first pass", [], FINAL), ("after a success", ["--after-success"], RESTART)):
        out = folder / name.replace(" ", "-")
        out.mkdir()
        command = [
            sys.executable,
            "-m",
            "tools.gpu_acceptance.memory",
            str(folder / "model"),
            str(out),
            *words,
            *(["--dry"] if found.dry else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        print(done.stdout, done.stderr, flush=True)
        said = next(
            (line for line in (done.stdout + done.stderr).splitlines() if "ran out of memory in forward" in line), ""
        )
        found.figure(f"{name}, exit code", done.returncode)
        found.require(f"{name}: exit code {done.returncode}, not {expected}", done.returncode == expected)
        found.require(f"{name}: no sentence says it", bool(said) and "token_budget" in said)
        account = out / "actor-rank0.json"
        found.require(f"{name}: no account was written", account.exists())
        if account.exists():
            told = json.loads(account.read_text())
            found.require(f"{name}: the account is of {told['phase']}", told["phase"] == "forward")
            found.require(
                f"{name}: the account names no parameter",
                any(tensor["kind"] == "parameters" for tensor in told["tensors"]),
            )
            found.require(
                f"{name}: the account has no segments", bool(told["allocator"].get("segments")), on_device=True
            )
    if said:
        found.figure("sentence", said[:400])


async def _role(model: Path, out: Path, after_success: bool, dry: bool) -> None:
    device_thread = DeviceThread()
    await device_thread.run(lambda: _work(model, out, after_success, dry), "training")


def _work(model: Path, out: Path, after_success: bool, dry: bool) -> None:
    stage = Stage.of(Findings(out / "findings.json", dry), out)
    engine = make_engine(
        stage, model, dtype="float32", optimizer=None, memory=PhaseMemory(stage.device, role="actor", folder=out)
    )
    if after_success:
        engine.forward([packed(make_rows([16, 9], _VOCAB), stage.device)], entropy=True)
    too_much = packed(make_rows([512] * 2000, _VOCAB), stage.device)
    if stage.device.type == "cuda":
        share = (torch.cuda.memory_reserved(stage.device) + _ROOM_BYTES) / memory_bytes(stage.device)[1]
        torch.cuda.set_per_process_memory_fraction(share, stage.device)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM_BYTES, resource.RLIM_INFINITY))
    engine.forward([too_much], entropy=True)
    raise RuntimeError("a million tokens fitted")


def main() -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--after-success", action="store_true")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    return run(lambda: _role(arguments.model, arguments.out, arguments.after_success, arguments.dry), "actor")


if __name__ == "__main__":
    sys.exit(main())
