"""What CriticService promises, over a real connection, a real store and a tiny real model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMismatchError, OutOfOrderError
from rolecall.settings import RunSettings
from rolecall.v1.training_pb2 import (
    ComputeColumnRequest,
    LoadTrainerCheckpointRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
)
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import Batches, MakeRun, saved, served_critic, settings_tree, train, values_of

COLUMNS = ("loss_mask", "values", "returns")


@pytest.fixture
def make_run(store: StoreUnderTest, model: Path, tmp_path: Path) -> MakeRun:
    def make(**critic: Any) -> RunSettings:
        algorithm = {"groups_per_batch": 4, "advantage": {"kind": "gae"}, "num_minibatches": 2}
        section = {"token_budget": 64, "optimizer": {"learning_rate": 1e-3}} | critic
        return RunSettings.model_validate(settings_tree(store, model, tmp_path, algorithm=algorithm, critic=section))

    return make


async def test_values_cover_sampled_tokens_and_are_written_once(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    rows = [row for group in batches.sampled(2) for row in group.rows]
    request = ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows)
    async with served_critic(make_run(), store) as (_, critic):
        first = await critic.ComputeValues(request, timeout=30)
        before = store.rows.read(rows, ["values", "bootstrap_value"])
        again = await critic.ComputeValues(request, timeout=30)
    assert (first.num_already_written, again.num_already_written) == (0, len(rows))
    for row, read in zip(rows, store.rows.read(rows, ["values", "bootstrap_value", "response_mask"]), strict=True):
        assert read["values"].shape == (row.num_tokens,)
        assert read["bootstrap_value"].shape == (1,)
        assert not read["values"][read["response_mask"] == 0].any()
    np.testing.assert_array_equal(before[0]["values"], store.rows.read(rows, ["values"])[0]["values"])


async def test_the_value_loss_falls_over_steps(store: StoreUnderTest, make_run: MakeRun, batches: Batches) -> None:
    losses = []
    async with served_critic(make_run(value_clip_eps=None), store) as (rig, critic):
        for step in range(4):
            request = TrainRequest(ctl=store.ledger.ctl, step=step, digest=batches.sealed(step).digest)
            result = await train(critic, request)
            assert await train(critic, request) == result
            batches.commit(result)
            losses.append(values_of(result)["critic/loss"])
        assert rig.engine.context.engine.num_updates == 8
        with pytest.raises(OutOfOrderError):
            await train(critic, TrainRequest(ctl=store.ledger.ctl, step=9, digest="batch-9"))
    assert losses[-1] < losses[0]
    assert values_of(result)["critic/explained_variance"] <= 1.0
    assert values_of(result)["critic/grad_norm"] > 0


async def test_the_explained_variance_is_that_of_the_trained_tokens(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    async with served_critic(make_run(), store) as (_, critic):
        result = await train(critic, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
    rows = store.rows.read(batch.rows, COLUMNS)
    values, returns = (
        np.concatenate([row[name][row["loss_mask"] != 0] for row in rows]).astype(float)
        for name in ("values", "returns")
    )
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert values_of(result)["critic/explained_variance"] == pytest.approx(expected)


async def test_nothing_is_explained_of_returns_that_differ_in_their_last_bits(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = replace(batches, returns_std=3e-8).sealed(0)
    async with served_critic(make_run(), store) as (_, critic):
        result = await train(critic, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
    returns = np.concatenate([row["returns"][row["loss_mask"] != 0] for row in store.rows.read(batch.rows, COLUMNS)])
    assert np.unique(returns).size > 1
    assert "critic/explained_variance" not in values_of(result)


async def test_its_own_optimizer_trains_it_and_goes_on_from_a_checkpoint_as_it_was(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    settings = make_run(optimizer={"kind": "muon", "learning_rate": 1e-2, "warmup_steps": 3})
    ctl, path = store.ledger.ctl, open_storage(f"{settings.run.checkpoints}/attempt/critic").url
    async with served_critic(settings, store) as (_, critic):
        first = await train(critic, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest))
        batches.commit(first)
        files = await saved(critic, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
        one = TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)
        expected = values_of(await train(critic, one))
    assert values_of(first)["critic/learning_rate"] == pytest.approx(1e-2 * (1 + 2) / 2 / 4), "in its warm-up"
    assert expected["critic/learning_rate"] == pytest.approx(1e-2 * (3 + 4) / 2 / 4), "which ends within this step"
    async with served_critic(settings, store) as (_, critic):
        await critic.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)
        again = values_of(await train(critic, one))
    for name in ("critic/loss", "critic/grad_norm", "critic/learning_rate"):
        assert again[name] == expected[name]
    async with served_critic(make_run(), store) as (_, critic):
        with pytest.raises(CheckpointMismatchError):
            await critic.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)


async def test_adapters_and_the_head_are_trained_and_go_on_from_a_checkpoint_as_they_were(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    settings, ctl = make_run(lora={"rank": 4, "alpha": 8}), store.ledger.ctl
    path = open_storage(f"{settings.run.checkpoints}/attempt/critic").url
    async with served_critic(settings, store) as (rig, critic):
        batches.commit(await train(critic, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest)))
        files = await saved(critic, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
        one = TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)
        expected = values_of(await train(critic, one))
        trained = {name for name, each in rig.engine.context.engine._model.hf.named_parameters() if each.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"value_head.weight", "value_head.bias"}
    async with served_critic(settings, store) as (_, critic):
        await critic.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)
        again = values_of(await train(critic, one))
    for name in ("critic/loss", "critic/grad_norm"):
        assert again[name] == expected[name]
    changed = make_run(lora={"rank": 8, "alpha": 8})
    async with served_critic(changed, store) as (_, critic):
        with pytest.raises(CheckpointMismatchError, match="use the same configuration"):
            await critic.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)


async def test_its_own_number_of_minibatches_comes_before_the_actors(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    async with served_critic(make_run(num_minibatches=4), store) as (rig, critic):
        await train(critic, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batches.sealed(0).digest))
        assert rig.engine.context.engine.num_updates == 4
