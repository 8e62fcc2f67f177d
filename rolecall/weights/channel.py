"""Channels: a communicator of their own beside any training world, over which rank 0 broadcasts buckets of bytes, and
further roots beside it where memory is shared.

Owns joining, waiting with deadlines, and aborting from another thread. `GlooChannel` runs on CPUs, `NcclChannel` on
GPUs over a raw communicator, because torch's own NCCL group tears the process down when a peer dies; between processes
of one machine that share memory (shared_memory/) nothing goes over a network. A channel knows nothing of parameters:
the manifest says what the bytes mean.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work

from rolecall.errors import ChannelBrokenError, ChannelUnreachableError, NotOnThisDeviceError, RoleCallError
from rolecall.settings import WeightBackend
from rolecall.training.ranks.device import backend_of
from rolecall.weights.rendezvous import Rendezvous, local_address
from rolecall.weights.shared_memory import meeting

_POLL = timedelta(milliseconds=50)
"""How long one look at a Gloo transfer blocks; an abort is noticed at the next."""

_GLOO_FACTOR = 4
"""What Gloo gives a transfer, by its deadline: others are ahead of it."""
_DROP_S = 0.5
"""Longest that close waits for the group's threads; a group without a stuck transfer is gone at once."""


class Transfer(Protocol):
    """A broadcast that is under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when this rank's part is done. ChannelBrokenError, after aborting the epoch, when it fails or is not
        done in time.
        """


class Channel(Protocol):
    """The communicator of one epoch as one rank sees it. Every rank makes the same broadcasts in the same order. A
    receiver has one root: rank 0, or of several the one that it came to.
    """

    rendezvous: Rendezvous
    world_size: int
    device: torch.device
    """Where buckets must lie."""
    takes_deltas: bool
    """Whether fewer bytes are worth computing: they leave the machine, and buckets lie in host memory."""

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> Transfer:
        """Begins to copy the root's `bucket` (uint8 [n]) into that of each of its receivers; several may be under way,
        in order. ChannelBrokenError.
        """

    def close(self) -> None:
        """Gives the communicator back; idempotent, safe from any thread, frees one that waits, waits for no peer."""


def join(
    rendezvous: Rendezvous,
    world_size: int,
    backend: WeightBackend,
    device: torch.device,
    timeout_s: float,
    *,
    or_gloo: bool = False,
    num_roots: int = 1,
) -> Channel:
    """Meets the other ranks of the epoch within `timeout_s`. ChannelBrokenError when they do not all come,
    NotOnThisDeviceError. Of rank 0, where memory is shared: `or_gloo`, over Gloo, if the ranks turn out not to share
    any; `num_roots`, how many send, those that `stand_by` included.

    Whatever fails aborts the epoch: the other ranks would wait out their deadline for this one.
    """
    deadline = time.monotonic() + timeout_s
    with _blaming(rendezvous):
        match backend:
            case "shared":
                shared = meeting.meet(rendezvous, world_size, device, timeout_s, or_gloo, num_roots)
                return shared or GlooChannel(rendezvous, world_size, max(_DROP_S, deadline - time.monotonic()))
            case "gloo":
                return GlooChannel(rendezvous, world_size, timeout_s)
            case "nccl":
                if backend_of(device) != "nccl":
                    raise NotOnThisDeviceError(
                        f"weights.backend nccl needs a CUDA device on every rank, this one is {device}; use "
                        "weights.backend: gloo"
                    )
                from rolecall.weights.nccl import NcclChannel  # loads the NCCL library

                return NcclChannel(rendezvous, world_size, device, timeout_s)


def stand_by(
    rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float, root: int
) -> Channel | None:
    """Meets the other ranks as root `root` beside rank 0, as `join` does; None where it has nobody to send to."""
    with _blaming(rendezvous):
        return meeting.stand_by(rendezvous, world_size, device, timeout_s, root)


@contextmanager
def _blaming(rendezvous: Rendezvous) -> Iterator[None]:
    try:
        yield
    except RoleCallError as error:
        rendezvous.blame(error.message)
        raise
    except Exception as error:  # an edge: sockets, devices and NCCL
        reason = f"rank {rendezvous.rank} cannot take part: {type(error).__name__}: {error}"
        rendezvous.blame(reason)
        raise ChannelUnreachableError(reason, rank=str(rendezvous.rank)) from error


class GlooChannel:
    """A Gloo group built directly on the epoch's store, independent of the default group. Buckets lie in host
    memory.
    """

    takes_deltas = True

    def __init__(self, rendezvous: Rendezvous, world_size: int, timeout_s: float) -> None:
        self.rendezvous, self.world_size, self.device = rendezvous, world_size, torch.device("cpu")
        self._lock = threading.Lock()
        self._under_way: list[Work] = []
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its public Options is the base class's
        options._devices = [ProcessGroupGloo.create_device(hostname=local_address(rendezvous.host))]
        options._timeout = timedelta(seconds=timeout_s)
        rendezvous.check()
        try:
            # bounded: by the timeouts of its store and options, set above
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                rendezvous.communicator_store(timeout_s), rendezvous.rank, world_size, options
            )
        except RuntimeError as error:
            rendezvous.check_now()  # a peer that was closed is seen at once, why it was only when somebody looks
            raise ChannelBrokenError(f"the ranks did not meet within {timeout_s:g} s: {error}") from error
        rendezvous.on_broken(self.close)

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> Transfer:
        """Implements Channel."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        # counted from now, where GlooTransfer.wait's is counted from the end of those ahead: the last resort
        options.timeout = timedelta(seconds=_GLOO_FACTOR * timeout_s)
        work: Work | None = None
        try:
            # Inside the lock, and under no name: whoever lets go of the group last waits for its stuck transfers, and
            # that must be the thread of close.
            with self._lock:  # bounded: a transfer is queued here, not made
                if self._group is not None:
                    work = self._group.broadcast([bucket], options)  # type: ignore[attr-defined]  # not in its stub
                    self._under_way = [other for other in self._under_way if not _has_succeeded(other)] + [work]
        except RuntimeError as error:  # it failed just now
            self.rendezvous.blame(f"a transfer failed: {error}")
            self.rendezvous.check()
            raise
        if work is None:
            self.rendezvous.check()
            raise ChannelBrokenError(f"epoch {self.rendezvous.epoch} of the weight channel is closed; open a new epoch")
        return GlooTransfer(work, self)

    def has_failed_transfer(self) -> bool:
        """Whether any transfer has failed.

        When a peer dies, Gloo fails the transfers that wait for it, but not one whose bytes it is just writing: that
        one would end at its deadline only.
        """
        return any(_has_failed(work) for work in self._under_way)

    def close(self) -> None:
        """Implements Channel. The group's own threads may sit in a stuck transfer, so it is dropped on a thread that
        may wait for them.
        """
        with self._lock:
            group, self._group = self._group, None
            self._under_way = []  # they hold the group's threads and the buckets
        if group is not None:
            holder = [group]
            del group
            thread = threading.Thread(target=_drop, args=(holder,), name="weights-drop", daemon=True)
            thread.start()
            thread.join(_DROP_S)


class GlooTransfer:
    """A Gloo broadcast that is under way."""

    def __init__(self, work: Work, channel: GlooChannel) -> None:
        self._work, self._channel = work, channel

    def wait(self, timeout_s: float) -> None:
        """Implements Transfer."""
        rendezvous = self._channel.rendezvous
        deadline = time.monotonic() + timeout_s
        while True:
            done = self._work.is_completed()
            try:
                self._work.wait(_POLL)
                return
            except RuntimeError as error:
                rendezvous.check()
                if time.monotonic() > deadline:
                    rendezvous.abort(f"a bucket took more than {timeout_s:g} s")
                elif done or self._channel.has_failed_transfer():
                    rendezvous.blame(
                        f"a transfer failed: {error}" if done else "a later transfer failed: a peer is gone"
                    )
                rendezvous.check()


def _has_succeeded(work: Work) -> bool:
    return work.is_completed() and not _has_failed(work)


def _has_failed(work: Work) -> bool:
    if not work.is_completed():
        return False
    try:
        work.wait(_POLL)
    except RuntimeError:
        return True
    return False


def _drop(groups: list[ProcessGroupGloo]) -> None:
    groups.pop().shutdown()
