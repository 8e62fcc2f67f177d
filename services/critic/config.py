"""The values that the critic derives from the run's settings. The sections themselves are in rolecall/settings/."""

from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.settings import CriticSection, RunSettings


def section(settings: RunSettings) -> CriticSection:
    """The critic's section. ConfigError when the run has none."""
    if settings.critic is None:
        raise ConfigError(
            "this run has no critic section; add one (critic: {} takes all defaults) or do not start a critic"
        )
    return settings.critic


def num_minibatches(settings: RunSettings) -> int:
    """Optimizer steps per pass over a batch: its own, else the actor's."""
    return section(settings).num_minibatches or settings.algorithm.num_minibatches


def num_optimizer_steps(settings: RunSettings) -> int:
    """Length of the learning rate's schedule."""
    return settings.run.total_steps * num_minibatches(settings) * settings.algorithm.num_epochs


def model_path(settings: RunSettings) -> Path:
    """The model directory: its own, else the policy's."""
    return section(settings).path or settings.model.path
