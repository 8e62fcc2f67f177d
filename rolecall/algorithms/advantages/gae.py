"""GAE over a critic's values. Numpy.

Shapes: B trajectories; L steps of time; N tokens of the batch. values[t] is the value before token t.
"""

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.time import discount
from rolecall.algorithms.advantages.whiten import whiten
from rolecall.wire import Array


def deltas(batch: ScoredBatch, bootstrap_B: Array, gamma: float) -> Array:
    """float64 [B, L]: r_t + gamma V_{t+1} - V_t. Run by run, the last first, so that a run stays in the processor's
    cache until it is done.
    """
    values_N, following_B = batch.column("values"), bootstrap_B.tolist()
    deltas_BL = batch.zeros_in_time()
    for start, stop, trajectory, deltas_T in reversed(batch.runs_in(deltas_BL)):
        deltas_T[:-1] = values_N[start + 1 : stop]
        deltas_T[-1] = following_B[trajectory]
        deltas_T *= gamma
        deltas_T -= values_N[start:stop]
        deltas_T += batch.rewards_N[start:stop]
        following_B[trajectory] = float(values_N[start])
    return deltas_BL


def gae(batch: ScoredBatch, bootstrap_B: Array, *, gamma: float, gae_lambda: float, whitened: bool = False) -> Estimate:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1} (GAE, arXiv:1506.02438, eq. 16);
    returns = A + V.

    Time runs over sampled tokens: what an environment said between two turns is stepped over, with no discount. After
    the last sampled token comes `bootstrap_B`, float [B]; a one-token response gets r + gamma * bootstrap - V. Groups
    do not matter. A trajectory that is masked out gets 0 and has no part in whitening. InvalidInputError without the
    critic's values.
    """
    advantages_N = batch.from_time(discount(deltas(batch, bootstrap_B, gamma), gamma * gae_lambda))
    returns_N = advantages_N + batch.column("values")
    returns_N *= batch.loss_mask_N
    return Estimate(whiten(advantages_N, batch.loss_mask_N) if whitened else advantages_N, returns_N)
