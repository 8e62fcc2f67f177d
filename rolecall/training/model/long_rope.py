"""LongRoPE's factors, chosen once for a model as vLLM does, in place of each pass by its longest sequence."""

from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rolecall.data.model.rope import LONG_ROPE


def choose_factors(hf: PreTrainedModel, num_tokens: int | None) -> None:
    """Has `hf` turn every position by the factors for sequences of `num_tokens` tokens. Where its own bound is less, or
    `num_tokens` is None, that counts. Its rotary frequencies are yet to be computed.
    """
    text = hf.config.get_text_config()
    for module in hf.modules():
        rotary: dict[str, Any] = vars(module)
        if rotary.get("rope_type") == LONG_ROPE:
            own = text.max_position_embeddings
            longest = own if num_tokens is None else min(own, num_tokens)
            # what transformers computes frequencies by that stay as they are
            rotary["rope_type"] = "default"
            rotary["compute_default_rope_parameters"] = partial(ROPE_INIT_FUNCTIONS[LONG_ROPE], seq_len=longest)
