"""The meeting over shared memory: which ranks of an epoch see the memory of rank 0, by proof.

Names of hosts and addresses prove nothing: containers of one host share no memory, and two hosts may bear one name. So
rank 0 gives a descriptor of its ring to whoever reaches its socket as the same user, and each receiver reads the nonce
there and says it over the rendezvous, and whether it could open the slots on rank 0's GPU, if it has any. One channel
serves an epoch: when a single rank did not open those, all use the ring's own, in host memory; when a single rank does
not see the ring, all of them meet over Gloo instead, or, where shared memory was asked for by name, that rank refuses.

The socket is abstract: it lies in the network namespace, not in a file system, and is gone with the actor.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping

import torch

from rolecall.errors import ChannelBrokenError, NotOnThisDeviceError, RoleCallError
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.shared_memory.device_slots import DeviceSlots, open_slots, own_slots
from rolecall.weights.shared_memory.ring import NONCE_BYTES, Ring, RingReader, SharedReceiver, SharedRoot

logger = logging.getLogger(__name__)
_POLL_S = 0.005
"""Longest that one look for a connection or an answer blocks; an abort is noticed at the next."""
_TOKEN_BYTES = 16
"""Bytes of a connection's token, by which the root knows whose it is."""
_CREDENTIALS = struct.Struct("3i")
_NONE, _SHARED, _DEVICE, _GLOO = b"none", b"shared", b"device", b"gloo"
_PROVEN_BYTES = _TOKEN_BYTES + NONCE_BYTES
"""Bytes of a proof before its end."""
_OPENED, _UNOPENED = b"1", b"0"
"""The end of a proof: whether the receiver opened the root's slots on a GPU."""
_REMEDY = "leave weights.backend out, or use weights.backend: gloo"


def meet(
    rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float, or_gloo: bool
) -> SharedRoot | SharedReceiver | None:
    """Meets the other ranks; None when all are to meet over Gloo, since one of them does not see rank 0's memory.

    `device` is where this rank has its weights. Rank 0 says by `or_gloo` whether they may; where not,
    NotOnThisDeviceError at a rank that does not see it. ChannelBrokenError when they do not all come within
    `timeout_s`.
    """
    if rendezvous.rank == 0:
        return _meet_as_root(rendezvous, world_size, device, timeout_s, or_gloo)
    return _meet_as_receiver(rendezvous, world_size, device, time.monotonic() + timeout_s)


def _meet_as_root(
    rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float, or_gloo: bool
) -> SharedRoot | None:
    deadline = time.monotonic() + timeout_s
    rendezvous.offer("shared/else", _GLOO if or_gloo else _NONE)
    try:
        door = _Door(device)
    except OSError as error:
        rendezvous.offer("shared/socket", _NONE)
        if not or_gloo:
            raise NotOnThisDeviceError(f"the actor's machine gives no shared memory ({error}); {_REMEDY}") from error
        logger.info("epoch %d of the weight channel: no shared memory on this machine: %s", rendezvous.epoch, error)
        return None
    try:
        rendezvous.offer("shared/socket", door.name.encode())
        keys = {rank: f"shared/{rank}" for rank in range(1, world_size)}
        while not rendezvous.has(keys.values()):
            if time.monotonic() > deadline:
                raise ChannelBrokenError(
                    f"the ranks did not meet within {timeout_s:g} s: not all receivers have said whether they see the "
                    "actor's memory"
                )
            door.let_in(_POLL_S)
        said = {rank: rendezvous.take(key, timeout_s) for rank, key in keys.items()}
        proofs = {rank: door.proven(proof) for rank, proof in said.items()}
        elsewhere = [rank for rank, peer in proofs.items() if peer is None]
        on_device = door.has_slots and all(proof[_PROVEN_BYTES:] == _OPENED for proof in said.values())
        if elsewhere and not or_gloo:
            raise ChannelBrokenError(f"ranks {elsewhere} do not see the memory of the actor's machine; {_REMEDY}")
        rendezvous.offer("shared/verdict", _GLOO if elsewhere else _DEVICE if on_device else _SHARED)
        memory = f"shared memory of {device}" if on_device else "shared memory"
        over = f"Gloo: ranks {elsewhere} do not see this machine's memory" if elsewhere else memory
        logger.info("epoch %d of the weight channel, %d receivers: over %s", rendezvous.epoch, len(keys), over)
        return None if elsewhere else door.hand_over(rendezvous, proofs, on_device)
    except RoleCallError as error:
        rendezvous.blame(error.message)  # before the socket is gone: to ranks that come late its absence says more
        raise
    finally:
        door.close()


def _meet_as_receiver(
    rendezvous: Rendezvous, world_size: int, device: torch.device, deadline: float
) -> SharedReceiver | None:
    name = rendezvous.take("shared/socket", _left(deadline))
    may_use_gloo = rendezvous.take("shared/else", _left(deadline)) == _GLOO
    entered = _enter(rendezvous, name.decode(), device, deadline) if name != _NONE else None
    if entered is None and not may_use_gloo:
        rendezvous.check_now()  # the actor may have gone from its socket because the epoch is over
        raise NotOnThisDeviceError(f"this rollout does not see the memory of the actor's machine; {_REMEDY}")
    if name == _NONE:
        return None
    try:
        rendezvous.offer(f"shared/{rendezvous.rank}", entered.proof if entered is not None else _NONE)
        verdict = rendezvous.take("shared/verdict", _left(deadline))
        if entered is None or verdict == _GLOO:
            return None
        return entered.hand_over(rendezvous, world_size, on_device=verdict == _DEVICE)
    finally:
        if entered is not None:
            entered.close()


class _Door:
    """The root's ring, its slots on a GPU, and the socket where receivers come for the ring. OSError where the kernel
    gives none.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = own_slots(device)
        self.name = f"rolecall-weights-{secrets.token_hex(16)}"
        self._by_token: dict[bytes, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind("\0" + self.name)
            self._listener.listen()
            self._ring: Ring | None = Ring(self._on_device[1]) if self._on_device else Ring()
        except OSError:
            self._listener.close()
            raise

    @property
    def has_slots(self) -> bool:
        """Whether there are slots on a GPU."""
        return self._on_device is not None

    def let_in(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for a receiver; gives the ring to each that has come, if it is of this user."""
        assert self._ring is not None
        if not _is_readable(self._listener, timeout_s):
            return
        peer, _ = self._listener.accept()  # bounded: somebody is there
        token = secrets.token_bytes(_TOKEN_BYTES)
        if _is_of_this_user(peer):
            with contextlib.suppress(OSError):  # it is gone already
                socket.send_fds(peer, [token], [self._ring.fd])
                self._by_token[token] = peer
                return
        peer.close()

    def proven(self, proof: bytes) -> socket.socket | None:
        """The connection of the receiver that says `proof`; None where it did not read this ring."""
        assert self._ring is not None
        token, nonce = proof[:_TOKEN_BYTES], proof[_TOKEN_BYTES:_PROVEN_BYTES]
        return self._by_token.get(token) if secrets.compare_digest(nonce, self._ring.nonce) else None

    def hand_over(
        self, rendezvous: Rendezvous, peers: Mapping[int, socket.socket | None], on_device: bool
    ) -> SharedRoot:
        """The channel over the ring to `peers`, all of which are proven."""
        ring, self._ring = self._ring, None
        assert ring is not None
        kept = {rank: peer for rank, peer in peers.items() if peer is not None}
        self._by_token = {token: peer for token, peer in self._by_token.items() if peer not in kept.values()}
        slots = self._on_device[0] if on_device and self._on_device else ring
        return SharedRoot(rendezvous, ring, slots, kept)

    def close(self) -> None:
        """Closes the socket, and what was not handed over."""
        self._listener.close()
        for peer in self._by_token.values():
            peer.close()
        if self._ring is not None:
            self._ring.close()


class _Entered:
    """A receiver's connection to the root, the ring that it got there, and the root's slots if they are on its GPU."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        root: socket.socket,
        ring: RingReader,
        on_device: DeviceSlots | None,
        token: bytes,
    ) -> None:
        """`stack` closes what there is."""
        self._stack, self._root, self._ring, self._on_device = stack, root, ring, on_device
        self.proof = token + ring.nonce + (_UNOPENED if on_device is None else _OPENED)

    def hand_over(self, rendezvous: Rendezvous, world_size: int, *, on_device: bool) -> SharedReceiver:
        """The channel over them."""
        self._stack.pop_all()
        kept, other = (self._on_device, self._ring) if on_device and self._on_device else (self._ring, self._on_device)
        if other is not None:
            other.close()
        return SharedReceiver(rendezvous, world_size, self._root, kept)

    def close(self) -> None:
        """Closes what was not handed over."""
        self._stack.close()


def _enter(rendezvous: Rendezvous, name: str, device: torch.device, deadline: float) -> _Entered | None:
    """Takes what the root gives at its socket; None where nobody of this user listens in this network namespace."""
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            root.settimeout(_left(deadline))
            root.connect("\0" + name)  # bounded: by the timeout above
            while not _is_readable(root, _POLL_S):
                rendezvous.check()
                if time.monotonic() > deadline:
                    raise ChannelBrokenError("the ranks did not meet in time: the actor did not give its memory")
            token, descriptors, _, _ = socket.recv_fds(root, _TOKEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            logger.info("epoch %d of the weight channel: the actor's memory is not here: %s", rendezvous.epoch, error)
            return None
        if not descriptors:
            return None
        ring = RingReader(descriptors[0])
        stack.callback(ring.close)
        if not _is_of_this_user(root):
            return None
        on_device = open_slots(ring.handle, device)
        if on_device is not None:
            stack.callback(on_device.close)
        return _Entered(stack.pop_all(), root, ring, on_device, token)


def _is_readable(peer: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(peer, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def _is_of_this_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
