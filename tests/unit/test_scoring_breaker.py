"""The circuit breaker before a scorer: transcripts of calls by a clock that tests move."""

import pytest

from rolecall.errors import InvalidInputError, RateLimitedError, RoleCallError, ScorerLoadingError
from rolecall.scoring.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from rolecall.scoring.peer import Peer


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, probe_timeout_s: float = 10.0) -> Breaker:
    breaker = Breaker(probe_timeout_s, clock)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.wait_s() == 0
        breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(10.0, Clock())
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed()
        assert breaker.wait_s() == 0
        breaker.answered()
    assert opened(Clock()).wait_s() == FIRST_PAUSE_S


def test_half_open_lets_one_call_through_and_an_answer_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = FIRST_PAUSE_S
    assert breaker.wait_s() == 0, "the probe"
    assert breaker.wait_s() == 10.0, "the others wait for it"
    breaker.answered()
    assert [breaker.wait_s() for _ in range(3)] == [0, 0, 0]
    breaker.failed()
    assert breaker.wait_s() == 0, "it counts anew"


def test_probes_that_fail_double_the_pause_up_to_the_longest() -> None:
    clock = Clock()
    breaker, pauses = opened(clock), []
    for _ in range(8):
        pauses.append(breaker.wait_s())
        clock.now += pauses[-1]
        assert breaker.wait_s() == 0
        breaker.failed()
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_probe_whose_caller_has_gone_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now = FIRST_PAUSE_S
    assert breaker.wait_s() == 0
    clock.now += 10.0
    assert breaker.wait_s() == 0


def test_calls_that_were_under_way_when_it_opened_make_no_pause_longer() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(32):
        breaker.failed()
    assert breaker.wait_s() == FIRST_PAUSE_S
    clock.now = FIRST_PAUSE_S
    assert breaker.wait_s() == 0
    breaker.failed()
    assert breaker.wait_s() == 2 * FIRST_PAUSE_S


async def test_whatever_a_probe_is_answered_with_closes_it() -> None:
    async def limited() -> None:
        raise RateLimitedError("too many")

    for error in (RoleCallError("a flaw"), InvalidInputError("no request"), RateLimitedError("too many")):
        clock = Clock()
        peer = Peer(name="mine", address="here", timeout_s=10.0)
        peer._breaker = opened(clock)
        clock.now = FIRST_PAUSE_S
        assert peer.away() is None, "the probe"
        assert peer.away() is not None
        if isinstance(error, RateLimitedError):
            with pytest.raises(RateLimitedError):
                await peer.within_limit(limited)
        peer.has_failed(error)
        assert peer.away() is None


def test_what_loads_before_it_was_there_is_no_trouble_and_what_loads_again_is() -> None:
    """A run waits for a scorer in trouble without end, also for one that started again beside its server."""
    peer, loading = Peer(name="reward", address="here", timeout_s=10.0), ScorerLoadingError("its judge is loading")
    for known in (False, True):
        peer.is_unknown(loading)
        assert bool(peer.trouble) == known
        peer.is_known()
    assert not peer.trouble
