"""Filters and the curriculum: a table by hand, a slow oracle, and what each epoch visits."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.curriculum import is_visited, updated_rate
from rolecall.algorithms.filters import reason_to_drop
from rolecall.settings import CurriculumSection, FiltersSection


def filters(**fields: Any) -> FiltersSection:
    return FiltersSection.model_validate(fields)


def reason(
    section: FiltersSection,
    rewards: list[float],
    truncated: list[bool] | None = None,
    lengths: list[int] | None = None,
    **components: list[float],
) -> str | None:
    values = np.array(rewards, np.float32)
    parts = {name: np.array(each, np.float32) for name, each in components.items()}
    cut, tokens = np.array(truncated or [False] * len(rewards)), np.array(lengths or [5] * len(rewards))
    return reason_to_drop(section, values, parts, cut, tokens, has_signal=bool(np.ptp(values) > 0), solved_at=1.0)


@pytest.mark.parametrize(
    ("fields", "rewards", "truncated", "lengths", "expected"),
    [
        ({}, [0, 0], [True, True], [9, 9], None),
        ({"without_signal": True}, [0, 0, 0], None, None, "without_signal"),
        ({"without_signal": True}, [1, 1, 1], None, None, "without_signal"),
        ({"without_signal": True}, [0.2, 0.2, 0.3], None, None, None),
        ({"without_signal": True}, [1], None, None, "without_signal"),
        ({"min_success_rate": 0.25}, [1, 0, 0, 0], None, None, None),
        ({"min_success_rate": 0.26}, [1, 0, 0, 0], None, None, "too_hard"),
        ({"max_success_rate": 0.75}, [1, 1, 2, 0], None, None, None),
        ({"max_success_rate": 0.75}, [1, 1, 1, 1], None, None, "too_easy"),
        ({"all_truncated": True}, [0, 1], [True, True], None, "all_truncated"),
        ({"all_truncated": True}, [0, 1], [True, False], None, None),
        ({"max_mean_tokens": 6}, [0, 1], None, [5, 7], None),
        ({"max_mean_tokens": 6}, [0, 1], None, [6, 7], "too_long"),
        ({"without_signal": True, "min_success_rate": 0.1}, [0, 0], None, None, "without_signal"),
    ],
)
def test_a_group_is_dropped_for_the_first_reason_that_applies(
    fields: dict[str, Any],
    rewards: list[float],
    truncated: list[bool] | None,
    lengths: list[int] | None,
    expected: str | None,
) -> None:
    assert reason(filters(**fields), rewards, truncated, lengths) == expected


@pytest.mark.parametrize(
    ("fields", "rewards", "right", "expected"),
    [
        ({"without_signal": True}, [1.1, 1.2], [1, 1], "without_signal"),
        ({"without_signal": True}, [1, 1], [0, 1], None),
        ({"min_success_rate": 0.5}, [0.9, 0.9], [1, 0], None),
        ({"max_success_rate": 0.5}, [2, 2], [0, 0], None),
        ({"max_success_rate": 0.5}, [0, 0, 0], [1, 1, 0], "too_easy"),
        # responses that it does not apply to are left out, and a group of nothing else goes by its whole reward
        ({"without_signal": True}, [0, 1, 1], [math.nan, 1, 1], "without_signal"),
        ({"min_success_rate": 0.5}, [0, 0, 0], [math.nan, 1, 0], None),
        ({"without_signal": True}, [1, 1], [math.nan, math.nan], "without_signal"),
        ({"without_signal": True}, [0, 1], [math.nan, math.nan], None),
    ],
)
def test_a_filter_reads_the_component_that_it_is_given(
    fields: dict[str, Any], rewards: list[float], right: list[float], expected: str | None
) -> None:
    others = [0.0] * len(rewards)
    assert reason(filters(component="right", **fields), rewards, right=right, other=others) == expected
    whole = {**fields, "all_truncated": True}
    assert reason(filters(**whole), rewards, right=right) == reason(filters(**whole), rewards), "else none is read"


def test_a_component_that_no_filter_reads_is_refused() -> None:
    with pytest.raises(ValidationError, match="component: no filter reads it; set without_signal"):
        filters(component="right", all_truncated=True, max_mean_tokens=5)


@given(
    group=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.integers(1, 20)), min_size=1, max_size=6
    ),
    values=st.none() | st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=6, max_size=6),
    without_signal=st.booleans(),
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    all_truncated=st.booleans(),
    max_mean_tokens=st.none() | st.integers(1, 20),
)
def test_filters_agree_with_loops(
    group: list[tuple[float, bool, int]],
    values: list[float] | None,
    without_signal: bool,
    rates: tuple[float, float],
    all_truncated: bool,
    max_mean_tokens: int | None,
) -> None:
    low, high = sorted(rates)
    section = filters(
        without_signal=without_signal,
        min_success_rate=low,
        max_success_rate=high,
        all_truncated=all_truncated,
        max_mean_tokens=max_mean_tokens,
    )
    rewards, truncated, lengths = (list(column) for column in zip(*group, strict=True))
    judged, components = rewards, dict[str, list[float]]()
    if values is not None and (without_signal or low > 0 or high < 1):
        section = section.model_copy(update={"component": "right"})
        components = {"right": values[: len(group)], "other": rewards}
        judged = [value for value in components["right"] if not math.isnan(value)] or rewards
    num_right, num_cut, num_tokens, differs = 0, 0, 0, False
    for _, cut, length in group:
        num_cut += cut
        num_tokens += length
    for value in judged:
        num_right += value >= 1
        differs = differs or value != judged[0]
    expected = None
    if without_signal and not differs:
        expected = "without_signal"
    elif num_right / len(judged) < low:
        expected = "too_hard"
    elif num_right / len(judged) > high:
        expected = "too_easy"
    elif all_truncated and num_cut == len(group):
        expected = "all_truncated"
    elif max_mean_tokens is not None and num_tokens > max_mean_tokens * len(group):
        expected = "too_long"
    assert reason(section, rewards, truncated, lengths, **components) == expected


def test_a_band_that_no_group_can_meet_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_success_rate 0\.8 exceeds max_success_rate 0\.2"):
        filters(min_success_rate=0.8, max_success_rate=0.2)
    with pytest.raises(ValidationError, match="all prompts would be outside"):
        CurriculumSection(min_success_rate=0.8, max_success_rate=0.2)


@given(
    seed=st.integers(0, 9), uid=st.text(max_size=5), revisit_epochs=st.integers(2, 7), first_epoch=st.integers(0, 50)
)
def test_a_prompt_outside_the_band_comes_exactly_once_in_so_many_epochs(
    seed: int, uid: str, revisit_epochs: int, first_epoch: int
) -> None:
    section = CurriculumSection(min_success_rate=0.2, max_success_rate=0.8, revisit_epochs=revisit_epochs)
    epochs = range(first_epoch, first_epoch + revisit_epochs)
    for rate in (0.0, 0.19, 0.81, 1.0):
        assert sum(is_visited(section, seed, epoch, uid, rate) for epoch in epochs) == 1
    for inside in (None, 0.2, 0.5, 0.8):
        assert all(is_visited(section, seed, epoch, uid, inside) for epoch in epochs)


def test_an_epoch_has_about_its_share_of_the_prompts_outside() -> None:
    section = CurriculumSection(max_success_rate=0.5, revisit_epochs=4)
    visited = [sum(is_visited(section, 3, epoch, str(uid), 1.0) for uid in range(1000)) for epoch in range(4)]
    assert sum(visited) == 1000
    assert min(visited) > 200


def test_a_rate_is_a_moving_average_that_begins_at_its_first_visit() -> None:
    # 1; then 0.5 * 1 + 0.5 * 0; then 0.5 * 0.5 + 0.5 * 0.25.
    first = updated_rate(None, 1.0)
    second = updated_rate(first, 0.0)
    assert (first, second, updated_rate(second, 0.25)) == (1.0, 0.5, 0.375)
