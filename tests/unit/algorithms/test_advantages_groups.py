"""GRPO and RLOO against numbers worked by hand and against slow loops."""

import math

import numpy as np
import pytest
from hypothesis import given

from rolecall.algorithms.advantages import Groups, ScoredBatch, estimate
from rolecall.errors import InvalidInputError
from rolecall.settings import AdvantageSection, GrpoAdvantage, PlainAdvantage
from tests.unit.algorithms.advantage_rig import (
    agrees,
    f32,
    groups_of,
    mask,
    of_groups,
    outcomes,
    ragged_batches,
    trajectories,
)

EPS = 1e-6


def std(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1))


def centred(numbers: list[float]) -> list[float]:
    return [0.0 if max(numbers) == min(numbers) else x - sum(numbers) / len(numbers) for x in numbers]


def normalized(numbers: list[float]) -> list[float]:
    return [x / (std(centred(numbers)) + EPS) for x in centred(numbers)]


def last_tokens(section: AdvantageSection, batch: ScoredBatch) -> list[float]:
    """The advantage of each trajectory's last token."""
    return [row[-1] for row in trajectories(batch, estimate(section, batch).advantages_N)]


def test_grpo_centres_and_divides_by_the_sample_standard_deviation_of_the_group() -> None:
    # mean 1/2, std sqrt(4 * 1/4 / 3) = 0.57735: +-0.5 / 0.57735
    found = last_tokens(GrpoAdvantage(), outcomes([7, 7, 7, 7], [1, 0, 0, 1]))
    np.testing.assert_allclose(found, [0.8660254, -0.8660254, -0.8660254, 0.8660254], rtol=1e-5)


def test_grpo_compares_only_within_a_group_whatever_the_order() -> None:
    found = last_tokens(GrpoAdvantage(normalize_std=False), outcomes([5, 2, 5, 2], [1, 10, 3, 30]))
    np.testing.assert_allclose(found, [-1.0, -10.0, 1.0, 10.0])


@pytest.mark.parametrize("section", [GrpoAdvantage(), GrpoAdvantage(normalize_std=False), PlainAdvantage(kind="rloo")])
def test_a_group_of_one_and_a_group_of_equal_rewards_get_exactly_nothing(section: AdvantageSection) -> None:
    assert last_tokens(section, outcomes([0, 0, 0, 1], [0.1, 0.1, 0.1, 3.0])) == [0, 0, 0, 0]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(
        last_tokens(PlainAdvantage(kind="rloo"), outcomes([0, 0, 0, 1], [1, 0, 0, 4])), [1.0, -0.5, -0.5, 0.0]
    )


@given(ragged_batches())
def test_grpo_agrees_with_a_loop(batch: ScoredBatch) -> None:
    agrees(batch, estimate(GrpoAdvantage(), batch), of_groups(batch, lambda rewards, _: normalized(rewards)))


@given(ragged_batches())
def test_dr_grpo_is_grpo_without_the_standard_deviation(batch: ScoredBatch) -> None:
    agrees(
        batch,
        estimate(GrpoAdvantage(normalize_std=False), batch),
        of_groups(batch, lambda rewards, _: centred(rewards)),
    )


@given(ragged_batches())
def test_rloo_agrees_with_a_loop_over_the_others(batch: ScoredBatch) -> None:
    def against_the_others(rewards: list[float], _: list[int]) -> list[float]:
        others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
        return [r - sum(rest) / len(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)]

    agrees(batch, estimate(PlainAdvantage(kind="rloo"), batch), of_groups(batch, against_the_others))


@given(ragged_batches())
def test_rloo_is_n_over_n_minus_one_times_the_centred_reward(batch: ScoredBatch) -> None:
    sizes_B = Groups(batch.gids_B).counts_B
    factor_N = np.repeat(np.where(sizes_B > 1, sizes_B / np.maximum(sizes_B - 1, 1), 1.0), batch.num_tokens_B)
    centred_N = estimate(GrpoAdvantage(normalize_std=False), batch).advantages_N
    np.testing.assert_allclose(
        estimate(PlainAdvantage(kind="rloo"), batch).advantages_N, factor_N * centred_N, atol=1e-12
    )


def test_a_masked_trajectory_counts_in_its_group_and_gets_nothing() -> None:
    sampled = [mask(0, 1), mask(0, 1)]
    batch = ScoredBatch.of_rows([3, 3], [f32(0, 1), f32(0, 0)], sampled, [mask(0, 1), mask(0, 0)])
    result = estimate(PlainAdvantage(kind="rloo"), batch)
    np.testing.assert_array_equal(result.advantages_N, [0, 1, 0, 0])
    assert result.advantages_N.dtype == np.float32
    assert result.returns_N is None


def process_batch(gids: list[int], rewards: list[list[float]]) -> ScoredBatch:
    rows = [f32(*row) for row in rewards]
    masks = [np.ones(row.size, np.uint8) for row in rows]
    return ScoredBatch.of_rows(gids, rows, masks, masks, {"token_rewards": rows})


def test_process_supervision_sums_the_normalised_rewards_of_the_steps_that_follow() -> None:
    # Steps 1, 3 | 2: mean 2, sample std 1; normalised -1, +1 | 0. Sums from each token on: 0, 1, 1 (to the last step),
    # 0 after it.
    batch = process_batch([4, 4], [[1, 0, 3, 0], [0, 2]])
    np.testing.assert_allclose(
        estimate(GrpoAdvantage(supervision="process"), batch).advantages_N, [0, 1, 1, 0, 0, 0], atol=1e-5
    )


def test_process_supervision_of_equal_steps_is_nothing_and_one_response_compares_its_own_steps() -> None:
    section = GrpoAdvantage(supervision="process")
    assert not estimate(section, process_batch([1, 2, 2], [[0, 5], [0.3, 0.3], [0, 0.3]])).advantages_N.any()
    np.testing.assert_allclose(estimate(section, process_batch([1], [[1, 2]])).advantages_N, [0, 0.5**0.5], atol=1e-5)


def test_process_supervision_without_token_rewards_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="token_rewards"):
        estimate(GrpoAdvantage(supervision="process"), outcomes([0, 0], [0, 1]))


@given(ragged_batches())
def test_process_supervision_agrees_with_a_loop(batch: ScoredBatch) -> None:
    rewards, sampled, trained = (
        trajectories(batch, x) for x in (batch.rewards_N, batch.response_mask_N, batch.loss_mask_N)
    )
    slow = [[0.0] * len(row) for row in rewards]
    for members in groups_of(batch):
        steps = [(i, t) for i in members for t in range(len(rewards[i])) if sampled[i][t] and rewards[i][t] != 0]
        worth = dict(zip(steps, normalized([rewards[i][t] for i, t in steps]), strict=True)) if steps else {}
        for i in members:
            for t in range(len(rewards[i])):
                slow[i][t] = (
                    sum(worth.get((i, later), 0.0) for later in range(t, len(rewards[i]))) if trained[i][t] else 0.0
                )
    agrees(batch, estimate(GrpoAdvantage(supervision="process"), batch), slow, atol=1e-5)
