"""Advantages against numbers worked by hand and against slow loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.advantages import ScoredBatch, estimate, gae, grpo, needs, rloo, whiten
from rolecall.algorithms.shaping import kl_estimate, penalise_kl, place_rewards, spread
from rolecall.errors import InvalidInputError
from rolecall.settings import GaeAdvantage, GrpoAdvantage, RlooAdvantage
from rolecall.wire import Array


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def mask(*values: int) -> Array:
    return np.array(values, np.uint8)


def test_grpo_centres_and_divides_by_the_sample_standard_deviation_of_the_group() -> None:
    advantages = grpo(np.array([1.0, 0.0, 0.0, 1.0]), [7, 7, 7, 7])
    np.testing.assert_allclose(advantages, [0.8660254, -0.8660254, -0.8660254, 0.8660254], rtol=1e-5)


def test_grpo_compares_only_within_a_group_whatever_the_order() -> None:
    advantages = grpo(np.array([1.0, 10.0, 3.0, 30.0]), [5, 2, 5, 2], normalize_std=False)
    np.testing.assert_allclose(advantages, [-1.0, -10.0, 1.0, 10.0])


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_without_spread_and_a_group_of_one_get_no_advantage(normalize_std: bool) -> None:
    advantages = grpo(np.array([0.5, 0.5, 0.5, 3.0]), [0, 0, 0, 1], normalize_std=normalize_std)
    np.testing.assert_array_equal(advantages, np.zeros(4))


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(rloo(np.array([1.0, 0.0, 0.0, 4.0]), [0, 0, 0, 1]), [1.0, -0.5, -0.5, 0.0])


def test_gae_of_two_tokens_by_hand() -> None:
    # delta_2 = 1 + .5 * 2 - .25 = 1.75; delta_1 = 0 + .5 * .25 - .5 = -.375; A_1 = -.375 + .25 * 1.75
    advantages, returns = gae([f32(0, 0, 0, 1)], [f32(9, 9, 0.5, 0.25)], [mask(0, 0, 1, 1)], [2.0], gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantages[0], [0, 0, 0.0625, 1.75])
    np.testing.assert_allclose(returns[0], [0, 0, 0.5625, 2.0])


def test_gae_steps_over_tokens_that_the_environment_said() -> None:
    together = gae([f32(0, 0, 1)], [f32(0, 0.5, 0.25)], [mask(0, 1, 1)], [0.0], gamma=0.9, gae_lambda=0.8)
    apart = gae([f32(0, 0, 0, 0, 1)], [f32(0, 0.5, 7, 7, 0.25)], [mask(0, 1, 0, 0, 1)], [0.0], gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(apart[0][0][[1, 4]], together[0][0][[1, 2]])
    np.testing.assert_allclose(apart[0][0][[0, 2, 3]], 0.0)


def slow_gae(rewards: Array, values: Array, chosen: Array, bootstrap: float, gamma: float, gae_lambda: float) -> tuple[Array, Array]:
    advantages = np.zeros(len(rewards))
    following, running = bootstrap, 0.0
    for t in reversed(range(len(rewards))):
        if chosen[t]:
            running = rewards[t] + gamma * following - values[t] + gamma * gae_lambda * running
            advantages[t], following = running, values[t]
    return advantages, np.where(chosen != 0, advantages + values, 0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.floats(0.1, 1), st.floats(0.1, 1))
def test_gae_agrees_with_a_loop_over_ragged_trajectories(lengths: list[int], seed: int, gamma: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(seed)
    masks = [(rng.random(n) < 0.7).astype(np.uint8) for n in lengths]
    rewards = [rng.normal(size=n).astype(np.float32) * m for n, m in zip(lengths, masks, strict=True)]
    values = [rng.normal(size=n).astype(np.float32) for n in lengths]
    bootstraps = rng.normal(size=len(lengths))
    advantages, returns = gae(rewards, values, masks, list(bootstraps), gamma=gamma, gae_lambda=gae_lambda)
    for i in range(len(lengths)):
        slow_advantages, slow_returns = slow_gae(rewards[i], values[i], masks[i], bootstraps[i], gamma, gae_lambda)
        np.testing.assert_allclose(advantages[i], slow_advantages, atol=1e-5)
        np.testing.assert_allclose(returns[i], slow_returns, atol=1e-5)


def test_whitening_looks_at_the_trained_tokens_of_the_whole_batch() -> None:
    whitened = whiten([f32(1, 2, 100), f32(3, 4)], [mask(1, 1, 0), mask(1, 1)])
    np.testing.assert_allclose(np.concatenate(whitened), [-1.3416408, -0.4472136, 0, 0.4472136, 1.3416408], rtol=1e-5)


def test_whitening_nothing_is_nothing() -> None:
    np.testing.assert_array_equal(whiten([f32(1, 2)], [mask(0, 0)])[0], [0, 0])


def batch_of(**more: object) -> ScoredBatch:
    rewards = [f32(0, 0, 1), f32(0, 0)]
    return ScoredBatch([3, 3], rewards, [mask(0, 1, 1), mask(0, 1)], [mask(0, 1, 0), mask(0, 1)], **more)  # type: ignore[arg-type]


def test_estimates_are_zero_outside_the_loss_mask() -> None:
    result = estimate(RlooAdvantage(), batch_of())
    np.testing.assert_allclose(result.advantages[0], [0, 1, 0])
    np.testing.assert_allclose(result.advantages[1], [0, -1])
    assert result.returns is None
    assert result.advantages[0].dtype == np.float32


def test_gae_estimates_bring_returns_and_say_what_they_need() -> None:
    section = GaeAdvantage(whiten=False)
    assert needs(section) == ("values", "bootstrap_value")
    assert needs(GrpoAdvantage()) == ()
    result = estimate(section, batch_of(values=[f32(0, 0.5, 0.5), f32(0, 0.25)], bootstrap_values=[0.0, 1.0]))
    assert result.returns is not None
    np.testing.assert_allclose(result.advantages[0], [0, 0.5, 0])
    np.testing.assert_allclose(result.returns[0], [0, 1.0, 0])
    np.testing.assert_allclose(result.returns[1], [0, 1.0])


def test_gae_without_the_critics_columns_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="critic"):
        estimate(GaeAdvantage(), batch_of())


def test_the_scalar_reward_lands_on_the_last_sampled_token() -> None:
    np.testing.assert_allclose(place_rewards(2.0, mask(0, 1, 1, 0)), [0, 0, 2, 0])
    np.testing.assert_allclose(place_rewards(2.0, mask(0, 1, 1, 0), f32(9, 0.5, 0.25, 9)), [0, 0.5, 2.25, 0])


def test_a_trajectory_without_a_sampled_token_cannot_be_rewarded() -> None:
    with pytest.raises(InvalidInputError):
        place_rewards(1.0, mask(0, 0))


def test_the_kl_penalty_is_taken_from_sampled_tokens_only() -> None:
    shaped = penalise_kl(f32(0, 0, 1), f32(-9, -1, -2), f32(-1, -1.5, -1), mask(0, 1, 1), kl_coef=0.1)
    np.testing.assert_allclose(shaped, [0, -0.05, 1.1], rtol=1e-6)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 1 + 0.5)])
def test_kl_estimators_by_hand(estimator: str, value: float) -> None:
    np.testing.assert_allclose(kl_estimate(f32(-1.0), f32(-1.5), estimator), [value], rtol=1e-6)


def test_spreading_puts_a_trajectorys_number_on_its_tokens() -> None:
    np.testing.assert_allclose(np.concatenate(spread(f32(2, -1), [mask(0, 1), mask(1, 1, 0)])), [0, 2, -1, -1, 0])
