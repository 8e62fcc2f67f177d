"""The check that no other run of the same name lies in an external store."""

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger


def require_free_name(settings: RunSettings) -> None:
    """Raises ConfigError when the store of a run that is to begin holds another one of its name.

    The new run would take its keys and weights for its own.
    """
    name, connection = settings.run.name, connect(settings.store)
    try:
        position = Ledger(connection, name).position()
    finally:
        connection.close()
    if position.next_gid:
        raise ConfigError(
            f"run.name {name!r} is taken: the store holds a run of that name, at step {position.step} with "
            f"{position.admitted} groups admitted. Give this "
            "run another run.name; or go on with that one from its own run.dir with --resume; or, if nobody needs "
            f"it, delete its keys ({{rl:{name}...)"
        )
