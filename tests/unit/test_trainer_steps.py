"""What a step promises whatever its objective: order, counted microbatches, and no answer for one that was partly
applied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.errors import InvalidInputError, OwnFunctionError, RoleCallError
from rolecall.telemetry import Metrics
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import Loss, Microbatch, StepOutcome, TokenOutputs, ValueOutputs
from rolecall.training.packing.pack import pack
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.trainer import Progress
from rolecall.training.step.optimize import MicrobatchCounter, StepCost, optimize, per_update
from rolecall.training.step.rank_context import RankContext
from rolecall.training.step.recorder import StepRecorder
from rolecall.training.step.share import Minibatch, TrainShare


class ScriptedEngine:
    """Answers each optimizer step with the next outcome, or raises it."""

    def __init__(self, *outcomes: StepOutcome | Exception) -> None:
        self.outcomes = list(outcomes)
        self.seen: list[int] = []
        self.places: list[int | None] = []
        self.flops_done = 0.0

    def forward(
        self, microbatches: Sequence[Microbatch], *, entropy: bool = False
    ) -> list[TokenOutputs | ValueOutputs]:
        return []

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss, *, entropy: bool = False) -> Metrics:
        metrics = Metrics()
        for microbatch in microbatches:
            self.seen.append(int(microbatch.token_ids_N[0]))
            metrics.merge(loss(microbatch, TokenOutputs(torch.zeros(1), torch.zeros(1)))[1])
        return metrics

    def step(self, place: int | None = None) -> StepOutcome:
        self.places.append(place)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def share_of(*minibatches: Sequence[int]) -> TrainShare:
    """One-token microbatches whose only token says which they are."""
    cpu = torch.device("cpu")
    made = []
    for numbers in minibatches:
        rows = [
            {"token_ids": torch.tensor([n]).int().numpy(), "response_mask": torch.ones(1).byte().numpy()}
            for n in numbers
        ]
        made.append(Minibatch([pack([row], (), temperature=1.0, device=cpu) for row in rows], Counts(1, 1)))
    return TrainShare([], made, 0)


def context_of(engine: Any) -> RankContext:
    unused: Any = None
    cpu = torch.device("cpu")
    memory = PhaseMemory(cpu)
    return RankContext(engine, unused, CommandGroup(0, 1, None), cpu, 64, memory, StepRecorder(memory))


def unit_loss(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
    metrics = Metrics()
    metrics.sum("actor/loss", 1.0)
    return torch.zeros(()), metrics


def test_every_minibatch_of_every_epoch_is_one_update_and_skipped_ones_are_counted() -> None:
    done, nan = StepOutcome(0.5, 1e-3, True), StepOutcome(float("nan"), 1e-3, False)
    kept = StepOutcome(0.5, 1e-3, True, num_bytes_kept=64)
    engine, progress = ScriptedEngine(done, nan, done, kept), Progress(lambda: None)
    metrics, skipped = optimize(
        context_of(engine),
        share_of([1, 2], [3]),
        lambda _: unit_loss,
        2,
        MicrobatchCounter(progress, 6),
        "actor",
        place=8,
    )
    assert (engine.seen, engine.places) == ([1, 2, 3, 1, 2, 3], [8, 9, 10, 11])
    assert (progress.num_done, progress.num_total, skipped) == (6, 6, 1)
    assert metrics.values() == {
        "actor/grad_norm": 0.5,
        "actor/grad_norm_max": 0.5,
        "actor/learning_rate": 1e-3,
        "actor/gathered_bytes": 64.0,
        "actor/loss": 6.0,
        "actor/skipped_steps": 1.0,
    }
    assert per_update(metrics, ("actor/loss",), 4).values()["actor/loss"] == 1.5


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        (InvalidInputError("two reductions"), RuntimeError, "partly applied: two reductions"),
        (OwnFunctionError("mine:loss raised"), OwnFunctionError, "^mine:loss raised$"),
    ],
)
def test_a_failure_between_updates_is_an_answer_only_where_it_ends_the_role(
    failure: RoleCallError, raised: type[Exception], message: str
) -> None:
    engine = ScriptedEngine(StepOutcome(0.5, 1e-3, True), failure)
    with pytest.raises(raised, match=message):
        optimize(
            context_of(engine),
            share_of([1], [2]),
            lambda _: unit_loss,
            1,
            MicrobatchCounter(Progress(lambda: None), 2),
            "actor",
            place=0,
        )


def test_an_effort_says_what_the_device_did_and_leaves_out_a_share_of_an_unknown_peak() -> None:
    engine = ScriptedEngine()
    context = context_of(engine)
    for known, peak_flops in (({"actor/mfu"}, 1e15), (set[str](), None)):
        cost = StepCost(replace(context, peak_flops=peak_flops))
        engine.flops_done += 6e12
        with context.memory.phase("forward"):
            pass
        metrics = Metrics()
        cost.add_to(metrics, "actor", 100)
        values = metrics.values()
        assert (
            values.keys() == {"actor/tflops", "actor/tokens", "actor/tokens_per_s", "actor/forward_peak_bytes"} | known
        )
        assert values["actor/tflops"] == pytest.approx(6 * values["actor/tokens_per_s"] / 100)
        assert not known or values["actor/mfu"] == pytest.approx(values["actor/tflops"] / 1e3)
        assert values["actor/forward_peak_bytes"] > 2**20
