"""A model is evaluated by the command, as people do it: real roles, vLLM, the run's scorers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sort_digits import prepare as sort_digits
from examples.sort_digits.quickstart import HERE


@pytest.mark.timeout(600)
@pytest.mark.thorough("test_a_run_of_no_steps_evaluates_and_trains_nothing")
def test_a_model_is_evaluated_without_training(tmp_path: Path) -> None:
    sort_digits.prepare(tmp_path, 0, num_steps=20)
    words = [f"--data.train={tmp_path / 'train.jsonl'}", f"--out={tmp_path / 'out'}", "--json"]
    sets = {
        "greedy": {"path": str(tmp_path / "heldout.jsonl")},
        "many": {"path": str(tmp_path / "heldout.jsonl"), "num_responses": 4, "temperature": 1.0},
    }
    command = [sys.executable, "-m", "rolecall", "evaluate", str(tmp_path / "model"), "--config"]
    done = subprocess.run(
        [*command, str(HERE / "task.yaml"), f"--evaluation.sets={json.dumps(sets)}", *words],
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)["sets"]
    assert found.keys() == {"greedy", "many"}
    assert found["greedy"]["missing"] == found["many"]["missing"] == 0
    assert {"mean@4", "pass@1", "pass@2", "pass@4", "reward", "accuracy", "response_tokens"} <= found["many"].keys()
    assert found["many"]["pass@4"] >= found["many"]["pass@1"] == pytest.approx(found["many"]["mean@4"])
    assert (tmp_path / "out" / "samples.jsonl").is_file()
    assert not (tmp_path / "out" / "checkpoints").exists() or not any((tmp_path / "out" / "checkpoints").iterdir())
