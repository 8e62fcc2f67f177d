"""One stage of a model out of Megatron's modules, on packed tokens, with our norm and our attention in them.

A microbatch is one sequence of its packed tokens to Megatron. What it does not know of packing is in `StagePass`: its
angles are those of each token's own position, and CoreAttention attends by the plan that FSDP2's models attend by
(model/attention/packed.py), which is padding-free and knows shared prefixes and ranks that share sequences. Padding,
where tensor ranks cut tokens into equal parts, ends before attention begins.

Shapes: n tokens of this rank's run, padding included; H hidden size; D head size; V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn.functional import pad
from transformers import PretrainedConfig

from rolecall.columns import TOPK_IDS
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.megatron.config import has_experts, rotary
from rolecall.training.megatron.experts import Experts
from rolecall.training.megatron.latent import LatentAttention, LatentNorm
from rolecall.training.megatron.norm import RmsNorm
from rolecall.training.megatron.routers import Router, RoutersPass, apart, behind, follow_passes
from rolecall.training.model.attention.packed import PackedPlan, packed_attention
from rolecall.training.model.logits.logprobs import VocabShard, Wanted
from rolecall.training.model.packed_model import Head, PackedModel, token_outputs, value_outputs
from rolecall.training.packing.outputs import ranked


@dataclass(frozen=True)
class StagePass:
    """The run of one microbatch that a stage computes. Megatron hands it on to attention as its `packed_seq_params`."""

    token_ids_n: torch.Tensor
    position_ids_n: torch.Tensor
    packed: PackedPlan
    num_tokens: int
    """Tokens of this rank's run without padding."""
    routers: RoutersPass | None
    """What is to be known of routers of experts, or told them; None: nothing."""
    angles_nD: torch.Tensor | None = None
    """Rotary angles of the tokens, for latent attention, which gets them from here."""
    local_cp_size: None = None
    """Looked for by Megatron: the ranks share sequences as it does not know."""
    qkv_format: str = "sbhd"
    """Megatron's word for queries and keys of one sequence: it does not unpack anything."""


def stage_pass(mb: Microbatch, packed: PackedPlan, multiple: int, routers: RoutersPass | None) -> StagePass:
    """The run of a microbatch that this rank computes, padded to a multiple of `multiple` tokens."""
    columns = [mb.token_ids_N, mb.position_ids_N]
    if packed.sequence is not None:
        columns = [packed.sequence.own(column) for column in columns]
    elif packed.prefixes is not None:
        columns = [column.index_select(0, packed.prefixes.first_C) for column in columns]
    num_tokens = columns[0].shape[0]
    ids_n, positions_n = (pad(column, (0, -num_tokens % multiple)) for column in columns)
    return StagePass(ids_n, positions_n, packed, num_tokens, routers)


class CoreAttention(nn.Module):
    """Attention of a layer, without parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._scale, self._window = softmax_scale, sliding_window

    def forward(
        self,
        query_n1HD: torch.Tensor,
        key_n1KD: torch.Tensor,
        value_n1KD: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: StagePass,
        **_: Any,
    ) -> torch.Tensor:
        """[n, 1, H * D]: each sequence attends to itself, causally; padding gives zeros."""
        num_tokens = packed_seq_params.num_tokens
        heads = (x[:num_tokens, 0].transpose(0, 1)[None] for x in (query_n1HD, key_n1KD, value_n1KD))
        query, key, value = heads
        out, _none = packed_attention(
            *(self, query, key, value, None),
            packed=packed_seq_params.packed,
            scaling=self._scale,
            sliding_window=self._window,
        )
        return pad(out[0].flatten(1), (0, 0, 0, query_n1HD.shape[0] - num_tokens))[:, None]


class Stage(LanguageModule):  # type: ignore[misc]  # of no known type
    """Some layers of a model, with its embedding where they are the first and its head where they are the last."""

    def __init__(
        self,
        config: TransformerConfig,
        model: PackedModel,
        head: Head,
        *,
        first: bool,
        last: bool,
        chunk: int | None,
        windows: Sequence[int | None],
        float32_logits: bool,
    ) -> None:
        """`model` is the whole model on the meta device; `chunk` which of this rank's stages it is, None where it has
        one; `windows` how many tokens each layer of the model attends to, the one itself included, None: all before it.
        """
        super().__init__(config)
        hf: PretrainedConfig = model.hf.config
        self.pre_process, self.post_process, self.vp_stage = first, last, chunk
        self._head, self._float32_logits = head, float32_logits
        self.share_embeddings_and_output_weights = head == "policy" and bool(hf.tie_word_embeddings)
        self.model_type = ModelType.encoder_or_decoder
        self._padding_id: int | None = model.hf.get_input_embeddings().padding_idx
        if first:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size=hf.vocab_size, max_sequence_length=0, position_embedding_type="rope"
            )
        self.decoder = TransformerBlock(
            config, _layers(config, chunk, windows), pre_process=first, post_process=last, vp_stage=chunk
        )
        self.value_head: nn.Linear | None = None
        if last and head == "value":
            self.value_head = nn.Linear(hf.hidden_size, 1, dtype=config.params_dtype)
        elif last:
            self.output_layer = ColumnParallelLinear(
                hf.hidden_size,
                hf.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=first and self.share_embeddings_and_output_weights,
            )
        if head == "policy":
            self.setup_embeddings_and_output_layer()
        self.register_buffer("inverse_frequencies", rotary(model).inv_freq, persistent=False)
        self._received: torch.Tensor | None = None
        if config.num_moe_experts:
            follow_passes(self.decoder.layers)

    @property
    def first_layer(self) -> int:
        """The first of its layers, counted from the model's."""
        return int(self.decoder.layers[0].layer_number) - 1

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Takes what the stage before gave; Megatron's schedules call it."""
        self._received = input_tensor[0]

    def forward(self, stage: StagePass) -> torch.Tensor:
        """[n, 1, H], or the run's part of it where tensor ranks cut tokens: the last hidden states of this stage, and
        behind them what routers say.
        """
        hidden = self._embedded(stage.token_ids_n) if self.pre_process else None
        received, numbers = self._received, None
        if received is not None and stage.routers is not None:
            received, numbers = apart(received, stage.routers.num_numbers)
        self.decoder.set_input_tensor(received)
        half = torch.outer(stage.position_ids_n.float(), self.inverse_frequencies)
        angles_nD = torch.cat([half, half], 1)
        is_latent = self.config.multi_latent_attention
        hidden_n1H: torch.Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=None if is_latent else angles_nD[:, None, None],
            packed_seq_params=replace(stage, angles_nD=angles_nD) if is_latent else stage,
        )
        return hidden_n1H if stage.routers is None else behind(*stage.routers.add(hidden_n1H, numbers))

    def _embedded(self, token_ids_n: torch.Tensor) -> torch.Tensor:
        hidden_n1H: torch.Tensor = self.embedding(token_ids_n[None], None)
        if self.config.recompute_granularity == "full" and torch.is_grad_enabled() and not hidden_n1H.requires_grad:
            hidden_n1H.requires_grad_()  # beneath adapters: a layer that is computed again needs an input that has one
        if self._padding_id is None:
            return hidden_n1H
        if self.config.sequence_parallel:
            token_ids_n = token_ids_n.chunk(self.tp_group.size())[self.tp_group.rank()]
        # transformers' embeddings of padding get no gradient, where a prompt has any
        return torch.where((token_ids_n == self._padding_id)[:, None, None], hidden_n1H.detach(), hidden_n1H)

    def outputs(
        self,
        hidden_n1H: torch.Tensor,
        given: StagePass,
        mb: Microbatch,
        entropy: bool,
        wanted: Wanted | None = None,
    ) -> TokenOutputs | ValueOutputs:
        """The head's outputs for what the last stage gives: the same on every rank that shares the microbatch."""
        if given.routers is not None:
            hidden_n1H, numbers = apart(hidden_n1H, given.routers.num_numbers)
            outputs = self._of_head(hidden_n1H, given, mb, entropy, wanted)
            return given.routers.with_numbers(outputs, numbers) if isinstance(outputs, TokenOutputs) else outputs
        return self._of_head(hidden_n1H, given, mb, entropy, wanted)

    def _of_head(
        self, hidden_n1H: torch.Tensor, given: StagePass, mb: Microbatch, entropy: bool, wanted: Wanted | None
    ) -> TokenOutputs | ValueOutputs:
        if self.config.sequence_parallel:
            # every one of these ranks goes on with the same loss, so with the whole gradient
            hidden_n1H = gather_from_sequence_parallel_region(hidden_n1H, tensor_parallel_output_grad=False)
        hidden_nH = hidden_n1H[: given.num_tokens, 0]
        if self._head == "value":
            head = self.value_head
            assert head is not None
            values_N, outputs_N = value_outputs(
                hidden_nH, head.weight.to(hidden_nH), head.bias.to(hidden_nH), mb.score_mask_N, given.packed
            )
            return ValueOutputs(values_N, outputs_N[mb.cu_seqlens[1:].long() - 1])
        is_tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        is_cut = self.tp_group.size() > 1
        first_N, second_N, *more = token_outputs(
            hidden_nH,
            weight_VH,
            VocabShard(self.tp_group, self.tp_group.rank() * weight_VH.shape[0]) if is_cut else None,
            mb.token_ids_N,
            mb.temperature_N,
            mb.score_mask_N,
            given.packed,
            entropy,
            mb.columns.get(TOPK_IDS) if torch.is_grad_enabled() else None,
            wanted,
            float32_logits=self._float32_logits,
        )
        if wanted is not None:
            return ranked(first_N, second_N, more[0], wanted)
        return TokenOutputs(first_N, second_N, target_logprobs_Nk=more[0] if more else None)


def _layers(config: TransformerConfig, chunk: int | None, windows: Sequence[int | None]) -> TransformerBlockSubmodules:
    """Megatron's own layers, without Transformer Engine, with our norm and attention."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
    specs = [_layer(config, has_experts(config, layer), windows[layer]) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RmsNorm)


def _layer(config: TransformerConfig, with_experts: bool, window: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if with_experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    if with_experts and config.num_moe_experts:
        layer.mlp.submodules.router, layer.mlp.submodules.experts = Router, Experts
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=CoreAttention, params={"sliding_window": window})
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return spec
