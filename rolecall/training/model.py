"""A Hugging Face causal model prepared for packed training: backbone plus a policy or a value head behind one forward.

Everything a microbatch needs happens inside this forward, because FSDP gathers the root's parameters (embedding, final norm, head) only there. Parameter names
under `hf` are the checkpoint's own. Nothing here knows ranks or optimizers.

Shapes: N tokens of one microbatch; M its scored tokens; H hidden size; V vocabulary.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rolecall.errors import ConfigError
from rolecall.training.attention import NAME, PackedPlan
from rolecall.training.logprobs import logprobs_and_entropy

Head = Literal["policy", "value"]

VALUE_HEAD = "value_head"
"""Name of the value head's Linear(H, 1) in a model directory: value_head.weight [1, H], value_head.bias [1]."""


class PackedModel(nn.Module):
    """Common to both heads: the backbone over packed tokens."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def hidden_NH(self, token_ids_N: torch.Tensor, position_ids_N: torch.Tensor, packed: PackedPlan) -> torch.Tensor:
        """The backbone's last hidden states, after its final norm."""
        output = self.hf.base_model(input_ids=token_ids_N[None], position_ids=position_ids_N[None], use_cache=False, packed=packed)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class PolicyModel(PackedModel):
    """Logprobs and entropy of scored tokens."""

    def forward(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        temperature_N: torch.Tensor,
        score_mask_N: torch.Tensor,
        packed: PackedPlan,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs_N, entropy_N), float32, 0 where not scored: token t is scored from the hidden state at t - 1."""
        hidden_NH = self.hidden_NH(token_ids_N, position_ids_N, packed)
        scored_M = score_mask_N.nonzero().squeeze(1)
        head = self.hf.get_output_embeddings()
        logprobs_M, entropy_M = logprobs_and_entropy(
            hidden_NH.index_select(0, scored_M - 1), head.weight, token_ids_N[scored_M], temperature_N[scored_M], entropy=entropy
        )
        zeros_N = torch.zeros(token_ids_N.shape, dtype=torch.float32, device=token_ids_N.device)
        return zeros_N.index_copy(0, scored_M, logprobs_M), zeros_N.index_copy(0, scored_M, entropy_M)


class ValueModel(PackedModel):
    """The value head's output."""

    def forward(
        self,
        token_ids_N: torch.Tensor,
        position_ids_N: torch.Tensor,
        temperature_N: torch.Tensor,
        score_mask_N: torch.Tensor,
        packed: PackedPlan,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(values_N, outputs_N), float32: values[t] is the head's output at t - 1 where scored, else 0; outputs[t] the head's output at t.

        The head computes in float32: a value's last digits matter more than a hidden state's.
        """
        head = self.hf.get_submodule(VALUE_HEAD)
        assert isinstance(head, nn.Linear)
        hidden_NH = self.hidden_NH(token_ids_N, position_ids_N, packed)
        outputs_N = linear(hidden_NH.float(), head.weight.float(), head.bias.float()).squeeze(1)
        before_N = torch.cat([outputs_N[:1], outputs_N[:-1]])
        return before_N * score_mask_N, outputs_N.clone()  # not a view: FSDP's hook would be lost on one


def build_model(path: Path, head: Head, dtype: torch.dtype) -> PackedModel:
    """The model of the directory `path` on the meta device, parameters in `dtype`: shapes without storage.

    ConfigError when it is not a supported causal model.
    """
    config = read_config(path)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
        if head == "value":
            _replace_head(hf, config)
    if hf.get_output_embeddings() is not None and hf.get_output_embeddings().bias is not None:
        raise ConfigError(f"{type(hf).__name__} has a bias in its output layer, which logprobs do not support; use a model without one")
    hf.tie_weights()
    return PolicyModel(hf) if head == "policy" else ValueModel(hf)


def read_config(path: Path) -> PretrainedConfig:
    """config.json of a model directory. ConfigError when there is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a Hugging Face model directory: it has no config.json; check model.path")
    config: PretrainedConfig = AutoConfig.from_pretrained(path)
    return config


def layers(model: PackedModel) -> list[nn.Module]:
    """The transformer blocks: what FSDP shards and gradient checkpointing recomputes, one at a time."""
    names = set(model.hf._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def fill_buffers(model: PackedModel) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies) after storage was given to a model from the meta device."""
    for module in model.hf.modules():
        if any(True for _ in module.buffers(recurse=False)):
            model.hf._init_weights(module)


def _replace_head(hf: PreTrainedModel, config: PretrainedConfig) -> None:
    output = hf.get_output_embeddings()
    name = next(name for name, child in hf.named_children() if child is output)
    hf.set_output_embeddings(None)
    setattr(hf, name, None)
    config.tie_word_embeddings = False
    hf.add_module(VALUE_HEAD, nn.Linear(config.get_text_config().hidden_size, 1))
