"""A game of several turns is learned, as people do it: the example, real roles, vLLM, a served environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolecall.config_file import read_tree
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/heldout/accuracy"


@pytest.mark.timeout(1500)
@pytest.mark.learning
@pytest.mark.parametrize("player", ["game.py", "agent.py"])
def test_a_policy_learns_to_guess_a_number_in_four_turns(tmp_path: Path, player: str) -> None:
    """Stepped by the rollout, and called by an agent that owns its loop."""
    metrics = trained(tmp_path, EXAMPLES / "guess_number", player)
    first, *_, last = [row[ACCURACY] for row in metrics if ACCURACY in row]
    assert first < 0.6
    assert last >= 0.9


def trained(folder: Path, example: Path, server: str) -> list[dict[str, Any]]:
    """Prepares the run of an example in `folder`, trains it in the environment that the example's file `server` serves,
    and looks whether its ledger balances; its metrics.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    address = f"127.0.0.1:{free_port()}"
    subprocess.run([sys.executable, str(example / "prepare.py"), str(folder)], check=True, env=environment, timeout=600)
    if (example / "sft.yaml").is_file():
        _warmed_up(folder, example / "sft.yaml")
    paths = {
        "run.dir": "run",
        "model.path": "model",
        "data.train": "train.jsonl",
        "evaluation.sets.heldout.path": "heldout.jsonl",
    }
    words = [f"--{key}={folder / name}" for key, name in paths.items()]
    (name,) = read_tree(example / "task.yaml")["environments"]
    game = subprocess.Popen([sys.executable, str(example / server), address], env=environment)
    try:
        subprocess.run(
            [sys.executable, "-m", "rolecall", "train", str(example / "task.yaml"), *words]
            + [f"--environments.{name}.address={address}"],
            check=True,
            env=environment,
            timeout=800,
        )
    finally:
        game.terminate()
        game.wait(30)
    ledger = subprocess.run([sys.executable, "-m", "rolecall", "ledger", str(folder / "run")], check=False, timeout=60)
    assert ledger.returncode == 0
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def _warmed_up(folder: Path, config: Path) -> None:
    """Makes the example's model in `folder` of its base."""
    command = [sys.executable, "-m", "rolecall"]
    words = [f"--run.dir={folder / 'sft'}", f"--model.path={folder / 'base'}", f"--data.train={folder / 'sft.jsonl'}"]
    subprocess.run([*command, "sft", str(config), *words], check=True, timeout=600)
    subprocess.run([*command, "export", str(folder / "sft"), str(folder / "model")], check=True, timeout=120)
