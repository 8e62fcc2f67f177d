"""What the history played back finds wrong, event by event and without a store."""

from collections import Counter

import pytest

from rolecall.store.history import Event
from rolecall.store.replay import Findings, Replay, TokenBalance

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


COUNTED = [
    *WHOLE[:2],
    "committed token=w-1 tokens=sampled:30,rows:20,unseen:10",
    "sealed step=3 tokens=rows:20,trained:15",
    "trained step=3",
]


def balance_of(*lives: list[str]) -> tuple[TokenBalance, tuple[str, ...]]:
    """Of groups 0, 1, ... with these events each."""
    findings = Findings()
    replay = Replay(findings)
    for gid, events in enumerate(lives):
        for number, text in enumerate(events):
            event, *fields = text.split()
            named = dict(field.split("=", 1) for field in fields)
            replay.apply(Event(f"{gid * 100 + number}-0", 0.0, gid if event != "lineage" else None, event, named))
    return replay.token_balance(), findings.problems()


def test_every_sampled_token_is_trained_masked_dropped_or_live() -> None:
    dropped = [*COUNTED[:2], "committed token=w-1 tokens=sampled:7,rows:7", "dropped reason=too_hard"]
    balance, problems = balance_of(COUNTED, dropped, COUNTED[:4], COUNTED[:2], WHOLE)
    assert problems == ()
    assert balance == TokenBalance(67, 15, Counter(unseen=10, truncated=5), Counter(too_hard=7), 30)
    assert balance.is_even


def test_tokens_of_groups_that_a_lineage_set_back_are_in_no_number() -> None:
    balance, problems = balance_of([*COUNTED, "lineage lineage=1 step=0 trained=0"])
    assert (balance, problems) == (TokenBalance(), ())


@pytest.mark.parametrize(
    ("committed", "sealed", "problem"),
    [
        (
            "sampled:31,rows:20,unseen:10",
            "rows:20,trained:15",
            "sampled other tokens than are in its rows or masked: 0",
        ),
        ("sampled:20,rows:20", "rows:19,trained:15", "sealed with other tokens in its rows than were committed: 0"),
        ("sampled:20,rows:20", "rows:20,trained:21", "trained more tokens than are in its rows: 0"),
    ],
)
def test_accounts_of_tokens_that_do_not_agree_name_the_group(committed: str, sealed: str, problem: str) -> None:
    events = [*WHOLE[:2], f"committed token=w-1 tokens={committed}", f"sealed step=3 tokens={sealed}", WHOLE[4]]
    assert problem in balance_of(events)[1]


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
