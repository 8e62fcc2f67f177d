"""The rendezvous: where the ranks of the weight channel meet and tell each other what bytes cannot, the manifest,
progress, and that the epoch is over.

Owns one TCPStore per epoch, served by the actor until two epochs later, when nobody can be in it any more. Each rank
keeps a connection for the calls of its own threads, one for its communicator, and one for a watcher, which learns
within WATCH_S that somebody aborted the epoch, or that the actor is gone, and frees whatever of this rank is stuck. It
moves no weights.

Keys of an epoch: `manifest` (serialized WeightManifest), `abort` (why), `progress/<rank>` (buckets received since the
epoch began), those that the communicator itself makes under `comm`, and those of shared_memory/meeting.py under
`shared`.
"""

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, though not in __all__

from rolecall.errors import ChannelBrokenError, ChannelUnreachableError, ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 0.1
"""Seconds between two looks at the abort key."""
_CLOSE_S = 2.0
"""Longest that close waits for the watcher; it leaves within WATCH_S unless the actor is frozen."""
_TAKE_POLL_S = 0.005
"""Seconds between two looks at a key that rank 0 has not offered yet; once or twice an epoch."""
_STORE_TIMEOUT = timedelta(seconds=10)
"""Deadline of one call to the store: they are all answered at once, so only a dead or frozen actor reaches it."""


class RendezvousServer:
    """The store of an epoch, listening on `host` alone. It ends with the last reference to it. ConfigError for a host
    that this machine does not have.
    """

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
                raise
            raise ConfigError(
                f"weights.host {host}: the actor's machine cannot listen there ({error}); name one of its interfaces"
            ) from error
        self.host, self._port = host, int(listener.getsockname()[1])
        self._server = TCPStore(
            host, self._port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def address(self) -> str:
        """The address "host:port" for the other ranks."""
        return f"{self.host}:{self._port}"

    def enter(self, epoch: int) -> "Rendezvous":
        """Epoch `epoch` as rank 0 sees it."""
        return Rendezvous(self.address, epoch, 0, _STORE_TIMEOUT.total_seconds())


class Rendezvous:
    """One epoch as one rank sees it. Threads may share it."""

    def __init__(self, address: str, epoch: int, rank: int, timeout_s: float) -> None:
        """Connects within `timeout_s`; ChannelUnreachableError when nobody answers at `address`."""
        self.epoch, self.rank = epoch, rank
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._calls = self._connect(timeout_s)
        self._num_received = 0
        self._broken: str | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, args=(self._connect(timeout_s),), name=f"weights-watch-{epoch}", daemon=True
        )
        self._watcher.start()

    def communicator_store(self, timeout_s: float) -> Store:
        """The store under which a communicator may make its own keys, over a connection of its own.

        The communicator waits there for its peers, and a connection serves one call at a time: an abort must not queue
        behind it.
        """
        return PrefixStore("comm", self._connect(timeout_s))

    @property
    def host(self) -> str:
        """The actor's host, as this rank reaches it."""
        return self._host

    @property
    def broken(self) -> str | None:
        """The reason why the epoch is over; None while it is not."""
        return self._broken

    def check(self) -> None:
        """Raises ChannelBrokenError when the epoch is over."""
        if self._broken is not None:
            raise ChannelBrokenError(
                f"epoch {self.epoch} of the weight channel is broken: {self._broken}; open a new epoch",
                rank=str(self.rank),
            )

    def on_broken(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the epoch breaks, from the thread that learns it; at once when it already has."""
        with self._lock:  # bounded: the callbacks are called outside it
            if self._broken is None:
                self._callbacks.append(callback)
                return
        callback()

    def abort(self, reason: str) -> None:
        """Ends the epoch for every rank: this one now, the others when their watchers look. Idempotent, never waits for
        a peer.
        """
        if self.rank == 0 and self._broken is None:
            # before the communicator closes, so that nobody takes the actor for dead; the store is its own and cannot
            # hang
            self._tell(reason)
            self._break(reason)
        elif self._break(reason):
            self._tell(reason)

    def blame(self, reason: str) -> None:
        """Aborts for a rank that only saw a transfer fail: when somebody has already said why the epoch ended, that is
        the reason.
        """
        self._look()
        self.abort(reason)

    def check_now(self) -> None:
        """Raises ChannelBrokenError when the epoch is over, also if the watcher has not seen it yet."""
        self._look()
        self.check()

    def offer(self, key: str, value: bytes) -> None:
        """This rank says, once, what other ranks of this epoch must know. ChannelBrokenError."""
        try:
            self._calls.set(key, value)  # type: ignore[arg-type]  # bytes are fine
        except DistError as error:
            self._break(f"the rendezvous does not answer: {error}")
            self.check()

    def has(self, keys: Collection[str]) -> bool:
        """Whether all of `keys` have been offered. ChannelBrokenError."""
        self.check()
        try:
            return not keys or self._ask(lambda: self._calls.check(list(keys)))
        except DistError as error:
            self._break(f"the rendezvous does not answer: {error}")
            self.check()
            raise

    def take(self, key: str, timeout_s: float) -> bytes:
        """Returns what was offered under `key`. ChannelBrokenError, after aborting the epoch, when nobody offers it
        within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                if self._ask(lambda: self._calls.check([key])):
                    return self._calls.get(key)
            except DistError as error:
                self._break(f"the rendezvous does not answer: {error}")
                continue
            if time.monotonic() > deadline:
                self.blame(f"rank {self.rank} waited {timeout_s:.1f} s for {key!r}, which the actor did not offer")
            time.sleep(_TAKE_POLL_S)

    def report_progress(self) -> None:
        """Says that this rank has received one more bucket."""
        self._num_received += 1
        try:
            self._calls.set(f"progress/{self.rank}", str(self._num_received))
        except DistError as error:
            self._break(f"the rendezvous does not answer: {error}")

    def laggards(self, world_size: int) -> list[int]:
        """Receiver ranks that have received the fewest buckets: the ones to blame for a late bucket. None where the
        rendezvous does not answer.
        """

        def received(rank: int) -> int:
            key = f"progress/{rank}"
            return int(self._calls.get(key)) if self._calls.check([key]) else 0

        try:
            progress = _bounded(lambda: list(map(received, range(1, world_size))), _STORE_TIMEOUT.total_seconds())
        except (DistError, TimeoutError):
            return []
        return [rank for rank, count in enumerate(progress, start=1) if count == min(progress)]

    def close(self) -> None:
        """Stops watching. The epoch is over for this rank; nobody else is told."""
        self._closed.set()
        self._break("closed")
        if threading.current_thread() is not self._watcher:
            # a thread that is inside the store when the interpreter ends takes the process down with an abort
            self._watcher.join(_CLOSE_S)

    def _look(self) -> None:
        try:
            if self._broken is None and self._ask(lambda: self._calls.check(["abort"])):
                self._break(self._calls.get("abort").decode())
        except DistError as error:
            self._break(f"the actor's rendezvous is gone: {error}")

    def _ask(self, call: Callable[[], bool]) -> bool:
        """Asks the store; False when it does not answer, which breaks the epoch."""
        try:
            return _bounded(call, _STORE_TIMEOUT.total_seconds())
        except TimeoutError:
            self._break("the actor's rendezvous does not answer")
            return False

    def _tell(self, reason: str) -> None:
        try:
            self._calls.set("abort", f"rank {self.rank}: {reason}")
        except DistError as error:
            logger.warning("epoch %d: could not tell the other ranks of the abort: %s", self.epoch, error)

    def _connect(self, timeout_s: float) -> PrefixStore:
        try:
            store = _bounded(
                lambda: TCPStore(
                    self._host, self._port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
                ),
                timeout_s,
            )
        except (DistError, TimeoutError) as error:
            reason = (
                f"nobody answers at the rendezvous {self._host}:{self._port} of weight-channel epoch "
                f"{self.epoch}: {error}"
            )
            raise ChannelUnreachableError(reason, rank=str(self.rank)) from error
        store.set_timeout(_STORE_TIMEOUT)
        return PrefixStore(f"epoch/{self.epoch}", store)

    def _watch(self, store: PrefixStore) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                if store.check(["abort"]):
                    self._break(store.get("abort").decode())
            except DistError as error:
                self._break(f"the actor's rendezvous is gone: {error}")
            if self._broken is not None:
                return

    def _break(self, reason: str) -> bool:
        with self._lock:
            if self._broken is not None:
                return False
            self._broken = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True


def _bounded(call: Callable[[], T], timeout_s: float) -> T:
    """Returns or raises what `call` does; TimeoutError when it does neither in time, and is left to itself.

    A TCPStore's own timeouts do not hold against an actor that is frozen, or whose machine is gone: what reads an
    answer waits for it without end, and holds its connection.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # raised where it was asked
            answer.set_exception(error)

    threading.Thread(target=run, name="weights-ask", daemon=True).start()
    return answer.result(timeout_s)


def local_address(host: str) -> str:
    """The address of the interface from which this machine reaches `host`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # bounded: a datagram socket sends nothing here
        return str(probe.getsockname()[0])
