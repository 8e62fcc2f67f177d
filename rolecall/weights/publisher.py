"""The publisher: the actor's end of the weight channel.

Owns the rendezvous, the epoch that is open and a guard that epochs and versions only rise. It does not know the
controller, gRPC or how tensors are gathered: it takes an iterator of (Hugging Face name, full tensor). Only rank 0 of
an actor has one; see `publish` for what the other ranks do meanwhile.

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
from collections.abc import Iterator
from concurrent.futures import Future, wait

import torch

from rolecall.errors import RoleCallError, StaleEpochError, StaleVersionError
from rolecall.settings import WeightBackend
from rolecall.v1 import weights_pb2
from rolecall.weights.channel import Channel, join
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous, RendezvousServer
from rolecall.weights.transfer import offer_manifest, send
from rolecall.weights.transferred import Transferred

logger = logging.getLogger(__name__)
_MEETING_POLL_S = 0.05
"""Seconds between two looks at whether the epoch was aborted while its ranks meet."""
_MEETING_GRACE_S = 1.0
"""What the meeting thread may take beyond its own deadline."""


class Publisher:
    """Opens epochs and publishes versions over them. `publish` is called by one thread at a time; `abort`, `open` and
    `close` by any.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` holds the weights. The channel of an epoch says where its buckets lie: there, or in host memory."""
        self._device = device
        self._lock = threading.Lock()
        self._stores: tuple[RendezvousServer, ...] = ()
        """One per epoch, two at most, the newest last. The one before still tells late ranks that it is over; older
        ones are gone with all their keys.
        """
        self._epoch = -1
        self._last_sent = (-1, -1)
        """The highest version that was to be sent, and the highest epoch it was to be sent over."""
        self._rendezvous: Rendezvous | None = None
        self._channel: Future[Channel] = Future()
        self._manifest: weights_pb2.WeightManifest | None = None
        self._base = Base()
        self._meeting_deadline = 0.0

    def open(
        self, epoch: int, world_size: int, host: str, backend: WeightBackend, timeout_s: float, *, or_gloo: bool = False
    ) -> str:
        """Aborts the epoch before, listens on `host` and returns "host:port"; the ranks meet within `timeout_s` on a
        thread of their own, as rolecall.weights.channel.join says.

        StaleEpochError for an epoch not higher than all before. A meeting that fails is told by the next publish.
        """
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
        store = RendezvousServer(host)
        rendezvous, channel = store.enter(epoch), Future[Channel]()
        with self._lock:
            if epoch != self._epoch:
                raise StaleEpochError(f"epoch {epoch} was overtaken by {self._epoch} while it was opened")
            self._stores = (*self._stores[-1:], store)
            self._rendezvous, self._channel, self._manifest, self._base = rendezvous, channel, None, Base()
            self._meeting_deadline = time.monotonic() + timeout_s
        threading.Thread(
            target=self._meet,
            args=(channel, rendezvous, world_size, backend, timeout_s, or_gloo),
            name=f"weights-meet-{epoch}",
            daemon=True,
        ).start()
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

    def _publish(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        manifest: weights_pb2.WeightManifest,
        epoch: int,
        policy_version: int,
        bucket_timeout_s: float,
    ) -> Transferred:
        with self._lock:
            if epoch != self._epoch or self._rendezvous is None:
                raise StaleEpochError(f"epoch {epoch} of the weight channel is not the open one ({self._epoch})")
            if (policy_version, epoch) <= self._last_sent:
                version, over = self._last_sent
                raise StaleVersionError(
                    f"policy version {policy_version} is lower than {version}, or went out over epoch {over} already; "
                    "versions never go back"
                )
            self._last_sent = (policy_version, epoch)
            rendezvous, meeting, agreed, base = self._rendezvous, self._channel, self._manifest, self._base
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
            late = rendezvous.laggards(channel.world_size)
            rendezvous.abort(error.message)
            message = (
                f"policy version {policy_version} did not reach every receiver (fewest buckets: ranks "
                f"{late}): {error.message}"
            )
            raise type(error)(message, ranks=",".join(map(str, late))) from error

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

    def _met(self, rendezvous: Rendezvous, meeting: "Future[Channel]") -> Channel:
        while not wait([meeting], timeout=_MEETING_POLL_S).done:
            if time.monotonic() > self._meeting_deadline + _MEETING_GRACE_S:
                rendezvous.abort("the ranks did not meet in time")
            rendezvous.check()
        return meeting.result()  # bounded: it is done

    def _meet(
        self,
        channel: "Future[Channel]",
        rendezvous: Rendezvous,
        world_size: int,
        backend: WeightBackend,
        timeout_s: float,
        or_gloo: bool,
    ) -> None:
        try:
            channel.set_result(join(rendezvous, world_size, backend, self._device, timeout_s, or_gloo=or_gloo))
        except RoleCallError as error:
            logger.warning("epoch %d of the weight channel: %s", rendezvous.epoch, error.message)
            channel.set_exception(error)
