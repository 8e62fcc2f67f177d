"""Attention whose scores have a soft cap, c tanh(score / c) before the mask (Gemma 2, arXiv:2408.00118, section 2). No
kernel of torch has one: matrix products and a softmax in float32, of some queries at a time, which backward computes
again: never more scores exist at once than MAX_SCORES.

Shapes: b sequences of L tokens; l queries of them, which see S keys; H heads, D size of a key, E of a value.
"""

import torch
from torch.utils.checkpoint import checkpoint

MAX_SCORES = 2**24
"""Most scores that exist at once, 64 MiB in float32, unless one query of every sequence has more. At the peak there are
about four such tensors.
"""


def attend_with_cap(
    query_bHLD: torch.Tensor,
    key_bHLD: torch.Tensor,
    value_bHLE: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    cap: float,
    *,
    max_scores: int = MAX_SCORES,
) -> torch.Tensor:
    """[b, H, L, E], causal: a query sees its own token and at most `sliding_window` - 1 before it, all where None. Each
    query head has its own key head.
    """
    num_sequences, num_heads, length, size = query_bHLD.shape
    scale = size**-0.5 if scaling is None else scaling
    window = length if sliding_window is None else sliding_window
    step = max(1, max_scores // (num_sequences * num_heads * length))
    outputs = []
    for start in range(0, length, step):
        end, first = min(start + step, length), max(0, start - window + 1)
        query, key, value = query_bHLD[:, :, start:end], key_bHLD[:, :, first:end], value_bHLE[:, :, first:end]
        outputs.append(
            checkpoint(_attend, query, key, value, window, scale, cap, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(outputs, 2)


def _attend(
    query_bHlD: torch.Tensor,
    key_bHSD: torch.Tensor,
    value_bHSE: torch.Tensor,
    window: int,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """[b, H, l, E]: the queries are of the last l of the S tokens."""
    num_queries, num_keys = query_bHlD.shape[2], key_bHSD.shape[2]
    token_S = torch.arange(num_keys, device=query_bHlD.device)
    distance_lS = token_S[num_keys - num_queries :, None] - token_S
    hidden_lS = (distance_lS < 0) | (distance_lS >= window)
    scores_bHlS = query_bHlD @ key_bHSD.transpose(-1, -2)
    scores_bHlS = scores_bHlS.to(torch.promote_types(scores_bHlS.dtype, torch.float32)) * (scale / cap)
    scores_bHlS = (scores_bHlS.tanh() * cap).masked_fill(hidden_lS, -torch.inf)
    return scores_bHlS.softmax(-1).to(value_bHSE.dtype) @ value_bHSE
