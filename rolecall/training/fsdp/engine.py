"""FsdpEngine: one transformers model with a policy or value head, sharded by FSDP2 over the ranks of a group; both seams of training/engine.py.

    device = start_rank(RankSpec(...))                                        # training/device.py, once per process, before the engine
    engine = FsdpEngine(settings.model.path, head="policy", dtype=settings.model.dtype, device=device, optimizer=settings.actor.optimizer,
                        total_steps=num_steps * num_minibatches * num_epochs)  # optimizer=None: frozen (a reference)
    outputs = engine.forward(microbatches)                                    # TokenOutputs (policy) or ValueOutputs (value), no graph
    metrics = engine.forward_backward(microbatches, PolicyObjective(settings.algorithm, counts))    # training/objectives.py
    outcome = engine.step()

Every method but the properties is a collective: all ranks call it, in the same order, with the same number of microbatches (training/packing.py).
Master weights and optimizer state are float32; computing and publishing happen in `dtype`; gradients are summed over ranks in float32.

Shape legend as in training/engine.py.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from rolecall.errors import ConfigError, DiskFullError
from rolecall.settings import OptimizerSection
from rolecall.telemetry import Metrics
from rolecall.training.attention import plan_attention
from rolecall.training.conversion import Conversion
from rolecall.training.device import free_cached_memory, seed_rank
from rolecall.training.engine import Loss, Microbatch, StepOutcome, TokenOutputs, ValueOutputs
from rolecall.training.fsdp import checkpoint
from rolecall.training.fsdp.load import load_model
from rolecall.training.huggingface import write_model
from rolecall.training.model import Head, PackedModel, PolicyModel, build_model, layers
from rolecall.training.schedule import learning_rate

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FsdpEngine:
    """TrainingEngine and EngineState over FSDP2."""

    def __init__(
        self,
        path: Path,
        *,
        head: Head,
        dtype: Literal["float32", "bfloat16"],
        device: torch.device,
        optimizer: OptimizerSection | None,
        total_steps: int = 1,
        group: dist.ProcessGroup | None = None,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        """Reads the model directory `path`, each rank its own slices. `group` absent: the default process group, which must exist.

        `total_steps` is the schedule's length in optimizer steps. ConfigError when the directory is not a supported causal model.
        """
        self.device = device
        self._path = path
        self._dtype = DTYPES[dtype]
        self._section = optimizer
        self._total_steps = total_steps
        self._offloaded = False
        self.num_updates = 0
        self.num_skipped = 0
        self._group: dist.ProcessGroup = group or _default_group()
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        seed_rank(seed, self.rank)
        self._model = build_model(path, head, torch.float32 if optimizer else self._dtype)
        self.config: PretrainedConfig = self._model.hf.config
        self._conversion = Conversion(self._model.hf)
        self._num_parameters = sum(p.numel() for p in self._model.parameters())
        if gradient_checkpointing:
            self._model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        self._modules = self._shard()
        load_model(self._model, path, device=device, seed=seed)
        self._model.train(optimizer is not None)
        self._model.requires_grad_(optimizer is not None)
        self._optimizer = None if optimizer is None else _adamw(self._model, optimizer)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied tensor once."""
        return self._num_parameters

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> list[TokenOutputs | ValueOutputs]:
        """TrainingEngine.forward."""
        self.onload()
        with torch.no_grad():
            outputs = [_narrow(self._run(microbatch, entropy), microbatch) for microbatch in microbatches]
        # After a pass without backward the parameters stay gathered, and an optimizer step would then change copies.
        for module in self._modules:
            module.reshard()
        return outputs

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        """TrainingEngine.forward_backward."""
        self.onload()
        metrics = Metrics()
        for microbatch in microbatches:
            outputs = self._run(microbatch, entropy)
            if microbatch.lengths:
                value, part = loss(microbatch, outputs)
                metrics.merge(part)
            else:
                value = _zero_of(outputs)
            value.backward()  # type: ignore[no-untyped-call]
        return metrics

    def step(self) -> StepOutcome:
        """TrainingEngine.step. ConfigError on a frozen engine."""
        if self._optimizer is None or self._section is None:
            raise ConfigError("this engine is frozen; give it an optimizer to train it")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        rate = learning_rate(self._section, self.num_updates, self._total_steps)
        applied = bool(torch.isfinite(norm))
        if applied:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), self._section.max_grad_norm, norm)
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = rate
            self._optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
            logger.warning("gradient norm is %s: optimizer step skipped, %s so far", float(norm), self.num_skipped)
        self._optimizer.zero_grad(set_to_none=True)
        return StepOutcome(float(norm), rate, applied)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TrainingEngine.named_weights. A tensor may share the engine's memory: use it before the next call, do not write to it."""
        self.onload()
        for name, parameter in self._model.hf.named_parameters():
            with torch.no_grad():
                yield from self._conversion.to_checkpoint(name, parameter.detach().to(self._dtype).full_tensor()).items()

    def save(self, path: Path, *, export_huggingface: bool) -> int:
        """EngineState.save; the model directory goes to `path`/huggingface."""
        self.onload()
        num_bytes = checkpoint.save(path, self._state(), self.device, self._group)
        return num_bytes + (self._export(path / "huggingface") if export_huggingface else 0)

    def load(self, path: Path) -> None:
        """EngineState.load."""
        self.onload()
        counters = checkpoint.load(path, self._state(), self.device, self._group)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]

    def offload(self) -> None:
        """EngineState.offload."""
        if not self._offloaded and self.device.type != "cpu":
            self._move(torch.device("cpu"))
            free_cached_memory(self.device)
            self._offloaded = True

    def onload(self) -> None:
        """EngineState.onload."""
        if self._offloaded:
            self._move(self.device)
            self._offloaded = False

    def _run(self, microbatch: Microbatch, entropy: bool) -> TokenOutputs | ValueOutputs:
        # An empty microbatch still gathers and reduces: one token stands in, and its gradients are zeros.
        mb = microbatch if microbatch.lengths else _stand_in(self.device)
        packed = plan_attention(mb.lengths, mb.cu_seqlens, self._dtype)
        first_N, second_N = self._model(mb.token_ids_N, mb.position_ids_N, mb.temperature_N, mb.score_mask_N, packed, entropy)
        if isinstance(self._model, PolicyModel):
            return TokenOutputs(first_N, second_N)
        return ValueOutputs(first_N, second_N[mb.cu_seqlens[1:].long() - 1])

    def _shard(self) -> list[FSDPModule]:
        mesh = DeviceMesh.from_group(self._group, self.device.type)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        modules = [fully_shard(module, mesh=mesh, mp_policy=policy) for module in (*layers(self._model), self._model)]
        for module in modules:
            # Losses hold global counts: gradients add up, they are not averaged; and Gloo knows only the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return modules

    def _export(self, path: Path) -> int:
        num_bytes, shortage = 0, None
        try:
            num_bytes = write_model(path, self._path, self.named_weights(), writer=self.rank == 0)
        except DiskFullError as error:
            shortage = error.message
        checkpoint.raise_together(shortage, self.device, self._group)
        return num_bytes

    def _state(self) -> checkpoint.State:
        parameters = dict(self._model.hf.named_parameters())
        return checkpoint.State(parameters, self._optimizer, {"num_updates": self.num_updates, "num_skipped": self.num_skipped})

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        if self._optimizer is not None:
            for moments in self._optimizer.state.values():
                moments.update({name: value.to(device) for name, value in moments.items() if name != "step"})


def _default_group() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise ConfigError("the process group does not exist yet; call rolecall.training.device.start_rank first")
    return dist.group.WORLD


def _adamw(model: PackedModel, section: OptimizerSection) -> torch.optim.AdamW:
    """Decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True)


def _stand_in(device: torch.device) -> Microbatch:
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    return Microbatch(
        token_ids_N=zeros,
        position_ids_N=torch.arange(2, device=device),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32, device=device),
        lengths=(2,),
        temperature_N=torch.ones(2, device=device),
        score_mask_N=torch.tensor([False, True], device=device),
        columns={},
    )


def _zero_of(outputs: TokenOutputs | ValueOutputs) -> torch.Tensor:
    if isinstance(outputs, TokenOutputs):
        return (outputs.logprobs_N.sum() + outputs.entropy_N.sum()) * 0.0
    return (outputs.values_N.sum() + outputs.bootstrap_values_S.sum()) * 0.0


def _narrow(outputs: TokenOutputs | ValueOutputs, microbatch: Microbatch) -> TokenOutputs | ValueOutputs:
    """What the stand-in of an empty microbatch computed is nobody's."""
    if microbatch.lengths:
        return outputs
    if isinstance(outputs, TokenOutputs):
        return TokenOutputs(outputs.logprobs_N[:0], outputs.entropy_N[:0])
    return ValueOutputs(outputs.values_N[:0], outputs.bootstrap_values_S[:0])
