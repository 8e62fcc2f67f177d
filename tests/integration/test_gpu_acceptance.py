"""The GPU acceptance does not rot: its runner tells every end that a check can have, and the checks themselves run dry,
on CPUs and with tiny shapes.

In this process, which has imported torch already; vLLM's in one of its own. Left out: the whole runs, a minute of
processor time each, whose pieces test_recipes_train.py, test_replay.py and test_quickstart.py run; parts 3 and 5 of
`python -m tools.gpu_acceptance --part N --out DIR --dry` run them.
"""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rolecall.training.ranks.device import stop_rank
from tools.gpu_acceptance.__main__ import main, run_part
from tools.gpu_acceptance.catalogue import CATALOGUE, PART_S, Check, part
from tools.gpu_acceptance.findings import Findings, table
from tools.gpu_acceptance.kernels import shares_of

LEFT_OUT = {14, 24}
BY_VLLM = 23
LONG = {2, 12, 13, 18, 27, 28}
DRY = [
    pytest.param(
        check,
        marks=pytest.mark.thorough("test_a_check_passes_on_cpus") if check.number in LONG else (),
        id=f"{check.number}-{check.target.partition(':')[2]}",
    )
    for check in CATALOGUE
    if check.number not in {*LEFT_OUT, BY_VLLM}
]
LIMIT_S = 60.0
"""Of the runner's test: five processes that do nothing and one that hangs until all others have had their time."""


@pytest.fixture
def own_process() -> Iterator[None]:
    """What a check leaves in its process: a group, and an environment."""
    environment = dict(os.environ)
    if dist.is_initialized():
        stop_rank()
    yield
    if dist.is_initialized():
        stop_rank()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("check", DRY)
def test_a_check_passes_on_cpus(check: Check, tmp_path: Path) -> None:
    module, _, function = check.target.partition(":")
    found = Findings(tmp_path / "found.json", dry=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    getattr(importlib.import_module(module), function)(found, folder)
    assert found.failures == []
    assert found.num_required > 0
    assert json.loads(found.path.read_text())["figures"] == found.figures


@pytest.mark.timeout(300)
@pytest.mark.thorough("test_a_check_passes_on_cpus")
def test_the_check_of_vllm_passes_on_cpus(tmp_path: Path) -> None:
    assert main(["--part", "5", "--out", str(tmp_path), "--dry", "--only", str(BY_VLLM)]) == 0
    (line,) = json.loads((tmp_path / "part-5.json").read_text())["checks"]
    assert line["verdict"] == "passed"
    assert "tokens compared with the trainer" in line["figures"]


@pytest.mark.vision
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [25, 26])
def test_the_checks_of_images_pass_beside_vllm_on_cpus(check: int, tmp_path: Path) -> None:
    assert main(["--part", "6", "--out", str(tmp_path), "--dry", "--only", str(check)]) == 0
    (line,) = json.loads((tmp_path / "part-6.json").read_text())["checks"]
    assert line["verdict"] == "passed"
    assert "weights 2, vLLM against trainer, mean" in line["figures"]


def test_shares_of_a_device_are_of_its_own_time_alone() -> None:
    def event(key: str, host_us: float, device_us: float) -> SimpleNamespace:
        totals = {"self_cpu_time_total": host_us, "cpu_time_total": host_us}
        return SimpleNamespace(key=key, self_device_time_total=device_us, device_time_total=device_us, **totals)

    events = [
        event("aten::mm", 5.0, 60.0),
        event("aten::_flash_attention_forward", 5.0, 40.0),
        event("aten::view", 900.0, 0.0),  # nothing on the device
        event("_BlockedLogprobs", 30.0, 25.0),
        event("_Spread", 10.0, 10.0),
    ]
    assert shares_of(events, on_device=True) == {"head": 0.25, "shared prefixes": 0.1, "attention": 0.4}
    assert shares_of(events, on_device=False)["attention"] == 5 / 910


def test_every_check_has_its_place_and_a_part_fits_into_its_time() -> None:
    assert [check.number for check in CATALOGUE] == list(range(1, 29))
    assert all(sum(check.budget_s for check in part(number)) <= PART_S for number in range(1, 9))


@pytest.mark.thorough("test_a_check_passes_on_cpus")
def test_the_runner_tells_every_end_and_goes_on_after_it(tmp_path: Path) -> None:
    ends = ("passes", "fails", "raises", "crashes", "skips", "says_nothing", "hangs")
    checks = [Check(number, 1, name, f"tests.acceptance_checks:{name}", 1.0) for number, name in enumerate(ends)]
    lines = {line.name: line for line in run_part(checks, tmp_path, dry=True, part_s=LIMIT_S / 4)}
    verdicts = {name: line.verdict for name, line in lines.items()}
    assert verdicts == {
        **dict.fromkeys(("fails", "raises", "crashes", "says_nothing"), "failed"),
        "passes": "passed",
        "skips": "skipped",
        "hangs": "overran",
    }
    assert lines["fails"].reasons == (
        "gap 2 is more than 1",
        "a part of it: ValueError: invalid literal for int() with base 10: 'of no use'",
    )
    assert lines["raises"].reasons == ("ValueError: said last",)
    assert "SIGKILL" in lines["crashes"].reasons[0]
    assert lines["crashes"].figures == {"before": "1"}
    assert lines["skips"].reasons == ("skipped: there is no such device",)
    assert lines["hangs"].figures == {"before": "1"}
    text = table(list(lines.values()))
    assert "| 0 | passes | passed |" in text
    assert r"after \| it 7" in text


def test_a_check_for_which_no_time_is_left_is_said_to_have_overrun(tmp_path: Path) -> None:
    checks = [
        Check(1, 1, "first", "tests.acceptance_checks:passes", 1.0),
        Check(2, 1, "second", "tests.acceptance_checks:passes", 100.0),
    ]
    first, _ = run_part(checks, tmp_path, dry=True, part_s=50.0)
    assert first.verdict == "overran"


def test_the_command_writes_the_table_and_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "1", "--out", str(tmp_path), "--dry", "--only", "99"]) == 0
    written = (tmp_path / "part-1.md").read_text()
    assert written.startswith("GPU acceptance, part 1: dry, on CPUs; torch ")
    assert written in capsys.readouterr().out
    assert json.loads((tmp_path / "part-1.json").read_text())["checks"] == []
