"""The ledger as a whole, model-checked against a real server: random calls of controllers, workers and zombies, lost answers, kill -9 of the server.

The model is a few dictionaries. After every move: admitted = trained + dropped + live, each entry has exactly the owner the model says, each group is
committed at most once, the streams are as long as the states say. Planted violations show that the checks would see one.
"""

import os
import signal
import time
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from rolecall.errors import FencedError, LeaseLostError, NotAttestedError, RowMissingError
from rolecall.store.connection import Connection
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.position import GroupState
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import CommittedGroup, TrainBatch, TrajectoryMeta
from tests.fixtures_store import DIGEST, ForgetfulRedis, sample_group

WORKERS = ("r.0", "r.1", "r.2")
MAX_DELIVERIES = 3
workers = st.sampled_from(WORKERS)


class LedgerMachine(RuleBasedStateMachine):
    """One run on `server`, and what it should hold."""

    def __init__(self, server: EmbeddedStore) -> None:
        super().__init__()
        self.server = server
        client = ForgetfulRedis.from_url(server.url, protocol=2)
        assert isinstance(client, ForgetfulRedis)
        self.client = client
        self.connection = Connection(client)
        self.run = f"machine-{uuid.uuid4().hex[:8]}"
        self.rows = Rows(self.connection, self.run, 2)
        self.controllers: list[Ledger] = []
        self.state: dict[int, str] = {}
        self.owner: dict[int, str] = {}
        self.tokens: set[tuple[int, str]] = set()
        self.deliveries: dict[int, int] = {}
        self.delivered: set[int] = set()
        self.claims: list[Claim] = []
        self.groups: dict[int, CommittedGroup] = {}
        self.attested: set[str] = set()
        self.version = -1
        self.step = 0
        self.sealed: list[int] = []

    @property
    def ledger(self) -> Ledger:
        return self.controllers[-1]

    def teardown(self) -> None:
        self.client.close()

    @initialize()
    def first_controller(self) -> None:
        self.controllers.append(Ledger(self.connection, self.run))
        self.ledger.lock(0.05)
        self.admit(3)
        self.publish(set(WORKERS), True)

    def in_state(self, *states: str) -> list[int]:
        return [gid for gid, state in self.state.items() if state in states]

    # --- the controller -----------------------------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        for _ in range(count):
            gid = len(self.state)
            self.ledger.admit(sample_group(gid, 1), str(gid).encode())
            self.state[gid] = "admitted"

    @precondition(lambda self: self.state)
    @rule()
    def admit_again(self) -> None:
        assert not self.ledger.admit(sample_group(len(self.state) - 1, 1), b"again")

    @rule(fleet=st.sets(workers, min_size=2), finish=st.sampled_from([True, True, True, False]))
    def publish(self, fleet: set[str], finish: bool) -> None:
        self.version += 1
        self.ledger.begin_publish(self.version, self.step)
        self.attested = set()
        if finish:
            self.ledger.attest(self.version, self.step, DIGEST, sorted(fleet))
            self.attested = fleet

    @rule(worker=workers, excused=st.booleans())
    def expel(self, worker: str, excused: bool) -> None:
        over = self.ledger.expel(worker, MAX_DELIVERIES, excused)
        self.attested.discard(worker)
        for gid, token in self.owner.items():
            self.deliveries[gid] -= excused and token.startswith(f"{worker}-")
        self.owner = {gid: token for gid, token in self.owner.items() if not token.startswith(f"{worker}-")}
        for gid in over:
            self.ledger.drop(gid, "poison", "delivered too often")
            assert self.state[gid] == "admitted"
            self.state[gid] = "dropped"

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        consumer = claim.token.rpartition("-")[0]
        self.ledger.reap(consumer, claim.entry_id)
        if self.owner.get(claim.group.gid, "").startswith(f"{consumer}-"):
            del self.owner[claim.group.gid]

    @precondition(lambda self: self.in_state("admitted", "committed", "dropped", "trained"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        gid = data.draw(st.sampled_from(self.in_state("admitted", "committed", "dropped", "trained")))
        self.ledger.drop(gid, "filtered")
        if self.state[gid] in ("admitted", "committed"):
            self.state[gid] = "dropped"
            self.owner.pop(gid, None)

    @precondition(lambda self: not self.sealed and self.in_state("committed"))
    @rule(count=st.integers(1, 3))
    def seal(self, count: int) -> None:
        self.sealed = self.in_state("committed")[:count]
        rows = [row for gid in self.sealed for row in self.groups[gid].rows]
        self.ledger.seal(TrainBatch(step=self.step, digest=f"batch {self.step}", rows=rows, gids=self.sealed))
        for gid in self.sealed:
            self.state[gid] = "sealed"

    @precondition(lambda self: self.sealed)
    @rule()
    def commit_step(self) -> None:
        batch = self.ledger.sealed(self.step)
        assert batch is not None
        assert list(batch.gids) == self.sealed
        assert len(self.rows.read(batch.rows, ["token_ids"])) == len(batch.rows), "what is trained must be there"
        self.ledger.commit_step(self.step, [])
        for gid in self.sealed:
            self.state[gid] = "trained"
        self.step, self.sealed = self.step + 1, []

    @rule()
    def sweep(self) -> None:
        self.ledger.sweep(self.rows, self.step)
        for gid in self.in_state("dropped", "trained"):
            if gid in self.groups:
                with pytest.raises(RowMissingError):
                    self.rows.read_meta(self.groups[gid].rows)

    @rule()
    def replace_the_controller(self) -> None:
        self.ledger.unlock()
        self.controllers.append(Ledger(self.connection, self.run))
        assert self.ledger.lock(5.0) == len(self.controllers)

    @precondition(lambda self: len(self.controllers) > 1)
    @rule(data=st.data(), gid=st.integers(0, 5))
    def replaced_controller_wakes_up(self, data: st.DataObject, gid: int) -> None:
        old = data.draw(st.sampled_from(self.controllers[:-1]))
        calls: list[Callable[[], object]] = [
            lambda: old.drop(gid, "late"),
            lambda: old.commit_step(self.step, []),
            lambda: old.admit(sample_group(len(self.state), 1), b""),
            lambda: old.expel("r.0"),
        ]
        with pytest.raises(FencedError):
            data.draw(st.sampled_from(calls))()

    # --- the workers --------------------------------------------------------------------------------------------------------------------------------

    @rule(worker=workers, count=st.integers(1, 4))
    def claim(self, worker: str, count: int) -> None:
        queue = PromptQueue(self.connection, self.run, worker)
        if worker not in self.attested:
            with pytest.raises(NotAttestedError):
                queue.claim(count)
            return
        expected = self.handed_out(worker, count)
        claims = queue.claim(count)
        assert [claim.group.gid for claim in claims] == expected
        for claim in claims:
            gid = claim.group.gid
            self.deliveries[gid] = self.deliveries.get(gid, 0) + 1
            self.delivered.add(gid)
            assert claim.deliveries == self.deliveries[gid]
            assert (gid, claim.token) not in self.tokens, "a token was issued twice"
            self.tokens.add((gid, claim.token))
            self.owner[gid] = claim.token
            self.claims.append(claim)

    def handed_out(self, worker: str, count: int) -> list[int]:
        """Released groups first, then new ones, in order; one delivered before only alone."""
        mine = [gid for gid, token in self.owner.items() if token.startswith(f"{worker}-")]
        if any(self.deliveries[gid] > 1 for gid in mine):
            return []
        free = [gid for gid in self.in_state("admitted") if gid not in self.owner]
        found: list[int] = []
        for gid in sorted(free, key=lambda gid: (gid not in self.delivered, gid)):
            if self.deliveries.get(gid, 0) == 0:
                found.append(gid)
            elif not mine and not found:
                return [gid]
        return found[:count]

    def owns(self, claim: Claim) -> bool:
        return self.owner.get(claim.group.gid) == claim.token

    def queue_of(self, claim: Claim) -> PromptQueue:
        return PromptQueue(self.connection, self.run, claim.token.rpartition("-")[0])

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        assert self.queue_of(claim).renew([claim]) == ([] if self.owns(claim) else [claim])

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.queue_of(claim).release([claim])
        if self.owns(claim):
            del self.owner[claim.group.gid]
            self.deliveries[claim.group.gid] -= 1

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(self.claims)))

    def commit_one(self, claim: Claim) -> None:
        gid = claim.group.gid
        ref = self.rows.ref(f"{gid}/0", claim.token, 1)
        group = CommittedGroup(gid=gid, rows=[ref])
        if self.owns(claim):
            self.rows.stage(ref, {"token_ids": np.zeros(1, np.int32)}, TrajectoryMeta(), 60)
            self.queue_of(claim).commit(claim, group, {(0, DIGEST)})
            self.rows.persist([ref])
            self.state[gid], self.groups[gid] = "committed", group
            del self.owner[gid]
        elif self.state[gid] in ("committed", "sealed") and self.groups[gid] == group:
            assert not self.queue_of(claim).commit(claim, group, set())
        elif self.state[gid] != "trained":
            with pytest.raises(LeaseLostError):
                self.queue_of(claim).commit(claim, group, set())

    # --- what fails ---------------------------------------------------------------------------------------------------------------------------------

    @rule()
    def lose_the_next_answer(self) -> None:
        self.client.lose = 1

    @rule(data=st.data())
    def kill_the_server(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)) == 0:  # a restart costs as much as a hundred other moves
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGKILL)
            while self.server.alive:
                time.sleep(0.002)
            self.server.start()

    # --- what must hold -----------------------------------------------------------------------------------------------------------------------------

    def check_all(self) -> None:
        self.the_ledger_is_as_the_model_says()
        self.every_entry_has_the_one_owner_the_model_says()
        self.every_group_is_committed_once()

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        if not self.controllers:
            return
        snapshot = self.ledger.snapshot()
        counts, position = snapshot.counts, snapshot.position
        assert counts.admitted == len(self.state) == counts.trained + sum(counts.dropped.values()) + counts.live
        assert (counts.trained, position.step) == (len(self.in_state("trained")), self.step)
        assert {group.gid: group.state for group in snapshot.groups} == {
            gid: GroupState(self.state[gid]) for gid in self.in_state("admitted", "committed", "sealed")
        }
        assert (counts.queued + counts.generating, counts.committed) == (len(self.in_state("admitted")), len(self.in_state("committed", "sealed")))

    @invariant()
    def every_entry_has_the_one_owner_the_model_says(self) -> None:
        if not self.controllers:
            return
        gids = {group.entry_id: group.gid for group in self.ledger.snapshot().groups}
        assert {gids[entry.entry_id]: f"{entry.consumer}-{entry.delivery}" for entry in self.ledger.pending()} == self.owner

    @invariant()
    def every_group_is_committed_once(self) -> None:
        if not self.controllers:
            return
        committed = [group.gid for _, group in self.ledger.read_committed("0", 1000, 0)]
        assert sorted(committed) == sorted(self.in_state("committed", "sealed"))


def unfenced_renewal(machine: LedgerMachine) -> None:
    """A zombie renews without naming its token, and so steals its entry back."""
    machine.claim("r.0", 1)
    machine.expel("r.0", False)
    machine.client.xclaim(f"{{rl:{machine.run}}}:prompts", "rollout", "r.0", 0, [machine.claims[0].entry_id], justid=True)


def deleting_first(machine: LedgerMachine) -> None:
    """A dead worker's consumer is deleted before its entries are handed back."""
    machine.claim("r.0", 1)
    machine.connection.command("XGROUP", "DELCONSUMER", f"{{rl:{machine.run}}}:prompts", "rollout", "r.0")
    machine.expel("r.0", False)
    machine.claim("r.1", 3)


def commit_twice(machine: LedgerMachine) -> None:
    """A commit that is a bare XADD: when its answer is lost, another follows."""
    machine.claim("r.0", 1)
    machine.commit_one(machine.claims[0])
    group = machine.groups[0]
    machine.connection.command("XADD", f"{{rl:{machine.run}}}:trajectories", "*", "gid", group.gid, "group", group.SerializeToString())


def uncounted_drop(machine: LedgerMachine) -> None:
    """A group leaves the ledger without being counted."""
    machine.connection.command("ZREM", f"{{rl:{machine.run}}}:live", 0)


def planted_and_checked(plant: Callable[[LedgerMachine], None], machine: LedgerMachine) -> None:
    plant(machine)
    machine.check_all()


@pytest.fixture
def machine_server(make_embedded_store: Callable[..., EmbeddedStore]) -> EmbeddedStore:
    server = make_embedded_store(run="*")
    server.start()
    return server


def test_the_ledger_keeps_its_promises_whatever_happens(machine_server: EmbeddedStore) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(machine_server),  # type: ignore[arg-type]
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None),
    )


@pytest.mark.parametrize("plant", [unfenced_renewal, deleting_first, commit_twice, uncounted_drop])
def test_the_checks_see_a_planted_violation(machine_server: EmbeddedStore, plant: Callable[[LedgerMachine], None]) -> None:
    machine = LedgerMachine(machine_server)
    machine.first_controller()
    machine.check_all()
    with pytest.raises(AssertionError):
        planted_and_checked(plant, machine)
    machine.teardown()
