"""A training pass over an episode of many turns as one row, beside a row for each turn, as trainers have it that know
prompts and responses alone: tokens computed and seconds, of the same loss on the same tokens.

    python -m benchmarks.turns [--turns 30] [--words 48] [--says 32] [--episodes 1] [--quick]

Three ways take turns, in one process on CPUs: the episodes' rows (`merged`); a row a turn, each with all that stands
before it (`a row a turn`); and the same where our packing computes once what rows begin with (`shared`, ADR 27). The
losses agree, which is looked at. Seconds are those of the process's cores.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.machine import describe
from benchmarks.training_measures import make_engine
from rolecall.training.engine import Microbatch
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.plan import plan_batch

PROMPT = 200
"""Tokens of an episode's first prompt."""
TOKEN_BUDGET = 8192
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODEL = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, **HEADS}


def episode(rng: np.random.Generator, num_turns: int, num_heard: int, num_said: int) -> Row:
    """One row: a prompt, then turns of `num_said` sampled tokens with `num_heard` of the environment between them."""
    turn = np.array([0] * num_heard + [1] * num_said, np.uint8)
    mask = np.concatenate([np.zeros(PROMPT - num_heard, np.uint8), np.tile(turn, num_turns)])
    ids = rng.integers(0, MODEL["vocab_size"], len(mask), dtype=np.int32)
    return {"token_ids": ids, "response_mask": mask, "loss_mask": mask}


def turns_of(row: Row) -> list[Row]:
    """A row for each turn, which ends with it."""
    mask = row["response_mask"]
    steps = np.diff(mask.astype(np.int8), append=0)
    starts, ends = np.flatnonzero(steps == 1) + 1, np.flatnonzero(steps == -1) + 1
    rows: list[Row] = []
    for start, end in zip(starts, ends, strict=True):
        own = np.where(np.arange(end) >= start, mask[:end], 0).astype(np.uint8)
        rows.append({"token_ids": row["token_ids"][:end], "response_mask": own, "loss_mask": own})
    return rows


def packed(engine: FsdpEngine, rows: Sequence[Row], *, shares: bool) -> list[Microbatch]:
    """The microbatches of `rows`; where it `shares`, what sequences begin with is computed once."""
    plan = plan_batch(
        [len(row["token_ids"]) for row in rows],
        num_minibatches=1,
        token_budget=TOKEN_BUDGET,
        world_size=1,
        cost=engine.flops.forward,
        seed=0,
    )[0]
    made = [
        pack([rows[i] for i in members], ["loss_mask"], temperature=1.0, device=engine.device)
        for members in plan.microbatches
    ]
    return made if shares else [replace(each, prefixes=None) for each in made]


def computed(microbatches: Sequence[Microbatch]) -> int:
    """Tokens that all layers but attention compute."""
    return sum(sum(each.lengths) - (each.prefixes.num_saved if each.prefixes else 0) for each in microbatches)


def main() -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--words", type=int, default=48, help="tokens of the environment between two turns")
    parser.add_argument("--says", type=int, default=32, help="tokens that the policy samples in a turn")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="four turns, one round: does it still run?")
    arguments = parser.parse_args()
    num_turns, rounds = (4, 1) if arguments.quick else (arguments.turns, arguments.rounds)
    print("\n".join(describe()))
    rng = np.random.default_rng(0)
    merged = [episode(rng, num_turns, arguments.words, arguments.says) for _ in range(arguments.episodes)]
    apart = [turn for row in merged for turn in turns_of(row)]
    counts = local_counts(merged)
    assert counts.num_tokens == local_counts(apart).num_tokens
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), MODEL)
        ways = {
            "merged": packed(engine, merged, shares=True),
            "a row a turn": packed(engine, apart, shares=False),
            "shared": packed(engine, apart, shares=True),
        }
        work: dict[str, Callable[[], float]] = {
            name: lambda parts=parts: engine.forward_backward(parts, SftObjective(counts)).values()["sft/loss"]  # type: ignore[misc]
            for name, parts in ways.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        losses = {}
        for number in range(rounds + 1):
            for name, once in work.items():
                started = time.process_time()
                losses[name] = once()
                engine.step()
                if number:  # the first round warms up
                    seconds[name].append(time.process_time() - started)
    print(f"{arguments.episodes} episodes of {num_turns} turns, {counts.num_tokens} sampled tokens")
    print(f"{'':14} {'tokens':>9} {'CPU s':>9} {'x tokens':>9} {'x s':>9}")
    base_tokens, base_s = computed(ways["merged"]), median(seconds["merged"])
    for name, parts in ways.items():
        tokens, taken = computed(parts), median(seconds[name])
        print(f"{name:14} {tokens:>9} {taken:>9.3f} {tokens / base_tokens:>9.1f} {taken / base_s:>9.1f}")
    apart_by = max(losses.values()) - min(losses.values())
    print(f"losses apart by at most {apart_by:.1e}")
    return 0 if apart_by < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
