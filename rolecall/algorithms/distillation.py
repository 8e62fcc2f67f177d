"""On-policy distillation as an advantage: every sampled token is scored by how much likelier the policy thought it than
the teacher. Numpy.

(As a loss: losses/distillation.py, in torch.)

Shapes: T tokens of one trajectory, another for each.
"""

import math
from collections.abc import Sequence

import numpy as np

from rolecall.wire import Array


def distil(
    advantages: Sequence[Array],
    policy_logprobs: Sequence[Array],
    teacher_logprobs: Sequence[Array],
    loss_masks: Sequence[Array],
    *,
    coef: float,
    task_coef: float,
    max_log_ratio: float | None = None,
) -> list[Array]:
    """[T] each: task_coef * A_t - coef * (log pi(token t) - log teacher(token t)) where loss_mask is 1, 0 elsewhere.
    The difference is held within +-max_log_ratio.

    The single-token sample of the reverse KL, whose policy gradient is that of KL(pi || teacher) token by token
    (MiniLLM, arXiv:2306.08543, takes the same divergence over whole responses); as an advantage, without a discount, in
    Thinking Machines' "On-Policy Distillation" (K. Lu, 2025, https://thinkingmachines.ai/blog/on-policy-distillation/).
    Both are at the trajectory's temperature. Leaves out what later tokens owe to this one.
    """
    bound = math.inf if max_log_ratio is None else max_log_ratio
    rows = zip(advantages, policy_logprobs, teacher_logprobs, loss_masks, strict=True)
    return [
        np.where(mask != 0, task_coef * task - coef * (policy - taught).clip(-bound, bound), 0).astype(policy.dtype)
        for task, policy, taught, mask in rows
    ]
