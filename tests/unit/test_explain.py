"""What `rolecall check` says of an algorithm."""

from pathlib import Path
from typing import Any, get_args

import pytest

from rolecall.commands.check.explain import explain
from rolecall.settings import AdvantageSection, PolicyLossSection, RunSettings, load_settings
from tests.twins.launched import write_light_config

RECIPES = Path(__file__).resolve().parents[2] / "rolecall" / "recipes"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


def words(settings: RunSettings) -> str:
    return "\n".join(explain(settings))


def test_the_default_algorithm_in_words(config: Path) -> None:
    assert list(explain(load_settings(config))) == [
        "reward: 1 x correct",
        "advantages: reward minus the group's mean, over the group's standard deviation (GRPO)",
        "loss: ratio to the old policy x advantage, the ratio clipped to 0.8 .. 1.28 (PPO); every trained token "
        "of a mini-batch counts the same",
        "  one update per batch, so the ratio is 1 and what bounds or penalises it does nothing; num_minibatches "
        "or num_epochs above 1 make it count",
        "correction: tokens weighed by trainer / sampler, at most 2",
    ]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_words_of_its_own(path: Path, config: Path) -> None:
    others = {
        words(load_settings(config, ["sampling.num_responses=8"], other))
        for other in RECIPES.glob("*.yaml")
        if other != path
    }
    assert words(load_settings(config, ["sampling.num_responses=8"], path)) not in others


def kinds(union: Any) -> list[tuple[type, str]]:
    sections = get_args(get_args(union)[0])
    return [(section, kind) for section in sections for kind in get_args(section.model_fields["kind"].annotation)]


NEEDED: dict[str, dict[str, Any]] = {
    "pass_at_k": {"k": 2},
    "custom": {"function": "mine:function"},
    "dro": {"beta": 0.1},
}


@pytest.mark.parametrize(
    ("field", "section", "kind"),
    [("advantage", *chosen) for chosen in kinds(AdvantageSection)]
    + [("policy_loss", *chosen) for chosen in kinds(PolicyLossSection)],
)
def test_every_kind_has_words(field: str, section: Any, kind: str, config: Path) -> None:
    settings = load_settings(config)
    chosen = section(kind=kind, **NEEDED.get(kind, {}))
    algorithm = settings.algorithm.model_copy(update={field: chosen})
    said = words(settings.model_copy(update={"algorithm": algorithm}))
    assert said.splitlines()[1 if field == "advantage" else 2].partition(": ")[2]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "filters={without_signal: true}",
            "groups: dropped and replaced when all rewards are equal (dynamic sampling); at most 1024 a step",
        ),
        ("filters={max_success_rate: 0.9}", "more than 90% of the responses reach 1"),
        (
            "filters={without_signal: true, min_success_rate: 0.1, component: correct}",
            "all values of correct are equal (dynamic sampling); or fewer than 10% of the responses reach 1 in correct",
        ),
        ("filters={min_success_rate: 0.125}", "fewer than 12.5% of the responses reach 1"),
        (
            "shaping={clip_max: 2.0, overlong: {buffer_tokens: 2}}",
            "reward: 1 x correct; then bounded to - .. 2; then up to 1 less from 6 to 8 tokens",
        ),
        ("aggregation=seq_mean_token_sum_norm", "over the constant 8"),
        ("entropy={entropy_coef: 0.001, target: 0.3}", "minus 0.001 (adapted to keep the entropy at 0.3) x entropy"),
        ("correction=null", "correction: none"),
        ("correction={proximal: bypass}", "correction: the sampler is the old policy"),
        ("correction={weight: {kind: icepop}}", "within 0.5 .. 5, and by 0 outside"),
        (
            "correction={weight: {kind: sequence, normalize: true}}",
            "responses weighed by trainer / sampler, at most 2, over their mean in the step",
        ),
        (
            "correction={reject: [{kind: k3, over: sequence_mean, high: 0.1}]}",
            "responses rejected by k3 above 0.1 (sequence mean)",
        ),
        (
            "curriculum={max_success_rate: 0.9}",
            "prompts: those whose success rate is within 0 to 0.9 in every epoch, the others in one of 4",
        ),
    ],
)
def test_what_is_set_is_told(override: str, told: str, config: Path) -> None:
    assert told in words(load_settings(config, [f"algorithm.{override}"]))


@pytest.mark.parametrize(
    "more",
    [
        "num_minibatches=2",
        "num_epochs=2",
        "correction={proximal: bypass}",
        "policy_loss={kind: reinforce}",
        "policy_loss={kind: custom, function: 'a:f'}",
    ],
)
def test_a_ratio_that_moves_or_is_not_there_is_not_told_to_be_one(more: str, config: Path) -> None:
    assert "the ratio is 1" not in words(load_settings(config, [f"algorithm.{more}"]))


def test_the_budget_of_the_filters_grows_with_the_batch(config: Path) -> None:
    def told(*more: str) -> str:
        filters = "algorithm.filters={without_signal: true}"
        return words(load_settings(config, [filters, "store.max_bytes=8000000000", *more]))

    assert "; at most 1024 a step (algorithm.filters.max_dropped_per_step)" in told()
    assert "; at most 16384 a step" in told("algorithm.groups_per_batch=512"), "32 batches"
    given = "algorithm.filters.max_dropped_per_step=7"
    assert "; at most 7 a step" in told("algorithm.groups_per_batch=512", given)


def test_a_kl_without_a_gradient_is_told(config: Path) -> None:
    k1 = ["references={ref: {}}", "algorithm.kl={reference: ref, kl_coef: 0.1, estimator: k1}"]
    told = "(k1, whose own gradient is 0 on average: gradient: k2 has the KL's)"
    assert told in words(load_settings(config, k1))
    assert told not in words(load_settings(config, [*k1, "algorithm.kl.gradient=k2"]))
    assert told not in words(load_settings(config, [*k1, "algorithm.kl.placement=reward"]))


@pytest.mark.parametrize(
    ("distillation", "told"),
    [
        (
            "{teacher: wise, coef: 2}",
            "advantages: rewards teach nothing, minus 2 x log(policy / teacher 'wise') of each token, held within +-10",
        ),
        (
            "{teacher: wise, task_coef: 0.5}",
            "advantages: 0.5 x (reward minus the group's mean, over the group's standard deviation (GRPO)), minus "
            "1 x log(",
        ),
        (
            "{teacher: wise, placement: loss}",
            "  plus 1 x KL from the policy to teacher 'wise', of the sampled tokens, held within +-10\n",
        ),
        ("{teacher: wise, placement: loss, max_log_ratio: null}", "to teacher 'wise', of the sampled tokens\n"),
        (
            "{teacher: wise, placement: loss, top_k: 4}",
            "KL from teacher 'wise' to the policy over the teacher's 4 likeliest tokens\n",
        ),
        (
            "{teacher: wise, field: subject, teachers: {math: wise}}",
            "log(policy / teacher by subject (wise for 'math', else wise)) of each token",
        ),
    ],
)
def test_who_teaches_what_is_told(distillation: str, told: str, config: Path) -> None:
    assert told in words(load_settings(config, ["references={wise: {}}", f"algorithm.distillation={distillation}"]))
