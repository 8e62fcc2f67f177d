"""Fixtures of a trainer's contract: a tiny policy, settings of a run that trains it, and batches for it."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.settings import RunSettings
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.served import Batches, MakeRun, settings_tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def make_run(store: StoreUnderTest, model: Path, tmp_path: Path) -> MakeRun:
    """Settings of a run of the model; keywords are its sections."""

    def make(**sections: Any) -> RunSettings:
        return RunSettings.model_validate(settings_tree(store, model, tmp_path, **sections))

    return make


@pytest.fixture
def batches(store: StoreUnderTest, model: Path) -> Batches:
    return Batches(store, model)
