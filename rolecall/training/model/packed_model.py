"""A Hugging Face causal model prepared for packed training: backbone plus a policy or a value head behind one forward.

Everything a microbatch needs happens inside this forward, because FSDP gathers the root's parameters (embedding, final
norm, head) only there. Parameter names under `hf` are the checkpoint's own. Nothing here knows ranks or optimizers.

Shapes: N tokens of one microbatch; M its scored tokens; H hidden size; V vocabulary.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from rolecall.data.images.tokens import FAMILIES
from rolecall.data.model.trainable import check_trainable
from rolecall.errors import ConfigError
from rolecall.training.model.attention.handed_on import hand_on_plans
from rolecall.training.model.attention.packed import NAME, WITH_CAPS, PackedPlan, TracedAttention
from rolecall.training.model.logits.logprobs import VocabShard, Wanted, distribution, logprobs_and_entropy
from rolecall.training.model.long_rope import choose_factors
from rolecall.training.model.recurrent import keep_apart
from rolecall.training.model.supported import check_head, check_stateless, without_dropout
from rolecall.training.model.tensor_parallel import local_vocabulary
from rolecall.training.model.vision import ShownImages, VisionTower

Head = Literal["policy", "value"]

VALUE_HEAD = "value_head"
"""Name of the value head's Linear(H, 1) in a model directory: value_head.weight [1, H], value_head.bias [1]."""
SCORE_HEAD = "score"
"""Name that transformers gives the head of its classification models: score.weight [labels, H], and perhaps a bias."""
_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
"""What builds a reward model, by the end of its architecture's name."""


class PackedModel(nn.Module):
    """Common to both heads: the backbone over packed tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        hand_on_plans(hf)
        is_recurrent = keep_apart(hf)
        self.takes_buckets = is_recurrent or any(type(module).__name__ in WITH_CAPS for module in hf.modules())
        """Whether layers compute in the buckets of a plan whatever kernels attention has: such as hand a state from
        token to token, or may cap their scores.
        """
        self.vision = VisionTower(hf) if hf.config.model_type in FAMILIES else None
        """The tower that reads images; None: a model of text."""
        self.replaced_head = ""
        """Name in a model directory of the output layer that a value head took the place of; empty: none."""

    def hidden_NH(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        packed: PackedPlan | TracedAttention,
        shown: ShownImages | None = None,
    ) -> torch.Tensor:
        """The backbone's last hidden states, after its final norm; of the own run where tokens are shared
        (sequence_parallel.py), of distinct tokens (prefixes.py). `shown`: the images among them (vision.py).
        """
        if packed.sequence is not None:
            token_ids_N, position_ids_N = packed.sequence.own(token_ids_N), packed.sequence.own(position_ids_N)
        if isinstance(packed, PackedPlan) and packed.prefixes is not None:
            token_ids_N, position_ids_N = (
                x.index_select(-1, packed.prefixes.first_C) for x in (token_ids_N, position_ids_N)
            )
        if self.vision is None:
            output = self.hf.base_model(
                input_ids=token_ids_N[None], position_ids=position_ids_N[None], use_cache=False, packed=packed
            )
        else:
            inputs = (
                self.vision.inputs_of_text(token_ids_N, position_ids_N)
                if isinstance(packed, TracedAttention)
                else self.vision.inputs(token_ids_N, position_ids_N, shown)
            )
            output = self.vision.backbone(**inputs, use_cache=False, packed=packed)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class PolicyModel(PackedModel):
    """Logprobs and entropy of scored tokens, and what else is asked of their distributions."""

    float32_logits = False
    """Whether the output layer's products are kept in float32 where the model computes in half precision."""
    logit_scale = 1.0
    """The constant that the model multiplies its logits by."""
    logit_cap: float | None = None
    """The soft cap of what its output layer gives, before that constant; None: there is none."""

    def forward(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        temperature_N: torch.Tensor,
        score_mask_N: torch.Tensor,
        packed: PackedPlan,
        entropy: bool,
        targets_Nk: torch.Tensor | None = None,
        wanted: Wanted | None = None,
        shown: ShownImages | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Returns token_outputs of the model's hidden states."""
        weight_VH, vocab = local_vocabulary(self.hf.get_output_embeddings().weight)
        return token_outputs(
            self.hidden_NH(token_ids_N, position_ids_N, packed, shown),
            weight_VH,
            vocab,
            token_ids_N,
            temperature_N / self.logit_scale,
            score_mask_N,
            packed,
            entropy,
            targets_Nk,
            wanted,
            cap=self.logit_cap,
            float32_logits=self.float32_logits,
        )


class ValueModel(PackedModel):
    """A packed model that gives the output of a head of one number, such as a critic's or a reward model's.

    Of a head of two labels, wrong and right, the number is the difference of their logits: its sigmoid is the
    probability of the second.
    """

    head_name = VALUE_HEAD
    """Name of the head in a model directory."""

    @property
    def head(self) -> nn.Linear:
        """The head: Linear(H, 1) or Linear(H, 2), with a bias or without one."""
        head = self.hf.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    def forward(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        temperature_N: torch.Tensor,
        score_mask_N: torch.Tensor,
        packed: PackedPlan,
        entropy: bool,
        shown: ShownImages | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns value_outputs of the model's hidden states."""
        hidden_nH = self.hidden_NH(token_ids_N, position_ids_N, packed, shown)
        weight_1H, bias_1 = (_as_one(part) for part in (self.head.weight, self.head.bias))
        assert weight_1H is not None
        return value_outputs(hidden_nH, weight_1H, bias_1, score_mask_N, packed)


def token_outputs(
    hidden_nH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocab: VocabShard | None,
    token_ids_N: torch.Tensor,
    temperature_N: torch.Tensor,
    score_mask_N: torch.Tensor,
    packed: PackedPlan,
    entropy: bool,
    targets_Nk: torch.Tensor | None,
    wanted: Wanted | None,
    *,
    cap: float | None = None,
    float32_logits: bool,
) -> tuple[torch.Tensor, ...]:
    """(logprobs_N, entropy_N), float32, 0 where not scored: token t is scored from the hidden state at t - 1.

    `hidden_nH` are a backbone's, of what `packed` has it compute; `weight_VH` is the output layer's, or with `vocab`
    this rank's rows of it; `cap` is the soft cap of what it gives. With `targets_Nk` (ids) their logprobs follow, [N,
    k]. With `wanted`, which has no graph, [N, 2 k + 1]: ids, which float32 holds exactly up to 2^24, their logprobs,
    and the sum of squared probabilities.
    """
    run = _run(packed, token_ids_N.shape[0])
    scored_M = score_mask_N.nonzero().squeeze(1)
    if packed.sequence is not None:
        scored_M = scored_M[(scored_M > run.start) & (scored_M <= run.stop)]
    if packed.prefixes is not None:
        hidden_nH = packed.prefixes.spread(hidden_nH)
    before_MH = hidden_nH.index_select(0, scored_M - 1 - run.start)
    token_ids_M, temperature_M = token_ids_N[scored_M], temperature_N[scored_M]
    how: Any = {"vocab": vocab, "cap": cap, "float32_logits": float32_logits}
    if wanted is not None:
        found = distribution(before_MH, weight_VH, token_ids_M, temperature_M, wanted, **how)
        more_MC = torch.cat(
            [found.top_ids_Mk.to(torch.float32), found.top_logprobs_Mk, found.sum_squared_probs_M[:, None]], 1
        )
        outputs = [found.logprobs_M, torch.zeros_like(found.logprobs_M), more_MC]
    elif targets_Nk is not None:
        targets_MK = torch.cat([token_ids_M[:, None], targets_Nk[scored_M].long()], 1)
        logprobs_MK, entropy_M = logprobs_and_entropy(
            before_MH, weight_VH, targets_MK, temperature_M, entropy=entropy, **how
        )
        outputs = [logprobs_MK[:, 0], entropy_M, logprobs_MK[:, 1:]]
    else:
        outputs = list(logprobs_and_entropy(before_MH, weight_VH, token_ids_M, temperature_M, entropy=entropy, **how))
    num_tokens = token_ids_N.shape[0]
    whole = [
        output_M.new_zeros(num_tokens, *output_M.shape[1:]).index_copy(0, scored_M, output_M) for output_M in outputs
    ]
    if packed.sequence is not None:
        together_NC = packed.sequence.whole(torch.cat([output.view(num_tokens, -1) for output in whole], 1))
        parts = torch.split(together_NC, [output.view(num_tokens, -1).shape[1] for output in whole], 1)
        # not views: FSDP's hooks would be lost on them
        whole = [part.reshape(output.shape).clone() for part, output in zip(parts, whole, strict=True)]
    return tuple(whole)


def value_outputs(
    hidden_nH: torch.Tensor,
    weight_1H: torch.Tensor,
    bias_1: torch.Tensor | None,
    score_mask_N: torch.Tensor,
    packed: PackedPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values_N, outputs_N), float32: values[t] is the head's output at t - 1 where scored, else 0; outputs[t] the
    head's output at t. `hidden_nH` as in token_outputs.

    The head computes in float32: a value's last digits matter more than a hidden state's.
    """
    bias_1 = None if bias_1 is None else bias_1.float()
    outputs_N = linear(hidden_nH.float(), weight_1H.float(), bias_1).squeeze(1)
    if packed.prefixes is not None:
        outputs_N = packed.prefixes.spread(outputs_N)
    if packed.sequence is not None:
        outputs_N = packed.sequence.joined(outputs_N, score_mask_N.shape[0])
    before_N = torch.cat([outputs_N[:1], outputs_N[:-1]])
    return before_N * score_mask_N, outputs_N.clone()  # not a view: FSDP's hook would be lost on one


def _as_one(part: torch.Tensor | None) -> torch.Tensor | None:
    """The row of a head's weight or bias that gives its one number, in float32."""
    if part is None or part.shape[0] == 1:
        return part
    return part[1:].float() - part[:1].float()


def _run(packed: PackedPlan, num_tokens: int) -> range:
    """The tokens whose hidden states this rank has; may reach beyond `num_tokens`."""
    return range(num_tokens) if packed.sequence is None else packed.sequence.run(num_tokens)


def build_model(path: Path, head: Head, dtype: torch.dtype, max_sequence_tokens: int | None = None) -> PackedModel:
    """The model of the directory `path` on the meta device, parameters in `dtype`: shapes without storage. It has no
    dropout. `max_sequence_tokens` as in EngineOptions.

    A value model's head is that of a classification model of one or two labels, where the directory holds one. Else it
    takes the place of a causal model's output layer. ConfigError when it is not a supported model.
    """
    config = read_config(path)
    named = config.architectures or []
    without_dropout(config)
    classifier = next((kind for end, kind in _CLASSIFIERS.items() if any(name.endswith(end) for name in named)), None)
    causal = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
    hf = _empty(path, config, causal if classifier is None or head == "policy" else classifier, dtype)
    choose_factors(hf, max_sequence_tokens)
    if classifier is not None and head == "value":
        return _classifier(path, hf)
    if named and type(hf).__name__ not in named:
        raise ConfigError(
            f"{path} holds {', '.join(named)}, which is not the causal language model {type(hf).__name__}; use a "
            "model with a language head"
        )
    logit_scale, logit_cap = check_head(hf)
    if head == "policy":
        hf.tie_weights()
        policy = PolicyModel(hf)
        policy.logit_scale, policy.logit_cap = logit_scale, logit_cap
        return policy
    with torch.device("meta"):
        replaced_head = _replace_head(hf, config)
    hf.tie_weights()
    model = ValueModel(hf)
    model.replaced_head = replaced_head
    return model


def _empty(path: Path, config: PretrainedConfig, kind: type, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            # a vision tower's is its own (vision.py)
            attention = {"text_config": NAME} if config.model_type in FAMILIES else NAME
            hf: PreTrainedModel = kind.from_config(config, attn_implementation=attention, dtype=dtype)  # type: ignore[attr-defined]
    # no such model of this type; attention of its own instead of the interface
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{path}: a {config.model_type} model ({', '.join(config.architectures or [])}) cannot be trained packed "
            f"({error}); use a causal language model"
        ) from error
    for module in hf.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.requires_grad:  # biases of AFMoE's experts: as other families have theirs
                delattr(module, name)
                module.register_buffer(name, parameter.data)
    for buffer in filter(torch.is_floating_point, state_buffers(hf).values()):
        buffer.data = buffer.data.float()  # in half precision they would choose other experts
    return hf


def _classifier(path: Path, hf: PreTrainedModel) -> ValueModel:
    """A value model whose head is that of the classification model `hf`."""
    check_stateless(hf)
    head = dict(hf.named_children()).get(SCORE_HEAD)
    if not isinstance(head, nn.Linear) or head.out_features not in (1, 2):
        raise ConfigError(
            f"{path}: {type(hf).__name__} has no linear head `{SCORE_HEAD}` of one label, or of two (wrong and right); "
            "use a model whose num_labels is 1 or 2"
        )
    model = ValueModel(hf)
    model.head_name = SCORE_HEAD
    return model


def read_config(path: Path) -> PretrainedConfig:
    """config.json of a model directory. ConfigError when there is none, or it is not one of a model that can be
    trained.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a Hugging Face model directory: it has no config.json; check model.path")
    check_trainable(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"{path}: transformers does not take its config.json ({' '.join(str(error).split())}); correct it, or "
            "use another model"
        ) from error
    return config


def layers(model: PackedModel) -> list[nn.Module]:
    """The transformer blocks, a vision tower's among them: what FSDP shards and gradient checkpointing recomputes, one
    at a time.
    """
    names = set(model.hf._no_split_modules or ())
    # By its ancestors' names, too: sharding gives a module a class of its own.
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def language_layers(model: PackedModel) -> list[nn.Module]:
    """The transformer blocks that tokens go through: all but a vision tower's."""
    within = set(model.vision.module.modules()) if model.vision is not None else set[nn.Module]()
    return [layer for layer in layers(model) if layer not in within]


def fill_buffers(model: PackedModel) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies) after storage was given to a model from the
    meta device.
    """
    for module in model.hf.modules():
        if module._non_persistent_buffers_set:
            model.hf._init_weights(module)


def state_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `model` that model directories hold, by name, as the biases that balance experts: read, published
    and exported like parameters, and never trained.
    """
    derived = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in derived}


def _replace_head(hf: PreTrainedModel, config: PretrainedConfig) -> str:
    """Puts a value head in place of the output layer, whose name is returned."""
    output = hf.get_output_embeddings()
    name: str = next(name for name, child in hf.named_children() if child is output)
    hf.set_output_embeddings(None)
    setattr(hf, name, None)
    config.tie_word_embeddings = False
    hf.add_module(VALUE_HEAD, nn.Linear(config.get_text_config().hidden_size, 1))
    return name
