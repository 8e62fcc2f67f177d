"""Calls at once, and one error out of many: what a TaskGroup raises, reduced to the leaf that caused the rest."""

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class FirstErrorGroup(asyncio.TaskGroup):
    """A TaskGroup that raises the first error of its tasks, and CancelledError where its owner is cancelled, whatever
    its tasks fail with meanwhile.

    Before Python 3.13 asyncio's own raises the errors then, and the cancel is lost: an owner that tries again would
    never end. It also leaves its owner as if cancelled when a task fails that it waits for at its end.
    """

    async def __aenter__(self) -> Self:
        self._cancels_before = _owner().cancelling()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        taken_back = self._cancels_its_owner  # by super's, which does it first
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if self._cancels_its_owner and not taken_back:
                _owner().uncancel()
            if _owner().cancelling() > self._cancels_before:
                raise asyncio.CancelledError from group
            raise first_error(group) from group

    @property
    def _cancels_its_owner(self) -> bool:
        """Whether a task has failed, for which the group itself cancelled its owner."""
        return bool(self._parent_cancel_requested)  # type: ignore[attr-defined]  # nothing public tells


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns what `calls` return; the first error ends the others."""
    async with FirstErrorGroup() as tasks:
        running = [tasks.create_task(call) for call in calls]
    return [task.result() for task in running]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of `group` that is not a mere cancellation; the others are its consequences and stay in its
    traceback.
    """
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)), leaves[0])


def _owner() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task
