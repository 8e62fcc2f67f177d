"""A model of the ledger, a few dictionaries, and what must hold between both.

After every move: admitted = trained + dropped + live, each entry has exactly the owner the model says, each group is
committed at most once, the streams are as long as the states say. Now and then, and at the end, the audit finds
nothing.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
)

from rolecall.store.audit import audit
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.position import GroupState, RunPosition, Snapshot, SuccessRate
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef
from tests.fixtures_store import ForgetfulRedis
from tests.integration.replayed_calls import ReplayedConnection


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: the ledger's position and, of the model, the groups that were terminal."""

    position: RunPosition
    terminal: Mapping[int, str]


def environment_of(gid: int) -> str:
    """The environment that a group is played in; a third of them in none."""
    return ("", "game", "tools")[gid % 3]


class LedgerModel(RuleBasedStateMachine):
    """One run on `server`, and what it should hold."""

    def __init__(self, server: EmbeddedStore, folder: Path, variants: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.server = server
        self.folder = folder / uuid.uuid4().hex[:8]
        self.folder.mkdir()
        client = ForgetfulRedis.from_url(server.url, protocol=2)
        assert isinstance(client, ForgetfulRedis)
        self.client = client
        self.connection = ReplayedConnection(client, variants or {})
        self.run = f"machine-{uuid.uuid4().hex[:8]}"
        self.rows = Rows(self.connection, self.run, 2)
        self.controllers: list[Ledger] = []
        self.state: dict[int, str] = {}
        self.owner: dict[int, str] = {}
        self.tokens: set[tuple[int, str]] = set()
        self.deliveries: dict[int, int] = {}
        self.delivered: set[int] = set()
        self.company: dict[int, int] = {}
        self.claims: list[Claim] = []
        self.groups: dict[int, CommittedGroup] = {}
        self.attested: set[str] = set()
        self.version = -1
        self.step = 0
        self.algorithm_state = b""
        self.rates: dict[str, SuccessRate] = {}
        self.sealed: list[int] = []
        self.lineage = 0
        self.checkpoints: list[Checkpoint] = []

    @property
    def ledger(self) -> Ledger:
        return self.controllers[-1]

    def teardown(self) -> None:
        try:
            if self.controllers:
                self.client.lose = 0
                self.the_audit_finds_nothing()
        finally:
            self.client.close()

    def in_state(self, *states: str) -> list[int]:
        return [gid for gid, state in self.state.items() if state in states]

    def held_by(self, worker: str) -> list[int]:
        return [gid for gid, token in self.owner.items() if token.startswith(f"{worker}-")]

    def handed_out(self, worker: str, count: int, places: Mapping[str, int]) -> list[int]:
        """Released groups first, then new ones, in order; one whose worker died only beside as many as its company may
        be, and one that is played only while its environment has places: a new one is passed over as if released.
        """
        free = [gid for gid in self.in_state("admitted") if gid not in self.owner]
        in_hand, found = self.held_by(worker), list[int]()
        for gid in sorted(free, key=lambda gid: (gid not in self.delivered, gid)):
            bounds = [self.company[each] for each in (*in_hand, gid) if each in self.company]
            if len(found) == count or len(in_hand) >= min(bounds, default=math.inf):
                continue
            played_in = environment_of(gid)
            sharing, bound = next(
                ((names.split(","), most) for names, most in places.items() if played_in in names.split(",")),
                ([], math.inf),
            )
            if sum(environment_of(each) in sharing for each in found) < bound:
                found.append(gid)
                in_hand.append(gid)
            else:
                self.delivered.add(gid)
        return found

    def owns(self, claim: Claim) -> bool:
        return self.owner.get(claim.group.gid) == claim.token

    def queue_of(self, claim: Claim) -> PromptQueue:
        return PromptQueue(self.connection, self.run, claim.token.rpartition("-")[0])

    def lives(self, refs: Sequence[RowRef]) -> set[int]:
        """Seconds that rows have to live, -1 for ever, -2 gone."""
        return {
            self.connection.command("TTL", f"{{rl:{self.run}:{ref.shard}}}:row:{ref.id}:{ref.token}") for ref in refs
        }

    @rule()
    def the_audit_finds_nothing(self) -> None:
        assert audit(self.connection, self.run, self.folder).problems == ()
        kept = [ref for gid in self.in_state("committed", "sealed") for ref in self.groups[gid].rows]
        assert self.lives(kept) <= {-1}

    @invariant()
    def check_all(self) -> None:
        if self.controllers:
            snapshot = self.ledger.snapshot()
            self.the_ledger_is_as_the_model_says(snapshot)
            self.every_entry_has_the_one_owner_the_model_says(snapshot)
            self.every_group_is_committed_once()

    def the_ledger_is_as_the_model_says(self, snapshot: Snapshot) -> None:
        counts, position = snapshot.counts, snapshot.position
        assert (
            counts.admitted
            == len(self.state) - len(self.in_state("undone"))
            == counts.trained + sum(counts.dropped.values()) + counts.live
        )
        assert (counts.trained, position.step) == (len(self.in_state("trained")), self.step)
        assert position.algorithm_state == self.algorithm_state
        assert self.ledger.rates() == self.rates
        assert {group.gid: group.state for group in snapshot.groups} == {
            gid: GroupState(self.state[gid]) for gid in self.in_state("admitted", "committed", "sealed")
        }
        assert (counts.queued + counts.generating, counts.committed) == (
            len(self.in_state("admitted")),
            len(self.in_state("committed", "sealed")),
        )

    def every_entry_has_the_one_owner_the_model_says(self, snapshot: Snapshot) -> None:
        gids = {group.entry_id: group.gid for group in snapshot.groups}
        assert {
            gids[entry.entry_id]: f"{entry.consumer}-{entry.delivery}" for entry in self.ledger.pending()
        } == self.owner

    def every_group_is_committed_once(self) -> None:
        committed = [group.gid for _, group in self.ledger.read_committed("0", 1000, 0)]
        assert sorted(committed) == sorted(self.in_state("committed", "sealed"))
