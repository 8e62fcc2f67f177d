"""A scorer elsewhere, as its caller sees it: whether it may be called now, and what is told of it.

Owns what calls of every kind share: the limit of the scorer's rate, the breaker, the second call beside a slow one and
the trouble that is told. Knows no protocol: what a call is, its caller says.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rolecall.errors import (
    DeadlineError,
    RateLimitedError,
    RoleCallError,
    ScorerLoadingError,
    ScorerUnavailableError,
    UnauthenticatedError,
    UnavailableError,
    VersionMismatchError,
)
from rolecall.rpc import deadlines
from rolecall.scoring.backoff import RateLimit
from rolecall.scoring.breaker import Breaker
from rolecall.scoring.scores import Failure, Outcome

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MISPLACED = (UnauthenticatedError, VersionMismatchError)
"""No item is to blame: another server answers at the address, or one that does not know us. Waited for, like one that
is away.
"""


class Peer:
    """One scorer elsewhere. Used from one event loop."""

    def __init__(
        self, *, name: str, address: str, timeout_s: float, hedge_after_s: float | None = None, loads: bool = False
    ) -> None:
        """`name` and `address` name the scorer in messages; `timeout_s` is the deadline of one call. hedge_after_s: a
        call that takes longer is made a second time, and whichever answers first counts. loads: the run starts it, so
        that until its first answer it is loading, and not away.
        """
        self._name = name
        self._address = address
        self._timeout_s = timeout_s
        self._hedge_after_s = hedge_after_s
        self._limit = RateLimit()
        self._breaker = Breaker(timeout_s)
        self._loads = loads
        self._is_told_loading = False
        self._was_known = False
        self._is_unknown = False
        """Whether `trouble` is that it does not say what it is."""
        self.trouble = ""
        """Why it gives no scores at present: its name, its address, the last error. Empty once it answered again."""

    def away(self) -> ScorerUnavailableError | None:
        """The error of a call that is not made, for the scorer is left alone for now; None when one may be made."""
        pause_s = self._breaker.wait_s()
        if pause_s <= 0:
            return None
        return ScorerUnavailableError(f"it is asked again in {pause_s:.1f} s; {self.trouble or 'it is away'}")

    async def within_limit(self, call: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        """Returns what `call` returns, and the monotonic time when it was made: once the scorer is not to be left alone
        any more.
        """
        await self._until_allowed()
        called_at = time.monotonic()
        try:
            return await call(), called_at
        except RateLimitedError as error:
            self._breaker.answered()
            self._limit.refused(called_at, float(error.details.get("retry_after_s", 0.0)))
            raise

    async def hedged(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the first answer to `call`, which is made again after hedge_after_s; raises when neither has one."""
        if self._hedge_after_s is None:
            return await call()
        calls = {asyncio.ensure_future(_awaited(call()))}
        try:
            done, _ = await asyncio.wait(calls, timeout=self._hedge_after_s)
            if not done:
                calls.add(asyncio.ensure_future(_awaited(call())))
            while True:
                # bounded: both calls have timeout_s
                done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                answered = [each for each in done if each.exception() is None]
                if answered or not waiting:
                    return (answered or list(done))[0].result()
                calls = waiting
        finally:
            for each in calls:
                each.cancel()

    def has_answered(self) -> None:
        """Notes that a call was answered with scores."""
        self._breaker.answered()
        self._limit.answered()
        self.is_back()

    def has_scored(self, outcomes: Sequence[Outcome], called_at: float) -> None:
        """Notes that a call, made at `called_at` (monotonic), was answered with `outcomes`, which may all be errors."""
        self._breaker.answered()
        if any(isinstance(outcome, Failure) and outcome.code == RateLimitedError.reason for outcome in outcomes):
            self._limit.refused(called_at)
        else:
            self._limit.answered()
        passing = [outcome for outcome in outcomes if isinstance(outcome, Failure) and outcome.retryable]
        if len(passing) == len(outcomes):
            self.is_silent(passing[0])
        elif not passing:  # of some it may have had the scores already, as a reward has whose judge is away
            self.is_back()

    def has_failed(self, error: RoleCallError) -> Failure:
        """Tells the breaker of a call without scores, whether nobody answered it or somebody did; returns what that is
        to an item. A flaw that these items may hit is an answer. So is a limit of the rate, which `within_limit` has
        told it of where a call was made.
        """
        failure = self.failure(error)
        if not isinstance(error, RateLimitedError):
            if failure.retryable and not failure.is_blamed:
                self._breaker.failed()
            else:
                self._breaker.answered()
        return failure

    def is_known(self) -> None:
        """Notes that it said what it is, or that it is there."""
        self._was_known, self._loads = True, False
        if self._is_unknown:
            self._is_unknown = False
            self.is_back()

    def is_unknown(self, error: RoleCallError) -> None:
        """Notes that it did not. ScorerLoadingError, in place of `error`, while the run has yet to see it up."""
        self._is_unknown = True
        if self._loads and isinstance(error, UnavailableError | DeadlineError):
            loading = ScorerLoadingError(f"scorer {self._name!r} at {self._address} is loading: {error.message}")
            self.is_silent(self.failure(loading))
            raise loading from error
        self.is_silent(self.failure(error))

    def is_silent(self, failure: Failure) -> None:
        """Notes that it gives no scores; one warning when that begins. One line, and no trouble, where it or what it
        asks loads before it was ever there.
        """
        said = failure.message.removeprefix(f"scorer {self._name!r}: ")
        if failure.code == ScorerLoadingError.reason and not self._was_known:
            if not self._is_told_loading:
                logger.info("%s", said)
            self._is_told_loading, self.trouble = True, ""
            return
        trouble = f"scorer {self._name!r} at {self._address} gives no scores: {failure.code}: {said}"
        if not self.trouble:
            logger.warning("%s", trouble)
        self.trouble = trouble

    def is_back(self) -> None:
        """Notes that it gives scores, or is there to give them."""
        if self.trouble:
            logger.warning("scorer %r at %s answers again", self._name, self._address)
        self.trouble = ""

    def failure(self, error: RoleCallError) -> Failure:
        """Returns what an error of a call is to each of its items."""
        text = f"scorer {self._name!r}: {error.message}"
        if isinstance(error, DeadlineError):
            text += f"; a call has {self._timeout_s:g} s (timeout_s)"
        # INTERNAL, UNKNOWN, DATA_LOSS: a flaw that may hit once, or these items each time
        if type(error) is RoleCallError:
            return Failure(error.details.get("code", error.status), text, retryable=True, is_blamed=True)
        return Failure(error.reason, text, error.retryable or isinstance(error, _MISPLACED))

    async def _until_allowed(self) -> None:
        """Waits while the scorer is to be left alone. RateLimitedError when that lasts longer than a call may, or than
        half of what the caller has left, so that the caller hears the reason.
        """
        left_s = deadlines.remaining_s()
        give_up_at = time.monotonic() + min(self._timeout_s, self._timeout_s if left_s is None else left_s / 2)
        while (pause_s := self._limit.pause_s()) > 0:
            await asyncio.sleep(max(0.0, min(pause_s, give_up_at - time.monotonic())))
            if self._limit.pause_s() > 0 and time.monotonic() >= give_up_at:
                raise RateLimitedError(
                    f"{self._address} takes no more calls for now; it is asked again in {pause_s:.0f} s"
                )


async def _awaited(call: Awaitable[T]) -> T:
    return await call  # bounded: the call has a deadline
