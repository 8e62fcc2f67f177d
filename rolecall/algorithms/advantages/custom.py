"""An advantage estimator that somebody else wrote. Numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.errors import InvalidInputError
from rolecall.plugins import load_plugin
from rolecall.settings import CustomAdvantage
from rolecall.wire import Array


def load(section: CustomAdvantage) -> Callable[..., Any]:
    """The function that `section` names. ConfigError when there is none that takes its options."""
    return load_plugin(section, "algorithm.advantage.function")


def custom(batch: ScoredBatch, section: CustomAdvantage) -> Estimate:
    """Returns what the function estimates for `batch`, 0 outside the loss mask. InvalidInputError when it answers
    anything but an Estimate of finite numbers for all N tokens.
    """
    function, result = section.name, load(section)(batch, **section.options)
    if not isinstance(result, Estimate):
        raise InvalidInputError(
            f"algorithm.advantage.function {function!r} returned {type(result).__name__}; return an Estimate"
        )
    if result.returns_N is None and "values" in batch.columns:
        raise InvalidInputError(
            f"algorithm.advantage.function {function!r} reads values and gave no returns_N; the critic is trained "
            "on those"
        )
    returns_N = None if result.returns_N is None else _checked(batch, result.returns_N, function, "returns_N")
    return Estimate(_checked(batch, result.advantages_N, function, "advantages_N"), returns_N)


def _checked(batch: ScoredBatch, values_N: Array, function: str, what: str) -> Array:
    if values_N.shape != batch.rewards_N.shape:
        raise InvalidInputError(
            f"algorithm.advantage.function {function!r}: {what} has shape {values_N.shape}; the batch has "
            f"{batch.rewards_N.shape}"
        )
    trained_N = np.where(batch.loss_mask_N != 0, values_N, 0).astype(batch.rewards_N.dtype)
    if not np.isfinite(trained_N).all():
        raise InvalidInputError(f"algorithm.advantage.function {function!r}: {what} has numbers that are not finite")
    return trained_N
