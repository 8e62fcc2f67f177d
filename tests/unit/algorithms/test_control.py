"""Adaptive coefficients against steps worked by hand, and what they do over a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolecall.algorithms.control import (
    Control,
    advance,
    coefficients,
    entropy_coef_applied,
    entropy_coef_next,
    kl_coef_next,
    start,
)
from rolecall.settings import AdaptiveKl, AlgorithmSection, EntropySection, KlSection


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target: nothing changes
        (6.6, 0.1 * (1 + 0.1 * 256 / 10_000)),  # a tenth above
        (12.0, 0.1 * (1 + 0.2 * 256 / 10_000)),  # twice the target counts as a fifth above
        (0.0, 0.1 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_the_kl_coefficient_by_hand(observed: float, expected: float) -> None:
    """Ziegler et al., arXiv:1909.08593, section 2.2, with K = num_samples / horizon."""
    assert kl_coef_next(0.1, observed, 256, target=6.0, horizon=10_000) == pytest.approx(expected, rel=1e-12)


@given(st.floats(1e-6, 10), st.floats(-10, 100), st.integers(1, 10**6))
def test_the_kl_coefficient_is_never_negative(coef: float, observed: float, num_samples: int) -> None:
    assert kl_coef_next(coef, observed, num_samples, target=0.1, horizon=1000) >= 0


def test_a_kl_that_falls_as_the_coefficient_rises_settles_at_its_target() -> None:
    coef = 0.01
    for _ in range(400):
        coef = kl_coef_next(coef, 0.02 / coef, 512, target=0.1, horizon=10_000)
    assert coef == pytest.approx(0.2, rel=1e-3)


def test_a_kl_coefficient_comes_back_after_any_number_of_quiet_steps() -> None:
    algorithm = AlgorithmSection(
        groups_per_batch=1, kl=KlSection(reference="ref", kl_coef=0.05, adaptive=AdaptiveKl(target=0.1))
    )
    control = start(algorithm)
    for _ in range(100_000):
        control = advance(algorithm, control, kl=0.0, entropy=None, num_samples=1024)
    assert control.kl_coef == pytest.approx(0.05e-3)
    for _ in range(400):
        control = advance(algorithm, control, kl=1.0, entropy=None, num_samples=1024)
    assert control.kl_coef > 0.05


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.001, 0.1, 0.0011),
        (0.001, 0.3, 0.0009),
        (0.001, 0.2, 0.001),
        (0.00005, 0.3, 0.0),
        (0.005, 0.1, 0.005),
    ],
)
def test_the_entropy_coefficient_by_hand(coef: float, entropy: float, expected: float) -> None:
    """Skywork-OR1, arXiv:2505.22312."""
    assert entropy_coef_next(coef, entropy, target=0.2, step=0.0001, highest=0.005) == pytest.approx(
        expected, abs=1e-12
    )


def test_the_bonus_rests_while_the_entropy_is_above_its_target() -> None:
    assert entropy_coef_applied(0.003, 0.21, target=0.2) == 0.0
    assert entropy_coef_applied(0.003, 0.2, target=0.2) == 0.003
    assert entropy_coef_applied(0.003, None, target=0.2) == 0.003


def algorithm(adaptive: AdaptiveKl | None = None, target: float | None = None) -> AlgorithmSection:
    return AlgorithmSection(
        groups_per_batch=1,
        kl=KlSection(reference="ref", kl_coef=0.1, adaptive=adaptive),
        entropy=EntropySection(entropy_coef=0.001, target=target),
    )


def test_fixed_coefficients_stay_whatever_is_measured() -> None:
    section = algorithm()
    control = advance(section, start(section), kl=100.0, entropy=0.0, num_samples=10**6)
    sealed = coefficients(section, control)
    assert (sealed.kl_coef, sealed.entropy_coef) == (0.1, 0.001)


def test_without_sections_there_is_nothing_to_weigh() -> None:
    section = AlgorithmSection(groups_per_batch=1)
    assert start(section) == Control(0.0, 0.0, None)
    assert advance(section, start(section), kl=None, entropy=0.5, num_samples=8) == start(section)


def test_each_step_moves_what_adapts() -> None:
    section = algorithm(AdaptiveKl(target=0.05, horizon=1000), target=0.5)
    control = advance(section, start(section), kl=0.1, entropy=0.7, num_samples=100)
    assert control == Control(pytest.approx(0.1 * 1.02), pytest.approx(0.0009), 0.7)  # type: ignore[arg-type]
    assert coefficients(section, control).entropy_coef == 0.0
    control = advance(section, control, kl=0.05, entropy=0.4, num_samples=100)
    assert coefficients(section, control).entropy_coef == pytest.approx(0.001)


def test_a_step_without_a_trained_token_moves_nothing() -> None:
    section = algorithm(AdaptiveKl(target=0.05), target=0.5)
    assert advance(section, start(section), kl=None, entropy=None, num_samples=0) == start(section)


def test_a_weight_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ValidationError, match="is above max_coef"):
        EntropySection(entropy_coef=0.1, target=0.2)
    with pytest.raises(ValidationError, match="set target"):
        EntropySection(entropy_coef=0.1, max_coef=0.2)
