"""The quickstart as people run it: the whole system, from nothing on disk to a trained model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.data.model.files import read_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sort_digits"
ADAPTERS = ("--actor.lora.rank=16", "--actor.lora.alpha=32", "--actor.optimizer.learning_rate=5.0e-4")


def quickstart(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLE / "quickstart.py"), "--folder", str(folder), *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=840, check=False
    )


def last_evaluation(folder: Path) -> float:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return float([row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row][-1])


@pytest.mark.timeout(900)
def test_grpo_selects_the_ascending_order_through_the_whole_system(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "work", "--seed", "0")
    assert done.returncode == 0, done.stdout
    assert last_evaluation(tmp_path / "work") >= 0.95, done.stdout
    assert "Held-out greedy accuracy" in done.stdout
    assert (tmp_path / "work" / "run" / "curves.png").stat().st_size > 10_000
    assert read_model(tmp_path / "work" / "trained").num_parameters == 1_033_600
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
    for log in (tmp_path / "work" / "run" / "logs").iterdir():  # what a newcomer reads first
        assert not re.search("FutureWarning|Triton", log.read_text()), log.read_text()


@pytest.mark.megatron
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "trained"),
    [("tensor", ()), ("pipeline", ()), ("tensor", ADAPTERS)],
    ids=["tensor", "pipeline", "adapters"],
)
def test_grpo_learns_it_with_an_actor_of_two_ranks_over_megatron(
    tmp_path: Path, layout: str, trained: tuple[str, ...]
) -> None:
    more = ["--actor.backend=megatron", "--actor.num_ranks=2", f"--actor.parallel.{layout}=2"]
    done = quickstart(tmp_path / "work", "--seed", "0", *more, *trained)
    assert done.returncode == 0, done.stdout
    assert last_evaluation(tmp_path / "work") >= 0.95, done.stdout
