"""The intake: turns prompts into admitted groups as fast as admission.py allows, and keeps count of what came in and
what was dropped.

Owns the next gid, the counters that the admission rule reads, and what is first in line: the admissions that a full
store refused, then prompts that were rendered, in a thread, when there was room that a pause has taken since. It does
not follow a group after its admission.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from rolecall.errors import StorageUnavailableError, StoreFullError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Admission, Ledger
from rolecall.telemetry import current_traceparent, tracer
from rolecall.v1 import trajectory_pb2
from services.controller.board import RunBoard
from services.controller.groups.admission import AdmissionPolicy
from services.controller.groups.assembly import Assembly
from services.controller.groups.prompts import Cursor, PromptSequence
from services.controller.recovered import Recovered
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

ADMIT_COUNT = 64
"""Most groups admitted in one call: bounds what a full store refuses at once."""

RENDER_S = 0.5
"""Longest that prompts are rendered, and too long ones passed over, before what there is is admitted; and that the end
of an abandoned loop waits for it, but for a single prompt that takes longer.
"""

POLL_S = 1.0
"""Longest sleep: memory that the store freed is noticed without a signal."""


class Intake:
    """The admission of prompts in one life of the loop. Used from one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        threads: StoreThreads,
        prompts: PromptSequence,
        policy: AdmissionPolicy,
        board: RunBoard,
        assembly: Assembly,
        published_step: Callable[[], int],
        recovered: Recovered,
    ) -> None:
        """`published_step` gives the steps behind the weights that the fleet holds."""
        position = recovered.position
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._prompts = prompts
        self._policy = policy
        self._board = board
        self._assembly = assembly
        self._published_step = published_step
        self._first_gid = self._next_gid = position.next_gid
        self._admitted = position.admitted
        self._backlog = recovered.backlog
        """Prompts as a checkpoint noted them, which are admitted first, the one at place i under the gid `_first_gid` +
        i.
        """
        self._rendered: deque[tuple[trajectory_pb2.Prompt, Cursor]] = deque()
        self._refused: list[Admission] = []
        self._changed = asyncio.Event()
        self._dropped = Counter(position.dropped)
        self._retained_bytes = recovered.retained_bytes
        self.trouble = ""
        """The reason that the newest look admitted nothing for: a store that is full, an image that cannot be read."""

    @property
    def dropped(self) -> Counter[str]:
        """Groups dropped, by reason."""
        return Counter(self._dropped)

    @property
    def retained_bytes(self) -> int:
        """Bytes of trained rows that are kept until a checkpoint covers them."""
        return self._retained_bytes

    def backlog_at(self, next_gid: int) -> Sequence[trajectory_pb2.Prompt]:
        """Prompts of an older checkpoint that were not admitted again when `next_gid` was the next gid."""
        return self._backlog[max(0, next_gid - self._first_gid) :]

    def drop(self, reason: str) -> None:
        """A group was dropped: another may take its place."""
        self._dropped[reason] += 1
        self.wake()

    def retain(self, num_bytes: int) -> None:
        """Rows of so many bytes were trained and are kept."""
        self._retained_bytes += num_bytes

    def free(self, num_bytes: int) -> None:
        """Rows of so many bytes were deleted."""
        self._retained_bytes -= num_bytes
        self.wake()

    def wake(self) -> None:
        """There may be room: weights were published, a group was dropped, rows were freed, people resumed the run."""
        self._changed.set()

    async def run(self) -> None:
        """Keeps the prompts stream as full as the policy allows. Runs until cancelled."""
        while True:
            self._changed.clear()
            try:
                while await self._next_admissions():
                    await self._threads.call(self._ledger.admit_all, self._refused)
                    self._refused = []
                self.trouble = ""
            except (StoreFullError, StorageUnavailableError) as error:
                # For controller.stall_timeout_s at most while no group ends either (awaiting.py).
                logger.warning("admission waits: %s", error)
                self.trouble = error.message
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _next_admissions(self) -> list[Admission]:
        """Takes the admissions that a full store refused, and as many more as may be, or as are rendered soon. They
        count as admitted from here on, and stay first in line until they are.
        """
        while len(self._refused) < ADMIT_COUNT and self._may_admit(self._retained_bytes):
            if self._rendered:
                self._refused.append(self._admission(*self._rendered.popleft()))
            elif self._refused:
                break
            elif backlog := self.backlog_at(self._next_gid)[: self._room()]:
                self._rendered.extend(await self._threads.call(self._prompts.take_again, backlog, RENDER_S))
            else:
                self._rendered.extend(await self._threads.call(self._prompts.take, self._room(), RENDER_S))
        return self._refused

    @property
    def waits_for_room(self) -> bool:
        """Whether nothing more is admitted for want of the bytes that trained rows take, until a checkpoint covers
        them.
        """
        return not self._may_admit(self._retained_bytes) and self._may_admit(0)

    def _room(self) -> int:
        """Groups that may be admitted now, ADMIT_COUNT at most."""
        return sum(self._may_admit(self._retained_bytes, more) for more in range(ADMIT_COUNT))

    def _may_admit(self, retained_bytes: int, more: int = 0) -> bool:
        """Whether a group may be admitted after `more` others."""
        return not (self._board.paused or self._board.stop_requested) and self._policy.may_admit(
            admitted=self._admitted + more,
            dropped=self._dropped.total(),
            published_step=self._published_step(),
            num_live=self._assembly.num_live + more,
            retained_bytes=retained_bytes,
        )

    def _admission(self, prompt: trajectory_pb2.Prompt, cursor: Cursor) -> Admission:
        """The admission of `prompt`, with the place in the sequence of prompts behind it."""
        sampling = self._settings.sampling
        group = trajectory_pb2.PromptGroup(
            gid=self._next_gid,
            prompt=prompt,
            num_responses=sampling.num_responses,
            sampling=trajectory_pb2.SamplingParams(
                temperature=sampling.temperature,
                top_p=1.0,
                max_tokens=sampling.max_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            run_seed=self._settings.run.seed,
            greedy_response=self._settings.algorithm.wants_greedy_response,
        )
        # Known here before the store knows it: it may land, scored, before the store's answer.
        self._assembly.admitted(group.gid, self._published_step())
        self._next_gid += 1
        self._admitted += 1
        with tracer().start_as_current_span("group", attributes={"gid": group.gid}):
            return Admission(group, cursor.encode(), current_traceparent())
