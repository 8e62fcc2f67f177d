"""One transfer: buckets out of named weights at the root, named tensors out of buckets at a receiver, two in flight on
both sides.

Owns packing, unpacking and the fingerprints of what was sent and what arrived. Memory: the root packs into
IN_FLIGHT + 1 buckets in turn, one more with deltas, and holds as many buckets' source tensors. A receiver's bucket is
never reused, because its engine may keep views of it until a layer is whole.

Where the manifest says deltas, each bucket travels as a delta or whole, as its header says. The header of a bucket goes
before the bucket ahead of it, so that a receiver knows its size in time and the wire never waits for a round trip:
H0 H1 B0 H2 B1 ... Fingerprints are those of whole tensors either way: of what a receiver made of a delta.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from rolecall.errors import WeightsMismatchError
from rolecall.v1 import weights_pb2
from rolecall.weights.channel import Channel, Transfer
from rolecall.weights.deltas.base import Base, Header
from rolecall.weights.fingerprint import digest, fingerprint_on_device, unsigned
from rolecall.weights.manifest import ALIGNMENT, Bucket, Slot, plan_buckets, validate_manifest
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transferred import Transferred

IN_FLIGHT = 2
"""Most broadcasts under way at a time."""
_SLOWEST_BYTES_PER_S = 20e6
"""Rate of a bucket that is more than a few megabytes: a wire of 1 Gbit/s, over which the root sends six copies."""
_MANIFEST_KEY = "manifest"


def send(
    channel: Channel,
    weights: Iterator[tuple[str, torch.Tensor]],
    manifest: weights_pb2.WeightManifest,
    bucket_timeout_s: float,
    base: Base | None = None,
) -> Transferred:
    """Sends `weights`, which must come as the manifest says, to every receiver. ChannelBrokenError,
    WeightsMismatchError. `base`: what the epoch's receivers hold; absent: nothing, and all goes whole.
    """
    prints: list[torch.Tensor] = []
    start = time.monotonic()
    base = base or Base()
    base.begin()

    def look(sources: list[torch.Tensor]) -> None:
        prints.extend(fingerprint_on_device(source) for source in sources)

    wire_bytes = _send(channel, weights, manifest, bucket_timeout_s, base, look)
    sent = _transferred(manifest, prints, plan_buckets(manifest), time.monotonic() - start, wire_bytes)
    base.end(sent.digest)
    return sent


def send_beside(
    channel: Channel,
    weights: Iterator[tuple[str, torch.Tensor]],
    manifest: weights_pb2.WeightManifest,
    bucket_timeout_s: float,
) -> None:
    """Sends as `send` does, for a root beside the first, which alone says what was sent."""
    _send(channel, weights, manifest, bucket_timeout_s, Base(), lambda sources: None)


def _send(
    channel: Channel,
    weights: Iterator[tuple[str, torch.Tensor]],
    manifest: weights_pb2.WeightManifest,
    bucket_timeout_s: float,
    base: Base,
    look: Callable[[list[torch.Tensor]], None],
) -> int:
    """Returns the bytes that travelled to each receiver; `look` is called with each bucket's tensors while it
    travels.
    """
    buckets = plan_buckets(manifest)
    outbox = _Outbox(channel, _longest_s(buckets, bucket_timeout_s))
    common = max((bucket.num_bytes for bucket in buckets if bucket.num_bytes <= manifest.bucket_bytes), default=0)
    num_turns = IN_FLIGHT + 1 + manifest.deltas
    turns = cycle(torch.empty((num_turns, common), dtype=torch.uint8, device=channel.device))
    for number, bucket in enumerate(buckets):
        # its turn comes when the transfer that used it last has been waited for
        memory = (
            next(turns)[: bucket.num_bytes]
            if bucket.num_bytes <= common
            else torch.empty(bucket.num_bytes, dtype=torch.uint8, device=channel.device)
        )
        sources = _pack(bucket, memory, weights)
        if bucket is buckets[-1]:
            _refuse_more(weights)
        if manifest.deltas:
            outbox.put_after_next_header(*base.delta_of(number, bucket, memory))
        else:
            outbox.put(memory)
        look(sources)
    outbox.flush()
    return outbox.num_bytes


def offer_manifest(rendezvous: Rendezvous, manifest: weights_pb2.WeightManifest) -> None:
    """The root says, once per epoch, what every transfer of it carries. InvalidInputError."""
    validate_manifest(manifest)
    rendezvous.offer(_MANIFEST_KEY, manifest.SerializeToString(deterministic=True))


def agreed_manifest(rendezvous: Rendezvous, timeout_s: float) -> weights_pb2.WeightManifest:
    """Returns what the root offered, within `timeout_s`. ChannelBrokenError, InvalidInputError."""
    manifest = weights_pb2.WeightManifest.FromString(rendezvous.take(_MANIFEST_KEY, timeout_s))
    validate_manifest(manifest)
    return manifest


class Reception:
    """The receiver's side of one transfer: iterate it for the tensors of each bucket, then ask `result`."""

    def __init__(
        self,
        channel: Channel,
        manifest: weights_pb2.WeightManifest,
        bucket_timeout_s: float,
        base: Base | None = None,
    ) -> None:
        """`base`: what this receiver holds since the epoch began, for deltas; absent: nothing, so that it refuses
        them.
        """
        self._channel, self._manifest = channel, manifest
        self._timeout_s = _longest_s(plan_buckets(manifest), bucket_timeout_s)
        self._base = base or Base()
        self._prints: list[torch.Tensor] = []
        self._num_bytes = 0
        self._start = time.monotonic()

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """(name, tensor) of each bucket in the manifest's order; the tensors stay valid for as long as they are kept.
        ChannelBrokenError, WeightsMismatchError.
        """
        self._base.begin()
        buckets = plan_buckets(self._manifest)
        pending: deque[_Arrival] = deque()
        for arrival in self._deltas(buckets) if self._manifest.deltas else self._whole(buckets):
            pending.append(arrival)
            if len(pending) == IN_FLIGHT:
                yield self._unpack(pending.popleft())
        while pending:
            yield self._unpack(pending.popleft())
        self._end = time.monotonic()

    def result(self) -> Transferred:
        """Returns what arrived; call it after the last bucket."""
        buckets, transfer_s = plan_buckets(self._manifest), self._end - self._start
        arrived = _transferred(self._manifest, self._prints, buckets, transfer_s, self._num_bytes)
        self._base.end(arrived.digest)
        return arrived

    def _whole(self, buckets: list[Bucket]) -> "Iterator[_Arrival]":
        for number, bucket in enumerate(buckets):
            yield _Arrival(number, bucket, None, *self._begin(bucket.num_bytes))

    def _deltas(self, buckets: list[Bucket]) -> "Iterator[_Arrival]":
        """Asks for each header as early as the root sends it: before the bucket ahead of its own."""
        memory, transfer = self._begin(Header.NUM_BYTES)
        for number, bucket in enumerate(buckets):
            transfer.wait(self._timeout_s)
            header = Header.of(memory)
            if number + 1 < len(buckets):
                memory, transfer = self._begin(Header.NUM_BYTES)
            yield _Arrival(number, bucket, header, *self._begin(header.num_bytes))

    def _begin(self, num_bytes: int) -> tuple[torch.Tensor, Transfer]:
        self._num_bytes += num_bytes
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._channel.device)
        return memory, self._channel.broadcast(memory, self._timeout_s)

    def _unpack(self, arrival: "_Arrival") -> list[tuple[str, torch.Tensor]]:
        arrival.transfer.wait(self._timeout_s)
        self._channel.rendezvous.report_progress()
        memory = arrival.memory
        if arrival.header is not None:
            memory = self._base.bucket_of(arrival.number, arrival.bucket, arrival.header, memory)
        tensors = [(slot.name, slot.view(memory)) for slot in arrival.bucket.slots]
        self._prints += [fingerprint_on_device(tensor) for _, tensor in tensors]
        return tensors


@dataclass(frozen=True)
class _Arrival:
    """A bucket that is under way to a receiver."""

    number: int
    bucket: Bucket
    header: Header | None
    """None: no deltas in this epoch."""
    memory: torch.Tensor
    transfer: Transfer


class _Outbox:
    """The root's broadcasts of one transfer, IN_FLIGHT buckets at a time."""

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        self._channel, self._timeout_s = channel, timeout_s
        self._pending: deque[Transfer] = deque()
        self._kept_back: torch.Tensor | None = None
        self.num_bytes = 0

    def put(self, memory: torch.Tensor) -> None:
        """Sends a bucket once there is room."""
        if len(self._pending) == IN_FLIGHT:
            self._pending.popleft().wait(self._timeout_s)
        self._pending.append(self._broadcast(memory))

    def put_after_next_header(self, header: Header, memory: torch.Tensor) -> None:
        """Sends the header now and its bucket after the next header, or with `flush`."""
        self._broadcast(header.packed())  # done when its bucket is, which is waited for
        before, self._kept_back = self._kept_back, memory
        if before is not None:
            self.put(before)

    def flush(self) -> None:
        """Returns when all is sent."""
        if self._kept_back is not None:
            self.put(self._kept_back)
        while self._pending:
            self._pending.popleft().wait(self._timeout_s)

    def _broadcast(self, memory: torch.Tensor) -> Transfer:
        self.num_bytes += memory.numel()
        return self._channel.broadcast(memory, self._timeout_s)


def _longest_s(buckets: Sequence[Bucket], bucket_timeout_s: float) -> float:
    """The deadline of each bucket of a transfer: a tensor is not cut, and an LM head may be gigabytes, behind which
    others wait.
    """
    return round(bucket_timeout_s + max(bucket.num_bytes for bucket in buckets) / _SLOWEST_BYTES_PER_S, 1)


def _pack(bucket: Bucket, memory: torch.Tensor, weights: Iterator[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    sources = []
    for slot in bucket.slots:
        name, tensor = next(weights, ("nothing more", memory))
        slot.check(name, tensor)
        _copy(tensor.detach(), slot, memory)
        end = slot.offset + slot.num_bytes
        memory[end : end + -end % ALIGNMENT].zero_()  # what lay there must not count as changed
        sources.append(tensor)
    return sources


def _copy(tensor: torch.Tensor, slot: Slot, memory: torch.Tensor) -> None:
    """Copies `tensor` to its place in the bucket; between host memories in this thread alone: torch's threads, which
    meet after every copy, stand still on a busy machine.
    """
    if tensor.is_cpu and memory.is_cpu:
        place = memory[slot.offset : slot.offset + slot.num_bytes]
        place.numpy()[:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        slot.view(memory).copy_(tensor, non_blocking=True)


def _refuse_more(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, _ in weights:
        raise WeightsMismatchError(
            f"the model yields {name}, which the manifest does not have; build the manifest from the same named_weights"
        )


def _transferred(
    manifest: weights_pb2.WeightManifest,
    prints: list[torch.Tensor],
    buckets: list[Bucket],
    transfer_s: float,
    wire_bytes: int,
) -> Transferred:
    values = unsigned(torch.cat(prints))
    names = (parameter.name for parameter in manifest.parameters)
    return Transferred(
        fingerprints=dict(zip(names, values, strict=True)),
        digest=digest(manifest, values),
        num_bytes=sum(bucket.num_bytes for bucket in buckets),
        wire_bytes=wire_bytes,
        transfer_s=transfer_s,
    )
