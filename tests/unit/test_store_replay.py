"""What the history played back finds wrong, event by event and without a store."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.store.connection import Connection
from rolecall.store.history import Event, order, read_history
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


class EmptyStream:
    """A store whose history is drained."""

    def command(self, *words: object) -> list[Any]:
        return []


def history_file(path: Path, *events: tuple[str, int, str, dict[str, str]]) -> Path:
    """A file of (id, gid, event, fields)."""
    lines = [{"id": id, "time_s": 0.0, "gid": str(gid), "event": event, **more} for id, gid, event, more in events]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(file: Path, last: str) -> list[Event]:
    return list(read_history(cast(Connection, EmptyStream()), "run", file, last))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_an_event_counts_once_however_often_and_in_whatever_order_its_line_stands(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    ids = [f"{milliseconds}-{number}" for milliseconds, number in places]
    file = history_file(tmp_path / "history.jsonl", *((id, 0, "scored", {}) for id in ids))
    once = [id for id in dict.fromkeys(ids) if order(id) <= (3, 2)]
    assert [event.id for event in read(file, "3-2")] == once


def test_a_group_of_a_long_history_takes_half_a_kilobyte(tmp_path: Path) -> None:
    lives = [
        ("admitted", {"prompt": "p", "step": "1"}),
        ("claimed", {"token": "rollout-0.1a2b3c4d/1"}),
        ("committed", {"token": "rollout-0.1a2b3c4d/1", "tokens": "sampled:{0},rows:{0}"}),
        ("sealed", {"step": "1", "tokens": "rows:{0},trained:{0}"}),
        ("trained", {"step": "1", "version": "1"}),
    ]
    number = 1000
    events = [
        (f"{1000 * life + gid}-0", gid, event, {name: text.format(10_000 + gid) for name, text in more.items()})
        for life, (event, more) in enumerate(lives)
        for gid in range(number)
    ]
    file, replay = history_file(tmp_path / "history.jsonl", *events), Replay(Findings())
    tracemalloc.start()
    for event in read_history(cast(Connection, EmptyStream()), "run", file, "9999-0"):
        replay.apply(event)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert replay.token_balance().trained == sum(10_000 + gid for gid in range(number))
    assert held / number < 700
