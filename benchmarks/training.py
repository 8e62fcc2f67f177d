"""The training library beside what it replaces: packing, logprobs, balance, checkpoints, export; one table from one
run. See README.md.

Everything is measured by processes of their own (training_measures.py), one after the other on the same machine; with
--quick in this one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.machine import describe

HERE = Path(__file__).resolve().parent
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MIDDLE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
LARGE = {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@dataclass(frozen=True)
class Scale:
    """The amount that is measured."""

    packing: dict[str, Any]
    logprobs: dict[str, int]
    checkpoint: dict[str, Any]
    rounds: int
    measure: Callable[..., dict[str, Any]]
    """Calls a function of training_measures.py by name."""


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str
    ours: str
    other: str
    ratio: str = ""


def in_a_process(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns what training_measures.py prints. SystemExit with the end of its output when it fails."""
    command = [sys.executable, str(HERE / "training_measures.py"), name, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n\n{name} failed with {done.returncode}")
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


def here(name: str, **arguments: Any) -> dict[str, Any]:
    """The same in this process: what it says of memory means nothing."""
    from benchmarks.training_measures import MEASURES

    return MEASURES[name](**arguments)


FULL = Scale(
    packing={"shape": MIDDLE | HEADS, "num_rows": 96, "max_tokens": 2048, "token_budget": 8192},
    logprobs={"num_tokens": 2048, "hidden": 1024, "vocab": 151_936},
    checkpoint={"shape": LARGE | HEADS, "num_rows": 4, "max_tokens": 512},
    rounds=3,
    measure=in_a_process,
)
QUICK = Scale(
    packing={"shape": SMALL | HEADS, "num_rows": 12, "max_tokens": 128, "token_budget": 256},
    logprobs={"num_tokens": 64, "hidden": 32, "vocab": 2000},
    checkpoint={"shape": SMALL | HEADS, "num_rows": 1, "max_tokens": 64},
    rounds=1,
    measure=here,
)


def packing_lines(scale: Scale, folder: Path) -> list[Line]:
    """Packed against padded."""
    result = scale.measure("packing", folder=str(folder / "middle"), rounds=scale.rounds, **scale.packing)
    losses, seconds = result["losses"], result["seconds"]
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"packed and padded do not compute the same: {losses}")
    rate = {name: result["num_tokens"] / median(each) for name, each in seconds.items()}
    rows = f"{scale.packing['num_rows']} sequences, {result['num_tokens']} tokens, longest {result['longest']}"
    return [
        Line(
            f"packed, tokens/s: {rows}",
            f"{rate['packed']:.0f}",
            f"{rate[other]:.0f} {other}",
            ratios(seconds[other], seconds["packed"]),
        )
        for other in ("padded", "padded, sorted")
    ]


def ratios(other: Sequence[float], ours: Sequence[float]) -> str:
    """Median, lowest and highest of each round's pair."""
    each = sorted(a / b for a, b in zip(other, ours, strict=True))
    return f"{median(each):.2f}x" + (f" ({each[0]:.2f}-{each[-1]:.2f})" if len(each) > 1 else "")


def logprobs_lines(scale: Scale) -> list[Line]:
    """Blocked against whole logits; the two take turns."""
    lines = []
    for dtype, entropy in (("float32", True), ("float32", False), ("bfloat16", True)):
        found: dict[str, list[dict[str, float]]] = {"blocked": [], "naive": []}
        for _ in range(scale.rounds):
            for way, results in found.items():
                results.append(scale.measure("logprobs", way=way, dtype=dtype, entropy=entropy, **scale.logprobs))
        sums = [each["sum"] for results in found.values() for each in results]
        if dtype == "float32" and max(sums) - min(sums) > 1e-5 * abs(sums[0]):
            raise SystemExit(f"blocked and whole logits do not agree: {sums}")
        case = f"logprobs{' and entropy' if entropy else ''}, {dtype}"
        for unit, key in (("s", "wall_s"), ("CPU s", "cpu_s")):
            ours, naive = ([each[key] for each in found[way]] for way in ("blocked", "naive"))
            lines.append(
                Line(f"{case}, {unit}", f"{median(ours):.2f}", f"{median(naive):.2f} whole logits", ratios(naive, ours))
            )
        memory = {way: median(each["extra_bytes"] for each in results) / 1e9 for way, results in found.items()}
        lines.append(Line(f"{case}, extra GB", f"{memory['blocked']:.2f}", f"{memory['naive']:.2f} whole logits"))
    return lines


def balance_lines(scale: Scale) -> list[Line]:
    """Quality and time of a partition."""
    found = scale.measure("balance", num_rows=4096, num_parts=64, rounds=scale.rounds)
    lines = []
    for key, name, form in (("excess", "heaviest part over the mean, less 1", "{:.1e}"), ("ms", "CPU ms", "{:.1f}")):
        others = ", ".join(f"{form.format(found[way][key])} {way}" for way in ("Karmarkar-Karp", "heap"))
        lines.append(Line(f"4,096 sequences over 64 parts, {name}", form.format(found["ours"][key]), others))
    return lines


def checkpoint_lines(scale: Scale, folder: Path) -> list[Line]:
    """Saves as the loop sees them, and the export of the last one."""
    where = folder / "checkpoint"
    found = scale.measure(
        "checkpoint", folder=str(folder / "large"), out=str(where), rounds=scale.rounds, **scale.checkpoint
    )
    save_s, blocked_s, step_s, beside_s = (
        median(found[key]) for key in ("save_s", "blocked_s", "step_s", "step_beside_s")
    )
    exported = scale.measure("export", checkpoint=str(where), out=str(folder / "exported"))
    largest = 4 * scale.checkpoint["shape"]["vocab_size"] * scale.checkpoint["shape"]["hidden_size"]
    return [
        Line(
            f"checkpoint of {found['num_bytes'] / 1e6:.0f} MB, loop blocked, s",
            f"{blocked_s:.3f}",
            f"{save_s:.2f} all of it",
            f"{blocked_s / save_s:.1%}",
        ),
        Line("  the step beside it, s", f"{beside_s:.2f}", f"{step_s:.2f} without a save", f"{beside_s / step_s:.2f}x"),
        Line(
            f"export of {exported['num_bytes'] / 1e6:.0f} MB, peak MB beyond the start",
            f"{exported['peak_bytes'] / 1e6:.0f}",
            f"{largest / 1e6:.0f} largest tensor",
            f"{exported['seconds']:.1f} s",
        ),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: does it still run?")
    parser.add_argument("--rounds", type=int, help="of each measurement")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    scale = replace(scale, rounds=arguments.rounds or scale.rounds)
    print(*describe(), f"torch {torch.__version__}, transformers {transformers.__version__}", "", sep="\n")
    print(f"{'what':<76}{'ours':>10}  {'against':<46}ratio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: list[Callable[[], list[Line]]] = [
            lambda: packing_lines(scale, folder),
            lambda: logprobs_lines(scale),
            lambda: balance_lines(scale),
            lambda: checkpoint_lines(scale, folder),
        ]
        for part in parts:
            for line in part():
                print(f"{line.what:<76}{line.ours:>10}  {line.other:<46}{line.ratio}", flush=True)


if __name__ == "__main__":
    main()
