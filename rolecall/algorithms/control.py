"""Coefficients that adapt from step to step: of the KL to a reference, toward a target KL, and of the entropy bonus,
toward a target entropy.

Pure Python. What adapts is the state `Control`; whoever owns the steps keeps it, seals `coefficients` with each batch
and moves it on by what was measured.

    control = start(algorithm)
    batch.coefficients = coefficients(algorithm, control)
    control = advance(algorithm, control, kl=..., entropy=..., num_samples=...)     # when the step is applied
"""

from dataclasses import dataclass, replace

from rolecall.settings import KL_ERROR_BOUND, AlgorithmSection
from rolecall.v1.trajectory_pb2 import Coefficients

LOWEST_KL_COEF = 1e-3
"""Share of its first value that an adaptive KL coefficient keeps: it moves by factors, so that one that fell through a
thousand quiet steps would take as many to come back, and at last be 0 and stay so.
"""


@dataclass(frozen=True)
class Control:
    """The coefficients as they stand before a step."""

    kl_coef: float = 0.0
    """Coefficient of the KL term; 0 without one."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, as it has adapted; the batch gets it or 0 (`coefficients`)."""
    entropy: float | None = None
    """Mean entropy per trained token of the step before, nats; None: none was measured yet."""


def start(algorithm: AlgorithmSection) -> Control:
    """Returns the coefficients before the first step, as configured."""
    kl, entropy = algorithm.kl, algorithm.entropy
    return Control(kl.kl_coef if kl is not None else 0.0, entropy.entropy_coef if entropy is not None else 0.0)


def coefficients(algorithm: AlgorithmSection, control: Control) -> Coefficients:
    """Returns the coefficients that are sealed with the next batch."""
    entropy = algorithm.entropy
    entropy_coef = control.entropy_coef
    if entropy is not None and entropy.target is not None:
        entropy_coef = entropy_coef_applied(entropy_coef, control.entropy, target=entropy.target)
    return Coefficients(kl_coef=control.kl_coef, entropy_coef=entropy_coef)


def advance(
    algorithm: AlgorithmSection, control: Control, *, kl: float | None, entropy: float | None, num_samples: int
) -> Control:
    """Returns the coefficients after a step of `num_samples` responses.

    `kl` and `entropy` are means per token, None where nothing was trained: that coefficient stays.

    `kl` is of the configured estimator: metric actor/reference_kl where the KL is in the loss, the mean of the penalty
    where it is in the reward. `entropy` is metric actor/entropy.
    """
    of_kl, section = algorithm.kl, algorithm.entropy
    if of_kl is not None and of_kl.adaptive is not None and kl is not None:
        target, horizon = of_kl.adaptive.target, of_kl.adaptive.horizon
        kl_coef = kl_coef_next(control.kl_coef, kl, num_samples, target=target, horizon=horizon)
        control = replace(control, kl_coef=max(kl_coef, of_kl.kl_coef * LOWEST_KL_COEF))
    if section is not None and section.target is not None and entropy is not None:
        entropy_coef = entropy_coef_next(
            control.entropy_coef,
            entropy,
            target=section.target,
            step=section.coef_step,
            highest=section.max_coef,
        )
        control = replace(control, entropy_coef=entropy_coef, entropy=entropy)
    return control


def kl_coef_next(coef: float, observed_kl: float, num_samples: int, *, target: float, horizon: int) -> float:
    """coef (1 + K e), e = clip(observed_kl / target - 1, -0.2, 0.2).

    The log-space proportional controller of Ziegler et al. (arXiv:1909.08593, section 2.2). The paper's K is 0.1 a
    step, its code's num_samples / horizon, which makes the pace independent of the batch's size: that is what is done
    here.
    """
    error = min(max(observed_kl / target - 1, -KL_ERROR_BOUND), KL_ERROR_BOUND)
    return coef * max(0.0, 1 + error * num_samples / horizon)


def entropy_coef_next(coef: float, observed_entropy: float, *, target: float, step: float, highest: float) -> float:
    """coef + step where the entropy is below its target, coef - step where it is above, within 0..highest.

    Adaptive entropy control of Skywork-OR1 (arXiv:2505.22312), with the bounds that its released recipes set.
    """
    if observed_entropy < target:
        coef += step
    elif observed_entropy > target:
        coef -= step
    return min(max(coef, 0.0), highest)


def entropy_coef_applied(coef: float, observed_entropy: float | None, *, target: float) -> float:
    """coef while the entropy is at most its target, or not yet known, else 0 (the same source): the bonus never pushes
    an entropy that is high enough.
    """
    return coef if observed_entropy is None or observed_entropy <= target else 0.0
