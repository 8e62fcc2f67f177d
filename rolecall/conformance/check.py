"""The parts that every kit is made of: a rule of a contract, the check of one service against it, and what that found.

Owns the order of checks and what becomes of one that fails. What is asked of a service is the kits'. A check has no
deadline, for an honest service may be slow: it ends because it makes a number of calls, each with a deadline.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import grpc
from pydantic import ValidationError


class Status(StrEnum):
    """The end that a check may come to."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The findings of one check."""

    status: Status
    seen: str = ""
    """What was seen, for people; of one that is skipped, the reason."""


@dataclass(frozen=True)
class Rule:
    """One sentence of a contract."""

    name: str
    """The name in brackets behind it, unique in the contract."""
    quote: str
    """The words, as they stand in the file."""
    element: str
    """The service, method or field whose comment holds it."""
    file: str
    """The contract, from the root of the repository."""


class VerdictError(Exception):
    """A call of the kit's has decided the check that made it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.seen)
        self.verdict = verdict


class Session(Protocol):
    """A connection of a kit to the service that it looks at."""

    failed: set[str]
    """Names of the rules that were found broken so far: nobody is blamed twice."""

    async def is_there(self) -> bool:
        """Whether the service still answers, asked within seconds."""
        ...


SessionT = TypeVar("SessionT", bound=Session)
SessionT_contra = TypeVar("SessionT_contra", bound=Session, contravariant=True)


@dataclass(frozen=True)
class Check(Generic[SessionT_contra]):
    """A rule and the function that looks whether a service keeps it."""

    rule: Rule
    examine: Callable[[SessionT_contra], Awaitable[Verdict]]
    needs: tuple[str, ...] = ()
    """Rules without which nothing can be said of this one."""


@dataclass(frozen=True)
class Result:
    """A rule, and whether a service keeps it."""

    rule: Rule
    verdict: Verdict
    seconds: float


class Contract(Generic[SessionT]):
    """A file of rules, which makes a check of each function that it decorates."""

    def __init__(self, file: str) -> None:
        self._file = file

    def rule(
        self, name: str, element: str, quote: str, needs: tuple[str, ...] = ()
    ) -> Callable[[Callable[[SessionT], Awaitable[Verdict]]], Check[SessionT]]:
        """Decorates the function that looks whether the rule `name`, a comment of `element`, is kept."""
        return lambda examine: Check(Rule(name, quote, element, self._file), examine, needs)


def passed(seen: str = "") -> Verdict:
    """The rule is kept, as far as was seen."""
    return Verdict(Status.PASSED, seen)


def failed(seen: str) -> Verdict:
    """The rule is broken."""
    return Verdict(Status.FAILED, seen)


def skipped(why: str) -> Verdict:
    """Nothing can be said of the rule."""
    return Verdict(Status.SKIPPED, why)


def unless(problem: str | None, seen: str = "") -> Verdict:
    """Failed for a `problem`, passed for None."""
    return passed(seen) if problem is None else failed(problem)


async def run(
    checks: Sequence[Check[SessionT]], session: SessionT, tell: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Looks at one rule after the other, and tells each result as soon as it is known. A check whose call fails has
    failed; where the service does not answer any more after that, the others are skipped.
    """
    results: list[Result] = []
    is_there = True
    for check in checks:
        started = time.monotonic()
        unmet = [name for name in check.needs if name in session.failed]
        if not is_there:
            verdict = skipped("the service answers no more")
        elif unmet:
            verdict = skipped(f"nothing can be said while {' and '.join(unmet)} fails")
        else:
            verdict = await _examined(check, session)
        if verdict.status is Status.FAILED:
            session.failed.add(check.rule.name)
            is_there = is_there and await session.is_there()
        results.append(Result(check.rule, verdict, time.monotonic() - started))
        tell(results[-1])
    return results


async def _examined(check: Check[SessionT], session: SessionT) -> Verdict:
    try:
        return await check.examine(session)
    except VerdictError as decided:
        return decided.verdict
    except grpc.aio.AioRpcError as error:
        return failed(f"a call failed with {said(error)}")


def said(error: grpc.aio.AioRpcError) -> str:
    """The status of a call, and what the server said, for people."""
    details = " ".join((error.details() or "").split())
    return f"{error.code().name}: {details[:300]}" if details else error.code().name


def wrong_fields(error: ValidationError) -> str:
    """Says in one line which fields of a line of --items are wrong, and how."""
    return "; ".join(
        ": ".join([*(str(part) for part in item["loc"]), item["msg"]]) for item in error.errors(include_url=False)
    )
