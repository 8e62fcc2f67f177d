"""Gathers concurrent calls for a column into one piece of device work: up to a token budget, or until nobody came for a
few milliseconds.

Owns the queue of calls (bound: MAX_CALLS) and what each caller is told. No torch, no gRPC. A row that two calls name is
computed once. When the gathered work fails because of somebody's rows, each call is tried alone, so that a missing row
fails only the call that named it.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rolecall.errors import ExhaustedError, RoleCallError, WorkerLostError
from rolecall.v1.training_pb2 import ComputeColumnResponse
from rolecall.v1.trajectory_pb2 import RowRef

MAX_CALLS = 1024
"""Calls that may wait; one more is refused."""
LINGER_S = 0.003
"""Seconds the first call of a batch waits for company."""

Compute: TypeAlias = Callable[[Sequence[RowRef]], Awaitable[frozenset[str]]]
"""Computes and writes the column of rows (each once) and returns the keys (see `row_key`) of those that held it before.
Runs in the device thread.
"""


def row_key(row: RowRef) -> str:
    """Returns what tells two rows apart: id and token."""
    return f"{row.id}:{row.token}"


@dataclass(frozen=True)
class _Call:
    rows: Sequence[RowRef]
    num_tokens: int
    answer: asyncio.Future[ComputeColumnResponse]


class ColumnBatcher:
    """One per column, used on the event loop only. `start` it before the first call and `close` it after the last."""

    def __init__(self, compute: Compute, token_budget: int) -> None:
        """`token_budget` bounds a gathered batch; a larger call goes alone."""
        self._compute = compute
        self._token_budget = token_budget
        self._queue: asyncio.Queue[_Call] = asyncio.Queue(MAX_CALLS)
        self._held: _Call | None = None
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts serving calls."""
        self._worker = asyncio.create_task(self._serve())

    async def compute(self, rows: Sequence[RowRef]) -> ComputeColumnResponse:
        """Waits for the column of `rows`. RowMissingError; ExhaustedError when MAX_CALLS wait already."""
        if not rows:
            return ComputeColumnResponse()
        call = _Call(rows, sum(row.num_tokens for row in rows), asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(call)
        except asyncio.QueueFull:
            raise ExhaustedError(f"{MAX_CALLS} calls wait for this column already; send fewer at a time") from None
        return await call.answer  # bounded: by the caller's deadline; the work itself by the device thread

    async def close(self) -> None:
        """Ends the serving; what waits is cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})  # bounded: it is cancelled, and its waits end with that

    async def _serve(self) -> None:
        while True:
            calls = await self._gather()
            try:
                await self._answer(calls)
            except RoleCallError as error:
                if len(calls) == 1:
                    _refuse(calls[0], error)
                    continue
                for call in calls:
                    await self._answer_alone(call)
            finally:
                for call in calls:
                    _refuse(
                        call,
                        WorkerLostError("the role stopped before this column was computed; ask again when it is back"),
                    )

    async def _gather(self) -> list[_Call]:
        """Takes at least one call; the one that would burst the budget is held for the next batch."""
        calls = [
            self._held or await self._queue.get()
        ]  # bounded: by nothing, on purpose: waits for work until it is closed
        self._held = None
        num_tokens = calls[0].num_tokens
        deadline = asyncio.get_running_loop().time() + LINGER_S
        while num_tokens < self._token_budget:
            try:
                async with asyncio.timeout_at(deadline):
                    call = await self._queue.get()
            except TimeoutError:
                break
            num_tokens += call.num_tokens
            if num_tokens > self._token_budget:
                self._held = call
                break
            calls.append(call)
        return [call for call in calls if not call.answer.done()]

    async def _answer(self, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        unique = {row_key(row): row for row in itertools.chain.from_iterable(call.rows for call in calls)}
        written = await self._compute(list(unique.values()))
        for call in calls:
            if not call.answer.done():
                num_already = sum(row_key(row) in written for row in call.rows)
                call.answer.set_result(
                    ComputeColumnResponse(num_tokens=call.num_tokens, num_already_written=num_already)
                )

    async def _answer_alone(self, call: _Call) -> None:
        try:
            await self._answer([call])
        except RoleCallError as error:
            _refuse(call, error)


def _refuse(call: _Call, error: RoleCallError) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)
