"""From raw rewards to per-token rewards, against numbers worked by hand."""

import numpy as np
import pytest

from rolecall.algorithms.shaping import kl_estimate, penalise_kl, place_rewards
from rolecall.errors import InvalidInputError
from tests.unit.algorithms.advantage_rig import f32, mask


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
