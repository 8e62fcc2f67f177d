"""`make test-learning`: a policy that sorts upwards learns to sort downwards from the verdicts of a judge alone, a
generative model behind vLLM's own server, which was taught the one question of its rubric.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sort_digits import judge, prepare
from examples.sort_digits.quickstart import read_jsonl, train_command
from tests.learning.test_reward_model_learns import DESCENDING, turn_ground_truths
from tests.vllm_server import vllm_serve


@pytest.mark.learning
@pytest.mark.timeout(2400)
def test_a_judge_that_says_yes_to_descending_order_makes_the_policy_descend(tmp_path: Path) -> None:
    prepare.prepare(tmp_path, seed=0, ascending_share=0.7)
    assert judge.prepare(tmp_path) > 0.9
    for name in ("train.jsonl", "heldout.jsonl"):
        turn_ground_truths(tmp_path / name)
    with vllm_serve(tmp_path / "judge", tmp_path / "judge.log") as url:
        asked = {"kind": "judge", "address": url, "rubric": str(tmp_path / "rubric.yaml")}
        components = {
            "verdict": {"scorer": asked, "timeout_s": 60},
            "descending": {"scorer": {"kind": "exact_match"}, "weight": 0},
        }
        done = subprocess.run(
            [*train_command(tmp_path, 0), f"--reward.components={json.dumps(components)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    verdicts = [row["reward/mean"] for row in rows if "reward/mean" in row]
    curve = [row[DESCENDING] for row in rows if DESCENDING in row]
    sys.stdout.write(f"verdicts {[round(mean, 3) for mean in verdicts]}, descending {curve}\n")
    assert verdicts[0] < 0.6
    assert verdicts[-1] > 0.8
    assert curve[0] < 0.2, curve
    # Not all: of answers with a wrong digit the judge lets many pass, which the policy finds out in time.
    assert curve[-1] > 0.8, curve
