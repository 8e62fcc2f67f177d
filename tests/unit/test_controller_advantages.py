"""What a batch's preparation hands to estimators beside rewards: components and their weights, token rewards, columns
that a function asks for.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolecall.errors import InvalidInputError
from services.controller.step.preparation import columns_read, prepare
from tests.unit.test_controller_batches import group, row, run_settings

SCORED = {
    "components": {
        "right": {"scorer": {"kind": "exact_match"}},
        "short": {"scorer": {"kind": "length", "max_tokens": 9}, "weight": 0.5},
    }
}


def test_gdpo_weighs_components_as_the_reward_does() -> None:
    settings = run_settings(algorithm={"groups_per_batch": 1, "advantage": {"kind": "gdpo"}}, reward=SCORED)
    scored = replace(
        group(1, 1.0, 0.0), components={"right": np.array([1, 0], np.float32), "short": np.array([-1, 0], np.float32)}
    )
    _, columns = prepare(settings, 0, [scored], [row(1), row(0)])
    # Each component is +-0.7071; 1 - 0.5 of it; over the batch's two responses that is +-1.
    np.testing.assert_allclose([column["advantages"][3] for column in columns], [1, -1], atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "cut_off"), [({}, 0.25), ({"bootstrap_truncated": True}, 2.25)], ids=["final", "bootstrapped"]
)
def test_the_reward_of_a_response_that_was_cut_off_is_final_unless_a_bootstrap_is_asked_for(
    asked: dict[str, bool], cut_off: float
) -> None:
    advantage = {"kind": "gae", "whiten": False, **asked}
    settings = run_settings(algorithm={"groups_per_batch": 1, "advantage": advantage}, critic={})
    assert ("bootstrap_value" in columns_read(settings)) == bool(asked)
    scored = replace(group(1, 1.0, 1.0), truncated_G=np.array([True, False]))
    values = {"values": np.array([0, 0, 0.5, 0.75], np.float32), "bootstrap_value": np.array([2], np.float32)}
    _, columns = prepare(settings, 0, [scored], [{**row(1), **values}] * 2)
    # The last token's reward 1 less its value 0.75; V = 2 after it counts only where the response was cut off, and only
    # if asked for.
    np.testing.assert_allclose([column["advantages"][3] for column in columns], [cut_off, 0.25])


def test_the_first_batches_are_the_critics_alone_and_other_batches() -> None:
    algorithm = {"groups_per_batch": 1, "advantage": {"kind": "gae"}}
    values = {"values": np.zeros(4, np.float32)}
    digests = set()
    for warmup, expected in ((2, [True, True, False]), (0, [False] * 3)):
        settings = run_settings(algorithm=algorithm, critic={"warmup_steps": warmup})
        sealed = [prepare(settings, step, [group(1, 1.0)], [{**row(1), **values}])[0] for step in range(3)]
        assert [batch.critic_only for batch in sealed] == expected
        digests |= {batch.digest for batch in sealed}
    assert len(digests) == 2


def test_process_supervision_uses_the_token_rewards_where_they_are_and_refuses_a_batch_without() -> None:
    settings = run_settings(
        algorithm={
            "groups_per_batch": 1,
            "advantage": {"kind": "grpo", "supervision": "process", "normalize_std": False},
        }
    )
    assert "token_rewards" not in columns_read(settings)  # asked for as optional: a scorer may leave them out
    steps = [np.array([0, 0, 1, 0], np.float32), np.array([0, 0, 2, 0], np.float32)]
    _, columns = prepare(settings, 0, [group(1, 0.0, 0.0)], [{**row(0), "token_rewards": step} for step in steps])
    np.testing.assert_allclose([column["advantages"][2] for column in columns], [-0.5, 0.5])
    with pytest.raises(InvalidInputError, match="token_rewards"):
        prepare(settings, 0, [group(1, 0.0, 0.0)], [row(0), row(0)])


@pytest.mark.parametrize("value", [1.0, 10.0, 1000.0])
def test_responses_that_earned_the_same_at_other_places_have_no_advantage(value: float) -> None:
    early, late = np.array([0, 0, 0.1, 0], np.float32), np.array([0, 0, 0, 0.1], np.float32)
    settings = run_settings(algorithm={"groups_per_batch": 1, "advantage": {"kind": "grpo"}})
    rows = [{**row(value), "token_rewards": earned} for earned in (early, late)]
    _, columns = prepare(settings, 0, [group(1, value, value)], rows)
    assert not np.concatenate([column["advantages"] for column in columns]).any()
    assert {column["advantages"].dtype for column in columns} == {np.dtype(np.float32)}


def test_a_users_function_gets_the_columns_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # what the loader adds to it ends with the test
    (tmp_path / "surprise_for_a_test.py").write_text(
        "from rolecall.algorithms.advantages import Estimate\ndef f(batch, factor):\n    return Estimate(factor * "
        "batch.column('rollout_logprobs'))\n"
    )
    advantage = {
        "kind": "custom",
        "function": f"{tmp_path}/surprise_for_a_test:f",
        "options": {"factor": -2},
        "columns": ["rollout_logprobs"],
    }
    settings = run_settings(algorithm={"groups_per_batch": 1, "advantage": advantage})
    assert columns_read(settings).count("rollout_logprobs") == 1
    _, columns = prepare(settings, 0, [group(1, 0.0)], [row(0)])
    np.testing.assert_allclose(columns[0]["advantages"], [0, 0, 1.0, 0.5])
