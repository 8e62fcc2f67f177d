"""The clipped value loss against numbers worked by hand, against loops and finite differences, and however the
mini-batch is cut.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.algorithms.losses.value import value_loss


def test_the_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    loss, terms = value_loss(
        values, torch.tensor([2.0, 0.9]), torch.tensor([0.0, 0.9]), torch.full((2,), 0.5), clip_eps=0.2
    )
    # token 0: free (1-2)^2 = 1, clipped (0.2-2)^2 = 3.24; token 1: 0.01 both ways
    assert float(loss.detach()) == pytest.approx(0.5 * 0.5 * (3.24 + 0.01), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, values)
    np.testing.assert_allclose(gradient, [0.0, 0.05], atol=1e-6)
    assert terms.clipped_N.tolist() == [True, False]


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    loss, _ = value_loss(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([0.0]), torch.ones(1), clip_eps=None)
    assert float(loss) == pytest.approx(2.0)


def test_a_value_within_its_bounds_is_not_counted_as_clipped_for_a_last_bit() -> None:
    old = torch.arange(1, 1000) / 7
    _, terms = value_loss(old + 0.1, old - 1.0, old, torch.ones(999), clip_eps=0.2)
    assert not terms.clipped_N.any()


def drawn(num: int, seed: int) -> list[torch.Tensor]:
    """Values, returns, old values and weights, float64; a third of the weights 0."""
    rng = np.random.default_rng(seed)
    columns = [*rng.normal(size=(3, num)), rng.random(num) * (rng.random(num) < 0.67)]
    return [torch.from_numpy(column) for column in columns]


@settings(deadline=None)
@given(num=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), clip_eps=st.sampled_from([None, 0.2, 0.7]))
def test_loss_and_gradient_are_those_of_loops_over_single_numbers(num: int, seed: int, clip_eps: float | None) -> None:
    values, returns, old, weights = drawn(num, seed)
    loss, _ = value_loss(values.requires_grad_(), returns, old, weights, clip_eps=clip_eps)
    (gradient,) = torch.autograd.grad(loss, values)
    expected, slopes = 0.0, []
    for value, target, before, weight in zip(
        *(column.detach().tolist() for column in (values, returns, old, weights)), strict=True
    ):
        square, slope = (value - target) ** 2, value - target
        if clip_eps is not None:
            bounded = min(max(value, before - clip_eps), before + clip_eps)
            if (bounded - target) ** 2 > square:
                square, slope = (bounded - target) ** 2, 0.0 if bounded != value else slope
        expected += weight * square / 2
        slopes.append(weight * slope)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
def test_gradients_are_those_of_finite_differences(clip_eps: float | None) -> None:
    values, returns, old, weights = drawn(20, 3)
    assert torch.autograd.gradcheck(
        lambda each: value_loss(each, returns, old, weights, clip_eps=clip_eps)[0], [values.requires_grad_()]
    )


@settings(deadline=None)
@given(num=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_loss_does_not_depend_on_how_the_minibatch_is_cut(num: int, seed: int, data: st.DataObject) -> None:
    columns = drawn(num, seed)
    cut = data.draw(st.integers(0, num))
    order = torch.tensor(data.draw(st.permutations(range(num))))
    parts = [
        value_loss(*(column[index] for column in columns), clip_eps=0.2)[0] for index in (order[:cut], order[cut:])
    ]
    torch.testing.assert_close(sum(parts), value_loss(*columns, clip_eps=0.2)[0], rtol=1e-10, atol=1e-10)
