"""The driver's links: byte pumps between the roles that can be watched, slowed and cut, and the traps of phases.

A `Link` listens where clients call and forwards to where the role really listens. A `StoreSpy` on a link to the store
reads which script goes by and what it answers, so that a fault can hit exactly before or after it, and an answer can be
lost. A `PhaseServer` hears the roles' own phases (wiring.Hook). Nothing here decides: `Traps` holds what the driver
armed.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from rolecall.store import scripts

CHUNK_BYTES = 65536
HELD_S = 0.15
"""Seconds that a chunk is held up on a slow wire."""
_DIGEST = re.compile(rb"EVALSHA\r\n\$40\r\n([0-9a-f]{40})\r\n")
_BIG_REQUEST, _BIG_REPLY = 150, 60
"""Bytes above which a chunk on a gRPC connection is a call or an answer rather than the protocol's own chatter."""


@dataclass
class Traps:
    """What happens at the next visit of a worker to a phase."""

    on_visit: Callable[[str, int, str], None]
    """Told (worker, pid or 0, phase) of every visit."""
    armed: dict[tuple[str, str], Callable[[], bool]] = field(default_factory=dict)
    """By (worker, phase). What is armed runs once and says whether the answer at hand is to be lost."""

    def visit(self, worker: str, phase: str, pid: int = 0) -> bool:
        """Springs the trap, if one is there."""
        self.on_visit(worker, pid, phase)
        spring = self.armed.pop((worker, phase), None)
        return spring() if spring is not None else False


@dataclass(eq=False)
class _Pair:
    """One connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    script: str = ""
    """Whose answer is awaited."""

    def close(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class Spy:
    """Sees what a link carries; this one looks away."""

    def request(self, pair: _Pair, data: bytes) -> None:
        """Before it goes on."""

    def reply(self, pair: _Pair, data: bytes) -> bool:
        """Before it goes on; whether it is lost."""
        return False


class Link:
    """One listening socket. Bound: a chunk per direction and connection is under way."""

    def __init__(self, listen: str, target: Path, spy: Spy) -> None:
        """`listen`: `host:port` or a path."""
        self._listen = listen
        self._target = target
        self._spy = spy
        self._pairs: set[_Pair] = set()
        self._refuse_until = self._slow_until = 0.0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        if self._listen.startswith("/"):
            self._server = await asyncio.start_unix_server(self._serve, self._listen)
        else:
            host, _, port = self._listen.rpartition(":")
            self._server = await asyncio.start_server(self._serve, host, int(port))

    def cut(self, refuse_s: float) -> None:
        """Breaks every connection and takes none for `refuse_s`."""
        self._refuse_until = time.monotonic() + refuse_s
        for pair in list(self._pairs):
            pair.close()

    def slow(self, seconds: float) -> None:
        """Holds up every chunk for HELD_S, for so many seconds."""
        self._slow_until = time.monotonic() + seconds

    async def _held_up(self) -> None:
        if time.monotonic() < self._slow_until:
            await asyncio.sleep(HELD_S)

    async def close(self) -> None:
        """Breaks every connection and listens no more."""
        if self._server is not None:
            self._server.close()
        self.cut(1e9)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if time.monotonic() >= self._refuse_until:
                with contextlib.suppress(OSError):
                    await self._carry(reader, writer)
        finally:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._target))
        pair = _Pair(writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._forth(reader, pair), self._back(far_reader, pair))
        finally:
            pair.close()
            self._pairs.discard(pair)

    async def _forth(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                self._spy.request(pair, data)
                await self._held_up()
                pair.server.write(data)
                await pair.server.drain()
        pair.close()

    async def _back(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self._spy.reply(pair, data):
                    break
                await self._held_up()
                pair.client.write(data)
                await pair.client.drain()
        pair.close()


class StoreSpy(Spy):
    """Phases `before <script>` and `after <script>` of a worker; `on_done(worker, script)` once one has succeeded."""

    def __init__(self, worker: str, traps: Traps, on_done: Callable[[str, str], None]) -> None:
        self._worker = worker
        self._traps = traps
        self._on_done = on_done

    def request(self, pair: _Pair, data: bytes) -> None:
        found = _DIGEST.search(data)
        if found is not None and (name := _scripts().get(found[1], "")):
            pair.script = name
            self._traps.visit(self._worker, f"before {name}")

    def reply(self, pair: _Pair, data: bytes) -> bool:
        if not pair.script:
            return False
        name, pair.script = pair.script, ""
        if b"$2\r\nOK\r\n" in data[:32] or b"$4\r\nDONE\r\n" in data[:32]:
            self._on_done(self._worker, name)
        return self._traps.visit(self._worker, f"after {name}")


class CallSpy(Spy):
    """Phases `call` and `answer` of a worker that takes gRPC calls."""

    def __init__(self, worker: str, traps: Traps) -> None:
        self._worker = worker
        self._traps = traps

    def request(self, pair: _Pair, data: bytes) -> None:
        if len(data) > _BIG_REQUEST:
            self._traps.visit(self._worker, "call")

    def reply(self, pair: _Pair, data: bytes) -> bool:
        return len(data) > _BIG_REPLY and self._traps.visit(self._worker, "answer")


class PhaseServer:
    """Hears phases and nods."""

    def __init__(self, path: Path, traps: Traps) -> None:
        self._path = path
        self._traps = traps
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))

    async def close(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while line := await reader.readline():
                    worker, pid, phase = line.decode().rstrip().split(" ", 2)
                    self._traps.visit(worker, phase, int(pid))
                    writer.write(b".")
                    await writer.drain()
        finally:  # the driver's end cancels this, where a role was killed a moment before
            writer.transport.abort()


@cache
def _scripts() -> dict[bytes, str]:
    names = [
        path.name.removesuffix(".lua")
        for path in (files("rolecall.store") / "scripts").iterdir()
        if path.name != "common.lua"
    ]
    return {
        hashlib.sha1(scripts.source(name).encode(), usedforsecurity=False).hexdigest().encode(): name for name in names
    }
