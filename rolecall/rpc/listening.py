"""Whether an address can be listened on, and if not, why: asked before a run is started, and when a server could
not. Also how a server of a public contract listens in your own process.
"""

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.address import WILDCARDS, endpoints_of, host_of, is_loopback, is_unix, unix_path
from rolecall.errors import ConfigError
from rolecall.settings import RpcSection, TlsSection, WeightsSection

MAX_SOCKET_PATH = 107
"""Bytes in sockaddr_un.sun_path, less its final zero."""
_PROBE_TIMEOUT_S = 1.0
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The range of this process's network namespace: what bind takes for port 0, and connect for its near end.
"""


def require_tls(bind: str, rpc: RpcSection, setting: str) -> None:
    """ConfigError, naming `setting`, when others could reach what listens on `bind` in the clear."""
    if rpc.tls is None and not rpc.behind_mesh and not is_loopback(bind):
        named = f" ({setting})" if setting else ""
        raise ConfigError(
            f"refusing to listen on {bind}{named} without TLS; set rpc.tls, bind to 127.0.0.1, or set "
            "rpc.behind_mesh when a service mesh encrypts it"
        )


def require_ports(weights: WeightsSection) -> None:
    """ConfigError when the kernel would let the weight channel listen outside of weights.ports.

    Gloo and NCCL take any free port and can be told no range; the kernel's holds for them, the rendezvous and the
    ranks alike.
    """
    if weights.ports is None:
        return
    first, last = map(int, weights.ports.split("-"))
    lowest, highest = map(int, _KERNEL_PORTS.read_text().split())
    if not first <= lowest < highest <= last:
        raise ConfigError(
            f"weights.ports is {weights.ports}, and the kernel hands out {lowest}-{highest} here; set "
            f'net.ipv4.ip_local_port_range to "{first} {last}" (in Kubernetes securityContext.sysctls, in Compose '
            "sysctls), or remove weights.ports"
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


def advertised(address: str, host: str | None, peer: str | None) -> str:
    """Returns the address at which others reach what listens on `address`: at `host` where it is given; else, where it
    listens everywhere, at the address of this machine that `peer` sees.
    """
    if is_unix(address):
        return address
    port = address.rpartition(":")[2]
    if host is None and host_of(address) in WILDCARDS and peer is not None and not is_loopback(peer):
        host = _seen_by(peer)
    return address if host is None else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _seen_by(peer: str) -> str:
    """The address of this machine on its way to `peer`. ConfigError when no such name is known."""
    end = urlsplit(f"//{endpoints_of(peer)[0]}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(end.hostname, end.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)  # bounded: UDP sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"rollout.advertise_host is not set, and the way to {peer} is not known ({error.strerror}); set it to a "
            "host that the controller reaches"
        ) from error


def rpc_section(certificate_file: Path | None, key_file: Path | None, behind_mesh: bool) -> RpcSection:
    """Returns how the server listens: with TLS when the files are given. ConfigError when only one is."""
    if certificate_file is None and key_file is None:
        return RpcSection(behind_mesh=behind_mesh)
    if certificate_file is None or key_file is None:
        raise ConfigError("certificate_file and key_file belong together; give both for TLS")
    # Callers show no certificate (see new_server), so no roots are needed to check one.
    return RpcSection(
        tls=TlsSection(certificate_file=certificate_file, key_file=key_file, ca_file=certificate_file),
        behind_mesh=behind_mesh,
    )
