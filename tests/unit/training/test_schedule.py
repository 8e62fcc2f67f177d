"""The learning rate, step by step."""

import pytest

from rolecall.settings import OptimizerSection
from rolecall.training.schedule import learning_rate


def rates(section: OptimizerSection, total: int) -> list[float]:
    return [learning_rate(section, step, total) for step in range(total)]


def test_warm_up_climbs_to_the_peak_and_stays() -> None:
    assert rates(OptimizerSection(learning_rate=1.0, warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_decay_ends_just_above_zero() -> None:
    assert rates(OptimizerSection(learning_rate=1.0, schedule="linear", warmup_steps=1), 5) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25])


def test_cosine_decay_is_at_half_in_the_middle() -> None:
    assert rates(OptimizerSection(learning_rate=2.0, schedule="cosine"), 4) == pytest.approx([2, 1.7071068, 1, 0.2928932])


def test_steps_beyond_the_plan_have_rate_zero() -> None:
    assert learning_rate(OptimizerSection(learning_rate=1.0, schedule="linear"), 9, 5) == 0.0
