"""The mean importance weight of a step, over all its mini-batches and ranks, before its first update: what
`algorithm.correction.weight.normalize` divides by.

Owns what crosses ranks for it: two sums. The weights are rolecall/algorithms/correction's; the mean does not depend on
how the step was cut into microbatches and ranks.
"""

from collections.abc import Iterable

import numpy as np

from rolecall.algorithms.correction import weight_sums
from rolecall.algorithms.losses import PolicyBatch
from rolecall.settings import ImportanceWeight
from rolecall.training.engine import Microbatch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.wire import Array


def mean_weight(group: CommandGroup, microbatches: Iterable[Microbatch], weight: ImportanceWeight) -> float:
    """Returns the mean over this rank's `microbatches` and all others', which have their old_logprobs; 1 where no token
    is trained or all weigh 0. A collective.
    """
    sums = (_sums(each, weight) for each in microbatches if each.lengths)
    total, num = group.sum_over_slots(sum(sums, np.zeros(2))).tolist()
    return total / num if total > 0 else 1.0


def _sums(microbatch: Microbatch, weight: ImportanceWeight) -> Array:
    columns, old_N = microbatch.columns, microbatch.columns["old_logprobs"]
    mask_N = columns["loss_mask"] & microbatch.score_mask_N
    sequence_N, num_sequences = microbatch.trajectory_N(), microbatch.num_trajectories
    batch = PolicyBatch(old_N, old_N, columns["advantages"], mask_N, sequence_N, num_sequences, columns)
    return np.asarray(weight_sums(weight, batch, columns["rollout_logprobs"]).numpy(force=True))
