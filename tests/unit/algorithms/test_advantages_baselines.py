"""OPO, GPG, MaxRL, GDPO and pass@k against numbers worked by hand and against slow loops."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.advantages import Estimate, ScoredBatch, estimate
from rolecall.algorithms.advantages.pass_at_k import pass_at_k
from rolecall.errors import InvalidInputError
from rolecall.settings import (
    AdvantageSection,
    GdpoAdvantage,
    PassAtKAdvantage,
    PlainAdvantage,
)
from tests.unit.algorithms.advantage_rig import (
    agrees,
    groups_of,
    of_groups,
    outcomes,
    ragged_batches,
    spread_slowly,
    trajectories,
)
from tests.unit.algorithms.test_advantages_groups import centred, last_tokens, normalized


def test_opo_subtracts_the_mean_weighted_by_length() -> None:
    # (1 * 1 + 3 * 0) / 4 = 0.25
    np.testing.assert_allclose(
        last_tokens(PlainAdvantage(kind="opo"), outcomes([0, 0], [1, 0], lengths=[1, 3])), [0.75, -0.25]
    )


def test_gpg_makes_up_for_groups_without_a_difference() -> None:
    # 2 of 5 responses are in a group that differs: alpha = 5 / 2.
    np.testing.assert_allclose(
        last_tokens(PlainAdvantage(kind="gpg"), outcomes([0, 0, 1, 1, 2], [1, 0, 1, 1, 0])), [1.25, -1.25, 0, 0, 0]
    )


def test_maxrl_divides_by_the_mean() -> None:
    # mean 1/4: (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1
    np.testing.assert_allclose(
        last_tokens(PlainAdvantage(kind="maxrl"), outcomes([0, 0, 0, 0], [1, 0, 0, 0])), [3, -1, -1, -1]
    )


def test_gdpo_keeps_apart_what_a_sum_of_rewards_would_mix() -> None:
    batch = replace(
        outcomes([0, 0, 0], [0, 0, 0]),
        components={"right": np.array([1.0, 0.0, 0.0]), "short": np.array([0.0, 1.0, 1.0])},
    )
    # right: mean 1/3, std 0.57735: 1.1547, -0.57735, -0.57735; short is its negative. Half of it: 0.57735, -0.288675,
    # -0.288675, whose std (n) is 0.408248.
    found = last_tokens(GdpoAdvantage(weights={"right": 1.0, "short": 0.5}), batch)
    np.testing.assert_allclose(found, [1.414214, -0.707107, -0.707107], rtol=1e-5)
    np.testing.assert_allclose(
        last_tokens(GdpoAdvantage(weights={"right": 1.0, "short": 1.0}), batch), [0, 0, 0], atol=1e-8
    )


def test_gdpo_leaves_responses_out_that_a_component_does_not_apply_to() -> None:
    nan = np.nan
    batch = replace(
        outcomes([0, 0, 1, 1], [0, 0, 0, 0]),
        components={"right": np.array([1.0, 0.0, nan, nan]), "short": np.array([nan, nan, 0.0, 1.0])},
    )
    # Each is +- 0.707107 in its own group and nothing in the other; over the batch the std (n) is 0.707107 with equal
    # weights.
    found = last_tokens(GdpoAdvantage(weights={"right": 1.0, "short": 1.0}), batch)
    np.testing.assert_allclose(found, [1, -1, -1, 1], rtol=1e-5)


def test_gdpo_names_a_component_that_nobody_gave() -> None:
    with pytest.raises(InvalidInputError, match="'missing'"):
        estimate(GdpoAdvantage(weights={"missing": 1.0}), outcomes([0, 0], [0, 1]))


def test_gdpo_needs_no_component_that_weighs_nothing_which_a_scorer_on_trial_may_lack() -> None:
    batch = replace(outcomes([0, 0], [0, 0]), components={"right": np.array([1.0, 0.0])})
    alone = last_tokens(GdpoAdvantage(weights={"right": 1.0}), batch)
    assert last_tokens(GdpoAdvantage(), replace(batch, component_weights={"right": 1.0, "trial": 0.0})) == alone


def test_pass_at_2_of_four_responses_one_of_them_right() -> None:
    # R = 1 - C(3, 2) / C(4, 2) = 0.5, sigma = 0.5; right: 0.5 / 0.5; wrong: (0.5 - C(2, 1) / C(3, 1)) / 0.5 = -1/3
    found = last_tokens(PassAtKAdvantage(k=2), outcomes([0, 0, 0, 0], [1, 0, 0, 0]))
    np.testing.assert_allclose(found, [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_pass_at_k_gives_nothing_once_every_subset_has_a_right_one() -> None:
    assert last_tokens(PassAtKAdvantage(k=3), outcomes([0, 0, 0, 0], [1, 1, 0, 0])) == [0, 0, 0, 0]


def test_pass_at_1_is_right_and_wrong_normalised_by_the_populations_standard_deviation() -> None:
    # R = 1/4, sigma = sqrt(3)/4: (3/4) / sigma, (-1/4) / sigma
    found = last_tokens(PassAtKAdvantage(k=1), outcomes([0, 0, 0, 0], [1, 0, 0, 0]))
    np.testing.assert_allclose(found, [3**0.5, *[-1 / 3**0.5] * 3])


@pytest.mark.parametrize(
    "section",
    [
        PlainAdvantage(kind="opo"),
        PlainAdvantage(kind="gpg"),
        PlainAdvantage(kind="maxrl"),
        PassAtKAdvantage(k=2),
        PassAtKAdvantage(k=1),
    ],
)
def test_groups_of_one_and_of_equal_rewards_get_exactly_nothing(section: AdvantageSection) -> None:
    assert (
        last_tokens(section, outcomes([0, 0, 0, 1, 2, 2], [0.1, 0.1, 0.1, 3.0, 1.0, 1.0], lengths=[1, 2, 3, 1, 5, 1]))
        == [0] * 6
    )


def test_maxrl_gives_nothing_to_a_group_in_which_nobody_succeeded() -> None:
    assert last_tokens(PlainAdvantage(kind="maxrl"), outcomes([0, 0, 1, 1], [0, 0, -1, 0])) == [0, 0, 0, 0]


@given(ragged_batches())
def test_opo_agrees_with_a_loop(batch: ScoredBatch) -> None:
    def weighted(rewards: list[float], lengths: list[int]) -> list[float]:
        if max(rewards) == min(rewards):
            return [0.0] * len(rewards)
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / max(sum(lengths), 1)
        return [r - baseline for r in rewards]

    agrees(batch, estimate(PlainAdvantage(kind="opo"), batch), of_groups(batch, weighted))


@given(ragged_batches())
def test_gpg_agrees_with_a_loop(batch: ScoredBatch) -> None:
    rewards = [sum(row) for row in trajectories(batch, batch.rewards_N)]
    valid = sum(len(members) for members in groups_of(batch) if len({rewards[i] for i in members}) > 1)
    agrees(
        batch,
        estimate(PlainAdvantage(kind="gpg"), batch),
        of_groups(batch, lambda r, _: [x * len(rewards) / max(valid, 1) for x in centred(r)]),
    )


@given(ragged_batches())
def test_maxrl_agrees_with_a_loop(batch: ScoredBatch) -> None:
    def over_the_mean(rewards: list[float], _: list[int]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        return [x / mean if mean > 0 else 0.0 for x in centred(rewards)]

    agrees(batch, estimate(PlainAdvantage(kind="maxrl"), batch), of_groups(batch, over_the_mean))


@given(ragged_batches())
def test_gdpo_agrees_with_a_loop(batch: ScoredBatch) -> None:
    combined = [0.0] * batch.gids_B.size
    for members in groups_of(batch):
        for name, weight in (("right", 1.0), ("short", 0.5)):
            for i, x in zip(members, normalized([float(batch.components[name][i]) for i in members]), strict=True):
                combined[i] += weight * x
    mean = sum(combined) / len(combined)
    std = (sum((x - mean) ** 2 for x in combined) / len(combined)) ** 0.5
    found = [0.0 if max(combined) == min(combined) else (x - mean) / (std + 1e-6) for x in combined]
    agrees(batch, estimate(GdpoAdvantage(), batch), spread_slowly(batch, found), atol=1e-5)


@given(ragged_batches(), st.integers(1, 4))
def test_pass_at_k_is_the_mean_normalised_reward_of_the_subsets_that_a_response_is_in(
    batch: ScoredBatch, k: int
) -> None:
    def by_subsets(rewards: list[float], _: list[int]) -> list[float]:
        subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
        solved = [float(any(rewards[i] >= 0.75 for i in subset)) for subset in subsets]
        mean = sum(solved) / len(solved)
        std = (sum((x - mean) ** 2 for x in solved) / len(solved)) ** 0.5
        if std == 0:
            return [0.0] * len(rewards)
        mine = [[s for s, subset in zip(solved, subsets, strict=True) if i in subset] for i in range(len(rewards))]
        return [(sum(s) / len(s) - mean) / std for s in mine]

    agrees(
        batch,
        Estimate(batch.spread(pass_at_k(batch.totals_B, batch.gids_B, k=k, solved_at=0.75))),
        of_groups(batch, by_subsets),
    )
