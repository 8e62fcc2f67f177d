"""Mini-batches and epochs over a share, with any objective: what actor and critic do alike inside a step.

Owns the order of optimizer steps and their metrics (gradient norm, learning rate, skipped steps, tokens/s, MFU, peaks
of memory). Objectives are training/objective/objectives.py's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rolecall.errors import ENDS_ROLE, RoleCallError
from rolecall.telemetry import Metrics
from rolecall.training.engine import Loss, Microbatch, StepOutcome, TokenOutputs, ValueOutputs
from rolecall.training.serving.trainer import Progress
from rolecall.training.step.rank_context import RankContext
from rolecall.training.step.share import Minibatch, TrainShare
from rolecall.v1.trajectory_pb2 import REDUCTION_SUM


@dataclass
class MicrobatchCounter:
    """Counts microbatches of a step as they are done."""

    progress: Progress
    num_total: int
    num_done: int = 0

    def advance(self, num: int = 1) -> None:
        """`num` more are done."""
        self.num_done += num
        self.progress.report(self.num_done, self.num_total)


class StepCost:
    """The time, FLOPs and memory that a step takes; made when the step begins."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._started = time.perf_counter()
        self._flops = context.engine.flops_done

    def add_to(self, metrics: Metrics, role: str, num_tokens: int) -> None:
        """Adds speed, utilisation and the peak of each phase since they were last added. `num_tokens` of the whole
        batch, by all ranks.

        FLOP/s are a device's, over the whole step with its waiting; MFU (arXiv:2204.02311, appendix B) is absent where
        the peak is not known.
        """
        seconds = time.perf_counter() - self._started
        rate = (self._context.engine.flops_done - self._flops) / seconds
        metrics.mean(f"{role}/tflops", rate / 1e12)
        if self._context.peak_flops is not None:
            metrics.mean(f"{role}/mfu", rate / self._context.peak_flops)
        for phase, num_bytes in self._context.memory.take_peaks().items():
            metrics.max(f"{role}/{phase}_peak_bytes", num_bytes)
        if self._context.group.is_leader:
            metrics.mean(f"{role}/tokens_per_s", num_tokens / seconds)
            metrics.sum(f"{role}/tokens", num_tokens)


def optimize(
    context: RankContext,
    share: TrainShare,
    objective: Callable[[Minibatch], Loss],
    num_epochs: int,
    counter: MicrobatchCounter,
    role: str,
    *,
    place: int,
    entropy: bool = True,
) -> tuple[Metrics, int]:
    """Applies every mini-batch of every epoch: gradients, then one optimizer step. Returns this rank's metrics and the
    number of skipped steps. A collective.

    `place`: that of the first update in the learning rate's schedule. `entropy`: whether the objective reads it.

    Whatever fails here leaves a step that is partly applied: it ends the role, as a RuntimeError, which is never an
    answer (device_thread.py), or one of ENDS_ROLE.
    """
    try:
        metrics, skipped = Metrics(), 0
        for _ in range(num_epochs):
            for minibatch in share.minibatches:
                part, outcome = _update(context, minibatch, objective(minibatch), counter, entropy, place)
                place += 1
                metrics.merge(part)
                skipped += not outcome.applied
                if context.group.is_leader and outcome.applied:
                    metrics.mean(f"{role}/grad_norm", outcome.grad_norm)
                    metrics.max(f"{role}/grad_norm_max", outcome.grad_norm)
                if context.group.is_leader:
                    metrics.mean(f"{role}/learning_rate", outcome.learning_rate)
                    metrics.max(f"{role}/gathered_bytes", outcome.num_bytes_kept)
                if context.group.is_leader and outcome.loss_scale is not None:
                    metrics.mean(f"{role}/loss_scale", outcome.loss_scale)
        if context.group.is_leader:
            metrics.sum(f"{role}/skipped_steps", skipped)
        return metrics, skipped
    except ENDS_ROLE:
        raise
    except RoleCallError as error:
        raise RuntimeError(f"a step failed when it may have been partly applied: {error.message}") from error


def per_update(metrics: Metrics, names: tuple[str, ...], num_updates: int) -> Metrics:
    """`metrics` with the sums `names`, which added up over mini-batches, as shares of a mean over `num_updates` of
    them.
    """
    shared = Metrics()
    for metric in metrics.to_proto():
        if metric.name in names and metric.reduction == REDUCTION_SUM:
            shared.sum(metric.name, metric.value / num_updates)
        else:
            shared.merge(Metrics.from_proto([metric]))
    return shared


def _update(
    context: RankContext, minibatch: Minibatch, loss: Loss, counter: MicrobatchCounter, entropy: bool, place: int
) -> tuple[Metrics, StepOutcome]:
    """Computed again where the engine says so, of which nothing but the last time is told."""
    engine, microbatches = context.engine, minibatch.microbatches
    with context.recorder.update(len(microbatches)):  # of one pass: a trace has a bounded size
        part = engine.forward_backward(microbatches, _counting(loss, counter), entropy=entropy)
        outcome = engine.step(place)
    while outcome.again:
        part = engine.forward_backward(microbatches, loss, entropy=entropy)
        outcome = engine.step(place)
    return part, outcome


def _counting(loss: Loss, counter: MicrobatchCounter) -> Loss:
    def wrapped(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        result = loss(microbatch, outputs)
        counter.advance()
        return result

    return wrapped
