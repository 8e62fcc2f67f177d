"""The bytes that a rollout's cache keeps of a response, by the model's config.json: keys and values of all its tokens
or of those in a window, latents, and states.

Reckoned as vLLM 0.32 allocates them (its kv_cache_utils). A cache is blocks, one of which has room for some tokens in
each of a group of layers. Layers of one kind are one group, or several where a model has several kinds: all groups have
as many layers, so that any block may become any group's. Nothing is known of families that are not in
settings/sizes/families.py.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.data.model.files import text_config
from rolecall.settings.rollout import RolloutSection
from rolecall.settings.sizes.families import FAMILIES
from rolecall.settings.sizes.layers import UNREADABLE, Layer, layers_of

BLOCK_TOKENS = 16
"""Tokens of a block on GPUs, where the engine is not told otherwise and no state needs a larger one."""
MANY_MORE = 1.5
"""Layers of the commonest kind for each of the rarest, below which vLLM pads the groups of the others to as many."""


@dataclass(frozen=True)
class _Kind:
    """Layers that are kept alike."""

    window: int
    """Tokens that are kept of a response; 0: all."""
    block_tokens: int
    """Tokens that a block has room for; 0: it holds a state, whatever the tokens."""
    num_groups: int

    def num_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks of a response, of all groups. A window begins anywhere in a block."""
        if not self.block_tokens:
            return self.num_groups
        if not self.window:
            return self.num_groups * -(-num_tokens // self.block_tokens)
        kept = min(self.window - 1 + in_flight, num_tokens)
        return self.num_groups * (-(-kept // self.block_tokens) + 1)


@dataclass(frozen=True)
class CacheSizes:
    """Bytes on each worker of a rollout, of its largest stage."""

    block_bytes: int
    """One block: its pages of all layers of a group."""
    kinds: tuple[_Kind, ...]

    @property
    def per_token(self) -> float:
        """Bytes of one token more, in the layers that keep all."""
        growing = (kind for kind in self.kinds if kind.block_tokens and not kind.window)
        return sum(self.block_bytes * kind.num_groups / kind.block_tokens for kind in growing)

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps all tokens."""
        return all(kind.block_tokens and not kind.window for kind in self.kinds)

    def response_bytes(self, num_tokens: int, in_flight: int = 1) -> int:
        """Bytes of a response and its prompt of `num_tokens`, of which up to `in_flight` are computed at a time: of
        those behind a window blocks are given back only then.
        """
        return self.block_bytes * sum(kind.num_blocks(num_tokens, in_flight) for kind in self.kinds)


def cache_sizes(path: Path, rollout: RolloutSection, size: int) -> CacheSizes | None:
    """The sizes of the cache that `rollout` has of the model at `path`, in numbers of `size` bytes. None where they are
    not known. ConfigError where config.json cannot be read.
    """
    text = text_config(path)
    if "kv_cache_dtype" in rollout.engine:
        return None
    given = rollout.engine.get("block_size")
    block = given if isinstance(given, int) and given > 0 else BLOCK_TOKENS
    try:
        return _sizes(text, rollout, size, block) if text.get("model_type") in FAMILIES else None
    except UNREADABLE:
        return None  # config.json lacks what such a model has, of which others complain


def _sizes(text: dict[str, Any], rollout: RolloutSection, size: int, block: int) -> CacheSizes:
    num_tensor = rollout.tensor_parallel_size
    layers = [layer for layer in layers_of(text) if not layer.reuses]
    counts = Counter((layer.window, _per_token(text, layer, size, num_tensor)) for layer in layers)
    largest = max(per_token for _, per_token in counts)
    state = _state_bytes(text, size, num_tensor) if (0, 0) in counts else 0
    block = max(block, block * -(-state // (block * largest)))  # so large that a state fits where a page does
    page = block * largest
    rarest, commonest = min(counts.values()), max(counts.values())
    group = commonest if commonest < rarest * MANY_MORE else rarest

    def tokens_of(per_token: int) -> int:
        """Tokens of a block where a layer keeps so much of one; a page that they would not fill is padded."""
        if not per_token:
            return 0
        return page // per_token if page % per_token == 0 else block

    return CacheSizes(
        block_bytes=page * -(-group // rollout.pipeline_parallel_size),
        kinds=tuple(
            _Kind(window, tokens_of(per_token), -(-count // group)) for (window, per_token), count in counts.items()
        ),
    )


def _per_token(text: dict[str, Any], layer: Layer, size: int, num_tensor: int) -> int:
    """Bytes that a layer keeps of a token on a worker; 0: it keeps a state. A latent is the same on all workers."""
    if layer.kind == "recurrent":
        return 0
    if text.get("kv_lora_rank"):
        return int((text["kv_lora_rank"] + text["qk_rope_head_dim"]) * size)
    return 2 * max(1, layer.keys // num_tensor) * layer.head_dim * size


def _state_bytes(text: dict[str, Any], size: int, num_tensor: int) -> int:
    """Bytes of a gated delta rule's state, and of the tokens that its convolution reads again."""
    heads, key, value = (text[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    convolved = 2 * text["linear_num_key_heads"] * key + heads * value
    state_size = 4 if text.get("mamba_ssm_dtype") == "float32" else size
    read_again = text.get("linear_conv_kernel_dim", 4) - 1
    return int((convolved * read_again * size + heads * key * value * state_size) // num_tensor)
