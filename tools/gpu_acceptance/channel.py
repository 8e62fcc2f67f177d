"""Checks 10 and 11: what a bucket costs on the channel of a lone rank, and publishing to a second process on the same
GPU."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import torch

from rolecall.settings import WeightBackend
from rolecall.v1 import weights_pb2
from rolecall.weights.fingerprint import fingerprint_on_device
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.weights.transferred import Transferred
from tests.nccl_hosts import as_host
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.receiver import MEET_S, START_S, Receiver, own_backend, receivers
from tools.gpu_acceptance.stage import Size, Stage, weight_shapes

BUCKET_TIMEOUT_S = 30.0
MIB = 2**20
TRANSFER_S = 100.0
"""Deadline of what a receiver says of one transfer."""


class Root:
    """The actor's end, with epochs and versions that rise by themselves."""

    def __init__(self, stage: Stage, backend: WeightBackend | None = None) -> None:
        """`backend`: by default the device's own."""
        os.environ.update(as_host("root"))  # before the first communicator of this process
        self._publisher = Publisher(stage.device)
        self._backend = backend or own_backend(stage.device)
        self.epoch = self.version = 0

    def open(self, world_size: int) -> str:
        """A new epoch's address."""
        self.epoch += 1
        return self._publisher.open(self.epoch, world_size, "127.0.0.1", self._backend, MEET_S)

    def publish(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        manifest: weights_pb2.WeightManifest,
        timeout_s: float = BUCKET_TIMEOUT_S,
    ) -> Transferred:
        """Publishes to all ranks of the open epoch."""
        self.version += 1
        return self._publisher.publish(
            weights, manifest, epoch=self.epoch, policy_version=self.version, bucket_timeout_s=timeout_s
        )

    def abort(self, reason: str) -> None:
        """Publisher.abort."""
        self._publisher.abort(reason)

    def close(self) -> None:
        """Publisher.close."""
        self._publisher.close()


def check_lone_rank(found: Findings, folder: Path) -> None:
    """The fixed cost of a bucket, the speed of large ones, and that of fingerprints."""
    stage = Stage.of(found, folder)
    root = Root(stage)
    root.open(1)
    ms = _publish_alike(root, stage.device, stage.pick(500, 20), 1024)[0]
    found.at_most("ms a bucket of 1 KiB", ms, 3.0, on_device=True)
    for size in stage.pick((16, 64, 256), (1,)):
        root.open(1)
        _, rate = _publish_alike(root, stage.device, stage.pick(4096, 2) // size, size * MIB)
        found.figure(f"GB/s in buckets of {size} MiB", rate / 1e9)
    root.close()
    data = torch.randn(stage.pick(512 * MIB, MIB // 4), device=stage.device).to(torch.bfloat16)
    fingerprint_on_device(data)  # makes its table
    seconds = median(stage.seconds(lambda: fingerprint_on_device(data)) for _ in range(3))
    found.at_least("fingerprints, GB/s", data.nbytes / seconds / 1e9, 100.0, on_device=True)
    found.require(
        "a fingerprint is another the second time",
        bool(torch.equal(fingerprint_on_device(data), fingerprint_on_device(data.clone()))),
    )


def _publish_alike(root: Root, device: torch.device, num_buckets: int, num_bytes: int) -> tuple[float, float]:
    """Milliseconds a bucket, and bytes a second, of so many equal buckets; the second of two transfers."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    named = {f"bucket-{index}": tensor for index in range(num_buckets)}
    manifest = build_manifest(iter(named.items()), num_bytes)
    root.publish(iter(named.items()), manifest)
    sent = root.publish(iter(named.items()), manifest)
    return 1e3 * sent.transfer_s / num_buckets, sent.num_bytes / sent.transfer_s


def check_two_processes(found: Findings, folder: Path) -> None:
    """Models of two sizes; then many small transfers in which the device comes late before every bucket, here and
    there: a missing wait shows as a digest."""
    stage = Stage.of(found, folder)
    root = Root(stage)
    with receivers(stage.device, 1) as (receiver,):
        sizes: tuple[Size, ...] = stage.pick(("0.6B", "4B"), ("0.6B",))
        for size in sizes:
            with found.attempt(size):
                _publish_model(stage, root, receiver, size)
        with found.attempt("late devices"):
            _publish_late(stage, root, receiver)
    root.close()


def _publish_model(stage: Stage, root: Root, receiver: Receiver, size: Size) -> None:
    weights = draw(stage, weight_shapes(stage.config(size)))
    manifest = build_manifest(iter(weights.items()), 16 * MIB)
    receiver.ask(root.open(2), root.epoch, timeout_s=BUCKET_TIMEOUT_S)
    sent = root.publish(iter(weights.items()), manifest)
    arrived = receiver.answer(TRANSFER_S)
    stage.found.require(f"{size}: {arrived} is not what was sent", arrived.get("digest") == sent.digest)
    stage.found.figure(
        f"{size}, GB and GB/s over loopback, one GPU for both",
        f"{sent.num_bytes / 1e9:.1f}, {sent.num_bytes / sent.transfer_s / 1e9:.2f}",
    )


def _publish_late(stage: Stage, root: Root, receiver: Receiver) -> None:
    """Every transfer carries other numbers, written just before they are packed behind a device that is busy."""
    num_transfers, num_wrong = stage.pick(100, 3), 0
    weights = draw(stage, {f"w{index}": (stage.pick(1024, 16), 512) for index in range(8)})
    manifest = build_manifest(iter(weights.items()), 2 * next(iter(weights.values())).nbytes)

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            stage.hold(0.002)
            tensor.add_(1.0)
            yield name, tensor

    hold_cycles = 3_000_000 if stage.device.type == "cuda" else 0
    receiver.ask(root.open(2), root.epoch, timeout_s=BUCKET_TIMEOUT_S, transfers=num_transfers, hold_cycles=hold_cycles)
    digests = set()
    for _ in range(num_transfers):
        sent = root.publish(late(), manifest)
        num_wrong += receiver.answer(START_S).get("digest") != sent.digest
        digests.add(sent.digest)
    stage.found.figure("transfers of a late device", num_transfers)
    stage.found.require(f"{num_wrong} of {num_transfers} transfers of a late device arrived otherwise", num_wrong == 0)
    stage.found.require("the transfers were not all different", len(digests) == num_transfers)


def draw(stage: Stage, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random bfloat16 tensors on the device, of different content."""
    generator = torch.Generator(stage.device).manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, device=stage.device, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
