"""`rolecall health`: asks a role for its gRPC health, for probes of every kind; those of the kubelet cannot speak TLS.

It is started every few seconds beside roles that need the cores, so it imports neither torch nor pydantic: it reads the
few keys that say where the role listens, and its certificates, straight from the file.
"""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolecall.address import WILDCARDS, check_address, host_of, is_loopback, is_unix
from rolecall.config_file import load_tree
from rolecall.errors import ConfigError, UnavailableError
from rolecall.rpc.options import LIVENESS

ANSWER_S = 2.0
"""Deadline of the connection and the answer together: within a probe's own, which should be 3 s or more."""
_TLS_FILES = ("ca_file", "key_file", "certificate_file")


def health(arguments: argparse.Namespace, roles: Collection[str], overrides: Sequence[str]) -> int:
    """Asks as the command line says (`role`, `run`, `name`, `tls`, `live`) and prints the answer; 0 when the role is
    serving, else 1. ConfigError for what cannot be asked, UnavailableError when nobody answers in time.
    """
    role, run = arguments.role, arguments.run
    if role in roles:
        if run is None:
            raise ConfigError(f"RUN is missing: rolecall health {role} RUN, a run directory or a configuration file")
        address, credentials = _of_role(role, run, arguments.name, overrides)
    elif run is not None or overrides:
        raise ConfigError(f"there is no role {role!r}; there are {', '.join(roles)}; or give an address alone")
    else:
        address, credentials = _checked(role), _of_folder(arguments.tls)
    status = _ask(address, credentials, LIVENESS if arguments.live else "")
    sys.stdout.write(f"{role}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}\n")
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


def _of_role(
    role: str, run: Path, name: str | None, overrides: Sequence[str]
) -> tuple[str, grpc.ChannelCredentials | None]:
    """The address at which a role of this machine listens, and the credentials that it has itself."""
    file = run / "config.yaml" if run.is_dir() else run
    tree, _ = load_tree(file, overrides)
    path = [role]
    if role == "reference":
        references = tree.get("references") or {}
        instance = (name or "").partition("/")[0] or (next(iter(references)) if len(references) == 1 else "")
        if instance not in references:
            raise ConfigError(f"--name is to say which of references: {', '.join(references) or 'there is none'}")
        path = ["references", instance]
    section: Any = tree
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    section = section if isinstance(section, dict) else {}
    bind = section.get("bind") or section.get("address")
    if not isinstance(bind, str) or bind.endswith(":0"):
        raise ConfigError(f"{file} does not say at which port the {role} listens; set {'.'.join(path)}.bind")
    return _near(_checked(bind)), _of_file(tree, file.resolve().parent, role)


def _checked(address: str) -> str:
    check_address(address)
    return address


def _near(bind: str) -> str:
    """The address at which a process of this machine reaches one that listens at `bind`; by name, for certificates."""
    if is_unix(bind) or not (is_loopback(bind) or host_of(bind) in WILDCARDS):
        return bind
    return f"localhost:{bind.rpartition(':')[2]}"


def _of_file(tree: dict[str, Any], folder: Path, role: str) -> grpc.ChannelCredentials | None:
    rpc = tree.get("rpc") or {}
    tls = rpc.get("tls") if isinstance(rpc, dict) else None
    if not tls:
        return None
    paths = {f"rpc.tls.{key}": tls.get(key) if isinstance(tls, dict) else None for key in _TLS_FILES}
    for key, path in paths.items():
        if not isinstance(path, str):
            raise ConfigError(f"{key} is missing; name a PEM file")
    return _credentials(
        {key: folder / Path(str(path).replace("{role}", role)).expanduser() for key, path in paths.items()}
    )


def _of_folder(folder: Path | None) -> grpc.ChannelCredentials | None:
    if folder is None:
        return None
    return _credentials({f"--tls {name}": folder / name for name in ("ca.crt", "tls.key", "tls.crt")})


def _credentials(files: dict[str, Path]) -> grpc.ChannelCredentials:
    """Mutual TLS of three PEM files: roots, key, certificate; each with what it was called."""
    pems = []
    for name, path in files.items():
        try:
            pems.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
    return grpc.ssl_channel_credentials(*pems)


def _ask(address: str, credentials: grpc.ChannelCredentials | None, service: str) -> int:
    options = [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    )  # bounded: its one call names its deadline
    with channel:
        stub = cast(Any, health_pb2_grpc.HealthStub)(channel)  # its published types lack the calls
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=ANSWER_S, wait_for_ready=False)
        except grpc.RpcError as error:
            code, details = cast(Any, error).code(), cast(Any, error).details()
            raise UnavailableError(f"{address} does not say that it is healthy: {code.name}, {details}") from error
        return int(answer.status)
