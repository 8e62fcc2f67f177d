"""What a reference derives from the run's settings. The sections themselves are in rolecall/settings.py."""

from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.settings import ReferenceSection, RunSettings


def section(settings: RunSettings, instance: str) -> ReferenceSection:
    """The section of `instance`. ConfigError when there is none."""
    if instance not in settings.references:
        raise ConfigError(f"reference {instance!r} is not under references ({sorted(settings.references)}); pass --name with one of them")
    return settings.references[instance]


def model_path(settings: RunSettings, instance: str) -> Path:
    """The model directory: its own, else the policy's starting point."""
    return section(settings, instance).path or settings.model.path
