"""Check 12: a receiver is killed or frozen, a publish is aborted: the root is free in time, and the next epoch works.

Fifty epochs leave nothing behind.
"""

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rolecall.errors import ChannelBrokenError
from rolecall.training.ranks.device import free_cached_memory, memory_bytes, wait_for
from rolecall.weights.manifest import build_manifest
from tools.gpu_acceptance.channel import MIB, Root, draw
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.receiver import MEET_S, Receiver, receivers
from tools.gpu_acceptance.stage import Stage

_GRACE_S = 1.0
"""What the root may take beyond a bucket's deadline."""
_ABORTED_S = 2.0
"""Longest from an abort by another thread to the root's being free."""
_BUSY_S = 20.0
"""What a dry run grants beyond both, beside whatever else its machine does; far below an abort's deadline, `MEET_S`."""


def check_faults(found: Findings, folder: Path) -> None:
    """One fault after the other, each with a receiver of its own; the last receiver takes a whole transfer."""
    stage = Stage.of(found, folder)
    root = Root(stage)
    weights = draw(stage, {f"w{index}": (MIB // stage.pick(1, 64),) for index in range(32)})
    manifest = build_manifest(iter(weights.items()), next(iter(weights.values())).nbytes)
    timeout_s = stage.pick(5.0, 2.0)
    with receivers(stage.device, 4) as (killed, frozen, aborted, last):
        for fault, receiver in (("SIGKILL", killed), ("SIGSTOP", frozen), ("abort", aborted)):
            with found.attempt(fault):
                address = root.open(2)
                receiver.ask(address, root.epoch, timeout_s=timeout_s, stop_after=2)
                # An abort must not be overtaken by the deadline.
                deadline_s = MEET_S if fault == "abort" else timeout_s
                with ThreadPoolExecutor(1) as pool:
                    publishing = pool.submit(root.publish, iter(weights.items()), manifest, deadline_s)
                    said = receiver.answer()
                    found.require(f"{fault}: the receiver said {said}", said == {"stopped": 2})
                    started = time.monotonic()
                    _strike(fault, receiver, root)
                    broken = publishing.exception(MEET_S)
                    free_s = time.monotonic() - started
                found.require(f"{fault}: the publish ended with {broken!r}", isinstance(broken, ChannelBrokenError))
                bound_s = _ABORTED_S if fault == "abort" else timeout_s + _GRACE_S
                found.at_most(f"{fault}: root free after s", free_s, bound_s + stage.pick(0.0, _BUSY_S))
        with found.attempt("a new epoch"):
            last.ask(root.open(2), root.epoch, timeout_s=timeout_s)
            sent = root.publish(iter(weights.items()), manifest)
            arrived = last.answer()
            found.require(f"the epoch after them brought {arrived}", arrived.get("digest") == sent.digest)
    with found.attempt("many epochs"):
        _many_epochs(stage, root, weights)
    root.close()


def _strike(fault: str, receiver: Receiver, root: Root) -> None:
    if fault == "SIGKILL":
        os.kill(receiver.process.pid, signal.SIGKILL)
    elif fault == "SIGSTOP":
        os.kill(receiver.process.pid, signal.SIGSTOP)
    else:
        root.abort("another thread says so")


def _many_epochs(stage: Stage, root: Root, weights: dict[str, torch.Tensor]) -> None:
    """Every other one is aborted while its ranks meet, the rest after a transfer."""
    manifest = build_manifest(iter(weights.items()), 16 * MIB)
    in_use = []
    num_epochs = stage.pick(50, 6)
    for number in range(num_epochs):
        root.open(1 + number % 2)
        if number % 2 == 0:
            root.publish(iter(weights.items()), manifest)
        root.abort("its turn is over")
        if number in (9, num_epochs - 1):  # after the first ten everything that stays is there
            wait_for(stage.device)
            gc.collect()
            free_cached_memory(stage.device)
            in_use.append(memory_bytes(stage.device)[0])
    stage.found.figure("epochs opened and aborted", num_epochs)
    stage.found.at_most("device memory that they left, MB", (in_use[-1] - in_use[0]) / 1e6, 100.0, on_device=True)
    stage.found.require("an epoch was lost", root.epoch >= num_epochs)
