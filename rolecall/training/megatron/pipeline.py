"""The stages of a rank, and the way of microbatches through all stages of a model by Megatron's schedules.

Owns what a stage is given with a microbatch, and the gradients' memory around the stages. Knows neither losses nor
optimizers: whoever runs microbatches says what becomes of the last stage's hidden states.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from rolecall.data.model.mixture import read_mixture
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import Microbatch
from rolecall.training.megatron.config import has_experts, transformer_config
from rolecall.training.megatron.layout import MegatronLayout
from rolecall.training.megatron.model import Stage, StagePass, stage_pass
from rolecall.training.megatron.routers import RoutersPass
from rolecall.training.model.attention.packed import plan_attention
from rolecall.training.model.packed_model import PackedModel
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.objective.routing import find_routers
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.packing.outputs import stand_in
from rolecall.training.packing.pack import pack
from rolecall.training.ranks.device_progress import DeviceProgress

End = Callable[[torch.Tensor, Stage, StagePass, Microbatch], Any]
"""Makes something of the hidden states that the last stage gives for a microbatch."""


class Pipeline:
    """The stages of one model on this rank, one or with virtual stages several."""

    def __init__(
        self,
        model: PackedModel,
        options: EngineOptions,
        layout: MegatronLayout,
        memory: PhaseMemory,
        progress: DeviceProgress,
        head_size: int,
        windows: Sequence[int | None],
    ) -> None:
        """`model` is the whole model on the meta device, `head_size` the width of its widest head, `windows` as of
        Stage. ConfigError when it has no routers and the options ask something of them.
        """
        if options.routers:
            find_routers(model.hf)
        self._options, self._layout, self._memory, self._progress = options, layout, memory, progress
        self._head_size = head_size
        self._mixture = read_mixture(options.path) if options.routers or options.router_replay else None
        self._config = transformer_config(model, options)
        self.layers_with_experts = [
            layer for layer in range(self._config.num_layers) if has_experts(self._config, layer)
        ]
        """Indices of the layers of the whole model that have experts, counted from its first."""
        self.stages = self._build(model, windows)
        self._wrapped: list[nn.Module] = list(self.stages)
        self._cut: SequenceShare | None = None
        if self._config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            self._cut = SequenceShare(group, dist.get_rank(group), dist.get_world_size(group))

    def train(self, mode: bool) -> None:
        """Sets the stages to training, or to evaluation."""
        for stage in self._wrapped:
            stage.train(mode)

    def with_gradients(self) -> list[DistributedDataParallel]:
        """Gives the stages memory for gradients, which are summed over ranks once a mini-batch."""
        overlap = self._options.megatron.overlap_grad_reduce
        section = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
        )
        wrapped = [
            DistributedDataParallel(self._config, section, stage, disable_bucketing=index > 0 or not overlap)
            for index, stage in enumerate(self.stages)
        ]
        self._wrapped = list(wrapped)
        self._config.finalize_model_grads_func = _reduce
        if overlap:
            no_syncs = [stage.no_sync for stage in wrapped]
            self._config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        return wrapped

    def run(
        self, microbatches: Sequence[Microbatch], end: End, *, plain: bool, base: bool, forward_only: bool
    ) -> list[Any]:
        """Runs all microbatches through the stages; what `end` makes of each, in order, on the ranks of the last stage;
        else nothing. `base`: no experts are chosen as told. A collective.
        """

        def step(given: Iterator[Microbatch], stage: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            microbatch = next(given)
            told = self._plan(microbatch if microbatch.lengths else stand_in(self._layout.device), plain, base)
            own: Stage = stage.module if isinstance(stage, DistributedDataParallel) else stage  # type: ignore[assignment]
            with self._memory.phase("forward"):
                hidden = stage(told)
            self._progress.mark()
            return hidden, lambda hidden, **_: end(hidden, own, told, microbatch)

        several = len(self._wrapped) > 1
        # stages of several parts take rounds of as many microbatches as there are ranks in a pipeline
        num_missing = -len(microbatches) % self._options.parallel.pipeline if several else 0
        rounds = [*microbatches, *[pack([], (), temperature=1.0, device=self._layout.device)] * num_missing]
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rounds) for _ in self._wrapped] if several else iter(rounds),
            model=self._wrapped if several else self._wrapped[0],
            num_microbatches=len(rounds),
            seq_length=1,  # each microbatch tells its own
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found[: len(microbatches)]

    def _build(self, model: PackedModel, windows: Sequence[int | None]) -> list[Stage]:
        options, virtual = self._options, self._options.megatron.virtual_stages
        at = dist.get_rank(self._layout.stages)
        return [
            Stage(
                self._config,
                model,
                options.head,
                first=at == 0 and chunk == 0,
                last=at == options.parallel.pipeline - 1 and chunk == virtual - 1,
                chunk=chunk if virtual > 1 else None,
                windows=windows,
                float32_logits=options.float32_logits,
            )
            .to(self._layout.device)
            .requires_grad_(options.optimizer is not None)
            for chunk in range(virtual)
        ]

    def _plan(self, mb: Microbatch, plain: bool, base: bool) -> StagePass:
        sequence, dtype = self._layout.sequence, DTYPES[self._options.dtype]
        prefixes = mb.prefixes if sequence is None else None
        packed = plan_attention(mb.lengths, mb.cu_seqlens, dtype, sequence, prefixes, self._head_size, plain=plain)
        routers = None
        sums, replay = self._options.routers, self._options.router_replay and not base
        if self._mixture is not None and (sums or replay):
            layers = self.layers_with_experts
            routers = RoutersPass(mb, packed, self._cut, self._mixture, layers=layers, sums=sums, replay=replay)
        return stage_pass(mb, packed, self._options.parallel.tensor if self._cut else 1, routers)


def _reduce(stages: list[nn.Module], num_tokens: torch.Tensor | None, **more: Any) -> None:
    """Sums the gradients over ranks. Losses hold global counts, so the number of tokens is nobody's divisor."""
    finalize_model_grads(stages, None, **more)
