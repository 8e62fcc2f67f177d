"""The weight channel through shared memory: who is let in, what a receiver may do with the memory, and that nothing of
it stays behind.
"""

import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rolecall.errors import ChannelBrokenError, NotOnThisDeviceError
from rolecall.weights.channel import Channel, GlooChannel, join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.shared_memory.meeting import PROOF, socket_of
from rolecall.weights.shared_memory.ring import CHUNK_BYTES, NONCE_BYTES, NUM_SLOTS, Ring, SharedReceiver, SharedRoot
from rolecall.weights.transfer import Reception, agreed_manifest, offer_manifest, send

CPU = torch.device("cpu")
MEET_S = 30.0


@pytest.fixture
def ranks() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    """Both ranks of an epoch with one receiver, which are closed at the end."""
    server = RendezvousServer("127.0.0.1")
    root, receiver = server.enter(1), Rendezvous(server.address, 1, 1, MEET_S)
    yield root, receiver
    for rank in (root, receiver):
        rank.abort("the test is over")
        rank.close()


def met(root: Rendezvous, receiver: Rendezvous, *, or_gloo: bool = False) -> tuple[Channel, Channel]:
    """Both ends of a channel that was asked for as shared."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, receiver, 2, "shared", CPU, MEET_S)
        return join(root, 2, "shared", CPU, MEET_S, or_gloo=or_gloo), other.result()


def test_a_tensor_larger_than_the_ring_arrives_bit_for_bit(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    root, receiver = met(*ranks)
    named = [("small", torch.ones(3)), ("large", torch.randn((NUM_SLOTS + 3) * CHUNK_BYTES // 4 + 5))]
    manifest = build_manifest(named, CHUNK_BYTES)
    offer_manifest(ranks[0], manifest)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, root, iter(named), manifest, MEET_S)
        reception = Reception(receiver, agreed_manifest(ranks[1], MEET_S), MEET_S)
        arrived = {name: tensor for bucket in reception for name, tensor in bucket}
        assert sending.result().digest == reception.result().digest
    assert all(torch.equal(arrived[name], tensor) for name, tensor in named)


def test_no_slot_is_written_again_before_it_was_taken(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    """A receiver that takes nothing leaves room for NUM_SLOTS chunks and no more."""
    root, _ = met(*ranks)
    full = root.broadcast(torch.ones(NUM_SLOTS * CHUNK_BYTES, dtype=torch.uint8), MEET_S)
    with pytest.raises(ChannelBrokenError, match=r"a bucket took more than 0\.5 s"):
        root.broadcast(torch.ones(1, dtype=torch.uint8), 0.5)
    with pytest.raises(ChannelBrokenError):
        full.wait(MEET_S)


def test_a_bucket_of_another_size_than_the_manifests_breaks_the_epoch(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    root, receiver = met(*ranks)
    sent = root.broadcast(torch.zeros(10, dtype=torch.uint8), MEET_S)
    with pytest.raises(ChannelBrokenError, match="a bucket of 10 bytes where the manifest has one of 12"):
        receiver.broadcast(torch.zeros(12, dtype=torch.uint8), MEET_S).wait(MEET_S)
    with pytest.raises(ChannelBrokenError, match="10 bytes"):
        sent.wait(MEET_S)


def test_nothing_is_left_of_a_channel_that_both_ends_closed(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    before = rings()
    channels = met(*ranks)
    channels[0].broadcast(torch.ones(CHUNK_BYTES, dtype=torch.uint8), MEET_S)
    assert rings() > before
    for channel in channels:
        channel.close()
        channel.close()
    gc.collect()
    assert rings() <= before


def test_a_receiver_can_neither_write_to_the_memory_nor_change_its_size() -> None:
    ring = Ring()
    try:
        ring.put(0, torch.ones(1, dtype=torch.uint8))
        for change in (lambda: os.pwrite(ring.fd, b"x", 0), lambda: mmap.mmap(ring.fd, 0)):
            with pytest.raises(PermissionError):
                change()
        for size in (0, 2**30):
            with pytest.raises(PermissionError):
                os.ftruncate(ring.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(ring.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        ring.close()


def elsewhere(rendezvous: Rendezvous, proof: bytes) -> Channel:
    """A receiver that cannot prove that it sees the root's memory, and meets as it is told."""
    rendezvous.take(socket_of(0), MEET_S)
    rendezvous.offer("shared/1", proof)
    assert rendezvous.take("shared/verdict", MEET_S) == b"gloo"
    return GlooChannel(rendezvous, 2, MEET_S)


@pytest.mark.parametrize("proof", [b"none", b"", bytes(PROOF.size), bytes(PROOF.size - 1)])
def test_ranks_meet_over_gloo_when_one_does_not_prove_that_it_sees_the_memory(
    ranks: tuple[Rendezvous, Rendezvous], proof: bytes
) -> None:
    before = rings()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(elsewhere, ranks[1], proof)
        root = join(ranks[0], 2, "shared", CPU, MEET_S, or_gloo=True)
        assert isinstance(root, GlooChannel)
        receiver = other.result()  # it may still be on its way when the root has met it
        root.close()
        receiver.close()
    gc.collect()
    assert rings() <= before


def test_a_receiver_that_was_let_in_and_read_other_memory_has_no_proof(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    """Its token is the root's own; the nonce is not the ring's."""

    def reads_elsewhere() -> Channel:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(MEET_S)
            door.connect(b"\0" + ranks[1].take(socket_of(0), MEET_S).split()[0])
            token, descriptors, _, _ = socket.recv_fds(door, 16, 1)
            os.close(descriptors[0])
            return elsewhere(ranks[1], PROOF.pack(0, token, bytes(NONCE_BYTES), False))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(reads_elsewhere)
        root = join(ranks[0], 2, "shared", CPU, MEET_S, or_gloo=True)
        assert isinstance(root, GlooChannel)
        receiver = other.result()
        root.close()
        receiver.close()


def test_ranks_that_share_memory_use_it_though_they_might_use_gloo(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    root, receiver = met(*ranks, or_gloo=True)
    assert isinstance(root, SharedRoot)
    assert isinstance(receiver, SharedReceiver)


def test_where_shared_memory_was_asked_for_a_receiver_without_it_names_itself(
    ranks: tuple[Rendezvous, Rendezvous],
) -> None:
    ranks[0].offer("shared/else", b"none")
    ranks[0].offer("shared/roots", b"1")
    ranks[0].offer(socket_of(0), b"rolecall-weights-nobody")
    with pytest.raises(NotOnThisDeviceError, match=r"this rollout does not see .* use weights\.backend: gloo"):
        join(ranks[1], 2, "shared", CPU, MEET_S)
    with pytest.raises(ChannelBrokenError, match="rank 1: this rollout does not see the memory"):
        ranks[0].take("never", MEET_S)


def test_ranks_that_do_not_all_come_are_told_after_the_deadline(ranks: tuple[Rendezvous, Rendezvous]) -> None:
    before = rings()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, ranks[1], 3, "shared", CPU, MEET_S)
        with pytest.raises(ChannelBrokenError, match="did not meet within 1 s"):
            join(ranks[0], 3, "shared", CPU, 1.0)
        with pytest.raises(ChannelBrokenError, match="did not meet within 1 s"):
            other.result()
    gc.collect()
    assert rings() <= before


def rings() -> int:
    """Mappings and descriptors of rings that this process has."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, and those of other threads
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return "\n".join([*links, Path("/proc/self/maps").read_text()]).count("memfd:rolecall-weights")
