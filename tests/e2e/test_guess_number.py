"""A game of several turns is learned, as people do it: the example, real roles, vLLM, a served environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

HERE = Path(__file__).parents[2] / "examples" / "guess_number"
ACCURACY = "eval/heldout/accuracy"


@pytest.mark.timeout(1500)
@pytest.mark.thorough("test_a_run_in_an_environment_trains_what_was_played_and_loses_nothing")
@pytest.mark.parametrize("player", ["game.py", "agent.py"])
def test_a_policy_learns_to_guess_a_number_in_four_turns(tmp_path: Path, player: str) -> None:
    """Stepped by the rollout, and called by an agent that owns its loop."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    address = f"127.0.0.1:{free_port()}"
    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(tmp_path)], check=True, env=environment, timeout=600)
    paths = {
        "run.dir": "run",
        "model.path": "model",
        "data.train": "train.jsonl",
        "evaluation.sets.heldout.path": "heldout.jsonl",
    }
    words = [f"--{key}={tmp_path / name}" for key, name in paths.items()]
    game = subprocess.Popen([sys.executable, str(HERE / player), address], env=environment)
    try:
        subprocess.run(
            [sys.executable, "-m", "rolecall", "train", str(HERE / "task.yaml"), *words]
            + [f"--environment.address={address}"],
            check=True,
            env=environment,
            timeout=800,
        )
    finally:
        game.terminate()
        game.wait(30)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row[ACCURACY] for row in metrics if ACCURACY in row]
    assert first < 0.6
    assert last >= 0.9
    ledger = subprocess.run(
        [sys.executable, "-m", "rolecall", "ledger", str(tmp_path / "run")], check=False, timeout=60
    )
    assert ledger.returncode == 0
