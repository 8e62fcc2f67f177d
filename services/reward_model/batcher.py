"""Gathers the sequences of concurrent calls into pieces of device work: up to a token budget, or until nobody came for
a few milliseconds.

Owns the queue of sequences (bound: MAX_WAITING). No torch, no gRPC. Unlike the batcher of columns it takes calls apart:
a large one does not hold up a small one for longer than a piece, and what its caller has left is not computed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rolecall.errors import ExhaustedError, RoleCallError, WorkerLostError
from rolecall.wire import Array
from services.reward_model.conversations import Tokens

MAX_WAITING = 8192
"""Sequences that may wait; a call with more than there is room for is refused."""
LINGER_S = 0.003
"""Seconds the first sequence of a piece waits for company."""

Compute: TypeAlias = Callable[[Sequence[Tokens]], Awaitable[list[Array]]]
"""Computes the head's outputs at the wanted tokens of each sequence, in order."""


@dataclass(frozen=True)
class _Waiting:
    tokens: Tokens
    answer: asyncio.Future[Array]


class TokenBatcher:
    """The queue before the device, used on the event loop only. `start` it before the first call and `close` it after
    the last.
    """

    def __init__(self, compute: Compute, token_budget: int) -> None:
        """`token_budget` bounds a piece; a longer sequence goes alone."""
        self._compute = compute
        self._token_budget = token_budget
        self._queue: deque[_Waiting] = deque()
        self._piece: list[_Waiting] = []
        """What is taken from the queue for the next piece of work."""
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts serving calls."""
        self._worker = asyncio.create_task(self._serve())

    async def outputs_of(self, sequences: Sequence[Tokens]) -> list[Array]:
        """Waits for the head's outputs of all `sequences`. ExhaustedError when there is no room for them."""
        if len(self._queue) + len(sequences) > MAX_WAITING:
            self._queue = deque(each for each in self._queue if not each.answer.done())
        if len(self._queue) + len(sequences) > MAX_WAITING:
            raise ExhaustedError(f"{len(self._queue)} responses wait for this model already; send fewer at a time")
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(tokens, loop.create_future()) for tokens in sequences]
        self._queue.extend(waiting)
        self._arrived.set()
        return await asyncio.gather(*(each.answer for each in waiting))  # bounded: by the caller's deadline

    async def close(self) -> None:
        """Ends the serving; what waits is cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})  # bounded: it is cancelled, and its waits end with that
        for each in (*self._piece, *self._queue):
            each.answer.cancel()

    async def _serve(self) -> None:
        while True:
            await self._gather()
            piece, self._piece = self._piece, []
            try:
                outputs = await self._compute([each.tokens for each in piece])
                for each, output in zip(piece, outputs, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(output)
            except RoleCallError as error:
                _refuse(piece, error)
            finally:
                _refuse(piece, WorkerLostError("the reward model stopped before this was scored; ask again"))

    async def _gather(self) -> None:
        """Takes at least one sequence, in the order of arrival, without those whose callers have left."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while self._take():
            if self._piece and deadline is None:
                deadline = loop.time() + LINGER_S
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):  # None while there is no piece: it waits for work
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _take(self) -> bool:
        """Takes what has arrived; returns whether there is room for more."""
        num_tokens = sum(len(each.tokens.ids_T) for each in self._piece)
        while self._queue:
            first = self._queue[0]
            if first.answer.done():
                self._queue.popleft()
                continue
            if self._piece and num_tokens + len(first.tokens.ids_T) > self._token_budget:
                return False
            self._piece.append(self._queue.popleft())
            num_tokens += len(first.tokens.ids_T)
        return num_tokens < self._token_budget


def _refuse(piece: Sequence[_Waiting], error: RoleCallError) -> None:
    for each in piece:
        if not each.answer.done():
            each.answer.set_exception(error)
