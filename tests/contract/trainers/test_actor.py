"""What ActorService promises of steps, columns and checkpoints, over a real connection, a real store and a tiny real
model.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import (
    BatchMismatchError,
    CheckpointMismatchError,
    CheckpointMissingError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutOfOrderError,
    RowMissingError,
    StaleVersionError,
    StoreRolledBackError,
)
from rolecall.settings import RunSettings
from rolecall.v1 import weights_pb2
from rolecall.v1.training_pb2 import (
    STATE_PART_GRADIENTS,
    STATE_PART_OPTIMIZER,
    STATE_PART_PARAMETERS,
    STATE_PART_UNSPECIFIED,
    CheckpointFile,
    ComputeColumnRequest,
    GetTrainerInfoRequest,
    LoadTrainerCheckpointRequest,
    OffloadRequest,
    OnloadRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
)
from rolecall.v1.trajectory_pb2 import RowRef
from tests.checkpoint_rig import exported
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import (
    Batches,
    MakeRun,
    publish_request,
    saved,
    served_actor,
    train,
    true_logprobs,
    values_of,
)

MANY_UPDATES = {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 20}


async def test_a_sealed_step_is_applied_and_its_metrics_are_told(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    async with served_actor(make_run(), store) as (_, actor):
        result = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
        info = await actor.GetInfo(GetTrainerInfoRequest(), timeout=30)
    metrics = values_of(result)
    assert (result.step, result.digest, info.step, info.last_result) == (0, batch.digest, 1, result)
    assert metrics["actor/mismatch_all_max"] < 1e-4
    assert metrics["actor/ratio"] == pytest.approx(1.0)
    assert metrics["actor/entropy"] > 0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/tokens"] == sum(row.num_tokens for row in batch.rows)


async def test_a_step_in_float16_is_that_of_float32_and_counts_what_was_computed_again_once(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    metrics = {}
    for dtype in ("float32", "float16"):
        run = make_run(algorithm={"groups_per_batch": 4, "num_minibatches": 2, "aggregation": "token_sum"})
        run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": dtype})})
        async with served_actor(run, store) as (rig, actor):
            result = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
            metrics[dtype] = values_of(result)
            assert rig.engine.context.engine.num_updates == 2
    assert metrics["float16"].pop("actor/loss_scale") < 2.0**16, "nothing was too large"
    assert metrics["float16"].keys() == metrics["float32"].keys()
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/tokens"):
        assert metrics["float16"][name] == pytest.approx(metrics["float32"][name], rel=0.02), name
    assert metrics["float16"]["actor/skipped_steps"] == 0


async def test_a_repeated_step_answers_with_its_record_and_changes_nothing(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batches.sealed(0).digest)
    async with served_actor(make_run(), store) as (rig, actor):
        first = await train(actor, request)
        again = await train(actor, request)
        assert again == first
        assert rig.engine.context.engine.num_updates == 1
        with pytest.raises(BatchMismatchError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest="another"))


async def test_a_later_an_unsealed_and_a_differing_step_are_refused(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    async with served_actor(make_run(), store) as (rig, actor):
        with pytest.raises(NotFoundError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest="batch-0"))
        batches.sealed(0)
        with pytest.raises(BatchMismatchError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest="another"))
        with pytest.raises(OutOfOrderError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl, step=1, digest="batch-1"))
        assert rig.engine.applied.step == 0


async def test_a_replaced_controller_is_refused(store: StoreUnderTest, make_run: MakeRun, batches: Batches) -> None:
    digest = batches.sealed(0).digest
    async with served_actor(make_run(), store) as (_, actor):
        with pytest.raises(FencedError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl - 1, step=0, digest=digest))
        with pytest.raises(StoreRolledBackError, match="is not known to the store"):
            await actor.Offload(OffloadRequest(ctl=store.ledger.ctl + 1), timeout=30)
        await actor.Onload(OnloadRequest(ctl=store.ledger.ctl), timeout=30)
        await actor.Offload(OffloadRequest(ctl=store.replaced()), timeout=30)
        with pytest.raises(FencedError):
            await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=digest))


async def test_state_that_went_to_the_host_comes_back_for_whoever_needs_it(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    digest, ctl = batches.sealed(0).digest, store.ledger.ctl
    async with served_actor(make_run(), store) as (rig, actor):
        await actor.Offload(OffloadRequest(ctl=ctl), timeout=30)
        await actor.Offload(OffloadRequest(ctl=ctl, parts=[STATE_PART_PARAMETERS]), timeout=30)
        await train(actor, TrainRequest(ctl=ctl, step=0, digest=digest))
        await actor.Onload(OnloadRequest(ctl=ctl, parts=[STATE_PART_OPTIMIZER, STATE_PART_GRADIENTS]), timeout=30)
        assert rig.engine.applied.step == 1
        with pytest.raises(InvalidInputError, match="parts"):
            await actor.Offload(OffloadRequest(ctl=ctl, parts=[STATE_PART_UNSPECIFIED]), timeout=30)


async def test_a_step_goes_on_when_its_caller_leaves_and_a_retry_attaches(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batches.sealed(0).digest)
    async with served_actor(make_run(algorithm=MANY_UPDATES), store) as (rig, actor):
        leaving = actor.Train(request, timeout=30)
        while rig.engine.context.engine.num_updates == 0:  # on a busy machine its first event may be the last
            await asyncio.sleep(0.01)
        leaving.cancel()
        one, other = await asyncio.gather(train(actor, request), train(actor, request))
        assert one == other
        assert rig.engine.context.engine.num_updates == 40
        assert rig.engine.applied.step == 1
    assert values_of(one)["actor/clip_fraction_high"] >= 0


async def test_a_missing_row_refuses_the_step_and_leaves_the_policy_as_it_was(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)
    async with served_actor(make_run(), store) as (rig, actor):
        store.rows.delete(batch.rows[:1])
        with pytest.raises(RowMissingError):
            await train(actor, request)
        assert (rig.engine.applied.step, rig.engine.context.engine.num_updates) == (0, 0)


async def test_concurrent_calls_for_logprobs_agree_with_transformers(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, model: Path
) -> None:
    rows = [row for group in batches.sampled(6) for row in group.rows]
    async with served_actor(make_run(), store) as (_, actor):
        calls = [
            ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows[start : start + 2]) for start in range(0, len(rows), 2)
        ]
        answers = await asyncio.gather(*(actor.ComputeLogprobs(call, timeout=30) for call in calls))
        again = await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows), timeout=30)
    assert [answer.num_tokens for answer in answers] == [sum(row.num_tokens for row in call.rows) for call in calls]
    assert sum(answer.num_already_written for answer in answers) == 0
    assert again.num_already_written == len(rows)
    for read in store.rows.read(rows, ["token_ids", "response_mask", "old_logprobs"]):
        expected = true_logprobs(model, read["token_ids"], batches.temperature) * read["response_mask"]
        np.testing.assert_allclose(read["old_logprobs"], expected, atol=1e-4)


async def test_a_greedy_response_is_not_computed_with(store: StoreUnderTest, make_run: MakeRun) -> None:
    store.admit(1, greedy_response=True)
    queue = store.attested("r.0")
    group = store.commit(queue, queue.claim(1)[0])
    async with served_actor(make_run(), store) as (_, actor):
        with pytest.raises(InvalidInputError, match="0/2 was sampled at temperature 0"):
            await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[group.greedy_row]), timeout=30)


async def test_a_missing_row_fails_only_the_call_that_named_it(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    rows = [row for group in batches.sampled(2) for row in group.rows]
    gone = RowRef(id="99/0", token="r.0-1", num_tokens=9)
    async with served_actor(make_run(), store) as (_, actor):
        good, bad = await asyncio.gather(
            actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows), timeout=30),
            actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[gone]), timeout=30),
            return_exceptions=True,
        )
    assert isinstance(bad, RowMissingError)
    assert not isinstance(good, BaseException)
    assert good.num_tokens == sum(row.num_tokens for row in rows)


async def test_a_restored_actor_goes_on_as_if_it_had_never_stopped(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path
) -> None:
    ctl, path = store.ledger.ctl, str(tmp_path / "checkpoints" / "actor")
    zero = TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest)
    save = SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1)
    async with served_actor(make_run(), store) as (_, actor):
        await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
        )
        await actor.PublishWeights(publish_request(ctl, step=0, version=5), timeout=30)
        first = await train(actor, zero)
        batches.commit(first)
        with pytest.raises(OutOfOrderError):
            await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=0))
        files = await saved(actor, save)
        assert await saved(actor, save) == files
        assert {file.name: file.num_bytes for file in files} == open_storage(path).files()
        one = TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)
        expected = await train(actor, one)
    async with served_actor(make_run(), store) as (_, actor):
        with pytest.raises(CheckpointMissingError):
            await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path + "-none"), timeout=30)
        with pytest.raises(InvalidInputError, match=r"^path '.*/actor' is not below .*/checkpoints"):
            await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=str(tmp_path / "actor")), timeout=30)
        with pytest.raises(InvalidInputError, match=r"^path '.*/\.\./actor' is not below"):
            await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=path + "/../../actor", step=1))
        outside = [CheckpointFile(name="../../model/config.json")]
        with pytest.raises(InvalidInputError, match=r"^files.name '.*/config.json' is not below"):
            await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=outside), timeout=30)
        another = [CheckpointFile(name="index.json", num_bytes=10, checksum="another")]
        with pytest.raises(CheckpointMismatchError, match=r"index\.json is not what was written"):
            await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=another), timeout=30)
        loaded = await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)
        assert (loaded.step, loaded.policy_version) == (1, 5)
        with pytest.raises(StaleVersionError):  # rollouts hold the weights of step 0 under this one
            await actor.PublishWeights(publish_request(ctl, step=1, version=5), timeout=30)
        assert await train(actor, zero) == first
        again = await train(actor, one)
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/learning_rate"):
        assert values_of(again)[name] == pytest.approx(values_of(expected)[name], rel=1e-5)
    model = Qwen3ForCausalLM.from_pretrained(exported(Path(path)), dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


async def test_the_rate_follows_the_runs_steps_whatever_updates_a_step_had_before(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, tmp_path: Path
) -> None:
    ctl, path = store.ledger.ctl, str(tmp_path / "checkpoints" / "actor")
    decaying = {"token_budget": 64, "num_threads": 1, "optimizer": {"learning_rate": 1e-3, "schedule": "linear"}}

    def run(algorithm: dict[str, Any], **more: Any) -> RunSettings:
        return make_run(algorithm={"groups_per_batch": 4, **algorithm}, actor=decaying, **more)

    async with served_actor(run({"num_minibatches": 4}), store) as (_, actor):
        first = await train(actor, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest))
        batches.commit(first)
        files = await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
    assert values_of(first)["actor/learning_rate"] == pytest.approx(1e-3 * (1 - 1.5 / 40)), "four of forty updates"
    one = TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)
    after_warm_up = run({"advantage": {"kind": "gae"}}, critic={"token_budget": 64, "warmup_steps": 1})
    for settings, rate in ((run({}), 1e-3 * 9 / 10), (run({"num_epochs": 2}), 1e-3 * 17.5 / 20), (after_warm_up, 1e-3)):
        async with served_actor(settings, store) as (_, actor):
            await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)
            assert values_of(await train(actor, one))["actor/learning_rate"] == pytest.approx(rate)
