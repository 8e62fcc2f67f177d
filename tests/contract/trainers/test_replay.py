"""An actor that replays routing: what its passes are of, where it comes from, and what it does about a sampler whose
routers are not the trainer's.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from rolecall.columns import OLD_ROUTED_EXPERTS, ROUTED_EXPERTS
from rolecall.settings import RunSettings
from rolecall.v1.training_pb2 import ComputeColumnRequest, TrainRequest
from rolecall.v1.trajectory_pb2 import TrainBatch
from rolecall.wire import Array
from tests.fixtures_store import StoreUnderTest
from tests.routed import own_routing, route_by_hand, routed_ids, write_with_other_routers
from tests.tiny_models import write_qwen3_moe
from tests.twins.served import Batches, served_actor, settings_tree, train, values_of

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("model") / "moe", vocab=288)


@pytest.fixture(scope="module")
def sampler(model: Path) -> Path:
    """The same weights but for the routers', which are a little off."""
    return write_with_other_routers(model.parent / "sampler", model, 0.05)


@dataclass
class RoutedBatches(Batches):
    """Batches whose rows say where their sampler, `model`, sent them."""

    network: Qwen3MoeForCausalLM = field(init=False)

    def __post_init__(self) -> None:
        self.network = Qwen3MoeForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def _row(self, rng: np.random.Generator) -> dict[str, Array]:
        row = super()._row(rng)
        return row | {ROUTED_EXPERTS: own_routing(self.network, row["token_ids"])}


def make_settings(
    store: StoreUnderTest, model: Path, run_dir: Path, actor: dict[str, Any], **algorithm: Any
) -> RunSettings:
    optimizer = {"learning_rate": 3e-3}
    sections = {
        "actor": {"token_budget": 64, "num_threads": 1, "optimizer": optimizer, **actor},
        "algorithm": {"groups_per_batch": 4, **algorithm},
    }
    return RunSettings.model_validate(settings_tree(store, model, run_dir, **sections))


async def step_of(
    store: StoreUnderTest, settings: RunSettings, batch: TrainBatch, *, computed: bool = False
) -> dict[str, float]:
    """Metrics of the first step of a new actor; `computed`: it was asked for its columns before."""
    async with served_actor(settings, store) as (_, client):
        if computed:
            await client.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=batch.rows), timeout=60)
        return values_of(await train(client, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)))


def by_hand(model: Path, row: dict[str, Array]) -> Array:
    """float32 [T]: logprobs of a row whose tokens go where its sampler sent them."""
    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    route_by_hand(network, routed_ids(row[ROUTED_EXPERTS]))
    ids = torch.from_numpy(row["token_ids"].astype(np.int64))[None]
    with torch.no_grad():
        log_p = (network(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.asarray(np.concatenate([[0.0], log_p.numpy()]) * row["response_mask"])


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_replaying_the_samplers_routing_brings_the_trainer_nearer_to_it(
    store: StoreUnderTest, model: Path, sampler: Path, tmp_path: Path, checkpointing: bool
) -> None:
    batch, told = RoutedBatches(store, sampler, num_groups=8).sealed(0), {}
    for replay in ("off", "r3"):
        actor = {"router_replay": replay, "gradient_checkpointing": checkpointing}
        told[replay] = await step_of(store, make_settings(store, model, tmp_path, actor, groups_per_batch=8), batch)
    off, r3 = told["off"], told["r3"]
    assert r3["actor/mismatch_kl"] < 0.5 * off["actor/mismatch_kl"]
    assert r3["actor/mismatch_all_max"] < off["actor/mismatch_all_max"]
    assert not [name for name in off if "rerouted" in name]
    assert 0 < r3["actor/rerouted_layers"] < r3["actor/rerouted_tokens"] < 1


async def test_both_passes_go_where_the_sampler_went(
    store: StoreUnderTest, model: Path, sampler: Path, tmp_path: Path
) -> None:
    """The old logprobs, written before or found in training: the metrics are those of the hand-routed model."""
    batch = RoutedBatches(store, sampler).sealed(0)
    settings = make_settings(store, model, tmp_path, {"router_replay": "r3"}, num_minibatches=2)
    found = await step_of(store, settings, batch)
    written = await step_of(store, settings, batch, computed=True)
    rows = store.rows.read(batch.rows, ["token_ids", "response_mask", "old_logprobs", ROUTED_EXPERTS])
    for row in rows:
        np.testing.assert_allclose(row["old_logprobs"], by_hand(model, row), atol=1e-4)
    for name in ("actor/mismatch_kl", "actor/old_kl", "actor/loss", "actor/grad_norm", "actor/rerouted_layers"):
        assert found[name] == pytest.approx(written[name], rel=1e-3, abs=1e-6), name


async def test_the_old_policys_routing_is_kept_for_every_later_update(
    store: StoreUnderTest, model: Path, tmp_path: Path
) -> None:
    """Epoch after epoch, whether the columns were written before the step or found in it."""
    batch = Batches(store, model).sealed(0)
    algorithm = {"num_minibatches": 2, "num_epochs": 2}
    settings = make_settings(store, model, tmp_path, {"router_replay": "r2"}, **algorithm)
    found = await step_of(store, settings, batch)
    written = await step_of(store, settings, batch, computed=True)
    off = await step_of(store, make_settings(store, model, tmp_path, {}, **algorithm), batch)
    for name in ("actor/old_kl", "actor/loss", "actor/grad_norm"):
        assert found[name] == pytest.approx(written[name], rel=1e-3, abs=1e-6), name
    assert found["actor/rerouted_tokens"] > 0, "updates move routers, which no longer choose"
    assert off["actor/old_kl"] != pytest.approx(found["actor/old_kl"], rel=1e-3), "tokens went elsewhere"
    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in store.rows.read(batch.rows, ["token_ids", OLD_ROUTED_EXPERTS]):
        kept, own = (routed_ids(each) for each in (row[OLD_ROUTED_EXPERTS], own_routing(network, row["token_ids"])))
        assert torch.equal(kept[:-1].sort().values, own[:-1].sort().values)


async def test_losses_of_routers_count_the_experts_that_tokens_went_to(
    store: StoreUnderTest, model: Path, sampler: Path, tmp_path: Path
) -> None:
    batch = RoutedBatches(store, sampler).sealed(0)
    moe = {"balance_coef": 0.1}
    told = [
        await step_of(store, make_settings(store, model, tmp_path, {"router_replay": replay, "moe": moe}), batch)
        for replay in ("off", "r3")
    ]
    counts = np.zeros((2, 4))
    for row in store.rows.read(batch.rows, [ROUTED_EXPERTS]):
        for layer in range(2):
            counts[layer] += np.bincount(routed_ids(row[ROUTED_EXPERTS])[:, layer].flatten().numpy(), minlength=4)
    busiest = float((counts.max(1) / counts.mean(1)).max())
    assert told[1]["actor/expert_load_max"] == pytest.approx(busiest, rel=1e-5)
    assert told[0]["actor/expert_load_max"] != pytest.approx(busiest, rel=1e-5)
