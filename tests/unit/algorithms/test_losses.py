"""Policy losses against numbers worked by hand from the papers' equations, and what they are to each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rolecall.algorithms.losses import PolicyBatch, token_losses
from rolecall.algorithms.losses.entropy import entropy_bonus
from rolecall.algorithms.losses.sft import sft_loss
from rolecall.settings import (
    ClippedLoss,
    CovarianceLoss,
    DppoLoss,
    DroLoss,
    PolicyLossSection,
    ReinforceLoss,
    SapoLoss,
)
from tests.unit.algorithms.loss_rig import Drawn, drawn, name

LOGPROB = -1.0
"""The logprob of a token whose ratio is given: the old one lies a log-ratio below it."""


def batch_of(
    ratios: list[float], advantages: list[float], *, selected: bool = False, logprob: float = LOGPROB
) -> PolicyBatch:
    """One sequence whose every token is trained on, with the graph in logprobs_N."""
    logprobs = torch.full((len(ratios),), logprob, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    ones = torch.ones(len(ratios), dtype=torch.bool)
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    return PolicyBatch(
        logprobs, old, advantages_N, ones, torch.zeros(len(ratios), dtype=torch.int64), 1, {"selected": ones & selected}
    )


def gradient(loss: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """d loss / d at."""
    return torch.autograd.grad(loss, at)[0]


CAP = ClippedLoss(clip_eps_low=0.2, clip_eps_high=0.28)
BINARY = 0.2 * math.log(0.2 / 0.3) + 0.8 * math.log(0.8 / 0.7)
"""KL of (0.2, 0.8) to (0.3, 0.7): 0.0257 nats."""


@pytest.mark.parametrize(
    ("section", "ratio", "advantage", "loss", "slope"),
    [
        # PPO eq. 7: -min(r A, clip(r, 0.8, 1.28) A)
        (CAP, 1.1, 2.0, -2.2, -2.2),
        (CAP, 1.5, 1.0, -1.28, 0.0),  # rewarded and already far above: clipped high
        (CAP, 0.5, 1.0, -0.5, -0.5),  # rewarded and far below: free to come back
        (CAP, 0.5, -1.0, 0.8, 0.0),  # punished and already far below: clipped low
        (CAP, 1.5, -1.0, 1.5, 1.5),
        # dual clip, arXiv:1912.09729 eq. 5: the objective is at least 3 A where A < 0
        (CAP, 5.0, -1.0, 5.0, 5.0),
        (ClippedLoss(dual_clip=3.0), 5.0, -1.0, 3.0, 0.0),
        (ClippedLoss(dual_clip=3.0), 5.0, 1.0, -1.28, 0.0),
        # CISPO eq. 4 and 5: -min(r, 5) A log pi, log pi = -1
        (ClippedLoss(kind="cispo"), 2.0, 3.0, 6.0, -6.0),
        (ClippedLoss(kind="cispo"), 8.0, 3.0, 15.0, -15.0),
        (ClippedLoss(kind="cispo"), 0.1, -1.0, -0.1, 0.1),
        (ClippedLoss(kind="cispo", clip_eps_low=0.5), 0.1, -1.0, -0.5, 0.5),
        # GMPO of one token: -A e^min(log r, 0.4) where A > 0, -A e^max(log r, -0.4) where A < 0
        (ClippedLoss(kind="gmpo"), math.exp(0.5), 2.0, -2 * math.exp(0.4), 0.0),
        (ClippedLoss(kind="gmpo"), math.exp(-0.5), 2.0, -2 * math.exp(-0.5), -2 * math.exp(-0.5)),
        (ClippedLoss(kind="gmpo"), math.exp(-0.5), -2.0, 2 * math.exp(-0.4), 0.0),
        # SAPO: -(4 / tau) sigmoid(tau (r - 1)) A; at r = 1 the sigmoid is 1/2 and the slope -A
        (SapoLoss(), 1.0, 1.0, -2.0, -1.0),
        (SapoLoss(tau_neg=2.0), 1.0, -1.0, 1.0, 1.0),
        (SapoLoss(tau_pos=1.0), 1 + math.log(3), 1.0, -3.0, -0.75 * (1 + math.log(3))),  # sigmoid(log 3) = 3/4
        # DRO: -(A log pi - beta / 2 (log r)^2), log pi = -1, log r = 0.5
        (DroLoss(beta=0.4), math.exp(0.5), 2.0, 2.0 + 0.05, -2.0 + 0.2),
        # REINFORCE: -A log pi
        (ReinforceLoss(), 7.0, 2.0, 2.0, -2.0),
    ],
    ids=str,
)
def test_the_loss_of_one_token_and_its_slope(
    section: PolicyLossSection, ratio: float, advantage: float, loss: float, slope: float
) -> None:
    batch = batch_of([ratio], [advantage])
    losses = token_losses(section, batch).losses_N.sum()
    assert (float(losses.detach()), float(gradient(losses, batch.logprobs_N))) == pytest.approx((loss, slope), rel=1e-9)


@pytest.mark.parametrize(
    ("section", "old", "now", "advantage", "loss"),
    [
        # |0.3 - 0.2| = 0.1 of total variation: within 0.15, beyond 0.05
        (DppoLoss(kind="dppo_tv"), 0.2, 0.3, 1.0, -1.5),
        (DppoLoss(kind="dppo_tv", max_divergence=0.05), 0.2, 0.3, 1.0, 0.0),
        (DppoLoss(kind="dppo_tv", max_divergence=0.05), 0.3, 0.2, 1.0, -2 / 3),  # on its way back: free
        (DppoLoss(kind="dppo_tv", max_divergence=0.05), 0.3, 0.2, -1.0, 0.0),
        (DppoLoss(kind="dppo_tv"), 1e-5, 1e-3, 1.0, -100.0),  # a ratio of 100 on a rare token moves little mass
        # the KL of two outcomes, 0.0257 nats
        (DppoLoss(kind="dppo_kl", max_divergence=BINARY + 1e-9), 0.2, 0.3, 1.0, -1.5),
        (DppoLoss(kind="dppo_kl", max_divergence=BINARY - 1e-9), 0.2, 0.3, 1.0, 0.0),
        (DppoLoss(kind="dppo_kl", max_divergence=BINARY - 1e-9), 0.2, 0.3, -1.0, 1.5),
        (DppoLoss(kind="dppo_kl"), 0.5, 1.0, 1.0, 0.0),  # a certain token: infinitely far by definition
    ],
    ids=str,
)
def test_a_token_that_would_leave_the_trust_region_has_no_loss(
    section: PolicyLossSection, old: float, now: float, advantage: float, loss: float
) -> None:
    batch = batch_of([now / old], [advantage], logprob=math.log(now))
    assert float(token_losses(section, batch).losses_N.detach().sum()) == pytest.approx(loss, rel=1e-9, abs=1e-12)


def test_gspo_clips_by_the_geometric_mean_of_the_ratios() -> None:
    section = ClippedLoss(kind="gspo", clip_eps_low=0.2, clip_eps_high=0.28)
    batch = batch_of([1.2, 1.2 / 1.44], [2.0, 2.0])  # the mean log-ratio is 0
    losses = token_losses(section, batch).losses_N
    assert losses.tolist() == pytest.approx([-2.0, -2.0])
    assert gradient(losses.sum(), batch.logprobs_N).tolist() == pytest.approx([-2.0, -2.0])
    # the mean is 2: beyond the bound, which a negative advantage does not heed
    batch = batch_of([1.0, 4.0], [1.0, -1.0])
    losses = token_losses(section, batch).losses_N
    assert losses.tolist() == pytest.approx([-1.28, 2.0])
    assert gradient(losses.sum(), batch.logprobs_N).tolist() == pytest.approx([0.0, 2.0])


def test_gmpo_gives_every_token_its_sequences_loss() -> None:
    # log-ratios 0.4 (clipped) and -0.2, mean advantage 1.5
    batch = batch_of([math.exp(0.9), math.exp(-0.2)], [2.0, 1.0])
    losses = token_losses(ClippedLoss(kind="gmpo"), batch).losses_N
    assert losses.tolist() == pytest.approx([-1.5 * math.exp(0.1)] * 2)
    assert gradient(losses.mean(), batch.logprobs_N).tolist() == pytest.approx([0.0, -0.75 * math.exp(0.1)])


def test_selected_tokens_are_held_back() -> None:
    clip, kl = CovarianceLoss(kind="clip_cov"), CovarianceLoss(kind="kl_cov", kl_coef=0.5)
    chosen, other = batch_of([1.5, 0.5], [1.0, 1.0], selected=True), batch_of([1.5, 0.5], [1.0, 1.0])
    assert token_losses(clip, chosen).losses_N.tolist() == [0.0, 0.0]
    assert token_losses(clip, other).losses_N.tolist() == pytest.approx([-1.5, -0.5])
    assert token_losses(kl, other).losses_N.tolist() == pytest.approx([-1.5, -0.5])
    losses = token_losses(kl, chosen).losses_N
    assert losses.tolist() == pytest.approx([-1.5 + 0.5 * math.log(1.5), -0.5 + 0.5 * math.log(2)])
    assert gradient(losses.sum(), chosen.logprobs_N).tolist() == pytest.approx([-1.5 + 0.5, -0.5 - 0.5])
    assert [token_losses(kl, each).shown["selected_fraction"].tolist() for each in (chosen, other)] == [
        [True, True],
        [False, False],
    ]


@pytest.mark.parametrize(
    ("section", "high", "low"),
    [
        (ClippedLoss(), [True, False, False, False], [False, True, False, False]),
        (ClippedLoss(dual_clip=1.2), [True, False, False, False], [False, True, False, True]),
        (
            ClippedLoss(kind="cispo", clip_eps_low=0.2, clip_eps_high=0.28),
            [True, False, False, True],
            [False, True, False, False],
        ),
        (DppoLoss(kind="dppo_tv", max_divergence=0.1), [True, False, False, False], [False, True, False, False]),
    ],
    ids=str,
)
def test_the_clip_fractions_say_which_bound_held(section: PolicyLossSection, high: list[bool], low: list[bool]) -> None:
    shown = token_losses(section, batch_of([1.5, 0.5, 1.0, 1.5], [1.0, -1.0, 1.0, -1.0])).shown
    assert (shown["clip_fraction_high"].tolist(), shown["clip_fraction_low"].tolist()) == (high, low)


@pytest.mark.parametrize(
    ("advantage", "high", "low"), [(1.0, [True, False], [False, False]), (-1.0, [False, False], [False, True])]
)
def test_gmpos_clip_fractions_say_which_bound_held(advantage: float, high: list[bool], low: list[bool]) -> None:
    shown = token_losses(ClippedLoss(kind="gmpo"), batch_of([math.exp(0.9), math.exp(-0.9)], [advantage] * 2)).shown
    assert (shown["clip_fraction_high"].tolist(), shown["clip_fraction_low"].tolist()) == (high, low)


def test_sapo_shows_how_far_its_gate_is_open() -> None:
    assert token_losses(SapoLoss(), batch_of([1.0, 1 + math.log(3)], [1.0, 1.0])).shown[
        "gate"
    ].tolist() == pytest.approx([1.0, 0.75])


def test_entropy_and_sft_terms_are_weighted_sums() -> None:
    weights = torch.tensor([0.5, 0.25])
    assert float(entropy_bonus(torch.tensor([1.0, 2.0]), weights)) == pytest.approx(1.0)
    assert float(sft_loss(torch.tensor([-1.0, -2.0]), weights)) == pytest.approx(1.0)


def sums(section: PolicyLossSection, minibatch: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum of the trained tokens' losses, its gradient)."""
    loss = minibatch.loss(section, "token_sum", range(len(minibatch.lengths)))
    return loss.detach(), gradient(loss, minibatch.logprobs)


def on_policy(minibatch: Drawn) -> Drawn:
    """The same, at ratio 1."""
    return Drawn(
        minibatch.lengths,
        minibatch.logprobs,
        minibatch.logprobs.detach().clone(),
        minibatch.advantages,
        minibatch.mask,
        minibatch.selected,
    )


@pytest.mark.parametrize(
    "section",
    [
        ClippedLoss(),
        ClippedLoss(dual_clip=3.0),
        ClippedLoss(kind="gspo"),
        ClippedLoss(kind="cispo"),
        SapoLoss(),
        CovarianceLoss(kind="kl_cov", kl_coef=0.0),
        DppoLoss(kind="dppo_tv"),
        DppoLoss(kind="dppo_kl"),
        DroLoss(beta=0.4),
    ],
    ids=name,
)
@settings(deadline=None, max_examples=20)
@given(minibatch=drawn())
def test_at_ratio_one_the_gradient_is_that_of_reinforce(section: PolicyLossSection, minibatch: Drawn) -> None:
    minibatch = on_policy(minibatch)
    torch.testing.assert_close(sums(section, minibatch)[1], sums(ReinforceLoss(), minibatch)[1])


@settings(deadline=None, max_examples=30)
@given(minibatch=drawn(per_token=False))
def test_at_ratio_one_gmpo_of_one_advantage_per_sequence_has_the_gradient_of_reinforce(minibatch: Drawn) -> None:
    minibatch = on_policy(minibatch)
    torch.testing.assert_close(sums(ClippedLoss(kind="gmpo"), minibatch)[1], sums(ReinforceLoss(), minibatch)[1])


@pytest.mark.parametrize(
    ("section", "ppo"),
    [
        (
            ClippedLoss(kind="gspo", clip_eps_low=0.2, clip_eps_high=0.28),
            ClippedLoss(clip_eps_low=0.2, clip_eps_high=0.28),
        ),
        (ClippedLoss(kind="gmpo"), ClippedLoss(clip_eps_low=1 - math.exp(-0.4), clip_eps_high=math.exp(0.4) - 1)),
    ],
    ids=str,
)
@settings(deadline=None, max_examples=30)
@given(minibatch=drawn())
def test_a_sequence_ratio_of_one_token_responses_is_ppos(
    section: PolicyLossSection, ppo: PolicyLossSection, minibatch: Drawn
) -> None:
    short = Drawn(
        [1] * sum(minibatch.lengths),
        minibatch.logprobs,
        minibatch.old,
        minibatch.advantages,
        minibatch.mask,
        minibatch.selected,
    )
    for ours, theirs in zip(sums(section, short), sums(ppo, short), strict=True):
        torch.testing.assert_close(ours, theirs)


@settings(deadline=None, max_examples=30)
@given(minibatch=drawn(per_token=False))
def test_gspo_of_tokens_is_gspo_of_sequences(minibatch: Drawn) -> None:
    """arXiv:2507.18071, eq. 5: the mean over sequences of min(s A, clip(s) A), with the gradient of s itself."""
    section = ClippedLoss(kind="gspo", clip_eps_low=0.05, clip_eps_high=0.1)
    loss = minibatch.loss(section, "seq_mean_token_mean", range(len(minibatch.lengths)))
    total = torch.zeros((), dtype=torch.float64)
    for start, length in zip(minibatch.starts, minibatch.lengths, strict=False):
        trained = [t for t in range(start, start + length) if minibatch.mask[t]]
        if trained:
            ratio = (minibatch.logprobs[trained] - minibatch.old[trained]).mean().exp()
            gain = torch.minimum(
                ratio * minibatch.advantages[start], ratio.clamp(0.95, 1.1) * minibatch.advantages[start]
            )
            total = total - gain / minibatch.counts.num_sequences + 0 * minibatch.logprobs.sum()
    torch.testing.assert_close(loss, total)
    if total.requires_grad:
        torch.testing.assert_close(gradient(loss, minibatch.logprobs), gradient(total, minibatch.logprobs))


@pytest.mark.parametrize(
    "section",
    [
        ClippedLoss(kind="cispo", clip_eps_high=1e9),
        CovarianceLoss(kind="kl_cov", kl_coef=0.0),
        DppoLoss(kind="dppo_tv", max_divergence=1.0),
        ClippedLoss(clip_eps_low=1.0, clip_eps_high=1e9),
    ],
)
@settings(deadline=None, max_examples=20)
@given(minibatch=drawn())
def test_without_bounds_the_gradient_is_that_of_reinforce_with_importance_weights(
    section: PolicyLossSection, minibatch: Drawn
) -> None:
    ratio = (minibatch.logprobs - minibatch.old).detach().exp()
    expected = torch.where(minibatch.mask, -ratio * minibatch.advantages, 0.0)
    torch.testing.assert_close(sums(section, minibatch)[1], expected)


@settings(deadline=None, max_examples=20)
@given(minibatch=drawn())
def test_clip_cov_without_selected_tokens_is_ppo(minibatch: Drawn) -> None:
    minibatch.selected[:] = False
    bounds = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    for ours, theirs in zip(
        sums(CovarianceLoss(kind="clip_cov", **bounds), minibatch), sums(ClippedLoss(**bounds), minibatch), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@settings(deadline=None, max_examples=20)
@given(minibatch=drawn(per_token=False))
def test_dr_grpo_is_the_group_centred_reward_over_a_constant_length(minibatch: Drawn) -> None:
    """arXiv:2503.20783: with advantages that are centred rewards, each trained token weighs 1 / (sequences x the
    constant), whatever its sequence's length.
    """
    loss = minibatch.loss(
        ClippedLoss(clip_eps_low=1.0, clip_eps_high=1e9), "seq_mean_token_sum_norm", range(len(minibatch.lengths))
    )
    ratio = (minibatch.logprobs - minibatch.old).exp()
    total = sum(float(-ratio[t].detach() * minibatch.advantages[t]) for t in range(len(ratio)) if minibatch.mask[t])
    np.testing.assert_allclose(
        float(loss.detach()), total / (max(minibatch.counts.num_sequences, 1) * 10), rtol=1e-6, atol=1e-12
    )
