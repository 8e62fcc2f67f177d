"""The ledger and a model of it, played against each other: random calls of controllers, workers and zombies, through
checkpoints and new lineages, while answers are lost, old calls arrive again, the server is killed (kill -9) or stands
still, and its clock jumps.
What must hold after every move is said in ledger_model.py.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from rolecall.errors import FencedError, LeaseLostError, NotAttestedError
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.position import SuccessRate
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.v1.training_pb2 import TrainResult
from rolecall.v1.trajectory_pb2 import CommittedGroup, TrainBatch, TrajectoryMeta
from tests.fixtures_store import DIGEST, sample_group
from tests.integration.ledger_model import Checkpoint, LedgerModel, environment_of

WORKERS = ("r.0", "r.1", "r.2")
MAX_DELIVERIES = 3
EXPIRY_S = 60
workers = st.sampled_from(WORKERS)
few = st.integers(0, 2)
rooms = st.dictionaries(st.sampled_from(["", "game", "tools"]), few) | st.dictionaries(
    st.sampled_from(["", "game,tools"]), few
)


class LedgerMachine(LedgerModel):
    """The moves of controllers, workers, zombies and misfortune, each made on the ledger and on its model."""

    @initialize()
    def first_controller(self) -> None:
        self.controllers.append(Ledger(self.connection, self.run))
        self.ledger.lock(0.05)
        self.admit(3)
        self.publish(set(WORKERS), True)

    # --- the controller ---------------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        for _ in range(count):
            gid = len(self.state)
            self.ledger.admit(sample_group(gid, 1, environment=environment_of(gid)), str(gid).encode())
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
        over = self.ledger.expel(worker, MAX_DELIVERIES, excused, "it died")
        self.connection.forget_calls("claim", worker)  # it forgot which was the last; what such a claim takes is reaped
        self.connection.forget_calls("attest")  # a worker that was expelled for its silence may be attested again
        self.attested.discard(worker)
        held = self.held_by(worker)
        for gid in held:
            del self.owner[gid]
            if excused:
                self.deliveries[gid] -= 1
            else:
                self.company[gid] = math.ceil(len(held) / 4)
        for gid, error in over:
            assert error
            self.drop_poison(gid)

    def drop_poison(self, gid: int) -> None:
        self.ledger.drop(gid, "poison", "delivered too often")
        assert self.state[gid] == "admitted"
        self.state[gid] = "dropped"

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        consumer = claim.token.rpartition("-")[0]
        taken = [
            entry for entry in self.ledger.pending() if (entry.consumer, entry.entry_id) == (consumer, claim.entry_id)
        ]
        for gid, _ in self.ledger.reap(taken, MAX_DELIVERIES, "not renewed"):
            self.drop_poison(gid)
        if taken:
            self.company[claim.group.gid] = math.ceil(len(self.held_by(consumer)) / 4)
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
        self.ledger.seal(TrainBatch(step=self.step, digest=f"{self.step} {self.sealed}", rows=rows, gids=self.sealed))
        for gid in self.sealed:
            self.state[gid] = "sealed"

    @precondition(lambda self: self.sealed)
    @rule()
    def commit_step(self) -> None:
        batch = self.ledger.sealed(self.step)
        assert batch is not None
        assert list(batch.gids) == self.sealed
        assert len(self.rows.read(batch.rows, ["token_ids"])) == len(batch.rows), "what is trained must be there"
        self.algorithm_state = f"after {self.algorithm_state.decode()[-20:]} {self.sealed}".encode()
        self.ledger.commit_step(self.step, [TrainResult(step=self.step, digest=batch.digest)], self.algorithm_state)
        for gid in self.sealed:
            self.state[gid] = "trained"
        self.step, self.sealed = self.step + 1, []

    @precondition(lambda self: not self.sealed and self.in_state("committed"))
    @rule(count=st.integers(1, 3))
    def whole_step(self, count: int) -> None:
        self.seal(count)
        self.commit_step()

    @precondition(lambda self: self.in_state("committed"))
    @rule(data=st.data(), value=st.integers(1, 9))
    def score(self, data: st.DataObject, value: int) -> None:
        refs = self.groups[data.draw(st.sampled_from(self.in_state("committed")))].rows
        before = self.rows.read(refs, [], ["reward"])[0].get("reward", np.array([value], np.float32))
        self.rows.put(refs, [{"reward": np.array([value], np.float32)}])
        assert self.rows.read(refs, ["reward"])[0]["reward"] == before, "a column is written once"

    @rule(uid=st.sampled_from(["prompt-0", "prompt-1"]), gid=st.integers(0, 9), value=st.floats(0, 1))
    def rate(self, uid: str, gid: int, value: float) -> None:
        self.ledger.rate(uid, SuccessRate(gid, value))
        if uid not in self.rates or self.rates[uid].gid < gid:
            self.rates[uid] = SuccessRate(gid, value)

    @rule()
    def drain(self) -> None:
        self.ledger.drain("history", self.folder / "history.jsonl")

    @rule()
    def checkpoint(self) -> None:
        terminal = {gid: self.state[gid] for gid in self.in_state("trained", "dropped")}
        self.checkpoints.append(Checkpoint(self.ledger.position(), terminal))
        self.ledger.drain("history", self.folder / "history.jsonl")

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def go_back_to_a_checkpoint(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.checkpoints) - 1))
        del self.checkpoints[number + 1 :]
        point = self.checkpoints[number].position
        self.lineage += 1
        first = self.ledger.start_lineage(point.__class__(**{**vars(point), "lineage": self.lineage}))
        assert first == len(self.state), "gids are never used again"
        self.state = {gid: self.checkpoints[number].terminal.get(gid, "undone") for gid in self.state}
        self.owner, self.sealed, self.attested = {}, [], set()
        self.step, self.algorithm_state, self.version = point.step, point.algorithm_state, self.version + 1

    @rule()
    def sweep(self) -> None:
        self.ledger.sweep(self.rows, self.step)
        for gid in self.in_state("dropped", "trained", "undone"):
            if gid in self.groups:
                assert -1 not in self.lives(self.groups[gid].rows), (
                    "its rows are gone; what a zombie stages again expires"
                )

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

    # --- the workers ------------------------------------------------------------------------------

    @rule(worker=workers, count=st.integers(1, 4), places=rooms)
    def claim(self, worker: str, count: int, places: Mapping[str, int] = {}) -> None:
        queue = PromptQueue(self.connection, self.run, worker)
        if worker not in self.attested:
            with pytest.raises(NotAttestedError):
                queue.claim(count, places)
            del self.connection.calls[-1]  # a refusal leaves no trace: if it came again, its groups would be reaped
            return
        expected = self.handed_out(worker, count, places)
        claims = queue.claim(count, places)
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

    def work(self, worker: str) -> None:
        """Most of the time most things go well."""
        if worker in self.attested:
            before = len(self.claims)
            self.claim(worker, 2)
            for claim in self.claims[before:]:
                self.commit_one(claim)

    @rule(worker=workers)
    def die_at_work(self, worker: str) -> None:
        if worker in self.attested:
            self.claim(worker, 2)
            self.expel(worker, False)

    work_well = rule(worker=workers)(work)
    work_still = rule(worker=workers)(work)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        assert self.queue_of(claim).renew([claim]) == ([] if self.owns(claim) else [claim])

    def lost_claims(self) -> list[Claim]:
        """Of groups that nobody has committed yet."""
        return [claim for claim in self.claims if self.state[claim.group.gid] == "admitted" and not self.owns(claim)]

    @precondition(lambda self: self.lost_claims())
    @rule(data=st.data())
    def zombie_wakes_up(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.lost_claims()))
        assert self.queue_of(claim).renew([claim]) == [claim]
        assert self.queue_of(claim).release([claim]) == 0
        assert not self.queue_of(claim).abandon(claim, "too late")
        self.commit_one(claim)

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
    def abandon(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.queue_of(claim).abandon(claim, "it failed", MAX_DELIVERIES)
        if self.owns(claim):
            del self.owner[claim.group.gid]
            for gid, _ in self.ledger.reap([]):
                self.drop_poison(gid)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(self.claims)))

    def commit_one(self, claim: Claim) -> None:
        gid = claim.group.gid
        ref = self.rows.ref(f"{gid}/0", claim.token, 1)
        group = CommittedGroup(gid=gid, rows=[ref])
        if self.owns(claim):
            self.rows.stage(ref, {"token_ids": np.zeros(1, np.int32)}, TrajectoryMeta(), EXPIRY_S)
            self.queue_of(claim).commit(claim, group, {(0, DIGEST)})
            self.rows.persist([ref])
            self.state[gid], self.groups[gid] = "committed", group
            del self.owner[gid]
        elif self.state[gid] in ("committed", "sealed") and self.groups[gid] == group:
            assert not self.queue_of(claim).commit(claim, group, set())
        elif self.state[gid] != "trained":
            self.rows.stage(ref, {"token_ids": np.ones(1, np.int32)}, TrajectoryMeta(), EXPIRY_S)
            with pytest.raises(LeaseLostError):
                self.queue_of(claim).commit(claim, group, set())

    # --- what fails -------------------------------------------------------------------------------

    @rule()
    def lose_the_next_answer(self) -> None:
        self.client.lose = 1

    @precondition(lambda self: self.connection.calls)
    @rule(data=st.data())
    def the_network_delivers_an_old_call_again(self, data: st.DataObject) -> None:
        """Nobody waits for the answer any more. Whatever the call was, it must change nothing."""
        self.connection.send_again(data.draw(st.sampled_from(self.connection.calls)))

    @rule(data=st.data())
    def kill_the_server(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)) == 0:  # a restart costs as much as a hundred other moves
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGKILL)
            while self.server.alive:
                time.sleep(0.002)
            self.server.start()

    @rule(data=st.data())
    def the_server_stands_still(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)) == 0:
            with standing_still(self.server, 0.03):
                self.ledger.beat()

    @rule(idle_ms=st.sampled_from([0, 10**9]))
    def the_clock_jumps(self, idle_ms: int) -> None:
        """Every idle time is suddenly this long. (The server's own clock cannot be moved.)"""
        for entry in self.ledger.pending():
            self.client.xclaim(
                f"{{rl:{self.run}}}:prompts", "rollout", entry.consumer, 0, [entry.entry_id], idle=idle_ms, justid=True
            )


@contextmanager
def standing_still(server: EmbeddedStore, seconds: float) -> Iterator[None]:
    """The server is stopped (SIGSTOP) at the start of the block, and goes on after `seconds`."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    waking = threading.Timer(seconds, os.kill, [server.pid, signal.SIGCONT])
    waking.start()
    try:
        yield
    finally:
        waking.join()
