"""The pull loop against a real store: every group in hand ends committed, released or abandoned, and never twice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.columns import IMAGES, OLD_ROUTED_EXPERTS, ROUTED_EXPERTS
from rolecall.data.model.mixture import Mixture
from rolecall.errors import (
    GenerationError,
    RowMissingError,
    WeightsMismatchError,
    WorkerLostError,
)
from rolecall.trajectory import SAMPLED_COLUMNS, rows_of, seed_of
from rolecall.v1 import rollout_pb2, trajectory_pb2
from services.rollout.scripted import ScriptedEngine, digest_of
from tests.contract.rollout_replica import CONSUMER, MAX_GROUPS, PROMPT, ReplicaUnderTest, replica_under_test
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until


@pytest.fixture
async def rollout(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[ReplicaUnderTest]:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.002), lease_s=0.9) as running:
        yield running


async def test_rows_say_where_tokens_were_sent_where_the_engine_does(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    mixture = Mixture(num_layers=3, num_experts=300, num_chosen=2)
    async with replica_under_test(store, tmp_path, ScriptedEngine(mixture=mixture), lease_s=0.9) as rollout:
        rollout.admit(2, greedy_response=True)
        await rollout.publish(1)
        for committed in await rollout.committed(2):
            refs = rows_of(committed)
            for row in rollout.store.rows.read(refs, ["token_ids", ROUTED_EXPERTS]):
                routed_TLk = row[ROUTED_EXPERTS].view("<i2").reshape(-1, 3, 2)
                assert row[ROUTED_EXPERTS].shape == (len(row["token_ids"]), mixture.width)
                assert (routed_TLk[:-1, 0, 0] == row["token_ids"][:-1] + 1).all(), "token and version 1 name the first"
                assert np.array_equal(routed_TLk[-1], routed_TLk[-2]), "nobody routes what is sampled last"
        for ref in refs:
            with pytest.raises(RowMissingError):
                rollout.store.rows.read([ref], [OLD_ROUTED_EXPERTS])


async def test_every_admitted_group_is_committed_with_its_rows(rollout: ReplicaUnderTest) -> None:
    rollout.admit(10)
    await rollout.publish(1)
    for committed in await rollout.committed(10):
        refs = list(committed.rows)
        assert (committed.min_policy_version, committed.max_policy_version, len(refs)) == (1, 1, 4)
        rows = rollout.store.rows.read(refs, SAMPLED_COLUMNS)
        for index, (ref, row, meta) in enumerate(zip(refs, rows, rollout.store.rows.read_meta(refs), strict=True)):
            prompt, total = len(PROMPT), ref.num_tokens
            assert row["token_ids"][:prompt].tolist() == list(PROMPT)
            assert row["response_mask"].tolist() == [0] * prompt + [1] * (total - prompt)
            assert (row["rollout_logprobs"] < 0).tolist() == row["response_mask"].astype(bool).tolist()
            assert row["policy_versions"].tolist() == [-1] * prompt + [1] * (total - prompt)
            assert (meta.id, meta.gid, meta.index) == (f"{committed.gid}/{index}", committed.gid, index)
            assert (meta.num_prompt_tokens, meta.prompt.ground_truth, meta.prompt.token_ids) == (
                prompt,
                "" if index else "42",
                b"",
            )
            assert [(span.policy_version, span.weights_digest, span.worker) for span in meta.spans] == [
                (1, digest_of(1), CONSUMER)
            ]
            assert (meta.spans[0].start, meta.spans[-1].end) == (prompt, total)
    assert rollout.store.balance() == (10, 0, 0, 10)


async def test_a_groups_prompt_is_kept_once_however_many_responses_there_are(rollout: ReplicaUnderTest) -> None:
    prompt = trajectory_pb2.Prompt(uid="u", token_ids=np.array(PROMPT, dtype="<i4").tobytes(), ground_truth="42")
    prompt.metadata.update({"tests": "x" * 100_000})
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=20)
    rollout.store.ledger.admit(
        trajectory_pb2.PromptGroup(gid=0, prompt=prompt, num_responses=8, sampling=sampling, greedy_response=True), b""
    )
    await rollout.publish(1)
    (committed,) = await rollout.committed(1)
    first, *others = rollout.store.rows.read_meta(rows_of(committed))
    assert first.prompt.metadata["tests"] == "x" * 100_000
    assert (first.prompt.ground_truth, len(others)) == ("42", 8)
    assert not any(meta.HasField("prompt") for meta in others)
    keys = rollout.store.connection.ledger.scan_iter(f"{{rl:{rollout.store.run}*")
    taken = sum(rollout.store.connection.command("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys)
    assert taken < 150_000


async def test_every_row_holds_the_images_of_its_prompt_where_prompts_may_show_some(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    shown: list[list[bytes]] = [[b"one", b"two"], []]
    async with replica_under_test(store, tmp_path, ScriptedEngine(), shows_images=True) as rollout:
        for gid, images in enumerate(shown):
            ids = np.array(PROMPT, dtype="<i4").tobytes()
            prompt = trajectory_pb2.Prompt(uid=f"u{gid}", token_ids=ids, images=images)
            sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=20)
            group = trajectory_pb2.PromptGroup(gid=gid, prompt=prompt, num_responses=2, sampling=sampling)
            assert store.ledger.admit(group, b"")
        await rollout.publish(1)
        sampled = {}
        for committed in await rollout.committed(2):
            rows, metas = store.rows.read_with_meta(rows_of(committed), ["token_ids", IMAGES])
            files = [list(trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files) for row in rows]
            assert files == [shown[committed.gid]] * 2
            assert not any(meta.prompt.images for meta in metas)
            sampled[committed.gid] = [row["token_ids"].tolist() for row in rows]
    assert sampled[0] != sampled[1], "the twin sees images, too"


async def test_rows_of_a_run_of_text_have_no_column_of_images(rollout: ReplicaUnderTest) -> None:
    rollout.admit(1)
    await rollout.publish(1)
    (committed,) = await rollout.committed(1)
    assert not rollout.store.rows.hold(rows_of(committed), IMAGES)


async def test_a_greedy_response_is_sampled_beside_the_others_and_marked_by_its_temperature(
    rollout: ReplicaUnderTest,
) -> None:
    rollout.admit(3, num_responses=2, greedy_response=True)
    await rollout.publish(1)
    greedy = []
    for committed in await rollout.committed(3):
        refs = rows_of(committed)
        metas = rollout.store.rows.read_meta(refs)
        assert [(ref.id, meta.index, meta.sampling.temperature) for ref, meta in zip(refs, metas, strict=True)] == [
            (f"{committed.gid}/0", 0, 1.0),
            (f"{committed.gid}/1", 1, 1.0),
            (f"{committed.gid}/2", 2, 0.0),
        ]
        assert (len(committed.rows), committed.greedy_row) == (2, refs[2])
        (row,) = rollout.store.rows.read([committed.greedy_row], SAMPLED_COLUMNS)
        assert not row["rollout_logprobs"].any()
        assert metas[2].spans[-1].end == committed.greedy_row.num_tokens
        greedy.append(row["token_ids"].tolist())
    assert greedy[0] == greedy[1] == greedy[2]  # the same prompt, and no seed in it


async def test_a_group_of_one_with_a_greedy_response_is_two_rows(rollout: ReplicaUnderTest) -> None:
    rollout.admit(1, num_responses=1, greedy_response=True)
    await rollout.publish(1)
    (committed,) = await rollout.committed(1)
    assert [ref.id for ref in rows_of(committed)] == ["0/0", "0/1"]


async def test_a_groups_responses_follow_from_the_runs_seed_its_gid_and_the_index(rollout: ReplicaUnderTest) -> None:
    assert len({seed_of(11, gid, i) for gid in range(10) for i in range(10)}) == 100
    rollout.admit(1)
    await rollout.publish(1)
    (committed,) = await rollout.committed(1)
    rows = rollout.store.rows.read(list(committed.rows), ["token_ids"])
    assert len({tuple(row["token_ids"].tolist()) for row in rows}) > 1


async def test_no_more_groups_are_claimed_than_the_engine_has_room_for(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(9)
    await rollout.publish(1)
    await rollout.runs(MAX_GROUPS * 4)
    await asyncio.sleep(0.1)
    counts = rollout.store.ledger.counts()
    assert (counts.generating, counts.queued) == (MAX_GROUPS, 5)
    assert (await rollout.info()).num_groups == MAX_GROUPS
    rollout.engine.hold = False
    assert len(await rollout.committed(9)) == 9


async def test_nothing_is_claimed_until_the_weights_are_attested(rollout: ReplicaUnderTest) -> None:
    rollout.admit(2)
    await rollout.receive(1)
    await asyncio.sleep(0.3)
    assert rollout.store.ledger.counts().queued == 2
    await rollout.publish(2)
    assert {committed.min_policy_version for committed in await rollout.committed(2)} == {2}


async def test_a_group_kept_over_a_publish_is_committed_with_both_versions(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(1, num_responses=8, max_tokens=40)
    await rollout.publish(1)
    await rollout.runs(8)
    rollout.engine.step(1)
    await asyncio.sleep(0.1)
    await rollout.publish(2)
    rollout.engine.hold = False
    (committed,) = await rollout.committed(1)
    assert (committed.min_policy_version, committed.max_policy_version) == (1, 2)


async def test_work_of_an_engine_that_tears_goes_back_and_is_sampled_anew(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(2)
    await rollout.publish(1)
    await rollout.runs(8)
    rollout.engine.failures.append(WeightsMismatchError("a bucket was skipped"))
    rollout.store.ledger.begin_publish(2, 2)
    with pytest.raises(Exception, match="skipped"):
        await rollout.receive(2)
    await until(lambda: rollout.store.ledger.counts().queued == 2)
    rollout.engine.hold = False
    await rollout.publish(3)
    assert {committed.min_policy_version for committed in await rollout.committed(2)} == {3}


async def test_a_pause_that_aborts_gives_groups_back_without_counting_the_delivery(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(2)
    await rollout.publish(1)
    await rollout.runs(8)
    await rollout.publish(2, mode=rollout_pb2.PAUSE_MODE_ABORT)
    await rollout.runs(8)  # both at once: an excused delivery is no suspicion
    rollout.engine.hold = False
    assert {committed.min_policy_version for committed in await rollout.committed(2)} == {2}


async def test_groups_whose_worker_died_run_beside_a_quarter_as_many(rollout: ReplicaUnderTest) -> None:
    """Of six that died together two may be in one worker's hands, which has room for four, and nothing else beside
    them.
    """
    rollout.admit(6)
    await asyncio.to_thread(rollout.store.publish, 1, 1, "rollout-9.dead")
    assert len(rollout.store.worker("rollout-9.dead").claim(6)) == 6
    rollout.store.ledger.expel("rollout-9.dead")
    rollout.engine.hold = True
    rollout.admit(3)
    await rollout.publish(2)
    await rollout.runs(2 * 4)
    await asyncio.sleep(0.3)
    assert rollout.engine.num_running == 2 * 4
    rollout.engine.hold = False
    assert len(await rollout.committed(9)) == 9


async def test_a_group_that_failed_by_itself_is_sampled_again_beside_others(rollout: ReplicaUnderTest) -> None:
    rollout.engine.sample_failures[f"0/2:{CONSUMER}-1"] = GenerationError("the engine choked")
    rollout.engine.hold = True
    rollout.engine.step(1)
    rollout.admit(4)
    await rollout.publish(1)
    await until(lambda: [entry.delivery for entry in rollout.store.ledger.pending()] == [2, 1, 1, 1])
    rollout.engine.hold = False
    assert len(await rollout.committed(4)) == 4


async def test_a_group_whose_generation_fails_is_handed_back_at_once_and_sampled_again(
    rollout: ReplicaUnderTest,
) -> None:
    rollout.engine.sample_failures[f"0/2:{CONSUMER}-1"] = GenerationError("the engine choked")
    rollout.admit(3)
    await rollout.publish(1)
    assert sorted(committed.gid for committed in await rollout.committed(3)) == [0, 1, 2]
    assert not rollout.store.ledger.reap([])


async def test_a_group_whose_generation_always_fails_is_given_to_nobody_after_max_deliveries_and_its_error_is_kept(
    rollout: ReplicaUnderTest,
) -> None:
    for delivery in (1, 2, 3):
        rollout.engine.sample_failures[f"0/2:{CONSUMER}-{delivery}"] = GenerationError("the engine choked")
    rollout.admit(1)
    await rollout.publish(1)
    over = await until(lambda: rollout.store.ledger.reap([]))
    assert [(group.gid, group.error) for group in over] == [(0, f"{CONSUMER}: the engine choked")]
    await until(lambda: rollout.pull.num_groups == 0)


async def test_a_prompt_without_room_for_a_token_is_never_sampled(rollout: ReplicaUnderTest) -> None:
    rollout.admit(1, prompt=tuple(range(64)))
    rollout.admit(1)
    await rollout.publish(1)
    assert [committed.gid for committed in await rollout.committed(1)] == [1]


async def test_draining_finishes_what_it_can_and_hands_back_the_rest(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(2)
    await rollout.publish(1)
    await rollout.runs(8)
    drained = await rollout.stub.Drain(rollout_pb2.DrainRequest(ctl=1, finish_s=0.1))
    assert (drained.num_finished, drained.num_released) == (0, 2)
    assert rollout.store.ledger.counts().queued == 2
    again = await rollout.stub.Drain(rollout_pb2.DrainRequest(ctl=1, finish_s=0.1))
    assert (again.num_finished, again.num_released) == (0, 0)
    async with asyncio.timeout(30):
        await rollout.pulling


async def test_draining_waits_for_groups_that_end_in_time(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(2)
    await rollout.publish(1)
    await rollout.runs(8)
    call = asyncio.ensure_future(rollout.stub.Drain(rollout_pb2.DrainRequest(ctl=1, finish_s=60)))
    await until(lambda: rollout.replica.draining)
    rollout.engine.hold = False
    drained = await call
    assert (drained.num_finished, drained.num_released) == (2, 0)
    assert rollout.store.ledger.counts().committed == 2


async def test_a_group_that_takes_too_long_is_abandoned(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with replica_under_test(
        store, tmp_path, ScriptedEngine(token_s=0.002), generation_timeout_s=0.3, lease_s=0.9
    ) as rollout:
        rollout.engine.hold = True
        rollout.admit(1)
        await rollout.publish(1)
        over = await until(lambda: rollout.store.ledger.reap([]))
        assert over[0].error == f"{CONSUMER}: not sampled within 0.3 s (rollout.generation_timeout_s)"


async def test_a_dead_engine_ends_the_loop(rollout: ReplicaUnderTest) -> None:
    rollout.engine.sample_failures[f"0/1:{CONSUMER}-1"] = WorkerLostError("the engine died")
    rollout.admit(1)
    await rollout.publish(1)
    with pytest.raises(WorkerLostError):
        async with asyncio.timeout(30):
            await rollout.pulling


async def test_the_worker_says_what_it_is_doing(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    await rollout.publish(1)
    rollout.admit(1)
    await rollout.runs(4)
    await until(lambda: "generating 1 groups" in rollout.phases)
    assert "weights empty" in rollout.phases
    assert "idle" in rollout.phases


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=lambda cut: next(iter(cut)))
async def test_admission_with_a_sampling_that_training_does_not_know_is_not_sampled(
    rollout: ReplicaUnderTest, cut: dict[str, Any]
) -> None:
    group = trajectory_pb2.PromptGroup(
        gid=0,
        prompt=trajectory_pb2.Prompt(uid="u", token_ids=np.array(PROMPT, dtype="<i4").tobytes()),
        num_responses=2,
        sampling=trajectory_pb2.SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 4} | cut),
    )
    assert rollout.store.ledger.admit(group, b"")
    rollout.admit(1)
    await rollout.publish(1)
    assert [committed.gid for committed in await rollout.committed(1)] == [1]
