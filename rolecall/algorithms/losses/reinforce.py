"""Plain policy gradient. Torch.

Shapes: N tokens of one microbatch.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def reinforce(batch: PolicyBatch) -> TokenLosses:
    """-A log pi per token (Williams 1992; GPG's loss, arXiv:2504.02546, is the same). The old policy does not enter."""
    return TokenLosses(-batch.advantages_N * batch.logprobs_N, {})
