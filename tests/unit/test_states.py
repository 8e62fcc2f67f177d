"""A worker is in one state at a time, so the seconds of all its states sum to its life, whatever it does."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.telemetry.states import StateClock
from rolecall.training.serving.device_thread import DeviceThread
from services.rollout.activity import Activity

STATES = ("starting", "waiting", "working", "loading")


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(STATES), st.floats(0, 1e6), st.booleans()), max_size=50))
def test_the_seconds_of_all_states_sum_to_the_age_whatever_the_transitions(
    moves: list[tuple[str, float, bool]],
) -> None:
    time, expected = Time(), dict.fromkeys(STATES, 0.0)
    clock, state = StateClock(STATES, time), STATES[0]
    seen = clock.seconds()
    for entered, seconds, looked in moves:
        time.now += seconds
        expected[state] += seconds
        clock.enter(entered)
        state = clock.state
        assert state == entered
        if looked:
            before, seen = seen, clock.seconds()
            assert sum(seen.values()) == pytest.approx(time.now - 1000.0)
            assert all(seen[name] >= before[name] for name in STATES)
    assert clock.seconds() == pytest.approx(expected, abs=1e-3)


def test_a_state_that_is_none_of_its_own_is_refused_and_changes_nothing() -> None:
    clock = StateClock(STATES, time := Time())
    time.now += 3.0
    with pytest.raises(KeyError, match="dreaming"):
        clock.enter("dreaming")
    assert clock.seconds() == {"starting": 3.0, "waiting": 0.0, "working": 0.0, "loading": 0.0}


def test_threads_that_enter_at_once_lose_no_time_and_count_none_twice() -> None:
    ticks = iter(range(1_000_000))
    clock = StateClock(STATES, lambda: float(next(ticks)))
    threads = [threading.Thread(target=_enter_often, args=(clock, state)) for state in STATES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sum(clock.seconds().values()) == next(ticks) - 1


def _enter_often(clock: StateClock, state: str) -> None:
    for _ in range(500):
        clock.enter(state)


async def test_a_trainer_waits_between_the_works_that_it_is_called_for() -> None:
    device = DeviceThread()
    seen = [device.states.state]
    look: Callable[[], None] = lambda: seen.append(device.states.state)  # noqa: E731
    for phase in ("loading the model", "computing", "training", "publishing", "offloading", "idle"):
        await device.run(look, phase)
    look()
    await device.close()
    assert seen == ["starting", "starting", "computing", "training", "publishing", "moving", "waiting", "waiting"]


def test_a_rollout_waits_for_weights_then_for_prompts_and_tells_groups_from_questions() -> None:
    activity = Activity()
    seen = [activity.states.state]

    def look() -> None:
        seen.append(activity.states.state)

    with activity.loading():
        look()
    activity.change(paused=False)
    look()
    activity.change(running=1)  # Generate
    look()
    with activity.sampling_group():
        look()
        activity.change(paused=True)  # a publish keeps what is sampled
        look()
        activity.change(paused=False)
    activity.change(running=-1)
    look()
    assert seen == [
        "waiting_weights",
        "loading_weights",
        "waiting_prompts",
        "answering",
        "sampling",
        "waiting_weights",
        "waiting_prompts",
    ]
