"""`make test-learning`: a policy that sorts upwards learns to sort downwards from a reward model alone, which was shown
pairs of answers and is served as a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sort_digits import prepare, reward_model
from examples.sort_digits.quickstart import read_jsonl, train_command
from tests.ports import free_port

DESCENDING = "eval/heldout/descending"


def turn_ground_truths(path: Path) -> None:
    """Makes the descending order the ground truth, which a shadow component reports."""
    rows = [{**row, "ground_truth": row["ground_truth"][::-1]} for row in read_jsonl(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_a_reward_model_that_prefers_descending_order_makes_the_policy_descend(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    prepare.prepare(tmp_path, seed=0, ascending_share=0.7)
    assert reward_model.prepare(tmp_path, address=address) > 0.9
    for name in ("train.jsonl", "heldout.jsonl"):
        turn_ground_truths(tmp_path / name)
    components = {
        "preference": {"scorer": {"kind": "external", "address": address}, "timeout_s": 60},
        "descending": {"scorer": {"kind": "exact_match"}, "weight": 0},
    }
    model = [sys.executable, "-m", "rolecall", "serve", "reward-model", str(tmp_path / "preference.yaml")]
    with subprocess.Popen(model, cwd=tmp_path) as served:
        try:
            done = subprocess.run(
                [*train_command(tmp_path, 0), f"--reward.components={json.dumps(components)}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1500,
                check=False,
            )
        finally:
            served.kill()
    assert done.returncode == 0, done.stdout
    curve = [row[DESCENDING] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if DESCENDING in row]
    sys.stdout.write(f"{curve}\n")
    assert curve[0] < 0.2, curve
    # Not as high as with the true reward: the model orders 4% of pairs wrongly, which the policy finds out in time.
    assert curve[-1] > 0.8, curve
