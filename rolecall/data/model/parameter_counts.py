"""Counts of the parameters of each role's model: those that are trained, and those that stay as they are. Memory and
disk are reckoned from them.

The headers of the model's files tell them. No torch.
"""

from dataclasses import dataclass
from pathlib import Path

from rolecall.data.megatron.stages import rank_parameters
from rolecall.data.model.adapters import num_adapter_parameters
from rolecall.data.model.files import ModelFacts, read_model
from rolecall.settings import LoraSection, RunSettings, SftSettings

UPDATED_AT_A_TIME = 2**28
"""Most parameters, of all ranks together, whose moments a step has on the device at a time where they live on the host;
a tensor that is larger is alone there.
"""


@dataclass(frozen=True)
class ParameterCounts:
    """The parameters of one trainer's model."""

    trained: int
    """Parameters in float32, with gradients and moments. A value head beside adapters, some thousands, is left out."""
    frozen: int
    """Parameters of a base beneath adapters or of a vision tower that stays as it is, in model.dtype; 0: all are
    trained.
    """
    at_a_time: int
    """Most parameters whose moments are on the device at a time with optimizer.offload."""


def actor_parameters(settings: RunSettings | SftSettings, facts: ModelFacts) -> ParameterCounts:
    """Counts the actor's, whose model `facts` tell of. ConfigError names a module of its adapters that it lacks."""
    return _counts(settings, facts, settings.model.path, settings.actor.lora, "actor.lora")


def critic_parameters(settings: RunSettings, facts: ModelFacts) -> ParameterCounts:
    """Counts the critic's, whose model is that of critic.path, else the actor's, which `facts` tell of; none without a
    critic. ConfigError when its files are not whole, or names a module of its adapters that it lacks.
    """
    critic = settings.critic
    if critic is None:
        return ParameterCounts(0, 0, 0)
    if critic.path is not None:
        facts = read_model(critic.path, "critic.path")
    return _counts(settings, facts, critic.path or settings.model.path, critic.lora, "critic.lora")


def reference_held(settings: RunSettings, name: str, facts: ModelFacts) -> float:
    """Counts those on the fullest rank of the reference `name`, whose model is that of its path, else the actor's,
    which `facts` tell of. ConfigError when its files are not whole, or it has too few layers for its stages.
    """
    section, setting = settings.references[name], f"references.{name}.path"
    if settings.actor.backend == "megatron":
        path = section.path or settings.model.path
        return rank_parameters(path, section, settings.actor.megatron, setting).held
    whole = facts if section.path is None else read_model(section.path, setting)
    return whole.num_parameters / section.num_shards


def _counts(
    settings: RunSettings | SftSettings, facts: ModelFacts, path: Path, lora: LoraSection | None, setting: str
) -> ParameterCounts:
    if lora is None:
        frozen = facts.num_tower_parameters if settings.freezes_vision_tower else 0
        trained = facts.num_parameters - frozen
    else:
        frozen, trained = facts.num_parameters, num_adapter_parameters(path, lora, setting)
    return ParameterCounts(trained, frozen, min(trained, max(UPDATED_AT_A_TIME, facts.largest_layer)))
