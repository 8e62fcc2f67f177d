"""The engine of one transformers model with a policy or value head, sharded by FSDP2 over the ranks of a group; both
seams of training/engine.py.

    device = start_rank(RankSpec(...))  # training/ranks/device.py: once per process, before the engine
    options = EngineOptions(path=model.path, head="policy", dtype=model.dtype, optimizer=actor.optimizer)
    engine = FsdpEngine(options, device=device)
    outputs = engine.forward(microbatches)  # TokenOutputs (policy) or ValueOutputs (value), no graph
    metrics = engine.forward_backward(microbatches, PolicyObjective(settings.algorithm, counts))
    outcome = engine.step()

Every method but the properties is a collective: all ranks call it, in the same order, with the same number of
microbatches (training/packing/pack.py). Master weights and optimizer state are float32; computing and publishing
happen in `dtype`; gradients are summed over ranks in float32.

Shape legend as in training/engine.py.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rolecall.checkpoint.storage import Storage
from rolecall.columns import TOPK_IDS
from rolecall.data.model.adapters import check_start
from rolecall.data.model.mixture import read_mixture
from rolecall.data.model.trainable import check_parallel
from rolecall.errors import ConfigError
from rolecall.telemetry import Metrics
from rolecall.training.account.flops import ModelFlops, count_flops
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import STATE_PARTS, Loss, Microbatch, StatePart, StepOutcome, TokenOutputs, ValueOutputs
from rolecall.training.fsdp.gradients import clip_gradients, gradient_norm
from rolecall.training.fsdp.layout import Layout
from rolecall.training.fsdp.load import load_model
from rolecall.training.fsdp.optimizer import Optimizer
from rolecall.training.fsdp.shards import Shards
from rolecall.training.model.activation_offload import ActivationOffload, Copies
from rolecall.training.model.attention.packed import PackedPlan, TracedAttention, plan_attention
from rolecall.training.model.box import local_part, whole
from rolecall.training.model.compiled import compile_layers, compiling
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.model.lora import adapters_off, kept_shape, prepare_adapters, weights_to_publish
from rolecall.training.model.packed_model import (
    PackedModel,
    PolicyModel,
    build_model,
    language_layers,
    layers,
    state_buffers,
)
from rolecall.training.model.parameters import ParameterFiles
from rolecall.training.model.prefixes import SharedPrefixes
from rolecall.training.model.router_replay import check_followed, follow_routes
from rolecall.training.model.tensor_parallel import split_tensors
from rolecall.training.objective.routing import Routers, freeze_routers
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.packing.outputs import (
    begin_routes,
    narrow,
    ranked,
    stand_in,
    with_record,
    with_rerouted,
    zero_of,
)
from rolecall.training.ranks.device import free_cached_memory, held_bytes, seed_rank
from rolecall.training.ranks.device_progress import DeviceProgress
from rolecall.training.serving.hooks import nothing
from rolecall.training.state import checkpoint
from rolecall.training.state.host_copies import HostCopies
from rolecall.training.state.learning_rate import learning_rate
from rolecall.training.state.loss_scale import LossScale

logger = logging.getLogger(__name__)


class FsdpEngine:
    """TrainingEngine and EngineState over FSDP2."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        device: torch.device,
        memory: PhaseMemory | None = None,
        progressed: Callable[[], None] = nothing,
    ) -> None:
        """Reads the model directory, each rank its own parts. The default process group must exist.

        `memory` counts what each phase uses; absent: nobody asks. `progressed` is called when the device has done a
        layer's pass, a head's or an optimizer step, and after every tensor read, written, gathered or moved: whatever
        takes longer hangs. ConfigError when the directory is not a supported causal model, or the ranks cannot share it
        as asked.
        """
        self.device = device
        self.layout = Layout(options.parallel, device)
        self._options = options
        self._memory = memory or PhaseMemory(device)
        self._memory.holdings = self._holdings
        self.dtype = DTYPES[options.dtype]
        """The type that the model computes in."""
        self.flops_done = 0.0
        self._progressed = progressed
        self._progress = DeviceProgress(progressed, device)
        self._held_bytes = 0
        self._on_host = HostCopies(progressed)
        self._optimizer: Optimizer | None = None
        self._snapshot: checkpoint.Snapshot | None = None
        self.num_updates = 0
        self.num_skipped = 0
        self._scale = LossScale() if options.dtype == "float16" and options.optimizer is not None else None
        self._num_infinite = torch.zeros((), device=device)
        trained = options.optimizer is not None
        seed_rank(options.seed, self.layout.data_rank)
        self._model = _build(options)
        self.config: PretrainedConfig = self._model.hf.config
        self._conversion = Conversion(self._model.hf)
        self._num_parameters = sum(p.numel() for p in self._model.parameters())
        self._base = self._add_adapters()
        if not trained:
            self._model.requires_grad_(False)
        self._routers = Routers(self._model.hf) if options.routers else None
        self._mixture = read_mixture(options.path) if options.router_replay else None
        self.flops = self._traced()
        """The FLOPs of passes over the whole model, all ranks together."""
        if options.gradient_checkpointing:
            self._model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        if self.layout.tensor_mesh is not None:
            split_tensors(self._model.hf, self.layout.tensor_mesh)
        self._shards = Shards(self._model, self.layout, options, self._memory)
        if options.torch_compile:
            compile_layers(self._model)
        self._progress.follow(layers(self._model))
        called = layers(self._model) if options.shows_images else language_layers(self._model)
        self._activations = ActivationOffload(called, Copies(device)) if options.activation_offload else None
        self._read_parameters()
        self._model.train(trained)
        if options.optimizer is not None:
            self._optimizer = Optimizer(self._model, options.optimizer, self._on_host)

    def _add_adapters(self) -> str | None:
        """Adds adapters where they are trained, and returns the digest of what they stand beside; else None."""
        lora, setting = self._options.lora, self._options.lora_setting
        if lora is None:
            return None
        return prepare_adapters(self._model, self._options.path, self._conversion, lora, setting)

    def _read_parameters(self) -> None:
        """Reads the parameters, this rank's parts of them."""
        options = self._options
        with self._memory.phase("load"):
            start = options.lora.start if options.lora is not None else None
            files = ParameterFiles(self._model, options.path, options.seed, start, options.lora_setting)
            load_model(self._model, files, device=self.device, progressed=self._progressed)

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
    ) -> list[TokenOutputs | ValueOutputs]:
        """TrainingEngine.forward."""
        self.onload("parameters")
        with (
            self._compiling(),
            self._memory.phase("forward"),
            torch.no_grad(),
            adapters_off(self._model.hf) if base else nullcontext(),
        ):
            outputs = [
                narrow(self._run(microbatch, entropy, wanted, plain, base), microbatch) for microbatch in microbatches
            ]
        if self._optimizer is None or not self._shards.num_bytes_kept:
            self._shards.release()
        return outputs

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        """TrainingEngine.forward_backward."""
        self.onload("parameters", "gradients")
        self._held_bytes = held_bytes(self.device)
        metrics = Metrics()
        with self._compiling():
            for index, microbatch in enumerate(microbatches):
                if index in (0, len(microbatches) - 1):
                    self._shards.begin_backward(is_last=index == len(microbatches) - 1)
                with (
                    self._memory.phase("forward"),
                    self._activations.recording() if self._activations else nullcontext(),
                ):
                    outputs = self._run(microbatch, entropy)
                    if microbatch.lengths:
                        value, part = loss(microbatch, outputs)
                        metrics.merge(part)
                    else:
                        value = zero_of(outputs)
                if self._scale is not None:
                    self._num_infinite += ~torch.isfinite(value.detach())
                    value = value * self._scale.value
                with self._memory.phase("backward"):
                    value.backward()  # type: ignore[no-untyped-call]
                self._progress.mark()
        return metrics

    def step(self, place: int | None = None) -> StepOutcome:
        """TrainingEngine.step. ConfigError on a frozen engine."""
        section = self._options.optimizer
        if self._optimizer is None or section is None:
            raise ConfigError("this engine is frozen; give it an optimizer to train it")
        self._shards.release()
        self.onload("parameters", "gradients")
        had_moments = self.num_updates > 0  # else the passes before were measured without them
        scale = self._scale.value if self._scale is not None else 1.0
        norm = gradient_norm(self._model.parameters(), self.layout) / scale
        rate = learning_rate(section, self.num_updates if place is None else place, self._options.total_steps)
        applied = bool(torch.isfinite(norm))
        again = False
        if applied:
            clip_gradients(self._model.parameters(), norm, section.max_grad_norm, scale)
            self._settle()
            with self._memory.phase("optimizer"):
                self._optimizer.step(rate)
            self.num_updates += 1
            if self._scale is not None:
                self._scale.applied()
        elif self._scale is not None and self._losses_were_finite() and self._scale.overflowed():
            again = True
            logger.info("gradient norm is %s: computed again at a loss scale of %g", float(norm), self._scale.value)
        else:
            self.num_skipped += 1
            logger.warning("gradient norm is %s: optimizer step skipped, %s so far", float(norm), self.num_skipped)
        self._num_infinite.zero_()
        self._optimizer.zero_grad()
        self._progress.mark()
        kept = self._shards.num_bytes_kept
        if had_moments:
            self._shards.choose(self._held_bytes)
        return StepOutcome(float(norm), rate, applied, again, None if self._scale is None else scale, kept)

    def _losses_were_finite(self) -> bool:
        """Whether those of all ranks were since the last step; a collective."""
        dist.all_reduce(self._num_infinite, group=self.layout.group)
        return float(self._num_infinite) == 0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TrainingEngine.named_weights. A tensor may share the engine's memory: use it before the next call, do not
        write to it.
        """
        self._shards.release()
        self.onload("parameters")
        parameters, options = dict(self._model.hf.named_parameters()), self._options
        state = state_buffers(self._model.hf)

        def gather(name: str, dtype: torch.dtype) -> torch.Tensor:
            self._progressed()
            return state[name] if name in state else whole(parameters[name].detach().to(dtype))

        yield from weights_to_publish(
            [*parameters, *state],
            gather,
            self._conversion,
            self.dtype,
            options.lora,
            merges=options.merges_adapters,
        )

    def snapshot(self) -> checkpoint.Snapshot:
        """EngineState.snapshot."""
        self._shards.release()
        self.onload("parameters")
        self._settle()
        self._snapshot = checkpoint.Snapshot(
            self._state(), self.device, self.layout.rank, self.layout.world_size, self._progressed
        )
        return self._snapshot

    def load(self, storage: Storage, index: checkpoint.Index) -> None:
        """EngineState.load."""
        self._settle()
        self._shards.release()
        self.onload("parameters", "gradients")
        counters = checkpoint.load(
            storage, index, self._state(), self.device, self.layout.rank, self.layout.world_size, self._progressed
        )
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        if self._scale is not None:
            self._scale.restore(counters)

    def offload(self, *parts: StatePart) -> None:
        """EngineState.offload."""
        self._settle()
        self._shards.release()
        for part in parts or STATE_PARTS:
            self._on_host.take(part, {name: local_part(tensor) for name, tensor in self._part(part).items()})
        free_cached_memory(self.device)

    def onload(self, *parts: StatePart) -> None:
        """EngineState.onload."""
        for part in parts or STATE_PARTS:
            self._on_host.give_back(part)

    def num_bytes_away(self, *parts: StatePart) -> int:
        """EngineState.num_bytes_away."""
        return self._on_host.num_bytes(parts or STATE_PARTS)

    def _compiling(self) -> AbstractContextManager[None]:
        return compiling() if self._options.torch_compile else nullcontext()

    def _traced(self) -> ModelFlops:
        """Counts a pass, on the meta device, which also shows whether every layer chooses experts as it is told to."""
        trace = TracedAttention()
        if self._mixture is None:
            return count_flops(self._model, trace)
        follow_routes(language_layers(self._model), self._mixture)
        flops = count_flops(self._model, trace)
        check_followed(language_layers(self._model), trace.routes)
        return flops

    def _run(
        self,
        microbatch: Microbatch,
        entropy: bool,
        wanted: Wanted | None = None,
        plain: bool = False,
        base: bool = False,
    ) -> TokenOutputs | ValueOutputs:
        # An empty microbatch still gathers and reduces: one token stands in, and its gradients are zeros.
        mb = microbatch if microbatch.lengths else stand_in(self.device)
        # its runs are cut from the tokens of whole sequences
        prefixes = mb.prefixes if self.layout.sequence is None else None
        packed = self._attention_plan(mb, prefixes, plain)
        routes = None
        if self._mixture is not None and not base:
            routes = begin_routes(mb, packed, self._mixture)
            packed = replace(packed, routes=routes)
        asked = (
            {"targets_Nk": mb.columns.get(TOPK_IDS) if torch.is_grad_enabled() else None, "wanted": wanted}
            if isinstance(self._model, PolicyModel)
            else {}
        )
        recording: AbstractContextManager[list[torch.Tensor]] = (
            self._routers.recording() if self._routers else nullcontext([])
        )
        with recording as router_logits:
            first_N, second_N, *more = self._model(
                mb.token_ids_N,
                mb.position_ids_N,
                mb.temperature_N,
                mb.score_mask_N,
                packed,
                entropy,
                shown=mb.shown,
                **asked,
            )
        self._progress.mark()
        self._count(microbatch, prefixes.num_saved if prefixes is not None else 0)
        if not isinstance(self._model, PolicyModel):
            return ValueOutputs(first_N, second_N[mb.cu_seqlens[1:].long() - 1])
        if wanted is not None:
            outputs = ranked(first_N, second_N, more[0], wanted)
        else:
            routing = self._routers.sums(router_logits, mb, packed) if self._routers else None
            outputs = TokenOutputs(first_N, second_N, routing, target_logprobs_Nk=more[0] if more else None)
        if routes is None or self._mixture is None:
            return outputs
        if routes.num_differing_n is None:
            return with_record(outputs, routes.record(self._mixture), mb, packed)
        return with_rerouted(outputs, routes.num_differing_n / len(routes.chosen), mb, packed)

    def _attention_plan(self, mb: Microbatch, prefixes: SharedPrefixes | None, plain: bool) -> PackedPlan:
        """The attention of a pass over `mb`."""
        return plan_attention(
            mb.lengths,
            mb.cu_seqlens,
            self.dtype,
            self.layout.sequence,
            prefixes,
            self.flops.head_size,
            plain=plain,
            takes_buckets=self._model.takes_buckets,
        )

    def _count(self, microbatch: Microbatch, num_saved: int) -> None:
        """Counts the FLOPs of a pass over `microbatch`, of whose tokens `num_saved` were not computed."""
        trains = torch.is_grad_enabled()
        cost = self.flops.update if trains else self.flops.forward
        flops = cost.total(microbatch.lengths, microbatch.num_scored, num_saved)
        if microbatch.shown is not None and self._model.vision is not None:
            images, windows = self._model.vision.patches(microbatch.shown.grids_I3)
            tower = self.flops.tower_update if trains else self.flops.tower_forward
            flops += tower.total(images, windows)
        self.flops_done += flops / self._options.parallel.slot_size

    def _settle(self) -> None:
        """Lets the last snapshot copy what it has yet to copy: before anything is changed in place."""
        if self._snapshot is not None:
            with self._memory.phase("checkpoint"):
                self._snapshot.settle()
            self._snapshot = None

    def _state(self) -> checkpoint.State:
        options = self._options
        return checkpoint.State(
            parts=self._parts,
            prepare=self._optimizer.prepare if self._optimizer is not None else lambda num_updates: None,
            counters={
                "num_updates": self.num_updates,
                "num_skipped": self.num_skipped,
                **(self._scale.counters() if self._scale is not None else {}),
            },
            notes={
                "head": options.head,
                "lora": options.lora and options.lora.as_kept(),
                "base": self._base,
            },
            dtype=options.dtype,
            source=options.path,
            chat_template=options.chat_template,
        )

    def _parts(self) -> dict[str, checkpoint.Part]:
        tensors = {} if self._optimizer is None else self._optimizer.tensors()
        parts = {}
        for key, tensor in tensors.items():
            there = self._on_host.lying("optimizer", key, local_part(tensor))
            parts[key] = replace(self.layout.part(tensor), views=(there,))
        for name, tensor in (*self._model.hf.named_parameters(), *state_buffers(self._model.hf).items()):
            if tensor.requires_grad or self._options.lora is None:  # a frozen tower is part of an exported model
                parts[checkpoint.PARAMETER + name] = self.layout.part(tensor)
        return {key: part.of(kept_shape(key, part.shape, self._options.lora)) for key, part in parts.items()}

    def _part(self, part: StatePart) -> dict[str, torch.Tensor]:
        """The tensors that the part is made of now."""
        if part == "optimizer":
            return self._optimizer.tensors() if self._optimizer is not None else {}
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.hf.named_parameters():
            tensor = parameter if part == "parameters" else parameter.grad
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    def _holdings(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Names the tensors for memory's accounting, also inside a pass, where a layer's parameters are whole."""
        parameters = dict(self._model.hf.named_parameters())
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer states": self._optimizer.tensors() if self._optimizer is not None else {},
        }


def _build(options: EngineOptions) -> PackedModel:
    """Builds the model on the meta device: in float32 where it trains, else in the type it computes in."""
    check_parallel(options.path, options.parallel)
    if options.lora is not None:
        check_start(options.lora, options.path, options.lora_setting)
    trains = options.optimizer is not None and options.lora is None
    dtype = torch.float32 if trains else DTYPES[options.dtype]
    model = build_model(options.path, options.head, dtype, options.max_sequence_tokens)
    if model.vision is not None and options.freeze_vision_tower:
        for parameter in model.vision.module.parameters():  # not its buffers: rotary frequencies are float32
            parameter.requires_grad_(False).data = parameter.data.to(DTYPES[options.dtype])
    if options.freeze_routers:
        freeze_routers(model.hf)
    if model.vision is not None:
        model.vision.is_called = options.shows_images
    if isinstance(model, PolicyModel):
        model.float32_logits = options.float32_logits
    return model
