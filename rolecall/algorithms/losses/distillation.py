"""On-policy distillation as a loss: forward KL from a teacher over the ids that it gives the highest probability, and
reverse KL of the sampled tokens. Torch.

Shapes: N tokens of one microbatch, packed; k ids of the teacher's highest probability.
"""

import math

import torch

TAIL_FLOOR = 1e-6
"""The probability of all other ids is held above this: less is below what float32 sums of probabilities resolve."""


def forward_topk_kl_N(logprobs_Nk: torch.Tensor, teacher_logprobs_Nk: torch.Tensor) -> torch.Tensor:
    """[N], differentiable in logprobs_Nk (the policy's, of the teacher's ids): sum over k of p_T (log p_T - log p_S),
    and the same of one more outcome.

    That is the tail: all ids outside the teacher's k, of probability 1 - sum. The forward KL of generalised knowledge
    distillation on the policy's own samples (GKD, arXiv:2306.13649, section 3), coarsened. So it is a KL of two
    distributions: never negative, 0 where the k probabilities agree, at most the KL over the whole vocabulary
    (coarsening does not raise one), and the gradient on the logits of the k ids is p_S - p_T, that of the whole one.
    Without the tail the policy could lower it below 0 by mass on the k ids in a wrong proportion. Within the tail
    nothing is taught.
    """
    inside_N = (teacher_logprobs_Nk.exp() * (teacher_logprobs_Nk - logprobs_Nk)).sum(1)
    tail_N, teacher_tail_N = (
        (1 - x_Nk.exp().sum(1)).clamp(min=TAIL_FLOOR) for x_Nk in (logprobs_Nk, teacher_logprobs_Nk)
    )
    return inside_N + teacher_tail_N * (teacher_tail_N.log() - tail_N.log())


def reverse_kl_N(
    logprobs_N: torch.Tensor, teacher_logprobs_N: torch.Tensor, max_log_ratio: float | None
) -> torch.Tensor:
    """[N], differentiable in logprobs_N: log(policy / teacher) of the sampled token, held within +-max_log_ratio, with
    the gradient of (log ratio)^2 / 2, which is that of KL(policy || teacher) on average (kl.py's k1 with k2's).

    Beyond the bound the gradient stays what it is there, as Huber's loss has it: a clamp of the loss itself would let
    go of just the tokens that are farthest off.
    """
    bound = math.inf if max_log_ratio is None else max_log_ratio
    held_N = (logprobs_N.detach() - teacher_logprobs_N).clamp(-bound, bound)
    return held_N + held_N * (logprobs_N - logprobs_N.detach())
