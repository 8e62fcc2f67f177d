"""The values that the actor derives from the run's settings. The sections themselves are in rolecall/settings/."""

from rolecall.settings import RunSettings


def num_optimizer_steps(settings: RunSettings) -> int:
    """Length of the learning rate's schedule."""
    return settings.num_policy_updates
