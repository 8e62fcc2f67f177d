"""The learning rate as a function of the optimizer step: linear warm-up, then constant, linear or cosine decay to 0. Pure; the only state is the step."""

from math import cos, pi

from rolecall.settings import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (0 is the first) of `total_steps`. Warm-up reaches the peak at step warmup_steps; the last step is just above 0."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / (section.warmup_steps + 1)
    done = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    match section.schedule:
        case "constant":
            return section.learning_rate
        case "linear":
            return section.learning_rate * (1.0 - done)
        case "cosine":
            return section.learning_rate * 0.5 * (1.0 + cos(pi * done))
