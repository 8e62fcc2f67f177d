"""Whether an address can be listened on, and if not, why: asked before a run is started, and when a server could
not.
"""

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.address import host_of, is_loopback, is_unix, unix_path
from rolecall.errors import ConfigError
from rolecall.settings import RpcSection

MAX_SOCKET_PATH = 107
"""Bytes in sockaddr_un.sun_path, less its final zero."""
_PROBE_TIMEOUT_S = 1.0


def require_tls(bind: str, rpc: RpcSection, setting: str = "") -> None:
    """ConfigError, naming `setting`, when others could reach what listens on `bind` in the clear."""
    if rpc.tls is None and not rpc.behind_mesh and not is_loopback(bind):
        named = f" ({setting})" if setting else ""
        raise ConfigError(
            f"refusing to listen on {bind}{named} without TLS; set rpc.tls, bind to 127.0.0.1, or set "
            "rpc.behind_mesh when a service mesh encrypts it"
        )


def why_not(bind: str) -> str:
    """The end of a sentence that begins with the address, with what to do; empty when it can be listened on.
    ConfigError when it is no address.
    """
    return _unix_problem(Path(unix_path(bind))) if is_unix(bind) else _port_problem(bind)


def _port_problem(bind: str) -> str:
    host, port = host_of(bind), urlsplit(f"//{bind}").port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"names a host that is not known ({error.strerror}); use an address of this machine"
    answers = [_bind_error(family, kind, protocol, address) for family, kind, protocol, _, address in found]
    errors = [answer for answer in answers if answer is not None]
    in_use = next((error for error in errors if error.errno == errno.EADDRINUSE), None)
    if in_use is None and len(errors) < len(found):
        return ""  # a name may stand for addresses that this machine does not have
    match (in_use or errors[0]).errno:
        case errno.EADDRINUSE:
            return (
                "is in use: another process listens there; stop it, or choose another port (0 takes a free one "
                "under `rolecall train`)"
            )
        case errno.EADDRNOTAVAIL:
            return "is not an address of this machine; use 127.0.0.1, 0.0.0.0 or one of its own"
    return f"cannot be listened on ({errors[0].strerror}); choose another"


def _bind_error(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> OSError | None:
    try:
        with socket.socket(family, kind, protocol) as probe:
            # as gRPC does: connections that linger do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _unix_problem(path: Path) -> str:
    """gRPC would unlink and replace a socket file that somebody listens on."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return (
            f"is a path of {len(os.fsencode(path))} bytes, a socket's may have {MAX_SOCKET_PATH}; choose a shorter one"
        )
    if not path.parent.is_dir():
        return f"is in {path.parent}, which does not exist; make it"
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))  # bounded: by settimeout, two lines up
        except OSError:
            return ""
    return "is in use: another process listens there; stop it or choose another path"
