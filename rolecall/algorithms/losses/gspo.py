"""GSPO: one importance ratio per sequence. Torch.

Shapes: N tokens of one microbatch.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses, ratios
from rolecall.algorithms.losses.ppo import clipped


def gspo(batch: PolicyBatch, *, clip_eps_low: float, clip_eps_high: float) -> TokenLosses:
    """PPO's clipped objective of s_t = sg[s] pi_t / sg[pi_t], s the geometric mean of the sequence's ratios
    (arXiv:2507.18071, eq. 5 and 7; section 4.3).

    The value of s_t is that of s on every token; its gradient stays with the token, so that any aggregation applies.
    Under seq_mean_token_mean and one advantage per sequence, values and gradients are those of GSPO itself.
    """
    mean_N = batch.sequence_means_S(batch.log_ratio_N().detach())[batch.sequence_N]
    ratio_N = ratios(mean_N + batch.logprobs_N - batch.logprobs_N.detach())
    return clipped(ratio_N, batch.advantages_N, clip_eps_low, clip_eps_high)
