"""The identity of a caller, and whether it may call: the SPIFFE ID of its certificate, of the certificate that a
sidecar says it saw, or the token of its role.

Here is as well who this process is to others (`Party`). Which of the three it goes by follows from its settings alone,
so that no caller chooses. A public contract has a bearer token instead (`Admission`). What each may call stands in the
protos (`rolecall/rpc/callers.py`).
"""

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from rolecall.address import is_loopback
from rolecall.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from rolecall.rpc.callers import Caller, callers_of
from rolecall.rpc.tokens import FOLDER, HEADER, Tokens, make_tokens, read_tokens
from rolecall.settings import RpcSection, RunSettings, TlsSection

FORWARDED = "x-forwarded-client-cert"
_MAX_NAME = 200
_FIELD = re.compile(r'\s*(?P<key>\w+)=(?:"(?P<quoted>(?:\\.|[^"\\])*)"|(?P<plain>[^";,]*))(?P<end>[;,]|\Z)')
"""A field of a forwarded header, with what ends it: `;` the field, `,` the element of one proxy."""


class Party(RpcSection):
    """The section `settings.rpc` once a process knows who it is. Nothing of it is ever written to a file."""

    run: str
    role: Caller
    tokens: Tokens | None = None
    """Absent: certificates say who calls, or a person's command runs where the run's tokens are not."""

    def token_for(self, *, loopback: bool) -> str | None:
        """The token to show, never in the clear beyond this machine."""
        return self.tokens.own if self.tokens is not None and (loopback or self.behind_mesh) else None


def acting_as(settings: RunSettings, role: Caller, *, make: bool = True) -> RunSettings:
    """`settings` for a process of this role: with its own certificate where the paths say {role}, or its token.

    make: makes the run's tokens where there are none; a command that only asks takes none then. ConfigError when they
    cannot be read or made.
    """
    rpc = settings.rpc
    known = None
    if rpc.tls is None and not rpc.forwarded_identity:
        if make:
            make_tokens(settings.run.dir)
        if make or (settings.run.dir / FOLDER).is_dir():
            known = read_tokens(settings.run.dir, role)
    fields = {name: getattr(rpc, name) for name in RpcSection.model_fields}
    fields["tls"] = rpc.tls and _own(rpc.tls, role)
    return settings.model_copy(update={"rpc": Party(**fields, run=settings.run.name, role=role, tokens=known)})


def require_party(rpc: RpcSection, what: str) -> None:
    """ConfigError when `rpc` is of a process that does not know who it is: `what` could not know its callers."""
    if not isinstance(rpc, Party):
        raise ConfigError(f"{what} is not served to just anybody; start it as a role of a run (acting_as)")


def _own(tls: TlsSection, role: Caller) -> TlsSection:
    return TlsSection(**{name: str(path).replace("{role}", role) for name, path in tls})


@dataclass(frozen=True)
class Identity:
    """A caller that is known."""

    role: Caller
    instance: str
    """Name of the worker; empty: any of its role."""
    said: str
    """How it showed who it is, for people."""


class Context(Protocol):
    """The part of gRPC's context of a call that is asked."""

    def invocation_metadata(self) -> Any: ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...

    def peer(self) -> str: ...


_CALLER: ContextVar[Identity | None] = ContextVar("rolecall_caller", default=None)

Identify = Callable[[Context], Identity]
"""Says who calls. UnauthenticatedError: nobody in particular. PermissionDeniedError: nobody of this run."""


def identify_for(party: Party) -> Identify:
    """The way in which this process knows its callers."""
    ids = SpiffeIds(party.spiffe_id, party.run)
    if party.tls is not None:
        return lambda context: _by_certificate(context, ids)
    if party.forwarded_identity:
        return lambda context: _by_sidecar(context, ids)
    return lambda context: _by_token(context, party)


def admit(method: str, identify: Identify | None, context: Context) -> None:
    """Notes who calls, for the rest of this task. PermissionDeniedError when the method is not for this caller.

    identify: None at a server of public services alone.
    """
    may = callers_of(method)
    if may is None or identify is None:
        return
    caller = identify(context)
    if caller.role not in may:
        raise PermissionDeniedError(
            f"{method} is not for {caller.said}; it may be called by: {', '.join(sorted(may)) or 'nobody'}",
            method=method,
            caller=caller.role,
        )
    _CALLER.set(caller)


def require_worker(role: str, worker: str) -> None:
    """PermissionDeniedError unless the caller of the RPC being served has this role, and this name where its identity
    says one. Nothing is asked where no server of ours is between, as in a test of the servicer alone.
    """
    caller = _CALLER.get()
    if caller is not None and (caller.role != role or caller.instance not in ("", worker)):
        raise PermissionDeniedError(
            f"{caller.said} may not speak for {worker} ({role}); give each worker a certificate or a token of its own",
            caller=caller.role,
            worker=worker,
        )


class SpiffeIds:
    """The SPIFFE IDs of one run."""

    def __init__(self, template: str, run: str) -> None:
        """template: rpc.spiffe_id."""
        self.shape = template.replace("{run}", run).replace("{role}", "<role>").replace("{instance}", "<instance>")
        """What they look like, for people."""
        roles = f"(?P<role>{'|'.join(Caller)})"
        parts = {"{run}": re.escape(run), "{role}": roles, "{instance}": "(?P<instance>.+)"}
        any_of_role = template.endswith("/{instance}")
        body = template.removesuffix("/{instance}") if any_of_role else template
        pattern = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\{\w+\})", body))
        self._pattern = re.compile(pattern + ("(?:/(?P<instance>.+))?" if any_of_role else ""))

    def identity(self, spiffe_id: str) -> Identity:
        """Returns whose it is. PermissionDeniedError when it is nobody's of the run."""
        known, said = self._pattern.fullmatch(spiffe_id), spiffe_id[:_MAX_NAME]
        if known is None:
            raise PermissionDeniedError(
                f"{said} is nobody of this run, whose callers are {self.shape} (rpc.spiffe_id)", caller=said
            )
        groups = known.groupdict()
        return Identity(Caller(groups["role"]), groups.get("instance") or "", said)


def _by_certificate(context: Context, known: SpiffeIds) -> Identity:
    # gRPC takes it from the URIs alone, where there is exactly one: a DNS name that looks like it is none
    ids = [value.decode(errors="replace") for value in context.auth_context().get("peer_spiffe_id", ())]
    if len(ids) != 1:
        raise UnauthenticatedError(
            "the client certificate says no identity; give it exactly one URI among its subject alternative names, "
            f"as rpc.spiffe_id says ({known.shape}): `rolecall certificates` makes such ones"
        )
    return known.identity(ids[0])


def _by_sidecar(context: Context, known: SpiffeIds) -> Identity:
    kind, _, where = unquote(context.peer()).partition(":")
    if kind != "unix" and not is_loopback(where):
        raise UnauthenticatedError(
            f"{FORWARDED} is believed of a sidecar on this machine alone, and the call came from {where}; let the "
            "mesh's sidecar take every connection to this port"
        )
    headers = _metadata(context, FORWARDED)
    ids = forwarded_uris(headers[-1]) if headers else []
    if len(ids) != 1:
        raise UnauthenticatedError(
            f"the sidecar says no identity of the caller ({FORWARDED} without one URI); let the mesh demand mutual TLS "
            "(Istio: PeerAuthentication STRICT), or unset rpc.forwarded_identity"
        )
    return known.identity(ids[0])


def _by_token(context: Context, party: Party) -> Identity:
    given = _metadata(context, HEADER)
    if not given:
        raise UnauthenticatedError(
            "the call carries no token; call from a process of this run, or name the run's directory, where the user "
            "who started it can read one (rolecall status RUN_DIR)"
        )
    caller = None if len(given) > 1 or party.tokens is None else party.tokens.caller(given[0])
    if caller is None:
        raise UnauthenticatedError(
            "the token is not one of this run; start the process again, so that it reads the token that stands in "
            "run.dir now, and give every process of the run the same run.dir"
        )
    return Identity(caller, "", f"the {caller}'s token")


def forwarded_uris(header: str) -> list[str]:
    """The URIs of the certificate that the nearest proxy saw: of the last element. None of a header that is not whole:
    what a caller wrote into an earlier element must not reach into the last.
    """
    uris: list[str] = []
    at = 0
    while at < len(header):
        field = _FIELD.match(header, at)
        if field is None:
            return []
        if field["key"].lower() == "uri":
            uris.append(field["plain"] if field["quoted"] is None else field["quoted"])
        at = field.end()
        if field["end"] == ",":
            uris = []
    return uris


def _metadata(context: Context, key: str) -> list[str]:
    return [str(value) for name, value in context.invocation_metadata() or () if name == key]


class Admission:
    """The check of a bearer token; without a token everybody may call."""

    def __init__(self, bearer_token: str | None, what: str) -> None:
        """`what` is served, for the refusal."""
        self._authorization = f"Bearer {bearer_token}".encode() if bearer_token else None
        self._what = what

    def check(self, context: Any) -> None:
        """UnauthenticatedError without the token."""
        if self._authorization is None:
            return
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(given) != 1 or not hmac.compare_digest(str(given[0]).encode(), self._authorization):
            raise UnauthenticatedError(
                f"{self._what} needs its bearer token; set bearer_token_file to a file that holds it"
            )
