"""Joint calls: groups that wait for a scorer while others are being scored are sent in one call.

A call takes its caller and the server the same whatever it holds, which is most of the work where the scorer is cheap.
A scorer that takes its time is called as if there were none of this, a group at a time: a call holds no more than
would be answered within JOINT_S, by the last one, and with images no more than one request holds. A joint call decides
nothing against a group: one that fails in it for a reason that may be another's is sent again by itself, and goes by
itself until it has its scores. So a group that holds a call until its deadline holds up those of one call, once.

Owns, too, how many calls are under way. A scorer that waits for a language model is given more of them, one by one; one
that computes is not, for it would take each the longer, past its deadline: no more than would be answered within
IN_TIME of that, by the last one, if it answers one after the other. Where groups become slow all at once, some calls
are late all the same: they are made again, with few under way.

Bounds: FEW_CALLS at a time, and up to `max_calls` of one group each; MAX_ITEMS or one group in a call; what waits is
bounded by the callers. MAX_APART groups are remembered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from itertools import islice

from opentelemetry.trace import Span, get_current_span

from rolecall.scoring.exchange import MAX_REQUEST_BYTES
from rolecall.scoring.scores import Failure, Outcome
from rolecall.settings import FEW_CALLS
from rolecall.telemetry import span_for_all
from rolecall.v1 import reward_pb2

JOINT_S = 0.1
"""Seconds that a joint call is expected to take at most: far from any deadline."""
IN_TIME = 0.5
"""Share of a call's deadline in which it is expected to be answered beside the others. Half: where a server answers so
many at a time, one more waits for a whole other call.
"""
MAX_ITEMS = 256
"""Most items of a joint call."""
MAX_APART = 1024
"""Most groups that go by themselves; then the one that failed longest ago is forgotten."""


@dataclass(frozen=True)
class _Asked:
    items: Sequence[reward_pb2.ScoreItem]
    is_apart: bool
    """Whether it goes by itself."""
    num_bytes: int
    """Bytes of items with images."""
    outcomes: "asyncio.Future[list[Outcome] | None]"
    """None: they are to be sent again by themselves."""
    context: Context
    span: Span
    """The caller's."""


class JointCalls:
    """The calls of one scorer. Used from one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[list[Outcome]]],
        max_calls: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call` returns an outcome for each item, in order, within `timeout_s`; whatever fails is an outcome."""
        self._call = call
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: list[_Asked] = []
        self._running: set[asyncio.Task[None]] = set()
        self._most_items = 0
        """Items that would be answered within JOINT_S, by the last call; 0 after a failure."""
        self._num_calls = self._few_calls
        """Calls of one group each that may be under way."""
        self._apart: dict[str, None] = {}
        """Names of the groups whose last call failed, in that order."""

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """Returns what `call` returns for `items`."""
        groups = {item.group for item in items}
        is_apart = not self._apart.keys().isdisjoint(groups)
        future = asyncio.get_running_loop().create_future()
        num_bytes = sum(item.ByteSize() for item in items if item.images)
        asked = _Asked(items, is_apart, num_bytes, future, copy_context(), get_current_span())
        self._waiting.append(asked)
        self._begin()
        outcomes = await asked.outcomes  # bounded: by the calls before it, each with its deadline
        outcomes = await self._call(items) if outcomes is None else outcomes
        self._note(groups, any(isinstance(outcome, Failure) and outcome.retryable for outcome in outcomes))
        return outcomes

    def _note(self, groups: Iterable[str], have_failed: bool) -> None:
        for group in groups:
            self._apart.pop(group, None)
            if have_failed:
                self._apart[group] = None
        for group in list(islice(self._apart, max(0, len(self._apart) - MAX_APART))):
            del self._apart[group]

    @property
    def _few_calls(self) -> int:
        return min(FEW_CALLS, self._max_calls)

    def _has_room(self) -> bool:
        """Whether another call may be begun. What would not go alone waits for company."""
        goes_alone = 2 * len(self._waiting[0].items) > self._most_items
        return len(self._running) < (self._num_calls if goes_alone else self._few_calls)

    def _begin(self) -> None:
        while self._waiting and self._has_room():
            asked = self._next()
            if asked:
                answer = self._answer(asked, len(self._running) + 1)
                task = asyncio.create_task(answer, context=asked[0].context)
                self._running.add(task)
                task.add_done_callback(self._ended)
                for each in asked:
                    each.outcomes.add_done_callback(partial(_end_unwanted, task, asked))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._begin()

    def _next(self) -> list[_Asked]:
        """Takes what goes together, without those who have left."""
        first = self._waiting[0]
        number, num_items, num_bytes = 1, len(first.items), first.num_bytes
        for asked in self._waiting[1:]:
            num_items += len(asked.items)
            num_bytes += asked.num_bytes
            is_full = num_items > self._most_items or num_bytes > MAX_REQUEST_BYTES
            if is_full or first.is_apart or asked.is_apart:
                break
            number += 1
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return [asked for asked in taken if not asked.outcomes.done()]

    async def _answer(self, together: Sequence[_Asked], num_running: int) -> None:
        items, began = [item for asked in together for item in asked.items], self._clock()
        try:
            with span_for_all("score together", [asked.span for asked in together]) if together[1:] else nullcontext():
                outcomes = await self._call(items)
            self._learn(outcomes, max(self._clock() - began, 1e-6), num_running)
            answers = iter(outcomes)
            for asked in together:
                own = list(islice(answers, len(asked.items)))
                is_doubtful = len(together) > 1 and any(_is_final(outcome) for outcome in own)
                if not asked.outcomes.done():
                    asked.outcomes.set_result(None if is_doubtful else own)
        except Exception as error:  # whoever asked is told
            for asked in together:
                if not asked.outcomes.done():
                    asked.outcomes.set_exception(error)
        finally:  # also where the channel was closed under the call, which ends it as if it were cancelled
            for asked in together:
                asked.outcomes.cancel()

    def _learn(self, outcomes: Sequence[Outcome], seconds: float, num_running: int) -> None:
        """Draws the bounds from a call that took `seconds`, begun as one of `num_running`."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        self._most_items = 0 if failures else min(MAX_ITEMS, int(JOINT_S * len(outcomes) / seconds))
        if any(failure.retryable for failure in failures):
            self._num_calls = self._few_calls
        elif num_running >= self._few_calls:  # fewer say nothing of more
            in_time = int(num_running * IN_TIME * self._timeout_s / seconds)
            is_reached = num_running >= self._num_calls
            self._num_calls = max(self._few_calls, min(self._num_calls + is_reached, self._max_calls, in_time))


def _end_unwanted(task: "asyncio.Task[None]", together: Sequence[_Asked], _: object) -> None:
    """Ends a call that nobody waits for any more: it would keep a place that others wait for."""
    if all(asked.outcomes.done() for asked in together):
        task.cancel()


def _is_final(outcome: Outcome) -> bool:
    """Whether the item may be dropped for it."""
    return isinstance(outcome, Failure) and (outcome.is_blamed or not outcome.retryable)
