"""Training in float16: gradients that are too small or too large for it, beside the same engine in float32."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.telemetry import Metrics
from rolecall.training.engine import Loss, Microbatch, StepOutcome, TokenOutputs, ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import whole
from rolecall.training.model.packed_model import Head
from rolecall.training.objective.objectives import VALUE_COLUMNS, SftObjective, ValueObjective
from rolecall.training.packing.pack import local_counts, pack
from tests import checkpoint_rig
from tests.integration.fsdp_ranks import make_engine, make_rows, weights_of
from tests.tiny_models import write_qwen3

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = make_rows(8)
LARGE = 2.0**8
"""Makes gradients that are infinite at the first scale; a hundredth of the loss makes some that are not."""
OPTIMIZER = OptimizerSection(learning_rate=1e-3, warmup_steps=0, weight_decay=0.0, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "policy")


def engine_of(model: Path, dtype: str = "float16", **more: Any) -> FsdpEngine:
    return make_engine(model, optimizer=OPTIMIZER, dtype=dtype, **more)


def scaled(loss: Loss, by: float) -> Loss:
    def wrapped(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        value, metrics = loss(microbatch, outputs)
        return value * by, metrics

    return wrapped


def backward(engine: FsdpEngine, by: float, head: Head = "policy") -> None:
    """Two microbatches with the loss times `by`."""
    columns = ["loss_mask"] if head == "policy" else list(VALUE_COLUMNS)
    counts = local_counts(ROWS)
    objective: Loss = SftObjective(counts) if head == "policy" else ValueObjective(0.2, counts)
    microbatches = [pack(rows, columns, temperature=0.7, device=engine.device) for rows in (ROWS[:4], ROWS[4:])]
    engine.forward_backward(microbatches, scaled(objective, by))


def update(engine: FsdpEngine, by: float = 1.0) -> list[StepOutcome]:
    """The outcomes of one update, computed as often as it has to be."""
    outcomes: list[StepOutcome] = []
    while not outcomes or outcomes[-1].again:
        backward(engine, by)
        outcomes.append(engine.step())
    return outcomes


def masters_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in engine._model.named_parameters()}


def gradients_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).clone() for name, p in engine._model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("by", [1e-2, 1e-5])
def test_gradients_however_small_are_those_of_float32(model: Path, by: float, head: Head) -> None:
    half, single = engine_of(model, head=head), engine_of(model, "float32", head=head)
    for engine in (half, single):
        backward(engine, by, head)
    ours, theirs = gradients_of(half), gradients_of(single)
    outcomes = half.step(), single.step()
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=0.01)
    assert [outcome.loss_scale for outcome in outcomes] == [2.0**16, None]
    for name, expected in theirs.items():
        assert (ours[name] / 2.0**16 - expected).norm() < 0.02 * expected.norm(), name


def test_the_norm_that_gradients_are_clipped_to_is_without_the_scale(model: Path) -> None:
    clipped = OPTIMIZER.model_copy(update={"max_grad_norm": 1e-6})  # where AdamW's epsilon shows how large they are
    half, single = (make_engine(model, optimizer=clipped, dtype=dtype) for dtype in ("float16", "float32"))
    before = masters_of(single)
    for engine in (half, single):
        assert update(engine)[-1].applied
    ours, theirs = masters_of(half), masters_of(single)
    for name, start in before.items():
        moved = theirs[name] - start
        assert moved.norm() > 0, name
        assert (ours[name] - start - moved).norm() < 0.1 * moved.norm(), name


def test_gradients_that_are_too_large_are_computed_again_at_a_lower_scale(model: Path) -> None:
    large, small = engine_of(model), engine_of(model)
    outcomes = update(large, LARGE)
    assert len(outcomes) > 1
    assert all(outcome.again and not outcome.applied for outcome in outcomes[:-1])
    assert outcomes[-1].loss_scale == 2.0 ** (17 - len(outcomes))
    assert (large.num_updates, large.num_skipped) == (1, 0)
    (once,) = update(small, 0.01)
    assert outcomes[-1].grad_norm == pytest.approx(once.grad_norm * LARGE / 0.01, rel=0.01)
    assert update(large)[0].applied


def test_a_loss_that_is_not_finite_is_skipped_at_once_and_one_too_large_at_any_scale_in_the_end(model: Path) -> None:
    engine = engine_of(model)
    before = weights_of(engine)
    assert [outcome.applied for outcome in update(engine, float("nan"))] == [False]
    assert [outcome.again for outcome in update(engine, 1e30)] == [True] * 16 + [False]
    assert (engine.num_updates, engine.num_skipped) == (0, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())
    assert update(engine, 0.01)[0].loss_scale == 2.0**16


def test_a_resumed_run_goes_on_with_its_scale_bit_for_bit(model: Path, tmp_path: Path) -> None:
    engine, resumed = engine_of(model), engine_of(model)
    update(engine, LARGE)
    checkpoint_rig.save(engine, tmp_path)
    checkpoint_rig.load(resumed, tmp_path)
    scales = {update(each)[-1].loss_scale for each in (engine, resumed)}
    assert len(scales) == 1
    assert scales != {2.0**16}
    ours, theirs = weights_of(engine), weights_of(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float16}


def test_a_run_in_another_type_goes_on_in_float16_and_back(model: Path, tmp_path: Path) -> None:
    engines = [engine_of(model, dtype) for dtype in ("bfloat16", "float16", "float32")]
    update(engines[0])
    for before, after in pairwise(engines):
        checkpoint_rig.save(before, tmp_path / before._options.dtype)
        checkpoint_rig.load(after, tmp_path / before._options.dtype)
        assert update(after)[-1].applied
    assert [engine.num_updates for engine in engines] == [1, 2, 3]


def test_adapters_train_in_float16(model: Path) -> None:
    lora = LoraSection(rank=4, alpha=8.0)
    half, single = (engine_of(model, dtype, lora=lora) for dtype in ("float16", "float32"))
    for _ in range(3):
        ours, theirs = update(half, 1e-6)[-1], update(single, 1e-6)[-1]
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)
