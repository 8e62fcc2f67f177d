"""Every policy loss with every aggregation: against loops over single numbers, against finite differences, and however
the mini-batch is cut.
"""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.algorithms.losses import token_losses
from rolecall.settings import Aggregation, PolicyLossSection
from tests.unit.algorithms.loss_rig import LOSSES, Drawn, draw, drawn, name, oracle

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@pytest.mark.parametrize("section", LOSSES, ids=name)
@settings(deadline=None, max_examples=40)
@given(minibatch=drawn(), kind=st.sampled_from(AGGREGATIONS))
def test_loss_and_gradient_are_those_of_loops_over_single_numbers(
    section: PolicyLossSection, minibatch: Drawn, kind: Aggregation
) -> None:
    loss = minibatch.loss(section, kind, range(len(minibatch.lengths)))
    (gradient,) = torch.autograd.grad(loss, minibatch.logprobs)
    expected, slopes = oracle(section, kind, minibatch)
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("section", LOSSES, ids=name)
@settings(deadline=None, max_examples=40)
@given(minibatch=drawn(), kind=st.sampled_from(AGGREGATIONS), data=st.data())
def test_loss_and_gradient_do_not_depend_on_how_the_minibatch_is_cut(
    section: PolicyLossSection, minibatch: Drawn, kind: Aggregation, data: st.DataObject
) -> None:
    num = len(minibatch.lengths)
    whole = minibatch.loss(section, kind, range(num))
    order = data.draw(st.permutations(range(num)))
    cuts = sorted(data.draw(st.sets(st.integers(1, num))) | {0, num})
    parts = torch.stack([minibatch.loss(section, kind, order[a:b]) for a, b in pairwise(cuts)]).sum()
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(
        torch.autograd.grad(parts, minibatch.logprobs), torch.autograd.grad(whole, minibatch.logprobs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("section", LOSSES, ids=name)
def test_gradients_are_those_of_finite_differences(section: PolicyLossSection, seed: int) -> None:
    """GSPO's in its own setting: one advantage per sequence, a mean over each. CISPO's weight is a constant of the
    gradient, so its ratio is held.
    """
    minibatch = draw([5, 1, 8, 3], seed, per_token=section.kind != "gspo")
    kind: Aggregation = "seq_mean_token_mean" if section.kind == "gspo" else "token_mean"

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        old = minibatch.old + (logprobs - minibatch.logprobs).detach() if section.kind == "cispo" else minibatch.old
        moved = Drawn(minibatch.lengths, logprobs, old, minibatch.advantages, minibatch.mask, minibatch.selected)
        return moved.loss(section, kind, range(4))

    assert torch.autograd.gradcheck(loss, [minibatch.logprobs.detach().clone().requires_grad_()])


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("section", LOSSES, ids=name)
def test_a_minibatch_without_trained_tokens_has_no_loss_and_no_gradient(
    section: PolicyLossSection, kind: Aggregation
) -> None:
    minibatch = draw([3, 2], 0)
    minibatch.mask[:] = False
    loss = minibatch.loss(section, kind, [0, 1])
    (gradient,) = torch.autograd.grad(loss, minibatch.logprobs)
    assert float(loss.detach()) == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("section", LOSSES, ids=name)
def test_a_stray_token_makes_no_loss_infinite(section: PolicyLossSection) -> None:
    minibatch = draw([4, 2], 1)
    minibatch.old[0], minibatch.old[3], minibatch.mask[:] = -1e9, -0.0, True
    losses = token_losses(section, minibatch.batch([0, 1]))
    assert torch.isfinite(losses.losses_N).all()
    assert all(
        torch.isfinite(value_N.double()).all() and not value_N.requires_grad for value_N in losses.shown.values()
    )
