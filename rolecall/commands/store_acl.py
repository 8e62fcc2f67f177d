"""`rolecall store-acl`: users of an external store, one for each role, with what the server lets each do
(`rolecall/store/users.py`). The embedded store makes its own.
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.users import REPLAYING, ROLES, rights


def store_acl(settings: RunSettings, directory: Path, out: TextIO, *, once: bool = False) -> int:
    """Makes passwords and writes `directory`/users.acl, which holds their digests, and `directory`/<role>/store-url:
    all readable by their owner alone. Says what is for whom; returns 0.

    ConfigError when store.url is not set, or when users.acl is there already; with `once` that is left as it is.
    """
    if settings.store.url is None:
        raise ConfigError(
            "store.url is not set: the embedded store makes its users by itself; for another, set it to where the "
            "server listens, without user and password"
        )
    acl, run, url = directory / "users.acl", settings.run.name, urlsplit(settings.store.url.get_secret_value())
    if acl.exists():
        if once:
            out.write(f"{acl} is there; delete it to make new passwords\n")
            return 0
        raise ConfigError(f"{acl} exists; delete it to make new passwords, or name another directory")
    lines = [REPLAYING]
    with writing("write", directory):
        for role in ROLES:
            user, password = f"{run}.{role}", secrets.token_hex(24)
            digest = hashlib.sha256(password.encode()).hexdigest()
            lines.append(f"user {user} on #{digest} resetchannels {rights(role, run)}")
            login = url._replace(netloc=f"{user}:{password}@{url.netloc.rpartition('@')[2]}")
            _write(directory / role / "store-url", login.geturl())
        _write(acl, "".join(f"{line}\n" for line in lines))
    out.write(f"{acl}: for each server of the store, as its aclfile; of one that others use, too, with their users\n")
    for role in ROLES:
        note = ", and for rolecall check, train and ledger" if role == "controller" else ""
        out.write(f"{directory / role / 'store-url'}: ROLECALL_STORE_URL of the {role}{note}\n")
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
