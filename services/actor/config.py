"""What the actor derives from the run's settings. The sections themselves are in rolecall/settings/."""

from typing import Literal

from rolecall.settings import RunSettings


def num_optimizer_steps(settings: RunSettings) -> int:
    """Length of the learning rate's schedule."""
    return settings.run.num_steps * settings.algorithm.num_minibatches * settings.algorithm.num_epochs


def channel_backend(settings: RunSettings, receivers_on_gpus: bool) -> Literal["gloo", "nccl"]:
    """Collectives of the weight channel: as configured, else nccl when this actor and all its receivers are on GPUs."""
    return settings.weights.backend or ("nccl" if settings.actor.devices and receivers_on_gpus else "gloo")
