"""Addresses: `host:port`, `unix:/path` or a gRPC target, which may name several replicas, and which of them stay on
this machine.
"""

import ipaddress
from urllib.parse import urlsplit

from rolecall.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::")
"""Hosts that listen on every interface, and that nobody on another machine can call."""
_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:", "passthrough:///")


def is_unix(address: str) -> bool:
    """True for unix sockets, abstract ones included."""
    return address.startswith(("unix:", "unix-abstract:"))


def unix_path(address: str) -> str:
    """File system path of a `unix:` address; ConfigError for anything else."""
    path = address.removeprefix("unix:")
    if path == address or not path:
        raise ConfigError(f"{address!r} is not an address of the form unix:/path")
    return "/" + path.lstrip("/") if path.startswith("//") else path


def endpoints_of(address: str) -> list[str]:
    """The `host:port` parts of an address without its scheme: several for `ipv4:10.0.0.1:9000,10.0.0.2:9000`."""
    bare = address
    for scheme in _SCHEMES:
        bare = bare.removeprefix(scheme)
    return bare.split(",")


def host_of(address: str) -> str:
    """Host of a `host:port` address or gRPC target, of its first endpoint when it names several. ConfigError when it
    has no port.
    """
    return _host(endpoints_of(address)[0], address)


def check_address(address: str) -> None:
    """ConfigError when it is no address: a unix socket without a path, an endpoint without host and port, a port beyond
    65535.
    """
    if not is_unix(address):
        for endpoint in endpoints_of(address):
            _host(endpoint, address)


def _host(bare: str, address: str) -> str:
    try:
        parts = urlsplit(f"//{bare}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{address!r} is not an address: {error}; write host:port or unix:/path") from error
    if host is None or port is None:
        raise ConfigError(f"{address!r} is not an address; write host:port or unix:/path")
    return host


def is_loopback(address: str) -> bool:
    """True when only processes of this machine can be at, or reach, the address. Names other than `localhost` are not
    looked up and count as remote.
    """
    if is_unix(address):
        return True
    return all(is_loopback_host(_host(endpoint, address)) for endpoint in endpoints_of(address))


def is_loopback_host(host: str) -> bool:
    """True when `host`, an address of IP or a name, is this machine to itself; names as of `is_loopback`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
