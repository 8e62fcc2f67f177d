"""What an engine at work says of its arithmetic and its memory, and what it says when memory runs out inside a real
pass.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from rolecall.errors import OutOfMemoryError
from rolecall.settings import OptimizerSection
from rolecall.telemetry import Metrics
from rolecall.training.account.memory import MemoryLostError, PhaseMemory
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import pack
from tests.integration.fsdp_ranks import make_rows
from tests.tiny_models import write_qwen3

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "dense", vocab=288)


def make_engine(model: Path, memory: PhaseMemory) -> FsdpEngine:
    options = EngineOptions(path=model, head="policy", dtype="float32", optimizer=OptimizerSection(), total_steps=2)
    return FsdpEngine(options, device=CPU, memory=memory)


def make_microbatches() -> list[Microbatch]:
    return [pack(rows, [], temperature=1.0, device=CPU) for rows in (make_rows(3), [], make_rows(5, seed=1))]


def plain_loss(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
    assert isinstance(outputs, TokenOutputs)
    return -outputs.logprobs_N.sum(), Metrics()


class Greedy(torch.autograd.Function):
    """The identity, whose gradient asks for more memory than there is."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**60)


def greedy_loss(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
    loss, metrics = plain_loss(microbatch, outputs)
    result: Any = Greedy.apply(loss)  # type: ignore[no-untyped-call]
    return result, metrics


def test_an_engine_counts_every_pass_by_its_lengths_and_scored_tokens(model: Path) -> None:
    memory = PhaseMemory(CPU)
    engine, microbatches = make_engine(model, memory), make_microbatches()
    lengths, num_scored = (
        [n for each in microbatches for n in each.lengths],
        sum(int(each.score_mask_N.sum()) for each in microbatches),
    )
    assert 0 < num_scored < sum(lengths)
    engine.forward(microbatches)
    forward = engine.flops.forward.total(lengths, num_scored)
    assert engine.flops_done == pytest.approx(forward, rel=1e-12)
    engine.forward_backward(microbatches, plain_loss)
    assert engine.flops_done == pytest.approx(forward + engine.flops.update.total(lengths, num_scored), rel=1e-12)
    engine.step()
    assert list(memory.take_peaks()) == ["load", "forward", "backward", "optimizer"]


def test_an_engine_that_runs_out_of_memory_names_its_own_tensors(model: Path) -> None:
    engine, microbatches = make_engine(model, PhaseMemory(CPU, role="actor")), make_microbatches()
    with pytest.raises(OutOfMemoryError) as first:
        engine.forward_backward(microbatches, greedy_loss)
    assert "rank 0 of actor ran out of memory in backward" in first.value.message
    assert "parameters " in first.value.message

    engine = make_engine(model, PhaseMemory(CPU, role="actor"))
    engine.forward_backward(microbatches, plain_loss)
    engine.step()
    engine.forward_backward(microbatches[:1], plain_loss)
    with pytest.raises(MemoryLostError, match=r"gradients .* GiB.* optimizer states .* GiB"):
        engine.forward_backward(microbatches, greedy_loss)
