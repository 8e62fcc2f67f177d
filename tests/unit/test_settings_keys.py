"""How many keys a run's file has, and that each says what it means."""

from rolecall.settings import RunSettings
from tools.settings_keys import leaves

MAX_KEYS = 250


def test_the_keys_are_few() -> None:
    assert len(list(leaves(RunSettings))) < MAX_KEYS


def test_every_key_is_documented() -> None:
    assert not [path for path, docstring in leaves(RunSettings) if not docstring]
