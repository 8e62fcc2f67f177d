"""The publisher: the actor's end of the weight channel.

Owns the rendezvous, the epoch that is open and a guard that epochs and versions only rise. It does not know the
controller, gRPC or how tensors are gathered: it takes an iterator of (Hugging Face name, full tensor). Only rank 0 of
an actor has one. The other ranks gather with it, and where they share devices with the receivers each is a root, too.

    publisher = Publisher(device)
    address = publisher.open(epoch=3, world_size=1 + num_receivers, host="127.0.0.1", backend="gloo", timeout_s=60)
    # tell the address to the receivers, who join
    meanwhile sent = publisher.publish(engine.named_weights(), manifest, epoch=3, policy_version=7, bucket_timeout_s=30)

Life of an epoch: meeting -> open -> (transfer)* -> broken or closed. A transfer that fails breaks its epoch: nobody can
tell who holds what, so a new one is opened.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import torch

from rolecall.errors import RoleCallError, StaleEpochError, StaleVersionError
from rolecall.settings import WeightBackend
from rolecall.v1 import weights_pb2
from rolecall.weights.channel import Channel, join, stand_by
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import agreed_manifest, offer_manifest, send, send_beside
from rolecall.weights.transferred import Transferred

logger = logging.getLogger(__name__)
_MEETING_POLL_S = 0.05
"""Seconds between two looks at whether the epoch was aborted while its ranks meet."""
_REACH_S = 10.0
"""Longest that a further root waits for the rendezvous of rank 0, which listens already."""
_MEETING_GRACE_S = 1.0
"""What the meeting thread may take beyond its own deadline."""


C = TypeVar("C", bound=Channel | None)


class _Epochs(Generic[C]):
    """The open epoch of a root, and the guard that epochs only rise."""

    def __init__(self, device: torch.device) -> None:
        """`device` holds the weights. The channel of an epoch says where its buckets lie: there, or in host memory."""
        self._device = device
        self._lock = threading.Lock()
        self._epoch = -1
        self._rendezvous: Rendezvous | None = None
        self._channel: Future[C] = Future()
        self._meeting_deadline = 0.0

    def end_before(self, epoch: int) -> None:
        """Aborts the open epoch if it is lower than `epoch`, from any thread, as `abort` does."""
        with self._lock:
            rendezvous = self._rendezvous
        if rendezvous is not None and rendezvous.epoch < epoch:
            rendezvous.abort(f"epoch {epoch} was opened")

    def _claim(self, epoch: int) -> None:
        """Aborts the epoch before. StaleEpochError for one not higher than all before."""
        with self._lock:
            if epoch <= self._epoch:
                raise StaleEpochError(
                    f"epoch {epoch} of the weight channel is not higher than {self._epoch}; an epoch is never "
                    "opened twice"
                )
            self._epoch = epoch
            before, self._rendezvous = self._rendezvous, None
        if before is not None:
            before.abort(f"epoch {epoch} was opened")
            before.close()

    def _begin(self, rendezvous: Rendezvous, meet: Callable[[], C], timeout_s: float) -> None:
        """The ranks meet within `timeout_s` on a thread of their own. StaleEpochError."""
        channel, epoch = Future[C](), rendezvous.epoch
        with self._lock:
            self._require_newest(epoch)
            self._rendezvous, self._channel = rendezvous, channel
            self._meeting_deadline = time.monotonic() + timeout_s

        def run() -> None:
            try:
                channel.set_result(meet())
            except RoleCallError as error:
                logger.warning("epoch %d of the weight channel: %s", epoch, error.message)
                channel.set_exception(error)

        threading.Thread(target=run, name=f"weights-meet-{epoch}", daemon=True).start()

    def _require_newest(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StaleEpochError(f"epoch {epoch} was overtaken by {self._epoch} while it was opened")

    def _opened(self, epoch: int) -> "tuple[Rendezvous, Future[C]]":
        """StaleEpochError for another epoch than the open one. With the lock held."""
        if epoch != self._epoch or self._rendezvous is None:
            raise StaleEpochError(f"epoch {epoch} of the weight channel is not the open one ({self._epoch})")
        return self._rendezvous, self._channel

    def _met(self, rendezvous: Rendezvous, meeting: "Future[C]") -> C:
        while not wait([meeting], timeout=_MEETING_POLL_S).done:
            if time.monotonic() > self._meeting_deadline + _MEETING_GRACE_S:
                rendezvous.abort("the ranks did not meet in time")
            rendezvous.check()
        return meeting.result()  # bounded: it is done

    def abort(self, reason: str, epoch: int | None = None) -> None:
        """Breaks the open epoch, if it is `epoch` (None: whichever), from any thread: whoever waits in a transfer of
        it, here or at a receiver, gets ChannelBrokenError soon. Idempotent.
        """
        with self._lock:
            rendezvous = self._rendezvous
        if rendezvous is not None and epoch in (None, rendezvous.epoch):
            rendezvous.abort(reason)

    def close(self) -> None:
        """Aborts the open epoch; the rendezvous ends with the process."""
        self.abort("the actor closed the weight channel")
        with self._lock:
            rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()


class Publisher(_Epochs[Channel]):
    """Opens epochs and publishes versions over them. `publish` is called by one thread at a time; `abort`, `open` and
    `close` by any.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` holds the weights. The channel of an epoch says where its buckets lie: there, or in host memory."""
        super().__init__(device)
        self._stores: tuple[RendezvousServer, ...] = ()
        """One per epoch, two at most, the newest last. The one before still tells late ranks that it is over; older
        ones are gone with all their keys.
        """
        self._last_sent = (-1, -1)
        """The highest version that was to be sent, and the highest epoch it was to be sent over."""
        self._manifest: weights_pb2.WeightManifest | None = None
        self._base = Base()

    def open(
        self,
        epoch: int,
        world_size: int,
        host: str,
        backend: WeightBackend,
        timeout_s: float,
        *,
        or_gloo: bool = False,
        num_roots: int = 1,
    ) -> str:
        """Aborts the epoch before, listens on `host` and returns "host:port"; the ranks meet within `timeout_s` on a
        thread of their own, as rolecall.weights.channel.join says.

        StaleEpochError for an epoch not higher than all before. A meeting that fails is told by the next publish.
        """
        self._claim(epoch)
        store = RendezvousServer(host)
        rendezvous = store.enter(epoch)
        with self._lock:
            self._require_newest(epoch)
            self._stores = (*self._stores[-1:], store)
            self._manifest, self._base = None, Base()
        self._begin(
            rendezvous,
            lambda: join(
                rendezvous, world_size, backend, self._device, timeout_s, or_gloo=or_gloo, num_roots=num_roots
            ),
            timeout_s,
        )
        return store.address

    def publish(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        manifest: weights_pb2.WeightManifest,
        *,
        epoch: int,
        policy_version: int,
        bucket_timeout_s: float,
    ) -> Transferred:
        """Sends `weights` to every receiver of the open epoch as `policy_version` and says what was sent; blocks until
        the last bucket.

        `weights` is always run to its end, also when sending fails: producing them is a collective of the actor's
        ranks, and the others run theirs to the end too. StaleEpochError for another epoch than the open one,
        StaleVersionError for a version lower than one before, or that went out over this epoch already,
        ChannelBrokenError when the ranks did not meet, a receiver was lost or a bucket took longer than
        `bucket_timeout_s`, WeightsMismatchError when `weights` are not as in `manifest`; after the last two the epoch
        is broken.
        """
        try:
            return self._publish(weights, manifest, epoch, policy_version, bucket_timeout_s)
        except RoleCallError:
            for _ in weights:
                pass
            raise

    def require(self, epoch: int, policy_version: int) -> None:
        """StaleEpochError, StaleVersionError where `publish` would refuse these, before it and other ranks begin."""
        with self._lock:  # bounded: nothing inside waits
            self._opened(epoch)
            self._require_newer(epoch, policy_version)

    def _require_newer(self, epoch: int, policy_version: int) -> None:
        if (policy_version, epoch) <= self._last_sent:
            version, over = self._last_sent
            raise StaleVersionError(
                f"policy version {policy_version} is lower than {version}, or went out over epoch {over} already; "
                "versions never go back"
            )

    def _publish(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        manifest: weights_pb2.WeightManifest,
        epoch: int,
        policy_version: int,
        bucket_timeout_s: float,
    ) -> Transferred:
        with self._lock:  # bounded: nothing inside waits
            rendezvous, meeting = self._opened(epoch)
            self._require_newer(epoch, policy_version)
            self._last_sent = (policy_version, epoch)
            agreed, base = self._manifest, self._base
        channel = self._met(rendezvous, meeting)
        if agreed is None:
            agreed = weights_pb2.WeightManifest()
            agreed.CopyFrom(manifest)
            agreed.deltas = manifest.deltas and channel.takes_deltas
            offer_manifest(rendezvous, agreed)
            with self._lock:
                if rendezvous is self._rendezvous:  # no newer epoch, which agrees on its own
                    self._manifest = agreed
        try:
            return send(channel, weights, agreed, bucket_timeout_s, base)
        except RoleCallError as error:
            raise _broken(channel, error) from error


class FurtherRoot(_Epochs[Channel | None]):
    """Another rank of the actor as a root of rank 0's epochs: it sends the same to the receivers on its GPU or machine.

    What ends the epoch ends it for all ranks. Ranks compare how their publishes ended (CommandGroup.agree): rank 0's is
    over when all are.
    """

    def stand_by(self, epoch: int, address: str, world_size: int, root: int, timeout_s: float) -> None:
        """Leaves the epoch before and meets the ranks at `address` on a thread, within `timeout_s`. `root`: which it
        is, counted from the first, rank 0, which is 0; `world_size` counts rank 0 and the receivers.

        StaleEpochError, ChannelUnreachableError.
        """
        self._claim(epoch)
        # after the receivers, whose ranks the controller gives
        rendezvous = Rendezvous(address, epoch, world_size - 1 + root, min(timeout_s, _REACH_S))
        self._begin(rendezvous, lambda: stand_by(rendezvous, world_size, self._device, timeout_s, root), timeout_s)

    def publish(self, weights: Iterator[tuple[str, torch.Tensor]], *, epoch: int, bucket_timeout_s: float) -> None:
        """Sends `weights` to the receivers that came here; blocks until the last bucket. Nothing is sent over an epoch
        for which this root was not called.

        `weights` is always run to its end, and errors are as in Publisher.publish.
        """
        try:
            with self._lock:  # bounded: nothing inside waits
                opened = self._opened(epoch) if epoch == self._epoch else None
            channel = self._met(*opened) if opened is not None else None
            if channel is not None:
                self._send(channel, weights, bucket_timeout_s)
        finally:
            for _ in weights:
                pass

    def _send(self, channel: Channel, weights: Iterator[tuple[str, torch.Tensor]], bucket_timeout_s: float) -> None:
        try:
            manifest = agreed_manifest(channel.rendezvous, bucket_timeout_s)
            send_beside(channel, weights, manifest, bucket_timeout_s)
        except RoleCallError as error:
            raise _broken(channel, error) from error


def _broken(channel: Channel, error: RoleCallError) -> RoleCallError:
    """Ends the epoch in which `error` came up; the same error, with the receivers that are behind."""
    late = channel.rendezvous.laggards(channel.world_size)
    channel.rendezvous.abort(error.message)
    message = f"the weights did not reach every receiver (fewest buckets: ranks {late}): {error.message}"
    return type(error)(message, ranks=",".join(map(str, late)))
