"""The batch that vs_peers.py compares on: a random ragged batch, and a comparison.

Shapes: B responses, groups of G one after another; T response tokens, masked where a response is shorter or the
environment spoke; N = B T.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.peer_cases import Arrays, Case
from rolecall.algorithms.advantages import ScoredBatch
from rolecall.algorithms.losses import PolicyBatch
from rolecall.wire import Array

G, NUM_GROUPS, T = 4, 4, 12
B = G * NUM_GROUPS
EXACT = 1e-7
"""The tolerance for what a peer computes in float64: its 1e-8 in denominators."""
ROUGH = 5e-3
"""The tolerance for what has a peer's own constants in it: 1e-4 beside standard deviations."""


@dataclass(frozen=True)
class Row:
    """One comparison on one batch."""

    what: str
    peer: str
    case: Case
    ours: Arrays
    """What of the peer's answer is compared, by its names."""
    tolerance: float = EXACT
    differs: str = ""
    """Why the two are not the same; empty: they must be."""
    up_to_scale: bool = False
    """Whether both are divided by their root mean square first: whitening has n there and n - 1 here."""


class Batch:
    """A random batch, everything of one dtype."""

    def __init__(self, seed: int, dtype: str = "float64") -> None:
        self.rng = np.random.default_rng(seed)
        lengths, steps = self.rng.integers(2, T + 1, B), np.arange(T)
        is_said = (self.rng.random((B, T)) < 0.85) | (steps == lengths[:, None] - 1)
        self.mask = ((steps < lengths[:, None]) & is_said).astype(np.float64)
        self.gids = np.repeat(np.arange(NUM_GROUPS), G)
        self.last = T - 1 - self.mask[:, ::-1].argmax(1)
        self.outcomes = self.rng.choice([0.0, 0.5, 1.0], B) + 0.1 * self.rng.random(B)
        self.rewards = np.zeros((B, T))
        self.rewards[np.arange(B), self.last] = self.outcomes
        self.values = self.rng.normal(size=(B, T))
        self.logprobs = -self.rng.exponential(size=(B, T)) - 1e-3
        self.old = self._near(0.4)
        self.reference = self._near(0.4)
        self.sampled = np.minimum(self.old + self.rng.normal(scale=0.2, size=(B, T)), -1e-4)
        self.entropies = self.rng.random((B, T))
        self.advantages_B = self.rng.normal(size=B)
        self.advantages = np.repeat(self.advantages_B[:, None], T, 1)
        self.components = self.rng.choice([0.0, 0.5, 1.0], (B, 2)) + 0.1 * self.rng.random((B, 2))
        for name, array in list(vars(self).items()):
            if isinstance(array, np.ndarray) and array.dtype == np.float64:
                setattr(self, name, array.astype(dtype))

    def normal(self, *shape: int) -> Array:
        """More of the same dtype."""
        return self.rng.normal(size=shape).astype(self.mask.dtype)

    def _near(self, scale: float) -> Array:
        return np.minimum(self.logprobs + self.rng.normal(scale=scale, size=(B, T)), -1e-4)

    def scored(self, columns: Mapping[str, Array] | None = None, greedy: Array | None = None) -> ScoredBatch:
        """Returns the batch for estimators."""
        mask = list(self.mask.astype(np.uint8))
        components = {str(k): self.components[:, k] for k in range(2)}
        given = {name: list(column) for name, column in (columns or {}).items()}
        return ScoredBatch.of_rows(
            self.gids.tolist(), list(self.rewards), mask, mask, given, components, greedy_rewards=greedy
        )

    def policy(self, leaf: torch.Tensor, columns: Mapping[str, torch.Tensor] | None = None) -> PolicyBatch:
        """Returns the batch for losses: `leaf` [N] are the logprobs."""
        sequence = torch.arange(B).repeat_interleave(T)
        return PolicyBatch(leaf, flat(self.old), flat(self.advantages), flat(self.mask) > 0, sequence, B, columns or {})


def replace_mask(batch: Batch, mask: Array) -> Batch:
    """The same numbers with other lengths."""
    changed = copy(batch)
    changed.mask = mask
    return changed


def flat(array_BT: Array) -> torch.Tensor:
    """[N]."""
    return torch.from_numpy(array_BT.reshape(-1).copy())


def gradient_of(loss: torch.Tensor, leaf: torch.Tensor) -> Array:
    """[B, T]."""
    return torch.autograd.grad(loss, leaf)[0].reshape(B, T).numpy()


def behind_a_prompt(array_BT: Array) -> Array:
    """[B, T + 1]: 0 for the prompt's one token."""
    return np.pad(array_BT, ((0, 0), (1, 0)))
