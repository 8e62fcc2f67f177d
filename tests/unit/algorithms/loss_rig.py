"""Mini-batches of ragged sequences for tests of losses, and every policy loss written out in loops over single numbers:
the oracle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from rolecall.algorithms.aggregation import Counts, sequence_index, token_weights
from rolecall.algorithms.losses import PolicyBatch, token_losses
from rolecall.settings import (
    Aggregation,
    ClippedLoss,
    CovarianceLoss,
    DppoLoss,
    DroLoss,
    PolicyLossSection,
    ReinforceLoss,
    SapoLoss,
)

LOSSES: list[PolicyLossSection] = [
    ClippedLoss(),
    ClippedLoss(dual_clip=1.5),
    ClippedLoss(kind="gspo", clip_eps_low=0.05, clip_eps_high=0.1),
    ClippedLoss(kind="cispo", clip_eps_high=0.3),
    ClippedLoss(kind="cispo", clip_eps_low=0.3, clip_eps_high=0.5),
    ClippedLoss(kind="gmpo"),
    SapoLoss(tau_neg=2.0),
    CovarianceLoss(kind="clip_cov", clip_eps_low=0.3, clip_eps_high=0.3),
    CovarianceLoss(kind="kl_cov", kl_coef=0.7),
    DppoLoss(kind="dppo_tv", max_divergence=0.05),
    DppoLoss(kind="dppo_kl", max_divergence=0.02),
    DroLoss(beta=0.4),
    ReinforceLoss(),
]
"""Every policy loss, with bounds that drawn ratios cross."""
LENGTH = 10
"""Of seq_mean_token_sum_norm."""


def name(section: PolicyLossSection) -> str:
    """For the ids of tests."""
    return section.kind


@dataclass(frozen=True)
class Drawn:
    """A mini-batch: float64 arrays over the tokens of all sequences, one after another."""

    lengths: list[int]
    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    selected: torch.Tensor

    @property
    def starts(self) -> list[int]:
        """Of the sequences, and the number of tokens."""
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def counts(self) -> Counts:
        """Of the whole mini-batch."""
        return Counts(int(self.mask.sum()), sum(bool(self.mask[a:b].any()) for a, b in pairwise(self.starts)))

    def batch(self, sequences: Sequence[int]) -> PolicyBatch:
        """The microbatch of `sequences`, in their order."""
        index = torch.from_numpy(np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in sequences]))
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum([self.lengths[s] for s in sequences])]))
        return PolicyBatch(
            self.logprobs[index],
            self.old[index],
            self.advantages[index],
            self.mask[index],
            sequence_index(cu_seqlens, len(index)),
            len(sequences),
            {"selected": self.selected[index]},
        )

    def loss(self, section: PolicyLossSection, kind: Aggregation, sequences: Sequence[int]) -> torch.Tensor:
        """What the microbatch of `sequences` adds to the mini-batch's loss."""
        batch = self.batch(sequences)
        weights = token_weights(batch.mask_N, batch.sequence_N, batch.num_sequences, kind, self.counts, LENGTH)
        return (token_losses(section, batch).losses_N * weights).sum()


def draw(lengths: list[int], seed: int, *, per_token: bool = True) -> Drawn:
    """Logprobs with a graph, ratios around 1, advantages of both signs, a third of the tokens not trained on; by some
    seeds a stray token, or nothing of the first sequence.
    """
    rng = np.random.default_rng(seed)
    num = sum(lengths)
    logprobs = -rng.exponential(size=num) - 1e-3
    advantages = rng.normal(size=num) if per_token else np.repeat(rng.normal(size=len(lengths)), lengths)
    mask = rng.random(num) < 0.67
    if seed % 4 == 0:
        mask[: lengths[0]] = False
    old = np.minimum(logprobs + rng.normal(scale=0.5, size=num), -1e-4)
    if seed % 3 == 0:
        logprobs[rng.integers(num)] -= 35  # one stray token, whose ratio is e^-35
    arrays = [torch.from_numpy(each) for each in (logprobs, old, advantages, mask, mask & (rng.random(num) < 0.3))]
    return Drawn(lengths, arrays[0].requires_grad_(), *arrays[1:])


def drawn(*, per_token: bool = True) -> st.SearchStrategy[Drawn]:
    """Up to seven sequences of one to nine tokens."""
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)
    return st.builds(lambda lengths, seed: draw(lengths, seed, per_token=per_token), lengths, st.integers(0, 2**32 - 1))


def oracle(section: PolicyLossSection, kind: Aggregation, minibatch: Drawn) -> tuple[float, list[float]]:
    """(loss, its gradient at each token's logprob), token by token."""
    minibatch = replace(minibatch, logprobs=minibatch.logprobs.detach())
    loss, gradient = 0.0, [0.0] * sum(minibatch.lengths)
    trained = [[t for t in range(a, b) if minibatch.mask[t]] for a, b in pairwise(minibatch.starts)]
    num_sequences = sum(bool(tokens) for tokens in trained)
    for tokens in trained:
        for t in tokens:
            weight = {
                "token_mean": lambda tokens: 1 / sum(map(len, trained)),
                "token_sum": lambda tokens: 1.0,
                "seq_mean_token_sum": lambda tokens: 1 / num_sequences,
                "seq_mean_token_mean": lambda tokens: 1 / (num_sequences * len(tokens)),
                "seq_mean_token_sum_norm": lambda tokens: 1 / (num_sequences * LENGTH),
            }[kind](tokens)
            value, slopes = oracle_token(section, minibatch, tokens, t)
            loss += weight * value
            for u, slope in slopes.items():
                gradient[u] += weight * slope
    return loss, gradient


def oracle_token(
    section: PolicyLossSection, minibatch: Drawn, tokens: list[int], t: int
) -> tuple[float, dict[int, float]]:
    """(loss of token t of a sequence whose trained tokens are `tokens`, its derivatives by logprobs)."""
    logprob, old, advantage = (float(column[t]) for column in (minibatch.logprobs, minibatch.old, minibatch.advantages))
    logs = {u: float(minibatch.logprobs[u]) - float(minibatch.old[u]) for u in tokens}
    ratio, selected = math.exp(logs[t]), bool(minibatch.selected[t])
    match section:
        case ClippedLoss(kind="ppo"):
            value, slope = oracle_clip(ratio, advantage, section.clip_eps_low, section.clip_eps_high)
            if section.dual_clip is not None and advantage < 0 and value > -section.dual_clip * advantage:
                value, slope = -section.dual_clip * advantage, 0.0
        case CovarianceLoss(kind="clip_cov"):
            value, slope = (
                (0.0, 0.0) if selected else oracle_clip(ratio, advantage, section.clip_eps_low, section.clip_eps_high)
            )
        case ClippedLoss(kind="gspo"):
            value, slope = oracle_clip(
                math.exp(sum(logs.values()) / len(logs)), advantage, section.clip_eps_low, section.clip_eps_high
            )
        case ClippedLoss(kind="cispo"):
            weight = max(min(ratio, 1 + section.clip_eps_high), 1 - section.clip_eps_low)
            value, slope = -weight * advantage * logprob, -weight * advantage
        case ClippedLoss(kind="gmpo"):
            return oracle_gmpo(section, [float(minibatch.advantages[u]) for u in tokens], logs)
        case SapoLoss():
            tau = section.tau_pos if advantage > 0 else section.tau_neg
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            value, slope = -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage
        case CovarianceLoss(kind="kl_cov"):
            value, slope = -ratio * advantage, -ratio * advantage
            if selected:
                value, slope = (
                    value + section.kl_coef * abs(logs[t]),
                    slope + section.kl_coef * math.copysign(1.0, logs[t]),
                )
        case DppoLoss():
            p, q = math.exp(logprob), math.exp(old)
            tv = section.kind == "dppo_tv"
            divergence = abs(p - q) if tv else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            leaving = (advantage > 0 and p > q) or (advantage < 0 and p < q)
            value = slope = 0.0 if leaving and divergence > section.max_divergence else -ratio * advantage
        case DroLoss():
            value, slope = -advantage * logprob + section.beta / 2 * logs[t] ** 2, -advantage + section.beta * logs[t]
        case ReinforceLoss():
            value, slope = -advantage * logprob, -advantage
    return value, {t: slope}


def oracle_clip(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """(-min(r A, clip(r) A), its derivative by log r)."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, -ratio * advantage
    return -bounded * advantage, 0.0


def oracle_gmpo(
    section: ClippedLoss, advantages: list[float], logs: dict[int, float]
) -> tuple[float, dict[int, float]]:
    """The sequence's loss, which each of its tokens carries, and its derivatives."""
    advantage, total, free = sum(advantages) / len(advantages), 0.0, []
    for u, log_ratio in logs.items():
        if advantage > 0 and log_ratio > section.clip_eps_high:
            total += section.clip_eps_high
        elif advantage < 0 and log_ratio < -section.clip_eps_low:
            total -= section.clip_eps_low
        else:
            total += log_ratio
            free.append(u)
    value = -advantage * math.exp(total / len(logs))
    return value, {u: value / len(logs) for u in free}
