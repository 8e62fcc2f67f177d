"""The learning rate as a function of the optimizer step: linear warm-up, then constant, linear, cosine or wsd. Pure;
the only state is the step.

With peak p, minimum m and `done` from 0 at the decay's first step towards 1, which the step after the run's last one
would reach:

    constant  p
    linear    p - (p - m) * done
    cosine    p - (p - m) * (1 - cos(pi * done)) / 2
    wsd       p, and over the last decay_steps as linear       (warm-up, stable, decay: Hu et al. 2024, MiniCPM, section
    4)
"""

from math import cos, pi

from rolecall.settings import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (0 is the first) of `total_steps`. Warm-up reaches the peak at step warmup_steps;
    later ones have the minimum.
    """
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / (section.warmup_steps + 1)
    start = section.warmup_steps if section.decay_steps is None else total_steps - section.decay_steps
    done = min(1.0, max(0, step - start) / max(1, total_steps - start))
    fall = section.learning_rate - section.min_learning_rate
    match section.schedule:
        case "constant":
            return section.learning_rate
        case "linear" | "wsd":
            return section.learning_rate - fall * done
        case "cosine":
            return section.learning_rate - fall * (1.0 - cos(pi * done)) / 2
