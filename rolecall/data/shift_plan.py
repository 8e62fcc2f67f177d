"""The memory that each role takes of a GPU which rollouts and trainers share, in each shift: what `rolecall check`
says, and the share that a rollout asks vLLM for.

Estimates, without activations: from the model's files, the layout and the sections, and what nvidia-smi says of the
GPUs.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rolecall.data.megatron.stages import rank_parameters
from rolecall.data.model.files import ModelFacts
from rolecall.data.model.parameter_counts import ParameterCounts, actor_parameters, critic_parameters, reference_held
from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, RunSettings, SftSettings, TrainerSection
from rolecall.terminal import in_bytes

NVIDIA_SMI_TIMEOUT_S = 10.0
CONTEXT_BYTES = 3 * 2**28
"""What CUDA and its libraries take of a GPU in each process, whatever that keeps there."""
GRAPHS_BYTES = 2**30
"""What vLLM's captured graphs take of a GPU, which its sleep leaves there; .4 GiB were measured of a 0.6B."""
SLOT_BYTES = 64 * 2**20
"""What the actor keeps of its GPU for weights on their way (rolecall/weights/shared_memory/device_slots.py)."""
BUCKETS = 3
"""Buckets that each end of a transfer has in hand (rolecall/weights/transfer.py)."""
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8
"""Bytes per trained parameter: the float32 weight, its gradient, and two moments."""


@dataclass(frozen=True)
class ShiftPlan:
    """Bytes on each shared GPU."""

    resident: float
    """Each process's CUDA, and references that stay, in every shift."""
    scored: float
    """The largest of the references that score in a shift of their own, one at a time."""
    parameters: float
    """The actor's parameters, which it has while it trains and while it publishes."""
    trained: float
    """All of the trainers' state, while they train."""
    passing: float
    """Weights on their way in a publish, at both ends: the actor's slots, buckets, and twice the largest layer: at the
    actor as it is gathered and packed, at the rollout as it arrives and is put in place.
    """
    rollout: float
    """The least of a rollout that is awake."""
    asleep: float
    """What stays of a rollout that sleeps: its CUDA, and its captured graphs."""
    gpu: int | None
    """The smallest GPU; None where nvidia-smi does not tell."""
    configured: float
    """The most that a rollout may take, of a GPU: rollout.gpu_memory_utilization."""
    lighter: str
    """Settings that leave less state to the trainers while they work, as the back end has them."""

    @property
    def training(self) -> float:
        """Bytes in use while the trainers work."""
        return self.resident + self.trained + self.asleep

    @property
    def scoring(self) -> float:
        """Bytes in use while references score in their shift."""
        return self.resident + self.scored + self.asleep

    @property
    def beside_rollouts(self) -> float:
        """Bytes that others have while a rollout is awake, at most: while the actor publishes."""
        return self.resident + self.parameters + self.passing

    @property
    def share(self) -> float | None:
        """The share of a GPU that a rollout takes: what is left of it, at most what is configured. vLLM holds it
        against what is free once its own CUDA is up.
        """
        if self.gpu is None:
            return None
        return min(self.configured, 1 - (self.beside_rollouts + CONTEXT_BYTES) / self.gpu)

    def require_room(self) -> None:
        """ConfigError that says how many bytes a shift lacks, and which settings free them."""
        if self.gpu is None:
            return
        if self.training > self.gpu:
            raise ConfigError(
                "shared GPUs: while the trainers work they and a sleeping rollout take "
                f"{in_bytes(self.training)} of each, {in_bytes(self.training - self.gpu)} more than it has; use more "
                f"GPUs (num_ranks){self.lighter} or a smaller model, leave "
                "references.<name>.offload out, or move critic and references to other GPUs"
            )
        if self.scored and self.scoring > self.gpu:
            raise ConfigError(
                "shared GPUs: while the references score they and a sleeping rollout take "
                f"{in_bytes(self.scoring)} of each, {in_bytes(self.scoring - self.gpu)} more than it has; use more "
                "GPUs (references.<name>.num_ranks) or smaller models, leave references.<name>.offload out, or move "
                "references to other GPUs"
            )
        missing = self.beside_rollouts + self.rollout - self.gpu
        if missing > 0:
            raise ConfigError(
                f"shared GPUs: while the actor publishes, its parameters ({in_bytes(self.parameters)}), weights on "
                f"their way ({in_bytes(self.passing)}), a rollout ({in_bytes(self.rollout)}) and what stays "
                f"({in_bytes(self.resident)}) lack {in_bytes(missing)}; use more GPUs (num_ranks, "
                "rollout.tensor_parallel_size, rollout.pipeline_parallel_size) or a smaller model, leave "
                "references.<name>.offload out, or move references to other GPUs"
            )


def shares_gpus_here(settings: RunSettings) -> bool:
    """Whether the GPUs of this machine are among those that roles of a run in shifts share, as far as its file says."""
    return settings.actor.address is None or settings.rollout.num_replicas > 0


def plan_shifts(settings: RunSettings, facts: ModelFacts, gpus: Mapping[int, int]) -> ShiftPlan:
    """The plan of a run that takes shifts on GPUs; `gpus` as gpu_memory_bytes says."""
    actor, rollout, critic = settings.actor, settings.rollout, settings.critic
    size = 4 if settings.model.dtype == "float32" else 2
    weights, shared = facts.num_parameters * size, set(actor.devices)
    references = {
        name: section
        for name, section in settings.references.items()
        # of one elsewhere that says nothing of shifts they are another machine's
        if shared & set(section.devices) and (section.address is None or section.offload is not None)
    }

    def in_a_step(counts: ParameterCounts, optimizer: OptimizerSection) -> float:
        """Bytes of gradients, and of the moments that are on the device at a time."""
        if trains_nothing(settings):
            return 0
        num_moments = counts.at_a_time if optimizer.offload else counts.trained
        return counts.trained * _GRADIENT + num_moments * _MOMENTS

    def state_of(
        section: TrainerSection, counts: ParameterCounts, optimizer: OptimizerSection, setting: str, path: Path | None
    ) -> tuple[float, float]:
        """Bytes on each rank of a trainer's parameters, and of all its state; Megatron's has all of it in a step."""
        if actor.backend == "megatron":
            most = rank_parameters(path or settings.model.path, section, actor.megatron, setting)
            return most.parameter_bytes(size), most.trained_bytes(size)
        held = counts.frozen * size + counts.trained * _MASTER
        return held / section.num_shards, (held + in_a_step(counts, optimizer)) / section.num_shards

    def held_by(name: str) -> float:
        return reference_held(settings, name, facts) * size

    def staying(gpu: int) -> float:
        """Bytes on one GPU of the references that stay there, and of the CUDA of all."""
        on = {name: section for name, section in references.items() if gpu in section.devices}
        stay = sum(held_by(name) for name, section in on.items() if not section.offload)
        return len(on) * CONTEXT_BYTES + stay

    acting = actor_parameters(settings, facts)
    parameters, trained = state_of(actor, acting, actor.optimizer, "model.path", None)
    num_processes = 1
    if critic is not None and shared & set(critic.devices) and (own := settings.critic_optimizer):
        trained += state_of(critic, critic_parameters(settings, facts), own, "critic.path", critic.path)[1]
        num_processes += 1
    packed = 2 * facts.largest_layer * size if settings.published_adapters is None else 0
    return ShiftPlan(
        resident=num_processes * CONTEXT_BYTES + max(map(staying, shared), default=0.0),
        scored=max((held_by(name) for name, section in references.items() if section.offload), default=0.0),
        parameters=parameters,
        trained=trained,
        passing=SLOT_BYTES + 2 * BUCKETS * settings.weights.bucket_bytes + packed + received_bytes(settings, facts),
        rollout=weights / rollout.workers_per_replica + (rollout.kv_cache_bytes or 0) + CONTEXT_BYTES,
        asleep=CONTEXT_BYTES + (0 if rollout.enforce_eager else GRAPHS_BYTES),
        gpu=min(gpus.values()) if gpus else None,
        configured=rollout.gpu_memory_utilization,
        lighter=(", optimizer.offload" if actor.backend == "fsdp" else "") + ", actor.lora, critic.lora",
    )


def received_bytes(settings: RunSettings, facts: ModelFacts) -> float:
    """Bytes of the largest layer at a rollout's worker, beside the weights that it has: vLLM keeps what arrives until a
    layer is whole, and puts its own part of it into fresh memory.
    """
    if settings.published_adapters is not None:
        return 0.0
    size = 4 if settings.model.dtype == "float32" else 2
    return facts.largest_layer * size * (1 + 1 / settings.rollout.tensor_parallel_size)


def trains_nothing(settings: RunSettings | SftSettings) -> bool:
    """Whether trainers have neither gradients nor moments: a run of no steps, where the first one makes them."""
    return settings.run.num_steps == 0 and settings.actor.backend == "fsdp"


def check_cpu_sleep(settings: RunSettings) -> None:
    """ConfigError where rollouts on CPUs are to sleep."""
    if settings.takes_shifts:
        raise ConfigError(
            "rollout.sleep_mode: vLLM gives memory up on GPUs only; leave it out, or give rollout.devices the GPUs of "
            "the actor"
        )


def gpu_memory_bytes() -> Mapping[int, int]:
    """Memory of each GPU by its index; empty where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return {}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        ).stdout
        return {
            int(index): int(mebibytes) * 2**20 for index, mebibytes in (line.split(",") for line in answer.splitlines())
        }
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
