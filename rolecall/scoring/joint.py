"""Joint calls: groups that wait for a scorer while others are being scored are sent in one call.

A call takes its caller and the server the same whatever it holds, which is most of the work where the scorer is cheap.
A scorer that takes its time is called as if there were none of this, a group at a time: a call holds no more than
would be answered within JOINT_S, by the last one. A joint call decides nothing against a group: one that fails in it
for a reason that may be another's is sent again by itself, and goes by itself until it has its scores. So a group that
holds a call until its deadline holds up those of one call, once.

Bounds: `num_calls` at a time, of MAX_ITEMS or one group; what waits is bounded by the callers. MAX_APART groups are
remembered.
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

from rolecall.scoring.scores import Failure, Outcome
from rolecall.telemetry import span_for_all
from rolecall.v1 import reward_pb2

JOINT_S = 0.1
"""Seconds that a joint call is expected to take at most: far from any deadline."""
MAX_ITEMS = 256
"""Most items of a joint call."""
MAX_APART = 1024
"""Most groups that go by themselves; then the one that failed longest ago is forgotten."""


@dataclass(frozen=True)
class _Asked:
    items: Sequence[reward_pb2.ScoreItem]
    is_apart: bool
    """Whether it goes by itself."""
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
        num_calls: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call` returns an outcome for each item, in order, within a deadline; whatever fails is an outcome."""
        self._call = call
        self._num_calls = num_calls
        self._clock = clock
        self._waiting: list[_Asked] = []
        self._running: set[asyncio.Task[None]] = set()
        self._most_items = 0
        """Items that would be answered within JOINT_S, by the last call; 0 after a failure."""
        self._apart: dict[str, None] = {}
        """Names of the groups whose last call failed, in that order."""

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """Returns what `call` returns for `items`."""
        groups = {item.group for item in items}
        is_apart = not self._apart.keys().isdisjoint(groups)
        future = asyncio.get_running_loop().create_future()
        asked = _Asked(items, is_apart, future, copy_context(), get_current_span())
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

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._num_calls:
            asked = self._next()
            if asked:
                task = asyncio.create_task(self._answer(asked), context=asked[0].context)
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
        number, num_items = 1, len(first.items)
        for asked in self._waiting[1:]:
            num_items += len(asked.items)
            if num_items > self._most_items or first.is_apart or asked.is_apart:
                break
            number += 1
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return [asked for asked in taken if not asked.outcomes.done()]

    async def _answer(self, together: Sequence[_Asked]) -> None:
        items, began = [item for asked in together for item in asked.items], self._clock()
        try:
            with span_for_all("score together", [asked.span for asked in together]) if together[1:] else nullcontext():
                outcomes = await self._call(items)
            has_failed = any(isinstance(outcome, Failure) for outcome in outcomes)
            items_per_s = 0.0 if has_failed else len(items) / max(self._clock() - began, 1e-6)
            self._most_items = min(MAX_ITEMS, int(JOINT_S * items_per_s))
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


def _end_unwanted(task: "asyncio.Task[None]", together: Sequence[_Asked], _: object) -> None:
    """Ends a call that nobody waits for any more: it would keep a place that others wait for."""
    if all(asked.outcomes.done() for asked in together):
        task.cancel()


def _is_final(outcome: Outcome) -> bool:
    """Whether the item may be dropped for it."""
    return isinstance(outcome, Failure) and (outcome.is_blamed or not outcome.retryable)
