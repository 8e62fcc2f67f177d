"""The rollout, or the rank of the actor, whose logprobs are far from what all others have.

Every rank knows which rollout sampled its rows. Where one engine, or one rank, computes another model than the rest,
the tokens of that one alone are far apart, and it is named. Only tokens of trajectories sampled with these very weights
are looked at. Rounding moves the logprob of a token the less, the surer the policy is of it; so a token counts by how
unsure it is, and one whose prompts are hard is not far for it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rolecall.v1.trajectory_pb2 import RowRef

MIN_TOKENS = 256
"""Fewest unsure tokens, of one and of all others, whose distances are compared."""
MIN_DISTANCE = 1e-3
"""Distance of logprobs for each unsure token below which nobody is told of it."""
FACTOR = 8.0
"""Times as far as all others that one is."""

Distances: TypeAlias = Mapping[str, tuple[float, float]]
"""Sums of |rollout_logprobs - old_logprobs| and of 1 - exp(old_logprobs), the unsure tokens, by name."""


@dataclass(frozen=True)
class Outlier:
    """One that is far from the others."""

    name: str
    distance: float
    """Distance for each of its unsure tokens."""
    others: float
    """Distance for each unsure token of all others."""


def by_rollout(
    old_N: torch.Tensor, rollout_N: torch.Tensor, trajectory_N: torch.Tensor, refs: Sequence[RowRef]
) -> Distances:
    """The distances by the rollout that sampled a trajectory. old_N and rollout_N [N] are logprobs of the actor and of
    the rollouts, of the trajectories numbered in trajectory_N, int64 [N], whose rows are `refs`.
    """
    each_N2 = torch.stack([(old_N - rollout_N).abs(), -torch.expm1(old_N)], 1).double()
    sums = each_N2.new_zeros(len(refs), 2).index_add_(0, trajectory_N, each_N2).tolist()
    found: dict[str, tuple[float, float]] = {}
    for ref, (total, number) in zip(refs, sums, strict=True):
        name = ref.token.rpartition("-")[0]  # the consumer that it was claimed by
        before = found.get(name, (0.0, 0.0))
        found[name] = (before[0] + total, before[1] + number)
    return found


def encoded(distances: Distances) -> bytes:
    """Makes what a rank tells the others."""
    return json.dumps(distances).encode()


def outlier(of_ranks: Sequence[bytes]) -> Outlier | None:
    """Returns the rollout or the rank that is furthest from all others, if any is far, by what each rank told. It is
    the one whose distance stands out most: that of a rollout raises a little that of the ranks which train on it.
    """
    told: list[Distances] = [json.loads(each) for each in of_ranks]
    rollouts: dict[str, tuple[float, float]] = {}
    for distances in told:
        for name, (total, number) in distances.items():
            before = rollouts.get(name, (0.0, 0.0))
            rollouts[name] = (before[0] + total, before[1] + number)
    ranks = {f"rank {rank} of the actor": _sum(each.values()) for rank, each in enumerate(told)}
    found = [*_outliers(rollouts), *_outliers(ranks)]
    return max(found, key=lambda each: each.distance / max(each.others, 1e-12), default=None)


def _outliers(distances: Distances) -> list[Outlier]:
    total, number = _sum(distances.values())
    found = []
    for name, (own, num_own) in distances.items():
        if min(num_own, number - num_own) >= MIN_TOKENS:
            each = Outlier(name, own / num_own, (total - own) / (number - num_own))
            if each.distance >= max(MIN_DISTANCE, FACTOR * each.others):
                found.append(each)
    return found


def _sum(distances: Iterable[tuple[float, float]]) -> tuple[float, float]:
    sums = list(distances)
    return sum(total for total, _ in sums), sum(number for _, number in sums)
