"""DRO: policy gradient with a quadratic penalty on the log-ratio. Torch.

Shapes: N tokens of one microbatch.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def dro(batch: PolicyBatch, *, beta: float) -> TokenLosses:
    """-(A log pi - beta / 2 (log r)^2) per token.

    DRO (arXiv:2405.19107) regresses a trajectory's reward on value and log-ratio; its gradient in the policy, over tau,
    is that of A log pi - tau / 2 (log r)^2 of the whole trajectory. Here that stands for each token, as in Tinker's
    `dro`.
    """
    log_ratio_N = batch.log_ratio_N()
    return TokenLosses(-batch.advantages_N * batch.logprobs_N + 0.5 * beta * log_ratio_N.square(), {})
