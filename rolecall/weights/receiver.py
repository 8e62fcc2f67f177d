"""The receiver: the rollout's end of the weight channel, inside vLLM's worker process.

Owns the registered `WeightTransferEngine` ("rolecall") and the state of the weights; how they get into the engine is
reload.py's and adapter.py's. It never decides to serve: whoever drives it compares the report with the actor's and
resumes. Only a process that runs vLLM imports this file.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rolecall.errors import (
    ChannelBrokenError,
    RoleCallError,
    StaleEpochError,
    StaleVersionError,
    TornWeightsError,
)
from rolecall.settings import WeightBackend
from rolecall.training.ranks.device import wait_for
from rolecall.v1 import weights_pb2
from rolecall.weights import adapter, reload
from rolecall.weights.channel import Channel, join
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.report import State, wire_error
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred

logger = logging.getLogger(__name__)
BACKEND = "rolecall"
"""Name of the engine in vLLM's registry."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not type-checked
    """The facts that a worker needs to join an epoch."""

    epoch: int
    address: str
    rank: int
    """Rank of the replica's first worker in the channel."""
    world_size: int
    timeout_s: float
    backend: WeightBackend


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The facts that a worker needs to receive a version."""

    epoch: int
    policy_version: int
    bucket_timeout_s: float


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's end of the weight channel.

    A transfer happens wholly inside `receive_weights`, so that no caller can leave a load half open. Errors are kept in
    the report, because an exception would lose its type on the way out of vLLM and leave the worker inside an update.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            # vLLM's kernels for bfloat16 use AMX where a processor has it, and ask Linux for it in some of their ways
            # alone: a process whose first prompt is short was killed for an illegal instruction.
            torch.cpu._init_amx()
        self._lock = threading.Lock()
        self._epoch = -1
        self._policy_version = -1
        self._state: State = "empty"
        self._error: RoleCallError | None = None
        self._rendezvous: Rendezvous | None = None
        self._joined: Future[Channel] = Future()
        self._manifest: weights_pb2.WeightManifest | None = None
        self._base = Base()
        self._arrived: Transferred | None = None
        self._unread: list[str] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leaves the epoch before and begins to join the new one on a thread: requests go on meanwhile. `joined` tells
        the outcome.
        """
        self._error = None
        if init_info.epoch <= self._epoch:
            self._error = StaleEpochError(
                f"epoch {init_info.epoch} of the weight channel is not higher than {self._epoch}; an epoch is never "
                "joined twice"
            )
            return
        with self._lock:
            self._epoch = init_info.epoch
        self.shutdown()
        self._joined, self._manifest, self._base = Future(), None, Base()
        threading.Thread(
            target=self._join, args=(init_info, self._joined), name=f"weights-join-{init_info.epoch}", daemon=True
        ).start()

    def joined(self) -> dict[str, Any]:
        """Returns {"done": bool, "error": [reason, message] or None}."""
        if self._error is None and self._joined.done():
            failed = self._joined.exception()
            if isinstance(failed, RoleCallError):
                self._error = failed
            elif failed is not None:
                raise failed
        return {"done": self._error is not None or self._joined.done(), "error": wire_error(self._error)}

    def start_weight_update(self) -> None:
        """Does nothing: a transfer happens wholly inside `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Does nothing: a transfer happens wholly inside `receive_weights`."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives and loads one version; afterwards `report` says what came of it. Requests must be paused."""
        self._error = None
        self._arrived = None
        try:
            channel, manifest = self._channel_for(update_info)
        except RoleCallError as error:  # nothing was touched: the weights are what they were
            self._error = error
            return
        before, self._state = self._state, "loading"
        logger.info("receiving policy version %d over epoch %d", update_info.policy_version, update_info.epoch)
        try:
            self._arrived = self._load(channel, manifest, update_info.bucket_timeout_s)
        except Exception as error:  # an edge: loaders and allocations raise whatever they like
            if isinstance(error, RoleCallError):
                self._error = error
            else:
                logger.exception("loading policy version %d failed", update_info.policy_version)
                self._error = TornWeightsError(f"vLLM could not load the weights: {type(error).__name__}: {error}")
            self._state = "torn"
            channel.rendezvous.abort(self._error.message)
            logger.warning(
                "policy version %d did not load (the weights were %s before): %s",
                update_info.policy_version,
                before,
                self._error.message,
            )
            return
        self._state, self._policy_version = "loaded", update_info.policy_version

    def report(self) -> dict[str, Any]:
        """Returns what came of the last load, in plain types: state, error ([reason, message] or None), what arrived
        (Transferred or None). `unread` are the names of it that have no place in this worker.
        """
        return {
            "state": self._state,
            "error": wire_error(self._error),
            "arrived": asdict(self._arrived) if self._arrived else None,
            "unread": self._unread,
        }

    def shutdown(self) -> None:
        """Leaves the epoch: frees whoever waits in it here. The other ranks are told."""
        with self._lock:
            rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.abort("a receiver left the epoch")
            rendezvous.close()

    def _join(self, info: InitInfo, joined: "Future[Channel]") -> None:
        try:
            # half of the meeting's time each connection at most: who cannot come says so before the others give up
            rendezvous = Rendezvous(info.address, info.epoch, info.rank + self.parallel_config.rank, info.timeout_s / 2)
            with self._lock:
                if info.epoch != self._epoch:
                    raise StaleEpochError(f"epoch {info.epoch} of the weight channel was overtaken by {self._epoch}")
                self._rendezvous = rendezvous
            joined.set_result(join(rendezvous, info.world_size, info.backend, self.device, info.timeout_s))
        except Exception as error:  # raised where it is asked for
            joined.set_exception(error)

    def _channel_for(self, info: UpdateInfo) -> tuple[Channel, weights_pb2.WeightManifest]:
        if info.epoch != self._epoch:
            raise StaleEpochError(f"epoch {info.epoch} of the weight channel is not the joined one ({self._epoch})")
        if info.policy_version <= self._policy_version:
            raise StaleVersionError(
                f"policy version {info.policy_version} is not higher than {self._policy_version}, which this worker "
                "has held; versions never go back"
            )
        if not self._joined.done():
            raise ChannelBrokenError(f"epoch {info.epoch} of the weight channel is not joined yet")
        channel = self._joined.result()  # bounded: it is done
        if self._manifest is None:
            self._manifest = agreed_manifest(channel.rendezvous, info.bucket_timeout_s)
        return channel, self._manifest

    def _load(self, channel: Channel, manifest: weights_pb2.WeightManifest, bucket_timeout_s: float) -> Transferred:
        reception = Reception(channel, manifest, bucket_timeout_s, self._base)
        self._unread = []
        if manifest.HasField("adapter") or self.vllm_config.lora_config is not None:
            self._load_adapter(reception, manifest)
        else:
            self._unread = reload.load_model(self.model, self.model_config, self.device, reception)
        wait_for(self.device)
        return reception.result()  # bounded: counts what has arrived, waits for nothing

    def _load_adapter(self, reception: Reception, manifest: weights_pb2.WeightManifest) -> None:
        """Installs the adapter once all of it has arrived: it is small."""
        tensors = {name: tensor for named in reception for name, tensor in named}
        if not manifest.HasField("adapter") or self.vllm_config.lora_config is None:
            sent, taken = (
                ("an adapter", "whole models") if manifest.HasField("adapter") else ("a whole model", "adapters")
            )
            raise TornWeightsError(
                f"the actor publishes {sent} and this engine takes {taken}; give both the same actor.lora and "
                "weights.merge_adapters"
            )
        adapter.install(self.model, manifest.adapter, tensors)


class WorkerExtension:
    """Mixed into vLLM's worker (worker_extension_cls): importing its module registers the engine, and its methods
    answer `collective_rpc`.
    """

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None
    model_runner: Any
    vllm_config: VllmConfig

    def weights_joined(self) -> dict[str, Any]:
        """Returns Receiver.joined."""
        return self._weights_receiver().joined()

    def receive_version(self, **info: Any) -> None:
        """Receives as Receiver.receive_weights does: in one call, unlike vLLM's own update of weights, whose end drops
        every adapter, too.
        """
        with set_current_vllm_config(self.vllm_config):
            self._weights_receiver().receive_weights(UpdateInfo(**info))

    def weights_report(self) -> dict[str, Any]:
        """Returns Receiver.report."""
        return self._weights_receiver().report()

    def _weights_receiver(self) -> Receiver:
        if not isinstance(self.weight_transfer_engine, Receiver):
            raise TypeError(f"weight_transfer_config must name the backend {BACKEND!r}")
        return self.weight_transfer_engine


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
