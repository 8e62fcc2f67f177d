"""How the step benchmark reads a run's metrics."""

import json
from pathlib import Path

import pytest

from benchmarks.laps import read_steps, split_table


def line(step: int, *, busy_s: float, tokens: float, **more: float) -> str:
    row = {
        "step": step,
        "time/step_s": 2.0,
        "time/generation_s": 1.0,
        "time/scoring_s": 0.1,
        "time/train_s": 0.5,
        "time/publish_s": 0.2,
        "time/prepare_s": 0.1,
        "time/commit_s": 0.05,
        "publish/transfer_s": 0.02,
        "publish/num_bytes": 4e6,
        "actor/tokens": 100.0,
        "actor/tokens_per_s": 250.0,
        "batch/response_tokens": 80.0,
        "rollout/busy_s": busy_s,
        "rollout/sampled_tokens": tokens,
        **more,
    }
    return json.dumps(row) + "\n"


def test_the_controller_has_what_is_left_of_a_step_and_evaluations_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    evaluation = json.dumps({"step": 1, "eval/heldout/time_s": 9.0}) + "\n"
    path.write_text(
        line(1, busy_s=5, tokens=100) + evaluation + line(2, busy_s=5.8, tokens=180) + line(3, busy_s=6.6, tokens=260)
    )
    steps = read_steps(path, 1)
    assert len(steps) == 2
    assert steps[0].controller_s == pytest.approx(0.2)
    assert (steps[0].busy_s, steps[0].hand_over_s, steps[0].num_engine_tokens, steps[0].actor_s) == pytest.approx(
        (0.8, 0.2, 80, 0.4)
    )
    assert split_table(steps)[-1] == "controller's share: 10.0% of a step; 20.0% with all of the hand-over"


def test_a_run_with_a_critic_has_a_line_for_its_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, busy_s=0, tokens=0) + line(2, busy_s=1, tokens=80, **{"time/values_s": 0.15}))
    (step,) = read_steps(path, 1)
    assert step.controller_s == pytest.approx(0.05)
    assert any(text.startswith("values") for text in split_table([step]))
