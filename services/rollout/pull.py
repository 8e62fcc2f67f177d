"""The pull loop: a rollout's main work. claim -> sample G -> stage rows -> commit -> persist, as long as the engine has
room.

Owns the claims in this worker's hands: their leases, deadlines and their end. A group ends in one of three ways:

    committed   every response passed the gate; one fenced script made the group exist
    released    not the group's fault (a publish aborted it, the weights tore, the store was away or full, a drain):
    back to the stream, the delivery excused
    abandoned   its generation failed or ran out of time: handed back with the error, the delivery counted; too many
    make it a dead letter

A store that is away ends none of them and not the role: what is to be handed back waits for it. Never an empty response
in place of a failure. A group whose worker died is in company as small as the store says: were it poison, it would take
the others with it. Bounds: max_groups claims in hand and one for each other kind (groups.py); one task each; calls to
the store run in the process's thread pool.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import (
    ConfigError,
    DeadlineError,
    GenerationError,
    LeaseLostError,
    NotAttestedError,
    RoleCallError,
    RowMissingError,
    StoreFullError,
    StoreUnavailableError,
    UnavailableError,
    WorkerLostError,
    WrongVersionError,
)
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics, attached, export, tracer
from rolecall.telemetry.engine_use import use_metrics
from rolecall.v1 import trajectory_pb2
from services.rollout.groups import MixedGroups
from services.rollout.replica import Replica, Response
from services.rollout.sampling import SampleRequest
from services.rollout.staging import Staging
from services.rollout.trajectories import token_ledger

logger = logging.getLogger(__name__)

TURN_S = 1.0
"""Longest wait of one turn of the loop, so that a drain or a stop is noticed."""
DENIED_S = 0.1
"""Wait after the store denied a claim (a publish is under way) or could not be reached."""
AWAY_S = 0.5
"""Wait before a group is handed back again to a store that was away; each try has the client's own deadline."""


@dataclass(frozen=True)
class PullSettings:
    """The part of the run's settings that the pull loop needs."""

    consumer: str
    """"<worker>.<incarnation>"."""
    max_groups: int
    """Most groups in hand; where the engine has nothing to do, one more of a kind that has none."""
    lease_s: float
    """Leases are renewed three times in it."""
    generation_timeout_s: float
    """Deadline of one group's sampling, from its claim on, and then of the wait for room in the store."""
    row_expiry_s: int
    """Life of staged rows whose group is not committed."""
    max_deliveries: int
    """Failures after which an abandoned group is given to nobody else."""
    shows_images: bool = False
    """Whether prompts or environments may show images."""


@dataclass(eq=False)
class _Work:
    claim: Claim
    task: "asyncio.Task[bool] | None" = None
    committing: bool = False
    """Whether the commit is under way, from when on the lease may end because the commit did its work; the commit
    itself says if it is lost.
    """

    @property
    def key(self) -> tuple[str, str]:
        """Entry and token: no other work has it."""
        return _key(self.claim)


class PullLoop:
    """The loop that claims, samples and commits groups, one per replica. `run` ends after a drain, or with the error
    that ends the role.
    """

    def __init__(
        self,
        settings: PullSettings,
        replica: Replica,
        sampler: MixedGroups,
        queue: PromptQueue,
        rows: Rows,
        tokenizer: ChatTokenizer,
        on_turn: Callable[[str], None],
    ) -> None:
        """`on_turn` is told the phase ("generating", "idle", ...) at every turn, for people."""
        self._settings = settings
        self._replica = replica
        self._sampler = sampler
        self._queue = queue
        self._rows = rows
        self._staging = Staging(
            rows,
            tokenizer,
            consumer=settings.consumer,
            timeout_s=settings.generation_timeout_s,
            row_expiry_s=settings.row_expiry_s,
            shows_images=settings.shows_images,
        )
        self._on_turn = on_turn
        self._work: dict[tuple[str, str], _Work] = {}
        """Groups in hand, by entry and token: an entry that was lost may be claimed again while its first attempt still
        ends.
        """
        self._arrival: asyncio.Task[None] | None = None
        """A wait for work beside groups in hand, which goes on while those end; None: none is under way."""
        self._without_places: list[str] = []
        """Environments that had no place for a group at the last look."""
        self._draining = asyncio.Event()
        self._drained = asyncio.Event()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_groups(self) -> int:
        """Groups in hand."""
        return len(self._work)

    async def run(self) -> None:
        """Pulls until drained. Raises WorkerLostError when the engine is gone, ConfigError when this rollout's file is
        not the run's, and whatever nobody expected.
        """
        renewal = asyncio.create_task(self._renew())
        renewal.add_done_callback(self._ended)
        try:
            while not self._draining.is_set():
                await self._turn()
                if self._fatal.done():
                    await self._release_unstarted()  # what ended this role may have been handed back, and claimed again
                    self._fatal.result()
            while not self._drained.is_set():
                await self._until(asyncio.ensure_future(self._drained.wait()), cancel=True)
        finally:
            renewal.cancel()
            for task in [*self._tasks(), *([self._arrival] if self._arrival is not None else [])]:
                task.cancel()
            self._fatal.cancel()

    async def drain(self, finish_s: float) -> tuple[int, int]:
        """Claims nothing more, gives what is in hand `finish_s` to finish and hands back the rest. Returns (groups
        finished, groups released). Idempotent.
        """
        self._draining.set()
        work = list(self._work.values())
        tasks = [item.task for item in work if item.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=finish_s)
        finished = sum(
            task.done() and not task.cancelled() and task.exception() is None and task.result() for task in tasks
        )
        held = [item.claim for item in work if item.key in self._work]
        for task in tasks:
            task.cancel()
        # bounded: they are cancelled, and their waits end with that
        await asyncio.gather(*tasks, return_exceptions=True)
        released = await self._release_all(held)
        self._work.clear()
        self._drained.set()
        return finished, released

    # --- the loop ---------------------------------------------------------------------------------

    async def _turn(self) -> None:
        self._on_turn(self._phase())
        if not self._replica.gate.is_open:
            await self._release_unstarted()
            await self._until(asyncio.ensure_future(self._replica.gate.wait_open()), cancel=True)
            return
        if self._start():
            return
        num_free = self._room()
        room = await self._sampler.room([work.claim for work in self._work.values()], num_free)
        self._without_places = [name for name, places in room.places.items() if num_free and not places]
        if room.num_groups == 0:
            self._replica.note_places(missing=False)
            await self._until(*self._tasks())
            return
        try:
            claims = await asyncio.to_thread(self._queue.claim, room.num_groups, room.places)
        except (NotAttestedError, StoreUnavailableError) as error:
            logger.debug("nothing claimed: %s", error.message)
            await asyncio.sleep(DENIED_S)
            return
        if self._draining.is_set():
            await self._release_all(claims)
            return
        for claim in claims:
            self._take(claim)
        self._replica.note_places(missing=self._queue.is_short_of_places and not claims)
        if self._work and not claims:
            if self._arrival is None or self._arrival.done():
                self._arrival = asyncio.create_task(self._wait_for_work())
                self._arrival.add_done_callback(self._ended)
            await self._until(self._arrival, *self._tasks())  # one that ends gives places back
        elif not claims:
            await self._wait_for_work()

    def _take(self, claim: Claim) -> None:
        """Takes a claim into hand. One that was lost in between and is claimed again ends the attempt under its older
        token.
        """
        for work in list(self._work.values()):
            if work.claim.entry_id == claim.entry_id:
                self._lose(work)
        taken = _Work(claim)
        self._work[taken.key] = taken

    async def _release_unstarted(self) -> None:
        """Nothing starts while the gate is shut, nobody knows for how long, or once the role ends: others may start
        what was claimed just before.
        """
        waiting = [work for work in self._work.values() if work.task is None]
        for work in waiting:
            del self._work[work.key]
        await self._release_all([work.claim for work in waiting])

    def _room(self) -> int:
        """Groups to claim now: beside a suspect, which the store handed out, no more than may be in its company."""
        bounds = [work.claim.max_in_hand for work in self._work.values() if work.claim.max_in_hand]
        return max(0, min([self._settings.max_groups, *bounds]) - len(self._work))

    def _start(self) -> bool:
        """Starts what was claimed; whether there was anything."""
        waiting = [work for work in self._work.values() if work.task is None]
        for work in waiting:
            work.task = asyncio.create_task(self._group(work), name=f"group-{work.claim.group.gid}")
            work.task.add_done_callback(partial(self._finished, work))
        return bool(waiting)

    def _finished(self, work: _Work, task: "asyncio.Task[bool]") -> None:
        if self._work.get(work.key) is work:  # a store that lost the claim may have given it again under the same token
            del self._work[work.key]
        self._ended(task)

    def _ended(self, task: "asyncio.Task[bool] | asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _wait_for_work(self) -> None:
        try:
            await asyncio.to_thread(self._queue.wait, TURN_S)
        except StoreUnavailableError as error:
            logger.warning("the store is away: %s", error.message)
            await asyncio.sleep(DENIED_S)

    async def _until(self, *events: "asyncio.Future[Any]", cancel: bool = False) -> None:
        """Waits for the first of `events`, a fatal error or the end of the turn."""
        await asyncio.wait([*events, self._fatal], timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        if cancel:
            for event in events:
                event.cancel()

    def _tasks(self) -> "list[asyncio.Task[bool]]":
        return [work.task for work in self._work.values() if work.task is not None]

    def _phase(self) -> str:
        if self._draining.is_set():
            return "draining"
        if not self._replica.gate.is_open:
            return f"weights {self._replica.held.state.name.lower()}"
        doing = f"generating {len(self._work)} groups" if self._work else "idle"
        lacking = ", ".join(self._without_places)
        return f"{doing}; away or full: environments {lacking}" if lacking else doing

    async def _renew(self) -> None:
        """Keeps the leases of what is in hand; stops work on what is lost. The next renewal is due lease_s / 3 after
        this one began, however long it takes.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._settings.lease_s / 3, loop.time())
            await asyncio.sleep(due - loop.time())
            metrics = Metrics()
            metrics.sum("rollout/sampled_tokens", self._replica.num_sampled_tokens)
            metrics.sum("rollout/busy_s", self._replica.busy_s)
            if (use := self._replica.use) is not None:
                metrics.merge(use_metrics(use))
            export(metrics)
            claims = [work.claim for work in self._work.values()]
            try:
                lost = await asyncio.to_thread(self._queue.renew, claims)
            except StoreUnavailableError as error:
                logger.warning("leases are not renewed: %s", error.message)
                continue
            for claim in lost:
                if (work := self._work.get(_key(claim))) is not None:
                    self._lose(work)

    def _lose(self, work: _Work) -> None:
        if work.committing:
            return
        logger.warning("group %d is no longer ours under %s", work.claim.group.gid, work.claim.token)
        if work.task is None:
            del self._work[work.key]
        else:
            work.task.cancel()

    # --- one group --------------------------------------------------------------------------------

    async def _group(self, work: _Work) -> bool:
        """Brings one group to its end; whether it was committed."""
        claim = work.claim
        with (
            attached(claim.traceparent),
            tracer().start_as_current_span(
                "rollout.group", attributes={"gid": claim.group.gid, "deliveries": claim.deliveries}
            ),
        ):
            try:
                await self._commit(work, *await self._sample(claim))
                return True
            except WorkerLostError:
                raise
            except ConfigError as error:  # of this role alone: others sample the group, and here none like it is
                await self._release(work, error.message)
                raise
            except LeaseLostError as error:
                logger.warning("group %d was sampled in vain: %s", claim.group.gid, error.message)
            except (UnavailableError, WrongVersionError, DeadlineError, StoreFullError) as error:
                await self._release(work, error.message)
            except RoleCallError as error:
                await self._abandon(work, error.message)
            return False

    async def _sample(self, claim: Claim) -> tuple[list[SampleRequest], list[Response]]:
        """GenerationError when it takes longer than generation_timeout_s: the engine moves, or hang_s would end it, and
        this group does not come to its end.
        """
        try:
            async with self._replica.sampling_group(self._settings.generation_timeout_s):
                return await self._sampler.sample(claim)
        except TimeoutError as error:
            if not self._replica.gate.is_open:
                raise DeadlineError("no weights were attested in time") from error
            raise GenerationError(
                f"not sampled within {self._settings.generation_timeout_s:g} s (rollout.generation_timeout_s)"
            ) from error

    async def _commit(self, work: _Work, requests: list[SampleRequest], responses: list[Response]) -> None:
        """Stages the rows and commits the group. Rows that lay at the gate for half of their life, while the engine
        slept, are staged again.
        """
        while not await self._is_committed(work, requests, responses):
            pass

    async def _is_committed(self, work: _Work, requests: list[SampleRequest], responses: list[Response]) -> bool:
        claim, group, staged_at = work.claim, work.claim.group, time.monotonic()
        refs = await self._staging.stage(claim, requests, responses)
        spans = {(version, digest) for response in responses for version, digest in response.digests.items()}
        versions = sorted(version for version, _ in spans)
        committed = trajectory_pb2.CommittedGroup(
            gid=group.gid,
            rows=refs[: group.num_responses],
            min_policy_version=versions[0],
            max_policy_version=versions[-1],
            traceparent=claim.traceparent,
            tokens=token_ledger(responses, group.num_responses),
        )
        if group.greedy_response:
            committed.greedy_row.CopyFrom(refs[-1])
        async with self._replica.gate.leaving():
            if time.monotonic() - staged_at > self._settings.row_expiry_s / 2:
                return False
            work.committing = True
            await asyncio.to_thread(self._queue.commit, claim, committed, spans)
        # The controller may have scored and dropped the group already; and it lifts the expiry, too, should the store
        # be away now.
        with contextlib.suppress(RowMissingError, StoreUnavailableError):
            await asyncio.to_thread(self._rows.persist, refs)
        return True

    async def _release(self, work: _Work, reason: str) -> None:
        logger.info("group %d released: %s", work.claim.group.gid, reason)
        await self._hand_back(work, lambda: self._queue.release([work.claim]))

    async def _abandon(self, work: _Work, error: str) -> None:
        logger.error("group %d abandoned: %s", work.claim.group.gid, error)
        await self._hand_back(work, lambda: self._queue.abandon(work.claim, error, self._settings.max_deliveries))

    async def _hand_back(self, work: _Work, hand: Callable[[], object]) -> None:
        """Hands one group back, for as long as the store is away: until then it stays in hand, and its lease is renewed
        as soon as that is possible.
        """
        work.committing = False
        while True:
            try:
                await asyncio.to_thread(hand)  # bounded: by the store's retry_s
                return
            except StoreUnavailableError as error:
                logger.warning("group %d is not handed back yet: %s", work.claim.group.gid, error.message)
                await asyncio.sleep(AWAY_S)

    async def _release_all(self, claims: list[Claim]) -> int:
        """How many were still held; a store that is away leaves them to their lease."""
        try:
            return await asyncio.to_thread(self._queue.release, claims) if claims else 0
        except StoreUnavailableError as error:
            logger.warning(
                "%d groups could not be released and are left to their lease: %s", len(claims), error.message
            )
            return 0


def _key(claim: Claim) -> tuple[str, str]:
    return claim.entry_id, claim.token
