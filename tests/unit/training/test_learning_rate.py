"""The learning rate, step by step, against tables worked by hand."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rolecall.settings import CriticOptimizerSection, OptimizerSection, RunSettings
from rolecall.training.state.learning_rate import learning_rate
from tests.smallest import smallest_tree


def rates(total: int, **section: float | str) -> list[float]:
    optimizer = OptimizerSection.model_validate(section)
    return [learning_rate(optimizer, step, total) for step in range(total)]


def test_warm_up_climbs_to_the_peak_and_stays() -> None:
    assert rates(6, learning_rate=1.0, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_decay_ends_just_above_its_minimum() -> None:
    assert rates(5, learning_rate=1.0, schedule="linear", warmup_steps=1) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25])
    assert rates(4, learning_rate=1.0, schedule="linear", min_learning_rate=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert rates(4, learning_rate=2.0, schedule="cosine") == pytest.approx([2, 1.7071068, 1, 0.2928932])
    assert rates(4, learning_rate=3.0, schedule="cosine", min_learning_rate=1.0) == pytest.approx(
        [3, 2.7071068, 2, 1.2928932]
    )


def test_wsd_warms_up_holds_and_falls_over_its_last_steps() -> None:
    assert rates(
        9, learning_rate=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, min_learning_rate=0.2
    ) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_warm_up_may_meet_the_decay() -> None:
    assert rates(4, learning_rate=1.0, schedule="wsd", warmup_steps=2, decay_steps=2) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.5]
    )


@pytest.mark.parametrize(("schedule", "more"), [("linear", {}), ("cosine", {}), ("wsd", {"decay_steps": 3})])
def test_steps_beyond_the_plan_have_the_minimum(schedule: str, more: dict[str, int]) -> None:
    section = OptimizerSection.model_validate(
        {"learning_rate": 1.0, "schedule": schedule, "min_learning_rate": 0.1, **more}
    )
    assert learning_rate(section, 9, 5) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"schedule": "wsd"}, "decay_steps"),
        ({"schedule": "cosine", "decay_steps": 5}, "decay_steps"),
        ({"min_learning_rate": 1e-7}, "min_learning_rate 1e-07 is where a decay ends, and schedule constant has none"),
        ({"min_learning_rate": 1.0, "schedule": "linear"}, "min_learning_rate 1 is above"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_by_its_field(section: dict[str, float | str], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        OptimizerSection.model_validate(section)


def test_a_decay_that_does_not_fit_the_run_is_refused_with_the_runs_length() -> None:
    tree = smallest_tree(
        Path("/"),
        run={"name": "r", "dir": "/runs/r", "num_steps": 5},
        algorithm={"groups_per_batch": 4, "num_minibatches": 2},
        actor={"optimizer": {"schedule": "wsd", "warmup_steps": 4, "decay_steps": 6}},
    )
    assert RunSettings.model_validate(tree, context={"base": Path("/")}).actor.optimizer.decay_steps == 6
    tree["algorithm"] = {"groups_per_batch": 4}
    with pytest.raises(
        ValidationError, match=r"actor\.optimizer\.warmup_steps \+ decay_steps = 10 exceed the run's 5 optimizer steps"
    ):
        RunSettings.model_validate(tree, context={"base": Path("/")})


ACTOR = OptimizerSection(
    learning_rate=1e-6, min_learning_rate=1e-7, schedule="wsd", warmup_steps=4, decay_steps=10, weight_decay=0.1
)


def test_the_critic_follows_the_actors_schedule_at_its_own_rate_and_pace() -> None:
    critic = CriticOptimizerSection().beside(ACTOR, updates=2)
    assert critic.min_learning_rate == pytest.approx(1e-6)
    assert (critic.learning_rate, critic.warmup_steps, critic.decay_steps) == (1e-5, 8, 20)
    assert (critic.schedule, critic.weight_decay) == ("wsd", 0.1)
    assert CriticOptimizerSection(learning_rate=1e-6).beside(ACTOR, updates=1) == ACTOR


@pytest.mark.parametrize("rate", [digits * 10**-power for power in (5, 6, 7) for digits in (1, 1.5, 2, 3, 5, 7)])
def test_a_rate_that_decay_leaves_as_it_is_does_so_for_the_critic_too(rate: float) -> None:
    actor = OptimizerSection(schedule="cosine", learning_rate=rate, min_learning_rate=rate)
    for critic in (CriticOptimizerSection(), CriticOptimizerSection(learning_rate=3e-6)):
        whole = critic.beside(actor, updates=1)
        assert whole.min_learning_rate == whole.learning_rate


def test_what_the_critic_s_optimizer_says_goes_before_the_actors() -> None:
    own = CriticOptimizerSection(betas=(0.9, 0.99), weight_decay=0.0, schedule="cosine", warmup_steps=1, kind="muon")
    critic = own.beside(ACTOR, updates=2)
    assert (critic.betas, critic.weight_decay, critic.kind, critic.max_grad_norm) == ((0.9, 0.99), 0.0, "muon", 1.0)
    assert (critic.schedule, critic.warmup_steps, critic.decay_steps) == ("cosine", 1, None)
    assert critic.min_learning_rate == pytest.approx(1e-6)
    assert CriticOptimizerSection(decay_steps=3).beside(ACTOR, updates=2).decay_steps == 3
    steady = CriticOptimizerSection(schedule="constant").beside(ACTOR, updates=2)
    assert (steady.fault, steady.min_learning_rate) == (None, 0.0)


def with_critic(**optimizer: object) -> RunSettings:
    """A run whose actor's rate decays linearly, beside a critic of such an optimizer."""
    tree = smallest_tree(
        Path("/"),
        run={"name": "r", "dir": "/runs/r", "num_steps": 5},
        algorithm={"groups_per_batch": 4, "advantage": {"kind": "gae"}},
        actor={"optimizer": {"schedule": "linear", "warmup_steps": 1}},
        critic={"optimizer": optimizer},
    )
    return RunSettings.model_validate(tree, context={"base": Path("/")})


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ({"schedule": "wsd"}, r"critic\.optimizer: schedule wsd and decay_steps None do not fit"),
        (
            {"schedule": "constant", "min_learning_rate": 1e-7},
            r"critic\.optimizer: min_learning_rate 1e-07 is where a decay ends",
        ),
        ({"decay_steps": 3}, r"critic\.optimizer: schedule linear and decay_steps 3 do not fit"),
        ({"min_learning_rate": 1.0}, r"critic\.optimizer: min_learning_rate 1 is above learning_rate 1e-05"),
        (
            {"schedule": "wsd", "decay_steps": 9},
            r"critic\.optimizer\.warmup_steps \+ decay_steps = 10 exceed the run's",
        ),
    ],
)
def test_a_schedule_of_the_critic_s_is_held_against_the_actors_and_the_run(
    optimizer: dict[str, object], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        with_critic(**optimizer)


def test_what_the_critic_left_out_still_follows_the_actor_in_the_file_that_a_run_keeps() -> None:
    kept = with_critic(weight_decay=0.1, betas=[0.9, 0.999]).model_dump(mode="json")
    assert kept["critic"]["optimizer"] == {"learning_rate": 1e-5, "weight_decay": 0.1, "betas": [0.9, 0.999]}
    kept["actor"]["optimizer"] |= {"max_grad_norm": 0.5}
    optimizer = RunSettings.model_validate(kept, context={"base": Path("/")}).critic_optimizer
    assert optimizer is not None
    assert (optimizer.max_grad_norm, optimizer.weight_decay, optimizer.schedule) == (0.5, 0.1, "linear")
