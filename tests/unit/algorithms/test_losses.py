"""Losses and aggregation against numbers worked by hand, and their independence of how a mini-batch is cut."""

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.aggregation import Counts, sequence_index, token_weights
from rolecall.algorithms.losses import PolicyBatch
from rolecall.algorithms.losses.entropy import entropy_bonus
from rolecall.algorithms.losses.ppo import ppo
from rolecall.algorithms.losses.supervised import supervised_loss
from rolecall.algorithms.losses.value import value_loss
from rolecall.settings import Aggregation

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
CLIP: dict[str, float] = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def batch_of(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> PolicyBatch:
    """One sequence whose every token is trained on."""
    return PolicyBatch(logprobs, old, advantages, torch.ones_like(old, dtype=torch.bool), torch.zeros_like(old, dtype=torch.int64), 1, {})


def one_token_loss(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float]:
    """(loss, gradient at the logprob) of one token."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = ppo(batch_of(logprobs, torch.zeros(1), torch.tensor([advantage])), **CLIP, dual_clip=dual_clip).losses_N.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 1.0, -1.28, 0.0),  # rewarded and already far above: clipped high
        (0.5, 1.0, -0.5, -0.5),  # rewarded and far below: free to come back
        (0.5, -1.0, 0.8, 0.0),  # punished and already far below: clipped low
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_the_clipped_objective_token_by_token(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token_loss(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-5)


def test_dual_clip_bounds_the_loss_of_a_punished_token() -> None:
    assert one_token_loss(5.0, -1.0) == pytest.approx((5.0, 5.0), rel=1e-5)
    assert one_token_loss(5.0, -1.0, dual_clip=3.0) == pytest.approx((3.0, 0.0), rel=1e-5)
    assert one_token_loss(5.0, 1.0, dual_clip=3.0) == pytest.approx((-1.28, 0.0), rel=1e-5)


def test_the_clip_fractions_say_which_bound_held() -> None:
    logprobs = torch.tensor([1.5, 0.5, 1.0]).log()
    shown = ppo(batch_of(logprobs, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])), **CLIP).shown
    assert shown["clip_fraction_high"].tolist() == [True, False, False]
    assert shown["clip_fraction_low"].tolist() == [False, True, False]


def test_a_stray_token_cannot_make_the_loss_infinite() -> None:
    losses = ppo(batch_of(torch.tensor([0.0]), torch.tensor([-1e9]), torch.tensor([-1.0])), **CLIP)
    assert torch.isfinite(losses.losses_N).all()


def test_the_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    loss, terms = value_loss(values, torch.tensor([2.0, 0.9]), torch.tensor([0.0, 0.9]), torch.full((2,), 0.5), clip_eps=0.2)
    # token 0: free (1-2)^2 = 1, clipped (0.2-2)^2 = 3.24; token 1: 0.01 both ways
    assert float(loss.detach()) == pytest.approx(0.5 * 0.5 * (3.24 + 0.01), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    np.testing.assert_allclose(values.grad, [0.0, 0.05], atol=1e-6)
    assert terms.clipped_N.tolist() == [True, False]


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    loss, _ = value_loss(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([0.0]), torch.ones(1), clip_eps=None)
    assert float(loss) == pytest.approx(2.0)


def test_entropy_and_supervised_terms_are_weighted_sums() -> None:
    weights = torch.tensor([0.5, 0.25])
    assert float(entropy_bonus(torch.tensor([1.0, 2.0]), weights)) == pytest.approx(1.0)
    assert float(supervised_loss(torch.tensor([-1.0, -2.0]), weights)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [0, 0.2, 0.2, 0, 0.2]),
        ("seq_mean_token_mean", [0, 0.125, 0.125, 0, 0.25]),
        ("seq_mean_token_sum", [0, 0.25, 0.25, 0, 0.25]),
        ("seq_mean_token_sum_norm", [0, 0.025, 0.025, 0, 0.025]),
        ("token_sum", [0, 1, 1, 0, 1]),
    ],
)
def test_token_weights_by_hand(kind: Aggregation, expected: list[float]) -> None:
    mask = torch.tensor([False, True, True, False, True])
    weights = token_weights(mask, torch.tensor([0, 0, 0, 1, 1]), 2, kind, Counts(num_tokens=5, num_sequences=4), length=10)
    np.testing.assert_allclose(weights, expected)


def test_a_value_within_its_bounds_is_not_counted_as_clipped_for_a_last_bit() -> None:
    old = torch.arange(1, 1000) / 7
    _, terms = value_loss(old + 0.1, old - 1.0, old, torch.ones(999), clip_eps=0.2)
    assert not terms.clipped_N.any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1), st.sampled_from(AGGREGATIONS), st.data())
def test_loss_and_gradient_do_not_depend_on_how_the_minibatch_is_cut(lengths: list[int], seed: int, kind: Aggregation, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    leaf = torch.from_numpy(rng.normal(size=starts[-1]).astype(np.float32)).requires_grad_()
    old, advantages = (torch.from_numpy(rng.normal(size=starts[-1]).astype(np.float32)) for _ in range(2))
    mask = torch.from_numpy(rng.random(starts[-1]) < 0.6)
    trained = [bool(mask[a:b].any()) for a, b in pairwise(starts)]
    counts = Counts(int(mask.sum()), sum(trained))

    def loss_of(sequences: list[int]) -> torch.Tensor:
        index = torch.from_numpy(np.concatenate([np.arange(starts[s], starts[s + 1]) for s in sequences]))
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum([lengths[s] for s in sequences])]))
        sequence = sequence_index(cu_seqlens, len(index))
        batch = PolicyBatch(leaf[index], old[index], advantages[index], mask[index], sequence, len(sequences), {})
        return (ppo(batch, **CLIP, dual_clip=3.0).losses_N * token_weights(mask[index], sequence, len(sequences), kind, counts, length=10)).sum()

    whole = loss_of(list(range(len(lengths))))
    (whole_gradient,) = torch.autograd.grad(whole, leaf)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {0, len(lengths)})
    parts = [loss_of(list(order[a:b])) for a, b in pairwise(cuts)]
    total = torch.stack(parts).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-5)
