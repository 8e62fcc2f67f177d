"""What ActorService promises, over a real connection, a real store and a tiny real model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import BatchMismatchError, FencedError, OutOfOrderError
from rolecall.settings import RunSettings
from rolecall.v1.training_pb2 import GetTrainerInfoRequest, TrainRequest
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.trainer_rig import Batches, served_actor, settings_tree, train, values_of

MakeRun = Callable[..., RunSettings]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def make_run(store: StoreUnderTest, model: Path, tmp_path: Path) -> MakeRun:
    def make(**sections: Any) -> RunSettings:
        return RunSettings.model_validate(settings_tree(store, model, tmp_path, **sections))

    return make


@pytest.fixture
def batches(store: StoreUnderTest, model: Path) -> Batches:
    return Batches(store, model)


async def test_a_sealed_step_is_applied_and_its_metrics_are_told(store: StoreUnderTest, make_run: MakeRun, batches: Batches) -> None:
    batch = batches.sealed(0)
    async with served_actor(make_run(), store) as (_, actor):
        result = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
        info = await actor.GetInfo(GetTrainerInfoRequest(), timeout=5)
    metrics = values_of(result)
    assert (result.step, result.digest, info.step, info.last_result) == (0, batch.digest, 1, result)
    assert metrics["actor/mismatch_all_max"] < 1e-4
    assert metrics["actor/ratio"] == pytest.approx(1.0)
    assert metrics["actor/entropy"] > 0
    assert metrics["actor/grad_norm"] > 0
