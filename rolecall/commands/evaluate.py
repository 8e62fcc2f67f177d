"""`rolecall evaluate MODEL --config CONFIG`: samples and scores the held-out sets of a run with a model, without
training.

It is a run of no steps: the launcher starts the same roles, the model reaches the rollouts as in training, attested,
and the controller's own evaluation at step 0 gives the figures, so that they can be compared with those of a run. What
belongs to training alone (algorithm, critic, references, adapters, trackers, the URL of a store) is left out of the
file. Nothing is kept but what `--out` asks for.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rolecall.commands.check import require
from rolecall.errors import ConfigError
from rolecall.launcher.placed import load_unplaced_tree
from rolecall.launcher.supervisor import train
from rolecall.settings import RunSettings, validated

OPTIONS = ("--config", "--json", "--out", "--recipe")
_OURS = ("controller", "actor", "rollout")
"""Roles that are started here: those of a run that goes on have other weights."""


def evaluate(arguments: argparse.Namespace, overrides: list[str], out: TextIO) -> int:
    """Evaluates and writes the figures; returns the exit code: 1 when a response has no score, or the evaluation was
    left out.
    """
    with contextlib.ExitStack() as stack:
        folder = _new_folder(arguments.out, stack)
        settings = evaluation_settings(arguments.config, overrides, arguments.recipe, arguments.model, folder)
        with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
            require(settings, sys.stdout)
            code = train(settings, resume=False)
        if code:
            stack.pop_all()  # the logs say why
            sys.stderr.write(f"what the evaluation left, its logs too, is in {folder}\n")
            return code
        sets = figures(folder / "metrics.jsonl", settings.evaluation.sets)
        if not sets:
            stack.pop_all()
            sys.stderr.write(f"the evaluation was left out; {folder}/logs/controller.log says why\n")
    if arguments.json:
        out.write(json.dumps({"model": str(arguments.model), "sets": sets}) + "\n")
    else:
        write_figures(sets, out)
    return int(any((found.get("missing") or 0.0) > 0 for found in sets.values()) or not sets)


def evaluation_settings(
    config: Path, overrides: list[str], recipe: str | None, model: Path, folder: Path
) -> RunSettings:
    """The run of no steps that evaluates `model` in the new directory `folder`. `config` may be the resolved one in a
    run's directory: the addresses of its roles were the launcher's, and are left out. ConfigError says what is missing.
    """
    tree, _ = load_unplaced_tree(config, overrides, recipe)
    sections: dict[str, dict[str, Any]] = {
        name: dict(section) for name, section in tree.items() if isinstance(section, dict)
    }
    run, evaluation = sections.get("run", {}), sections.get("evaluation", {})
    if not evaluation.get("sets"):
        raise ConfigError(f"{config}: evaluation.sets is empty; name the held-out sets to sample and score")
    elsewhere = [f"{name}.address" for name in _OURS if sections.get(name, {}).get("address")]
    if elsewhere:
        raise ConfigError(
            f"{config}: {', '.join(elsewhere)} names roles elsewhere, which have other weights; evaluate starts its "
            "own: set it to null on the command line"
        )
    for name in ("critic", "references", "telemetry"):
        sections.pop(name, None)
    for name in ("url", "durability"):
        sections.get("store", {}).pop(name, None)
    for name in ("optimizer", "lora", "router_replay"):
        sections.get("actor", {}).pop(name, None)
    sections.get("weights", {}).pop("merge_adapters", None)
    sections.get("sampling", {}).pop("num_responses", None)
    sections["evaluation"].pop("at_start", None)
    sections["run"] = {
        "name": run.get("name"),
        "seed": run.get("seed", 0),
        "dir": str(folder.resolve()),
        "num_steps": 0,
    }
    sections["model"] = {**sections.get("model", {}), "path": str(model.resolve())}
    sections["algorithm"] = {"groups_per_batch": 1}
    trackers = sections.get("trackers", {})
    kept = {key: trackers[key] for key in ("num_samples_kept",) if key in trackers}
    sections["trackers"] = {"tensorboard": False, **kept}
    return validated(sections, config)


def figures(metrics: Path, names: Iterable[str]) -> dict[str, dict[str, float | None]]:
    """The figures of each set of `names` that a run wrote at step 0; None for one that is not finite."""
    sets: dict[str, dict[str, float | None]] = {}
    longest_first = sorted(names, key=len, reverse=True)  # names may hold slashes, as those of figures do
    for line in metrics.read_text().splitlines():
        for name, value in json.loads(line).items():
            held_out = next((each for each in longest_first if name.startswith(f"eval/{each}/")), None)
            if held_out is not None:
                sets.setdefault(held_out, {})[name.removeprefix(f"eval/{held_out}/")] = value
    return sets


def write_figures(sets: Mapping[str, Mapping[str, float | None]], out: TextIO) -> None:
    """Writes a table for people."""
    for held_out, found in sets.items():
        width = max(map(len, found))
        out.write(f"{held_out}\n")
        shown = {figure: "not finite" if value is None else f"{value:.4g}" for figure, value in found.items()}
        out.writelines(f"  {figure:<{width}}  {text}\n" for figure, text in sorted(shown.items()))


def _new_folder(given: Path | None, stack: contextlib.ExitStack) -> Path:
    """The run's directory, which does not exist yet: the one that is `given`, or one that goes with `stack`."""
    if given is None:
        folder = Path(tempfile.mkdtemp(prefix="rolecall-evaluate-"))
        stack.callback(shutil.rmtree, folder)
        return folder / "run"
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise ConfigError(f"--out {given} is no empty folder; name a new one")
    return given
