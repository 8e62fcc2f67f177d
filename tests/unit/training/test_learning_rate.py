"""The learning rate, step by step, against tables worked by hand."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from rolecall.settings import CriticSection, OptimizerSection, RunSettings
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
        ({"min_learning_rate": 1.0}, "min_learning_rate"),
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


def test_the_critic_follows_the_actors_schedule_at_its_own_rate_and_pace() -> None:
    actor = OptimizerSection(
        learning_rate=1e-6, min_learning_rate=1e-7, schedule="wsd", warmup_steps=4, decay_steps=10, weight_decay=0.1
    )
    critic = CriticSection(learning_rate=1e-5, num_minibatches=4).optimizer(actor, num_minibatches=2)
    assert critic.min_learning_rate == pytest.approx(1e-6)
    assert (critic.learning_rate, critic.warmup_steps, critic.decay_steps) == (1e-5, 8, 20)
    assert (critic.schedule, critic.weight_decay) == ("wsd", 0.1)
    assert CriticSection(learning_rate=1e-6).optimizer(actor, num_minibatches=2) == actor
