"""Rotary positions by a model's config.json: of which type they are, and which factors of LongRoPE a run takes.

Some types turn a position by what is computed beside it, and packed passes hold sequences of all lengths. Phi-3's
LongRoPE is taken all the same, for vLLM chooses its factors once for an engine, and so does every trainer, by the same
length (training/model/long_rope.py). No torch.
"""

import math
from collections.abc import Iterator
from typing import Any

from rolecall.errors import ConfigError

LONG_ROPE = "longrope"
"""The type that has short factors, and long ones for models that read further than they were first trained to."""
_BY_LENGTH = ("dynamic", LONG_ROPE, "su")
"""Types whose angles change with the length of what is computed together; `su` is an older name of LongRoPE."""
_OF_PHI3 = ("su", "yarn")
"""Names that transformers takes for LongRoPE in a phi3, the one family whose LongRoPE was tried."""
_ORIGINAL_TOKENS = 4096
"""The original_max_position_embeddings of a phi3 whose config.json has none beside its rotary settings."""


def rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model's rotary positions by its configuration: those under the older name, where it has both,
    as transformers takes them.
    """
    return dict(text.get("rope_scaling") or text.get("rope_parameters") or {})


def kind_of_rope(text: dict[str, Any]) -> Any:
    """The type of a model's rotary positions by its configuration."""
    kind = _kind(rope_parameters(text))
    return LONG_ROPE if text.get("model_type") == "phi3" and kind in _OF_PHI3 else kind


def check_rope(text: dict[str, Any], where: str) -> None:
    """ConfigError when packed sequences cannot be turned as the configuration says, or vLLM turns them otherwise.
    `where` names the model.
    """
    kind = kind_of_rope(text)
    if kind == LONG_ROPE and text.get("model_type") == "phi3":
        _check_long_rope(text, where)
        return
    of_layers = [_kind(part) for part in rope_parameters(text).values() if isinstance(part, dict)]
    for each in (kind, *of_layers):
        if each in _BY_LENGTH:
            raise ConfigError(
                f"{where} turns positions by the longest sequence of a pass (rope_type {each!r} of config.json), and "
                "sequences of all lengths are packed; use another model, or a Phi-3 or Phi-4"
            )


def describe_factors(text: dict[str, Any], num_tokens: int, setting: str) -> Iterator[str]:
    """Yields a line on the factors that the model which `setting` names takes where sequences have up to `num_tokens`
    tokens, or its own bound; none for a model without LongRoPE. The model is one that check_rope takes.
    """
    if kind_of_rope(text) != LONG_ROPE:
        return
    longest, original = min(num_tokens, text["max_position_embeddings"]), _original_tokens(text)
    is_long = longest > original
    yield (
        f"rotary positions of {setting}: LongRoPE's {'long' if is_long else 'short'} factors for all tokens; the "
        f"longest sequence, of {longest} tokens, is {'beyond' if is_long else 'within'} "
        f"original_max_position_embeddings {original}"
    )


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _original_tokens(text: dict[str, Any]) -> Any:
    """The tokens that the phi3 was first trained to read, whatever stands among its rotary settings."""
    return text.get("original_max_position_embeddings", _ORIGINAL_TOKENS)


def _check_long_rope(text: dict[str, Any], where: str) -> None:
    """ConfigError when transformers and vLLM would turn positions differently: each has settings that the other does
    not read.
    """
    rope, original, longest = rope_parameters(text), _original_tokens(text), text.get("max_position_embeddings")
    if not isinstance(original, int) or not isinstance(longest, int) or original < 2:
        raise ConfigError(
            f"{where} has LongRoPE with original_max_position_embeddings {original} and max_position_embeddings "
            f"{longest} of config.json; both must be whole numbers above 1: correct it"
        )
    vllm = _attention_factor(longest / original, original)
    ours = rope.get("attention_factor") or _attention_factor(rope.get("factor") or longest / original, original)
    given = {name: rope[name] for name in ("short_mscale", "long_mscale") if rope.get(name) is not None}
    if not all(math.isclose(ours, factor, rel_tol=1e-7) for factor in (vllm, *given.values())):
        raise ConfigError(
            f"{where} has LongRoPE whose queries and keys transformers scales by {ours:.7g} and vLLM by "
            f"{', '.join(f'{factor:.7g}' for factor in (given.values() or [vllm]))} (factor, attention_factor, "
            "short_mscale and long_mscale of config.json); use another model"
        )


def _attention_factor(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
