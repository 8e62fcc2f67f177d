"""The actor on its ranks: PPO steps on sealed batches, old_logprobs, and the root of the weight channel. Knows tensors and no gRPC.

A step: read this rank's rows; compute old_logprobs of every mini-batch but the first, whose own training pass gives them (none when the rows hold them
already); then mini-batches and epochs of the configured objective. How far the sampler's logprobs are from the actor's is measured on the way.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rolecall.algorithms.correction import mismatch
from rolecall.errors import OutOfOrderError, StaleVersionError
from rolecall.settings import ACTOR_BASE, RunSettings
from rolecall.store.connection import Connection
from rolecall.telemetry import Metrics
from rolecall.training.applied import Applied
from rolecall.training.chain import Progress
from rolecall.training.engine import EngineState, Loss, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.objectives import PolicyObjective, policy_columns
from rolecall.training.packing import pack, unpack
from rolecall.training.ranks import start_bench
from rolecall.training.share import Bench, Minibatch, read_share
from rolecall.training.steps import Counted, Effort, optimize, per_update
from rolecall.training.trainer import TrainerRanks
from rolecall.training.vitals import UNWATCHED, Vitals
from rolecall.trajectory import reference_column, seed_of
from rolecall.v1 import actor_pb2, command_pb2, weights_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.v1.trajectory_pb2 import TrainBatch
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.wire import Array, decode_tensor, encode_tensor
from services.actor import config

ON_POLICY = "on_policy"
"""Derived column: 1 on the sampled tokens of a trajectory that was sampled wholly with the weights it is trained from."""
OLD = "old_logprobs"
BASE = reference_column(ACTOR_BASE)
"""Logprobs of the actor's own model without its adapters: computed here, never stored."""
_SUMS = ("actor/loss", "actor/policy_loss")


class PolicySteps:
    """The actor's StepRecipe."""

    columns: tuple[str, ...] = (OLD,)

    def __init__(self, settings: RunSettings) -> None:
        self._algorithm = settings.algorithm
        self._length = settings.algorithm.aggregation_length or settings.sampling.max_tokens
        self._seed = settings.run.seed

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """ColumnRecipe.encode."""
        assert isinstance(outputs, TokenOutputs)
        return [{OLD: logprobs_T} for logprobs_T in unpack(outputs.logprobs_N, microbatch.lengths)]

    def apply(self, bench: Bench, batch: TrainBatch, applied: Applied, progress: Progress) -> tuple[Metrics, int]:
        """StepRecipe.apply."""
        started, effort = time.perf_counter(), Effort(bench)
        section = self._algorithm
        versions = frozenset(version for version, step in applied.published.items() if step == batch.step)
        share = read_share(
            bench,
            batch,
            [*(name for name in policy_columns(section) if name not in (OLD, BASE)), "policy_versions"],
            section.num_minibatches,
            seed_of(self._seed, batch.step, 0),
            optional=OLD,
            derive=lambda row: _on_policy(row, versions),
        )
        read_s = time.perf_counter() - started
        first, *later = share.minibatches
        ahead = [microbatch for minibatch in later if not minibatch.has(OLD) for microbatch in minibatch.microbatches]
        num_base = len(share.microbatches) if BASE in policy_columns(section) else 0
        counted = Counted(progress, len(share.microbatches) * section.num_epochs + len(ahead) + num_base)
        _add_old_logprobs(bench, later, ahead)
        counted.advance(len(ahead))
        if BASE in policy_columns(section):
            for minibatch in share.minibatches:
                minibatch.add_column(BASE, _logprobs(bench.engine.forward(minibatch.microbatches, base=True)))
                counted.advance(len(minibatch.microbatches))
        kept: list[torch.Tensor] = []

        def objective(minibatch: Minibatch) -> Loss:
            policy = PolicyObjective(section, minibatch.counts, batch.coefficients, self._length)
            if minibatch is not first or first.has(OLD):
                return policy
            if kept:
                first.add_column(OLD, kept)
                return policy
            return _keeping(policy, kept)

        metrics, skipped = optimize(bench, share, objective, section.num_epochs, counted, "actor")
        if not first.has(OLD):
            first.add_column(OLD, kept)
        metrics = per_update(metrics, _SUMS, section.num_minibatches * section.num_epochs)
        _add_mismatch(metrics, [microbatch for microbatch in share.microbatches if microbatch.lengths])
        if bench.group.leads:
            metrics.mean("actor/read_s", read_s)
        effort.add_to(metrics, "actor", share.num_tokens)
        return metrics, skipped


def build(settings: RunSettings, connection: Connection, vitals: Vitals = UNWATCHED) -> "ActorEngine":
    """This rank's engine, its model loaded; a collective. ConfigError."""
    engine, bench = start_bench(
        settings,
        settings.actor,
        connection,
        path=settings.model.path,
        head="policy",
        optimizer=settings.actor.optimizer,
        lora=settings.actor.lora,
        total_steps=config.num_optimizer_steps(settings),
        vitals=vitals,
    )
    return ActorEngine(settings, bench, engine, engine.num_parameters)


class ActorEngine(TrainerRanks):
    """service.ActorEngine over the ranks of a group."""

    def __init__(self, settings: RunSettings, bench: Bench, state: EngineState, num_parameters: int) -> None:
        """A collective: the manifest is made by gathering every parameter once."""
        super().__init__(bench, PolicySteps(settings), state, num_parameters)
        self._settings = settings
        lora = settings.actor.lora
        adapter = weights_pb2.LoraAdapter(rank=lora.rank, alpha=lora.alpha) if lora is not None else None
        self._manifest = build_manifest(bench.engine.named_weights(), settings.weights.bucket_bytes, adapter)
        self._publisher = Publisher(bench.device) if bench.group.leads else None

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> str:
        """service.ActorEngine.open_channel; on rank 0, from any thread."""
        assert self._publisher is not None
        backend = config.channel_backend(self._settings)
        return self._publisher.open(request.epoch, request.world_size, self._settings.weights.host, backend, request.timeout_s)

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """service.ActorEngine.publish; on rank 0."""
        assert self._publisher is not None
        if request.step != self.applied.step:
            raise OutOfOrderError(f"weights of step {request.step} were asked for at step {self.applied.step}", step=str(self.applied.step))
        if request.policy_version <= self.applied.policy_version:
            raise StaleVersionError(f"version {request.policy_version} is not higher than {self.applied.policy_version}; versions never go back")
        token_ids = decode_tensor(request.probe.token_ids, "probe.token_ids").astype("<i4") if request.HasField("probe") else np.zeros(0, "<i4")
        command = command_pb2.PublishCommand(policy_version=request.policy_version, probe_token_ids=token_ids.tobytes())
        probe = self._lead(TrainerCommand(publish=command), lambda: self._begin_publish(command))
        self.applied = self.applied.after_publish(request.policy_version)
        with self.bench.memory.phase("publish"):
            sent = self._publisher.publish(
                self.bench.engine.named_weights(),
                self._manifest,
                epoch=request.epoch,
                policy_version=request.policy_version,
                bucket_timeout_s=request.bucket_timeout_s,
            )
        fingerprints = [
            weights_pb2.Fingerprint(name=parameter.name, value=value) for parameter, value in zip(self._manifest.parameters, sent.fingerprints, strict=True)
        ]
        return actor_pb2.PublishWeightsResponse(
            fingerprints=fingerprints, digest=sent.digest, probe=probe, num_bytes=sent.num_bytes, transfer_s=sent.transfer_s
        )

    def abort_publish(self, epoch: int, reason: str) -> None:
        """service.ActorEngine.abort_publish; on rank 0, from any thread."""
        assert self._publisher is not None
        self._publisher.abort(reason, epoch)

    def obey(self, command: TrainerCommand) -> None:
        """TrainerRanks.obey, and publishing."""
        if command.WhichOneof("work") != "publish":
            super().obey(command)
            return
        self._begin_publish(command.publish)
        self.applied = self.applied.after_publish(command.publish.policy_version)
        with self.bench.memory.phase("publish"):
            for _ in self.bench.engine.named_weights():  # gathering is a collective; rank 0 sends
                pass

    def close(self) -> None:
        """Ends the weight channel; from any thread."""
        if self._publisher is not None:
            self._publisher.close()

    def _begin_publish(self, command: command_pb2.PublishCommand) -> weights_pb2.Probe | None:
        """The probe's logprobs under the present weights, at temperature 1, on rank 0; a collective."""
        token_ids = np.frombuffer(command.probe_token_ids, "<i4")
        if not token_ids.size:
            return None
        row: dict[str, Array] = {"token_ids": token_ids, "response_mask": np.ones(token_ids.shape, np.uint8)}
        (outputs,) = self.bench.engine.forward([pack([row] if self.group.slot == 0 else [], (), temperature=1.0, device=self.bench.device)])
        assert isinstance(outputs, TokenOutputs)
        if not self.group.leads:
            return None
        (logprobs_T,) = unpack(outputs.logprobs_N, (token_ids.size,))
        return weights_pb2.Probe(token_ids=encode_tensor(token_ids), logprobs=encode_tensor(logprobs_T))


def _on_policy(row: Mapping[str, Array], versions: frozenset[int]) -> dict[str, Array]:
    sampled = row["policy_versions"][row["response_mask"] != 0]
    pure = sampled.size > 0 and int(sampled[0]) in versions and bool((sampled == sampled[0]).all())
    return {ON_POLICY: row["response_mask"] if pure else np.zeros_like(row["response_mask"])}


def _add_old_logprobs(bench: Bench, minibatches: Sequence[Minibatch], ahead: Sequence[Microbatch]) -> None:
    """Computes old_logprobs of the microbatches `ahead`, all those of `minibatches` or none, before the first update; a collective."""
    outputs = iter(bench.engine.forward(ahead))
    for minibatch in minibatches if ahead else ():
        minibatch.add_column(OLD, _logprobs([next(outputs) for _ in minibatch.microbatches]))


def _logprobs(outputs: Sequence[TokenOutputs | ValueOutputs]) -> list[torch.Tensor]:
    """Of the microbatches that are not empty."""
    return [each.logprobs_N for each in outputs if isinstance(each, TokenOutputs) and each.logprobs_N.numel()]


def _keeping(policy: Loss, kept: list[torch.Tensor]) -> Loss:
    """`policy`, which also leaves the logprobs it saw in `kept`, in order."""

    def loss(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        assert isinstance(outputs, TokenOutputs)
        kept.append(outputs.logprobs_N.detach())
        return policy(microbatch, outputs)

    return loss


def _add_mismatch(metrics: Metrics, microbatches: Sequence[Microbatch]) -> None:
    """How far sampler and actor are apart: over trajectories sampled with these very weights, and (`mismatch_all`, `mismatch_kl`) over all."""
    if not microbatches:
        return
    old_N = torch.cat([each.columns[OLD] for each in microbatches])
    sampled_N = torch.cat([each.columns["rollout_logprobs"] for each in microbatches])
    all_N = torch.cat([each.score_mask_N for each in microbatches])
    pure_N = torch.cat([each.columns[ON_POLICY] for each in microbatches]) & all_N
    pure, everything = mismatch(sampled_N, old_N, pure_N), mismatch(sampled_N, old_N, all_N)
    metrics.mean("actor/mismatch_mean", pure.mean_abs, pure.num_tokens)
    metrics.sum("actor/mismatch_tokens", pure.num_tokens)
    metrics.mean("actor/mismatch_kl", everything.kl, everything.num_tokens)
    for name, value, num_tokens in (
        ("mismatch_max", pure.max_abs, pure.num_tokens),
        ("mismatch_p999", pure.p999_abs, pure.num_tokens),
        ("mismatch_all_max", everything.max_abs, everything.num_tokens),
        ("mismatch_all_p999", everything.p999_abs, everything.num_tokens),
    ):
        if num_tokens:
            metrics.max(f"actor/{name}", value)
