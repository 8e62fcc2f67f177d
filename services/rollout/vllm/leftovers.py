"""The sockets and the shared memory of a rollout's vLLM, which nobody removes where its processes are killed.

Owns a folder for the sockets, in which the memory is named, too: removed at the end, or by the next process of the same
run and name. What is somebody else's is left. Reaches no vLLM.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SOCKET_CHARS = len("12345678") + len("/") + 36
"""Characters behind the prefix: what makes a folder's name its own, and a socket in it, whose name is a UUID."""
MAX_SOCKET_PATH = 107
"""Longest path of a socket, in bytes."""
_NAMES = "shared_memory.json"


class Leftovers:
    """A place for what vLLM of the rollout `worker` of the run in `run_dir` makes outside its own memory."""

    folder: Path
    """The sockets' folder; there since `begin`."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self._prefix = f"vllm-{hashlib.sha256(f'{run_dir.resolve()} {worker}'.encode()).hexdigest()[:8]}-"
        base = Path(os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()))
        fits = len(os.fsencode(base / self._prefix)) + SOCKET_CHARS <= MAX_SOCKET_PATH
        self._base = base if fits else Path("/tmp")

    def begin(self) -> None:
        """Removes what was left under this name and makes the folder."""
        for folder in self._base.glob(f"{self._prefix}*"):
            _remove(folder)
        self.folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._base))

    def note(self, shared: Iterable[tuple[str, int]]) -> None:
        """Keeps the names and inodes of the memory that the processes share."""
        with suppress(OSError):  # a full disk, or another process of this name: then they are left
            (self.folder / _NAMES).write_text(json.dumps(list(shared)))

    def remove(self) -> None:
        """Removes the folder and the memory that it names, if another has not taken the name since. Idempotent."""
        with suppress(FileNotFoundError):
            _remove(self.folder)


def _remove(folder: Path) -> None:
    """FileNotFoundError."""
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        return
    for name, inode in _noted(folder):
        with suppress(FileNotFoundError):
            if (SHARED_MEMORY / name).stat().st_ino == inode:
                (SHARED_MEMORY / name).unlink()
    shutil.rmtree(folder, ignore_errors=True)  # its owners may be removing some of it themselves


def _noted(folder: Path) -> list[tuple[str, int]]:
    try:
        return [(name, inode) for name, inode in json.loads((folder / _NAMES).read_text())]
    except (FileNotFoundError, ValueError):  # none, or cut by a full disk or a kill
        return []
