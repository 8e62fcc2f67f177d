"""The ways in which transformers computes the layers of each family, as far as memory of a training pass goes by them:
its norms, its feed-forward network, and what stands beside them.

A family is a value of model_type. Every one here is held to what autograd keeps of a tiny model
(tests/unit/training/test_activations.py); of the others nothing is reckoned.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """A kind of norm: tensors as wide as its input that it keeps beside its output."""

    in_float32: int
    """Tensors in float32."""
    rounded: int
    """Tensors in the type that the model computes in."""

    def kept(self, size: int) -> int:
        """Bytes of each number of the input, where the model computes in numbers of `size` bytes."""
        return 4 * self.in_float32 + size * self.rounded


_RMS = Norm(1, 1)
"""Normalized in float32, rounded, and multiplied by the weight."""
_RMS_IN_FLOAT32 = Norm(2, 0)
"""Multiplied by the weight in float32, too."""
_LAYER_NORM = Norm(0, 1)
"""One of torch's kernels."""
_CENTERED = Norm(3, 0)
"""Cohere's: centred, normalized and multiplied by the weight in float32."""


@dataclass(frozen=True)
class Family:
    """The way a family computes a layer."""

    norm: Norm = _RMS
    num_norms: int = 2
    """Norms of a hidden state in a layer."""
    num_inputs: int = 2
    """Hidden states in a layer that matrices read: of attention, and of the feed-forward network; 1: both read one."""
    norms_heads: bool = False
    """Whether queries and keys have norms, also where config.json has no use_qk_norm."""
    norms_values: bool = False
    """Whether values have one, without a weight."""
    gates_attention: bool = False
    """Whether what attention gives is multiplied by a gate."""
    fuses_values: bool = False
    """Whether values are a part of what one product made, which stays whole."""
    widths: int = 4
    """Tensors as wide as the feed-forward network that it keeps: the gate's input, its activation, what it multiplies,
    and the product; 2 where there is no gate.
    """
    width_name: str = "intermediate_size"
    """Name in a vision tower's configuration of how wide its layers' feed-forward network is."""
    routes_in_float32: bool = False
    """Whether its routers read float32."""
    gates_shared: bool = False
    """Whether the shared expert's output is multiplied by a gate."""
    expert_widths: int = 4
    """The same of an expert and a row."""


_PLAIN = Family()
_NORMED = Family(norms_heads=True)
_FLOAT32_ROUTED = Family(routes_in_float32=True)
_GEMMA = Family(_RMS_IN_FLOAT32, num_norms=4)
_GATED = Family(_RMS_IN_FLOAT32, norms_heads=True, gates_attention=True, gates_shared=True)
_LAYER_NORMED = Family(_LAYER_NORM, widths=2)
_OLMO = Family(_RMS_IN_FLOAT32, norms_heads=True)

FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "mixtral", "qwen2", "seed_oss", "smollm3", "cwm"), _PLAIN),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _PLAIN),
    **dict.fromkeys(("ernie4_5", "glm", "granite", "granitemoe"), _PLAIN),
    "deepseek_v2": _FLOAT32_ROUTED,
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "olmoe", "mellum"), _NORMED),
    **dict.fromkeys(("exaone4", "hunyuan_v1_dense", "minimax_m2"), _NORMED),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "solar_open"), _FLOAT32_ROUTED),
    **dict.fromkeys(("dots1", "exaone_moe"), Family(norms_heads=True, routes_in_float32=True)),
    "qwen2_moe": Family(gates_shared=True),
    "phi3": Family(fuses_values=True),
    **dict.fromkeys(("glm4", "glm4v", "glm4v_text"), Family(num_norms=4)),
    **dict.fromkeys(("gemma", "helium"), Family(_RMS_IN_FLOAT32)),
    "gpt_oss": Family(_RMS_IN_FLOAT32, expert_widths=7),  # what gate and up read and give is cut, and clamped
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), _OLMO),
    "gemma2": _GEMMA,
    "gemma3_text": Family(_RMS_IN_FLOAT32, num_norms=4, norms_heads=True),
    "gemma4_text": Family(_RMS_IN_FLOAT32, num_norms=4, norms_heads=True, norms_values=True),
    "afmoe": Family(_RMS_IN_FLOAT32, num_norms=4, norms_heads=True, gates_attention=True),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED),
    **dict.fromkeys(("nemotron", "starcoder2", "jais2"), _LAYER_NORMED),
    "stablelm": Family(_LAYER_NORM),
    "arcee": Family(widths=2),
    **dict.fromkeys(("cohere", "cohere2"), Family(_CENTERED, num_norms=1, num_inputs=1)),
}
"""How each family computes, by model_type."""
TOWERS = {
    "qwen2_vl": Family(_LAYER_NORM, widths=3),  # its activation's sigmoid stays, too
    "qwen2_5_vl": _PLAIN,
    "glm4v": Family(width_name="out_hidden_size"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _LAYER_NORMED),
}
"""How vision towers compute, by the whole model's model_type."""
