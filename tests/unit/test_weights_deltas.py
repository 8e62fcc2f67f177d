"""Deltas over a real Gloo channel between threads of one process: what travels, what arrives, and what may be built
upon after something went wrong.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from rolecall.errors import ChannelBrokenError, RoleCallError, WeightsMismatchError
from rolecall.settings import WeightBackend
from rolecall.v1 import weights_pb2
from rolecall.weights.channel import Channel, join
from rolecall.weights.deltas.base import Base, Header
from rolecall.weights.fingerprint import fingerprint
from rolecall.weights.manifest import build_manifest, plan_buckets
from rolecall.weights.publisher import Publisher
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred

CPU = torch.device("cpu")
MEET_S = 30.0
"""Deadline of meetings and buckets here: far more than they take, far less than the test's own."""
Named = list[tuple[str, torch.Tensor]]


def model(seed: int = 0) -> Named:
    """Tensors of several dtypes and sizes: some share a bucket, one is larger than it, one is empty."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32, torch.uint8)
    named = [
        (f"layer.{i}", (torch.randn(40 * i + 1, 13, generator=generator) * 50).abs().to(dtypes[i % 4]))
        for i in range(12)
    ]
    return [*named, ("empty", torch.zeros(0, 5)), ("scalar", torch.tensor(7.0))]


def changed(named: Named, share: float, seed: int) -> Named:
    """A version in which about `share` of the elements have other bits."""
    generator = torch.Generator().manual_seed(seed)
    after = []
    for name, tensor in named:
        flips = (torch.rand(tensor.shape, generator=generator) < share).to(torch.uint8)
        data = tensor.clone().reshape(-1).view(torch.uint8).reshape(-1, tensor.element_size())
        data[:, 0] ^= flips.reshape(-1)
        after.append((name, data.reshape(-1).view(tensor.dtype).reshape(tensor.shape)))
    return after


class Member:
    """A receiver in one epoch, which takes transfer after transfer."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.manifest = agreed_manifest(channel.rendezvous, MEET_S)
        self.base = Base()

    def take(self) -> tuple[dict[str, torch.Tensor], Transferred]:
        """The next transfer."""
        reception = Reception(self.channel, self.manifest, MEET_S, self.base)
        return {name: tensor for named in reception for name, tensor in named}, reception.result()


def take(member: Future[Member]) -> tuple[dict[str, torch.Tensor], Transferred]:
    """The next transfer, once the member has joined."""
    return member.result().take()


class Fleet:
    """A publisher and its receivers, whose epochs and transfers a test asks for one after the other."""

    def __init__(self, num_receivers: int, pool: ThreadPoolExecutor, backend: WeightBackend) -> None:
        self.root, self._num, self._pool, self._backend = Publisher(CPU), num_receivers, pool, backend
        self.epoch = self.version = 0
        self.members: list[Future[Member]] = []
        self._open: list[Channel] = []

    def new_epoch(self, num_receivers: int | None = None) -> None:
        """Opens an epoch, which the receivers join once something is published."""
        self._num = num_receivers or self._num
        self.leave()
        self.epoch += 1
        address = self.root.open(self.epoch, 1 + self._num, "127.0.0.1", self._backend, MEET_S)
        self.members = [self._pool.submit(self._join, address, rank) for rank in range(1, 1 + self._num)]

    def publish(
        self, named: Named | Iterator[tuple[str, torch.Tensor]], like: Named
    ) -> tuple[Transferred, list[tuple[dict[str, torch.Tensor], Transferred]]]:
        """What the root sent and every receiver got."""
        self.version += 1
        taking = [self._pool.submit(take, member) for member in self.members]
        try:
            sent = self.root.publish(
                iter(named), manifest_of(like), epoch=self.epoch, policy_version=self.version, bucket_timeout_s=MEET_S
            )
        except RoleCallError:
            for each in taking:
                with suppress(RoleCallError):
                    each.result()
            raise
        return sent, [each.result() for each in taking]

    def leave(self) -> None:
        """Ends every receiver's part in the epoch."""
        for channel in self._open:
            channel.close()
            channel.rendezvous.close()
        self._open = []

    def _join(self, address: str, rank: int) -> Member:
        channel = join(Rendezvous(address, self.epoch, rank, MEET_S), 1 + self._num, self._backend, CPU, MEET_S)
        self._open.append(channel)
        return Member(channel)


@contextmanager
def fleet(num_receivers: int = 1, backend: WeightBackend = "gloo") -> Iterator[Fleet]:
    """A fleet in its first epoch, closed at the end."""
    with ThreadPoolExecutor(8) as pool:
        made = Fleet(num_receivers, pool, backend)
        try:
            made.new_epoch()
            yield made
        finally:
            made.root.close()
            made.leave()


def manifest_of(named: Named) -> weights_pb2.WeightManifest:
    """A manifest with deltas and small buckets."""
    return build_manifest(named, 4096, deltas=True)


def wire_bytes_of_headers(named: Named) -> int:
    """Bytes of a transfer in which nothing changed."""
    return Header.NUM_BYTES * len(plan_buckets(manifest_of(named)))


def require_equal(named: Named, sent: Transferred, got: list[tuple[dict[str, torch.Tensor], Transferred]]) -> None:
    """Every receiver has every bit, and both sides say so by the fingerprints of whole tensors."""
    prints = {name: fingerprint(tensor) for name, tensor in named}
    for tensors, arrived in got:
        assert sent.fingerprints == arrived.fingerprints == prints
        assert (sent.digest, sent.num_bytes, sent.wire_bytes) == (arrived.digest, arrived.num_bytes, arrived.wire_bytes)
        assert list(tensors) == [name for name, _ in named]
        for name, tensor in named:
            assert bytes(tensors[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))


def test_consecutive_versions_arrive_whole_and_only_what_changed_travels() -> None:
    with fleet(num_receivers=2) as rig:
        named, whole = model(), wire_bytes_of_headers(model())
        sent, got = rig.publish(named, named)
        require_equal(named, sent, got)
        assert sent.wire_bytes == sent.num_bytes + whole
        first = got[0][0]
        for number, share in enumerate((0.01, 0.0, 0.2, 0.01, 1.0, 0.05), start=1):
            named = changed(named, share, seed=number)
            sent, got = rig.publish(named, named)
            require_equal(named, sent, got)
            most = {0.0: 0.0, 0.01: 0.1, 0.05: 0.3, 0.2: 0.5, 1.0: 1.0}[share] * sent.num_bytes
            assert sent.wire_bytes <= most + whole, (share, sent.wire_bytes, sent.num_bytes)
        # What the engine was given first is still what it was: no delta is applied to it.
        assert all(torch.equal(first[name], tensor) for name, tensor in model())


def test_each_bucket_goes_the_shorter_way_by_itself() -> None:
    with fleet() as rig:
        named = [("dense", torch.randn(4096)), ("sparse", torch.randn(4096)), ("same", torch.randn(4096))]
        rig.publish(named, named)
        after = [("dense", torch.randn(4096)), ("sparse", named[1][1].clone()), named[2]]
        after[1][1][::100] += 1
        sent, got = rig.publish(after, named)
        require_equal(after, sent, got)
        assert sent.wire_bytes == 4 * 4096 + 41 * (1 + 4) + 3 * Header.NUM_BYTES


def test_what_lies_between_two_tensors_never_counts_as_changed() -> None:
    odd = [(f"w{i}", torch.full((3,), i % 256, dtype=torch.uint8)) for i in range(2000)]  # mostly padding
    with fleet() as rig:
        for _ in range(2):
            sent, got = rig.publish(odd, odd)
            require_equal(odd, sent, got)
    assert sent.wire_bytes == wire_bytes_of_headers(odd)


def test_a_joiner_gets_everything_in_a_new_epoch_and_so_does_everybody() -> None:
    with fleet() as rig:
        named = model()
        rig.publish(named, named)
        rig.new_epoch(num_receivers=2)
        named = changed(named, 0.01, seed=1)
        sent, got = rig.publish(named, named)
        require_equal(named, sent, got)
        assert sent.wire_bytes == sent.num_bytes + wire_bytes_of_headers(named)
        named = changed(named, 0.01, seed=2)
        sent, got = rig.publish(named, named)
        require_equal(named, sent, got)
        assert sent.wire_bytes < sent.num_bytes / 10


def test_nothing_is_built_upon_a_transfer_that_was_aborted() -> None:
    def gives_up(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named[:6]
        rig.root.abort("the test says so")
        yield from named[6:]

    with fleet(num_receivers=2) as rig:
        named = model()
        rig.publish(named, named)
        broken = changed(named, 0.01, seed=1)
        with pytest.raises(ChannelBrokenError, match="the test says so"):
            rig.publish(gives_up(broken), broken)
        rig.new_epoch()
        for seed in (2, 3):  # the first goes whole, the second as a delta of it
            named = changed(broken, 0.01, seed)
            sent, got = rig.publish(named, named)
            require_equal(named, sent, got)
        assert sent.wire_bytes < sent.num_bytes / 10


def test_half_a_transfer_is_no_base_even_within_an_epoch() -> None:
    bucket = plan_buckets(build_manifest([("w", torch.zeros(256))], 1024))[0]
    one, other = (torch.full((256,), value).view(torch.uint8) for value in (1.0, 2.0))
    root, receiver = Base(), Base()
    for base in (root, receiver):
        base.begin()
    header, travels = root.delta_of(0, bucket, one)
    receiver.bucket_of(0, bucket, header, travels)
    root.end("ab" * 32)  # the receiver never hears that it is over
    for base in (root, receiver):
        base.begin()
    header, travels = root.delta_of(0, bucket, torch.cat([other[:4], one[4:]]))
    assert header.num_bytes < bucket.num_bytes
    with pytest.raises(WeightsMismatchError, match="open a new epoch"):
        receiver.bucket_of(0, bucket, header, travels)


def test_a_receiver_that_holds_another_base_says_so_before_it_applies_anything_and_a_new_epoch_heals_it() -> None:
    with fleet(num_receivers=2) as rig:
        named = model()
        rig.publish(named, named)
        rig.members[1].result().base.end("cd" * 32)  # planted: it holds other weights than it says
        named = changed(named, 0.01, seed=1)
        with pytest.raises(ChannelBrokenError):
            publish_and_abort_as_receivers_do(rig, named)
        rig.new_epoch()
        sent, got = rig.publish(named, named)
        require_equal(named, sent, got)


def publish_and_abort_as_receivers_do(rig: Fleet, named: Named) -> None:
    """A publish in which whoever fails to receive aborts the epoch, as Receiver does."""
    failures: list[RoleCallError] = []
    rig.version += 1

    def take(member: Member) -> None:
        try:
            member.take()
        except RoleCallError as error:
            failures.append(error)
            member.channel.rendezvous.abort(error.message)

    threads = [threading.Thread(target=take, args=(member.result(),)) for member in rig.members]
    for thread in threads:
        thread.start()
    try:
        rig.root.publish(
            iter(named), manifest_of(named), epoch=rig.epoch, policy_version=rig.version, bucket_timeout_s=MEET_S
        )
    finally:
        for thread in threads:
            thread.join(MEET_S)
        assert any(isinstance(error, WeightsMismatchError) for error in failures)


def test_a_copy_whose_bits_turned_shows_in_the_fingerprints() -> None:
    with fleet() as rig:
        named = model()
        rig.publish(named, named)
        rig.members[0].result().base._buckets[3][5] ^= 4
        named = changed(named, 0.001, seed=1)
        sent, ((_, arrived),) = rig.publish(named, named)
    differ = [name for name in sent.fingerprints if sent.fingerprints[name] != arrived.fingerprints[name]]
    assert len(differ) == 1
    assert arrived.digest != sent.digest


def test_memory_that_is_shared_needs_no_deltas() -> None:
    with fleet(backend="shared") as rig:
        named = model()
        for _ in range(2):
            sent, got = rig.publish(named, named)
            require_equal(named, sent, got)
            assert sent.wire_bytes == sent.num_bytes
        assert not rig.members[0].result().manifest.deltas
