"""The parts that all sections are made of: the frozen base, types of fields that several of them use, and which prompts
a section is for.
"""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from rolecall.address import check_address, endpoints_of, is_unix
from rolecall.errors import ConfigError

NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]
UnitFloat: TypeAlias = Annotated[float, Field(gt=0, le=1)]

_Section = TypeVar("_Section")

MAX_NAME_BYTES = 255
"""Bytes in the name of a file or folder, as Linux has it."""


def absolute(value: object, info: Any) -> object:
    """The path `value`, taken from the configuration file's folder where that is known; a date, as YAML may read a
    name, is taken as it is written. ValueError when it is none: a number no longer says how it was written (0012 is 10,
    1.10 is 1.1), and no variable of the environment is read.
    """
    base = (info.context or {}).get("base")
    if base is None or value is None:
        return value
    if isinstance(value, int | float | datetime | list | dict):  # a bool is an int
        raise ValueError(f"{value!r} is no path; write one, in quotes where YAML reads something else")
    variable = next((part for part in Path(str(value)).parts if part.startswith("$")), None)
    if variable is not None:
        raise ValueError(f"{variable} in {str(value)!r} is not replaced by anything; write the folder in full")
    try:
        path = Path(base) / Path(str(value)).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{str(value)!r} begins with ~ and a user who is not known here; write the folder in full"
        ) from error
    longest = max(len(os.fsencode(name)) for name in path.parts)
    if longest > MAX_NAME_BYTES:
        raise ValueError(
            f"a name of {longest} bytes stands in the path, and a file system takes {MAX_NAME_BYTES}; shorten it"
        )
    return path


def _without_null(sections: object) -> object:
    if not isinstance(sections, dict):
        return sections
    return {name: section for name, section in sections.items() if section is not None}


Named: TypeAlias = Annotated[dict[str, _Section], BeforeValidator(_without_null)]
"""Sections by their names; one that is null is absent, so that a file leaves out one of its recipe, and a command line
one of its file.
"""


def spelled(pattern: str, how: str) -> AfterValidator:
    """A check that all of a text matches `pattern`, which people are told in the words of `how`."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} is not {how}")
        return text

    return AfterValidator(check)


ConfigPath: TypeAlias = Annotated[Path, BeforeValidator(absolute)]
"""A path; relative ones are taken from the configuration file's folder."""


def _files(value: object, info: Any) -> object:
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("it names no file; name one, or several in their order")
        return tuple(absolute(each, info) for each in value)
    return (absolute(value, info),)


def _as_given(files: tuple[Path, ...]) -> str | list[str]:
    return str(files[0]) if len(files) == 1 else [str(file) for file in files]


DataFiles: TypeAlias = Annotated[
    tuple[Path, ...], BeforeValidator(_files), PlainSerializer(_as_given, when_used="json")
]
"""One file, or several in their order; relative ones are taken from the configuration file's folder."""


def _folder_or_url(value: object, info: Any) -> object:
    if value == "":
        raise ValueError("it is empty; name a folder or a URL, or leave it out")
    return value if value is None or "://" in str(value) else str(absolute(value, info))


def _without_password(url: str) -> str:
    if "://" in url and urlsplit(url).password is not None:
        raise ValueError(
            "a password in a URL would stand in config.yaml; take it out, and give it in the environment as its "
            "library reads it (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; for any other FSSPEC_<PROTOCOL>_<OPTION>, as FSSPEC_FTP_PASSWORD)"
        )
    return url


CheckpointUrl: TypeAlias = Annotated[str, BeforeValidator(_folder_or_url), AfterValidator(_without_password)]
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


_STORE_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


def _store_url(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    scheme, _, _ = text.partition("://")
    if scheme not in _STORE_SCHEMES:
        raise ValueError(
            "it is no URL of a store; write redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        )
    if not _is_whole(text, scheme):
        raise ValueError(
            "it cannot be read; user and password must be percent-encoded in it (/ as %2F, ? as %3F, # as %23), and a "
            "port be a number, as in redis://user:password@host:port; a socket has no host: unix:///path"
        )
    return url


def _is_whole(url: str, scheme: str) -> bool:
    """Whether nothing of a password, cut at a character that it should not have, stands in another part of `url`."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        for host in hosts.split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        return False
    are_parameters = all("=" in each for each in parts.query.split("&") if each)
    return are_parameters and not parts.fragment and not (hosts if scheme == "unix" else "@" in parts.path)


StoreUrl: TypeAlias = Annotated[SecretStr, AfterValidator(_store_url)]
"""The URL of a store, with its password; what refuses it quotes nothing of it."""


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
        raise ValueError(f"{value!r} is no range of ports; write first-last between 1024 and 65535, e.g. 28400-29399")
    return value


PortRange: TypeAlias = Annotated[str, AfterValidator(_port_range)]
"""`first-last`, both included."""


def _has_truth(value: object) -> bool:
    """Whether a true or false is in `value`, at any depth."""
    if isinstance(value, dict | list | tuple):
        return any(map(_has_truth, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool)


def _types_in(annotation: Any) -> list[Any]:
    """`annotation` and all that it is made of."""
    return [annotation, *(each for part in get_args(annotation) for each in _types_in(part))]


class Section(BaseModel):
    """Common to all sections: frozen, unknown keys, numbers that are not finite and truth for numbers forbidden."""

    # deferred: a section is built as part of those that hold it, and every process of a run pays for each time
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, tree: Any) -> Any:
        for name, value in tree.items() if isinstance(tree, dict) else ():
            if name not in cls.model_fields or not _has_truth(value):
                continue
            types = _types_in(cls.model_fields[name].annotation)
            are_sections = (isinstance(each, type) and issubclass(each, BaseModel) for each in types)
            takes_truth = bool in types or Any in types or any(are_sections)
            if not takes_truth and (int in types or float in types):
                raise ValueError(f"{name}: true and false are no numbers; write a number")
        return tree


Roots: TypeAlias = Annotated[Literal["system"] | ConfigPath, Field(union_mode="left_to_right")]
"""PEM roots to trust: `system`, or a file."""


def problems_of(error: ValidationError) -> str:
    """Says in one line what is wrong with a tree that is a section of its own, each problem with its key."""
    return "; ".join(
        ": ".join([*map(str, item["loc"]), item["msg"].removeprefix("Value error, ")])
        for item in error.errors(include_url=False)
    )


class AddressSection(Section):
    """The address of a role, and where it listens."""

    address: Address | None = None
    """`host:port` or a gRPC target where clients reach it; absent: local, started by `rolecall train`."""
    bind: Address | None = None
    """`host:port` it listens on; absent: the address."""


class ServiceSection(AddressSection):
    """A role that may use GPUs."""

    devices: tuple[int, ...] = ()
    """GPU indices it may use on its machine, on each of them where its ranks are on several; empty: CPU. Local
    rollouts may share one with the trainers, in shifts, and on other machines those that rollout.sleep_mode says it of;
    no other two local roles may.
    """


FEW_CALLS = 8
"""Calls under way at a time to a scorer of which it is not known how many it answers at once. Where it is one, and it
takes an eighth of a call's deadline, the last is still in time.
"""
MANY_CALLS = 64
"""The same of a server that speaks HTTP, behind which a language model answers many at a time, each slowly."""


class ScorerServer(Section):
    """A server that scores, or that does what scoring needs."""

    address: str
    """Where it is. Of external a gRPC target; of the others an http:// or https:// URL: of a judge the one that ends in
    /v1, of kserve the model's, as in http://host:8080/v2/models/name, or grpc://host:8081/name.
    """
    ca_file: Roots | None = None
    """PEM roots to trust, or `system`; absent: TLS, with the system's, only where there is a bearer token, or https."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token, an API key, read again when it changes; it is never sent without TLS. Where it is
    absent, for judges and HTTP servers, the environment variable ROLECALL_TOKEN_<COMPONENT> of the reward service is.
    """
    hedge_after_s: PositiveFloat | None = None
    """Seconds after which a call that has no answer is made a second time, beside the first: for a scorer whose slowest
    answers are much slower than most, and that can take twice the calls. Absent: never.
    """
    num_calls: PositiveInt | None = None
    """Calls of it under way at a time, each with the component's timeout_s from when it is sent; further ones wait
    here. Absent: 8 of external, 64 of the others. The run has 32 groups scored at a time, so of external, called once
    for a group unless it takes fewer items at once, more than 32 are seldom used; a judge is called for each response.
    """

    @property
    def max_calls(self) -> int:
        """The bound on its calls under way."""
        return self.num_calls or MANY_CALLS

    @property
    def tls(self) -> bool:
        """Whether it is called with TLS."""
        return (
            self.ca_file is not None
            or self.bearer_token_file is not None
            or self.address.startswith(("https://", "grpcs://"))
        )

    @property
    def over_grpc(self) -> bool:
        """Whether it is a URL for gRPC: a model behind the Open Inference Protocol."""
        return self.address.startswith(("grpc://", "grpcs://"))

    @property
    def look_path(self) -> str:
        """The path below its URL at which an HTTP server says that it is there."""
        return ""


FieldValue: TypeAlias = StrictBool | StrictInt | StrictFloat | StrictStr
"""A value of a prompt's field: text, a number, true or false."""
Conditions: TypeAlias = dict[str, FieldValue | Annotated[tuple[FieldValue, ...], Field(min_length=1)]]
"""Fields of the data set, each with the value that it must hold, or with several of which it must hold one."""


def holds(when: Conditions, metadata: Mapping[str, object]) -> bool:
    """Whether a prompt with these fields meets all conditions."""
    for field, wanted in when.items():  # a loop: it is asked for every prompt of every component and environment
        found = metadata.get(field)
        if not (any(_equal(found, each) for each in wanted) if isinstance(wanted, tuple) else _equal(found, wanted)):
            return False
    return True


def may_meet(one: Conditions, other: Conditions) -> bool:
    """Whether a prompt can meet the conditions of both: no field that both name must hold other values for each."""
    return all(
        any(_equal(found, wanted) for found in _values(one[field]) for wanted in _values(other[field]))
        for field in one.keys() & other.keys()
    )


def _values(wanted: FieldValue | tuple[FieldValue, ...]) -> tuple[FieldValue, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _equal(found: object, wanted: FieldValue) -> bool:
    """Whether a field's value is the wanted one. 1 and 1.0 are equal, which a message does not tell apart; true is no
    number.
    """
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted
