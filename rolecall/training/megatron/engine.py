"""The engine of one transformers model over Megatron-Core; both seams of training/engine.py.

A rank has one stage of the model, or with virtual stages several. Megatron's schedules call each stage for each
microbatch; the last one ends in the heads, the logprobs and the losses that FSDP2's engine has, so that a number that
leaves here is that of the other engine. Outputs and metrics then go to all stages, for rank 0 of a slot, which speaks
for it, has the first. Parameters are known by transformers' names alone: model directories, weights that are published
and checkpoints are those of FSDP2.

Parameters in `dtype`; where that is half precision float32 ones beneath them, cut over the ranks that hold the same, as
are the moments. Gradients wait whole, in float32, and are reduced once per mini-batch.

Shape legend as in training/engine.py.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rolecall.checkpoint.storage import Storage
from rolecall.data.megatron.limits import check_megatron
from rolecall.data.model.adapters import check_start
from rolecall.data.model.trainable import check_parallel
from rolecall.errors import ConfigError
from rolecall.telemetry import Metrics
from rolecall.training.account.flops import CostModel, count_flops
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import STATE_PARTS, Loss, Microbatch, StatePart, StepOutcome
from rolecall.training.megatron.adapters import adapters_off, add_adapters
from rolecall.training.megatron.families import Family
from rolecall.training.megatron.last_stage import LastStage, Outputs
from rolecall.training.megatron.layout import MegatronLayout
from rolecall.training.megatron.model import Stage, StagePass
from rolecall.training.megatron.optimizer import MOMENTS, Optimizer
from rolecall.training.megatron.pipeline import Pipeline
from rolecall.training.megatron.routers import Router
from rolecall.training.megatron.weights import Weights
from rolecall.training.model.attention.packed import TracedAttention
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.model.lora import checkpoint_name, kept_shape, prepare_adapters, weights_to_publish
from rolecall.training.model.packed_model import VALUE_HEAD, ValueModel, build_model, state_buffers
from rolecall.training.model.parameters import ParameterFiles
from rolecall.training.objective.routing import freeze_routers
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.packing.outputs import narrow, stand_in, zero_of
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import free_cached_memory, seed_rank
from rolecall.training.ranks.device_progress import DeviceProgress
from rolecall.training.serving.hooks import nothing
from rolecall.training.state import checkpoint
from rolecall.training.state.host_copies import HostCopies
from rolecall.training.state.learning_rate import learning_rate

logger = logging.getLogger(__name__)


class MegatronEngine:
    """TrainingEngine and EngineState over Megatron-Core."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        device: torch.device,
        memory: PhaseMemory | None = None,
        progressed: Callable[[], None] = nothing,
    ) -> None:
        """Reads the model directory, each rank its own parts, and takes the process's groups of ranks: there is one
        engine of this kind at a time. ConfigError for a model or a layout that it does not compute.
        """
        self.device = device
        self._options = options
        self._memory = memory or PhaseMemory(device)
        self._memory.holdings = self._holdings
        self.dtype = DTYPES[options.dtype]
        """The type that the model computes in."""
        self.flops_done = 0.0
        self.num_updates = self.num_skipped = 0
        self._progressed = progressed
        self._progress = DeviceProgress(progressed, device)
        self._on_host = HostCopies(progressed)
        self._reduced = False
        check_parallel(options.path, options.parallel)
        check_megatron(options.path, options.parallel, options.megatron, dist.get_world_size())
        self._model = build_model(options.path, options.head, self.dtype, options.max_sequence_tokens)
        if isinstance(self._model, ValueModel) and self._model.head_name != VALUE_HEAD:
            raise ConfigError(
                f"{options.path} is a classification model, whose head backend megatron does not read; use backend fsdp"
            )
        self._conversion = Conversion(self._model.hf)
        self._num_parameters: int = sum(parameter.numel() for parameter in self._model.hf.parameters())
        self._base = self._add_adapters()
        trained = options.optimizer is not None
        if options.freeze_routers:
            freeze_routers(self._model.hf)
        if not trained:
            self._model.requires_grad_(False)
        tensors = {checkpoint_name(name): parameter for name, parameter in self._model.hf.named_parameters()}
        moving = [name for name, each in tensors.items() if each.requires_grad]
        self._state_names = state_buffers(self._model.hf).keys()
        """Names of what is read and published like parameters, in float32 always, and never trained."""
        tensors |= state_buffers(self._model.hf)
        self._shapes = {name: kept_shape(name, tensor.shape, options.lora) for name, tensor in tensors.items()}
        kept = moving if options.lora is not None else list(tensors)  # what is frozen is part of an exported model
        self._kept = {"param": kept, **dict.fromkeys(MOMENTS, moving)}
        """Names of the parameters that checkpoints keep each kind of."""
        trace = TracedAttention()
        self.flops = count_flops(self._model, trace)
        """The FLOPs of passes over the whole model, all ranks together."""
        with self._on_device(), self._memory.phase("load"):
            self.layout = MegatronLayout(options.parallel, device, virtual_stages=options.megatron.virtual_stages)
            seed_rank(options.seed, self.layout.data_rank)
            # what transformers' layers ask for: some read a window that config.json has, others do not
            windows = [layer.sliding_window for layer in trace.layers]
            self._pipeline = Pipeline(
                self._model, options, self.layout, self._memory, self._progress, self.flops.head_size, windows
            )
            self._stages = self._pipeline.stages
            self._last_stage = LastStage(self.layout, options, len(self._pipeline.layers_with_experts))
            if options.freeze_routers:
                for module in (each for stage in self._stages for each in stage.modules()):
                    if isinstance(module, Router):
                        module.requires_grad_(False)
            family = Family(self._model.hf.config, self._shapes)
            if options.lora is not None:
                add_adapters(self._stages, family, self.layout.place, options.lora, trained=trained)
            self._weights = Weights(self._stages, family, self._shapes, self.layout, CommandGroup.of_default())
            self._optimizer: Optimizer | None = None
            if options.optimizer is not None:
                dtype = self.dtype if options.lora is None else torch.float32
                self._optimizer = Optimizer(self._pipeline.with_gradients(), options.optimizer, dtype)
            self._read()
        self._pipeline.train(trained)
        self._progress.follow(layer for stage in self._stages for layer in stage.decoder.layers)

    def _add_adapters(self) -> str | None:
        """Adds adapters to the whole model where they are trained, and returns the digest of what they stand beside;
        else None.
        """
        options, setting = self._options, self._options.lora_setting
        if options.lora is None:
            return None
        check_start(options.lora, options.path, setting)
        return prepare_adapters(self._model, options.path, self._conversion, options.lora, setting)

    @property
    def num_parameters(self) -> int:
        """TrainingEngine.num_parameters."""
        return self._num_parameters

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        entropy: bool = False,
        base: bool = False,
        wanted: Wanted | None = None,
        plain: bool = False,
    ) -> list[Outputs]:
        """TrainingEngine.forward."""
        self.onload("parameters")

        def outputs(hidden: torch.Tensor, stage: Stage, given: StagePass, microbatch: Microbatch) -> Outputs:
            mb = microbatch if microbatch.lengths else stand_in(self.device)
            return narrow(stage.outputs(hidden, given, mb, entropy, wanted), microbatch)

        self._count(microbatches, self.flops.forward)
        with (
            self._memory.phase("forward"),
            torch.no_grad(),
            self._on_device(),
            adapters_off(self._stages) if base else nullcontext(),
        ):
            found = self._pipeline.run(microbatches, outputs, plain=plain, base=base, forward_only=True)
            return self._last_stage.outputs(found, microbatches, wanted, base=base)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        """TrainingEngine.forward_backward. Once before each step: gradients are reduced when it returns."""
        if self._reduced:
            raise ConfigError("gradients were reduced already; call step before the next forward_backward")
        self.onload("parameters", "gradients")
        self._reduced = True

        def with_loss(hidden: torch.Tensor, stage: Stage, given: StagePass, microbatch: Microbatch) -> Any:
            mb = microbatch if microbatch.lengths else stand_in(self.device)
            outputs = stage.outputs(hidden, given, mb, entropy)
            value, part = loss(microbatch, outputs) if microbatch.lengths else (zero_of(outputs), Metrics())
            return value, torch.zeros((), dtype=torch.int, device=self.device), (narrow(outputs, microbatch), part)

        self._count(microbatches, self.flops.update)
        with self._memory.phase("backward"), self._on_device():
            found = self._pipeline.run(microbatches, with_loss, plain=False, base=False, forward_only=False)
        metrics = Metrics()
        with torch.no_grad():
            seen = self._last_stage.outputs([outputs for outputs, _ in found], microbatches, trained=True)
            # whoever gave the loss looks at what it is called with, also on a slot's first rank
            others = [] if found else zip(microbatches, seen, strict=True)
            parts = [part for _, part in found] + [loss(mb, out)[1] for mb, out in others if mb.lengths]
        for part in parts:
            metrics.merge(part)
        self._progress.mark()
        return metrics

    def step(self, place: int | None = None) -> StepOutcome:
        """TrainingEngine.step. ConfigError on a frozen engine."""
        section = self._options.optimizer
        if self._optimizer is None or section is None:
            raise ConfigError("this engine is frozen; give it an optimizer to train it")
        self.onload()
        rate = learning_rate(section, self.num_updates if place is None else place, self._options.total_steps)
        with self._memory.phase("optimizer"), self._on_device():
            norm = self._optimizer.step(rate, section.max_grad_norm)
        self._reduced = False
        applied = isfinite(norm)
        self.num_updates += applied
        self.num_skipped += not applied
        if not applied:
            logger.warning("gradient norm is %s: optimizer step skipped, %s so far", norm, self.num_skipped)
        self._progress.mark()
        self._store_moments()
        return StepOutcome(norm, rate, applied)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TrainingEngine.named_weights."""
        self.onload("parameters")
        options = self._options

        def gather(name: str, dtype: torch.dtype) -> torch.Tensor:
            self._progressed()
            kind = torch.float32 if name in self._state_names else dtype
            return self._weights.gather(name, lambda tensor: tensor.detach(), kind)

        yield from weights_to_publish(
            self._shapes, gather, self._conversion, self.dtype, options.lora, merges=options.merges_adapters
        )

    def snapshot(self) -> checkpoint.Snapshot:
        """EngineState.snapshot. What it costs is a copy to host memory, which is made here."""
        self.onload("parameters", "optimizer")
        with self._memory.phase("checkpoint"):
            copies = {
                kind: {parameter: self._whole(parameter, kind) for parameter in self._keeping(kind)}
                for kind in self._kinds()
            }
            snapshot = checkpoint.Snapshot(
                self._state(copies), self.device, self.layout.rank, self.layout.world_size, self._progressed
            )
            snapshot.settle()
        self._store_moments()
        return snapshot

    def load(self, storage: Storage, index: checkpoint.Index) -> None:
        """EngineState.load."""
        self.onload()
        copies: dict[str, dict[torch.Tensor, torch.Tensor]] = {}

        def prepare(num_updates: int) -> None:
            assert self._optimizer is not None
            with self._on_device():
                self._optimizer.prepare(num_updates)
            for kind in ("param", *(MOMENTS if num_updates else ())):
                copies[kind] = {parameter: torch.empty(parameter.shape) for parameter in self._keeping(kind)}

        state = replace(self._state(copies), prepare=prepare)
        counters = checkpoint.load(
            storage, index, state, self.device, self.layout.rank, self.layout.world_size, self._progressed
        )
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        assert self._optimizer is not None
        for kind, values in copies.items():
            for parameter, value in values.items():
                if kind == "param":
                    parameter.data.copy_(value)
                self._optimizer.put(parameter, kind, value)
        self._store_moments()

    def offload(self, *parts: StatePart) -> None:
        """EngineState.offload."""
        for part in parts or STATE_PARTS:
            self._on_host.take(part, self._part(part))
        free_cached_memory(self.device)

    def onload(self, *parts: StatePart) -> None:
        """EngineState.onload."""
        for part in parts or STATE_PARTS:
            self._on_host.give_back(part)

    def num_bytes_away(self, *parts: StatePart) -> int:
        """EngineState.num_bytes_away."""
        return self._on_host.num_bytes(parts or STATE_PARTS)

    def _read(self) -> None:
        """Fills the parameters, by way of the gradients' float32 memory where half-precision ones have others beneath
        them.
        """
        options = self._options
        start = options.lora.start if options.lora is not None else None
        files = ParameterFiles(self._model, options.path, options.seed, start, options.lora_setting)
        self._weights.read(files, lambda each: _gradient(each) if each.requires_grad else each.data, self._progressed)
        if self._optimizer is None:
            return
        for parameter in self._trained():
            parameter.data.copy_(_gradient(parameter))
            self._optimizer.put(parameter, "param", _gradient(parameter))
        with self._on_device():
            self._optimizer.zero_grad()

    def _count(self, microbatches: Sequence[Microbatch], flops: CostModel) -> None:
        for microbatch in microbatches:
            shared = microbatch.prefixes if self.layout.sequence is None else None
            num_saved = 0 if shared is None else shared.num_saved
            total = flops.total(microbatch.lengths, microbatch.num_scored, num_saved)
            self.flops_done += total / self.layout.slot_size

    def _state(self, copies: Mapping[str, Mapping[torch.Tensor, torch.Tensor]]) -> checkpoint.State:
        """The state whose tensors are `copies`, by kind."""

        lora = self._options.lora

        def parts() -> dict[str, checkpoint.Part]:
            found: dict[str, checkpoint.Part] = {}
            for kind, values in copies.items():
                found |= self._weights.parts(
                    checkpoint.PARAMETER if kind == "param" else f"{kind}/", self._kept[kind], values.__getitem__
                )
            return found

        return checkpoint.State(
            parts=parts,
            prepare=lambda num_updates: None,
            counters={"num_updates": self.num_updates, "num_skipped": self.num_skipped},
            notes={"head": self._options.head, "lora": lora and lora.as_kept(), "base": self._base},
            dtype=self._options.dtype,
            source=self._options.path,
            chat_template=self._options.chat_template,
        )

    def _kinds(self) -> tuple[str, ...]:
        return ("param", *(MOMENTS if self.num_updates else ()))

    def _whole(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        assert self._optimizer is not None
        self._progressed()
        if not parameter.requires_grad:
            return parameter.detach().to("cpu", torch.float32)
        return self._optimizer.whole(parameter, kind).to("cpu")

    def _keeping(self, kind: str) -> Sequence[torch.Tensor]:
        """This rank's parameters that checkpoints keep `kind` of, and of their values buffers' too."""
        if kind == "param" and self._options.lora is None:
            return [each for stage in self._stages for each in (*stage.parameters(), *state_buffers(stage).values())]
        return self._trained()

    def _trained(self) -> list[nn.Parameter]:
        return [each for stage in self._stages for each in stage.parameters() if each.requires_grad]

    def _store_moments(self) -> None:
        """Sends the moments to the host where they live there between steps."""
        if self._options.optimizer is not None and self._options.optimizer.offload:
            self.offload("optimizer")

    def _part(self, part: StatePart) -> Mapping[str, torch.Tensor]:
        """The tensors that the part is made of on this rank."""
        if part == "optimizer":
            return self._optimizer.kept() if self._optimizer is not None else {}
        named = {
            f"{index}.{name}": parameter
            for index, stage in enumerate(self._stages)
            for name, parameter in stage.named_parameters()
        }
        if part == "parameters":
            return {name: parameter.data for name, parameter in named.items()}
        return {name: _gradient(parameter) for name, parameter in named.items() if parameter.requires_grad}

    def _holdings(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {
            "parameters": self._part("parameters"),
            "gradients": self._part("gradients"),
            "optimizer states": self._part("optimizer"),
        }

    def _on_device(self) -> AbstractContextManager[None]:
        """Lets Megatron's code run on CPUs."""
        if self.device.type != "cpu":
            return nullcontext()
        from rolecall.training.megatron.on_cpu import on_cpu

        return on_cpu()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient
