"""Balancing and z-loss of routers: by hand, against loops, by autograd, and the same however the tokens are cut."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.algorithms.losses.router import RouterLoad, Routing, balance_loss, sum_routing, z_loss


def load_of(*routings: Routing) -> RouterLoad:
    """What router_load makes of one rank's microbatches."""
    counts_LE = torch.stack([routing.counts_LE.double() for routing in routings]).sum(0)
    return RouterLoad(counts_LE, float(sum(float(routing.num_choices) for routing in routings)))


def slow_losses(logits_LNE: Sequence[torch.Tensor], num_chosen: int) -> tuple[float, float]:
    """Both losses of a whole mini-batch, token by token, by their definitions."""
    num_experts = logits_LNE[0].shape[1]
    counts, probs, squares, num_choices = [0] * num_experts, [0.0] * num_experts, 0.0, 0
    for logits_NE in logits_LNE:
        for row in logits_NE.tolist():
            total = sum(math.exp(x) for x in row)
            squares += math.log(total) ** 2
            num_choices += 1
            for expert in range(num_experts):
                probs[expert] += math.exp(row[expert]) / total
            for expert in sorted(range(num_experts), key=lambda i: -row[i])[:num_chosen]:
                counts[expert] += 1
    balance = num_experts * sum(
        count / num_choices * prob / num_choices for count, prob in zip(counts, probs, strict=True)
    )
    return balance, squares / num_choices


def test_two_tokens_by_hand() -> None:
    # One layer, two experts, top-1. Token 1: logits (ln 3, 0), probabilities (3/4, 1/4). Token 2: (0, 0), (1/2, 1/2),
    # sent to expert 0 as the first. f = (1, 0), P = (5/8, 3/8): balance 2 * 5/8 = 1.25. z: (ln^2 4 + ln^2 2) / 2.
    logits_NE = torch.tensor([[math.log(3), 0.0], [1e-9, 0.0]], dtype=torch.float64)
    routing = sum_routing([logits_NE], torch.ones(2), 1)
    load = load_of(routing)
    assert float(balance_loss(routing, load)) == pytest.approx(1.25)
    assert float(z_loss(routing, load)) == pytest.approx((math.log(4) ** 2 + math.log(2) ** 2) / 2)
    assert load.busiest == 2.0


def test_even_routers_have_a_balance_of_the_experts_that_each_token_gets() -> None:
    logits_NE = torch.eye(4, dtype=torch.float64) + torch.roll(torch.eye(4, dtype=torch.float64), 1, 1) * 0.999
    routing = sum_routing([logits_NE], torch.ones(4), 2)
    load = load_of(routing)
    assert float(balance_loss(routing, load)) == pytest.approx(2.0, rel=1e-12)
    assert load.busiest == 1.0


@given(
    layers=st.integers(1, 3),
    tokens=st.integers(1, 12),
    experts=st.integers(2, 5),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 999),
)
def test_they_are_those_of_loops_however_the_tokens_are_cut(
    layers: int, tokens: int, experts: int, cuts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_LNE = [3 * torch.randn(tokens, experts, generator=generator, dtype=torch.float64) for _ in range(layers)]
    num_chosen = 1 + seed % (experts - 1)
    edges = sorted({0, tokens, *(min(cut, tokens) for cut in cuts)})
    parts = [
        sum_routing([logits_NE[start:stop] for logits_NE in logits_LNE], torch.ones(stop - start), num_chosen)
        for start, stop in itertools.pairwise(edges)
    ]
    load = load_of(*parts)
    balance, z = slow_losses(logits_LNE, num_chosen)
    assert float(sum(balance_loss(part, load) for part in parts)) == pytest.approx(balance, rel=1e-6)
    assert float(sum(z_loss(part, load) for part in parts)) == pytest.approx(z, rel=1e-6)


def test_a_token_of_weight_two_counts_as_two_and_one_of_weight_zero_as_none() -> None:
    logits_NE = torch.randn(3, 4, dtype=torch.float64)
    weighted = sum_routing([logits_NE], torch.tensor([2.0, 0.0, 1.0]), 2)
    copied = sum_routing([logits_NE[[0, 0, 2]]], torch.ones(3), 2)
    for ours, theirs in zip(vars(weighted).values(), vars(copied).values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_those_of_finite_differences_with_the_fractions_held() -> None:
    logits_NE = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    load = load_of(sum_routing([logits_NE.detach()], torch.ones(5), 2))

    def both(logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = sum_routing([logits_NE], torch.ones(5), 2)
        return balance_loss(routing, load), z_loss(routing, load)

    assert torch.autograd.gradcheck(both, (logits_NE,))


def test_double_precision_stays_and_half_precision_is_widened() -> None:
    assert sum_routing([torch.zeros(1, 2, dtype=torch.float64)], torch.ones(1), 1).probs_E.dtype == torch.float64
    assert sum_routing([torch.zeros(1, 2, dtype=torch.bfloat16)], torch.ones(1), 1).probs_E.dtype == torch.float32
