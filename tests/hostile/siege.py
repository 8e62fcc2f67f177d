"""Bad bodies sent to every method of every service, and what must hold all the while: each call ends, with an error of
ours or of gRPC and never with an unforeseen one; the servers go on; memory stays bounded.
"""

import asyncio
import logging
import random
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from rolecall.rpc.callers import Caller, callers_of
from rolecall.rpc.options import LIVENESS
from rolecall.rpc.status import DOMAIN
from tests.hostile.bodies import UNREADABLE, Bodies, Body, has_parts
from tests.hostile.servers import Served, Target
from tests.twins.callers import shown

NUM_CALLERS = 32
"""Calls under way at a time."""
DEADLINE_S = 2.0
"""Of a call that may wait by its contract; nothing that cannot be read is let wait so long."""
HANG_S = 60.0
"""Longest time from a call's deadline to its end on this side, on a busy machine."""
SLOW_READERS = 40
"""Streams that are opened and not read, all at once."""
_OF_GRPC = {
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that gRPC answers by itself."""


@dataclass
class Findings:
    """What came of it."""

    num_sent: int = 0
    codes: "Counter[str]" = field(default_factory=Counter)
    kinds: "Counter[str]" = field(default_factory=Counter)
    waited: "Counter[str]" = field(default_factory=Counter)
    """Calls that lasted to their deadline, by method."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rss_before: int = 0
    rss_bodies: int = 0
    """After the many small ones; what few large ones take, the allocator keeps for a while."""
    rss_peak: int = 0

    def table(self) -> str:
        """For people."""
        mib = 2**20
        return "\n".join(
            [
                f"{self.num_sent} bodies in {self.seconds:.0f} s: {dict(self.kinds.most_common())}",
                f"answers: {dict(self.codes.most_common())}",
                f"lasted to their deadline of {DEADLINE_S:g} s: {dict(self.waited.most_common())}",
                f"memory, MiB: {self.rss_before / mib:.0f} before, {self.rss_bodies / mib:.0f} after the small bodies, "
                f"{self.rss_peak / mib:.0f} at most",
                f"problems: {len(self.problems)}",
                *sorted(set(self.problems))[:20],
            ]
        )


class Siege:
    """One siege of `served`, by a seed."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._random = random.Random(seed)
        self._bodies = Bodies(seed, served.hints)
        self.found = Findings()

    async def run(self, num_bodies: int, num_large: int, num_bombs: int) -> Findings:
        """Sends `num_bodies`, in turn to every method, and to `num_large` methods, of each service in turn, one too
        large and one with too much metadata; also `num_bombs` of too many parts, streams that nobody reads, and bytes
        that are not gRPC's protocol.
        """
        found, started = self.found, time.monotonic()
        found.rss_before = _rss()
        with _unforeseen(found):
            async with self._channels() as channels:
                await self._slow_readers(channels)
                targets = [self._served.targets[i % len(self._served.targets)] for i in range(num_bodies)]
                queue = iter(targets)
                await asyncio.gather(*(self._caller(queue, channels) for _ in range(NUM_CALLERS)))
                found.rss_bodies = _rss()
                by_path = {target.path: target for target in self._served.targets}
                methods = sorted(by_path.values(), key=lambda target: target.method.index)
                for target in methods[:num_large]:
                    await self._send(target, channels, "too large")
                    await self._send(target, channels, flood=True)
                for target in [target for target in methods if has_parts(target.method)][:num_bombs]:
                    await self._send(target, channels, "bomb")
            for address in {target.address for target in self._served.targets}:
                await self._noise(address)
                await self._alive(address)
        found.seconds = time.monotonic() - started
        found.rss_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return found

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
        addresses = {target.address for target in self._served.targets}
        channels = {address: grpc.aio.insecure_channel(address) for address in addresses}
        try:
            yield channels
        finally:
            for channel in channels.values():
                await channel.close()

    async def _caller(self, queue: Iterator[Target], channels: dict[str, grpc.aio.Channel]) -> None:
        for target in queue:
            await self._send(target, channels)

    async def _send(
        self, target: Target, channels: dict[str, grpc.aio.Channel], kind: str | None = None, flood: bool = False
    ) -> None:
        body, found = self._bodies.of(target.method, kind), self.found
        metadata = [*self._identity(target), *((f"x-{i}", "y" * 200) for i in range(200 * flood))]
        found.num_sent += 1
        found.kinds["flood" if flood else body.kind] += 1
        try:
            async with asyncio.timeout(DEADLINE_S + HANG_S):
                code, reason, words = await self._outcome(target, channels[target.address], body, metadata)
        except TimeoutError:
            found.problems.append(f"{target.path} hangs on {body.kind}")
            return
        found.codes[f"{code.name}{f' {reason}' if reason else ''}"] += 1
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
            found.waited[target.path] += 1
        reason = reason or (code.name if target.is_standard and code is grpc.StatusCode.NOT_FOUND else "")
        if problem := _problem(body.kind, code, reason, flood):
            kind = "a flood of metadata" if flood else body.kind
            found.problems.append(f"{target.path} {problem} on {kind}: {words}"[:300])

    def _identity(self, target: Target) -> tuple[tuple[str, str], ...]:
        """Mostly that of a caller who may; else of anybody, or none."""
        may = callers_of(target.path)
        match self._random.choices(("may", "anybody", "nobody"), (90, 5, 5))[0]:
            case "may" if may:
                return shown(self._random.choice(sorted(may)))
            case "anybody":
                return shown(self._random.choice(list(Caller)))
        return ()

    async def _outcome(
        self, target: Target, channel: grpc.aio.Channel, body: Body, metadata: list[tuple[str, str]]
    ) -> tuple[grpc.StatusCode, str, str]:
        try:
            timeout_s = HANG_S if body.kind in UNREADABLE else DEADLINE_S
            call = _call(target, channel)(body.data, timeout=timeout_s, metadata=metadata)
            if target.method.server_streaming:
                async for _ in call:
                    break
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            if error.details() == "Internal error from Core":  # of this side, whose stream the server ended first
                return grpc.StatusCode.CANCELLED, "", ""
            return error.code(), _reason(error), error.details() or ""
        return grpc.StatusCode.OK, "", ""

    async def _slow_readers(self, channels: dict[str, grpc.aio.Channel]) -> None:
        streaming = [target for target in self._served.targets if target.method.server_streaming]
        for number in range(SLOW_READERS):
            target = streaming[number % len(streaming)]
            metadata = self._identity(target)
            call = _call(target, channels[target.address])(b"", timeout=DEADLINE_S + HANG_S, metadata=metadata)
            asyncio.get_running_loop().call_later(DEADLINE_S, call.cancel)

    async def _noise(self, address: str) -> None:
        """Bytes that are no HTTP/2, and a client that says nothing."""
        host, _, port = address.rpartition(":")
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", self._random.randbytes(4096)):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(data + self._random.randbytes(512) if data else data)
            await writer.drain()
            writer.close()

    async def _alive(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            check: Any = channel.unary_unary(
                "/grpc.health.v1.Health/Check", None, health_pb2.HealthCheckResponse.FromString
            )
            request = health_pb2.HealthCheckRequest(service=LIVENESS).SerializeToString()
            answer = await check(request, timeout=HANG_S)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                self.found.problems.append(f"{address} is not alive")


def _call(target: Target, channel: grpc.aio.Channel) -> Any:
    match target.method.client_streaming, target.method.server_streaming:
        case False, False:
            return channel.unary_unary(target.path)
        case False, True:
            return channel.unary_stream(target.path)
    stream: Any = channel.stream_stream(target.path)
    return lambda data, **options: stream(iter([data]), **options)


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The reason of an error of ours; empty for one of gRPC's own."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return str(info.reason)
    return ""


def _problem(kind: str, code: grpc.StatusCode, reason: str, flood: bool) -> str:
    """What is wrong with an answer, in words; empty when nothing is."""
    if reason == "ROLECALL" or (not reason and code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)):
        return f"answers {code.name} {reason}"
    if not reason and code not in (*_OF_GRPC, grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"answers {code.name} without a reason"
    if (kind in UNREADABLE or flood) and code in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"answers {code.name}"
    return ""


@contextmanager
def _unforeseen(found: Findings) -> Iterator[None]:
    """Notes every traceback that the servers' interceptor, or gRPC, logs meanwhile."""

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # gRPC's own "Unexpected" is what a servicer raised past the interceptor; it logs callers that left, too
            if record.exc_info and (record.name.startswith("rolecall") or record.getMessage().startswith("Unexpected")):
                found.problems.append(f"logged by {record.name}: {record.getMessage()}: {record.exc_info[1]!r}"[:300])

    handler, loggers = Noting(), [logging.getLogger(name) for name in ("rolecall.rpc", "grpc")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
