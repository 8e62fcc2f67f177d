"""What every test may use: where GPU tests are skipped, and the smallest valid run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rolecall.settings import RunSettings

pytest_plugins = ["tests.fixtures_rank", "tests.fixtures_store"]

# Read when torch is loaded, here and in children that do not say otherwise: each of two workers has one core, on which
# idle threads would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A deadline per example would fail on a busy machine; every test has a timeout of its own.
hypothesis.settings.register_profile("rolecall", deadline=None)
hypothesis.settings.load_profile("rolecall")

MakeSettings = Callable[..., RunSettings]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings of the smallest GRPO run in a temporary folder; keywords replace whole sections, e.g.
    make_settings(controller={"lease_s": 1.0}).
    """

    def make(**sections: Any) -> RunSettings:
        tree: dict[str, Any] = {
            "run": {"name": "test", "dir": str(tmp_path / "run"), "num_steps": 1},
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "train.jsonl")},
            "algorithm": {"groups_per_batch": 2},
            "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
        }
        return RunSettings.model_validate(tree | sections, context={"base": tmp_path})

    return make
