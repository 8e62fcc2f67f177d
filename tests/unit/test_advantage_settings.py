"""Which estimators a run can feed: what is refused names the field and the remedy."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rolecall.settings import CustomAdvantage, RunSettings, load_settings
from tests.unit.test_controller_batches import run_settings

SCORED = {
    "components": {
        "right": {"scorer": {"kind": "exact_match"}},
        "short": {"scorer": {"kind": "length", "max_tokens": 9}, "weight": 0.5},
    }
}
WITH_A_SHADOW = {"components": {**SCORED["components"], "seen": {"scorer": {"kind": "json"}, "weight": 0}}}
STEPS = {"components": {"steps": {"scorer": {"kind": "function", "target": "mine:score", "token_rewards": True}}}}
KL = {"reference": "ref", "kl_coef": 0.1, "placement": "reward"}


def with_advantage(
    advantage: dict[str, Any], num_responses: int = 4, algorithm: dict[str, Any] | None = None, **sections: Any
) -> RunSettings:
    return run_settings(
        algorithm={"groups_per_batch": 2, "advantage": advantage, **(algorithm or {})},
        sampling={"num_responses": num_responses},
        **sections,
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "maxrl", "optimal_token_baseline"])
def test_estimators_that_compare_responses_refuse_groups_of_one(kind: str) -> None:
    with_advantage({"kind": kind}, 2)
    with pytest.raises(ValidationError, match=f"num_responses must be at least 2: {kind}"):
        with_advantage({"kind": kind}, 1)


def test_estimators_that_do_not_compare_take_groups_of_one() -> None:
    with_advantage({"kind": "gae"}, 1, critic={})
    with_advantage({"kind": "reinforce_plus_plus"}, 1)
    with_advantage({"kind": "remax"}, 1)
    with_advantage({"kind": "custom", "function": "mine:f"}, 1)
    with pytest.raises(ValidationError, match="reinforce_plus_plus compares"):
        with_advantage({"kind": "reinforce_plus_plus", "baseline": "group"}, 1)


def test_a_critic_is_there_exactly_when_values_are_read() -> None:
    mine = {"kind": "custom", "function": "mine:f", "columns": ["values"]}
    with_advantage(mine, critic={})
    with pytest.raises(ValidationError, match="custom reads values: add a critic"):
        with_advantage(mine)
    with pytest.raises(ValidationError, match="rloo does not read values"):
        with_advantage({"kind": "rloo"}, critic={})


def test_k_of_pass_at_k_is_within_the_group() -> None:
    with_advantage({"kind": "pass_at_k", "k": 4})
    with pytest.raises(ValidationError, match=r"k 5 exceeds sampling\.num_responses 4"):
        with_advantage({"kind": "pass_at_k", "k": 5})


@pytest.mark.parametrize("advantage", [{"kind": "maxrl"}, {"kind": "pass_at_k", "k": 2}])
def test_estimators_of_right_and_wrong_refuse_what_moves_a_right_reward(advantage: dict[str, Any]) -> None:
    with_advantage(
        advantage, algorithm={"kl": {**KL, "placement": "loss"}, "shaping": {"clip_max": 1.0}}, references={"ref": {}}
    )
    with pytest.raises(ValidationError, match=r"kl\.placement reward moves the rewards"):
        with_advantage(advantage, algorithm={"kl": KL}, references={"ref": {}})
    with pytest.raises(ValidationError, match=r"shaping\.normalize moves the rewards"):
        with_advantage(advantage, algorithm={"shaping": {"normalize": "batch"}})


def test_a_filter_reads_a_component_that_is_there_and_told_apart() -> None:
    def filtered(component: str, **sections: Any) -> None:
        filters = {"without_signal": True, "component": component}
        advantage = sections.pop("advantage", {"kind": "grpo"})
        with_advantage(advantage, algorithm={"filters": filters}, **sections)

    for component in ("right", "short/part"):
        filtered(component, reward=SCORED)
    filtered("seen", reward=WITH_A_SHADOW)
    filtered("whatever", reward={"address": "scorer:1"})
    with pytest.raises(ValidationError, match=r"component 'long': reward.components has none of that name, it has \['"):
        filtered("long", reward=SCORED)
    with pytest.raises(ValidationError, match=r"component: a greedy response is compared by the whole reward alone"):
        filtered("right", reward=SCORED, advantage={"kind": "remax"}, num_responses=1)


def test_pass_at_k_refuses_a_bound_that_no_right_response_reaches() -> None:
    with pytest.raises(ValidationError, match=r"shaping\.clip_max 0\.8: pass_at_k takes a response for right from 1"):
        with_advantage({"kind": "pass_at_k", "k": 2}, algorithm={"shaping": {"clip_max": 0.8}})


@pytest.mark.parametrize(
    "low",
    [
        {"scorer": {"kind": "length", "max_tokens": 8}},
        {"scorer": {"kind": "function", "target": "mine:f", "min": -1}},
        {"scorer": {"kind": "math"}, "weight": -0.5},
    ],
    ids=["length", "function", "weight"],
)
def test_maxrl_refuses_a_component_below_0_unless_rewards_are_kept_above(low: dict[str, Any]) -> None:
    reward = {"components": {"right": {"scorer": {"kind": "math"}}, "low": low}}
    with pytest.raises(ValidationError, match=r"reward\.components\.low: it may bring rewards below 0"):
        with_advantage({"kind": "maxrl"}, algorithm={"shaping": {"clip_min": -1.0}}, reward=reward)
    with_advantage({"kind": "maxrl"}, algorithm={"shaping": {"clip_min": 0.0}}, reward=reward)
    shadow = {"components": {**reward["components"], "low": {**low, "weight": 0}}}
    with_advantage({"kind": "maxrl"}, reward=shadow)


def test_an_estimator_of_your_own_reads_token_rewards_that_a_scorer_gives() -> None:
    mine = {"kind": "custom", "function": "mine:f", "columns": ["token_rewards"]}
    scorer = {"kind": "function", "target": "mine:g"}
    with pytest.raises(ValidationError, match=r"advantage\.columns: the estimator reads token_rewards, and no scorer"):
        with_advantage(mine, reward={"components": {"steps": {"scorer": scorer}}})
    with_advantage(mine, reward={"components": {"steps": {"scorer": {**scorer, "token_rewards": True}}}})


def test_an_adaptive_coefficient_cannot_be_taken_to_nothing_by_one_step() -> None:
    def with_horizon(horizon: int) -> RunSettings:
        kl = {**KL, "adaptive": {"target": 0.1, "horizon": horizon}}
        return with_advantage({"kind": "rloo"}, 10, algorithm={"kl": kl}, references={"ref": {}})  # 2 groups of 10

    with_horizon(5)
    with pytest.raises(ValidationError, match=r"horizon 4: one step of 20 responses could take kl_coef to 0"):
        with_horizon(4)


def test_process_supervision_wants_a_scorer_of_steps_and_no_kl_among_them() -> None:
    process = {"kind": "grpo", "supervision": "process"}
    with_advantage(process, reward=STEPS)
    with pytest.raises(ValidationError, match="no scorer gives token_rewards"):
        with_advantage(process, reward=SCORED)
    with pytest.raises(ValidationError, match="step of every token"):
        with_advantage(process, reward=STEPS, algorithm={"kl": KL}, references={"ref": {}})


def test_gdpo_weighs_components_that_exist_and_nothing_that_does_not_reach_them() -> None:
    with_advantage({"kind": "gdpo"}, reward=SCORED)
    with_advantage({"kind": "gdpo", "weights": {"right": 1, "short/part": 2}}, reward=SCORED)
    for advantage, sections, named in (
        ({"kind": "gdpo"}, {}, "weights"),
        ({"kind": "gdpo", "weights": {"long": 1}}, {"reward": SCORED}, "weights"),
        ({"kind": "gdpo", "weights": {"seen/part": 1}}, {"reward": WITH_A_SHADOW}, "weights"),
        ({"kind": "gdpo"}, {"reward": SCORED, "algorithm": {"shaping": {"clip_max": 1.0}}}, "shaping.clip_max would"),
        ({"kind": "gdpo"}, {"reward": STEPS}, "token_rewards"),
        (
            {"kind": "gdpo"},
            {"reward": SCORED, "algorithm": {"kl": KL}, "references": {"ref": {}}},
            "algorithm.kl.placement reward would",
        ),
    ):
        with pytest.raises(ValidationError, match=f"gdpo.*{named}|{named}.*gdpo"):
            with_advantage(advantage, **sections)


def test_a_discount_and_a_group_baseline_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="nothing is discounted"):
        with_advantage({"kind": "reinforce_plus_plus", "baseline": "group", "gamma": 0.9})


def test_a_users_module_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    settings = with_advantage({"kind": "custom", "function": "mine:f"}).model_dump(mode="json", exclude_unset=True)
    beside = tmp_path / "of 2026-11-23T10:00"
    beside.mkdir()
    (beside / "run.yaml").write_text(yaml.safe_dump(settings))
    for given, folder in (("mine:f", beside), ("its/own/mine:f", beside / "its/own"), ("/mine:f", Path("/"))):
        advantage = load_settings(beside / "run.yaml", [f"algorithm.advantage.function={given}"]).algorithm.advantage
        assert isinstance(advantage, CustomAdvantage)
        assert (advantage.folder, advantage.name) == (folder, "mine:f")


def test_a_critic_makes_no_more_mini_batches_than_there_are_rows() -> None:
    assert with_advantage({"kind": "gae"}, critic={"num_minibatches": 8})  # 2 groups of 4
    with pytest.raises(ValidationError, match=r"critic\.num_minibatches 9 exceeds the batch's 8 trajectories"):
        with_advantage({"kind": "gae"}, critic={"num_minibatches": 9})


def test_a_critic_that_learns_alone_to_the_end_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"critic\.warmup_steps 4 leaves the policy none of run\.num_steps 4"):
        with_advantage({"kind": "gae"}, critic={"warmup_steps": 4})
    assert with_advantage({"kind": "gae"}, critic={"warmup_steps": 1}).num_policy_steps == 3
