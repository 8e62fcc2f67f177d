"""CISPO: clipped importance weights in front of the plain policy gradient. Torch.

Shapes: N tokens of one microbatch.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def cispo(batch: PolicyBatch, *, clip_eps_low: float, clip_eps_high: float) -> TokenLosses:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi per token (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5). With a `low` of
    1 nothing bounds the weight from below.
    """
    ratio_N = batch.ratio_N().detach()
    low = 1 - clip_eps_low
    weights_N = ratio_N.clamp(low, 1 + clip_eps_high)
    shown = {"clip_fraction_high": ratio_N > 1 + clip_eps_high, "clip_fraction_low": ratio_N < low}
    return TokenLosses(-weights_N * batch.advantages_N * batch.logprobs_N, shown)
