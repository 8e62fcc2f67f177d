"""The note of which store a run used when it was started last: `<run.dir>/store.json`. Beside another store it would
begin anew, and train again what it has trained.
"""

import json

from rolecall.disk import replace_text
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.probe import holds_run, place_of

FILE = "store.json"
"""File in run.dir."""
EMBEDDED = "embedded"
"""What is noted of a run whose store is the launcher's own."""


def require_used_store(settings: RunSettings) -> None:
    """Raises ConfigError when a run that goes on would find another store than at its last start, and nothing of itself
    in it. A store that moved with what it holds is the same.
    """
    path = settings.run.dir / FILE
    if not path.is_file():
        return
    before, now = json.loads(path.read_text())["store"], _used(settings)
    if before == now or _holds(settings):
        return
    remedy = "leave store.url and ROLECALL_STORE_URL out" if before == EMBEDDED else f"give the URL of {before} again"
    raise ConfigError(
        f"store.url: the run in {settings.run.dir} has used the store {before}, and the store {now} holds nothing of "
        f"it, so that it would train again what it has trained; {remedy}. Where the old store is gone for good, remove "
        f"{path}: the run then goes on from its last checkpoint"
    )


def note_used_store(settings: RunSettings) -> None:
    """Writes which store the run uses."""
    replace_text(settings.run.dir / FILE, json.dumps({"store": _used(settings)}) + "\n")


def _used(settings: RunSettings) -> str:
    url = settings.store.url
    return EMBEDDED if url is None else place_of(url.get_secret_value())


def _holds(settings: RunSettings) -> bool:
    if settings.store.url is not None:
        return holds_run(settings)
    folder = settings.run.dir / "store"
    return folder.is_dir() and any(folder.iterdir())
