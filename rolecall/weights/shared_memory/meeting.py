"""The meeting over shared memory: which ranks of an epoch see the memory of a root, by proof.

Names of hosts and addresses prove nothing: containers of one host share no memory, and two hosts may bear one name. So
a root gives a descriptor of its ring to whoever reaches its socket as the same user, and each receiver reads the nonce
there and says it over the rendezvous, and whether it could open the slots on the root's GPU, if it has any. When a
single receiver of a root did not open those, all of that root's use the ring's own, in host memory; when a single
receiver sees no ring, all of the epoch's ranks meet over Gloo instead, or, where shared memory was asked for by name,
that receiver refuses.

Rank 0 is a root, and where actor and rollouts share devices every rank of the actor is one: they come after the
receivers in the epoch, and each sends the same buckets to the receivers that came to it. A receiver comes to the root
on its own GPU, else to one of its machine.

A socket is abstract: it lies in the network namespace, not in a file system, and is gone with its process.
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence

import torch

from rolecall.errors import ChannelBrokenError, NotOnThisDeviceError, RoleCallError
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.shared_memory.device_slots import DeviceSlots, identity_of, open_slots, own_slots
from rolecall.weights.shared_memory.ring import NONCE_BYTES, Ring, RingReader, SharedReceiver, SharedRoot

logger = logging.getLogger(__name__)
_POLL_S = 0.005
"""Longest that one look for a connection or an answer blocks; an abort is noticed at the next."""
_TOKEN_BYTES = 16
"""Bytes of a connection's token, by which the root knows whose it is."""
_CREDENTIALS = struct.Struct("3i")
_NONE, _SHARED, _GLOO = b"none", b"shared", b"gloo"
PROOF = struct.Struct(f"<H{_TOKEN_BYTES}s{NONCE_BYTES}s?")
"""What a receiver says: the root that it came to, its token there, the nonce, and whether it opened the root's slots on
a GPU.
"""
_REMEDY = "leave weights.backend out, or use weights.backend: gloo"


def meet(
    rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float, or_gloo: bool, num_roots: int
) -> SharedRoot | SharedReceiver | None:
    """Meets the other ranks as rank 0 or as a receiver; None when all are to meet over Gloo, since one of them sees no
    root's memory.

    `device` is where this rank has its weights, `world_size` counts rank 0 and the receivers. Rank 0 says how many
    roots there are, and by `or_gloo` whether they may meet over Gloo; where not, NotOnThisDeviceError at a rank that
    sees no root's memory. ChannelBrokenError when they do not all come within `timeout_s`.
    """
    if rendezvous.rank > 0:
        return _meet_as_receiver(rendezvous, world_size, device, time.monotonic() + timeout_s)
    rendezvous.offer("shared/else", _GLOO if or_gloo else _NONE)
    rendezvous.offer("shared/roots", str(num_roots).encode())
    return stand_by(rendezvous, world_size, device, timeout_s, 0)


def stand_by(
    rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float, root: int
) -> SharedRoot | None:
    """Meets the other ranks as root `root`; None when no receiver came to it, or all meet over Gloo. Else as `meet`."""
    deadline = time.monotonic() + timeout_s
    or_gloo = rendezvous.take("shared/else", _left(deadline)) == _GLOO
    with contextlib.ExitStack() as stack:
        try:
            door = _Door(device)
        except OSError as error:
            rendezvous.offer(socket_of(root), _NONE)
            if not or_gloo:
                reason = f"the actor's machine gives no shared memory ({error}); {_REMEDY}"
                raise NotOnThisDeviceError(reason) from error
            logger.info("epoch %d of the weight channel: no shared memory here: %s", rendezvous.epoch, error)
            rendezvous.offer(_heard_by(root), _heard([], on_device=False))
            return None
        stack.callback(door.close)
        try:
            rendezvous.offer(socket_of(root), f"{door.name} {identity_of(device)}".encode())
            if root > 0 and rendezvous.take(socket_of(0), _left(deadline)) == _NONE:
                return None
            said = _said(rendezvous, world_size, door, timeout_s)
            peers = {rank: peer for rank, proof in said.items() if (peer := door.proven(proof, root)) is not None}
            on_device = door.has_slots and all(PROOF.unpack(said[rank])[3] for rank in peers)
            rendezvous.offer(_heard_by(root), _heard(list(peers), on_device=on_device))
            if _verdict(rendezvous, world_size, root, deadline, or_gloo) == _GLOO:
                return None
            memory = f"shared memory of {device}" if on_device else "shared memory"
            logger.info("epoch %d of the weight channel: over %s to ranks %s", rendezvous.epoch, memory, list(peers))
            return door.hand_over(rendezvous, world_size, peers, on_device) if peers or root == 0 else None
        except RoleCallError as error:
            rendezvous.blame(error.message)  # before the socket is gone: to ranks that come late its absence says more
            raise


def _said(rendezvous: Rendezvous, world_size: int, door: "_Door", timeout_s: float) -> dict[int, bytes]:
    """The proofs of all receivers, by rank, while `door` lets them in. ChannelBrokenError."""
    deadline = time.monotonic() + timeout_s
    keys = {rank: f"shared/{rank}" for rank in range(1, world_size)}
    while not rendezvous.has(keys.values()):
        if time.monotonic() > deadline:
            raise ChannelBrokenError(
                f"the ranks did not meet within {timeout_s:g} s: not all receivers have said whether they see the "
                "actor's memory"
            )
        door.let_in(_POLL_S)
    return {rank: rendezvous.take(key, _left(deadline)) for rank, key in keys.items()}


def _verdict(rendezvous: Rendezvous, world_size: int, root: int, deadline: float, or_gloo: bool) -> bytes:
    """Returns how the epoch's ranks go on; the first root says it once all have said whom they serve.
    ChannelBrokenError.
    """
    if root > 0:
        return rendezvous.take("shared/verdict", _left(deadline))
    num_roots = int(rendezvous.take("shared/roots", _left(deadline)))
    heard = [json.loads(rendezvous.take(_heard_by(each), _left(deadline))) for each in range(num_roots)]
    elsewhere = sorted(set(range(1, world_size)).difference(*(each["ranks"] for each in heard)))
    if elsewhere and not or_gloo:
        raise ChannelBrokenError(f"ranks {elsewhere} do not see the memory of the actor's machine; {_REMEDY}")
    verdict = _GLOO if elsewhere else _SHARED
    rendezvous.offer("shared/verdict", verdict)
    if elsewhere:
        logger.info("epoch %d of the weight channel: over Gloo: ranks %s see no root", rendezvous.epoch, elsewhere)
    return verdict


def _meet_as_receiver(
    rendezvous: Rendezvous, world_size: int, device: torch.device, deadline: float
) -> SharedReceiver | None:
    may_use_gloo = rendezvous.take("shared/else", _left(deadline)) == _GLOO
    num_roots = int(rendezvous.take("shared/roots", _left(deadline)))
    sockets = [rendezvous.take(socket_of(root), _left(deadline)) for root in range(num_roots)]
    entered = None
    for root in _nearest(sockets, device, rendezvous.rank):
        entered = entered or _enter(rendezvous, root, sockets[root].split()[0].decode(), device, deadline)
    if entered is None and not may_use_gloo:
        rendezvous.check_now()  # the actor may have gone from its socket because the epoch is over
        raise NotOnThisDeviceError(f"this rollout does not see the memory of the actor's machine; {_REMEDY}")
    if sockets[0] == _NONE:
        return None
    try:
        rendezvous.offer(f"shared/{rendezvous.rank}", entered.proof if entered is not None else _NONE)
        verdict = rendezvous.take("shared/verdict", _left(deadline))
        if entered is None or verdict == _GLOO:
            return None
        heard = json.loads(rendezvous.take(_heard_by(entered.number), _left(deadline)))
        return entered.hand_over(rendezvous, world_size, on_device=heard["on_device"])
    finally:
        if entered is not None:
            entered.close()


def _nearest(sockets: Sequence[bytes], device: torch.device, rank: int) -> list[int]:
    """The roots that have a socket: those on the receiver's own GPU first, then in turn, so that receivers spread."""
    own = identity_of(device).encode()
    there = [root for root, said in enumerate(sockets) if said != _NONE]
    return sorted(there, key=lambda root: (sockets[root].split()[1:] != [own], (root - rank) % len(sockets)))


def socket_of(root: int) -> str:
    """The key under which a root says its socket and the identity of its device."""
    return f"shared/socket/{root}"


def _heard_by(root: int) -> str:
    """The key under which a root says which ranks it serves, and whether on its GPU."""
    return f"shared/heard/{root}"


def _heard(ranks: list[int], *, on_device: bool) -> bytes:
    return json.dumps({"ranks": ranks, "on_device": on_device}).encode()


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

    def proven(self, proof: bytes, root: int) -> socket.socket | None:
        """The connection of the receiver that says `proof`; None where it did not read this ring, root `root`'s."""
        assert self._ring is not None
        if len(proof) != PROOF.size:
            return None
        number, token, nonce, _ = PROOF.unpack(proof)
        is_proof = number == root and secrets.compare_digest(nonce, self._ring.nonce)
        return self._by_token.get(token) if is_proof else None

    def hand_over(
        self, rendezvous: Rendezvous, world_size: int, peers: Mapping[int, socket.socket], on_device: bool
    ) -> SharedRoot:
        """The channel over the ring to `peers`, all of which are proven."""
        ring, self._ring = self._ring, None
        assert ring is not None
        self._by_token = {token: peer for token, peer in self._by_token.items() if peer not in peers.values()}
        slots = self._on_device[0] if on_device and self._on_device else ring
        return SharedRoot(rendezvous, world_size, ring, slots, peers)

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
        number: int,
    ) -> None:
        """`stack` closes what there is; `number` is the root's."""
        self._stack, self._root, self._ring, self._on_device = stack, root, ring, on_device
        self.number = number
        self.proof = PROOF.pack(number, token, ring.nonce, on_device is not None)

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


def _enter(rendezvous: Rendezvous, number: int, name: str, device: torch.device, deadline: float) -> _Entered | None:
    """Takes what root `number` gives at its socket; None where nobody of this user listens in this network
    namespace.
    """
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
        return _Entered(stack.pop_all(), root, ring, on_device, token, number)


def _is_readable(peer: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(peer, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def _is_of_this_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
