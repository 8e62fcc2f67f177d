"""Shared memory: the weight channel between processes of one machine, chunk by chunk through a ring, which lies in host
memory that the kernel frees with its last user, or on the GPU that all of them are on (device_slots.py).

Owns the ring, and the two ends of a channel over it. The ring is an anonymous file in memory, without a name that could
stay behind; receivers hold a descriptor of it and may only read. A chunk's place goes over a Unix socket, its receipt
comes back there, and a peer that dies closes its end at once. Who may take part, and the proof that all see one memory,
is in meeting.py.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from rolecall.errors import ChannelBrokenError
from rolecall.training.ranks.device import mark_of
from rolecall.weights.rendezvous import WATCH_S, Rendezvous
from rolecall.weights.shared_memory.device_slots import HANDLE_BYTES

CHUNK_BYTES = 4 * 2**20
"""Most bytes of one chunk: a bucket is cut into these, so that receivers copy its start while the root copies on."""
NUM_SLOTS = 8
"""Chunks that the root may be ahead of the slowest receiver: two buckets of the default size. The ring's 32 MiB are
all that a channel holds in host memory, whatever the model's size.
"""
NONCE_BYTES = 32
"""Random bytes at the ring's start. They are told nowhere, so whoever knows them has read this memory."""
_SLOTS_AT = mmap.PAGESIZE
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1: no mapping or descriptor may write from now on, but for what is mapped already."""
_CHUNK = struct.Struct("<qqq")
"""Slot, bytes of the chunk, bytes of its bucket."""
_RECEIPT = struct.Struct("<q")
"""Chunks taken since the epoch began."""
_POLL_S = 0.05
"""Longest that one look for a message blocks; an abort is noticed at the next."""
_PACKED_POLL_S = 0.0002
"""Pause between two looks at whether a GPU has packed a bucket: short beside the milliseconds of a bucket."""
_WHY_S = 2 * WATCH_S
"""Seconds in which the rendezvous may still say why a peer closed its end, before it is taken for dead."""

_ACTOR_GONE = "the actor closed its end of the shared memory: its process is gone"


class RootSlots(Protocol):
    """A ring's slots as the root sees them."""

    device: torch.device
    """Where chunks must lie."""
    num_slots: int
    """Chunks that the root may be ahead of the slowest receiver."""
    chunk_bytes: int
    """Most bytes of one chunk."""

    def put(self, slot: int, chunk: torch.Tensor) -> None:
        """Copies `chunk` (uint8 [n], n <= chunk_bytes) into slot `slot`; done when it returns."""


class ReceiverSlots(Protocol):
    """A ring's slots as a receiver sees them."""

    device: torch.device
    """Where chunks are copied to."""

    def take(self, slot: int, into: torch.Tensor) -> int:
        """Copies the start of slot `slot` into `into` (uint8 [n]); how many bytes there were. Done when it returns."""

    def close(self) -> None:
        """Lets go of them; nothing is taken afterwards. Idempotent."""


class Ring:
    """The root's memory of one epoch: a nonce, a handle of slots on its GPU (zeros where there are none), then
    NUM_SLOTS slots in host memory, which take none until they are used. OSError where the kernel gives none.
    """

    device = torch.device("cpu")
    num_slots = NUM_SLOTS
    chunk_bytes = CHUNK_BYTES

    def __init__(self, handle: bytes = bytes(HANDLE_BYTES)) -> None:
        self.fd = os.memfd_create("rolecall-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _SLOTS_AT + NUM_SLOTS * CHUNK_BYTES)
            memory = mmap.mmap(self.fd, 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        memory[: NONCE_BYTES + HANDLE_BYTES] = self.nonce + handle
        self._slots = np.frombuffer(memory, dtype=np.uint8)[_SLOTS_AT:].reshape(NUM_SLOTS, CHUNK_BYTES)

    def put(self, slot: int, chunk: torch.Tensor) -> None:
        """RootSlots.put, in this thread alone: torch's threads, which meet after every copy, stand still on a busy
        machine.
        """
        self._slots[slot, : chunk.numel()] = chunk.numpy()

    def close(self) -> None:
        """Lets go of the memory, which the kernel frees once the receivers have, too. Nothing is put afterwards."""
        self._slots = np.empty((0, 0), np.uint8)
        os.close(self.fd)


class RingReader:
    """A receiver's view of the root's ring."""

    device = torch.device("cpu")

    def __init__(self, fd: int) -> None:
        """`fd`: the ring, as the root gave it; closed with this."""
        self._fd, self._is_open = fd, True
        said = os.pread(fd, NONCE_BYTES + HANDLE_BYTES, 0)
        self.nonce = said[:NONCE_BYTES]
        self.handle = said[NONCE_BYTES:]
        """The root's slots on its GPU; zeros where there are none."""

    def take(self, slot: int, into: torch.Tensor) -> int:
        """ReceiverSlots.take."""
        return os.preadv(self._fd, [into.numpy().data], _SLOTS_AT + slot * CHUNK_BYTES)

    def close(self) -> None:
        """ReceiverSlots.close."""
        if self._is_open:
            self._is_open = False
            os.close(self._fd)


class SharedRoot:
    """A root's end: copies buckets into the ring and waits for receipts. Buckets lie where the slots do."""

    takes_deltas = False

    def __init__(
        self,
        rendezvous: Rendezvous,
        world_size: int,
        ring: Ring,
        slots: RootSlots,
        peers: Mapping[int, socket.socket],
    ) -> None:
        """`slots`: the ring's own, or those whose handle it holds. `peers`: by rank, the socket of each receiver of
        this root, which has the ring's descriptor. This channel closes ring and sockets.
        """
        self.rendezvous, self.world_size, self.device = rendezvous, world_size, slots.device
        self._ring, self._slots, self._peers = ring, slots, peers
        self._poller = select.poll()
        for peer in peers.values():
            peer.setblocking(False)
            self._poller.register(peer, select.POLLIN)
        self._num_put = self._slot = 0
        self._num_taken = dict.fromkeys(peers, 0)
        self._lock = threading.Lock()
        self._is_open = True
        rendezvous.on_broken(self.close)

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> "SharedSending":
        """Implements Channel. Blocks while the ring is full of what some receiver has not taken."""
        deadline = time.monotonic() + timeout_s
        self._until_packed(bucket, deadline, timeout_s)
        size = self._slots.chunk_bytes
        for start in range(0, bucket.numel(), size):
            self.until_taken(self._num_put + 1 - self._slots.num_slots, deadline, timeout_s)
            self._put(bucket[start : start + size], bucket.numel())
        return SharedSending(self, self._num_put)

    def until_taken(self, num_chunks: int, deadline: float, timeout_s: float) -> None:
        """Returns when every receiver has taken the first `num_chunks` of the epoch. ChannelBrokenError, after aborting
        the epoch, when one is gone or `deadline` (monotonic) is past.
        """
        while min(self._num_taken.values(), default=num_chunks) < num_chunks:
            gone = [rank for rank in self._collect() if self._num_taken[rank] < num_chunks]
            if gone:
                self._blame(gone[0])
            if min(self._num_taken.values()) < num_chunks:
                _wait(self.rendezvous, self._poller, deadline, timeout_s)
        self.rendezvous.check()

    def _until_packed(self, bucket: torch.Tensor, deadline: float, timeout_s: float) -> None:
        """Returns when a GPU has written `bucket`. Outside the lock, which an abort takes: the stream may wait for
        another rank of the actor.
        """
        is_packed = mark_of(bucket.device)
        while is_packed is not None and not is_packed():
            _check(self.rendezvous, deadline, timeout_s)
            time.sleep(_PACKED_POLL_S)

    def close(self) -> None:
        """Implements Channel."""
        with self._lock:  # bounded: held for a copy of one chunk; closing a socket waits for nobody
            if self._is_open:
                self._is_open = False
                self._ring.close()
                for peer in self._peers.values():
                    _hang_up(peer)

    def _put(self, chunk: torch.Tensor, bucket_bytes: int) -> None:
        gone = []
        with self._lock:  # bounded: held for a copy of one chunk and for messages that there is room for
            _require_open(self._is_open, self.rendezvous)
            # Back to the first slot when all is taken: what a small model never touches costs no memory.
            is_empty = min(self._num_taken.values(), default=self._num_put) == self._num_put
            self._slot = 0 if is_empty else (self._slot + 1) % self._slots.num_slots
            self._slots.put(self._slot, chunk)
            self._num_put += 1
            for rank, peer in self._peers.items():
                try:
                    peer.send(_CHUNK.pack(self._slot, chunk.numel(), bucket_bytes))
                except OSError:
                    gone.append(rank)
        if gone:
            self._blame(gone[0])

    def _collect(self) -> list[int]:
        """Counts the receipts that have come; the ranks that closed their end."""
        gone = []
        with self._lock:  # bounded: its sockets never block
            _require_open(self._is_open, self.rendezvous)
            for rank, peer in self._peers.items():
                while message := _next_message(peer, _RECEIPT.size):
                    self._num_taken[rank] = _RECEIPT.unpack(message)[0]
                if message is not None:
                    gone.append(rank)
        return gone

    def _blame(self, rank: int) -> None:
        _blame(self.rendezvous, f"rank {rank} closed its end of the shared memory: its process is gone")


class SharedSending:
    """A bucket that is in the ring."""

    def __init__(self, channel: SharedRoot, num_chunks: int) -> None:
        self._channel, self._num_chunks = channel, num_chunks

    def wait(self, timeout_s: float) -> None:
        """Implements Transfer: every receiver has taken it."""
        self._channel.until_taken(self._num_chunks, time.monotonic() + timeout_s, timeout_s)


class SharedReceiver:
    """A receiver's end: copies chunks out of the ring into its own buckets, which lie where the slots do."""

    takes_deltas = False

    def __init__(self, rendezvous: Rendezvous, world_size: int, root: socket.socket, slots: ReceiverSlots) -> None:
        """`root`: a socket to the root. This channel closes it, and `slots`."""
        self.rendezvous, self.world_size, self.device = rendezvous, world_size, slots.device
        self._root, self._slots = root, slots
        root.setblocking(False)
        self._poller = select.poll()
        self._poller.register(root, select.POLLIN)
        self._num_taken = 0
        self._lock = threading.Lock()
        self._is_open = True
        rendezvous.on_broken(self.close)

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> "SharedReceiving":
        """Implements Channel: the bytes are copied when they are waited for, bucket after bucket in this order."""
        _require_open(self._is_open, self.rendezvous)
        return SharedReceiving(self, bucket)

    def take(self, bucket: torch.Tensor, timeout_s: float) -> None:
        """Fills `bucket` (uint8 [n]) with the next one of the root's. ChannelBrokenError, after aborting the epoch."""
        deadline = time.monotonic() + timeout_s
        rest = bucket
        while len(rest):
            num_bytes, problem = self._take_chunk(rest, bucket.numel())
            if problem:
                _blame(self.rendezvous, problem)
            elif num_bytes == 0:
                _wait(self.rendezvous, self._poller, deadline, timeout_s)
            rest = rest[num_bytes:]
        self.rendezvous.check()

    def close(self) -> None:
        """Implements Channel."""
        with self._lock:  # bounded: held for a copy of one chunk; closing a socket waits for nobody
            if self._is_open:
                self._is_open = False
                _hang_up(self._root)
                self._slots.close()

    def _take_chunk(self, rest: torch.Tensor, bucket_bytes: int) -> tuple[int, str]:
        """Copies one chunk, if one is there, to the start of `rest`: its bytes, and what is wrong."""
        with self._lock:  # bounded: held for a copy of one chunk; its socket never blocks
            _require_open(self._is_open, self.rendezvous)
            message = _next_message(self._root, _CHUNK.size)
            if message is None:
                return 0, ""
            if not message:
                return 0, _ACTOR_GONE
            slot, num_bytes, whole = _CHUNK.unpack(message)
            if whole != bucket_bytes or num_bytes > len(rest):
                return 0, f"the actor sends a bucket of {whole} bytes where the manifest has one of {bucket_bytes}"
            copied = self._slots.take(slot, rest[:num_bytes])
            if copied != num_bytes:
                return 0, f"the shared memory gave {copied} of {num_bytes} bytes"
            self._num_taken += 1
            try:
                self._root.send(_RECEIPT.pack(self._num_taken))
            except OSError:
                return 0, _ACTOR_GONE
            return num_bytes, ""


class SharedReceiving:
    """A bucket that is to be taken out of the ring."""

    def __init__(self, channel: SharedReceiver, bucket: torch.Tensor) -> None:
        self._channel, self._bucket = channel, bucket

    def wait(self, timeout_s: float) -> None:
        """Implements Transfer."""
        self._channel.take(self._bucket, timeout_s)


def _next_message(peer: socket.socket, num_bytes: int) -> bytes | None:
    """The next message of `peer`, which never blocks; None when none is there, b"" when its other end is closed."""
    try:
        return peer.recv(num_bytes)  # bounded: the socket never blocks
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _wait(rendezvous: Rendezvous, poller: select.poll, deadline: float, timeout_s: float) -> None:
    """One look between two polls. ChannelBrokenError when the epoch is over, or, after aborting it, past `deadline`."""
    _check(rendezvous, deadline, timeout_s)
    poller.poll(1000 * _POLL_S)


def _check(rendezvous: Rendezvous, deadline: float, timeout_s: float) -> None:
    rendezvous.check()
    if time.monotonic() > deadline:
        rendezvous.abort(f"a bucket took more than {timeout_s:g} s")
        rendezvous.check()


def _blame(rendezvous: Rendezvous, problem: str) -> None:
    """Raises ChannelBrokenError: with the reason that somebody gave for the end of the epoch, else with `problem`."""
    until = time.monotonic() + _WHY_S
    while time.monotonic() < until:
        rendezvous.check()
        time.sleep(WATCH_S / 4)
    rendezvous.blame(problem)
    rendezvous.check()


def _require_open(is_open: bool, rendezvous: Rendezvous) -> None:
    if not is_open:
        rendezvous.check()
        raise ChannelBrokenError(f"epoch {rendezvous.epoch} of the weight channel is closed; open a new epoch")


def _hang_up(peer: socket.socket) -> None:
    """Closes `peer` and wakes whoever polls it here or at its other end."""
    with contextlib.suppress(OSError):  # its other end is gone
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()
