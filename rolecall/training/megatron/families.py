"""Families of models: how the parameters of Megatron's modules are made of transformers' own, as one table each.

A rule names a parameter of Megatron's, those of transformers that it is made of, and how it is cut. Everything else
follows: which part of which file a rank reads, what it sends when weights are published, and what of a checkpoint is
its. A layer's names stand without their beginning, decoder.layers.<i>. and model.layers.<i>.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from rolecall.errors import ConfigError
from rolecall.training.megatron.layout import Place
from rolecall.training.model.box import Box
from rolecall.training.model.lora import adapter_names, is_adapter

Shapes = Mapping[str, Sequence[int]]
"""Full shapes of transformers' parameters, and of the buffers that model directories hold, by name."""


@dataclass(frozen=True)
class Piece:
    """Some rows of one of Megatron's parameters on a rank, and the part of transformers' that they are."""

    name: str
    box: Box
    start: int
    """The first of the rows."""

    @property
    def num_rows(self) -> int:
        """Rows of Megatron's parameter."""
        return self.box.shape[0]


@dataclass(frozen=True)
class Fused:
    """The matrices of transformers that the weight of a module is made of on a rank, by their modules' names."""

    num_rows: Mapping[str, int]
    """Rows of each that the rank has."""
    adapted: frozenset[str]
    """Names of the matrices that have an adapter."""
    num_groups: int
    """Times that they alternate, each with as many of its rows."""


Cut = Callable[[Sequence[str], Shapes, PretrainedConfig, Place], Iterator[Piece]]


@dataclass(frozen=True)
class Rule:
    """The origin of one of Megatron's parameters: those of transformers that it is made of, and how."""

    own: str
    cut: Cut
    theirs: tuple[str, ...]


def whole(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Every rank has all of it."""
    (name,) = names
    yield Piece(name, Box((0,) * len(shapes[name]), tuple(shapes[name])), 0)


def rows(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Each rank has as many rows of every one, one parameter after another."""
    start = 0
    for name in names:
        size, *others = shapes[name]
        size //= place.num_tensor
        yield Piece(name, Box((place.tensor * size, *(0 for _ in others)), (size, *others)), start)
        start += size


def columns(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Each rank has as many columns."""
    (name,) = names
    num_rows, size = shapes[name]
    size //= place.num_tensor
    yield Piece(name, Box((0, place.tensor * size), (num_rows, size)), 0)


def heads(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Queries, keys and values, by groups: the queries of one key head, the key, the value, and the next group."""
    num_groups = config.num_key_value_heads // place.num_tensor
    start = 0
    for group in range(place.tensor * num_groups, (place.tensor + 1) * num_groups):
        for name in names:
            size, *others = shapes[name]
            size //= config.num_key_value_heads
            yield Piece(name, Box((group * size, *(0 for _ in others)), (size, *others)), start)
            start += size


def experts(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Each rank has as many experts, whole."""
    (name,) = names
    num, *others = shapes[name]
    num //= place.num_expert
    yield Piece(name, Box((place.expert * num, *(0 for _ in others)), (num, *others)), 0)


def experts_last(names: Sequence[str], shapes: Shapes, config: PretrainedConfig, place: Place) -> Iterator[Piece]:
    """Each rank has as many experts, which are the last dimension."""
    (name,) = names
    *others, num = shapes[name]
    num //= place.num_expert
    yield Piece(name, Box((*(0 for _ in others), place.expert * num), (*others, num)), 0)


_NORMS = (
    Rule("input_layernorm.weight", whole, ("input_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", whole, ("post_attention_layernorm.weight",)),
)
_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        heads,
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    Rule("self_attention.linear_proj.weight", columns, ("self_attn.o_proj.weight",)),
)
_QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        heads,
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
)
_QK_NORM = (
    Rule("self_attention.q_layernorm.weight", whole, ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", whole, ("self_attn.k_norm.weight",)),
)
_LATENT = (
    Rule("self_attention.linear_q_proj.weight", rows, ("self_attn.q_proj.weight",)),
    Rule("self_attention.linear_q_down_proj.weight", rows, ("self_attn.q_a_proj.weight",)),
    Rule("self_attention.q_layernorm.weight", whole, ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", rows, ("self_attn.q_b_proj.weight",)),
    Rule("self_attention.linear_kv_down_proj.weight", rows, ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule("self_attention.kv_layernorm.weight", whole, ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", rows, ("self_attn.kv_b_proj.weight",)),
    Rule("self_attention.linear_proj.weight", columns, ("self_attn.o_proj.weight",)),
)
_MLP = (
    Rule("mlp.linear_fc1.weight", rows, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    Rule("mlp.linear_fc2.weight", columns, ("mlp.down_proj.weight",)),
)
_EXPERTS = (
    Rule("mlp.router.weight", whole, ("mlp.gate.weight",)),
    Rule("mlp.experts.gate_up", experts, ("mlp.experts.gate_up_proj",)),
    Rule("mlp.experts.down", experts, ("mlp.experts.down_proj",)),
)
_SHARED_EXPERTS = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        rows,
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", columns, ("mlp.shared_experts.down_proj.weight",)),
)
_GATED_SHARED_EXPERT = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        rows,
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", columns, ("mlp.shared_expert.down_proj.weight",)),
    Rule("mlp.shared_experts.gate_weight", whole, ("mlp.shared_expert_gate.weight",)),
)
_EXPERT_BIAS = (Rule("mlp.router.expert_bias", whole, ("mlp.gate.e_score_correction_bias",)),)
_LATENT_EXPERTS = (*_NORMS, *_LATENT, *_MLP, *_EXPERTS, *_SHARED_EXPERTS)
FAMILIES: Mapping[str, tuple[Rule, ...]] = {
    "llama": (*_NORMS, *_ATTENTION, *_MLP),
    "mistral": (*_NORMS, *_ATTENTION, *_MLP),
    "qwen2": (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_MLP),
    "seed_oss": (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_MLP),
    "qwen3": (*_NORMS, *_ATTENTION, *_QK_NORM, *_MLP),
    "mixtral": (*_NORMS, *_ATTENTION, *_EXPERTS),
    "qwen2_moe": (*_NORMS, *_ATTENTION, *_QKV_BIAS, *_MLP, *_EXPERTS, *_GATED_SHARED_EXPERT),
    "qwen3_moe": (*_NORMS, *_ATTENTION, *_QK_NORM, *_MLP, *_EXPERTS),
    "glm4_moe": (
        *(*_NORMS, *_ATTENTION, *_QKV_BIAS, *_QK_NORM, *_MLP),
        *(*_EXPERTS, *_SHARED_EXPERTS, *_EXPERT_BIAS),
    ),
    "deepseek_v2": _LATENT_EXPERTS,
    "deepseek_v3": (*_LATENT_EXPERTS, *_EXPERT_BIAS),
    "glm4_moe_lite": (*_LATENT_EXPERTS, *_EXPERT_BIAS),
}
"""The rules of a layer, by the model_type of config.json."""
_OUTSIDE = (
    Rule("embedding.word_embeddings.weight", rows, ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", whole, ("model.norm.weight",)),
    Rule("output_layer.weight", rows, ("lm_head.weight",)),
    Rule("value_head.weight", whole, ("value_head.weight",)),
    Rule("value_head.bias", whole, ("value_head.bias",)),
)


class Family:
    """The map of one model."""

    def __init__(self, config: PretrainedConfig, shapes: Shapes) -> None:
        """ConfigError when there is no map for the model, or it has parameters that the map does not know."""
        if config.model_type not in FAMILIES:
            raise ConfigError(
                f"actor.backend megatron has no map for a {config.model_type} model, only for {', '.join(FAMILIES)}; "
                "use one of these, or actor.backend fsdp"
            )
        self._config, self._shapes = config, shapes
        self._layer = {rule.own: rule for rule in FAMILIES[config.model_type]}
        self._outside = {rule.own: rule for rule in _OUTSIDE}
        known = {
            f"model.layers.{layer}.{name}"
            for layer in range(config.num_hidden_layers)
            for rule in self._layer.values()
            for name in rule.theirs
        } | {name for rule in _OUTSIDE for name in rule.theirs}
        unknown = sorted(name for name in shapes.keys() - known if not is_adapter(name))
        if unknown:
            raise ConfigError(
                f"actor.backend megatron does not know {unknown[0]!r} of this {config.model_type} model; use another "
                "model, or actor.backend fsdp"
            )

    def pieces(self, own: str, first_layer: int, place: Place) -> list[Piece]:
        """Returns the pieces of the parameter `own` of a rank at `place`, whose decoder begins with the layer
        `first_layer`.
        """
        rule, theirs = self._rule(own, first_layer)
        return list(rule.cut(theirs, self._shapes, self._config, place))

    def fused(self, own: str, first_layer: int, place: Place) -> Fused:
        """Returns what the matrix `own`, which is as of `pieces`, is made of."""
        rule, theirs = self._rule(own, first_layer)
        pieces = list(rule.cut(theirs, self._shapes, self._config, place))
        num_rows: dict[str, int] = {}
        for piece in pieces:
            num_rows[_module(piece.name)] = num_rows.get(_module(piece.name), 0) + piece.num_rows
        adapted = frozenset(_module(name) for name in theirs if adapter_names(name)[0] in self._shapes)
        return Fused(num_rows, adapted, len(pieces) // len(num_rows))

    def is_cut(self, own: str) -> bool:
        """Whether ranks that share matrices have different parts of it."""
        return self._rule(own, 0)[0].cut not in (whole, experts, experts_last)

    def is_expert(self, own: str) -> bool:
        """Whether it is of experts, of which ranks of one stage may have different ones."""
        return self._rule(own, 0)[0].cut in (experts, experts_last)

    def _rule(self, own: str, first_layer: int) -> tuple[Rule, list[str]]:
        of, _, adapter = own.partition(".adapters.")
        if adapter:
            module, _, half = adapter.partition(".")
            rule, theirs = self._rule(f"{of}.weight", first_layer)
            (down, up) = next(adapter_names(name) for name in theirs if _module(name) == module)
            if half == "down":
                return replace(rule, cut=columns if rule.cut is columns else whole), [down]
            return replace(rule, cut=whole if rule.cut is columns else rows), [up]
        of, _, half = own.partition("_adapter.")  # of experts
        if half:
            rule, (name,) = self._rule(of, first_layer)
            down, up = adapter_names(name)
            return (rule, [down]) if half == "down" else (replace(rule, cut=experts_last), [up])
        if own in self._outside:
            rule = self._outside[own]
            # an output layer of its own holds the tied embedding on the last of several stages
            return rule, [name if name in self._shapes else "model.embed_tokens.weight" for name in rule.theirs]
        index, _, rest = own.removeprefix("decoder.layers.").partition(".")
        rule = self._layer[rest]
        return rule, [f"model.layers.{first_layer + int(index)}.{name}" for name in rule.theirs]


def _module(weight: str) -> str:
    return weight.removesuffix(".weight").rpartition(".")[2]
