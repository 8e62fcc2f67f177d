"""Every method of every service, found in the descriptors, called by everybody: whoever it names is served, all others
are refused, in each of the three ways in which a caller says who it is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty

from rolecall.commands.certificates import Authority
from rolecall.errors import PermissionDeniedError, UnauthenticatedError
from rolecall.rpc.callers import Caller, callers_of, services
from rolecall.rpc.identity import FORWARDED, SpiffeIds, forwarded_uris, identify_for
from rolecall.rpc.server import Server
from rolecall.rpc.tokens import HEADER, make_tokens, read_tokens
from rolecall.settings import RpcSection, TlsSection
from tests.twins.callers import TOKENS, party

METHODS = {
    f"/{service.full_name}/{method.name}": method.server_streaming
    for service in services()
    for method in service.methods
}
Metadata = tuple[tuple[str, str], ...]
OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
UNKNOWN, AWAY = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE
DAY = timedelta(days=1)


def id_of(role: str, run: str = "test", instance: str = "") -> str:
    return f"spiffe://rolecall/rolecall/{run}/{role}{instance and '/' + instance}"


@asynccontextmanager
async def everything(rpc: RpcSection) -> AsyncIterator[str]:
    """A server with every method of every service, each of which answers with nothing."""

    async def answer(request: Empty, context: Any) -> bytes:
        return b""

    async def stream(request: Empty, context: Any) -> AsyncIterator[bytes]:
        yield b""

    server = Server(rpc, "localhost:0")
    for service in services():
        handlers: dict[str, Any] = {
            method.name: grpc.unary_stream_rpc_method_handler(stream, Empty.FromString, bytes)
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler(answer, Empty.FromString, bytes)
            for method in service.methods
        }
        handler = grpc.method_handlers_generic_handler(service.full_name, handlers)
        server.add(lambda generic, to: to.add_generic_rpc_handlers((generic,)), handler, service.full_name)
    address = await server.start()
    try:
        yield address
    finally:
        await server.drain(0.0)


async def answers(channel: Any, metadata: Metadata = ()) -> dict[str, tuple[grpc.StatusCode, str]]:
    """What each method answers: the status, and what it says."""

    async def call(method: str, streams: bool) -> tuple[grpc.StatusCode, str]:
        made = (channel.unary_stream if streams else channel.unary_unary)(method)(b"", timeout=20, metadata=metadata)
        with suppress(grpc.aio.AioRpcError):
            if streams:
                async for _ in made:
                    pass
            else:
                await made
        return await made.code(), str(await made.details())

    found = await asyncio.gather(*(call(method, streams) for method, streams in METHODS.items()))
    return dict(zip(METHODS, found, strict=True))


def expected(method: str, role: Caller | None, otherwise: grpc.StatusCode) -> grpc.StatusCode:
    """The status for a caller of this role; without one, `otherwise` where the method has a rule."""
    may = callers_of(method)
    if otherwise is AWAY or may is None:
        return AWAY if otherwise is AWAY else OK
    return otherwise if role is None else OK if role in may else DENIED


def check(found: dict[str, tuple[grpc.StatusCode, str]], role: Caller | None, otherwise: grpc.StatusCode) -> int:
    """Compares one row of the matrix; the number of its cells."""
    for method, (code, said) in found.items():
        assert code is expected(method, role, otherwise), (method, role, said)
        if code is DENIED and role is not None:
            may = ", ".join(sorted(callers_of(method) or ()))
            assert method in said, said
            assert role in said, said
            assert said.endswith(may), said
    return len(found)


async def test_certificates_decide_who_may_call_what(tmp_path: Path) -> None:
    ours, theirs = Authority.made("ours"), Authority.made("theirs")
    callers: dict[str, tuple[Authority, list[str], timedelta, Caller | None, grpc.StatusCode]] = {
        **{role: (ours, [id_of(role)], DAY, role, DENIED) for role in Caller},
        "actor-instance": (ours, [id_of("actor", instance="actor")], DAY, Caller.ACTOR, DENIED),
        "another-run": (ours, [id_of("operator", run="other")], DAY, None, DENIED),
        "another-domain": (ours, [id_of("operator").replace("rolecall/", "elsewhere/", 1)], DAY, None, DENIED),
        "no-such-role": (ours, [id_of("root")], DAY, None, DENIED),
        "two-identities": (ours, [id_of("operator"), id_of("viewer")], DAY, None, UNKNOWN),
        "no-uri": (ours, [], DAY, None, UNKNOWN),
        "another-authority": (theirs, [id_of("operator")], DAY, None, AWAY),
        "expired": (ours, [id_of("operator")], -timedelta(minutes=1), None, AWAY),
    }
    cells = 0
    ours.issue(tmp_path / "server", [id_of("actor")], ["localhost"], DAY)
    async with everything(party(tls=files(tmp_path / "server"))) as address:
        roots = (tmp_path / "server/ca.crt").read_bytes()
        for name, (authority, uris, valid, role, otherwise) in callers.items():
            own = tmp_path / "callers" / name
            authority.issue(own, uris, [id_of("operator")] if name == "no-uri" else ["localhost"], valid)
            pair = (own / "tls.key").read_bytes(), (own / "tls.crt").read_bytes()
            async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots, *pair)) as channel:
                cells += check(await answers(channel), role, otherwise)
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots)) as channel:
            cells += check(await answers(channel), None, AWAY)
        async with grpc.aio.insecure_channel(address) as channel:
            cells += check(await answers(channel, ((HEADER, TOKENS[Caller.OPERATOR]),)), None, AWAY)
    assert cells == len(METHODS) * (len(callers) + 2)


async def test_tokens_decide_who_may_call_what(tmp_path: Path) -> None:
    make_tokens(tmp_path / "earlier")
    earlier = read_tokens(tmp_path / "earlier", Caller.OPERATOR).own
    callers: dict[str, tuple[Metadata, Caller | None]] = {
        **{role: (((HEADER, TOKENS[role]),), role) for role in Caller},
        "missing": ((), None),
        "empty": (((HEADER, ""),), None),
        "wrong": (((HEADER, TOKENS[Caller.OPERATOR][:-1] + "-"),), None),
        "of an earlier run": (((HEADER, earlier),), None),
        "several": (tuple((HEADER, TOKENS[role]) for role in Caller), None),
        "a header of a mesh": (((FORWARDED, f"URI={id_of('operator')}"),), None),
    }
    cells = 0
    async with everything(party()) as address, grpc.aio.insecure_channel(address) as channel:
        for metadata, role in callers.values():
            cells += check(await answers(channel, metadata), role, UNKNOWN)
    assert cells == len(METHODS) * len(callers)


async def test_what_a_sidecar_forwards_decides_who_may_call_what() -> None:
    def forwarded(*elements: str) -> Metadata:
        return ((FORWARDED, ",".join(elements)),)

    def seen(identity: str) -> str:
        return f'By={id_of("actor")};Hash=00ff;Subject="CN=a,O=\\"b\\"";URI={identity}'

    operator = seen(id_of("operator"))
    callers: dict[str, tuple[Metadata, Caller | None, grpc.StatusCode]] = {
        **{role: (forwarded(seen(id_of(role))), role, DENIED) for role in Caller},
        "behind another proxy": (forwarded(operator, seen(id_of("viewer"))), Caller.VIEWER, DENIED),
        "another run": (forwarded(seen(id_of("operator", run="other"))), None, DENIED),
        "none": ((), None, UNKNOWN),
        "no identity": (forwarded(operator, "Hash=00ff"), None, UNKNOWN),
        "an element that reaches into the next": (
            forwarded(f'URI={id_of("operator")};Subject="', seen(id_of("viewer"))),
            None,
            UNKNOWN,
        ),
        "a token": (((HEADER, TOKENS[Caller.OPERATOR]),), None, UNKNOWN),
    }
    cells = 0
    rpc = party(behind_mesh=True, forwarded_identity=True)
    async with everything(rpc) as address, grpc.aio.insecure_channel(address) as channel:
        for metadata, role, otherwise in callers.values():
            cells += check(await answers(channel, metadata), role, otherwise)
    assert cells == len(METHODS) * len(callers)


@pytest.mark.parametrize(
    ("header", "uris"),
    [
        ("URI=a", ["a"]),
        ('URI="a;b,c";Hash=1', ["a;b,c"]),
        ("URI=a,URI=b", ["b"]),
        ("URI=a, By=c;URI=b", ["b"]),
        ("URI=a;URI=b", ["a", "b"]),
        ("URI=a,", []),
        ('URI=a;Subject="x', []),
        ("URI=a,nonsense", []),
        ("", []),
    ],
)
def test_a_forwarded_header_says_what_the_nearest_proxy_saw(header: str, uris: list[str]) -> None:
    assert forwarded_uris(header) == uris


@pytest.mark.parametrize(
    ("template", "run", "spiffe_id", "known"),
    [
        ("spiffe://cluster.local/ns/rl/sa/{run}-{role}", "a", "spiffe://cluster.local/ns/rl/sa/a-rollout", "rollout"),
        ("spiffe://cluster.local/ns/rl/sa/{run}-{role}", "a", "spiffe://cluster.local/ns/rl/sa/a-b-rollout", None),
        ("spiffe://cluster.local/ns/rl/sa/{run}-{role}", "a", "spiffe://cluster.local/ns/rl/sa/a-rollouts", None),
        ("spiffe://x/{run}/{role}/{instance}", "a.b", "spiffe://x/a.b/reference/ref/0", "reference"),
        ("spiffe://x/{run}/{role}/{instance}", "a.b", "spiffe://x/aab/reference", None),
        ("spiffe://x/{run}/{role}/{instance}", "a", "spiffe://x/a/actor/", None),
    ],
)
def test_the_template_says_which_identities_are_of_the_run(
    template: str, run: str, spiffe_id: str, known: str | None
) -> None:
    ids = SpiffeIds(template, run)
    if known is None:
        with pytest.raises(PermissionDeniedError, match="is nobody of this run"):
            ids.identity(spiffe_id)
    else:
        assert ids.identity(spiffe_id).role == known


async def test_a_forwarded_header_from_another_machine_is_not_believed() -> None:
    class From:
        def __init__(self, peer: str) -> None:
            self._peer = peer

        def peer(self) -> str:
            return self._peer

        def invocation_metadata(self) -> Metadata:
            return ((FORWARDED, f"URI={id_of('controller')}"),)

        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

    identify = identify_for(party(behind_mesh=True, forwarded_identity=True))
    for near in ("ipv4:127.0.0.1:5", "ipv4:127.0.0.6:5", "ipv6:%5B::1%5D:5", "unix:", "unix:/run/x"):
        assert identify(From(near)).role is Caller.CONTROLLER
    for far in ("ipv4:10.0.0.1:5", "ipv6:%5Bfe80::1%5D:5"):
        with pytest.raises(UnauthenticatedError, match="of a sidecar on this machine alone"):
            identify(From(far))


def files(folder: Path) -> TlsSection:
    return TlsSection(certificate_file=folder / "tls.crt", key_file=folder / "tls.key", ca_file=folder / "ca.crt")
