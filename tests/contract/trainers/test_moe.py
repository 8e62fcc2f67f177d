"""An actor of a mixture of experts: what it tells of its routers, and that their losses are part of its steps."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.v1.training_pb2 import TrainRequest
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3, write_qwen3_moe
from tests.twins.served import Batches, served_actor, settings_tree, train, values_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("model") / "moe", vocab=288)


async def step_of(store: StoreUnderTest, model: Path, run_dir: Path, moe: dict[str, Any] | None) -> dict[str, float]:
    """Metrics of one step of two updates."""
    actor = {"token_budget": 64, "num_threads": 1, "optimizer": {"learning_rate": 1e-3}, "moe": moe}
    algorithm = {"groups_per_batch": 4, "num_minibatches": 2}
    settings = RunSettings.model_validate(settings_tree(store, model, run_dir, actor=actor, algorithm=algorithm))
    batch = Batches(store, model).sealed(0)
    async with served_actor(settings, store) as (_, client):
        return values_of(await train(client, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)))


async def test_routers_are_measured_and_their_losses_added(store: StoreUnderTest, model: Path, tmp_path: Path) -> None:
    metrics = await step_of(store, model, tmp_path, {"balance_coef": 0.5, "z_coef": 0.1})
    assert 1.0 < metrics["actor/router_balance"] < 4.0  # 2 is even, for two of four experts are chosen
    assert metrics["actor/router_z"] > 0
    assert 1.0 <= metrics["actor/expert_load_max"] <= 2.0
    added = 0.5 * metrics["actor/router_balance"] + 0.1 * metrics["actor/router_z"]
    assert metrics["actor/loss"] - metrics["actor/policy_loss"] == pytest.approx(added, rel=1e-4)


async def test_without_the_setting_nothing_is_said_of_routers(
    store: StoreUnderTest, model: Path, tmp_path: Path
) -> None:
    metrics = await step_of(store, model, tmp_path, None)
    assert not [name for name in metrics if "router" in name or "expert" in name]


async def test_an_actor_without_routers_refuses_it_at_its_start(store: StoreUnderTest, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.moe"):
        await step_of(store, write_qwen3(tmp_path / "dense"), tmp_path / "run", {"z_coef": 0.1})
