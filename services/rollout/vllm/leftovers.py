"""The sockets and the shared memory of a rollout's vLLM, which nobody removes where its processes are killed.

Owns a folder for the sockets, in which the memory is named, too: emptied by the next process of the same run and name,
and at the end. What is somebody else's is left. Reaches no vLLM.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rolecall.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_NAMES = "shared_memory.json"


class Leftovers:
    """A place for what vLLM of the rollout `worker` of the run in `run_dir` makes outside its own memory."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        # a short name: a socket's path has at most 107 bytes
        name = hashlib.sha256(f"{run_dir.resolve()} {worker}".encode()).hexdigest()[:8]
        self.folder = Path(tempfile.gettempdir()) / f"vllm-{name}"

    def begin(self) -> None:
        """Removes what was left under this name and makes the folder. ConfigError where somebody else has one."""
        self.remove()
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ConfigError(f"{self.folder} belongs to somebody else; set TMPDIR to another folder") from error

    def note(self, shared: Iterable[tuple[str, int]]) -> None:
        """Keeps the names and inodes of the memory that the processes share."""
        (self.folder / _NAMES).write_text(json.dumps(list(shared)))

    def remove(self) -> None:
        """Removes the folder and the memory that it names, if another has not taken the name since. Idempotent."""
        if not self.folder.exists() or self.folder.stat().st_uid != os.getuid():
            return
        names = self.folder / _NAMES
        for name, inode in json.loads(names.read_text()) if names.exists() else ():
            with suppress(FileNotFoundError):
                if (SHARED_MEMORY / name).stat().st_ino == inode:
                    (SHARED_MEMORY / name).unlink()
        shutil.rmtree(self.folder)
