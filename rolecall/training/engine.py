"""The two seams of the training library: `TrainingEngine` computes, `EngineState` keeps.

FSDP2 (`rolecall/training/fsdp/`) implements both; a service's engine.py knows only this file. Every rank of the group makes the same calls
in the same order: each call is a collective. Nothing here knows gRPC, the store or what a step is made of.

Shape legend: N tokens of one microbatch, all its sequences one after another; S sequences of one microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rolecall.telemetry import Metrics


@dataclass(frozen=True)
class Microbatch:
    """Packed sequences on the engine's device, padding-free. An empty one (N = 0) still takes part in the collectives."""

    token_ids_N: torch.Tensor
    """int64 [N]."""
    position_ids_N: torch.Tensor
    """int64 [N], from 0 in every sequence."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], starts of the sequences and N."""
    lengths: tuple[int, ...]
    """The S sequences' lengths on the host: planning attention must not wait for the device."""
    temperature_N: torch.Tensor
    """float32 [N], what the logits that predict token t are divided by."""
    score_mask_N: torch.Tensor
    """bool [N], tokens whose logprob, entropy or value is wanted; never a sequence's first token."""
    columns: Mapping[str, torch.Tensor]
    """Per-token columns [N] that the loss reads (advantages, old_logprobs, ...), by their names in the trajectory schema."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a policy says of each token, aligned as in rolecall/trajectory.py; 0 where score_mask is false. Keeps the graph in forward_backward."""

    logprobs_N: torch.Tensor
    """float32 [N], temperature applied."""
    entropy_N: torch.Tensor
    """float32 [N], of the distribution that token t was drawn from; zeros unless asked for."""


@dataclass(frozen=True)
class ValueOutputs:
    """What a value model says of each token. Keeps the graph in forward_backward."""

    values_N: torch.Tensor
    """float32 [N], values[t] is the head's output at t - 1; 0 where score_mask is false."""
    bootstrap_values_S: torch.Tensor
    """float32 [S], the head's output at each sequence's last token."""


Loss = Callable[[Microbatch, TokenOutputs | ValueOutputs], tuple[torch.Tensor, Metrics]]
"""(loss, metrics). The loss is already divided by the global mini-batch's own counts, so that microbatches' and ranks' losses add up."""


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step."""

    grad_norm: float
    """Global norm before clipping; may be inf or nan."""
    learning_rate: float
    """Rate that was (or would have been) applied."""
    applied: bool
    """False when the gradient was not finite: nothing was changed but the count of skipped steps."""


class TrainingEngine(Protocol):
    """Computes on one model, spread over the ranks of one group."""

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> list[TokenOutputs | ValueOutputs]:
        """Outputs without a graph, one per microbatch, in order. Leaves parameters sharded."""

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        """Adds the gradients of the sum of losses over all microbatches of all ranks; returns this rank's metrics, merged over its microbatches."""

    def step(self) -> StepOutcome:
        """Clips, applies the optimizer and schedule, clears the gradients."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor in the publish dtype), one at a time, in a fixed order, the same on every rank; a tied tensor once."""


class EngineState(Protocol):
    """Keeps what the engine is made of."""

    def save(self, path: Path, *, export_huggingface: bool) -> int:
        """Writes parameters, optimizer, schedule and RNG under `path`, sharded; returns this rank's bytes. DiskFullError."""

    def load(self, path: Path) -> None:
        """Restores what save wrote, at any world size. CheckpointMissingError, CheckpointMismatchError."""

    def offload(self) -> None:
        """Moves everything to host memory; idempotent."""

    def onload(self) -> None:
        """Moves it back; idempotent."""
