"""What the history played back finds wrong, event by event and without a store."""

import pytest

from rolecall.store.history import Event
from rolecall.store.replay import Findings, Replay

WHOLE = ["admitted", "claimed token=w-1", "committed token=w-1", "sealed step=3", "trained step=3"]


def problems(*events: str) -> tuple[str, ...]:
    """Of group 7 with these events, each "event name=value ..."."""
    findings = Findings()
    replay = Replay(findings)
    for number, text in enumerate(events):
        event, *fields = text.split()
        named = dict(field.split("=", 1) for field in fields)
        replay.apply(Event(f"{number}-0", float(number), 7, event, named))
    return findings.problems()


def test_a_whole_life_is_right() -> None:
    assert problems(*WHOLE) == ()
    assert problems(*WHOLE[:2], "released token=w-1", "claimed token=w-2", "committed token=w-2", *WHOLE[3:]) == ()


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([*WHOLE[:4], "trained step=4"], "trained in another batch than it was sealed into: 7"),
        ([*WHOLE, "trained step=3"], "trained twice: 7"),
        ([*WHOLE[:3], "trained step=3"], "trained although committed: 7"),
        ([*WHOLE[:2], "committed token=w-2"], "committed by a worker that did not hold it: 7 (w-2)"),
        ([*WHOLE[:2], "claimed token=v-1"], "claimed while another held it: 7 (v-1)"),
        ([*WHOLE[:2], "released token=w-1", "claimed token=w-1"], "claimed twice under one token: 7 (w-1)"),
        ([*WHOLE[:4], "dropped reason=too_hard"], "dropped although sealed: 7"),
        (["admitted", "admitted"], "admitted twice: 7"),
        (["claimed token=w-1"], "claimed without being admitted: 7"),
    ],
)
def test_a_transition_that_must_not_be_is_named(events: list[str], problem: str) -> None:
    assert problem in problems(*events)
