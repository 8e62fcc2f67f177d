"""Claims of the pull loop against a real store: renewed, lost, claimed again, answered late, given back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path

import pytest

from rolecall.errors import (
    StoreFullError,
    UnavailableError,
)
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from rolecall.wire import Array
from services.rollout.scripted import ScriptedEngine
from tests.contract.rollout_replica import CONSUMER, ReplicaUnderTest, replica_under_test
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until


@pytest.fixture
async def rollout(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[ReplicaUnderTest]:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.002), lease_s=0.9) as running:
        yield running


class SlowQueue(PromptQueue):
    """A queue whose first answer to `slow` that says something is on its way until the test lets it arrive; the entry
    is claimed again meanwhile.
    """

    def __init__(self, store: StoreUnderTest, slow: str) -> None:
        super().__init__(store.connection, store.run, CONSUMER)
        self._slow = slow
        self._num_claimed = 0
        self.acted = threading.Event()
        self.arrives = threading.Event()

    def claim(self, max_groups: int, places: Mapping[str, int] = {}) -> list[Claim]:
        if self._num_claimed and not self.acted.is_set():
            return []
        claims = super().claim(max_groups, places)
        self._num_claimed += len(claims)
        return claims

    def wait(self, timeout_s: float) -> bool:
        return super().wait(0.02)

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        lost = super().renew(claims)
        self._travel("renew", bool(lost))
        return lost

    def release(self, claims: Sequence[Claim], why: str = "") -> int:
        released = super().release(claims, why)
        self._travel("release", bool(released))
        return released

    def _travel(self, call: str, awaited: bool) -> None:
        if call == self._slow and awaited and not self.acted.is_set():
            self.acted.set()
            assert self.arrives.wait(20)


async def until_claimed_again(rollout: ReplicaUnderTest) -> None:
    """Group 0 is in this worker's hands for the second time, and sampled."""
    await until(lambda: [entry.delivery for entry in rollout.store.ledger.pending()] == [2])
    await rollout.runs(4)


async def until_renewed(rollout: ReplicaUnderTest) -> None:
    (before,) = rollout.store.ledger.pending()
    await until(lambda: rollout.store.ledger.pending()[0].renewed_at_s != before.renewed_at_s)


async def reap(store: StoreUnderTest) -> None:
    """Takes the one entry from its worker, also when that renews it meanwhile."""

    def is_taken() -> bool:
        store.ledger.reap(store.ledger.pending())
        return (CONSUMER, 1) not in [(entry.consumer, entry.delivery) for entry in store.ledger.pending()]

    await until(is_taken)


async def commits_the_second_attempt(rollout: ReplicaUnderTest) -> None:
    """It is renewed, and ends as any other."""
    for _ in range(2):
        await until_renewed(rollout)
    await until(lambda: rollout.pull.num_groups == 1)
    rollout.engine.hold = False
    (committed,) = await rollout.committed(1)
    assert {row.token for row in committed.rows} == {f"{CONSUMER}-2"}
    async with asyncio.timeout(30):
        while (await rollout.info()).num_groups:
            await asyncio.sleep(0.01)
    assert not rollout.pulling.done()
    assert rollout.store.balance() == (1, 0, 0, 1)


async def test_a_worker_that_claims_its_own_lost_group_again_goes_on_with_the_new_claim(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """It claims within a second, and would hear of the loss by its next renewal, a second and a half after the last."""
    write_tokenizer(tmp_path)
    async with replica_under_test(
        store, tmp_path, ScriptedEngine(token_s=0.002), lease_s=4.5, generation_timeout_s=60.0
    ) as rollout:
        rollout.engine.hold = True
        rollout.admit(1)
        await rollout.publish(1)
        await rollout.runs(4)
        await until_renewed(rollout)
        await reap(store)
        await until_claimed_again(rollout)
        await commits_the_second_attempt(rollout)


@pytest.mark.parametrize("slow", ["renew", "release"])
async def test_a_late_answer_about_a_lost_claim_does_not_touch_the_new_one(
    store: StoreUnderTest, tmp_path: Path, slow: str
) -> None:
    """The answer that says that the first claim is lost, or given back, arrives when the worker holds the same entry
    again.
    """
    write_tokenizer(tmp_path)
    queue = SlowQueue(store, slow)
    async with replica_under_test(
        store, tmp_path, ScriptedEngine(token_s=0.002), lease_s=0.9, generation_timeout_s=60.0, queue=queue
    ) as rollout:
        rollout.engine.hold = True
        if slow == "release":
            rollout.engine.sample_failures[f"0/2:{CONSUMER}-1"] = UnavailableError("given up with the weights")
            rollout.engine.step(1)
        rollout.admit(1)
        await rollout.publish(1)
        if slow == "renew":
            await rollout.runs(4)
            await reap(store)
        assert await asyncio.to_thread(queue.acted.wait, 20)
        await until_claimed_again(rollout)
        queue.arrives.set()
        await commits_the_second_attempt(rollout)


class FullRows(Rows):
    """Rows of a store that has no room until the test makes some."""

    def __init__(self, store: StoreUnderTest) -> None:
        super().__init__(store.connection, store.run, 2)
        self.is_full = True
        self.num_refused = 0

    def stage_many(
        self,
        refs: Sequence[RowRef],
        columns: Sequence[Mapping[str, Array]],
        metas: Sequence[TrajectoryMeta],
        expiry_s: int,
    ) -> None:
        if self.is_full:
            self.num_refused += 1
            raise StoreFullError("OOM command not allowed")
        super().stage_many(refs, columns, metas, expiry_s)


async def test_a_group_that_finds_the_store_full_is_not_charged_for_the_wait(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """It is given back, excused, as often as it takes; what was sampled in time is not called late."""
    write_tokenizer(tmp_path)
    rows = FullRows(store)
    async with replica_under_test(
        store, tmp_path, ScriptedEngine(), generation_timeout_s=0.4, lease_s=0.9, rows=rows
    ) as rollout:
        rollout.admit(1)
        await rollout.publish(1)
        await until(lambda: any(entry.delivery > 4 for entry in store.ledger.pending()))
        assert not store.ledger.reap([])
        rows.is_full = False
        (committed,) = await rollout.committed(1)
        assert rows.num_refused >= 4
        assert committed.rows[0].token > f"{CONSUMER}-4"


async def test_leases_are_renewed_while_a_group_is_worked_on(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(1)
    await rollout.publish(1)
    await rollout.runs(4)
    (first,) = rollout.store.ledger.pending()
    await until(lambda: rollout.store.ledger.pending()[0].renewed_at_s >= first.renewed_at_s + 1.5)
    (entry,) = rollout.store.ledger.pending()
    assert (entry.consumer, entry.delivery) == (first.consumer, first.delivery)
    rollout.engine.hold = False
    await rollout.committed(1)


async def test_a_lost_lease_stops_the_work(rollout: ReplicaUnderTest) -> None:
    rollout.engine.hold = True
    rollout.admit(1)
    await rollout.publish(1)
    await rollout.runs(4)
    rollout.store.ledger.drop(0, "test")
    await rollout.runs(0)
    assert rollout.store.balance() == (1, 0, 1, 0)


class LateQueue(PromptQueue):
    """Its commits answer at the second renewal after them: the first has found the lease gone, as a commit leaves
    it.
    """

    def __init__(self, store: StoreUnderTest) -> None:
        super().__init__(store.connection, store.run, CONSUMER)
        self._num_lost = 0
        self._committed, self._told = threading.Event(), threading.Event()

    def commit(self, claim: Claim, group: trajectory_pb2.CommittedGroup, spans: Collection[tuple[int, str]]) -> bool:
        done = super().commit(claim, group, spans)
        self._committed.set()
        assert self._told.wait(20)
        return done

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        if self._num_lost:
            self._told.set()
        has_committed = self._committed.is_set()
        lost = super().renew(claims)
        self._num_lost += has_committed and len(lost)
        return lost


class NotedRows(Rows):
    """Says when rows are persisted."""

    def __init__(self, store: StoreUnderTest, num_shards: int) -> None:
        super().__init__(store.connection, store.run, num_shards)
        self.persisted = threading.Event()

    def persist(self, refs: Sequence[RowRef]) -> None:
        super().persist(refs)
        self.persisted.set()


async def test_a_lease_that_ends_because_the_group_is_committed_does_not_end_the_commit(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    rows = NotedRows(store, 2)
    async with replica_under_test(
        store, tmp_path, ScriptedEngine(token_s=0.002), lease_s=0.9, queue=LateQueue(store), rows=rows
    ) as rollout:
        rollout.admit(1)
        await rollout.publish(1)
        assert await asyncio.to_thread(rows.persisted.wait, 20), "its rows wait for a controller to lift their expiry"


class HeldClaims(PromptQueue):
    """Its first claims arrive when the test lets them."""

    def __init__(self, store: StoreUnderTest) -> None:
        super().__init__(store.connection, store.run, CONSUMER)
        self.acted, self.arrives = threading.Event(), threading.Event()

    def claim(self, max_groups: int, places: Mapping[str, int] = {}) -> list[Claim]:
        claims = super().claim(max_groups, places)
        if claims and not self.acted.is_set():
            self.acted.set()
            assert self.arrives.wait(20)
        return claims


async def test_what_is_claimed_while_the_gate_shuts_is_given_back_for_others_to_start(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    queue = HeldClaims(store)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.002), queue=queue) as rollout:
        rollout.admit(1)
        await rollout.publish(1)
        assert await asyncio.to_thread(queue.acted.wait, 20)
        await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
        assert [entry.consumer for entry in store.ledger.pending()] == [CONSUMER]
        queue.arrives.set()
        await until(lambda: CONSUMER not in [entry.consumer for entry in store.ledger.pending()])
