"""The values that a reference derives from the run's settings. The sections themselves are in rolecall/settings/."""

from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.settings import ReferenceSection, RunSettings


def instance_of(worker: str) -> str:
    """The instance that the worker `worker` serves: replicas of `ref` behind one address are named ref/0, ref/1, ..."""
    return worker.partition("/")[0]


def section(settings: RunSettings, instance: str) -> ReferenceSection:
    """The section of `instance`. ConfigError when there is none."""
    if instance not in settings.references:
        raise ConfigError(
            f"reference {instance!r} is not under references ({sorted(settings.references)}); pass --name with one "
            "of them"
        )
    return settings.references[instance]


def model_path(settings: RunSettings, instance: str) -> Path:
    """The model directory: its own, else the policy's starting point."""
    return section(settings, instance).path or settings.model.path
