"""Shaping against numbers worked by hand and against slow loops."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.shaping import Moments, clip_rewards, overlong_penalty, shape_rewards, trained_mask
from rolecall.settings import ShapingSection

REWARDS = st.lists(st.floats(-50, 50), min_size=1, max_size=12)


def section(**fields: Any) -> ShapingSection:
    return ShapingSection.model_validate(fields)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (99999, -1.0)],
)
def test_the_overlong_punishment_is_the_papers_piecewise_line(num_tokens: int, expected: float) -> None:
    # DAPO, eq. 13, with its L_max 20480 and L_cache 4096: ((20480 - 4096) - |y|) / 4096 in between.
    assert overlong_penalty(np.array([num_tokens]), 20480, 4096).tolist() == [expected]


def test_a_shaped_reward_is_the_hand_worked_one() -> None:
    # Clipped to [0, 1]: 0, 1, 0.5, 0.5; mean 0.5, variance (0.25 + 0.25) / 4 = 0.125, std 0.35355; lengths 4, 8, 9, 10
    # of 10 with a buffer of 4 and penalty 2 lose 0, 2 * 2/4, 2 * 3/4, 2.
    shaping = section(clip_min=0, clip_max=1, normalize="batch", overlong={"buffer_tokens": 4, "penalty": 2})
    raw = np.array([-3.0, 7.0, 0.5, 0.5])
    shaped = shape_rewards(shaping, raw, np.array([4, 8, 9, 10]), Moments.of(clip_rewards(shaping, raw)), 10)
    np.testing.assert_allclose(shaped, [-1.4142, 1.4142 - 1.0, -1.5, -2.0], atol=1e-4)


def test_without_settings_a_reward_stays_as_it_is_bit_by_bit() -> None:
    raw = np.array([0.1, -2.5, 1e20])
    np.testing.assert_array_equal(shape_rewards(section(), raw, np.array([1, 2, 3]), Moments(), 3), raw)


def test_equal_rewards_and_a_batch_of_one_are_normalised_to_nothing() -> None:
    for raw in (np.array([0.3, 0.3, 0.3]), np.array([4.0])):
        shaped = shape_rewards(section(normalize="batch"), raw, np.ones(raw.size), Moments.of(raw), 3)
        np.testing.assert_allclose(shaped, 0.0, atol=1e-9)


def slow_shape(
    shaping: ShapingSection, rewards: list[float], lengths: list[int], seen: list[float], max_tokens: int
) -> list[float]:
    def clipped(reward: float) -> float:
        if shaping.clip_min is not None and reward < shaping.clip_min:
            return shaping.clip_min
        return shaping.clip_max if shaping.clip_max is not None and reward > shaping.clip_max else reward

    known = [clipped(reward) for reward in seen]
    mean = sum(known) / len(known)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in known) / len(known))
    shaped = []
    for reward, length in zip(rewards, lengths, strict=True):
        value = clipped(reward)
        if shaping.normalize:
            value = (value - mean) / (std + 1e-6)
        if shaping.overlong:
            longest, buffer = max_tokens, shaping.overlong.buffer_tokens
            if length > longest:
                value -= shaping.overlong.penalty
            elif length > longest - buffer:
                value -= shaping.overlong.penalty * (length - (longest - buffer)) / buffer
        shaped.append(value)
    return shaped


@given(
    batches=st.lists(REWARDS, min_size=1, max_size=4),
    low=st.none() | st.floats(-20, -1),
    high=st.none() | st.floats(1, 20),
    normalize=st.sampled_from([None, "batch", "running"]),
    buffer_tokens=st.none() | st.integers(1, 30),
    data=st.data(),
)
def test_shaping_agrees_with_loops_over_whatever_was_seen(
    batches: list[list[float]],
    low: float | None,
    high: float | None,
    normalize: str | None,
    buffer_tokens: int | None,
    data: st.DataObject,
) -> None:
    shaping = section(
        clip_min=low, clip_max=high, normalize=normalize, overlong=buffer_tokens and {"buffer_tokens": buffer_tokens}
    )
    moments = Moments()
    for batch in batches[:-1]:
        moments = moments.merged(Moments.of(clip_rewards(shaping, np.array(batch))))
    rewards = batches[-1]
    last = Moments.of(clip_rewards(shaping, np.array(rewards)))
    seen = [reward for batch in batches for reward in batch] if normalize == "running" else rewards
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=len(rewards), max_size=len(rewards)))
    shaped = shape_rewards(
        shaping, np.array(rewards), np.array(lengths), moments.merged(last) if normalize == "running" else last, 30
    )
    assert shaped.dtype == np.float64
    spread = max(seen) - min(seen)
    if normalize is None or spread == 0 or spread > 1e-3:  # between, the quotient of two roundings says nothing
        np.testing.assert_allclose(shaped, slow_shape(shaping, rewards, lengths, seen, 30), rtol=1e-6, atol=1e-6)


@given(batches=st.lists(REWARDS, min_size=1, max_size=5), data=st.data())
def test_moments_do_not_depend_on_how_rewards_were_split_into_batches(
    batches: list[list[float]], data: st.DataObject
) -> None:
    whole = Moments.of(np.array([reward for batch in batches for reward in batch]))
    merged = Moments()
    for batch in data.draw(st.permutations(batches)):
        merged = merged.merged(Moments.of(np.array(batch)))
    assert merged.num == whole.num
    np.testing.assert_allclose([merged.mean, merged.deviations], [whole.mean, whole.deviations], rtol=1e-6, atol=1e-6)


@given(num_tokens=st.integers(0, 10**6), max_tokens=st.integers(1, 10**5), share=st.floats(0, 1))
def test_the_punishment_never_leaves_its_range_and_never_shrinks_with_length(
    num_tokens: int, max_tokens: int, share: float
) -> None:
    penalties = overlong_penalty(np.array([num_tokens, num_tokens + 1]), max_tokens, max(1, round(share * max_tokens)))
    assert -1.0 <= penalties[1] <= penalties[0] <= 0.0


def test_a_truncated_response_is_masked_only_where_that_is_asked_for() -> None:
    mask = np.array([0, 1, 1], np.uint8)
    assert trained_mask(section(mask_truncated=True), mask, True).tolist() == [0, 0, 0]
    assert trained_mask(section(mask_truncated=True), mask, False).tolist() == [0, 1, 1]
    assert trained_mask(section(), mask, True).tolist() == [0, 1, 1]
    assert mask.tolist() == [0, 1, 1]


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="clip_min 2 is not below clip_max 1"):
        section(clip_min=2, clip_max=1)
