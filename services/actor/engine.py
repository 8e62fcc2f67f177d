"""The actor on its ranks: PPO steps on sealed batches, old_logprobs, and the root of the weight channel. Knows tensors and no gRPC.

A step: read this rank's rows; compute old_logprobs of every mini-batch but the first, whose own training pass gives them (none when the rows hold them
already, or when the sampler's take their place); then mini-batches and epochs of the configured objective. How far the sampler's logprobs are from the
actor's is measured on the way.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rolecall.algorithms.advantages import needs
from rolecall.algorithms.aggregation import sequence_index
from rolecall.algorithms.correction.mismatch import MismatchSums, mismatch, mismatch_sums, spread
from rolecall.algorithms.losses.custom import load
from rolecall.algorithms.selection import token_keys
from rolecall.errors import OutOfOrderError, StaleVersionError
from rolecall.settings import ACTOR_BASE, CovarianceLoss, CustomLoss, RunSettings
from rolecall.store.connection import Connection
from rolecall.telemetry import Metrics
from rolecall.training.applied import Applied
from rolecall.training.chain import Progress
from rolecall.training.engine import EngineState, Loss, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.logprobs import Wanted
from rolecall.training.objectives import PolicyObjective, policy_columns
from rolecall.training.packing import pack, unpack
from rolecall.training.ranks import start_bench
from rolecall.training.routing import RouterLosses, router_load
from rolecall.training.selection import KEYS, select
from rolecall.training.share import Bench, Derive, Minibatch, read_share
from rolecall.training.steps import Counted, Effort, optimize, per_update
from rolecall.training.trainer import TrainerRanks
from rolecall.training.vitals import UNWATCHED, Vitals
from rolecall.trajectory import reference_column, seed_of
from rolecall.v1 import actor_pb2, command_pb2, weights_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.wire import Array, decode_tensor, encode_tensor
from services.actor import config

ON_POLICY = "on_policy"
"""Derived column: 1 on the sampled tokens of a trajectory that was sampled wholly with the weights it is trained from."""
OLD = "old_logprobs"
SEEN = "seen_logprobs"
"""Derived column under `proximal: bypass`: what the training pass of the first epoch gave, to measure the sampler by."""
BASE = reference_column(ACTOR_BASE)
"""Logprobs of the actor's own model without its adapters: computed here, never stored."""
_SUMS = ("actor/loss", "actor/policy_loss", "actor/router_balance", "actor/router_z")
_SHOWN = {
    "kl": "mismatch_kl",
    "kl_k1": "mismatch_kl_k1",
    "reverse_kl": "mismatch_kl_reverse",
    "sampler_perplexity": "sampler_perplexity",
    "trainer_perplexity": "trainer_perplexity",
    "ess_tokens": "ess_tokens",
    "ess_sequences": "ess_sequences",
    "correlation": "probs_correlation",
}
"""Metric of each field of Mismatch."""


class PolicySteps:
    """The actor's StepRecipe."""

    def __init__(self, settings: RunSettings) -> None:
        self._algorithm = settings.algorithm
        squares = "sum_squared_probs" in needs(settings.algorithm.advantage)
        self.columns: tuple[str, ...] = (OLD, "sum_squared_probs") if squares else (OLD,)
        self.wanted = Wanted(squares=True) if squares else None
        self._length = settings.algorithm.aggregation_length or settings.sampling.max_tokens
        self._seed = settings.run.seed
        loss = settings.algorithm.policy_loss
        self._covariance = loss if isinstance(loss, CovarianceLoss) else None
        self._moe = settings.actor.moe
        self._looks_first = self._covariance is not None or self._moe is not None
        if isinstance(loss, CustomLoss):
            load(loss)  # not there: known at the start

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """ColumnRecipe.encode."""
        assert isinstance(outputs, TokenOutputs)
        said = [outputs.logprobs_N] if outputs.sum_squared_probs_N is None else [outputs.logprobs_N, outputs.sum_squared_probs_N]
        rows = zip(*(unpack(each_N, microbatch.lengths) for each_N in said), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

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
            derive=self._derive(batch.step, versions),
        )
        read_s = time.perf_counter() - started
        bypass = section.correction is not None and section.correction.proximal == "bypass"
        if bypass:
            for minibatch in share.minibatches:
                minibatch.add_column(OLD, [each.columns["rollout_logprobs"] for each in minibatch.microbatches if each.lengths])
        measured = SEEN if bypass else OLD
        later = share.minibatches[1:]
        ahead = [microbatch for minibatch in later if not minibatch.has(OLD) for microbatch in minibatch.microbatches]
        num_base = len(share.microbatches) if BASE in policy_columns(section) else 0
        passes = 2 if self._looks_first else 1
        counted = Counted(progress, len(share.microbatches) * section.num_epochs * passes + len(ahead) + num_base)
        if ahead:
            _add_old_logprobs(bench, later, ahead)
            counted.advance(len(ahead))
        if BASE in policy_columns(section):
            for minibatch in share.minibatches:
                minibatch.add_column(BASE, _logprobs(bench.engine.forward(minibatch.microbatches, base=True)))
                counted.advance(len(minibatch.microbatches))
        kept: dict[int, list[torch.Tensor]] = {}

        def objective(minibatch: Minibatch) -> Loss:
            if id(minibatch) in kept:
                minibatch.add_column(measured, kept.pop(id(minibatch)))
            seen = bench.engine.forward(minibatch.microbatches) if self._looks_first else []
            counted.advance(len(seen))
            if self._covariance is not None:
                select(bench.group, minibatch, self._covariance, seen)
            policy: Loss = PolicyObjective(section, minibatch.counts, batch.coefficients, self._length)
            if self._moe is not None:
                policy = RouterLosses(policy, self._moe, router_load(bench.group, seen), "actor")
            return policy if minibatch.has(measured) else _keeping(policy, kept.setdefault(id(minibatch), []))

        metrics, skipped = optimize(bench, share, objective, section.num_epochs, counted, "actor")
        for minibatch in share.minibatches:
            if not minibatch.has(measured):
                minibatch.add_column(measured, kept[id(minibatch)])
        metrics = per_update(metrics, _SUMS, section.num_minibatches * section.num_epochs)
        _add_mismatch(bench, metrics, [microbatch for microbatch in share.microbatches if microbatch.lengths], measured)
        if bench.group.leads:
            metrics.mean("actor/read_s", read_s)
        effort.add_to(metrics, "actor", share.num_tokens)
        return metrics, skipped

    def _derive(self, step: int, versions: frozenset[int]) -> Derive:
        def derive(row: dict[str, Array], ref: RowRef) -> Mapping[str, Array]:
            keys = {KEYS: token_keys(f"{self._seed}/{step}/{ref.id}", ref.num_tokens)} if self._covariance else {}
            return {**_on_policy(row, versions), **keys}

        return derive


def build(settings: RunSettings, connection: Connection, vitals: Vitals = UNWATCHED) -> "ActorEngine":
    """This rank's engine, its model loaded; a collective. ConfigError, of a plug-in before anything is started."""
    steps = PolicySteps(settings)
    engine, bench = start_bench(
        settings,
        settings.actor,
        connection,
        path=settings.model.path,
        head="policy",
        optimizer=settings.actor.optimizer,
        lora=settings.actor.lora,
        moe=settings.actor.moe,
        total_steps=config.num_optimizer_steps(settings),
        vitals=vitals,
    )
    return ActorEngine(settings, bench, steps, engine, engine.num_parameters)


class ActorEngine(TrainerRanks):
    """service.ActorEngine over the ranks of a group."""

    def __init__(self, settings: RunSettings, bench: Bench, steps: PolicySteps, state: EngineState, num_parameters: int) -> None:
        """A collective: the manifest is made by gathering every parameter once."""
        super().__init__(bench, steps, state, num_parameters)
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
    """Computes old_logprobs of the microbatches `ahead`, all those of `minibatches`, before the first update; a collective."""
    outputs = iter(bench.engine.forward(ahead))
    for minibatch in minibatches:
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


def _add_mismatch(bench: Bench, metrics: Metrics, microbatches: Sequence[Microbatch], measured: str) -> None:
    """How far sampler and actor are apart: over trajectories sampled with these very weights (`mismatch_*`), and over all. A collective.

    `measured` is the column of the actor's logprobs. What adds up is summed over the slots and reported by rank 0, exact; order statistics are each rank's
    own, of which the extreme is kept.
    """
    sums = sum((_mismatch_sums(each, measured) for each in microbatches), MismatchSums())
    whole = mismatch(MismatchSums(*bench.group.sum_over_slots(np.array(sums.numbers())).tolist()))
    if whole is not None and bench.group.leads:
        for name, value in vars(whole).items():
            if value is not None:
                metrics.mean(f"actor/{_SHOWN[name]}", value)
    if not microbatches:
        return
    trained_N = torch.cat([each.columns[measured] for each in microbatches])
    sampled_N = torch.cat([each.columns["rollout_logprobs"] for each in microbatches])
    all_N = torch.cat([each.score_mask_N for each in microbatches])
    pure_N = torch.cat([each.columns[ON_POLICY] for each in microbatches]) & all_N
    num_pure = int(pure_N.sum())
    metrics.sum("actor/mismatch_tokens", num_pure)
    pure, everything = spread(sampled_N, trained_N, pure_N), spread(sampled_N, trained_N, all_N)
    if pure is not None:
        metrics.mean("actor/mismatch_mean", pure.mean_abs, num_pure)
        metrics.max("actor/mismatch_max", pure.max_abs)
        metrics.max("actor/mismatch_p999", pure.p999_abs)
    if everything is not None:
        metrics.max("actor/mismatch_all_max", everything.max_abs)
        metrics.max("actor/mismatch_all_p999", everything.p999_abs)
        metrics.min("actor/sampler_ratio_min", everything.ratio_min)
        metrics.min("actor/sampler_ratio_p01", everything.ratio_p01)
        metrics.max("actor/sampler_ratio_p99", everything.ratio_p99)
        metrics.max("actor/sampler_ratio_max", everything.ratio_max)


def _mismatch_sums(microbatch: Microbatch, measured: str) -> MismatchSums:
    columns, index_N = microbatch.columns, sequence_index(microbatch.cu_seqlens, microbatch.token_ids_N.numel())
    return mismatch_sums(columns["rollout_logprobs"], columns[measured], microbatch.score_mask_N, index_N, len(microbatch.lengths))
