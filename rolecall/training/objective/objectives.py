"""The losses that trainers minimise: the configured pieces of rolecall/algorithms put together as `Loss` callables of
the engine seam.

    objective = PolicyObjective(settings.algorithm, counts, batch.coefficients, length)
    # counts: of the whole mini-batch, all ranks
    columns = policy_columns(settings.algorithm)                     # what pack() must bring
    engine.forward_backward(microbatches, objective, entropy=True)  # False unless it is shown or has a coefficient

Owns metric names and reductions (prefixes actor/ and critic/). Metrics are gathered in one transfer per microbatch.

Shapes: N tokens of one microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rolecall.algorithms.aggregation import Counts, token_weights
from rolecall.algorithms.correction import correct
from rolecall.algorithms.kl import kl_N
from rolecall.algorithms.losses import PolicyBatch, token_losses
from rolecall.algorithms.losses.distillation import forward_topk_kl_N, reverse_kl_N
from rolecall.algorithms.losses.entropy import entropy_bonus
from rolecall.algorithms.losses.sft import sft_loss
from rolecall.algorithms.losses.value import value_loss
from rolecall.columns import TEACHER, TOPK_LOGPROBS, reference_column
from rolecall.settings import Aggregation, AlgorithmSection, DistillationSection
from rolecall.telemetry import Metrics
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.v1.trajectory_pb2 import Coefficients

VALUE_COLUMNS = ("loss_mask", "values", "returns")
"""What ValueObjective reads."""


def policy_columns(algorithm: AlgorithmSection) -> tuple[str, ...]:
    """Returns the columns that PolicyObjective reads. `old_logprobs` may be left out when the batch is one mini-batch
    and one epoch: then it is the policy itself.
    """
    of_every_loss = ("loss_mask", "advantages", "rollout_logprobs", "old_logprobs")
    return tuple(dict.fromkeys((*of_every_loss, *algorithm.loss_columns)))


@dataclass(frozen=True)
class PolicyObjective:
    """The configured policy loss, corrected for the sampler if configured, minus the entropy bonus, plus the KL to a
    reference.
    """

    algorithm: AlgorithmSection
    counts: Counts
    """Counts of the global mini-batch."""
    coefficients: Coefficients
    """Coefficients of the sealed batch."""
    length: int
    """The constant of seq_mean_token_sum_norm."""
    mean_weight: float = 1.0
    """The mean importance weight of the step, where the correction's are normalised."""

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        """A Loss. Metrics are means over the trained tokens."""
        assert isinstance(outputs, TokenOutputs)
        algorithm, columns = self.algorithm, microbatch.columns
        mask_N = columns["loss_mask"] & microbatch.score_mask_N
        sequence_N, num_sequences = microbatch.trajectory_N(), microbatch.num_trajectories
        weights_N = token_weights(mask_N, sequence_N, num_sequences, algorithm.aggregation, self.counts, self.length)
        logprobs_N, rollout_N = outputs.logprobs_N, columns["rollout_logprobs"]
        old_N = columns["old_logprobs"] if "old_logprobs" in columns else logprobs_N.detach()
        batch = PolicyBatch(logprobs_N, old_N, columns["advantages"], mask_N, sequence_N, num_sequences, columns)
        losses = token_losses(algorithm.policy_loss, batch)
        shown: dict[str, torch.Tensor] = {
            "actor/ratio": batch.ratio_N().detach(),
            "actor/entropy": outputs.entropy_N.detach(),
            "actor/old_kl": kl_N(old_N, logprobs_N.detach(), "k3"),
            "actor/sampler_kl": kl_N(rollout_N, old_N, "k3"),
            **{f"actor/{name}": value_N for name, value_N in losses.shown.items()},
        }
        if outputs.rerouted_N is not None:
            shown |= {
                "actor/rerouted_tokens": outputs.rerouted_N > 0,
                "actor/rerouted_layers": outputs.rerouted_N,
            }
        losses_N = losses.losses_N
        metrics = Metrics()
        if algorithm.correction is not None:
            correction = correct(algorithm.correction, batch, rollout_N, self.mean_weight)
            losses_N = losses_N * correction.weights_N
            shown |= {"actor/correction_weight": correction.weights_N, "actor/rejected_tokens": correction.rejected_N}
            _add_rejected_sequences(metrics, batch, correction.weights_N)
        loss = (losses_N * weights_N).sum()
        metrics.sum("actor/policy_loss", float(loss.detach()))
        if self.coefficients.entropy_coef:
            loss = loss - self.coefficients.entropy_coef * entropy_bonus(outputs.entropy_N, weights_N)
        kl = algorithm.kl
        if kl is not None and kl.placement == "loss":
            reference_kl_N = kl_N(logprobs_N, columns[reference_column(kl.reference)], kl.estimator, kl.gradient)
            loss = loss + self.coefficients.kl_coef * (reference_kl_N * weights_N).sum()
            shown["actor/reference_kl"] = reference_kl_N.detach()
        if algorithm.distillation is not None and algorithm.distillation.placement == "loss":
            teacher_kl_N = _teacher_kl_N(algorithm.distillation, outputs, columns)
            loss = loss + algorithm.distillation.coef * (teacher_kl_N * weights_N).sum()
            shown["actor/teacher_kl"] = teacher_kl_N.detach()
        metrics.sum("actor/loss", float(loss.detach()))
        _add_means(metrics, shown, mask_N)
        return loss, metrics


@dataclass(frozen=True)
class ValueObjective:
    """The clipped value loss, a mean over the mini-batch's trained tokens."""

    clip_eps: float | None
    counts: Counts
    """Counts of the global mini-batch."""

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        """A Loss. Metrics are means over the trained tokens."""
        assert isinstance(outputs, ValueOutputs)
        columns = microbatch.columns
        mask_N = columns["loss_mask"] & microbatch.score_mask_N
        sequence_N, num_sequences = microbatch.trajectory_N(), microbatch.num_trajectories
        weights_N = token_weights(mask_N, sequence_N, num_sequences, "token_mean", self.counts)
        loss, terms = value_loss(
            outputs.values_N, columns["returns"], columns["values"], weights_N, clip_eps=self.clip_eps
        )
        metrics = Metrics()
        metrics.sum("critic/loss", float(loss.detach()))
        shown = {
            "critic/value": outputs.values_N.detach(),
            "critic/return": columns["returns"],
            "critic/error": terms.error_N,
            "critic/clip_fraction": terms.clipped_N,
        }
        _add_means(metrics, shown, mask_N)
        return loss, metrics


@dataclass(frozen=True)
class SftObjective:
    """Negative log-likelihood of the tokens of loss_mask: the objective of `rolecall sft`, and a test's simplest."""

    counts: Counts
    aggregation: Aggregation = "token_mean"

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        """A Loss."""
        assert isinstance(outputs, TokenOutputs)
        mask_N = microbatch.columns["loss_mask"] & microbatch.score_mask_N
        sequence_N, num_sequences = microbatch.trajectory_N(), microbatch.num_trajectories
        weights_N = token_weights(mask_N, sequence_N, num_sequences, self.aggregation, self.counts)
        loss = sft_loss(outputs.logprobs_N, weights_N)
        metrics = Metrics()
        metrics.sum("sft/loss", float(loss.detach()))
        return loss, metrics


def _teacher_kl_N(
    distillation: DistillationSection, outputs: TokenOutputs, columns: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if distillation.top_k is not None:
        assert outputs.target_logprobs_Nk is not None
        return forward_topk_kl_N(outputs.target_logprobs_Nk, columns[TOPK_LOGPROBS])
    return reverse_kl_N(outputs.logprobs_N, columns[reference_column(TEACHER)], distillation.max_log_ratio)


def _add_rejected_sequences(metrics: Metrics, batch: PolicyBatch, weights_N: torch.Tensor) -> None:
    """The share of sequences with trained tokens of which none weighs anything."""
    trained_S = batch.sequence_sums_S(torch.ones_like(weights_N)) > 0
    kept_S = batch.sequence_sums_S((weights_N > 0).to(weights_N.dtype)) > 0
    num_trained, num_kept = torch.stack([trained_S.sum(), kept_S.sum()]).tolist()
    metrics.mean("actor/rejected_sequences", (num_trained - num_kept) / max(num_trained, 1), num_trained)


def _add_means(metrics: Metrics, shown: dict[str, torch.Tensor], mask_N: torch.Tensor) -> None:
    totals = torch.stack(
        [mask_N.sum(), *(torch.where(mask_N, value_N.double(), 0.0).sum() for value_N in shown.values())]
    ).tolist()
    num_tokens = totals[0]
    for name, total in zip(shown, totals[1:], strict=True):
        metrics.mean(name, total / max(num_tokens, 1), num_tokens)
