"""The trainers of a run, or the one of a fine-tuning, and the memory that their state takes: by it capacity.py refuses,
and footprint.py tells.

State is parameters, gradients and moments; what a pass keeps besides is reckoned in gpus.py.
"""

from dataclasses import dataclass
from pathlib import Path

from rolecall.data.megatron.stages import RankParameters, rank_parameters
from rolecall.data.model.files import ModelFacts
from rolecall.data.model.parameter_counts import ParameterCounts, actor_parameters, critic_parameters
from rolecall.settings import ActorSection, LoraSection, OptimizerSection, RunSettings, SftSettings, TrainerSection

OPTIMIZER_BYTES_PER_PARAMETER = 16
"""float32 master weight, gradient and two moments."""
MOMENT_BYTES_PER_PARAMETER = 8
"""Two float32 moments; muon has one of a matrix."""
LEAST_MOMENT_BYTES = {"adamw": 8, "muon": 4}
"""Bytes of a parameter's moments, at least, by the kind of the optimizer."""


@dataclass(frozen=True)
class Trainer:
    """A trainer of a run, or of a fine-tuning, with what its memory follows from."""

    role: str
    section: TrainerSection
    optimizer: OptimizerSection
    lora: LoraSection | None
    path: Path
    """Directory of the model."""
    counts: ParameterCounts
    actor: ActorSection
    """The section that says for every trainer how it computes."""
    size: int
    """Bytes of a number in model.dtype."""

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all parameters that stay as they are."""
        return self.counts.frozen * self.size

    @property
    def state_bytes(self) -> float:
        """Bytes on a rank, over Megatron-Core on the fullest."""
        if self.actor.backend == "megatron":
            return self._fullest.trained_bytes(self.size)
        return (self.frozen_bytes + self.counts.trained * OPTIMIZER_BYTES_PER_PARAMETER) / self.section.num_shards

    @property
    def away_bytes(self) -> float:
        """Bytes of it that are in host memory while passes are made."""
        if not self.optimizer.offload:
            return 0.0
        optimized = self.counts.trained / self.section.num_shards
        if self.actor.backend == "megatron":
            optimized = self._fullest.optimized
        return optimized * MOMENT_BYTES_PER_PARAMETER

    def least_bytes(self, *, steps: bool) -> float:
        """The least bytes on a rank; without `steps` there are neither gradients nor moments. Muon has half as many
        moments at the least, and where they live in host memory a step has some of them at a time.
        """
        if self.actor.backend == "megatron":
            return self._fullest.trained_bytes(self.size)
        num_moments = self.counts.at_a_time if self.optimizer.offload else self.counts.trained
        moments = num_moments * LEAST_MOMENT_BYTES[self.optimizer.kind]
        trained = self.counts.trained * 8 + moments if steps else self.counts.trained * 4
        return (self.frozen_bytes + trained) / self.section.num_shards

    @property
    def _fullest(self) -> RankParameters:
        return rank_parameters(self.path, self.section, self.actor.megatron, f"{self._owner}.path")

    @property
    def _owner(self) -> str:
        return "model" if self.role == "actor" else self.role


def trainers(settings: RunSettings | SftSettings, facts: ModelFacts) -> list[Trainer]:
    """The actor and the critic, if there is one; `facts` tell of the actor's model. ConfigError when a model's files
    are not whole, or names a module of its adapters that it lacks.
    """
    actor, path = settings.actor, settings.model.path
    size = 4 if settings.model.dtype == "float32" else 2
    counts = actor_parameters(settings, facts)
    found = [Trainer("actor", actor, actor.optimizer, actor.lora, path, counts, actor, size)]
    if isinstance(settings, RunSettings) and (critic := settings.critic) and (own := settings.critic_optimizer):
        counts = critic_parameters(settings, facts)
        found.append(Trainer("critic", critic, own, critic.lora, critic.path or path, counts, actor, size))
    return found
