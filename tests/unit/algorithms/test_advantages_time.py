"""GAE, REINFORCE++, ReMax and the optimal token baseline against numbers worked by hand and against slow loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.advantages import ScoredBatch, estimate
from rolecall.algorithms.advantages.time import backward_sums, discount, forward_sums
from rolecall.algorithms.advantages.whiten import whiten
from rolecall.errors import InvalidInputError
from rolecall.settings import (
    AdvantageSection,
    GaeAdvantage,
    PlainAdvantage,
    ReinforcePlusPlusAdvantage,
)
from rolecall.wire import Array
from tests.unit.algorithms.advantage_rig import (
    agrees,
    f32,
    groups_of,
    mask,
    of_groups,
    outcomes,
    ragged_batches,
    trajectories,
    whiten_slowly,
)
from tests.unit.algorithms.test_advantages_groups import centred


def valued(rewards: list[Array], values: list[Array], masks: list[Array], bootstraps: list[float]) -> ScoredBatch:
    columns = {"values": values, "bootstrap_value": [f32(value) for value in bootstraps]}
    return ScoredBatch.of_rows([0] * len(rewards), rewards, masks, masks, columns)


def to_go_slowly(batch: ScoredBatch, gamma: float) -> list[list[float]]:
    """Reward to go over sampled tokens, on all of them."""
    rows = []
    for rewards, sampled in zip(
        trajectories(batch, batch.rewards_N), trajectories(batch, batch.response_mask_N), strict=True
    ):
        row, running = [0.0] * len(rewards), 0.0
        for t in reversed(range(len(rewards))):
            if sampled[t]:
                running = rewards[t] + gamma * running
                row[t] = running
        rows.append(row)
    return rows


def only_trained(batch: ScoredBatch, rows: list[list[float]]) -> list[list[float]]:
    return [
        [x * kept for x, kept in zip(row, trained, strict=True)]
        for row, trained in zip(rows, trajectories(batch, batch.loss_mask_N), strict=True)
    ]


@pytest.mark.parametrize(
    ("bootstrap", "gae_lambda", "advantages", "returns"),
    [
        # delta_2 = 1 - .25 = .75, or + .5 * 2 = 1.75; delta_1 = 0 + .5 * .25 - .5 = -.375; A_1 = -.375 + .5 lambda A_2
        (False, 0.5, [-0.1875, 0.75], [0.3125, 1.0]),
        (True, 0.5, [0.0625, 1.75], [0.5625, 2.0]),
        (False, 0.0, [-0.375, 0.75], [0.125, 1.0]),  # TD(0): A_1 = delta_1
        (True, 0.0, [-0.375, 1.75], [0.125, 2.0]),
    ],
)
def test_gae_of_two_tokens_by_hand(
    bootstrap: bool, gae_lambda: float, advantages: list[float], returns: list[float]
) -> None:
    batch = valued([f32(0, 0, 0, 1)], [f32(9, 9, 0.5, 0.25)], [mask(0, 0, 1, 1)], [2.0])
    result = estimate(
        GaeAdvantage(gamma=0.5, gae_lambda=gae_lambda, whiten=False, bootstrap_truncated=bootstrap), batch
    )
    np.testing.assert_allclose(result.advantages_N, [0, 0, *advantages])
    assert result.returns_N is not None
    np.testing.assert_allclose(result.returns_N, [0, 0, *returns])


@pytest.mark.parametrize(("bootstrap", "advantage"), [(False, 0.75), (True, 1.75)])
def test_gae_of_one_token_is_the_reward_less_the_value_and_with_the_bootstrap_where_that_is_asked_for(
    bootstrap: bool, advantage: float
) -> None:
    section = GaeAdvantage(gamma=0.5, gae_lambda=0.3, whiten=False, bootstrap_truncated=bootstrap)
    result = estimate(section, valued([f32(0, 1)], [f32(0, 0.25)], [mask(0, 1)], [2.0]))
    np.testing.assert_allclose(result.advantages_N, [0, advantage])


def test_gae_steps_over_tokens_that_the_environment_said() -> None:
    section = GaeAdvantage(gamma=0.9, gae_lambda=0.8, whiten=False)
    together = estimate(section, valued([f32(0, 0, 1)], [f32(0, 0.5, 0.25)], [mask(0, 1, 1)], [0.0]))
    apart = estimate(section, valued([f32(0, 0, 0, 0, 1)], [f32(0, 0.5, 7, 7, 0.25)], [mask(0, 1, 0, 0, 1)], [0.0]))
    np.testing.assert_allclose(apart.advantages_N, [0, together.advantages_N[1], 0, 0, together.advantages_N[2]])


@pytest.mark.parametrize("missing", ["values", "bootstrap_value"])
def test_gae_without_the_critics_columns_is_refused(missing: str) -> None:
    columns = {name: [f32(0, 0)] for name in ("values", "bootstrap_value") if name != missing}
    with pytest.raises(InvalidInputError, match=missing):
        estimate(
            GaeAdvantage(bootstrap_truncated=True),
            ScoredBatch.of_rows([0], [f32(0, 1)], [mask(0, 1)], [mask(0, 1)], columns),
        )


@given(ragged_batches(), st.floats(0.1, 1), st.floats(0, 1), st.booleans(), st.booleans())
def test_gae_agrees_with_a_loop(
    batch: ScoredBatch, gamma: float, gae_lambda: float, whitened: bool, bootstrapped: bool
) -> None:
    advantages, returns = [], []
    columns = (trajectories(batch, x) for x in (batch.rewards_N, batch.columns["values"], batch.response_mask_N))
    for rewards, values, sampled, bootstrap in zip(*columns, batch.columns["bootstrap_value"], strict=True):
        row, following, running = [0.0] * len(rewards), float(bootstrap) * bootstrapped, 0.0
        for t in reversed(range(len(rewards))):
            if sampled[t]:
                running = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * running
                row[t], following = running, values[t]
        advantages.append(row)
        returns.append([a + v if s else 0.0 for a, v, s in zip(row, values, sampled, strict=True)])
    result = estimate(
        GaeAdvantage(gamma=gamma, gae_lambda=gae_lambda, whiten=whitened, bootstrap_truncated=bootstrapped), batch
    )
    agrees(batch, result, whiten_slowly(batch, advantages) if whitened else only_trained(batch, advantages))
    assert result.returns_N is not None
    np.testing.assert_allclose(result.returns_N, np.concatenate(only_trained(batch, returns)), atol=1e-6)


@given(ragged_batches())
def test_gae_with_lambda_1_is_the_monte_carlo_return_less_the_value(batch: ScoredBatch) -> None:
    stopped = ScoredBatch.of_rows(
        batch.gids_B.tolist(),
        batch.rows(batch.rewards_N),
        batch.rows(batch.response_mask_N),
        batch.rows(batch.loss_mask_N),
        {"values": batch.rows(batch.columns["values"])},
    )
    returns = np.concatenate([np.array(row) for row in to_go_slowly(stopped, 0.9)])
    expected = (returns - stopped.columns["values"]) * stopped.loss_mask_N
    np.testing.assert_allclose(
        estimate(GaeAdvantage(gamma=0.9, gae_lambda=1.0, whiten=False), stopped).advantages_N, expected, atol=1e-9
    )


def test_reinforce_plus_plus_whitens_rewards_to_go_over_the_batch() -> None:
    # Returns 0.5, 1 | 0: mean 0.5, standard deviation sqrt(1/6) = 0.408248
    found = estimate(ReinforcePlusPlusAdvantage(gamma=0.5), outcomes([0, 1], [1, 0], lengths=[2, 1])).advantages_N
    np.testing.assert_allclose(found, [0, 0, 1.224745, 0, -1.224745], rtol=1e-5, atol=1e-7)


def test_reinforce_plus_plus_with_baseline_centres_by_group_and_whitens_by_batch() -> None:
    # Centred 0.5, -0.5 | 0 (a group of one): mean 0, standard deviation sqrt(1/6)
    found = estimate(ReinforcePlusPlusAdvantage(baseline="group"), outcomes([0, 0, 1], [1, 0, 5])).advantages_N
    np.testing.assert_allclose(found, [0, 1.224745, 0, -1.224745, 0, 0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("section", [ReinforcePlusPlusAdvantage(), ReinforcePlusPlusAdvantage(baseline="group")])
def test_a_batch_of_equal_rewards_is_whitened_to_nothing(section: AdvantageSection) -> None:
    np.testing.assert_allclose(
        estimate(section, outcomes([0, 0, 1], [0.1, 0.1, 0.1], lengths=[3, 1, 2])).advantages_N, 0, atol=1e-9
    )


@given(ragged_batches(), st.floats(0.1, 1))
def test_reinforce_plus_plus_agrees_with_a_loop(batch: ScoredBatch, gamma: float) -> None:
    agrees(
        batch,
        estimate(ReinforcePlusPlusAdvantage(gamma=gamma), batch),
        whiten_slowly(batch, to_go_slowly(batch, gamma)),
        atol=1e-5,
    )
    slow = whiten_slowly(batch, of_groups(batch, lambda rewards, _: centred(rewards)))
    agrees(batch, estimate(ReinforcePlusPlusAdvantage(baseline="group"), batch), slow, atol=1e-5)


def test_remax_subtracts_the_greedy_responses_reward_from_rewards_to_go() -> None:
    masks = [mask(0, 1, 1), mask(0, 1)]
    batch = ScoredBatch.of_rows([0, 1], [f32(0, 0.5, 1), f32(0, 0)], masks, masks, greedy_rewards=f32(0.25, 1))
    np.testing.assert_allclose(estimate(PlainAdvantage(kind="remax"), batch).advantages_N, [0, 1.25, 0.75, 0, -1])


def test_remax_without_a_greedy_response_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="greedy"):
        estimate(PlainAdvantage(kind="remax"), outcomes([0], [1]))


@given(ragged_batches())
def test_remax_agrees_with_a_loop(batch: ScoredBatch) -> None:
    assert batch.greedy_rewards is not None
    slow = [
        [x - float(greedy) for x in row]
        for row, greedy in zip(to_go_slowly(batch, 1.0), batch.greedy_rewards, strict=True)
    ]
    agrees(batch, estimate(PlainAdvantage(kind="remax"), batch), only_trained(batch, slow))


def test_the_optimal_token_baseline_weighs_returns_by_the_energy_of_their_paths() -> None:
    # w = 1 - 2 * 0.5 + 0.5 = 0.5 and 1 - 2 * 0.25 + 0.25 = 0.75. B_1 = (1 * 0.5 + 0 * 0.75) / 1.25 = 0.4; at the second
    # token W = 1 and 1.5: also 0.4.
    masks = [mask(0, 1, 1), mask(0, 1, 1, 1)]
    columns = {
        "old_logprobs": [np.log([1, 0.5, 0.5]), np.log([1, 0.25, 0.25, 0.25])],
        "sum_squared_probs": [np.array([0, 0.5, 0.5]), np.array([0, 0.25, 0.25, 0.25])],
    }
    batch = ScoredBatch.of_rows([0, 0], [f32(0, 0, 1), f32(0, 0, 0, 0)], masks, masks, columns)
    np.testing.assert_allclose(
        estimate(PlainAdvantage(kind="optimal_token_baseline"), batch).advantages_N,
        [0, 0.6, 0.6, 0, -0.4, -0.4, 0],
        rtol=1e-6,
    )


@pytest.mark.parametrize("certain", [False, True])
def test_the_optimal_token_baseline_gives_nothing_to_a_group_of_one_and_to_what_has_no_counterpart(
    certain: bool,
) -> None:
    masks = [mask(0, 1, 1), mask(1), mask(1, 1)]
    probs = 1.0 if certain else 0.5
    columns = {
        name: [np.full(m.size, value) for m in masks]
        for name, value in (("old_logprobs", np.log(probs)), ("sum_squared_probs", probs))
    }
    batch = ScoredBatch.of_rows(
        [0, 1, 1], [np.array([0, 0, 3.0]), np.array([2.0]), np.array([0, 2.0])], masks, masks, columns
    )
    # Certain throughout: the baseline is 0 where there is a counterpart, and the gradient of the logprob is 0 anyway.
    np.testing.assert_allclose(
        estimate(PlainAdvantage(kind="optimal_token_baseline"), batch).advantages_N,
        [0, 0, 0, 2.0 * certain, 2.0 * certain, 0],
        atol=1e-12,
    )


def test_the_optimal_token_baseline_of_a_nearly_certain_policy_stays_among_the_returns() -> None:
    """Float32 says 1 - 2 p + sum p^2 of a certain token a little above 0 or below; weights of both signs would put the
    baseline anywhere.
    """
    masks = [mask(1), mask(1)]
    columns = {"old_logprobs": [f32(0), f32(0)], "sum_squared_probs": [f32(1 + 1e-6), f32(1 - 9e-7)]}
    batch = ScoredBatch.of_rows([0, 0], [f32(1), f32(0)], masks, masks, columns)
    np.testing.assert_allclose(
        estimate(PlainAdvantage(kind="optimal_token_baseline"), batch).advantages_N, [0, -1], atol=1e-6
    )


@given(ragged_batches())
def test_the_optimal_token_baseline_agrees_with_a_loop(batch: ScoredBatch) -> None:
    logprobs, squares, sampled = (
        trajectories(batch, x)
        for x in (batch.columns["old_logprobs"], batch.columns["sum_squared_probs"], batch.response_mask_N)
    )
    to_go = to_go_slowly(batch, 1.0)
    slow = [[0.0] * len(row) for row in to_go]
    for members in groups_of(batch):
        tokens = {i: [t for t, chosen in enumerate(sampled[i]) if chosen] for i in members}
        for position in range(max(len(places) for places in tokens.values())):
            weights = {}
            for i in members:
                if len(tokens[i]) > position:
                    weights[i] = sum(1 - 2 * np.exp(logprobs[i][t]) + squares[i][t] for t in tokens[i][: position + 1])
            if len(weights) > 1:
                total = sum(weights.values())
                baseline = (
                    sum(w * to_go[i][tokens[i][position]] for i, w in weights.items()) / total if total > 0 else 0.0
                )
                for i in weights:
                    slow[i][tokens[i][position]] = to_go[i][tokens[i][position]] - baseline
    agrees(batch, estimate(PlainAdvantage(kind="optimal_token_baseline"), batch), only_trained(batch, slow))


def test_whitening_looks_at_the_trained_tokens_of_the_whole_batch() -> None:
    np.testing.assert_allclose(
        whiten(f32(1, 2, 0, 3, 4), mask(1, 1, 0, 1, 1)), [-1.3416408, -0.4472136, 0, 0.4472136, 1.3416408], rtol=1e-5
    )


def test_whitening_nothing_is_nothing() -> None:
    np.testing.assert_array_equal(whiten(f32(0, 0), mask(0, 0)), [0, 0])


@given(ragged_batches(), st.floats(0.1, 1))
def test_time_runs_over_sampled_tokens_and_back(batch: ScoredBatch, decay: float) -> None:
    sampled = batch.at_sampled(batch.rewards_N)
    np.testing.assert_array_equal(sampled, batch.rewards_N[batch.response_mask_N != 0])
    np.testing.assert_array_equal(batch.from_time(batch.in_time(batch.rewards_N)), batch.rewards_N * batch.loss_mask_N)
    np.testing.assert_array_equal(batch.scatter(sampled), batch.rewards_N * batch.loss_mask_N)
    slow = only_trained(batch, to_go_slowly(batch, decay))
    np.testing.assert_allclose(
        batch.from_time(discount(batch.in_time(batch.rewards_N), decay)), np.concatenate(slow), atol=1e-12
    )


@given(ragged_batches())
def test_sums_over_time_start_anew_with_every_trajectory(batch: ScoredBatch) -> None:
    values, offsets = batch.at_sampled(batch.rewards_N), batch.sampled_offsets
    for start, stop in pairwise(offsets.tolist()):
        np.testing.assert_allclose(forward_sums(values, offsets)[start:stop], np.cumsum(values[start:stop]), atol=1e-12)
        np.testing.assert_allclose(
            backward_sums(values, offsets)[start:stop], np.cumsum(values[start:stop][::-1])[::-1], atol=1e-12
        )


def every_kind() -> list[AdvantageSection]:
    return [
        GaeAdvantage(),
        ReinforcePlusPlusAdvantage(),
        PlainAdvantage(kind="remax"),
        PlainAdvantage(kind="optimal_token_baseline"),
        ReinforcePlusPlusAdvantage(baseline="group"),
    ]


@pytest.mark.parametrize("section", every_kind())
def test_a_batch_of_which_nothing_is_trained_gets_nothing(section: AdvantageSection) -> None:
    nothing, sampled = [mask(0, 0)] * 2, [mask(0, 1), mask(0, 0)]
    columns = {name: [np.zeros(2)] * 2 for name in ("values", "old_logprobs", "sum_squared_probs")} | {
        "bootstrap_value": [np.zeros(1)] * 2
    }
    batch = ScoredBatch.of_rows([0, 0], [f32(0, 1), f32(0, 0)], sampled, nothing, columns, greedy_rewards=f32(0, 0))
    np.testing.assert_array_equal(estimate(section, batch).advantages_N, np.zeros(4))
