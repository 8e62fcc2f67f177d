"""The rollouts' side of the ledger: pull prompt groups, keep the lease, commit what was sampled.

A claim is a lease with a fence: renew, release and commit name the token under which the group was claimed, and the
store refuses a token that is no longer the entry's. The rules are in the scripts claim, renew, release (which also
abandons) and commit.

Bounds: a worker claims what its engine has room for; `wait` blocks at most MAX_BLOCK_S.
"""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import InvalidInputError, NotAttestedError, StoreUnavailableError
from rolecall.store import scripts
from rolecall.store.connection import CALL_DEADLINE_S, MAX_BLOCK_S, Connection
from rolecall.store.history import committed_tokens
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import CommittedGroup, PromptGroup

MAX_ERROR_CHARS = 4096
"""Longest error text that is kept with a group."""


@dataclass(frozen=True)
class Claim:
    """One group in this worker's hands."""

    entry_id: str
    """Entry of the prompts stream."""
    token: str
    """Fence of this attempt, "<consumer>-<delivery count>": the token of its rows."""
    group: PromptGroup
    """The work."""
    deliveries: int
    """Times it was claimed, this one included, not counting those that were handed back."""
    max_in_hand: int
    """Most groups that this worker may hold while it holds this one, whose worker died: it may be poison. 0: any
    number.
    """
    traceparent: str
    """W3C trace context of the admission; empty when tracing is off."""
    ledger: str
    """Id of the ledger that it is claimed of: another ledger, of a run of the same name too, counts deliveries anew."""

    @property
    def delivery(self) -> str:
        """The token's delivery count."""
        return self.token.rpartition("-")[2]


class PromptQueue:
    """The prompts stream of run `run` as the worker `consumer` ("<worker>.<incarnation>") sees it. Threads may share
    it.
    """

    def __init__(self, connection: Connection, run: str, consumer: str) -> None:
        self._connection = connection
        self._run = run
        self._prefix = f"{{rl:{run}}}:"
        self._consumer = consumer
        self._claiming = threading.Lock()
        self._delivered = "0"
        self.is_short_of_places = False
        """Whether the last claim left groups waiting for a place."""
        self._unanswered = 0
        """Number of the claim whose answer is still owed: asked again, it gives what an outage kept from us, which
        nobody would renew. 0: none.
        """

    def claim(self, max_groups: int, places: Mapping[str, int] = {}) -> list[Claim]:
        """Claims at most `max_groups` groups; none when there is no work. Does not block. NotAttestedError while this
        worker may not sample.

        places: most of them that are played in an environment, or together in several, whose names have commas between.
        """
        if max_groups < 1:
            return []
        # One at a time: the store remembers a consumer's last claim, by its number, for when its answer is lost.
        if not self._claiming.acquire(timeout=CALL_DEADLINE_S):
            raise StoreUnavailableError(f"another claim of {self._consumer} has not ended for {CALL_DEADLINE_S:.0f} s")
        try:
            bounds: list[str | int] = [each for pair in places.items() for each in pair]
            while True:  # each call sets groups aside (MOST_PASSED of claim.lua) that the next one does not meet
                self._unanswered = self._unanswered or time.monotonic_ns() // 1000
                answer = self._call("claim", self._consumer, max_groups, self._unanswered, *bounds)
                last, entries, ledger, passed = answer.values
                self._unanswered = 0
                self.is_short_of_places = bool(passed)
                self._delivered = last.decode()
                if entries or passed < 2:
                    break
        except NotAttestedError:
            self._delivered = "$"
            raise
        finally:
            self._claiming.release()
        return [self._claim(ledger, *entry) for entry in entries]

    def wait(self, timeout_s: float) -> bool:
        """Blocks until there may be new work, at most min(`timeout_s`, MAX_BLOCK_S). Released groups do not end the
        wait: claim again after it.
        """
        block_ms = max(1, int(min(timeout_s, MAX_BLOCK_S) * 1000))
        reply = self._connection.command(
            "XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", f"{self._prefix}prompts", self._delivered
        )
        return bool(reply)

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Keeps the leases of `claims`. Returns those that are lost: stop working on them."""
        if not claims:
            return []
        lost = self._call("renew", self._consumer, *_pairs(claims)).values[0]
        return [claims[index] for index in lost]

    def commit(self, claim: Claim, group: CommittedGroup, spans: Collection[tuple[int, str]]) -> bool:
        """Makes the group exist, once. `spans`: every (policy version, weights digest) that sampled a token of it.
        Stage the rows before, persist them after.

        False when this very attempt had committed it before. LeaseLostError when the group is someone else's or gone;
        WrongVersionError when a version was never attested with that digest. Either way the rows are left to expire.
        """
        asked, rows = claim.group, rows_of(group)
        is_whole = len(group.rows) == asked.num_responses and group.HasField("greedy_row") == asked.greedy_response
        if group.gid != asked.gid or not is_whole or any(row.token != claim.token for row in rows):
            beside = " and a greedy one" if asked.greedy_response else ""
            raise InvalidInputError(
                f"group {asked.gid} needs {asked.num_responses} rows{beside} under token {claim.token} to be committed"
            )
        versions = [text for version, digest in sorted(spans) for text in (str(version), digest)]
        message, tokens = group.SerializeToString(), committed_tokens(group)
        return self._call(
            "commit", claim.entry_id, self._consumer, claim.delivery, group.gid, message, tokens, *versions
        ).fresh

    def release(self, claims: Sequence[Claim], why: str = "") -> int:
        """Gives `claims` back (drain, pause, publish failure); the delivery does not count. Returns how many were still
        held.
        """
        if not claims:
            return 0
        return int(self._call("release", self._consumer, "released", 1, 0, why, *_pairs(claims)).values[0])

    def abandon(self, claim: Claim, error: str, max_deliveries: int = 0) -> bool:
        """Gives `claim` back because its generation failed here with `error`: the delivery counts. False when it was no
        longer held.

        At `max_deliveries` deliveries (0: no limit) it is held back from everyone, and the controller drops it with its
        last error.
        """
        return bool(
            self._call(
                "release", self._consumer, "abandoned", 0, max_deliveries, error[:MAX_ERROR_CHARS], *_pairs([claim])
            ).values[0]
        )

    def _call(self, script: str, *args: str | bytes | int) -> scripts.Answer:
        return scripts.check(self._connection.script(script, scripts.ledger_keys(self._run), args), self._run)

    def _claim(
        self, ledger: bytes, entry: bytes, count: int, excused: int, max_in_hand: int, group: bytes, traceparent: bytes
    ) -> Claim:
        return Claim(
            entry.decode(),
            f"{self._consumer}-{count}",
            PromptGroup.FromString(group),
            count - excused,
            max_in_hand,
            traceparent.decode(),
            ledger.decode(),
        )


def _pairs(claims: Sequence[Claim]) -> list[str]:
    return [text for claim in claims for text in (claim.entry_id, claim.delivery)]
