"""Checks 6, 7 and 15: the optimizer's arithmetic, adapters and value heads, and how far apart correct engines are."""

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.device import free_cached_memory
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objectives import SupervisedObjective, ValueObjective
from rolecall.training.packing import Row, local_counts, pack
from rolecall.wire import Array
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import (
    STD,
    Stage,
    local_gradients,
    local_moments,
    local_parameters,
    make_engine,
    make_rows,
    packed,
    relative,
    write_zeros,
)

_RATE = 1e-7
_PROBE_TOKENS = 64
_TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"


def check_masters(found: Findings, folder: Path) -> None:
    """Many steps at a rate that bfloat16 could not represent, against AdamW of float32 that gets the same gradients."""
    stage = Stage.of(found, folder)
    num_steps = stage.pick(200, 8)
    config = stage.config("0.6B", **stage.pick({"num_hidden_layers": 4, "vocab_size": 8192}, {}))
    section = OptimizerSection(learning_rate=_RATE, max_grad_norm=1e30, weight_decay=0.0)
    engine = make_engine(stage, write_zeros(folder / "model", config), optimizer=section)
    parameters = local_parameters(engine)
    found.require(
        "a master weight is not float32", all(parameter.dtype == torch.float32 for parameter in parameters.values())
    )
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    exact = {name: parameter.clone() for name, parameter in parameters.items()}
    reference = torch.optim.AdamW(
        exact.values(), lr=_RATE, betas=section.betas, eps=section.eps, weight_decay=0.0, foreach=False, fused=False
    )
    rows = make_rows(stage.pick((300, 200), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SupervisedObjective(local_counts(rows))
    for _ in range(num_steps):
        engine.forward_backward([microbatch], objective, entropy=True)
        gradients = local_gradients(engine)
        for name, tensor in exact.items():
            tensor.grad = gradients[name].clone()
        engine.step()
        reference.step()
    found.require(
        "a moment is not float32", all(moment.dtype == torch.float32 for moment in local_moments(engine).values())
    )
    after = local_parameters(engine)
    found.at_most("parameters, relative", max(relative(after[name], exact[name]) for name in exact), 1e-6)
    found.figure("steps", num_steps)
    # Matrices: a move of 1e-7 is lost in the rounding of a norm's weight, which is 1. Rows of the embedding that no
    # token names do not move.
    inner = [name for name, tensor in exact.items() if tensor.ndim == 2 and "embed" not in name]
    found.at_most(
        "moves, relative",
        max(relative(after[name] - before[name], exact[name] - before[name], _RATE) for name in inner),
        2e-2,
    )
    moved = sum(int((after[name] != before[name]).sum()) for name in inner) / sum(
        before[name].numel() for name in inner
    )
    found.at_least("share of weights that moved", moved, stage.pick(0.9, 0.5))


def check_heads(found: Findings, folder: Path) -> None:
    """One step of adapters and one of a value head; without its adapters the model is the frozen one, to the bit."""
    stage = Stage.of(found, folder)
    config = stage.config("0.6B")
    path = write_zeros(folder / "model", config)
    rows = make_rows(stage.pick((2000, 900, 500), (20, 9, 5)), config.vocab_size)
    microbatch = packed(rows, stage.device)
    frozen = make_engine(stage, path, optimizer=None)
    adapted = make_engine(
        stage,
        path,
        optimizer=OptimizerSection(learning_rate=1e-2),
        lora=LoraSection(rank=8, target_modules=("q_proj", "down_proj")),
    )
    of_base = _logprobs(frozen, rows, stage)
    found.require("new adapters change what the model says", torch.equal(_logprobs(adapted, rows, stage), of_base))
    for _ in range(2):  # the first moves B alone: A's gradient is 0 while B is
        adapted.forward_backward([microbatch], SupervisedObjective(local_counts(rows)), entropy=True)
        outcome = adapted.step()
    found.require("the adapters' step was not applied", outcome.applied)
    found.figure("adapters' gradient norm", outcome.grad_norm)
    found.require(
        "base is not the frozen engine, bit for bit", torch.equal(_logprobs(adapted, rows, stage, base=True), of_base)
    )
    found.require("trained adapters change nothing", not torch.equal(_logprobs(adapted, rows, stage), of_base))
    del frozen, adapted
    _check_values(stage, path)


def _logprobs(engine: FsdpEngine, rows: Sequence[Row], stage: Stage, base: bool = False) -> torch.Tensor:
    (outputs,) = engine.forward([packed(rows, stage.device)], base=base)
    assert isinstance(outputs, TokenOutputs)
    return outputs.logprobs_N


def _check_values(stage: Stage, path: Path) -> None:
    engine = make_engine(stage, path, head="value", optimizer=OptimizerSection(learning_rate=1e-4))
    rows = make_rows(stage.pick((2000, 900, 500), (20, 9, 5)), engine.config.vocab_size)
    rng = np.random.default_rng(0)
    rows = [
        {
            **row,
            "values": np.zeros(len(row["token_ids"]), np.float32),
            "returns": rng.random(len(row["token_ids"]), np.float32),
        }
        for row in rows
    ]
    microbatch = pack(rows, ["loss_mask", "values", "returns"], temperature=1.0, device=stage.device)
    losses = []
    for _ in range(2):
        losses.append(
            engine.forward_backward([microbatch], ValueObjective(None, local_counts(rows))).values()["critic/loss"]
        )
        outcome = engine.step()
    stage.found.figure("value loss", f"{losses[0]:.4f}, {losses[1]:.4f} after a step")
    stage.found.require("the value head's step was not applied", outcome.applied and outcome.grad_norm > 0)
    stage.found.require("the value loss did not fall", losses[1] < losses[0])


@torch.no_grad()
def check_probe(found: Findings, folder: Path) -> None:
    """The same weights and ids by the trainer's engine and by transformers: what a probe's bound must let pass. Heads
    of three spreads of logits."""
    stage = Stage.of(found, folder)
    config = stage.config("4B", tie_word_embeddings=False)
    engine = make_engine(stage, write_zeros(folder / "model", config), optimizer=None)
    head = next(parameter for name, parameter in local_parameters(engine).items() if name == "lm_head.weight")
    texts = {
        "uniform": np.random.default_rng(0).integers(0, config.vocab_size, _PROBE_TOKENS, dtype=np.int32),
        "text": _ids_of_text(config.vocab_size),
    }
    # Of the logits: the final norm makes every hidden state's root mean square 1.
    spread = STD * config.hidden_size**0.5
    scale = 1.0
    largest = 0.0
    for wanted in (1.0, 2.0, 4.0):
        head.mul_(wanted / spread / scale)
        scale = wanted / spread
        flash = {name: _by_engine(engine, ids, stage) for name, ids in texts.items()}
        others = _by_transformers(stage, engine, texts)
        for name in texts:
            exact = others["float32", name]
            found.require(
                f"{name} at {wanted:g}: not every number is finite",
                bool(np.isfinite(exact).all() and np.isfinite(flash[name]).all()),
            )
            pairs = {
                "engine-sdpa": (flash[name], others["sdpa", name]),
                "engine-eager": (flash[name], others["eager", name]),
                "engine-float32": (flash[name], exact),
                "sdpa-eager": (others["sdpa", name], others["eager", name]),
            }
            gaps = {pair: np.abs(one - other) for pair, (one, other) in pairs.items()}
            largest = max(largest, *(float(gap.mean()) for gap in gaps.values()))
            said = ", ".join(
                f"{pair} {gap.mean():.3f}/{np.median(gap):.3f}/{gap.max():.3f}" for pair, gap in gaps.items()
            )
            found.figure(f"logit std {wanted:g}, {name} (mean/median/max)", said)
    found.figure("largest mean", largest)
    found.require("two engines of the same weights have nothing in common", largest < 1.0)


def _ids_of_text(vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Words of a text as ids by how often they come: the repetitions of a language without a tokenizer."""
    words = _TEXT.read_text().split()
    ranks = {word: rank for rank, word in enumerate(sorted(set(words), key=lambda word: (-words.count(word), word)))}
    return np.asarray([ranks[word] % vocab for word in words[100 : 100 + _PROBE_TOKENS]], np.int32)


def _by_engine(engine: FsdpEngine, ids: Array, stage: Stage) -> Array:
    row = {"token_ids": ids, "response_mask": np.ones(ids.shape, np.uint8)}
    (outputs,) = engine.forward([pack([row], (), temperature=1.0, device=stage.device)])
    assert isinstance(outputs, TokenOutputs)
    return np.asarray(outputs.logprobs_N[1:].double().cpu().numpy())


def _by_transformers(stage: Stage, engine: FsdpEngine, texts: dict[str, Array]) -> dict[tuple[str, str], Array]:
    """By (attention or dtype, text)."""
    said: dict[tuple[str, str], Array] = {}
    for dtype in (torch.bfloat16, torch.float32):
        with torch.device(stage.device):
            model = Qwen3ForCausalLM._from_config(engine.config, dtype=dtype, attn_implementation="sdpa").eval()
        model.load_state_dict(dict(engine.named_weights()))
        ways = ("sdpa", "eager") if dtype == torch.bfloat16 else ("sdpa",)
        for way in ways:
            model.set_attn_implementation(way)
            for name, ids in texts.items():
                ids_T = torch.from_numpy(ids.astype(np.int64)).to(stage.device)
                logits = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].double()
                logprobs = torch.log_softmax(logits, -1).gather(1, ids_T[1:, None])[:, 0]
                said["float32" if dtype == torch.float32 else way, name] = np.asarray(logprobs.cpu().numpy())
        del model
        gc.collect()
        free_cached_memory(stage.device)
    return said
