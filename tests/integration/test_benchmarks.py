"""The benchmarks of store, controller, training, back ends, algorithms and large fleets still run, and our side of the
comparison with peers.

What they measure is no test's business.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import forked, run_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIMEOUT_S = 200.0
"""Seconds on a quiet machine; interpreters start slowly on a busy one."""
Quick = Callable[..., str]
pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture
def quick(tmp_path: Path) -> Quick:
    """What a benchmark prints in its smoke run."""

    def quick(name: str, *words: str, smoke: str = "--quick", timeout_s: float = TIMEOUT_S) -> str:
        log = tmp_path / "log"
        process = forked(log, run_script, str(BENCHMARKS / name), smoke, *words)
        process.join(timeout_s)
        process.kill()
        assert process.exitcode == 0, log.read_text()
        return log.read_text()

    return quick


def test_the_store_benchmark_compares_every_phase_with_raw_redis(quick: Quick) -> None:
    output = quick("store.py", "--tokens", "256", "--shards", "2")
    assert re.findall(r"^([a-z]+) +\d+ ", output, re.MULTILINE) == [
        "admit",
        "claim",
        "stage",
        "commit",
        "read",
        "write",
        "train",
        "ack",
        "all",
    ]


def test_the_scale_benchmark_runs_the_real_controller_to_its_figures(quick: Quick) -> None:
    output = quick("controller_scale.py")
    assert "CPU ms a trajectory: controller" in output
    assert "MB at most in each fifth" in output


def test_the_training_benchmark_makes_its_one_table(quick: Quick) -> None:
    output = quick("training.py")
    parts = (
        "packed, tokens/s",
        "logprobs and entropy, float32, s",
        "4,096 sequences over 64 parts, CPU ms",
        "loop blocked",
        "export of",
    )
    assert [part for part in parts if part not in output] == []


def test_the_wire_speed_benchmark_compares_a_publish_with_the_bare_channel(quick: Quick) -> None:
    assert re.search(r"^loopback +\d+ +\d+ +\d+%$", quick("wire_speed.py"), re.MULTILINE)


@pytest.mark.thorough("test_the_training_benchmark_makes_its_one_table")
@pytest.mark.timeout(3 * TIMEOUT_S + 20)
def test_the_benchmark_of_back_ends_makes_its_table_of_both(quick: Quick) -> None:
    output = quick("back_ends.py", timeout_s=3 * TIMEOUT_S)  # four interpreters of its own
    assert re.findall(r"^(data|pipeline 2) +(fsdp|megatron) +\d+ ", output, re.MULTILINE) == [
        ("data", "fsdp"),
        ("pipeline 2", "megatron"),
    ]


def test_the_algorithms_benchmark_agrees_with_its_plain_loops(quick: Quick) -> None:
    output = quick("algorithms.py")
    kinds = (
        "grpo",
        "rloo",
        "opo",
        "gpg",
        "maxrl",
        "pass_at_k",
        "gdpo",
        "remax",
        "reinforce_plus_plus",
        "gae",
        "optimal_token_baseline",
    )
    assert [kind for kind in kinds if not re.search(rf"^{kind}\b.* \d", output, re.MULTILINE)] == []


def test_the_benchmark_of_turns_has_the_same_loss_in_every_way(quick: Quick) -> None:
    output = quick("turns.py")
    found = re.findall(r"^(merged|a row a turn|shared) +\d+ ", output, re.MULTILINE)
    assert found == ["merged", "a row a turn", "shared"]


def test_the_benchmark_of_epochs_forms_some_and_only_the_last_two_stores_are_left(quick: Quick) -> None:
    output = quick("epochs.py")
    assert re.findall(r"^ +(\d+) +\d+\.\d+ ", output, re.MULTILINE) == ["2", "4"]
    assert "after 4 epochs rank 0 listens at 2 ports" in output


def test_the_simulated_tree_costs_as_many_times_the_bytes_as_rank_0_has_children(quick: Quick) -> None:
    output = quick("topology.py")
    assert re.findall(r"^\| (\d+) \| 1 \| (\d+)\.", output, re.MULTILINE) == [("4", "3"), ("16", "5")]


def test_the_comparison_with_peers_makes_our_side_of_every_row(quick: Quick) -> None:
    output = quick("vs_peers.py", "--dtype", "float32", smoke="--batches=1")
    found = re.match(r"(\d+) comparisons, float32", output)
    assert found is not None, output
    assert int(found[1]) > 80
