"""A weight channel over sockets for twins: what it carries is tiny, how it fails is real.

The actor listens, anew for each epoch; every rollout connects and says its epoch and rank. A publish waits until all
have met, then sends a header and the tensors one by one to everyone, each acknowledged by everyone before the next: as
in a collective, one that hangs holds up all, for a bucket's deadline at most, and one that dies breaks it for all. A
newer epoch, or `abort`, ends whatever an older one is stuck in.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rolecall.errors import ChannelBrokenError, DeadlineError, StaleEpochError, TornWeightsError
from rolecall.wire import Array
from tests.twins.weights import NUM_TENSORS, TENSOR_BYTES

BUCKET_S = 0.004
"""A tensor's time on the wire, so that a publish is long enough to be hit in the middle."""
HELLO_TIMEOUT_S = 5.0


class SocketSender:
    """Rank 0. `open` and `abort` may be called from any thread, `publish` from one."""

    def __init__(self, wire: Path) -> None:
        self._wire = wire
        self._epoch, self._world_size = -1, 1
        self._listener: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._met = threading.Condition()

    def open(self, epoch: int, world_size: int) -> str:
        """Begins an epoch and returns the address where its ranks meet. StaleEpochError."""
        with self._met:
            if epoch <= self._epoch:
                raise StaleEpochError(f"epoch {epoch} is not newer than {self._epoch}")
            self._close()
            self._epoch, self._world_size = epoch, world_size
            if self._wire.is_dir():
                path = self._wire / "weights.real"
                path.unlink(missing_ok=True)
                self._listener, address = socket.socket(socket.AF_UNIX), f"unix:{self._wire / 'weights.link'}"
                self._listener.bind(str(path))
                self._listener.listen()
            else:
                self._listener = socket.create_server(("127.0.0.1", 0))
                address = f"127.0.0.1:{self._listener.getsockname()[1]}"
            threading.Thread(target=self._accept, args=(self._listener, epoch), daemon=True).start()
        return address

    def _accept(self, listener: socket.socket, epoch: int) -> None:
        while True:
            try:
                peer, _ = listener.accept()
                peer.settimeout(HELLO_TIMEOUT_S)
                hello = json.loads(_read_line(peer))
            except (OSError, ValueError):
                if listener.fileno() < 0:
                    return
                continue
            with self._met:
                if self._epoch != epoch or hello["epoch"] != epoch:
                    peer.close()
                    continue
                with contextlib.suppress(OSError):
                    peer.sendall(b"+")
                self._peers[hello["rank"]] = peer
                self._met.notify_all()

    def publish(
        self, weights: Array, epoch: int, policy_version: int, bucket_timeout_s: float, at: Callable[[str], None]
    ) -> None:
        """Sends `weights` to every rank. StaleEpochError, ChannelBrokenError."""
        at("publish:meeting")
        with self._met:
            if epoch != self._epoch:
                raise StaleEpochError(f"epoch {epoch} is not the open one, {self._epoch}")
            if not self._met.wait_for(
                lambda: epoch != self._epoch or len(self._peers) == self._world_size - 1, bucket_timeout_s
            ):
                self._close()
                raise ChannelBrokenError(
                    f"{len(self._peers)} of {self._world_size - 1} ranks met within {bucket_timeout_s:g} s"
                )
            peers = list(self._peers.values())
        try:
            self._to_all(peers, f"{json.dumps({'version': policy_version})}\n".encode(), bucket_timeout_s)
            for index, tensor in enumerate(weights.reshape(NUM_TENSORS, -1)):
                at(f"publish:bucket-{index}")
                time.sleep(BUCKET_S)
                self._to_all(peers, tensor.tobytes(), bucket_timeout_s)
        except OSError as error:
            self.abort()
            raise ChannelBrokenError(f"version {policy_version} was not sent whole: {error}") from error

    def _to_all(self, peers: list[socket.socket], data: bytes, timeout_s: float) -> None:
        for peer in peers:
            peer.settimeout(timeout_s)
            peer.sendall(data)
        for peer in peers:
            if peer.recv(1) != b"+":
                raise ConnectionResetError("a rank left")

    def abort(self, epoch: int | None = None) -> None:
        """Breaks the open epoch, if it is `epoch` (None: whichever), for everyone."""
        with self._met:
            if epoch in (None, self._epoch):
                self._close()

    def _close(self) -> None:
        for each in [*self._peers.values(), *([self._listener] if self._listener else [])]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._peers, self._listener = {}, None
        self._world_size = -1
        self._met.notify_all()


class SocketReceiver:
    """One other rank, on an event loop."""

    def __init__(self) -> None:
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._epoch = -1

    async def join(self, epoch: int, address: str, rank: int, timeout_s: float) -> None:
        """Takes part in `epoch`; aborts an older one. ChannelBrokenError, DeadlineError."""
        self.abort()
        try:
            async with asyncio.timeout(timeout_s):
                self._streams = reader, writer = await _connect(address)
                writer.write(f"{json.dumps({'epoch': epoch, 'rank': rank})}\n".encode())
                if await reader.read(1) != b"+":
                    raise ConnectionResetError("the actor turned us away")
        except TimeoutError as error:
            raise DeadlineError(f"epoch {epoch} was not joined within {timeout_s:g} s") from error
        except OSError as error:
            raise ChannelBrokenError(f"epoch {epoch} cannot be joined: {error}") from error
        self._epoch = epoch

    async def receive(
        self, epoch: int, policy_version: int, bucket_timeout_s: float, at: Callable[[str], None]
    ) -> Array:
        """The weights of one version. ChannelBrokenError before the first tensor came, TornWeightsError after it."""
        if epoch != self._epoch or self._streams is None:
            raise StaleEpochError(f"epoch {epoch} is not the one joined, {self._epoch}")
        reader, writer = self._streams
        tensors: list[bytes] = []
        try:
            async with asyncio.timeout(bucket_timeout_s):
                header = json.loads(await reader.readuntil(b"\n"))
            if header["version"] != policy_version:
                raise ConnectionResetError(f"version {header['version']} came")
            writer.write(b"+")
            for index in range(NUM_TENSORS):
                async with asyncio.timeout(bucket_timeout_s):
                    tensors.append(await reader.readexactly(TENSOR_BYTES))
                at(f"receive:bucket-{index}")
                writer.write(b"+")
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.abort()
            message = f"version {policy_version} did not come whole: {error or type(error).__name__}"
            if tensors:
                raise TornWeightsError(message, cause=ChannelBrokenError.reason) from error
            raise ChannelBrokenError(message) from error
        return np.frombuffer(b"".join(tensors), np.float64)

    def abort(self) -> None:
        """Leaves whatever epoch it is in."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams, self._epoch = None, -1


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _read_line(peer: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = peer.recv(1)
        if not byte:
            raise ConnectionResetError("closed before its first line")
        line += byte
    return line
