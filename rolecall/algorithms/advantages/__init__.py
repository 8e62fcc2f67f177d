"""Advantage estimators over one batch of ragged trajectories, in numpy: one file per family, `estimate` is the one
entry for a configured estimator.

Which columns each needs beside the rewards stands in its section (rolecall/settings). Pure: rewards come already shaped
(shaping.py), results are new arrays.
"""

import numpy as np

from rolecall.algorithms.advantages.baselines import gdpo, gpg, maxrl, opo
from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.custom import custom
from rolecall.algorithms.advantages.gae import gae
from rolecall.algorithms.advantages.groups import Groups
from rolecall.algorithms.advantages.grpo import grpo, grpo_process
from rolecall.algorithms.advantages.pass_at_k import pass_at_k
from rolecall.algorithms.advantages.reinforce import reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from rolecall.algorithms.advantages.rloo import rloo
from rolecall.algorithms.advantages.token_baseline import optimal_token_baseline
from rolecall.settings import (
    AdvantageSection,
    CustomAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
    PlainAdvantage,
    ReinforcePlusPlusAdvantage,
)
from rolecall.wire import Array

__all__ = ["Estimate", "Groups", "ScoredBatch", "estimate"]


def estimate(section: AdvantageSection, batch: ScoredBatch) -> Estimate:
    """Runs the configured estimator. InvalidInputError when something it needs is missing."""
    match section:
        case GrpoAdvantage(supervision="process"):
            return grpo_process(batch, normalize_std=section.normalize_std)
        case GaeAdvantage():
            bootstrap_B = (
                batch.column("bootstrap_value") if section.bootstrap_truncated else np.zeros(batch.gids_B.size)
            )
            return gae(batch, bootstrap_B, gamma=section.gamma, gae_lambda=section.gae_lambda, whitened=section.whiten)
        case ReinforcePlusPlusAdvantage(baseline="group"):
            return reinforce_plus_plus_baseline(batch)
        case ReinforcePlusPlusAdvantage():
            return reinforce_plus_plus(batch, gamma=section.gamma)
        case PlainAdvantage():
            return _plain(section, batch)
        case CustomAdvantage():
            return custom(batch, section)
        case _:
            return Estimate(batch.spread(_of_trajectories(section, batch)))


def _of_trajectories(section: GrpoAdvantage | PassAtKAdvantage | GdpoAdvantage, batch: ScoredBatch) -> Array:
    """float64 [B]: what estimators with one number for each trajectory give."""
    match section:
        case GrpoAdvantage():
            return grpo(batch.totals_B, batch.gids_B, normalize_std=section.normalize_std)
        case PassAtKAdvantage():
            return pass_at_k(batch.totals_B, batch.gids_B, k=section.k, solved_at=section.solved_at)
        case GdpoAdvantage():
            return gdpo(batch, section.weights or batch.component_weights)


def _plain(section: PlainAdvantage, batch: ScoredBatch) -> Estimate:
    match section.kind:
        case "remax":
            return remax(batch)
        case "optimal_token_baseline":
            return optimal_token_baseline(batch)
        case "rloo":
            numbers_B = rloo(batch.totals_B, batch.gids_B)
        case "opo":
            numbers_B = opo(batch.totals_B, batch.gids_B, batch.num_sampled_B)
        case "gpg":
            numbers_B = gpg(batch.totals_B, batch.gids_B)
        case "maxrl":
            numbers_B = maxrl(batch.totals_B, batch.gids_B)
    return Estimate(batch.spread(numbers_B))
