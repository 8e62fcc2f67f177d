"""Advantage estimators over one batch of ragged trajectories, in numpy: one file per family, `estimate` is the one entry for a configured estimator.

Each estimator says which columns it `needs` beside the rewards. Pure: rewards come already shaped (shaping.py), results are new arrays.

Shapes: B trajectories of the batch, in order; T tokens of one trajectory (prompt + response), another for each.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.gae import gae
from rolecall.algorithms.advantages.groups import spread, totals
from rolecall.algorithms.advantages.grpo import grpo
from rolecall.algorithms.advantages.rloo import rloo
from rolecall.algorithms.advantages.whiten import whiten
from rolecall.settings import AdvantageSection, GaeAdvantage, GrpoAdvantage, RlooAdvantage

__all__ = ["Estimate", "ScoredBatch", "estimate", "needs"]


def needs(section: AdvantageSection) -> tuple[str, ...]:
    """Columns of other roles that the estimator reads beside rewards and masks."""
    return ("values", "bootstrap_value") if isinstance(section, GaeAdvantage) else ()


def estimate(section: AdvantageSection, batch: ScoredBatch) -> Estimate:
    """Runs the configured estimator. InvalidInputError when a column it needs is missing."""
    match section:
        case GrpoAdvantage():
            return Estimate(spread(grpo(totals(batch.rewards), batch.gids, normalize_std=section.normalize_std), batch.loss_masks))
        case RlooAdvantage():
            return Estimate(spread(rloo(totals(batch.rewards), batch.gids), batch.loss_masks))
        case GaeAdvantage():
            return _gae_estimate(section, batch)


def _gae_estimate(section: GaeAdvantage, batch: ScoredBatch) -> Estimate:
    bootstraps = [float(value[0]) for value in batch.column("bootstrap_value")]
    advantages, returns = gae(batch.rewards, batch.column("values"), batch.response_masks, bootstraps, gamma=section.gamma, gae_lambda=section.gae_lambda)
    if section.whiten:
        advantages = whiten(advantages, batch.loss_masks)
    return Estimate(*([np.where(mask != 0, a, np.float32(0)) for a, mask in zip(column, batch.loss_masks, strict=True)] for column in (advantages, returns)))
