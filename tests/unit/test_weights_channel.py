"""The weight channel between threads of one process, over Gloo and through shared memory: transfers, the rules of
epochs and versions, deadlines and aborts.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from rolecall.errors import (
    ChannelBrokenError,
    ChannelUnreachableError,
    ConfigError,
    NotOnThisDeviceError,
    StaleEpochError,
    StaleVersionError,
    WeightsMismatchError,
)
from rolecall.settings import WeightBackend
from rolecall.weights.channel import Channel, Transfer, join
from rolecall.weights.fingerprint import fingerprint
from rolecall.weights.manifest import build_manifest
from rolecall.weights.nccl import NcclLibrary
from rolecall.weights.publisher import Publisher
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import Reception, agreed_manifest, offer_manifest, send
from rolecall.weights.transferred import Transferred

CPU = torch.device("cpu")
MEET_S = 30.0
"""Deadline of meetings here: far more than they take, far less than the test's own."""
SHORT_S = 3.0
"""Deadline of a meeting that fails: Gloo waits it out before it looks why."""
Received = tuple[dict[str, torch.Tensor], Transferred]


@pytest.fixture(params=["gloo", "shared"])
def backend(request: pytest.FixtureRequest) -> WeightBackend:
    """Each way that CPUs have."""
    backend: WeightBackend = request.param
    return backend


def weights(seed: int = 0, count: int = 12) -> list[tuple[str, torch.Tensor]]:
    """Tensors of mixed dtypes and sizes, some larger than the tests' buckets."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    return [
        (f"layer.{i}", (torch.randn(7 * i + 1, 13, generator=generator) * 50).abs().to(dtypes[i % 3]))
        for i in range(count)
    ]


@contextmanager
def publisher() -> Iterator[Publisher]:
    """A publisher that is closed at the end, whatever happens."""
    root = Publisher(CPU)
    try:
        yield root
    finally:
        root.close()


@contextmanager
def member(backend: WeightBackend, address: str, epoch: int, rank: int, world_size: int) -> Iterator[Channel]:
    """A receiver's channel, closed at the end."""
    rendezvous = Rendezvous(address, epoch, rank, MEET_S)
    try:
        channel = join(rendezvous, world_size, backend, CPU, MEET_S)
        try:
            yield channel
        finally:
            channel.close()
    finally:
        rendezvous.close()


def receive(
    backend: WeightBackend,
    address: str,
    epoch: int,
    rank: int,
    world_size: int,
    num_versions: int = 1,
    timeout_s: float = MEET_S,
) -> list[Received]:
    """Joins and takes `num_versions` transfers."""
    received = []
    with member(backend, address, epoch, rank, world_size) as channel:
        manifest = agreed_manifest(channel.rendezvous, timeout_s)
        for _ in range(num_versions):
            reception = Reception(channel, manifest, timeout_s)
            tensors = {name: tensor for bucket in reception for name, tensor in bucket}
            received.append((tensors, reception.result()))
    return received


def test_two_receivers_get_every_tensor_bit_for_bit_with_the_senders_fingerprints(backend: WeightBackend) -> None:
    named, manifest = weights(), build_manifest(weights(), 1024)
    with publisher() as root, ThreadPoolExecutor(2) as pool:
        address = root.open(1, 3, "127.0.0.1", backend, MEET_S)
        receivers = [pool.submit(receive, backend, address, 1, rank, 3) for rank in (1, 2)]
        sent = root.publish(iter(named), manifest, epoch=1, policy_version=1, bucket_timeout_s=MEET_S)
        for receiver in receivers:
            ((tensors, arrived),) = receiver.result()
            assert list(arrived.fingerprints) == [name for name, _ in named]
            assert arrived.fingerprints == sent.fingerprints == {name: fingerprint(tensor) for name, tensor in named}
            assert arrived.digest == sent.digest
            assert arrived.num_bytes == sent.num_bytes
            assert list(tensors) == [name for name, _ in named]
            assert all(torch.equal(tensors[name], tensor) for name, tensor in named)


def test_views_scalars_and_empty_tensors_arrive_as_they_are(backend: WeightBackend) -> None:
    grid = torch.arange(12.0).view(3, 4)
    named = [
        ("transposed", grid.t()),
        ("strided", grid[:, ::2]),
        ("scalar", torch.tensor(7.0, dtype=torch.bfloat16)),
        ("empty", torch.zeros(0, 5)),
        ("parameter", torch.nn.Parameter(grid)),
    ]
    with publisher() as root, ThreadPoolExecutor(1) as pool:
        address = root.open(1, 2, "127.0.0.1", backend, MEET_S)
        receiver = pool.submit(receive, backend, address, 1, 1, 2)
        sent = root.publish(iter(named), build_manifest(named, 64), epoch=1, policy_version=1, bucket_timeout_s=MEET_S)
        ((tensors, arrived),) = receiver.result()
    assert arrived.digest == sent.digest
    assert all(torch.equal(tensors[name], tensor) for name, tensor in named)


def test_one_epoch_carries_many_versions_under_one_manifest(backend: WeightBackend) -> None:
    with publisher() as root, ThreadPoolExecutor(1) as pool:
        address = root.open(1, 2, "127.0.0.1", backend, MEET_S)
        receiver = pool.submit(receive, backend, address, 1, 1, 2, 3)
        manifest = build_manifest(weights(), 1024)
        sent = [
            root.publish(iter(weights(seed)), manifest, epoch=1, policy_version=seed, bucket_timeout_s=MEET_S)
            for seed in (1, 2, 3)
        ]
        received = receiver.result()
    assert [arrived.digest for _, arrived in received] == [one.digest for one in sent]
    # Earlier versions' tensors are still what they were: no bucket's memory was used again.
    assert all(torch.equal(received[0][0][name], tensor) for name, tensor in weights(1))


def test_an_epoch_is_never_opened_twice_and_a_newer_one_ends_it(backend: WeightBackend) -> None:
    with publisher() as root, ThreadPoolExecutor(1) as pool:
        address = root.open(4, 2, "127.0.0.1", backend, MEET_S)
        receiver = pool.submit(receive, backend, address, 4, 1, 2)
        with pytest.raises(StaleEpochError, match="epoch 4"):
            root.open(4, 2, "127.0.0.1", backend, MEET_S)
        with pytest.raises(StaleEpochError, match="epoch 3"):
            root.open(3, 2, "127.0.0.1", backend, MEET_S)
        root.open(5, 1, "127.0.0.1", backend, MEET_S)
        with pytest.raises(ChannelBrokenError, match="epoch 5 was opened"):
            receiver.result()
        with pytest.raises(StaleEpochError, match="not the open one"):
            root.publish(
                iter(weights()), build_manifest(weights(), 1024), epoch=4, policy_version=1, bucket_timeout_s=MEET_S
            )


def test_versions_never_go_back_and_one_goes_out_again_only_over_a_new_epoch(backend: WeightBackend) -> None:
    manifest = build_manifest(weights(), 1024)
    with publisher() as root:
        root.open(1, 1, "127.0.0.1", backend, MEET_S)
        root.publish(iter(weights()), manifest, epoch=1, policy_version=7, bucket_timeout_s=MEET_S)
        with pytest.raises(StaleVersionError, match="over epoch 1 already"):
            root.publish(iter(weights()), manifest, epoch=1, policy_version=7, bucket_timeout_s=MEET_S)
        root.open(2, 1, "127.0.0.1", backend, MEET_S)
        with pytest.raises(StaleVersionError, match="never go back"):
            root.publish(iter(weights()), manifest, epoch=2, policy_version=6, bucket_timeout_s=MEET_S)
        for version in (7, 8):
            root.publish(iter(weights()), manifest, epoch=2, policy_version=version, bucket_timeout_s=MEET_S)


def test_weights_that_are_not_as_in_the_manifest_are_refused_and_told_to_the_receivers(backend: WeightBackend) -> None:
    named = weights()
    for wrong in (named[:-1], [*named, ("more", torch.zeros(1))], [named[1], named[0], *named[2:]]):
        with publisher() as root, ThreadPoolExecutor(1) as pool:
            address = root.open(1, 2, "127.0.0.1", backend, MEET_S)
            receiver = pool.submit(receive, backend, address, 1, 1, 2)
            with pytest.raises(WeightsMismatchError, match="manifest"):
                root.publish(
                    iter(wrong), build_manifest(named, 256), epoch=1, policy_version=1, bucket_timeout_s=MEET_S
                )
            with pytest.raises(ChannelBrokenError, match="manifest"):
                receiver.result()


def test_a_failed_publish_still_runs_the_weights_to_their_end_for_the_other_ranks_of_the_actor(
    backend: WeightBackend,
) -> None:
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            taken.append(name)
            yield name, tensor

    with publisher() as root:
        root.open(1, 2, "127.0.0.1", backend, timeout_s=0.5)  # nobody comes
        with pytest.raises(ChannelBrokenError, match="did not meet"):
            root.publish(
                gathered(), build_manifest(weights(), 1024), epoch=1, policy_version=1, bucket_timeout_s=MEET_S
            )
    assert taken == [name for name, _ in weights()]


def test_a_receiver_that_takes_no_bucket_costs_the_deadline_and_is_named(backend: WeightBackend) -> None:
    big = [(f"w{i}", torch.zeros(2**21)) for i in range(8)]
    release = threading.Event()

    def hang(address: str) -> None:
        with member(backend, address, 1, 2, 3):
            assert release.wait(MEET_S)

    with publisher() as root, ThreadPoolExecutor(2) as pool:
        address = root.open(1, 3, "127.0.0.1", backend, MEET_S)
        hung = pool.submit(hang, address)
        other = pool.submit(receive, backend, address, 1, 1, 3)
        with pytest.raises(ChannelBrokenError, match=r"ranks \[2\]") as failure:
            root.publish(iter(big), build_manifest(big, 2**23), epoch=1, policy_version=1, bucket_timeout_s=3)
        assert failure.value.details["ranks"] == "2"
        with pytest.raises(ChannelBrokenError, match=r"a bucket took more than 3\.4 s"):  # 3, and 8 MB of it
            other.result()
        release.set()
        hung.result()


def test_an_abort_frees_the_root_and_every_receiver_long_before_the_deadline(backend: WeightBackend) -> None:
    stuck, aborted = threading.Event(), threading.Event()

    def blocked() -> Iterator[tuple[str, torch.Tensor]]:
        yield weights()[0]
        stuck.set()
        assert aborted.wait(MEET_S)
        yield from weights()[1:]

    with publisher() as root, ThreadPoolExecutor(3) as pool:
        address = root.open(1, 3, "127.0.0.1", backend, MEET_S)
        receivers = [pool.submit(receive, backend, address, 1, rank, 3, 1, 60.0) for rank in (1, 2)]
        root_end = pool.submit(
            root.publish, blocked(), build_manifest(weights(), 16), epoch=1, policy_version=1, bucket_timeout_s=60
        )
        assert stuck.wait(MEET_S)
        start = time.monotonic()
        root.abort("the test says so")
        aborted.set()
        ends: list[Future[Any]] = [*receivers, root_end]
        for end in ends:
            with pytest.raises(ChannelBrokenError, match="the test says so"):
                end.result(timeout=MEET_S)
        assert time.monotonic() - start < 20


def test_an_abort_in_the_midst_of_handing_over_buckets_does_not_leave_the_root_to_end_the_stuck_ones(
    backend: WeightBackend,
) -> None:
    """The receiver keeps its transfer, and with it its end of every connection, as one that is stopped does."""
    bucket = torch.zeros(2**20, dtype=torch.uint8)

    def hand_over(channel: Channel) -> float:
        try:
            for transfer in [channel.broadcast(bucket, MEET_S) for _ in range(100)]:
                transfer.wait(MEET_S)
        except ChannelBrokenError:
            return time.monotonic()
        pytest.fail("every bucket went")

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the threads meet at every line, as on a busy machine
    try:
        for number in range(12):
            host = RendezvousServer("127.0.0.1")
            rendezvous = host.enter(1)
            with ThreadPoolExecutor(2) as pool:
                joining = pool.submit(join, rendezvous, 2, backend, CPU, MEET_S)
                with member(backend, host.address, 1, 1, 2) as receiver:
                    kept = receiver.broadcast(torch.empty_like(bucket), MEET_S)
                    root = joining.result()
                    handing_over = pool.submit(hand_over, root)
                    time.sleep(number * 2e-4)
                    started = time.monotonic()
                    rendezvous.abort("the test says so")
                    assert handing_over.result() - started < MEET_S / 2
                    del kept
            rendezvous.close()
    finally:
        sys.setswitchinterval(interval_s)


def test_one_receiver_that_gives_up_frees_the_root_and_the_other(backend: WeightBackend) -> None:
    def give_up(address: str) -> None:
        with member(backend, address, 1, 1, 3) as channel:
            agreed_manifest(channel.rendezvous, MEET_S)
            channel.rendezvous.abort("out of memory")

    with publisher() as root, ThreadPoolExecutor(2) as pool:
        address = root.open(1, 3, "127.0.0.1", backend, MEET_S)
        given_up, other = pool.submit(give_up, address), pool.submit(receive, backend, address, 1, 2, 3, 1, 60.0)
        with pytest.raises(ChannelBrokenError):
            root.publish(iter(weights()), build_manifest(weights(), 16), epoch=1, policy_version=1, bucket_timeout_s=60)
        with pytest.raises(ChannelBrokenError):
            other.result(timeout=MEET_S)
        given_up.result()


def test_an_abort_while_the_ranks_still_meet_waits_for_nobody(backend: WeightBackend) -> None:
    with publisher() as root:
        root.open(1, 2, "127.0.0.1", backend, 60.0)  # the other never comes
        time.sleep(1)  # the communicator waits in the store by now
        start = time.monotonic()
        root.abort("enough")
        root.open(2, 1, "127.0.0.1", backend, MEET_S)
        root.publish(
            iter(weights()), build_manifest(weights(), 1024), epoch=2, policy_version=1, bucket_timeout_s=MEET_S
        )
        assert time.monotonic() - start < 20


def test_after_a_broken_epoch_a_new_one_works(backend: WeightBackend) -> None:
    manifest = build_manifest(weights(), 1024)
    with publisher() as root, ThreadPoolExecutor(1) as pool:
        root.open(1, 2, "127.0.0.1", backend, MEET_S)
        root.abort("a receiver died")
        with pytest.raises(ChannelBrokenError, match="a receiver died"):
            root.publish(iter(weights()), manifest, epoch=1, policy_version=1, bucket_timeout_s=MEET_S)
        address = root.open(2, 2, "127.0.0.1", backend, MEET_S)
        receiver = pool.submit(receive, backend, address, 2, 1, 2)
        sent = root.publish(iter(weights()), manifest, epoch=2, policy_version=2, bucket_timeout_s=MEET_S)
        assert receiver.result()[0][1].digest == sent.digest


def test_what_an_epoch_leaves_in_the_rendezvous_goes_with_it_and_late_ranks_still_hear_that_it_is_over(
    backend: WeightBackend,
) -> None:
    manifest = build_manifest(weights(), 1024)
    with publisher() as root:
        addresses = []
        for epoch in range(1, 5):
            addresses.append(root.open(epoch, 1, "127.0.0.1", backend, MEET_S))
            root.publish(iter(weights()), manifest, epoch=epoch, policy_version=epoch, bucket_timeout_s=MEET_S)
        for epoch, address in enumerate(addresses[:2], start=1):
            with pytest.raises(ChannelBrokenError, match="nobody answers"):
                Rendezvous(address, epoch, 1, 0.5)
        late = Rendezvous(addresses[2], 3, 1, MEET_S)
        with pytest.raises(ChannelBrokenError, match="epoch 4 was opened"):
            late.take("never offered", MEET_S)
        late.close()


def test_a_rank_that_meets_nobody_says_why_the_epoch_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.weights.rendezvous.WATCH_S", 30.0)  # its watcher has not looked yet
    host = RendezvousServer("127.0.0.1")
    root, other = host.enter(1), Rendezvous(host.address, 1, 1, MEET_S)
    root.abort("epoch 2 was opened")
    with pytest.raises(ChannelBrokenError, match="epoch 2 was opened"):
        join(other, 2, "gloo", CPU, SHORT_S)
    other.close()
    root.close()


def test_a_rank_that_cannot_take_part_frees_those_that_wait_for_it(backend: WeightBackend) -> None:
    host = RendezvousServer("127.0.0.1")
    root, other = host.enter(1), Rendezvous(host.address, 1, 1, MEET_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, root, 2, backend, CPU, SHORT_S)
        with pytest.raises(NotOnThisDeviceError):
            join(other, 2, "nccl", CPU, SHORT_S)
        with pytest.raises(ChannelBrokenError, match=r"rank 1: weights\.backend nccl needs a CUDA device"):
            waiting.result()
    root.close()
    other.close()


FROZEN = """
import time
from rolecall.weights.rendezvous import RendezvousServer
server = RendezvousServer("127.0.0.1")
print(server.address, flush=True)
time.sleep(600)
"""
"""An actor that does nothing but answer at its rendezvous, until it is frozen."""


def test_a_frozen_actor_holds_nobody_who_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.weights.rendezvous._STORE_TIMEOUT", timedelta(seconds=1))
    with subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True) as actor:
        try:
            assert actor.stdout is not None
            address = actor.stdout.readline().strip()
            ranks = [Rendezvous(address, 1, rank, MEET_S) for rank in (1, 2, 3)]
            actor.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(actor.pid, os.WUNTRACED)[1])  # else a thread of it may answer once more
            with ThreadPoolExecutor(4) as pool:
                asked: list[Future[Any]] = [
                    pool.submit(ranks[0].take, "manifest", MEET_S),
                    pool.submit(ranks[1].has, ["manifest"]),
                    pool.submit(ranks[2].check_now),
                    pool.submit(Rendezvous, address, 2, 1, 1.0),
                ]
                errors = [future.exception(MEET_S) for future in asked]
            assert [type(error) for error in errors] == [
                ChannelBrokenError,
                type(None),  # has says no, and its epoch is broken
                ChannelBrokenError,
                ChannelUnreachableError,
            ]
            assert [rendezvous.broken for rendezvous in ranks] == ["the actor's rendezvous does not answer"] * 3
        finally:
            actor.kill()


class SkippingChannel:
    """A root's channel with a planted fault: it never sends one of its buckets."""

    def __init__(self, channel: Channel, skipped: int) -> None:
        self.rendezvous, self.world_size, self.device = channel.rendezvous, channel.world_size, channel.device
        self.takes_deltas = channel.takes_deltas
        self._channel, self._skipped, self._count = channel, skipped, -1

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> Transfer:
        """Channel.broadcast, but for the skipped bucket, which counts as sent."""
        self._count += 1
        return Sent() if self._count == self._skipped else self._channel.broadcast(bucket, timeout_s)

    def close(self) -> None:
        """Channel.close."""
        self._channel.close()


class Sent:
    """A transfer that is already done."""

    def wait(self, timeout_s: float) -> None:
        """At once."""


def _send_skipping(
    backend: WeightBackend,
    host: RendezvousServer,
    named: list[tuple[str, torch.Tensor]],
    skipped: int,
    extra: bool,
    receiver: "Future[list[Received]]",
) -> Transferred:
    manifest = build_manifest(named, 1024)
    rendezvous = host.enter(1)
    offer_manifest(rendezvous, manifest)
    channel = join(rendezvous, 2, backend, CPU, MEET_S)
    try:
        sent = send(SkippingChannel(channel, skipped), iter(named), manifest, MEET_S)
        if extra:  # so that the counts agree and only the contents do not
            channel.broadcast(torch.zeros(1024, dtype=torch.uint8), MEET_S).wait(MEET_S)
        wait([receiver], MEET_S)
        return sent
    finally:
        rendezvous.close()
        channel.close()


def test_a_skipped_bucket_shows_in_the_fingerprints_of_all_that_came_after_it(backend: WeightBackend) -> None:
    named = [(f"w{i}", torch.full((256,), float(i))) for i in range(6)]
    with ThreadPoolExecutor(1) as pool:
        host = RendezvousServer("127.0.0.1")
        receiver = pool.submit(receive, backend, host.address, 1, 1, 2)
        sent = _send_skipping(backend, host, named, skipped=2, extra=True, receiver=receiver)
        ((_, arrived),) = receiver.result()
    assert [a == b for a, b in zip(arrived.fingerprints.values(), sent.fingerprints.values(), strict=True)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert arrived.digest != sent.digest


def test_a_skipped_last_bucket_ends_at_the_receivers_deadline(backend: WeightBackend) -> None:
    named = [(f"w{i}", torch.full((256,), float(i))) for i in range(3)]
    with ThreadPoolExecutor(1) as pool:
        host = RendezvousServer("127.0.0.1")
        receiver = pool.submit(receive, backend, host.address, 1, 1, 2, 1, 1.0)
        _send_skipping(backend, host, named, skipped=2, extra=False, receiver=receiver)
        with pytest.raises(ChannelBrokenError):
            receiver.result()


def test_a_key_that_never_comes_ends_at_the_deadline_and_an_abort_ends_the_wait_at_once() -> None:
    host = RendezvousServer("127.0.0.1")
    root, other = host.enter(1), Rendezvous(host.address, 1, 1, MEET_S)
    with pytest.raises(ChannelBrokenError, match="'never'"):
        other.take("never", 0.2)
    with pytest.raises(ChannelBrokenError, match="rank 1 waited"):  # it has given the epoch up
        root.take("never", MEET_S)
    root.close()
    other.close()
    root, other = host.enter(2), Rendezvous(host.address, 2, 1, MEET_S)
    root.abort("told so")
    with pytest.raises(ChannelBrokenError, match="told so"):
        other.take("never", MEET_S)
    root.close()
    other.close()


def test_a_rendezvous_that_nobody_serves_is_a_broken_channel() -> None:
    with pytest.raises(ChannelBrokenError, match="nobody answers"):
        Rendezvous("127.0.0.1:9", 1, 1, 0.5)


def test_an_epoch_that_breaks_calls_back_once_also_when_asked_late() -> None:
    calls: Future[str] = Future()
    rendezvous = RendezvousServer("127.0.0.1").enter(1)
    rendezvous.on_broken(lambda: calls.set_result("early"))
    rendezvous.abort("over")
    rendezvous.abort("over again")
    assert calls.result(timeout=MEET_S) == "early"
    late: list[str] = []
    rendezvous.on_broken(lambda: late.append("late"))
    assert late == ["late"]
    assert rendezvous.broken == "over"
    rendezvous.close()


def test_nccl_is_refused_by_name_where_there_is_no_gpu() -> None:
    rendezvous = RendezvousServer("127.0.0.1").enter(1)
    with pytest.raises(NotOnThisDeviceError, match="gloo"):
        join(rendezvous, 2, "nccl", CPU, 1.0)
    rendezvous.close()
    if not torch.distributed.is_nccl_available():
        with pytest.raises(NotOnThisDeviceError, match="no NCCL"):
            NcclLibrary()


def test_a_host_that_the_actors_machine_does_not_have_names_its_setting() -> None:
    with publisher() as root, pytest.raises(ConfigError, match=r"weights\.host 192\.0\.2\.1: .* cannot listen there"):
        root.open(1, 1, "192.0.2.1", "shared", MEET_S)


def test_nobody_is_to_blame_where_the_rendezvous_does_not_answer() -> None:
    host = RendezvousServer("127.0.0.1")
    rendezvous = Rendezvous(host.address, 1, 1, MEET_S)
    assert rendezvous.laggards(3) == [1, 2]
    del host
    assert rendezvous.laggards(3) == []
    rendezvous.close()
