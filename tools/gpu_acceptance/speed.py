"""Checks 5 and 16: how fast the engine trains models of real shapes, in how much memory, whether it computes what a
float32 one does; its longest silence."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rolecall.settings.deadlines import GPU_HANG_S
from rolecall.training.account.flops import count_flops
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.account.peaks import peak_flops
from rolecall.training.engine import Microbatch
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.packed_model import build_model, layers
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import Row, local_counts
from rolecall.training.ranks.device import free_cached_memory, memory_bytes, name_of, take_peak_bytes, wait_for
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Size, Stage, make_engine, make_rows, packed, write_zeros

MFU, COMPILED_MFU = 0.35, 0.4
"""Least share of the peak at 4B without recomputation, and with compiled layers."""
NORM = 0.02
"""Largest relative gap between gradient norms of the bfloat16 and the float32 engine."""
_FILLED = 0.88
"""Share of the device's memory that a configuration may be expected to take: the allocator leaves gaps."""
SPREAD = 0.02
"""Largest relative gap between two runs of the same work."""
_SILENCE_LAYERS = 8
"""Enough to tell a layer's time from the head's; 36 would be loaded for longer than they are measured."""


@dataclass
class Silence:
    """An engine's `progressed`, which notes the longest time between two calls."""

    longest_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        """Any thread may call."""
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def begin(self) -> None:
        """Forgets what was."""
        self.longest_s, self._last = 0.0, time.monotonic()


def check_engine(found: Findings, folder: Path) -> None:
    """Two shapes, with and without recomputation; the larger one's layers compiled, too."""
    stage = Stage.of(found, folder)
    sizes: Sequence[Size] = stage.pick(("4B", "0.6B"), ("4B",))  # the one that is judged first
    for size in sizes:
        with found.attempt(size):
            _measure_size(stage, size)
        _free(stage)
    with found.attempt("gradient norms"):
        _compare_norms(stage)


def _measure_size(stage: Stage, size: Size) -> None:
    memory, silence = PhaseMemory(stage.device), Silence()
    path = write_zeros(stage.folder / size, stage.config(size))
    started = time.monotonic()
    both_ways = size == "4B"
    engine = make_engine(stage, path, memory=memory, progressed=silence, torch_compile=both_ways)
    stage.found.figure(f"{size} loaded in s", time.monotonic() - started)
    for compiled in (True, False) if both_ways else (False,):
        if both_ways and not compiled:
            for layer in layers(engine._model):
                del layer.forward  # the class's own is below
        for checkpointing in (True, False):
            _recompute(engine, checkpointing)
            expected = _memory_needed(stage, engine)
            for budget in stage.pick((16384,) if size == "4B" and checkpointing else (32768, 16384, 8192, 4096), (64,)):
                if expected(budget) <= _FILLED * memory_bytes(stage.device)[1]:
                    _measure(stage, engine, Case(size, budget, checkpointing, compiled), memory, silence)
                    _free(stage)
                    break  # the largest that fits
            else:
                stage.found.require(f"no budget of {size} fits", False)


def _memory_needed(stage: Stage, engine: FsdpEngine) -> Callable[[int], float]:
    """Bytes that a microbatch of so many tokens will take with everything that is held, an earlier microbatch's
    gradients included, from two small ones. A pass that runs out of memory leaves FSDP in the middle of it, so none is
    tried.
    """
    small = stage.pick((1024, 3072), (8, 24))
    peaks = []
    for length in small:
        rows = make_rows([length], engine.config.vocab_size)
        microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
        engine.forward_backward([microbatch], objective, entropy=True)
        engine.step()  # makes the moments
        engine.forward_backward([microbatch], objective, entropy=True)  # makes the gradients
        take_peak_bytes(stage.device)
        engine.forward_backward([microbatch], objective, entropy=True)
        wait_for(stage.device)
        peaks.append(take_peak_bytes(stage.device))
        engine.step()
    a_token = max(0.0, (peaks[1] - peaks[0]) / (small[1] - small[0]))
    return lambda num_tokens: peaks[1] + 1.1 * a_token * max(0, num_tokens - small[1])


@dataclass(frozen=True)
class Case:
    """One configuration that is measured."""

    size: Size
    budget: int
    """Tokens of a microbatch."""
    checkpointing: bool
    compiled: bool

    def __str__(self) -> str:
        budget = f"{self.budget // 1024}k" if self.budget >= 1024 else self.budget
        return f"{self.size} {'compiled ' if self.compiled else ''}{'gc' if self.checkpointing else 'no gc'} {budget}"


def _measure(stage: Stage, engine: FsdpEngine, case: Case, memory: PhaseMemory, silence: Silence) -> None:
    """Measures one case."""
    rows = _rows(case.budget, engine.config.vocab_size)
    counts = local_counts([row for microbatch in rows for row in microbatch])
    microbatches = [packed(microbatch, stage.device) for microbatch in rows]
    objective = SftObjective(counts)
    memory.take_peaks()
    engine.forward_backward(microbatches, objective, entropy=True)  # so that what is measured allocates nothing new
    engine.step()
    silence.begin()
    flops = engine.flops_done
    runs = [stage.seconds(lambda: engine.forward_backward(microbatches, objective, entropy=True)) for _ in range(2)]
    flops = (engine.flops_done - flops) / len(runs)
    engine.step()
    num_tokens = sum(sum(microbatch.lengths) for microbatch in microbatches)
    peaks = ", ".join(f"{phase} {num_bytes / 2**30:.1f}" for phase, num_bytes in memory.take_peaks().items())
    peak, spread = peak_flops(name_of(stage.device), engine.dtype), abs(runs[0] - runs[1]) / min(runs)
    mfu = flops / min(runs) / peak if peak else 0.0
    stage.found.figure(
        str(case),
        f"{num_tokens / min(runs):.0f} tokens/s, MFU {mfu:.0%}, {peaks} GiB, silent {silence.longest_s:.2g} s, "
        f"spread {spread:.1%}",
    )
    stage.found.require(f"two runs of {case} differ by {spread:.1%}", spread < SPREAD, on_device=True)
    if case.size == "4B" and not case.checkpointing:
        least = COMPILED_MFU if case.compiled else MFU
        stage.found.require(f"MFU of {case} is {mfu:.1%}", mfu >= least, on_device=True)


def _rows(budget: int, vocab: int) -> list[list[Row]]:
    """Two full microbatches: one long row and many short ones; the lengths of the short ones spread from a 64th of the
    budget up."""
    shortest, left = max(2, budget // 64), budget - budget // 2
    lengths = []
    rng = np.random.default_rng(0)
    while left >= shortest:
        lengths.append(min(left, int(shortest * 2 ** rng.uniform(0, 4))))
        left -= lengths[-1]
    return [make_rows([budget], vocab), make_rows([budget // 2, *lengths], vocab, seed=1)]


def _compare_norms(stage: Stage) -> None:
    """The gradient's norm by the bfloat16 engine and by a float32 one of the same weights, over the same rows."""
    path = write_zeros(stage.folder / "norms", stage.config("0.6B"))
    rows = make_rows(stage.pick((2048, 1024, 700, 300), (20, 9)), stage.config("0.6B").vocab_size, seed=2)
    norms = {}
    for dtype in ("bfloat16", "float32"):
        engine = make_engine(stage, path, dtype=dtype)
        engine.forward_backward([packed(rows, stage.device)], SftObjective(local_counts(rows)), entropy=True)
        norms[dtype] = engine.step().grad_norm
        del engine
        _free(stage)
    stage.found.at_most("gradient norm, bf16 against float32", abs(norms["bfloat16"] / norms["float32"] - 1), NORM)


def check_silence(found: Findings, folder: Path) -> None:
    """One row of 32k tokens through a few layers of an 8B model, recomputed: the longest time in which the engine shows
    no progress."""
    stage = Stage.of(found, folder)
    length = stage.pick(32768, 48)
    config = stage.config("8B", **stage.pick({"num_hidden_layers": _SILENCE_LAYERS}, {}))
    silence = Silence()
    engine = make_engine(stage, write_zeros(folder / "8B", config), gradient_checkpointing=True, progressed=silence)
    rows = make_rows([length], config.vocab_size)
    microbatches: list[Microbatch] = [packed(rows, stage.device)] * 2
    objective = SftObjective(local_counts(rows))
    engine.forward_backward(microbatches[:1], objective, entropy=True)
    wait_for(stage.device)
    silence.begin()
    flops = engine.flops_done
    seconds = stage.seconds(lambda: engine.forward_backward(microbatches, objective, entropy=True))
    silence()  # what was silent until the device was done counts
    rate = (engine.flops_done - flops) / seconds
    larger = folder / "32B"
    larger_config = stage.config("32B")
    larger_config.architectures = ["Qwen3ForCausalLM"]
    larger_config.save_pretrained(larger)
    larger_s = count_flops(build_model(larger, "policy", torch.float32)).update.total([length], length) / rate
    # Of a layer to a layer.
    scale = larger_s / larger_config.num_hidden_layers / (seconds / len(microbatches) / config.num_hidden_layers)
    found.figure("layers of 8B", config.num_hidden_layers)
    found.figure("s a row of 32k", seconds / len(microbatches))
    found.figure("TFLOP/s", rate / 1e12)
    found.figure("longest silence, s", silence.longest_s)
    found.figure("s a row of 32k at 32B on one GPU", larger_s)
    found.figure("hang_s", GPU_HANG_S)
    found.at_most("silence at 32B if it is a layer's, s", silence.longest_s * scale, GPU_HANG_S, on_device=True)
    found.require("no progress was shown", 0 < silence.longest_s < seconds, on_device=True)
    found.require("the pass took no time", seconds > 0)


def _recompute(engine: FsdpEngine, on: bool) -> None:
    """Sets what EngineOptions.gradient_checkpointing sets, of an engine that is there already: loading it again would
    take longer than measuring.
    """
    if on:
        engine._model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        engine._model.hf.gradient_checkpointing_disable()


def _free(stage: Stage) -> None:
    gc.collect()
    free_cached_memory(stage.device)
