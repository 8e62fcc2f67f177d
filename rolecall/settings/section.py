"""The parts that all sections are made of: the frozen base, and types of fields that several of them use."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rolecall.address import check_address, endpoints_of, is_unix
from rolecall.errors import ConfigError

NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]
UnitFloat: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def absolute(value: object, info: Any) -> object:
    """The path `value`, taken from the configuration file's folder where that is known."""
    base = (info.context or {}).get("base")
    return Path(base) / Path(str(value)).expanduser() if base is not None and value is not None else value


ConfigPath: TypeAlias = Annotated[Path, BeforeValidator(absolute)]
"""A path; relative ones are taken from the configuration file's folder."""


def _without_password(url: str) -> str:
    if "://" in url and urlsplit(url).password is not None:
        raise ValueError(
            "a password in a URL would stand in config.yaml; take it out, and give it in the environment as its "
            "library reads it (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; for any other FSSPEC_<PROTOCOL>_<OPTION>, as FSSPEC_FTP_PASSWORD)"
        )
    return url


CheckpointUrl: TypeAlias = Annotated[
    str,
    BeforeValidator(lambda value, info: value if "://" in str(value) else value and str(absolute(value, info))),
    AfterValidator(_without_password),
]
"""A URL without a password, or a path as ConfigPath."""


def _without_login(uri: str) -> str:
    if "@" in urlsplit(uri).netloc:
        raise ValueError(
            "a user or password in it would stand in config.yaml; take them out, and set MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD (or "
            "MLFLOW_TRACKING_TOKEN) in the environment"
        )
    return uri


MlflowUri: TypeAlias = Annotated[str, AfterValidator(_without_login)]
"""A tracking URI without user and password."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a Python regular expression: {error}") from error
    return pattern


Pattern: TypeAlias = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression that compiles."""


def address_of(value: str) -> str:
    """`value`, which is an address; ValueError says what is wrong with it."""
    try:
        check_address(value)
    except ConfigError as error:
        raise ValueError(error.message) from error
    return value


Address: TypeAlias = Annotated[str, AfterValidator(address_of)]
"""`host:port`, `unix:/path` or a gRPC target, which may name several endpoints."""


def _host_port(value: str) -> str:
    if is_unix(value) or value != endpoints_of(value)[0]:
        raise ValueError(f"{value!r} is not host:port; Prometheus reads nothing else")
    return value


HostPort: TypeAlias = Annotated[Address, AfterValidator(_host_port)]
"""`host:port` and nothing else."""


def url_of(value: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """`value`, which is the URL of a server by one of `schemes`; ValueError says what is wrong with it."""
    parts = urlsplit(value)
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is no URL; write http://host:port/path or https://host/path")
    if "@" in parts.netloc:
        raise ValueError("a user or password in a URL would stand in config.yaml; give a token by bearer_token_file")
    return value


def _port_range(value: str) -> str:
    first, _, last = value.partition("-")
    if not (first.isdigit() and last.isdigit() and 1024 <= int(first) < int(last) <= 65_535):
        raise ValueError(f"{value!r} is no range of ports; write first-last between 1024 and 65535, e.g. 29500-29599")
    return value


PortRange: TypeAlias = Annotated[str, AfterValidator(_port_range)]
"""`first-last`, both included."""


class Section(BaseModel):
    """Common to all sections: frozen, unknown keys and numbers that are not finite forbidden."""

    # deferred: a section is built as part of those that hold it, and every process of a run pays for each time
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)


Roots: TypeAlias = Annotated[Literal["system"] | ConfigPath, Field(union_mode="left_to_right")]
"""PEM roots to trust: `system`, or a file."""


class AddressSection(Section):
    """The address of a role, and where it listens."""

    address: Address | None = None
    """`host:port` or a gRPC target where clients reach it; absent: local, started by `rolecall train`."""
    bind: Address | None = None
    """`host:port` it listens on; absent: the address."""


class ServiceSection(AddressSection):
    """A role that may use GPUs."""

    devices: tuple[int, ...] = ()
    """GPU indices it may use on its machine, on each of them where its ranks are on several; empty: CPU. No two local
    roles may share one.
    """
