"""The HTTP server that agents call, in any of DIALECTS. Decode, one call of the attempt, encode.

Owns who may call: a key names one episode, and is good from `open` to `seal`. It comes in a header or in the path,
and into no log. An answer that streams is sampled whole
and then told in the dialect's own events, with comments meanwhile that keep the connection. Bounds: MAX_BODY_BYTES a
request, which comes within BODY_S; MAX_CONNECTIONS, each of which asks something within IDLE_S; calls wait for the
engine, within the episode's deadline; answers are kept while their episode is open.
"""

import asyncio
import hashlib
import json
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rolecall.errors import ConfigError, RoleCallError
from rolecall.rpc.listening import advertised, require_tls, why_not
from rolecall.rpc.tls import HttpsCertificate
from rolecall.settings import RpcSection
from services.rollout.harness import chat, messages, responses
from services.rollout.harness.attempt import Attempt
from services.rollout.harness.calls import ChatCall, Dialect, Event, RefusedError, Reply
from services.rollout.harness.retries import Exchange, Exchanges

T = TypeVar("T")

logger = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}
"""What is spoken, by path."""
KEYED = "/episodes/{key}"
"""What stands before a path that holds the key itself, for clients that can set none."""
MAX_BODY_BYTES = 16 * 2**20
"""Largest request."""
LARGE_BYTES = 2**20
"""Bodies above this are read in a thread: of 13 MiB, JSON, base64 and digests take 0.1 s and more."""
BODY_S = 60.0
"""Seconds that the body of a request may take to come."""
IDLE_S = 75.0
"""Seconds after which a connection is closed on which no whole head of a request has come, the first or the next one.
Clients close theirs earlier, most after 5 to 30 s.
"""
LINGER_S = 10.0
"""Seconds for which the rest of a body is read of a request that was refused before, so that its client hears why."""
MAX_CONNECTIONS = 16_384
"""Most connections, those in a TLS handshake included (asyncio gives that 60 s), and about three quarters of the
descriptors that the process may have; others are turned away. They are counted when they are accepted, up to a hundred
at a time.
"""
KEEP_ALIVE_S = 5.0
"""Seconds after which a stream that has nothing to say yet begins all the same, and between its comments then."""
SHUTDOWN_S = 1.0
"""Seconds that answers under way get when the endpoint closes."""
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


@dataclass(eq=False)
class _Open:
    """An episode whose key is good."""

    attempt: Attempt
    exchanges: Exchanges[Reply] = field(default_factory=Exchanges)
    answered: dict[int, tuple[ChatCall, Reply]] = field(default_factory=dict)
    failed: "asyncio.Future[RoleCallError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    working: "set[asyncio.Task[Any]]" = field(default_factory=set)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is read, so that one behind a large one does not overtake it."""

    def begun(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """The task of what a request asks for, which ends with the episode."""
        task = asyncio.create_task(work)
        self.working.add(task)
        task.add_done_callback(self.working.discard)
        return task


class Endpoint:
    """An endpoint, which listens from the first `start` to `close`. Used from one event loop."""

    def __init__(self, bind: str, rpc: RpcSection, *, host: str | None) -> None:
        """`host`: what others reach it by; None: found out from the way to each. ConfigError for a `bind` that others
        could listen in on, or a certificate that cannot be used.
        """
        require_tls(bind, rpc, "rollout.endpoint_bind")
        self._bind, self._host = bind, host
        self._certificate = None if rpc.tls is None else HttpsCertificate(rpc.tls)
        self._open: dict[str, _Open] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._told: set[str] = set()
        self._bound = ""
        """Host and port on which it listens, once it does."""

    async def start(self) -> None:
        """Listens, unless it does already. ConfigError when it cannot."""
        async with self._starting:  # bounded: binding a socket waits for nobody
            if self._bound:
                return
            app = web.Application()
            for prefix in ("", KEYED):
                for path, dialect in DIALECTS.items():
                    app.router.add_post(prefix + path, self._answers(dialect))
                app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
                app.router.add_get(f"{prefix}/v1/models", self._models)
            runner = self._runner = web.AppRunner(
                app,
                access_log=None,
                logger=_malformed,
                shutdown_timeout=SHUTDOWN_S,
                keepalive_timeout=IDLE_S,
                lingering_time=LINGER_S,
            )
            await runner.setup()  # bounded: reads its own routes
            host, _, port = self._bind.rpartition(":")
            context = None if self._certificate is None else self._certificate.context
            try:
                self._listener = await asyncio.get_running_loop().create_server(  # bounded: binding waits for nobody
                    _bounded(runner), host.strip("[]"), int(port), ssl=context
                )
            except OSError as error:
                raise ConfigError(f"rollout.endpoint_bind {self._bind} {why_not(self._bind) or error}") from error
            self._bound = f"{host}:{self._listener.sockets[0].getsockname()[1]}"

    def base_url(self, peer: str) -> str:
        """Returns the URL for clients on the machine of the address `peer`; `start` first."""
        reached = advertised(self._bound, self._host, peer)
        return f"{'http' if self._certificate is None else 'https'}://{reached}/v1"

    async def close(self) -> None:
        """Ends every episode's calls, and listens no more."""
        for key in list(self._open):
            self.seal(key)
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()  # bounded: by SHUTDOWN_S that it was made with

    def open(self, attempt: Attempt) -> "tuple[str, asyncio.Future[RoleCallError]]":
        """Makes a key for the calls of an episode; also returns what tells when the policy itself fails in one."""
        if self._certificate is not None:
            self._certificate.renew()
        key = secrets.token_urlsafe(32)
        self._open[key] = opened = _Open(attempt)
        return key, opened.failed

    def seal(self, key: str) -> None:
        """Refuses whatever comes with the key from now on, and gives up what is under way. Idempotent."""
        sealed = self._open.pop(key, None)
        for task in sealed.working if sealed is not None else ():
            task.cancel()

    # --- requests -----------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._opened(request)
        except RefusedError as error:
            return _refused(chat, error)
        return web.json_response(chat.models())

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Anthropic's question how long a prompt would be, which takes no call."""
        try:
            opened, body = await self._asked(request)
            call, _ = await _read(messages, request, body, opened)
            self._opened(request)
            counting = opened.begun(opened.attempt.num_prompt_tokens(call))
            return web.json_response({"input_tokens": await _worked(counting)})
        except RefusedError as error:
            return _refused(messages, error)

    def _answers(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler of the calls of one dialect."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                opened, body = await self._asked(request)
                async with opened.reading:  # bounded: by MAX_CONNECTIONS, for each of which it is held a moment
                    call, digest = await _read(dialect, request, body, opened)
                    del body
                    exchange = self._exchange(self._opened(request), request, digest, call)
                self._tell(call.unheeded)
                told = (_Stream if call.streams else _Whole)(request, dialect, call)
                return await told.answer(opened, exchange)
            except RefusedError as error:
                return _refused(dialect, error)

        return answer

    async def _asked(self, request: web.Request) -> tuple[_Open, bytes]:
        """The episode of a request and its body. RefusedError, also when the episode is over by the time it is read."""
        self._opened(request)
        body = await _body(request)
        return self._opened(request), body

    def _opened(self, request: web.Request) -> _Open:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        opened = self._open.get(request.match_info.get("key", key.strip()))
        if opened is None:
            raise RefusedError(401, "invalid_api_key", "the key is of no episode that is under way")
        return opened

    def _exchange(self, opened: _Open, request: web.Request, digest: bytes, call: ChatCall) -> Exchange[Reply]:
        """The exchange of a call that this request makes, or makes again."""
        key = request.headers.get("Idempotency-Key", "")
        count = request.headers.get("x-stainless-retry-count", "")
        retry_count = int(count) if count.isdecimal() and len(count) < 10 else 0
        transport = request.transport

        def is_waited_for() -> bool:  # of the transport alone: it lasts as long as the episode
            return transport is not None and not transport.is_closing()

        earlier = opened.exchanges.earlier(digest, key, retry_count)
        if earlier is not None:
            earlier.is_waited_for = is_waited_for
            return earlier
        work = opened.begun(self._answer(opened, call))
        return opened.exchanges.add(digest, key, retry_count, work, is_waited_for)

    async def _answer(self, opened: _Open, call: ChatCall) -> Reply:
        """Samples the answer, whoever still waits for it. What fails in the engine fails the whole episode."""
        try:
            reply = await opened.attempt.answer(call)
        except RoleCallError as error:
            if not opened.failed.done():
                opened.failed.set_result(error)
            raise RefusedError(503, "unavailable", error.message) from error
        opened.answered[reply.number] = replace(call, files={}), reply  # the attempt has those that are shown, once
        return reply

    def _tell(self, unheeded: tuple[str, ...]) -> None:
        """Says once of each field that it is left unheeded."""
        for name in sorted(set(unheeded) - self._told):
            self._told.add(name)
            logger.warning("an agent asks for %s, which is left unheeded: the run's own sampling settings decide", name)


def _bounded(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """The protocols of connections, as many as there may be: what the process opens besides keeps its descriptors."""
    server, (descriptors, _) = runner.server, resource.getrlimit(resource.RLIMIT_NOFILE)
    assert server is not None
    most = MAX_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, descriptors * 3 // 4)
    accepting: set[asyncio.Task[Any]] = set()
    told = False

    def protocol() -> asyncio.Protocol:
        nonlocal told
        task = asyncio.current_task()  # asyncio accepts each connection in one, which ends with the TLS handshake
        assert task is not None
        if len(accepting) + len(server.connections) < most:
            accepting.add(task)
            task.add_done_callback(accepting.discard)
            return server()
        if not told:
            logger.warning("agents have more than %d connections open: others are closed at once", most)
        told = True
        task.cancel()  # which closes the connection
        return asyncio.Protocol()

    return protocol


def _unquoted(record: logging.LogRecord) -> bool:
    """Leaves out of aiohttp's record of a malformed request what it quotes of that, which may be a key."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
        record.msg = "refused a malformed request from %s"
    return True


_malformed = logger.getChild("http")
_malformed.addFilter(_unquoted)


class _Whole:
    """An answer in one piece."""

    def __init__(self, request: web.Request, dialect: Dialect, call: ChatCall) -> None:
        self._request, self._dialect, self._call = request, dialect, call

    async def answer(self, opened: _Open, exchange: Exchange[Reply]) -> web.StreamResponse:
        reply = await _worked(exchange.work)
        response = web.json_response(self._dialect.whole(self._call, reply))
        try:
            await response.prepare(self._request)
            await response.write_eof()  # bounded: by its client's patience, or its connection's end
        except ConnectionResetError:
            return response
        _deliver(opened, exchange, reply)
        return response


class _Stream:
    """An answer told in events, as a client that streams expects it."""

    def __init__(self, request: web.Request, dialect: Dialect, call: ChatCall) -> None:
        self._request, self._dialect, self._call = request, dialect, call

    async def answer(self, opened: _Open, exchange: Exchange[Reply]) -> web.StreamResponse:
        if (await asyncio.wait({exchange.work}, timeout=KEEP_ALIVE_S))[0]:
            await _worked(exchange.work)  # what is refused has a status of its own while no head is sent
        response = web.StreamResponse(headers=_EVENT_STREAM)
        try:
            await response.prepare(self._request)
            while not (await asyncio.wait({exchange.work}, timeout=KEEP_ALIVE_S))[0]:
                await response.write(b": it is being sampled\n\n")
            try:
                reply = await _worked(exchange.work)
            except RefusedError as error:
                await response.write(_event(self._dialect.failure(error)))
                return response
            for event in self._dialect.events(self._call, reply):
                await response.write(_event(event))
            await response.write_eof()  # bounded: by its client's patience, or its connection's end
        except ConnectionResetError:
            return response
        _deliver(opened, exchange, reply)
        return response


async def _worked(work: "asyncio.Task[T]") -> T:
    """The answer, which is made whether or not anybody waits. RefusedError where there is none."""
    try:
        return await asyncio.shield(work)  # bounded: by the episode's deadline
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        raise RefusedError(401, "invalid_api_key", "the episode is over") from None


def _deliver(opened: _Open, exchange: Exchange[Reply], reply: Reply) -> None:
    exchange.is_delivered = True
    opened.attempt.seen(reply.number)


async def _body(request: web.Request) -> bytes:
    """The body, which `request` does not keep, as it would that of its `read`: a connection has its last request."""
    chunks, num_bytes = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():  # bounded: by BODY_S around it
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    raise RefusedError(413, "request_too_large", f"a request may have {MAX_BODY_BYTES:,} bytes")
    except TimeoutError as error:
        words = f"the body of the request did not come within {BODY_S:g} s"
        raise RefusedError(408, "request_timeout", words) from error
    except ConnectionError as error:  # nobody hears it: as where the environment of the agent was killed
        raise RefusedError(400, "invalid_request_error", "the connection broke within the request") from error
    return b"".join(chunks)


async def _read(dialect: Dialect, request: web.Request, body: bytes, opened: _Open) -> tuple[ChatCall, bytes]:
    """The call in a body, and a digest of its path and that. RefusedError says what cannot be answered."""
    path = request.path.encode()

    def read() -> tuple[ChatCall, bytes]:
        digest = hashlib.sha256(path + b"\n")
        digest.update(body)
        return dialect.read(body, opened.answered), digest.digest()

    return read() if len(body) <= LARGE_BYTES else await asyncio.to_thread(read)


def _refused(dialect: Dialect, error: RefusedError) -> web.Response:
    return web.json_response(dialect.refusal(error), status=error.status)


def _event(event: Event) -> bytes:
    name, data = event
    told = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {told}\n\n".encode()
