"""Several roots of one epoch of the weight channel, between threads of one process: who is served by whom, and what a
lost receiver, a late root and a newer epoch come to.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from rolecall.errors import ChannelBrokenError, StaleEpochError, StaleVersionError
from rolecall.settings import WeightBackend
from rolecall.weights.channel import join
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import FurtherRoot, Publisher
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.shared_memory.ring import SharedReceiver, SharedRoot
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred

CPU = torch.device("cpu")
MEET_S = 30.0
SHORT_S = 3.0
"""Deadline of a meeting that fails."""


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Tensors of several sizes, some larger than the tests' buckets."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(7 * i + 1, 13, generator=generator)) for i in range(12)]


# as of `weights.deltas`, which an epoch over shared memory does without
MANIFEST = build_manifest(weights(), 1024, deltas=True)


class Roots:
    """An actor of several ranks, each of which is a root; their publishes run on threads of their own."""

    def __init__(self, num_roots: int) -> None:
        self.first = Publisher(CPU)
        self.further = [FurtherRoot(CPU) for _ in range(num_roots - 1)]
        self._pool = ThreadPoolExecutor(num_roots)
        self._world_size = 0

    def open(self, epoch: int, num_receivers: int, timeout_s: float = MEET_S, **options: bool) -> str:
        """Opens an epoch of which the further roots do not know yet; its address."""
        self._world_size = 1 + num_receivers
        num_roots = 1 + len(self.further)
        return self.first.open(
            epoch, self._world_size, "127.0.0.1", "shared", timeout_s, num_roots=num_roots, **options
        )

    def stand_by(self, epoch: int, address: str, timeout_s: float = MEET_S) -> None:
        """Tells them."""
        for number, root in enumerate(self.further, start=1):
            root.stand_by(epoch, address, self._world_size, number, timeout_s)

    def publish(
        self, epoch: int, version: int, timeout_s: float = MEET_S, seed: int = 0
    ) -> tuple[Future[Transferred], list[Future[list[str]]]]:
        """The first root's publish, and the names that each further one has gathered."""
        return (
            self._pool.submit(
                self.first.publish,
                iter(weights(seed)),
                MANIFEST,
                epoch=epoch,
                policy_version=version,
                bucket_timeout_s=timeout_s,
            ),
            [self._pool.submit(self._beside, root, epoch, timeout_s, seed) for root in self.further],
        )

    def _beside(self, root: FurtherRoot, epoch: int, timeout_s: float, seed: int) -> list[str]:
        """The names that were gathered, also where not all of them were sent."""
        gathered: list[str] = []

        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights(seed):
                gathered.append(name)
                yield name, tensor

        with suppress(ChannelBrokenError):
            root.publish(gather(), epoch=epoch, bucket_timeout_s=timeout_s)
        return gathered

    def close(self) -> None:
        """Ends them."""
        self.first.close()
        for root in self.further:
            root.close()
        self._pool.shutdown()


@contextmanager
def roots(num_roots: int) -> Iterator[Roots]:
    """Roots that are closed at the end, whatever happens."""
    actor = Roots(num_roots)
    try:
        yield actor
    finally:
        actor.close()


def receive(
    address: str,
    epoch: int,
    rank: int,
    world_size: int,
    num_versions: int = 1,
    backend: WeightBackend = "shared",
) -> tuple[list[tuple[dict[str, torch.Tensor], Transferred]], str]:
    """What arrives, and the kind of channel over which."""
    rendezvous = Rendezvous(address, epoch, rank, MEET_S)
    try:
        channel = join(rendezvous, world_size, backend, CPU, MEET_S)
        manifest, received = agreed_manifest(rendezvous, MEET_S), []
        for _ in range(num_versions):
            reception = Reception(channel, manifest, MEET_S)
            tensors = {name: tensor for bucket in reception for name, tensor in bucket}
            received.append((tensors, reception.result()))
        return received, type(channel).__name__
    finally:
        rendezvous.close()


def until_broken(named: list[tuple[str, torch.Tensor]], other: Future[None]) -> Iterator[tuple[str, torch.Tensor]]:
    """As gathered by a rank whose second tensor waits for the other rank, whose receiver is gone."""
    yield named[0]
    with pytest.raises(ChannelBrokenError, match="rank 1 closed its end"):
        other.result(MEET_S)
    yield from named[1:]


@pytest.mark.parametrize(("num_roots", "num_receivers"), [(2, 3), (3, 3), (4, 2)])
def test_every_receiver_gets_the_first_roots_weights_from_whichever_root_it_came_to(
    num_roots: int, num_receivers: int
) -> None:
    with roots(num_roots) as actor, ThreadPoolExecutor(num_receivers) as pool:
        address = actor.open(1, num_receivers)
        receivers = [
            pool.submit(receive, address, 1, rank, 1 + num_receivers, 2) for rank in range(1, 1 + num_receivers)
        ]
        actor.stand_by(1, address)
        sent = []
        for version in (1, 2):
            first, further = actor.publish(1, version, seed=version)
            sent.append(first.result(MEET_S))
            assert all(each.result(MEET_S) == [name for name, _ in weights()] for each in further)
        for receiver in receivers:
            received, kind = receiver.result(MEET_S)
            assert kind == SharedReceiver.__name__
            for (tensors, arrived), one, seed in zip(received, sent, (1, 2), strict=True):
                assert arrived.digest == one.digest
                assert arrived.fingerprints == one.fingerprints
                assert all(torch.equal(tensors[name], tensor) for name, tensor in weights(seed))


def test_receivers_of_one_machine_spread_over_its_roots() -> None:
    with roots(3) as actor, ThreadPoolExecutor(6) as pool:
        address = actor.open(1, 6)
        receivers = [pool.submit(receive, address, 1, rank, 7) for rank in range(1, 7)]
        actor.stand_by(1, address)
        first, further = actor.publish(1, 1)
        first.result(MEET_S)
        for gathered in further:
            gathered.result(MEET_S)
        for receiver in receivers:
            receiver.result(MEET_S)
        served = [actor.first._channel.result(MEET_S), *(root._channel.result(MEET_S) for root in actor.further)]
        ranks = [sorted(channel._peers) for channel in served if isinstance(channel, SharedRoot)]
        assert ranks == [[3, 6], [1, 4], [2, 5]]


def test_a_receiver_of_a_further_root_that_takes_nothing_ends_the_epoch_for_all_and_is_named() -> None:
    release = threading.Event()

    def hang(address: str) -> None:
        rendezvous = Rendezvous(address, 1, 1, MEET_S)
        channel = join(rendezvous, 3, "shared", CPU, MEET_S)
        assert release.wait(2 * MEET_S)
        channel.close()
        rendezvous.close()

    big = [(f"w{i}", torch.zeros(2**21)) for i in range(12)]  # more than the ring holds
    manifest = build_manifest(big, 2**23)
    with roots(2) as actor, ThreadPoolExecutor(4) as pool:
        address = actor.open(1, 2)
        hung, other = pool.submit(hang, address), pool.submit(receive, address, 1, 2, 3)
        actor.stand_by(1, address)
        gathering = threading.Barrier(2, timeout=MEET_S)

        def together() -> Iterator[tuple[str, torch.Tensor]]:
            for named in big:  # as ranks do that gather each tensor together
                gathering.wait()
                yield named

        first = pool.submit(
            actor.first.publish, together(), manifest, epoch=1, policy_version=1, bucket_timeout_s=SHORT_S
        )
        further = pool.submit(actor.further[0].publish, together(), epoch=1, bucket_timeout_s=SHORT_S)
        with pytest.raises(ChannelBrokenError, match=r"ranks \[1\].*a bucket took more than") as failure:
            first.result(2 * MEET_S)
        assert failure.value.details["ranks"] == "1"
        with pytest.raises(ChannelBrokenError, match=r"ranks \[1\].*a bucket took more than"):
            further.result(MEET_S)
        with pytest.raises(ChannelBrokenError, match="a bucket took more than"):
            other.result(MEET_S)
        release.set()
        hung.result(MEET_S)


def test_a_receiver_of_a_further_root_that_dies_ends_the_epoch_for_all() -> None:
    def die(address: str) -> None:
        rendezvous = Rendezvous(address, 1, 1, MEET_S)
        join(rendezvous, 3, "shared", CPU, MEET_S)._root.close()  # type: ignore[attr-defined]  # as its end does

    big = [(f"w{i}", torch.zeros(2**21)) for i in range(12)]
    manifest = build_manifest(big, 2**23)
    with roots(2) as actor, ThreadPoolExecutor(4) as pool:
        address = actor.open(1, 2)
        dead, other = pool.submit(die, address), pool.submit(receive, address, 1, 2, 3)
        actor.stand_by(1, address)
        dead.result(MEET_S)
        further = pool.submit(actor.further[0].publish, iter(big), epoch=1, bucket_timeout_s=MEET_S)
        with pytest.raises(ChannelBrokenError, match="rank 1 closed its end"):
            actor.first.publish(
                until_broken(big, further), manifest, epoch=1, policy_version=1, bucket_timeout_s=MEET_S
            )
        with pytest.raises(ChannelBrokenError, match="rank 1 closed its end"):
            other.result(MEET_S)


def test_a_root_that_does_not_come_ends_the_meeting_in_time() -> None:
    with roots(2) as actor, ThreadPoolExecutor(1) as pool:
        address = actor.open(1, 1, SHORT_S)
        receiver = pool.submit(receive, address, 1, 1, 2)
        first, further = actor.publish(1, 1)
        with pytest.raises(ChannelBrokenError, match="did not meet"):
            first.result(MEET_S)
        with pytest.raises(ChannelBrokenError):
            receiver.result(MEET_S)
        assert further[0].result(MEET_S) == [name for name, _ in weights()]


def test_a_newer_epoch_ends_the_meeting_of_a_further_root_and_serves_its_receivers() -> None:
    with roots(2) as actor, ThreadPoolExecutor(2) as pool:
        before = actor.open(1, 2)
        alone = pool.submit(receive, before, 1, 1, 3)  # the other never comes
        actor.stand_by(1, before)
        address = actor.open(2, 1)
        with pytest.raises(ChannelBrokenError, match="epoch 2 was opened"):
            alone.result(MEET_S)
        receiver = pool.submit(receive, address, 2, 1, 2)
        actor.stand_by(2, address)
        first, further = actor.publish(2, 1)
        assert first.result(MEET_S).digest == receiver.result(MEET_S)[0][0][1].digest
        assert further[0].result(MEET_S) == [name for name, _ in weights()]
        with pytest.raises(StaleEpochError, match="epoch 1"):
            actor.stand_by(1, before)


def test_an_epoch_of_which_a_further_root_was_not_told_is_gathered_and_not_sent() -> None:
    with roots(2) as actor, ThreadPoolExecutor(1) as pool:
        address = actor.first.open(1, 2, "127.0.0.1", "gloo", MEET_S)
        receiver = pool.submit(receive, address, 1, 1, 2, 1, "gloo")
        first, further = actor.publish(1, 1)
        assert first.result(MEET_S).digest == receiver.result(MEET_S)[0][0][1].digest
        assert further[0].result(MEET_S) == [name for name, _ in weights()]


def test_what_rank_0_would_refuse_to_publish_is_known_before_the_others_begin() -> None:
    with roots(1) as actor:
        actor.open(1, 0)
        actor.first.require(1, 5)
        actor.first.publish(iter(weights()), MANIFEST, epoch=1, policy_version=5, bucket_timeout_s=MEET_S)
        with pytest.raises(StaleVersionError):
            actor.first.require(1, 5)
        with pytest.raises(StaleEpochError):
            actor.first.require(2, 6)


def test_an_earlier_epoch_can_be_ended_before_the_new_one_is_opened() -> None:
    with roots(1) as actor, ThreadPoolExecutor(1) as pool:
        address = actor.open(3, 2)
        receiver = pool.submit(receive, address, 3, 1, 3)  # the other never comes
        actor.first.end_before(3)
        assert not receiver.done()
        actor.first.end_before(4)
        with pytest.raises(ChannelBrokenError, match="epoch 4 was opened"):
            receiver.result(MEET_S)
