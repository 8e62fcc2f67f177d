"""Callers and servers of one run in this process: parties whose tokens stand in no file, unless they are placed in the
directory of a run for its real processes.
"""

import json
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc

from rolecall.rpc.callers import Caller
from rolecall.rpc.identity import Party
from rolecall.rpc.tokens import DIGESTS, FOLDER, HEADER, Tokens
from rolecall.settings import RpcSection, RunSettings, TlsSection

TOKENS = {caller: secrets.token_hex(8) for caller in Caller}
"""The same for every run of this process."""
_DIGESTS = {caller: sha256(token.encode()).hexdigest() for caller, token in TOKENS.items()}


def party(role: Caller = Caller.CONTROLLER, run: str = "test", **rpc: Any) -> Party:
    """What a server or channel of `role` is made with; keywords are fields of the section rpc."""
    return Party(run=run, role=role, tokens=Tokens(TOKENS[role], _DIGESTS), **rpc)


def shown(role: Caller) -> tuple[tuple[str, str]]:
    """Metadata by which a foreign client calls as `role`."""
    return ((HEADER, TOKENS[role]),)


def place(run_dir: Path) -> None:
    """Gives the run in this directory the tokens of this process, before anybody makes others."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for role, token in TOKENS.items():
        (folder / role).write_text(token)
    (folder / DIGESTS).write_text(json.dumps(_DIGESTS))


def playing(settings: RunSettings, role: Caller) -> RunSettings:
    """`settings` for a process of `role`."""
    return settings.model_copy(update={"rpc": of_role(settings.rpc, role, settings.run.name)})


def of_role(rpc: RpcSection, role: Caller, run: str) -> Party:
    """`rpc` for a process of `role`: its certificate, where others lie in folders by role, is in its own."""
    fields = {name: getattr(rpc, name) for name in RpcSection.model_fields}
    if rpc.tls is not None and rpc.tls.key_file.parent.name in set(Caller):
        fields["tls"] = TlsSection(**{name: path.parent.parent / role / path.name for name, path in rpc.tls})
    return party(role, run, **fields)


class Showing(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """The calls of a synchronous channel, made as `role`."""

    def __init__(self, role: Caller) -> None:
        self._metadata = shown(role)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), *self._metadata])
