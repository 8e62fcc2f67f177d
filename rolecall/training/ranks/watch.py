"""The ranks of one trainer watch each other, beside all collectives: a rank that died or hangs ends the others within
LOST_S, with an error that names it.

A star of TCP connections: rank 0 listens, every other rank connects and beats. Each end has an OS thread of its own, so
that a rank which computes, imports or waits in a collective goes on beating, while one that was stopped or lost its
machine falls silent. Collectives need no short deadlines then, and the end of the process is what aborts them. A rank
that lives without getting on is not judged here: its progress stands still, and the controller judges that.

A rank that is asked to stop, as by the drain of its node, has rank 0 asked, too: only rank 0 can end a step and let all
of them go.

Whoever notices a loss kills the lost rank where it is a sibling (torchrun would wait 30 s for a stopped one), tells the
others, and leaves.

One JSON object a line: {"rank", "pid", "token"} first, then {"phase"} every BEAT_S, with {"stop"} to rank 0 from
whoever is asked to, {"bye"} before an orderly end, {"lost": message} from rank 0.
"""

import json
import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from rolecall.errors import WorkerLostError
from rolecall.lifeline import parent_of
from rolecall.training.serving.hooks import ProcessHooks

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between two beats."""
SILENT_S = 15.0
"""Silence after which a rank is taken for hung. Beats come from a thread of their own: only a stopped process or a lost
machine is silent for so long.
"""
GONE_S = 1.0
"""Seconds from the end of a connection to the verdict: the rank that ended says why, and so may the collective that it
left.
"""
LOST_S = SILENT_S + 2 * BEAT_S
"""Bound on the time from the death or silence of a rank to the end of the others."""
_LINE_BYTES = 64 * 1024
"""Bound on a line; a longer one is no rank's."""


@dataclass
class _Peer:
    """The other end of a connection."""

    connection: socket.socket
    heard: float
    rank: int = -1
    """-1 until it showed the token: until then nothing it says or does counts."""
    pid: int = 0
    phase: str = "starting"
    received: bytes = b""
    ended: float | None = None
    """When its connection ended without a goodbye."""
    told: str = ""
    """Last words of the peer, when it gave up because of another rank."""
    is_stopping: bool = False
    """Whether the peer was asked to stop, and said so."""
    left: bool = False
    """Whether the peer said goodbye."""


class RankWatch:
    """One rank's end. Its own thread beats and judges; any thread sets `phase` and calls `leave`."""

    def __init__(self, hooks: ProcessHooks, rank: int, world_size: int, *, silent_s: float = SILENT_S) -> None:
        """`hooks.lost` is called once, in the watch's thread, when a rank is lost; it ends the process."""
        self.phase = "starting"
        """What this rank is doing, told to the others."""
        self._hooks = hooks
        self._rank = rank
        self._world_size = world_size
        self._silent_s = silent_s
        self._token = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._live, name="rank-watch", daemon=True)

    def listen(self, host: str) -> str:
        """Rank 0: takes the others in at the returned "host:port/token". How long they may take to come is bounded by
        the start's deadline, not here.
        """
        self._listener = socket.create_server((host, 0), backlog=self._world_size)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return f"{host}:{self._listener.getsockname()[1]}/{self._token}"

    def connect(self, address: str, timeout_s: float) -> None:
        """The other ranks: joins rank 0. WorkerLostError when nobody answers there."""
        where, _, self._token = address.partition("/")
        host, _, port = where.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=timeout_s)
        except OSError as error:
            raise WorkerLostError(
                f"rank 0 of {self._hooks.role} does not answer at {where} ({error}); rank {self._rank} ends"
            ) from error
        self._add(connection, rank=0)
        self._thread.start()

    def leave(self) -> None:
        """The orderly end: says goodbye and judges nobody any more. Safe to repeat."""
        self._tell({"bye": self._rank})  # first: the watch's thread closes the connections once it is to stop
        self._stopping.set()

    def explain(self) -> None:
        """Asked when a collective has failed: returns when this watch gave somebody up, which ends the process, or when
        nobody is lost after all.
        """
        self._thread.join(GONE_S + 3 * BEAT_S)

    def _live(self) -> None:
        try:
            self._watch()
        finally:
            for peer in self._peers:
                peer.connection.close()
            if self._listener is not None:
                self._listener.close()
            self._selector.close()

    def _watch(self) -> None:
        looked = time.monotonic()
        beat_at = looked
        while not self._stopping.is_set():
            for key, _ in self._selector.select(max(0.0, beat_at - time.monotonic())):
                self._take(key)
            now = time.monotonic()
            if now - looked > BEAT_S + self._silent_s / 2:  # this process itself stood still: nobody's silence counts
                for peer in self._peers:
                    peer.heard = now
            looked = now
            if now >= beat_at:
                beat_at = now + BEAT_S
                self._tell({"phase": self.phase})
                if self._hooks.is_stopping():
                    self._tell({"stop": self._rank})
                verdict = self._judge(now)
                if verdict is not None:
                    self._give_up(*verdict)
                    return

    def _judge(self, now: float) -> tuple[_Peer, str] | None:
        """Returns a peer that is lost, and why; None when all live."""
        for peer in self._peers:
            if peer.left or peer.rank < 0:
                continue
            if peer.ended is not None and now - peer.ended > GONE_S:
                return peer, "is gone"
            if peer.ended is None and now - peer.heard > self._silent_s:
                return peer, f"has been silent for {now - peer.heard:.0f} s"
        return None

    def _give_up(self, peer: _Peer, what: str) -> None:
        message = (
            peer.told
            or f"rank {peer.rank} of {self._hooks.role} {what}; it was {peer.phase}, rank {self._rank} was "
            f"{self.phase}. All ranks end"
        )
        logger.error("%s", message)
        if peer.ended is None and parent_of(peer.pid) == os.getppid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(peer.pid, signal.SIGKILL)
        self._tell({"lost": message})
        if not self._stopping.is_set():
            self._hooks.lost(WorkerLostError(message, rank=str(peer.rank)))

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers.append(_Peer(connection, time.monotonic(), rank))
        self._selector.register(connection, selectors.EVENT_READ, self._peers[-1])
        if rank >= 0:
            _send(connection, {"rank": self._rank, "pid": os.getpid(), "token": self._token})

    def _take(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            assert self._listener is not None
            with suppress(BlockingIOError):
                self._add(self._listener.accept()[0], rank=-1)  # bounded: the listener does not block
            return
        peer: _Peer = key.data
        try:
            data = peer.connection.recv(_LINE_BYTES)  # bounded: the connection does not block
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        with suppress(ValueError):
            for line in lines:
                self._heed(peer, json.loads(line))
        if not data or len(peer.received) > _LINE_BYTES:
            self._selector.unregister(peer.connection)
            peer.ended = time.monotonic()
            if peer.rank < 0:
                peer.connection.close()
                self._peers.remove(peer)

    def _heed(self, peer: _Peer, message: dict[str, object]) -> None:
        peer.heard = time.monotonic()
        match message:
            case {"rank": int(rank), "pid": int(pid), "token": self._token}:
                if peer.rank < 0:
                    _send(peer.connection, {"rank": self._rank, "pid": os.getpid(), "token": self._token})
                peer.rank, peer.pid = rank, pid
            case {"phase": str(phase)}:
                peer.phase = phase
            case {"bye": _}:
                peer.left = True
            case {"stop": _} if self._rank == 0 and peer.rank > 0 and not peer.is_stopping:
                peer.is_stopping = True
                logger.info("rank %d was asked to stop: stopping", peer.rank)
                self._hooks.stop()
            case {"lost": str(told)} if self._rank > 0:
                peer.told, peer.ended = told, 0.0

    def _tell(self, message: dict[str, object]) -> None:
        for peer in list(self._peers):
            if peer.ended is None and peer.rank >= 0:
                _send(peer.connection, message)


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    # A peer that reads nothing fills its buffer and is silent: what cannot be sent to it is not missed.
    with suppress(OSError):
        connection.send(json.dumps(message).encode() + b"\n")
