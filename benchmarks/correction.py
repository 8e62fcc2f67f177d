"""The effect of weights on the gradient when sampler and trainer differ, where the true gradient can be had: a bigram
policy.

    python benchmarks/correction.py [num_tokens ...]

The policy gives the next of 16 tokens by the last one and is rewarded for steps upward. The sampler is the policy some
updates before, its logits blurred, and in the second table of a length a few of them broken. For each weight: how far
the mean gradient is from the on-policy one (bias; up to 0.09 is noise), and how far that of one batch of 512 responses
is (error), relative to the gradient's length. The error on-policy is the noise that no weight can take away. Numpy; the
weights are those of rolecall/algorithms/correction.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch

from rolecall.algorithms.correction import correct
from rolecall.algorithms.losses import PolicyBatch
from rolecall.settings import CorrectionSection, ImportanceWeight, Rejection
from rolecall.wire import Array

NUM_WORDS, NUM_RESPONSES, NUM_BATCHES = 16, 512, 48
LEARNING_RATE = 0.1
"""The rate of an update by the sign of the gradient: a logit moves by this."""
BLUR = 0.02
"""The sampler's logits are off by this standard deviation; those that are broken by 3 either way."""
STALENESS = (0, 1, 2, 4)
"""Updates between the sampler and the policy."""
CORRECTIONS = {
    "none": None,
    "token, cap 2": CorrectionSection(),
    "token, no cap": CorrectionSection(weight=ImportanceWeight(cap=None)),
    "sequence, cap 2": CorrectionSection(weight=ImportanceWeight(kind="sequence")),
    "icepop": CorrectionSection(weight=ImportanceWeight(kind="icepop")),
    "token, cap 2; any out of 0.2 .. 5": CorrectionSection(
        reject=(Rejection(kind="ratio", over="sequence_max", low=0.2, high=5.0),)
    ),
}


@dataclass(frozen=True)
class Sampled:
    """B responses of T tokens, with advantages."""

    contexts_BT: Array
    tokens_BT: Array
    advantages_B: Array


def log_softmax(logits_VV: Array) -> Array:
    """Log-probabilities of the next token by the last."""
    return np.asarray(logits_VV - np.log(np.exp(logits_VV).sum(-1, keepdims=True)))


def sample(rng: np.random.Generator, logits_VV: Array, num_responses: int, num_tokens: int) -> Sampled:
    """Responses of the policy `logits_VV`, their advantage the centred share of steps upward."""
    cumulative_VV = np.exp(log_softmax(logits_VV)).cumsum(-1)
    tokens_BT = np.zeros((num_responses, num_tokens + 1), np.int64)
    for t in range(num_tokens):
        drawn_B = rng.random(num_responses)
        tokens_BT[:, t + 1] = (drawn_B[:, None] > cumulative_VV[tokens_BT[:, t]]).sum(-1).clip(max=NUM_WORDS - 1)
    rewards_B = (np.diff(tokens_BT) > 0).mean(-1)
    return Sampled(tokens_BT[:, :-1], tokens_BT[:, 1:], (rewards_B - rewards_B.mean()) / rewards_B.std())


def gradient(logits_VV: Array, sampled: Sampled, weights_BT: Array) -> Array:
    """[V, V]: of the weighted mean of A log p at the policy `logits_VV`."""
    scale_BT = weights_BT * sampled.advantages_B[:, None] / weights_BT.size
    total_VV = np.zeros_like(logits_VV)
    np.add.at(total_VV, (sampled.contexts_BT, sampled.tokens_BT), scale_BT)
    per_context_V = np.bincount(sampled.contexts_BT.ravel(), scale_BT.ravel(), NUM_WORDS)
    return np.asarray(total_VV - per_context_V[:, None] * np.exp(log_softmax(logits_VV)))


def weights(correction: CorrectionSection | None, trainer_VV: Array, sampler_VV: Array, sampled: Sampled) -> Array:
    """[B, T]: what `correction` makes of the responses."""
    shape, at = sampled.tokens_BT.shape, (sampled.contexts_BT, sampled.tokens_BT)
    if correction is None:
        return np.ones(shape)
    trained, drawn = (torch.from_numpy(log_softmax(logits)[at].ravel()) for logits in (trainer_VV, sampler_VV))
    index = torch.arange(shape[0]).repeat_interleave(shape[1])
    batch = PolicyBatch(trained, trained, trained, torch.ones_like(trained, dtype=torch.bool), index, shape[0], {})
    return np.asarray(correct(correction, batch, drawn).weights_N.reshape(shape).numpy())


def policies(rng: np.random.Generator, num_tokens: int, num_updates: int) -> list[Array]:
    """A policy after 0, 1, ... updates."""
    logits = [rng.normal(0, 1, (NUM_WORDS, NUM_WORDS))]
    for _ in range(num_updates):
        responses = sample(rng, logits[-1], NUM_RESPONSES, num_tokens)
        logits.append(
            logits[-1] + LEARNING_RATE * np.sign(gradient(logits[-1], responses, np.ones(responses.tokens_BT.shape)))
        )
    return logits


def compare(num_tokens: int, staleness: int, broken: float) -> dict[str, str]:
    """One column of a table: the sequences' effective sample size, then bias / error by weights. `broken` is the share
    of such logits.
    """
    rng = np.random.default_rng(0)
    history = policies(rng, num_tokens, 6)
    trainer_VV = history[-1]
    shape, ones = trainer_VV.shape, np.ones((NUM_RESPONSES, num_tokens))
    sampler_VV = (
        history[-1 - staleness] + rng.normal(0, BLUR, shape) + (rng.random(shape) < broken) * rng.choice([-3, 3], shape)
    )
    on_policy = np.array(
        [gradient(trainer_VV, sample(rng, trainer_VV, NUM_RESPONSES, num_tokens), ones) for _ in range(4 * NUM_BATCHES)]
    )
    truth_VV = on_policy.mean(0)
    batches = [sample(rng, sampler_VV, NUM_RESPONSES, num_tokens) for _ in range(NUM_BATCHES)]
    products = np.concatenate(
        [weights(CORRECTIONS["token, no cap"], trainer_VV, sampler_VV, batch).prod(-1) for batch in batches]
    )
    told = {
        "(sequence ESS)": f"{products.sum() ** 2 / (products**2).sum() / products.size:.2f}",
        "on-policy": f"0 / {_error(on_policy, truth_VV):.2f}",
    }
    for name, correction in CORRECTIONS.items():
        given = np.array(
            [gradient(trainer_VV, batch, weights(correction, trainer_VV, sampler_VV, batch)) for batch in batches]
        )
        told[name] = f"{_error(given.mean(0)[None], truth_VV):.2f} / {_error(given, truth_VV):.2f}"
    return told


def _error(gradients: Array, truth_VV: Array) -> float:
    return float(np.sqrt(((gradients - truth_VV) ** 2).sum((1, 2)).mean() / (truth_VV**2).sum()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for length in [int(argument) for argument in sys.argv[1:]] or [16, 128, 512]:
        for share in (0.0, 0.02):
            table = [compare(length, staleness, share) for staleness in STALENESS]
            sys.stdout.write(
                f"\n| {length} tokens, {share:.0%} broken | {' | '.join(f'staleness {k}' for k in STALENESS)} "
                f"|\n{'|---' * 5}|\n"
            )
            for row in table[0]:
                sys.stdout.write(f"| {row} | {' | '.join(column[row] for column in table)} |\n")
