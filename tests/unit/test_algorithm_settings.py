"""What a file may say of the algorithm: settings without effect and settings that undo each other are refused, in words
that name field and remedy.
"""

import json
from pathlib import Path

import pytest

from rolecall.errors import ConfigError
from rolecall.settings import load_settings
from tests.twins.launched import write_light_config

RECIPES = Path(__file__).resolve().parents[2] / "rolecall" / "recipes"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "complaint"),
    [
        ("policy_loss={kind: clip_cov, cov_low: 5, cov_high: 1}", "no token would be drawn; move one"),
        ("policy_loss={clip_eps_high: 0.3}", r"policy_loss: kind is missing; add it"),
        ("curriculum={revisit_epochs: 3}", r"no prompt is visited less often; set min_success_rate"),
        ("num_minibatches=1000", r"algorithm\.num_minibatches 1000 exceeds the batch's \d+ trajectories; lower it"),
    ],
)
def test_what_would_have_no_effect_is_refused(config: Path, algorithm: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_settings(config, [f"algorithm.{algorithm}"])
    assert "Value error" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("policy_loss=gspo", r"algorithm\.policy_loss: a section is wanted"),
        ("policy_loss={kind: grpo}", r"algorithm\.policy_loss: there is no kind 'grpo'; there are 'ppo', 'gspo'"),
        ("correction=off", r"algorithm\.correction: a section is wanted"),
        (
            "policy_loss={kind: ppo, aggregation: token_mean}",
            r"algorithm\.policy_loss\.aggregation: there is no such setting",
        ),
    ],
)
def test_a_section_that_is_none_is_told_in_the_words_of_the_file(config: Path, override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_settings(config, [f"algorithm.{override}"])


def test_maxrl_takes_no_reward_that_a_punishment_brings_near_nothing(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.shaping\.overlong: maxrl divides"):
        load_settings(config, ["algorithm.advantage={kind: maxrl}", "algorithm.shaping={overlong: {buffer_tokens: 2}}"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["references={wise: {}, ref: {}}", "algorithm.kl={reference: ref, kl_coef: 0.1, placement: reward}"],
            "kl.placement reward: with task_coef 0",
        ),
        (
            ["algorithm.advantage={kind: gae}", "critic={}"],
            "gae costs another pass, of which task_coef 0 makes nothing",
        ),
        (["algorithm.advantage={kind: remax}"], "remax costs another pass"),
        (["algorithm.advantage={kind: optimal_token_baseline}"], "optimal_token_baseline costs another pass"),
    ],
)
def test_nothing_is_computed_of_a_reward_that_is_not_trained_on(
    config: Path, overrides: list[str], complaint: str
) -> None:
    taught = ["references={wise: {}}", *overrides]
    with pytest.raises(ConfigError, match=complaint):
        load_settings(config, [*taught, "algorithm.distillation={teacher: wise}"])
    assert load_settings(config, [*taught, "algorithm.distillation={teacher: wise, task_coef: 0.5}"])


def test_a_reference_that_a_recipe_has_can_be_left_out(config: Path) -> None:
    without_kl = ["algorithm.kl=null", "sampling.num_responses=8"]
    with pytest.raises(ConfigError, match=r"references\.ref: null where a recipe has it"):
        load_settings(config, without_kl, RECIPES / "grpo.yaml")
    assert load_settings(config, [*without_kl, "references.ref=null"], RECIPES / "grpo.yaml").references == {}


def test_a_component_a_server_and_a_held_out_set_can_be_left_out(config: Path) -> None:
    more = [
        "reward.components.short={scorer: {kind: length, max_tokens: 9}}",
        "evaluation.sets.more={path: a.jsonl}",
    ]
    fewer = ["reward.components.short=null", "evaluation.sets.more=null", "reward.servers.grader=null"]
    settings, plain = load_settings(config, [*more, *fewer]), load_settings(config)
    assert (settings.reward, settings.evaluation) == (plain.reward, plain.evaluation)


def called(name: str) -> list[str]:
    quoted = json.dumps(name)
    return [f"references={{{quoted}: {{}}}}", f"algorithm.kl={{reference: {quoted}, kl_coef: 0.1}}"]


@pytest.mark.parametrize("name", ["org/model", "ref/0", "a b", "", "ü", "-ref", "ref\n", "x" * 43])
def test_a_reference_has_a_name_that_a_process_a_file_and_a_host_may_have(config: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"references: .* names a process, a log and a host; .* goes under its path"):
        load_settings(config, called(name))


@pytest.mark.parametrize("name", ["controller", "actor", "critic", "reward", "store", "rollout", "rollout-0"])
def test_a_reference_has_a_name_that_no_other_process_of_the_run_has(config: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"references: {name!r} is what another role of a run is called; give the"):
        load_settings(config, called(name))


@pytest.mark.parametrize("name", ["ref", "Qwen2.5-7B_it", "7", "reference", "actors", "x" * 42])
def test_a_reference_may_be_called_what_no_other_is(config: Path, name: str) -> None:
    assert load_settings(config, called(name)).references.keys() == {name}


def test_a_run_that_can_be_made_again_keeps_no_cache(config: Path) -> None:
    kept = "rollout.pause_mode=keep_cache"
    assert load_settings(config, [kept])
    with pytest.raises(
        ConfigError, match=r"run\.deterministic: .* rollout\.pause_mode keep_cache .* leave one of them"
    ):
        load_settings(config, ["run.deterministic=true", kept])


def test_a_run_that_can_be_made_again_has_no_curriculum(config: Path) -> None:
    curriculum = "algorithm.curriculum={max_success_rate: 0.9}"
    assert load_settings(config, [curriculum])
    with pytest.raises(ConfigError, match=r"run\.deterministic: with algorithm\.curriculum .* leave one of them out"):
        load_settings(config, ["run.deterministic=true", curriculum])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("algorithm.advantage={kind: rloo", "its value is not YAML"),
        ("run.name.first=me", "name is 'light' and has no keys"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(config: Path, override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_settings(config, [override])


def test_a_users_loss_reads_columns_that_the_run_writes(config: Path) -> None:
    loss = "algorithm.policy_loss={kind: custom, function: 'mine:f', columns: [%s]}"
    assert load_settings(config, [loss % "rollout_logprobs, policy_versions"])
    kl = ["references={ref: {}}", "algorithm.kl={reference: ref, kl_coef: 0.1}"]
    assert load_settings(config, [*kl, loss % "ref/logprobs"])
    assert load_settings(config, ["critic={}", "algorithm.advantage={kind: gae}", loss % "values, returns"])
    for absent in ("bogus", "values", "ref/logprobs", "token_rewards", "reward"):
        with pytest.raises(ConfigError, match=rf"algorithm\.policy_loss\.columns \['{absent}'\] are not in the rows"):
            load_settings(config, [loss % absent])
