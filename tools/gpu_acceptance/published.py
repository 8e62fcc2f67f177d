"""Checks 21 and 22: what a publish of real shapes takes on the actor's side, from its own parameters; and weights to a
second process on the GPU without NCCL: through slots in its memory, over Gloo, and by what changed."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from rolecall.settings import WeightBackend
from rolecall.training.ranks.device import free_cached_memory, wait_for
from rolecall.weights.fingerprint import fingerprint_on_device
from rolecall.weights.manifest import build_manifest
from tools.gpu_acceptance.channel import BUCKET_TIMEOUT_S, MIB, TRANSFER_S, Root, draw
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.receiver import Receiver, receivers
from tools.gpu_acceptance.stage import Size, Stage, make_engine, weight_shapes, write_zeros

PUBLISH_S = 0.18
"""Seconds of a publish of 0.6B to be below, fingerprints included."""
BUCKET_BYTES = 64 * MIB
CHANGED = 50
"""One element of so many changes between two transfers, as after a step at a learning rate of 1e-6."""
WIRE_SHARE = 0.1
"""Largest share of the bytes that may travel then."""


def check_publish(found: Findings, folder: Path) -> None:
    """Gathering, packing, the broadcast of a lone rank and fingerprints of two shapes: what the actor does in a publish
    whoever receives."""
    stage = Stage.of(found, folder)
    root = Root(stage)
    with found.attempt("0.6B, from the engine"):
        engine = make_engine(stage, write_zeros(folder / "0.6B", stage.config("0.6B")))
        manifest = build_manifest(engine.named_weights(), BUCKET_BYTES)
        root.open(1)
        root.publish(engine.named_weights(), manifest)  # makes the communicator and the tables
        taken = []
        for _ in range(3):
            wait_for(stage.device)
            started = time.perf_counter()
            sent = root.publish(engine.named_weights(), manifest)
            wait_for(stage.device)
            taken.append(time.perf_counter() - started)
        found.figure("0.6B, GB", sent.num_bytes / 1e9)
        found.at_most("0.6B, s of a publish", min(taken), PUBLISH_S, on_device=True)
        del engine
        free_cached_memory(stage.device)
    with found.attempt("8B, of weights that lie there"):
        _publish_drawn(stage, root, "8B")
    root.close()


def _publish_drawn(stage: Stage, root: Root, size: Size) -> None:
    weights = draw(stage, weight_shapes(stage.config(size)))
    manifest = build_manifest(iter(weights.items()), BUCKET_BYTES)
    root.open(1)
    root.publish(iter(weights.items()), manifest)
    seconds = stage.seconds(lambda: root.publish(iter(weights.items()), manifest))
    hashing_s = stage.seconds(lambda: [fingerprint_on_device(tensor) for tensor in weights.values()])
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    stage.found.figure(f"{size}, GB", num_bytes / 1e9)
    stage.found.figure(f"{size}, s of a publish, of which fingerprints alone", f"{seconds:.3g}, {hashing_s:.3g}")
    stage.found.figure(f"{size}, GB/s", num_bytes / seconds / 1e9)
    stage.found.require(f"{size}: nothing was published", num_bytes > 0)


def check_host_ways(found: Findings, folder: Path) -> None:
    """Weights of a GPU to a second process: through memory that both share there, and over Gloo, whole and as
    deltas."""
    stage = Stage.of(found, folder)
    weights = draw(stage, weight_shapes(stage.config("0.6B")))
    ways: tuple[tuple[WeightBackend, bool], ...] = (("shared", False), ("gloo", False), ("gloo", True))
    with receivers(stage.device, 1) as (receiver,):
        for backend, deltas in ways:
            with found.attempt(f"{backend}, {'deltas' if deltas else 'whole'}"):
                _send_twice(stage, receiver, weights, backend, deltas=deltas)


def _send_twice(
    stage: Stage, receiver: Receiver, weights: Mapping[str, torch.Tensor], backend: WeightBackend, *, deltas: bool
) -> None:
    """The second transfer is of weights of which one element in CHANGED differs."""
    root = Root(stage, backend)
    manifest = build_manifest(iter(weights.items()), BUCKET_BYTES, deltas=deltas)
    receiver.ask(root.open(2), root.epoch, timeout_s=BUCKET_TIMEOUT_S, transfers=2, backend=backend)
    name = f"{backend}, {'deltas' if deltas else 'whole'}"
    digests = set()
    for _ in range(2):
        sent = root.publish(iter(weights.items()), manifest)
        arrived = receiver.answer(TRANSFER_S)
        stage.found.require(f"{name}: {arrived} is not what was sent", arrived.get("digest") == sent.digest)
        if backend == "shared":
            stage.found.require(f"{name}: the slots are on {arrived['device']}", arrived["device"] == str(stage.device))
        digests.add(sent.digest)
        for tensor in weights.values():
            tensor.view(-1)[::CHANGED] += 1.0
    share = sent.wire_bytes / sent.num_bytes
    stage.found.figure(f"{name}, s and GB/s", f"{sent.transfer_s:.3g}, {sent.num_bytes / sent.transfer_s / 1e9:.3g}")
    stage.found.require(f"{name}: both transfers were the same", len(digests) == 2)
    if deltas:
        stage.found.at_most(f"{name}, share of the bytes that travelled", share, WIRE_SHARE)
    root.close()
