"""The options that a training engine is built from, all of it plain settings. Device and process group belong to the
process, not to the model.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from rolecall.settings import Dtype, LoraSection, MegatronSection, OptimizerSection, ParallelSection
from rolecall.training.model.packed_model import Head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""torch's own of the settings' names."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One model's training or scoring; the same on every rank."""

    path: Path
    """Model directory."""
    chat_template: str | None = None
    """Kept in checkpoints in place of the chat templates in `path`; None: those."""
    head: Head
    """What the model says of each token."""
    dtype: Dtype
    """Type of computing and publishing."""
    float32_logits: bool = False
    """Keep the output layer's products in float32 also where `dtype` is less (model.head_dtype)."""
    optimizer: OptimizerSection | None
    """None: frozen (a reference), parameters kept in `dtype`."""
    lora: LoraSection | None = None
    """Adapters to train instead of the parameters, which stay as they are, in `dtype`, but for a value head."""
    merges_adapters: bool = False
    """Publish the whole model with the adapters added, in place of the adapters."""
    total_steps: int = 1
    """The schedule's length in optimizer steps."""
    parallel: ParallelSection = ParallelSection()
    """How the ranks share the work."""
    megatron: MegatronSection = MegatronSection()
    """What the back end over Megatron-Core does beside the layout."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them."""
    activation_offload: bool = False
    """Keep activations in host memory between a layer's forward and its backward."""
    torch_compile: bool = False
    """Compile what lies between a layer's matrix products and attention (model/compiled.py)."""
    routers: bool = False
    """Record what routers of experts say (TokenOutputs.routing). ConfigError when the model has none."""
    router_replay: bool = False
    """Send tokens to the experts that a microbatch's column ROUTED_EXPERTS names. A pass without the column says what
    it would have to hold (TokenOutputs.routed_experts_NW); one of the base without its adapters does neither.
    ConfigError when the model has no routers, or they cannot be told what to choose.
    """
    freeze_vision_tower: bool = False
    """Leave the vision tower as it is, in `dtype`, where the model has one."""
    freeze_routers: bool = False
    """Leave the routers of experts as they are. ConfigError when the model has none."""
    max_sequence_tokens: int | None = None
    """Tokens of the longest sequence that the policy's sampler takes, by which LongRoPE's factors are chosen; None: the
    model's own bound.
    """
    shows_images: bool = True
    """Whether prompts may show images, where the model has a vision tower; else it is never called."""
    deterministic: bool = False
    """Take only kernels that compute the same bits from the same numbers."""
    seed: int = 0
    """Seed of new heads and of torch's generators."""

    @property
    def lora_setting(self) -> str:
        """Name of the adapters' section in the run's file."""
        return "actor.lora" if self.head == "policy" else "critic.lora"
