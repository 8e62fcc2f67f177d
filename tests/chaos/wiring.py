"""How the processes of a chaos run are wired: through sockets of the driver, where there is one, and past it where
there is none.

Every light role sits behind links that the driver owns (links.py): one for the calls it takes, one for its way to the
store, and for the actor one for the weight channel. A role also tells the driver which phase it is in and waits for its
nod, so that a fault can hit exactly there. All sockets lie in `wire` beside the run directory; without that folder a
role is an ordinary one.
"""

import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from rolecall.rpc.role_process import ServiceArgs
from rolecall.settings import RunSettings, store_url_file
from rolecall.store.connection import Connection, connect

NOD_TIMEOUT_S = 2.0
"""Longest wait for the driver's nod; then the role goes on without it."""


def wire_of(settings: RunSettings) -> Path:
    """Where the sockets lie."""
    return settings.run.dir.parent / "wire"


@dataclass
class Hook:
    """Says phases to the driver, one at a time, and waits for its nod. Threads may share it."""

    path: Path
    worker: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _socket: socket.socket | None = None

    def at(self, phase: str) -> None:
        """`worker` is in `phase`; returns when it may go on. A driver that is not there, or gone, is not missed."""
        with self._lock:
            try:
                if self._socket is None:
                    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    self._socket.settimeout(NOD_TIMEOUT_S)
                    self._socket.connect(str(self.path))
                self._socket.sendall(f"{self.worker} {os.getpid()} {phase}\n".encode())
                self._socket.recv(1)
            except OSError:
                if self._socket is not None:
                    self._socket.close()
                self._socket = None


def hook_of(settings: RunSettings, worker: str) -> Hook:
    """The hook of `worker`."""
    return Hook(wire_of(settings) / "phases", worker)


def checker_connection(settings: RunSettings) -> Connection:
    """A twin's way to what only its checks read: that of its role, as the controller's user."""
    assert settings.store.url is not None
    place = settings.store.url.get_secret_value().rpartition("@")[2]
    login = store_url_file(settings.run.dir, "controller").read_text().rpartition("@")[0]
    return connect(settings.store.model_copy(update={"url": SecretStr(f"{login}@{place}")}), verify=False)


def through_the_wire(args: ServiceArgs, section: str = "") -> ServiceArgs:
    """`args` with the store, where the role has a part in it, behind the driver's link; with a `section`, its server
    bound behind one, too. Unchanged when there is no driver.
    """
    settings, wire = args.settings, wire_of(args.settings)
    if not wire.is_dir():
        return args
    changes: dict[str, object] = {}
    if settings.store.url is not None:
        login = urlsplit(settings.store.url.get_secret_value()).netloc.rpartition("@")[0]
        url = SecretStr(f"unix://{login}@{wire / args.worker}.store")
        changes["store"] = settings.store.model_copy(update={"url": url})
    if section:
        owner = settings.references[args.worker] if section == "references" else getattr(settings, section)
        bound = owner.model_copy(update={"bind": f"unix:{wire / args.worker}.real"})
        changes[section] = {**settings.references, args.worker: bound} if section == "references" else bound
    return ServiceArgs(settings.model_copy(update=changes), args.worker, args.incarnation)
