"""Trainers on rows of several segments, which do not fit a microbatch: each is computed as if it stood alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.errors import InvalidInputError
from rolecall.settings import RunSettings
from rolecall.training.engine import ValueOutputs
from rolecall.training.packing.pack import pack, unpack
from rolecall.v1.training_pb2 import ComputeColumnRequest, TrainRequest
from rolecall.v1.trajectory_pb2 import RowRef
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import (
    Batches,
    MakeRun,
    served_actor,
    served_critic,
    settings_tree,
    train,
    true_logprobs,
    values_of,
)

BUDGET = 64
ROOM = 4096


@pytest.fixture
def batches(store: StoreUnderTest, model: Path) -> Batches:
    return Batches(store, model, num_segments=7)


def actor_of(token_budget: int) -> dict[str, Any]:
    return {"token_budget": token_budget, "num_threads": 1, "optimizer": {"learning_rate": 1e-3}}


def segments_of(ref: RowRef) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *ref.segment_starts, ref.num_tokens])]


async def test_the_actors_logprobs_are_those_of_each_segment_alone(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, model: Path
) -> None:
    refs = [ref for group in batches.sampled(3) for ref in group.rows]
    assert max(ref.num_tokens for ref in refs) > BUDGET, "some are cut"
    async with served_actor(make_run(), store) as (_, actor):
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=refs), timeout=60)
    for ref, row in zip(refs, store.rows.read(refs, ["token_ids", "response_mask", "old_logprobs"]), strict=True):
        expected = [true_logprobs(model, row["token_ids"][part], batches.temperature) for part in segments_of(ref)]
        np.testing.assert_allclose(
            row["old_logprobs"], np.concatenate(expected) * row["response_mask"], rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
async def test_a_step_does_not_depend_on_where_rows_are_cut(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, loss: str
) -> None:
    """gspo needs trajectories whole, and gets them whatever the budget."""
    told = []
    batch = batches.sealed(0)
    for token_budget in (BUDGET, ROOM):
        algorithm = {"groups_per_batch": 4, "policy_loss": {"kind": loss}}
        settings = make_run(algorithm=algorithm, actor=actor_of(token_budget))
        async with served_actor(settings, store) as (_, actor):
            result = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
        told.append(values_of(result))
    names = ("loss", "grad_norm", "entropy", "ess_sequences", "ess_tokens", "sampler_kl", "mismatch_kl")
    for name in names:
        assert told[0][f"actor/{name}"] == pytest.approx(told[1][f"actor/{name}"], rel=1e-4, abs=1e-6)
    assert told[0]["actor/mismatch_all_max"] < 1e-4


async def test_the_critics_values_are_those_of_each_segment_and_what_follows_the_last_one(
    store: StoreUnderTest, model: Path, tmp_path: Path, batches: Batches
) -> None:
    algorithm = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    tree = settings_tree(store, model, tmp_path, algorithm=algorithm, critic={"token_budget": BUDGET})
    batch = batches.sealed(0)
    refs = [ref for group in batches.sampled(2) for ref in group.rows]
    async with served_critic(RunSettings.model_validate(tree), store) as (rig, critic):
        await critic.ComputeValues(ComputeColumnRequest(ctl=store.ledger.ctl, rows=refs), timeout=60)
        context = rig.engine.context
        rows = store.rows.read(refs, ["token_ids", "response_mask", "values", "bootstrap_value"])
        for ref, row in zip(refs, rows, strict=True):
            for part in segments_of(ref):
                segment = {name: row[name][part] for name in ("token_ids", "response_mask")}
                (alone,) = context.engine.forward([pack([segment], [], temperature=1.0, device=context.device)])
                assert isinstance(alone, ValueOutputs)
                (values,) = unpack(alone.values_N, [len(segment["token_ids"])])
                np.testing.assert_allclose(row["values"][part], values, rtol=0, atol=1e-5)
            assert row["bootstrap_value"].tolist() == pytest.approx(alone.bootstrap_values_S.tolist(), abs=1e-5)
        result = await train(critic, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
    assert values_of(result)["critic/grad_norm"] > 0


async def test_segments_that_do_not_grow_are_refused_and_the_next_call_is_answered(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    (ref, *_) = [ref for group in batches.sampled(1) for ref in group.rows]
    async with served_actor(make_run(), store) as (_, actor):
        for starts in ([ref.num_tokens], [9, 3], [-1], [0]):
            bent = RowRef(id=ref.id, shard=ref.shard, token=ref.token, num_tokens=ref.num_tokens, segment_starts=starts)
            with pytest.raises(InvalidInputError, match="segment_starts and num_tokens grow"):
                await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[bent]), timeout=60)
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[ref]), timeout=60)
