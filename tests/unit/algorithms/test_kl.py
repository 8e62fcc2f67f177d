"""KL estimators against numbers worked by hand, against numpy's, and against the KL of a distribution small enough to
sum over.
"""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.bounds import LOG_RATIO_BOUND
from rolecall.algorithms.kl import kl_N
from rolecall.algorithms.shaping import kl_estimate, penalise_kl
from rolecall.settings import AdaptiveKl, KlEstimator, KlSection

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
LOGITS = torch.tensor([0.3, -1.1, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def value_and_gradient(estimator: KlEstimator, logprob: float, reference: float, **kwargs: str) -> tuple[float, float]:
    leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    value = kl_N(leaf, torch.tensor([reference], dtype=torch.float64), estimator, **kwargs)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return float(value.detach()), float(gradient)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [  # at log p = -1, log ref = -1.5: log r = -0.5
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", 0.106530660, 0.393469340),  # e^-0.5 - 1 + 0.5; 1 - e^-0.5
        ("abs", 0.5, 1.0),
    ],
)
def test_estimators_and_their_gradients_by_hand(estimator: KlEstimator, value: float, gradient: float) -> None:
    assert value_and_gradient(estimator, -1.0, -1.5) == pytest.approx((value, gradient), abs=1e-8)


def test_where_the_reference_is_likelier_k1_is_negative_and_the_others_are_not() -> None:
    values = {estimator: value_and_gradient(estimator, -2.0, -1.0)[0] for estimator in ESTIMATORS}
    assert values == pytest.approx({"k1": -1.0, "k2": 0.5, "k3": math.e - 2, "abs": 1.0})


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=20))
def test_torch_and_numpy_estimate_the_same(estimator: KlEstimator, pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = np.array(pairs).T
    np.testing.assert_allclose(
        kl_N(torch.from_numpy(logprobs), torch.from_numpy(reference), estimator),
        kl_estimate(logprobs, reference, estimator),
        rtol=1e-9,
        atol=1e-9,
    )


@given(st.floats(-40, 0), st.floats(-40, 0))
def test_k3_is_never_negative_and_nothing_is_infinite(logprob: float, reference: float) -> None:
    value, gradient = value_and_gradient("k3", logprob, reference)
    assert value >= 0
    assert math.isfinite(value)
    assert math.isfinite(gradient)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_in_float32_are_those_of_float64(estimator: KlEstimator) -> None:
    """Training is in float32, where what is added and taken away again at e^20 would leave nothing of the rest."""
    logprobs, reference = (
        -torch.linspace(0.01, 6, 50, dtype=torch.float64),
        -torch.linspace(6, 0.02, 50, dtype=torch.float64),
    )
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = logprobs.to(dtype).requires_grad_()
        gradients.append(torch.autograd.grad(kl_N(leaf, reference.to(dtype), estimator).sum(), leaf)[0])
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_pass_gradcheck(estimator: KlEstimator) -> None:
    leaf = torch.tensor([-0.1, -2.0, -5.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -4.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logprobs: kl_N(logprobs, reference, estimator), leaf)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator: KlEstimator) -> None:
    value, gradient = value_and_gradient(estimator, -2.5, -1.2, gradient="k2")
    assert value == value_and_gradient(estimator, -2.5, -1.2)[0]
    assert gradient == value_and_gradient("k2", -2.5, -1.2)[1]


def true_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum()


def test_k1_and_k3_are_the_kl_on_average() -> None:
    log_p = LOGITS.log_softmax(0)
    for estimator in ("k1", "k3"):
        mean = (log_p.exp() * kl_N(log_p, REFERENCE.log(), estimator)).sum()
        assert float(mean) == pytest.approx(float(true_kl(log_p.exp(), REFERENCE)), rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "of"), [("k1", "nothing"), ("k2", "kl"), ("k3", "reverse"), ("straight-through", "kl")]
)
def test_the_gradient_on_policy_is_on_average_that_of(estimator: str, of: str) -> None:
    leaf = LOGITS.clone().requires_grad_()
    log_p = leaf.log_softmax(0)
    through = estimator == "straight-through"
    term = kl_N(log_p, REFERENCE.log(), "k3", "k2") if through else kl_N(log_p, REFERENCE.log(), estimator)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad((log_p.exp().detach() * term).sum(), leaf, retain_graph=True)
    targets = {
        "kl": true_kl(log_p.exp(), REFERENCE),
        "reverse": true_kl(REFERENCE, log_p.exp()),
        "nothing": 0.0 * log_p.sum(),
    }
    (expected,) = torch.autograd.grad(targets[of], leaf)
    torch.testing.assert_close(gradient, expected)


STEEPEST = math.exp(LOG_RATIO_BOUND)


@pytest.mark.parametrize(
    ("estimator", "through", "log_ratio", "value", "gradient"),
    [
        # Nothing of k1, k2 and abs is exponentiated, so nothing bounds them; the gradients in log p are 1, -log r and
        # the sign of -log r.
        ("k1", "estimator", -35.0, 35.0, 1.0),
        ("k1", "k2", -35.0, 35.0, 35.0),
        ("k2", "estimator", -35.0, 612.5, 35.0),
        ("k2", "estimator", 35.0, 612.5, -35.0),
        ("abs", "estimator", 35.0, 35.0, -1.0),
        # k3 where the reference finds the token impossible: r is 0, k3 is -log r - 1, its gradient 1 - r.
        ("k3", "estimator", -35.0, 34.0, 1.0),
        # Above the bound e^x goes on as its tangent there: finite, and as steep as at the bound.
        ("k3", "estimator", 35.0, STEEPEST * (1 + 15) - 36, 1 - STEEPEST),
    ],
)
def test_a_stray_token_keeps_its_gradient(
    estimator: KlEstimator, through: str, log_ratio: float, value: float, gradient: float
) -> None:
    assert value_and_gradient(estimator, -100.0, log_ratio - 100, gradient=through) == pytest.approx(
        (value, gradient), rel=1e-9
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_stray_token_leaves_a_reward_finite(estimator: KlEstimator) -> None:
    stray, mask = np.array([-2000.0, -1.0], np.float32), np.ones(2, np.uint8)
    assert np.isfinite(penalise_kl(np.zeros(2, np.float32), stray, stray[::-1], mask, 0.1, estimator)).all()


def test_a_gradient_of_a_reward_is_refused() -> None:
    with pytest.raises(ValidationError, match="a reward has none"):
        KlSection(reference="ref", kl_coef=0.1, placement="reward", gradient="k2")


def test_a_weight_of_nothing_cannot_adapt() -> None:
    with pytest.raises(ValidationError, match="start from a positive one"):
        KlSection(reference="ref", kl_coef=0.0, adaptive=AdaptiveKl(target=0.1))
