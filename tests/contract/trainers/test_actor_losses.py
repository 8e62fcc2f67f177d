"""What a run's settings make of an actor's loss and of what it measures, over a real connection, store and model."""

from pathlib import Path

import numpy as np
import pytest

from rolecall.errors import (
    ConfigError,
    OutOfOrderError,
    RowMissingError,
)
from rolecall.v1 import weights_pb2
from rolecall.v1.training_pb2 import (
    ComputeColumnRequest,
    TrainRequest,
)
from rolecall.v1.trajectory_pb2 import Coefficients
from services.actor import drift
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import (
    Batches,
    MakeRun,
    publish_request,
    served_actor,
    train,
    true_distribution,
    true_logprobs,
    values_of,
)


async def test_a_step_is_the_same_whether_old_logprobs_were_written_before_or_not(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)
    run = make_run(algorithm={"groups_per_batch": 4, "num_minibatches": 3, "num_epochs": 2})
    async with served_actor(run, store) as (_, actor):
        without = values_of(await train(actor, request))
    async with served_actor(run, store) as (_, actor):
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=batch.rows), timeout=30)
        written = values_of(await train(actor, request))
    assert written.keys() == without.keys()
    measured = {name for name in without if name.endswith(("_s", "/tflops", "_peak_bytes"))}
    for name in without.keys() - measured:
        assert written[name] == pytest.approx(without[name], rel=1e-3, abs=1e-6), name


async def test_a_batch_of_the_critic_alone_is_counted_and_changes_nothing(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batches.critic_only = True
    alone, batches.critic_only = batches.sealed(0), False
    async with served_actor(make_run(algorithm={"groups_per_batch": 4}), store) as (rig, actor):
        engine = rig.engine.context.engine
        counted = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=alone.digest))
        assert (engine.num_updates, engine.flops_done) == (0, 0)
        assert rig.engine.applied.step == 1
        batches.commit(counted)
        batch = batches.sealed(1)
        await train(actor, TrainRequest(ctl=store.ledger.ctl, step=1, digest=batch.digest))
        assert engine.num_updates == 1


async def test_kl_and_sampler_correction_are_terms_of_the_loss(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batches.coefficients = Coefficients(kl_coef=0.5, entropy_coef=0.01)
    batch = batches.sealed(0)
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)
    algorithm = {
        "groups_per_batch": 4,
        "kl": {"reference": "ref", "kl_coef": 0.5},
        "correction": {"weight": {"kind": "token", "cap": 1.5}},
    }
    async with served_actor(make_run(algorithm=algorithm, references={"ref": {}}), store) as (rig, actor):
        with pytest.raises(RowMissingError, match="ref/logprobs"):
            await train(actor, request)
        masks = store.rows.read(batch.rows, ["response_mask"])
        store.rows.put(
            batch.rows,
            [{"ref/logprobs": np.where(read["response_mask"], np.float32(-3), np.float32(0))} for read in masks],
        )
        metrics = values_of(await train(actor, request))
        assert rig.engine.context.engine.num_updates == 1
    assert metrics["actor/reference_kl"] > 0
    assert metrics["actor/correction_weight"] == pytest.approx(1.0, abs=1e-3)
    expected = metrics["actor/policy_loss"] + 0.5 * metrics["actor/reference_kl"] - 0.01 * metrics["actor/entropy"]
    assert metrics["actor/loss"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


async def test_normalised_weights_have_a_mean_of_1_over_all_minibatches_and_are_known_before_the_first_update(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    weight = {"cap": None, "normalize": True}
    algorithm = {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 2, "correction": {"weight": weight}}
    request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)
    async with served_actor(make_run(algorithm=algorithm), store) as (rig, actor):
        passes = rig.engine.context.engine
        events = [event async for event in actor.Train(request, timeout=60)]
        metrics = values_of(events[-1].result)
        assert passes.num_updates == 4
    progress = [event.progress for event in events if event.HasField("progress")]
    assert all(each.num_done <= each.num_total for each in progress)
    assert metrics["actor/correction_normalizer"] == pytest.approx(1.0, abs=1e-3)
    rows = store.rows.read(batch.rows, ["rollout_logprobs", "loss_mask"])
    gaps = [np.linspace(-1, 0.5, len(row["loss_mask"]), dtype=np.float32) for row in rows]
    store.rows.put(
        batch.rows,
        [
            {"old_logprobs": (row["rollout_logprobs"] + gap) * (row["loss_mask"] != 0)}
            for row, gap in zip(rows, gaps, strict=True)
        ],
    )
    async with served_actor(make_run(algorithm=algorithm), store) as (_, actor):
        metrics = values_of(await train(actor, request))
    ratios = np.concatenate([np.exp(gap[row["loss_mask"] != 0]) for row, gap in zip(rows, gaps, strict=True)])
    assert metrics["actor/correction_normalizer"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert metrics["actor/correction_weight"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
async def test_tokens_are_singled_out_before_every_update(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, kind: str
) -> None:
    batch = batches.sealed(0)
    policy_loss = {"kind": kind, "fraction": 0.2} | ({"cov_low": 0.0, "cov_high": 100.0} if kind == "clip_cov" else {})
    algorithm = {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 2, "policy_loss": policy_loss}
    async with served_actor(make_run(algorithm=algorithm), store) as (rig, actor):
        events = [
            event
            async for event in actor.Train(TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest), timeout=60)
        ]
        assert rig.engine.context.engine.num_updates == 4
    metrics = values_of(events[-1].result)
    assert 0.1 < metrics["actor/selected_fraction"] <= 0.2
    progress = [event.progress for event in events if event.HasField("progress")]
    assert all(each.num_done <= each.num_total for each in progress)  # 0 of 0 before the first microbatch


async def test_a_second_epoch_draws_no_token_that_ppos_clip_already_holds(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    policy_loss = {
        "kind": "clip_cov",
        "fraction": 0.5,
        "cov_low": -100.0,
        "cov_high": 100.0,
        "clip_eps_low": 1e-6,
        "clip_eps_high": 1e-6,
    }
    algorithm = {"groups_per_batch": 4, "num_epochs": 2, "policy_loss": policy_loss}
    async with served_actor(make_run(algorithm=algorithm), store) as (_, actor):
        metrics = values_of(await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)))
    clipped = metrics["actor/clip_fraction_high"] + metrics["actor/clip_fraction_low"]
    assert clipped > 0.3  # over both epochs; most of the second, none of the first
    assert metrics["actor/selected_fraction"] == pytest.approx(min(0.5 + (1 - 2 * clipped), 1.0) / 2, abs=0.01)


async def test_a_policy_loss_that_is_not_there_is_known_at_the_start(
    store: StoreUnderTest, make_run: MakeRun, tmp_path: Path
) -> None:
    policy_loss = {"kind": "custom", "function": f"{tmp_path}/nowhere_to_be_found:loss"}
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.function"):
        async with served_actor(make_run(algorithm={"groups_per_batch": 4, "policy_loss": policy_loss}), store):
            pass


async def test_mismatch_is_told_apart_for_trajectories_of_the_trained_weights(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    ctl = store.ledger.ctl
    batch = batches.sealed(0)
    async with served_actor(make_run(), store) as (_, actor):
        await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
        )
        await actor.PublishWeights(publish_request(ctl, step=0, version=0), timeout=30)
        first = await train(actor, TrainRequest(ctl=ctl, step=0, digest=batch.digest))
        batches.commit(first)
        second = await train(actor, TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest))
    sampled = sum(int(row["response_mask"].sum()) for row in store.rows.read(batch.rows, ["response_mask"]))
    assert values_of(first)["actor/mismatch_tokens"] == sampled
    assert values_of(first)["actor/mismatch_p999"] <= values_of(first)["actor/mismatch_max"] < 1e-4
    assert values_of(second)["actor/mismatch_tokens"] == 0
    assert "actor/mismatch_max" not in values_of(second)
    assert values_of(second)["actor/mismatch_all_max"] > 1e-4


async def test_the_rollout_whose_logprobs_are_far_from_those_of_all_others_is_named_once(
    store: StoreUnderTest,
    make_run: MakeRun,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(drift, "MIN_TOKENS", 1)
    ctl = store.ledger.ctl
    batches.workers = ("r.0", "r.1", "r.2", "r.3")
    async with served_actor(make_run(), store) as (_, actor):
        await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
        )
        for step, drifted in enumerate(["", "r.2", "r.2"]):
            batches.drifted = drifted
            await actor.PublishWeights(publish_request(ctl, step=step, version=step), timeout=30)
            batch = batches.sealed(step)
            told = await train(actor, TrainRequest(ctl=ctl, step=step, digest=batch.digest))
            batches.commit(told)
            if not drifted:
                assert "all others" not in caplog.text
    assert values_of(told)["actor/mismatch_max"] > 0.9
    assert "step 1: the logprobs of r.2 are 1 off for each token that is unsure" in caplog.text
    assert caplog.text.count("computes another model") == 1


@pytest.mark.parametrize("proximal", ["recompute", "bypass"])
async def test_the_proximal_policy_is_recomputed_or_the_sampler(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, proximal: str
) -> None:
    """In the second step the actor is no longer the sampler; two mini-batches would cost a pass ahead of the
    updates.
    """
    algorithm = {"groups_per_batch": 4, "num_minibatches": 2, "correction": {"proximal": proximal}}
    async with served_actor(make_run(algorithm=algorithm), store) as (rig, actor):
        first = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batches.sealed(0).digest))
        batches.commit(first)
        context, batch = rig.engine.context, batches.sealed(1)
        flops = context.engine.flops_done
        metrics = values_of(await train(actor, TrainRequest(ctl=store.ledger.ctl, step=1, digest=batch.digest)))
        num_passes = (context.engine.flops_done - flops) / context.engine.flops.forward.costs(
            [row.num_tokens for row in batch.rows]
        ).sum()
    assert values_of(first)["actor/mismatch_all_max"] < 1e-4, "what an update changes is no mismatch"
    # the head runs over scored tokens only
    assert num_passes == pytest.approx(3.35 if proximal == "recompute" else 2.85, abs=0.2)
    assert metrics["actor/mismatch_all_max"] > 1e-4
    assert metrics["actor/mismatch_kl"] > 0
    assert 0 < metrics["actor/ess_sequences"] <= metrics["actor/ess_tokens"] + 1e-3 <= 1.001
    assert metrics["actor/sampler_perplexity"] == pytest.approx(metrics["actor/trainer_perplexity"], rel=0.2)
    assert (
        metrics["actor/sampler_ratio_min"]
        <= metrics["actor/sampler_ratio_p01"]
        <= metrics["actor/sampler_ratio_p99"]
        <= metrics["actor/sampler_ratio_max"]
    )
    assert metrics["actor/probs_correlation"] > 0.9
    assert metrics["actor/rejected_tokens"] == metrics["actor/rejected_sequences"] == 0
    if proximal == "bypass":
        assert metrics["actor/correction_weight"] == 1.0
        assert metrics["actor/old_kl"] > 0
    else:
        assert metrics["actor/old_kl"] < metrics["actor/mismatch_kl"]


async def test_sums_of_squared_probabilities_are_written_beside_logprobs_where_the_estimator_reads_them(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches, model: Path
) -> None:
    batch = batches.sealed(0)
    run = make_run(algorithm={"groups_per_batch": 4, "advantage": {"kind": "optimal_token_baseline"}})
    async with served_actor(run, store) as (_, actor):
        with pytest.raises(OutOfOrderError, match="step 1"):
            await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=batch.rows, step=1), timeout=30)
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=batch.rows, step=0), timeout=30)
        metrics = values_of(await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)))
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-5)
    for read in store.rows.read(batch.rows, ["token_ids", "response_mask", "old_logprobs", "sum_squared_probs"]):
        log_p = true_distribution(model, read["token_ids"], batches.temperature)
        np.testing.assert_allclose(
            read["sum_squared_probs"], np.exp(2 * log_p).sum(1) * read["response_mask"], atol=1e-5
        )
        np.testing.assert_allclose(
            read["old_logprobs"],
            true_logprobs(model, read["token_ids"], batches.temperature) * read["response_mask"],
            atol=1e-4,
        )


async def test_a_teachers_reverse_kl_is_a_term_of_the_loss(
    store: StoreUnderTest, make_run: MakeRun, batches: Batches
) -> None:
    batch = batches.sealed(0)
    distillation = {"teacher": "wise", "placement": "loss", "coef": 0.5}
    run = make_run(algorithm={"groups_per_batch": 4, "distillation": distillation}, references={"wise": {}})
    rows = store.rows.read(batch.rows, ["response_mask", "rollout_logprobs"])
    store.rows.put(
        batch.rows,
        [{"teacher/logprobs": row["rollout_logprobs"] - np.float32(0.25) * row["response_mask"]} for row in rows],
    )
    async with served_actor(run, store) as (_, actor):
        metrics = values_of(await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)))
    assert metrics["actor/teacher_kl"] == pytest.approx(0.25, abs=1e-3)
    assert metrics["actor/loss"] == pytest.approx(
        metrics["actor/policy_loss"] + 0.5 * metrics["actor/teacher_kl"], abs=1e-4
    )
