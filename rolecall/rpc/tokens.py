"""The tokens of a run on one machine, one for each kind of caller: `<run.dir>/callers/`, readable by the run's user
alone.

Whoever starts first makes them, whole or not at all, and they stay as long as the directory does. A process reads the
token of its own role, and of the others only digests: enough to know a caller by, not to call as one.
"""

import hmac
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.rpc.callers import Caller

FOLDER = "callers"
"""Folder in run.dir."""
HEADER = "rolecall-token"
"""Metadata that carries a token."""
DIGESTS = "digests.json"
_OTHERS = 0o077


@dataclass(frozen=True)
class Tokens:
    """The knowledge of one process: a token of its own, and how it knows those of others."""

    own: str = field(repr=False)
    digests: Mapping[Caller, str]
    """SHA-256 in hex."""

    def caller(self, token: str) -> Caller | None:
        """Returns whose token it is; None: nobody's of this run."""
        digest = _digest(token)
        found = [caller for caller, known in self.digests.items() if hmac.compare_digest(digest, known)]
        return found[0] if found else None


def make_tokens(run_dir: Path) -> None:
    """Makes the tokens of a run, unless somebody has: of two who try at once, one's are taken whole."""
    folder = run_dir / FOLDER
    if folder.is_dir():
        return
    with writing("make", folder):
        run_dir.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=run_dir))  # of mode 0700
        tokens = {caller: secrets.token_hex(32) for caller in Caller}
        for caller, token in tokens.items():
            _write(making / caller, token)
        _write(making / DIGESTS, json.dumps({caller: _digest(token) for caller, token in tokens.items()}))
        with suppress(OSError):  # somebody else's stand there by now
            making.rename(folder)
        shutil.rmtree(making, ignore_errors=True)


def read_tokens(run_dir: Path, caller: Caller) -> Tokens:
    """Returns what a process of this kind may know. ConfigError when another user could have read or made the files."""
    folder = run_dir / FOLDER
    try:
        owner = folder.stat()
        if owner.st_uid != os.geteuid() or owner.st_mode & _OTHERS:
            raise ConfigError(
                f"{folder} holds the tokens of the run and is another user's, or open to others; make it yours alone "
                "(chmod 700), or stop what runs there and remove it for new tokens"
            )
        own, digests = (folder / caller).read_text(), json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokens of the run cannot be read ({error}); stop what runs there and remove {folder} for new ones"
        ) from error
    return Tokens(own, {Caller(name): digest for name, digest in digests.items()})


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()
