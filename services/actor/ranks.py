"""The actor on its ranks: a trainer by the steps of steps.py, and the roots of the weight channel. It knows tensors
and no gRPC.
"""

import logging

import numpy as np

from rolecall.errors import OutOfOrderError, RoleCallError, StaleVersionError
from rolecall.identity import adapters_to_begin_with
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.training.engine import Microbatch, TokenOutputs
from rolecall.training.packing.pack import pack, unpack
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.role_ranks import TrainerRanks
from rolecall.training.step.start import start_store_context
from rolecall.v1 import actor_pb2, command_pb2, weights_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.weights.backends import encode_backend
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import FurtherRoot, Publisher
from rolecall.weights.transferred import encode_fingerprints
from rolecall.wire import Array, decode_tensor, encode_tensor
from services.actor import config
from services.actor.steps import PolicySteps

logger = logging.getLogger(__name__)

_FIRST_PROBE_TOKENS = 487
"""Tokens of the pass by which layers are compiled at the start. Graphs are the same for all lengths, unless the first
is a size of the model, too, which torch then takes for that: a prime is none.
"""


def build(settings: RunSettings, connection: Connection, hooks: ProcessHooks) -> "ActorRanks":
    """Starts the actor on this rank, its model loaded; a collective. ConfigError, of a plug-in before the start."""
    steps = PolicySteps(settings)
    context = start_store_context(
        settings,
        settings.actor,
        connection,
        path=settings.model.path,
        head="policy",
        optimizer=settings.actor.optimizer,
        lora=adapters_to_begin_with(settings, settings.actor.lora),
        moe=settings.actor.moe,
        router_replay=settings.actor.router_replay != "off",
        total_steps=config.num_optimizer_steps(settings),
        hooks=hooks,
    )
    return ActorRanks(settings, context, steps)


class ActorRanks(TrainerRanks):
    """A WeightPublishingTrainer over the ranks of a group."""

    def __init__(self, settings: RunSettings, context: StoreRankContext, steps: PolicySteps) -> None:
        """A collective: the manifest is made by gathering every parameter once, and layers that are compiled pass once
        over a probe.
        """
        super().__init__(context, steps)
        self._settings = settings
        lora = settings.published_adapters
        adapter = weights_pb2.LoraAdapter(rank=lora.rank, alpha=lora.alpha) if lora is not None else None
        weights = settings.weights
        if settings.actor.torch_compile:
            # Compiled in the first publish, rollouts would wait for it within the deadline of a step of a transfer.
            probe = np.zeros(_FIRST_PROBE_TOKENS, "<i4").tobytes()
            self._begin_publish(command_pb2.PublishCommand(probe_token_ids=probe))
        self._manifest = build_manifest(
            context.engine.named_weights(), weights.bucket_bytes, adapter, deltas=weights.deltas
        )
        self._publisher = Publisher(context.device) if context.group.is_leader else None
        # On shared devices the weights need not leave any: each rank has them all while they are gathered.
        self._num_roots = context.group.world_size if settings.takes_shifts else 1
        self._further = FurtherRoot(context.device) if 0 < context.group.rank < self._num_roots else None

    @property
    def all_ranks_send(self) -> bool:
        """WeightPublishingTrainer.all_ranks_send."""
        return self._num_roots > 1

    def end_before(self, epoch: int) -> None:
        """WeightPublishingTrainer.end_before; on rank 0, from any thread."""
        assert self._publisher is not None
        self._publisher.end_before(epoch)

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        """WeightPublishingTrainer.open_channel; on rank 0, from any thread unless all ranks send."""
        assert self._publisher is not None
        weights = self._settings.weights
        backend = self._settings.weight_backend(receivers_on_gpus=request.receivers_on_gpus)
        address = self._publisher.open(
            request.epoch,
            request.world_size,
            weights.host,
            backend,
            request.timeout_s,
            or_gloo=weights.backend is None,
            num_roots=self._num_roots,
        )
        if self.all_ranks_send and backend == "shared":
            command = command_pb2.StandByCommand(
                epoch=request.epoch, address=address, world_size=request.world_size, timeout_s=request.timeout_s
            )
            with self.group.leading(TrainerCommand(stand_by=command)):
                pass  # rank 0 meets them already
        return weights_pb2.OpenWeightChannelResponse(address=address, backend=encode_backend(backend))

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """WeightPublishingTrainer.publish; on rank 0."""
        assert self._publisher is not None
        if request.step != self.applied.step:
            raise OutOfOrderError(
                f"weights of step {request.step} were asked for at step {self.applied.step}",
                step=str(self.applied.step),
            )
        if not self.applied.may_publish(request.policy_version):
            raise StaleVersionError(
                f"version {request.policy_version} is not higher than {self.applied.policy_version}, nor the weights "
                "that this is the version of; versions never go back"
            )
        self._publisher.require(request.epoch, request.policy_version)
        token_ids = (
            decode_tensor(request.probe.token_ids, "probe.token_ids").astype("<i4")
            if request.HasField("probe")
            else np.zeros(0, "<i4")
        )
        command = command_pb2.PublishCommand(
            policy_version=request.policy_version,
            probe_token_ids=token_ids.tobytes(),
            epoch=request.epoch,
            bucket_timeout_s=request.bucket_timeout_s,
        )
        with self.group.leading(TrainerCommand(publish=command)):
            probe = self._begin_publish(command)
        self.applied = self.applied.after_publish(request.policy_version)
        publisher = self._publisher
        with self.context.memory.phase("publish"):
            sent = self.group.agree(
                lambda: publisher.publish(
                    self.context.engine.named_weights(),
                    self._manifest,
                    epoch=request.epoch,
                    policy_version=request.policy_version,
                    bucket_timeout_s=request.bucket_timeout_s,
                )
            )
        return actor_pb2.PublishWeightsResponse(
            fingerprints=encode_fingerprints(sent.fingerprints),
            digest=sent.digest,
            probe=probe,
            num_bytes=sent.num_bytes,
            transfer_s=sent.transfer_s,
            wire_bytes=sent.wire_bytes,
        )

    def abort_publish(self, epoch: int, reason: str) -> None:
        """WeightPublishingTrainer.abort_publish; on rank 0, from any thread."""
        assert self._publisher is not None
        self._publisher.abort(reason, epoch)

    def obey(self, command: TrainerCommand) -> None:
        """Does one command of rank 0: of the weight channel, or TrainerRanks.obey."""
        match command.WhichOneof("work"):
            case "stand_by":
                self._stand_by(command.stand_by)
            case "publish":
                self._publish_beside(command.publish)
            case _:
                super().obey(command)

    def _stand_by(self, command: command_pb2.StandByCommand) -> None:
        assert self._further is not None
        try:
            self._further.stand_by(
                command.epoch, command.address, command.world_size, self.group.rank, command.timeout_s
            )
        except RoleCallError as error:  # rank 0 has opened another meanwhile, or ends
            logger.warning("epoch %d of the weight channel is not joined: %s", command.epoch, error.message)

    def _publish_beside(self, command: command_pb2.PublishCommand) -> None:
        """Gathers with rank 0, which sends; and sends, too, where this rank is a root."""
        self._begin_publish(command)
        self.applied = self.applied.after_publish(command.policy_version)

        def gather() -> None:
            weights = self.context.engine.named_weights()
            if self._further is not None:
                self._further.publish(weights, epoch=command.epoch, bucket_timeout_s=command.bucket_timeout_s)
            for _ in weights:
                pass

        with self.context.memory.phase("publish"):
            self.group.agree(gather)

    def follow(self) -> bool:
        """TrainerRanks.follow; leaves the weight channel at the end, however that comes."""
        try:
            return super().follow()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the weight channel; from any thread."""
        for root in (self._publisher, self._further):
            if root is not None:
                root.close()

    def _begin_publish(self, command: command_pb2.PublishCommand) -> weights_pb2.Probe | None:
        """The probe's logprobs under the present weights, at temperature 1, on rank 0; a collective."""
        token_ids = np.frombuffer(command.probe_token_ids, "<i4")
        if not token_ids.size:
            return None
        row: dict[str, Array] = {"token_ids": token_ids, "response_mask": np.ones(token_ids.shape, np.uint8)}
        microbatch = pack([row] if self.group.slot == 0 else [], (), temperature=1.0, device=self.context.device)
        # Once more in 16 bits, so that whoever compares knows how far rounding alone takes two right engines apart.
        passes = (False, True) if self._settings.model.dtype != "float32" else (False,)
        logprobs = [self._logprobs(microbatch, plain) for plain in passes]
        if not self.group.is_leader:
            return None
        return weights_pb2.Probe(
            token_ids=encode_tensor(token_ids),
            logprobs=encode_tensor(logprobs[0]),
            again=encode_tensor(logprobs[1]) if len(logprobs) == 2 else None,
        )

    def _logprobs(self, microbatch: Microbatch, plain: bool) -> Array:
        """float32 [T] of the one sequence in `microbatch`; a collective. Empty where another slot has it."""
        (outputs,) = self.context.engine.forward([microbatch], plain=plain)
        assert isinstance(outputs, TokenOutputs)
        return np.concatenate([np.zeros(0, np.float32), *unpack(outputs.logprobs_N, microbatch.lengths)])
