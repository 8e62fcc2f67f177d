"""The seams between roles and training back ends: `TrainingEngine` computes, `EngineState` keeps, `SavedModel` reads.

FSDP2 (`rolecall/training/fsdp/`) implements them; a role knows only this file, and `backends.py` chooses. Every rank of
the group makes the same calls of an engine in the same order: each call is a collective. Nothing here knows gRPC, the
store or what a step is made of.

Shape legend: N tokens of one microbatch, all its sequences one after another; S sequences of one microbatch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch

from rolecall.algorithms.aggregation import sequence_index
from rolecall.algorithms.losses.router import Routing
from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import Storage
from rolecall.settings import Dtype, LoraSection
from rolecall.telemetry import Metrics
from rolecall.training.account.flops import ModelFlops
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.model.packed_model import Head
from rolecall.training.model.prefixes import SharedPrefixes
from rolecall.training.model.vision import ShownImages
from rolecall.training.ranks.command_group import CommandGroup


@dataclass(frozen=True)
class Microbatch:
    """Packed sequences on the engine's device, padding-free. An empty one (N = 0) still takes part in the
    collectives.
    """

    token_ids_N: torch.Tensor
    """int64 [N]."""
    position_ids_N: torch.Tensor
    """int64 [N], from 0 in every sequence; [3, N] by time, row and column where images are shown."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], starts of the sequences and N."""
    lengths: tuple[int, ...]
    """The S sequences' lengths on the host: planning attention must not wait for the device."""
    trajectories: tuple[int, ...]
    """The trajectory that each sequence is a segment of, by a number that means the same in all microbatches of a
    rank.
    """
    temperature_N: torch.Tensor
    """float32 [N], what the logits that predict token t are divided by."""
    score_mask_N: torch.Tensor
    """bool [N], tokens whose logprob, entropy or value is wanted; never a sequence's first token."""
    num_scored: int
    """How many are, on the host."""
    prefixes: SharedPrefixes | None
    """What sequences have in common from their start; None: nothing worth sharing."""
    columns: Mapping[str, torch.Tensor]
    """Per-token columns, [N] or [N, k], that the loss reads (advantages, old_logprobs, ...), by their names in the
    trajectory schema.
    """
    shown: ShownImages | None = None
    """The images that tokens show; None: none does."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories that have a segment in it."""
        return len(set(self.trajectories))

    def trajectory_N(self) -> torch.Tensor:
        """int64 [N]: the trajectory of each token, 0..num_trajectories - 1."""
        sequence_N = sequence_index(self.cu_seqlens, self.token_ids_N.numel())
        if self.num_trajectories == len(self.lengths):
            return sequence_N
        places = {number: place for place, number in enumerate(dict.fromkeys(self.trajectories))}
        place_S = torch.tensor([places[number] for number in self.trajectories], device=sequence_N.device)
        return place_S[sequence_N]


@dataclass(frozen=True)
class TokenOutputs:
    """The outputs of a policy for each token, aligned as in rolecall/columns.py; 0 where score_mask is false. Keeps the
    graph in forward_backward.
    """

    logprobs_N: torch.Tensor
    """float32 [N], temperature applied."""
    entropy_N: torch.Tensor
    """float32 [N], of the distribution that token t was drawn from; zeros unless asked for."""
    routing: Routing | None = None
    """What routers of experts said of the microbatch's tokens; None unless the engine was made to record it."""
    routed_experts_NW: torch.Tensor | None = None
    """uint8 [N, W], what a column ROUTED_EXPERTS has to hold for the same experts to be chosen again (EngineOptions.
    router_replay); None where the pass replayed one, or no replay was asked for.
    """
    rerouted_N: torch.Tensor | None = None
    """float32 [N], the share of layers whose routers would have sent the token before to others than the column
    ROUTED_EXPERTS did; None without one.
    """
    target_logprobs_Nk: torch.Tensor | None = None
    """float32 [N, k], of the ids in the column TOPK_IDS, where forward_backward finds one; they have the graph, too."""
    top_ids_Nk: torch.Tensor | None = None
    """int32 [N, k], of the highest probabilities; where `wanted`."""
    top_logprobs_Nk: torch.Tensor | None = None
    """float32 [N, k], theirs."""
    sum_squared_probs_N: torch.Tensor | None = None
    """float32 [N]; where `wanted`."""


@dataclass(frozen=True)
class ValueOutputs:
    """The outputs of a value model for each token. Keeps the graph in forward_backward."""

    values_N: torch.Tensor
    """float32 [N], values[t] is the head's output at t - 1; 0 where score_mask is false."""
    bootstrap_values_S: torch.Tensor
    """float32 [S], the head's output at each sequence's last token."""


Loss = Callable[[Microbatch, TokenOutputs | ValueOutputs], tuple[torch.Tensor, Metrics]]
"""(loss, metrics). The loss is already divided by the global mini-batch's own counts, so that microbatches' and ranks'
losses add up. It is called once for each microbatch that is not empty, in their order, on every rank that has it.
"""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one optimizer step."""

    grad_norm: float
    """Global norm before clipping; may be inf or nan."""
    learning_rate: float
    """Rate that was (or would have been) applied."""
    applied: bool
    """False when the gradient was not finite: nothing was changed but the count of skipped steps."""
    again: bool = False
    """Whether the same mini-batch has to be computed once more, at a lower loss scale: nothing else was changed."""
    loss_scale: float | None = None
    """The number that the loss was multiplied by; where the model computes in float16."""
    num_bytes_kept: int = 0
    """Bytes of whole parameters that stayed on this rank from pass to pass, beside the part that it keeps."""


StatePart = Literal["parameters", "optimizer", "gradients"]
"""What can be in host memory by itself: parameters; the optimizer's moments; gradients, which exist between
forward_backward and step only.
"""

STATE_PARTS: tuple[StatePart, ...] = get_args(StatePart)


class TrainingEngine(Protocol):
    """An engine that computes on one model, spread over the ranks of one group."""

    flops: ModelFlops
    """The cost of a pass over the whole model, all ranks together."""
    flops_done: float
    """This rank's share of all that was computed since the start, counted as flops.py says."""

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model, a tied tensor counted once."""

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        entropy: bool = False,
        base: bool = False,
        wanted: Wanted | None = None,
        plain: bool = False,
    ) -> list[TokenOutputs | ValueOutputs]:
        """Outputs without a graph, one per microbatch, in order. Leaves parameters sharded. `base`: those of the model
        without its adapters.

        `wanted`: what else is to be said of each distribution, in place of the entropy. `plain`: with attention that is
        not fused, of a few short sequences: what then differs is rounding.
        """

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        """Adds the gradients of the sum of losses over all microbatches of all ranks; returns this rank's metrics,
        merged over its microbatches.
        """

    def step(self, place: int | None = None) -> StepOutcome:
        """Clips, applies the optimizer and schedule, clears the gradients. `place`: the step's in the schedule, 0 is
        the first; absent: the number of those that were applied.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor in the publish dtype), one at a time, in a fixed order, the same on every
        rank; a tied tensor once.

        Of an engine that trains adapters, these alone, by peft's names, unless it merges them.
        """


class Snapshot(Protocol):
    """A state that was taken and is yet to be written, by another thread than the engine's."""

    def write(self, storage: Storage, group: CommandGroup, more: Mapping[str, bytes]) -> tuple[StoredFile, ...]:
        """Writes it, and the files `more` beside it; a collective of `group`, which that thread has for itself. Rank 0
        returns all files of all ranks, in order for a manifest; DiskFullError and StorageUnavailableError are raised on
        every rank.
        """


class EngineState(Protocol):
    """Keeps what the engine is made of."""

    def snapshot(self) -> Snapshot:
        """Parameters, optimizer, schedule and RNG as they are now."""

    def load(self, storage: Storage, index: Mapping[str, Any]) -> None:
        """Restores what a snapshot wrote, at any world size. `index` is what `read_index` says of it, on every rank: a
        rank that cannot read it must not leave others in a collective. CheckpointMismatchError,
        StorageUnavailableError: the state is neither the old one nor the new one then.
        """

    def offload(self, *parts: StatePart) -> None:
        """Moves `parts`, all where none is named, to host memory; idempotent. Whatever needs one brings it back by
        itself.
        """

    def onload(self, *parts: StatePart) -> None:
        """Moves them back; idempotent."""

    def num_bytes_away(self, *parts: StatePart) -> int:
        """Bytes of the device that `onload` of `parts`, all where none is named, takes on this rank."""


class SavedModel(Protocol):
    """The model in a checkpoint, read by any process, without ranks. Iterating gives the names of its parameters."""

    head: Head
    """What the model says of each token."""
    dtype: Dtype
    """The type that the run computed in."""
    lora: LoraSection | None
    """The adapters' section where the checkpoint holds adapters alone, and a value head; None: every parameter."""
    base_digest: str | None
    """The digest of the model beneath the adapters (model/lora.py); None without adapters."""
    source: Path
    """The model directory of the run."""

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: object) -> bool: ...

    def tensor(self, name: str) -> torch.Tensor:
        """Reads the whole parameter `name`. CheckpointMismatchError when a part of it is missing."""

    def companions(self) -> Mapping[str, bytes | bytearray]:
        """Reads what a model directory holds beside weights (config.json, tokenizer, ...), by name."""
