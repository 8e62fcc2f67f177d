"""Asking several receivers at once: what each answered, and who is to blame when the collective they share broke.

Owns the distinction between a receiver that failed and one that merely felt it, from the answers alone. publisher.py
decides what follows from it.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from rolecall.errors import (
    ChannelBrokenError,
    DeadlineError,
    RoleCallError,
    TornWeightsError,
    UnavailableError,
    WorkerLostError,
)

T = TypeVar("T")

Outcomes = dict[str, T | RoleCallError]
"""Answer or failure by consumer; NoAnswer for who said nothing."""


class NoAnswer(DeadlineError):
    """A receiver said nothing while the others did."""


class AttemptFailed(Exception):
    """The publish has to be made again, without the culprits."""

    def __init__(self, failures: Mapping[str, RoleCallError], culprits: Iterable[str]) -> None:
        super().__init__("; ".join(f"{consumer}: {error}" for consumer, error in failures.items()))
        self.culprits = set(culprits)
        self.is_death = all(
            type(failures.get(consumer)) in (WorkerLostError, UnavailableError) for consumer in self.culprits
        ) and bool(self.culprits)
        """Whether nothing is wrong but that processes or connections are gone."""

    @classmethod
    def of(cls, outcomes: "Outcomes[Any]", laggards: Iterable[str] = ()) -> "AttemptFailed":
        """Finds the culprits among receivers of a broken collective."""
        failures = failures_of(outcomes)
        named = {
            consumer: error
            for consumer, error in failures.items()
            if not isinstance(error, NoAnswer) and not is_collateral(error)
        }
        if named:
            return cls(named, named)
        silent = {consumer for consumer, error in failures.items() if isinstance(error, NoAnswer)}
        suspects = silent or set(laggards)
        return cls(failures, suspects if len(suspects) < len(outcomes) else ())


def call(made: Awaitable[T]) -> "asyncio.Task[T]":
    """A call as a task."""
    return asyncio.create_task(_await(made))


async def _await(made: Awaitable[T]) -> T:
    return await made  # bounded: it is a call, and a call has a deadline


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels what is under way and returns when it has ended: a cancelled call ends at once."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(
        *tasks, return_exceptions=True
    )  # bounded: they are cancelled, and a cancelled call ends at once


async def answers(tasks: "Mapping[str, asyncio.Task[T]]", timeout_s: float) -> Outcomes[T]:
    """Returns what each answers within `timeout_s`."""
    await asyncio.wait(tasks.values(), timeout=timeout_s)
    outcomes: Outcomes[T] = {}
    for consumer, task in tasks.items():
        if task.done():
            outcomes[consumer] = failure(task) or task.result()
        else:
            outcomes[consumer] = NoAnswer(f"{consumer} did not answer within {timeout_s:g} s")
    return outcomes


def failure(task: "asyncio.Task[Any]") -> RoleCallError | None:
    """Returns why a call failed; None while it has not. Anything but a RoleCallError is nobody's answer, and raised."""
    if not task.done():
        return None
    if task.cancelled():
        return WorkerLostError("the connection was closed: the worker was given up")
    error = task.exception()
    if error is not None and not isinstance(error, RoleCallError):
        raise error
    return error


def failures_of(outcomes: Outcomes[T]) -> dict[str, RoleCallError]:
    """The failures among them."""
    return {consumer: outcome for consumer, outcome in outcomes.items() if isinstance(outcome, RoleCallError)}


def names_itself(task: "asyncio.Task[Any]") -> bool:
    """Whether a call failed, and by its receiver's own fault."""
    error = failure(task)
    return error is not None and not is_collateral(error)


def is_collateral(error: RoleCallError) -> bool:
    """Whether a receiver may have done nothing wrong: the collective broke under it, or not all came to the meeting.
    A deadline is its own: that of its store, its pause or its probe.
    """
    cause = error.details.get("cause", error.reason) if isinstance(error, TornWeightsError) else error.reason
    return cause == ChannelBrokenError.reason


def laggards_of(broken: BaseException | None, ranks: Mapping[int, str]) -> set[str]:
    """The receivers that the actor says are behind."""
    if not isinstance(broken, RoleCallError):
        return set()
    return {ranks[int(rank)] for rank in broken.details.get("ranks", "").split(",") if rank}
