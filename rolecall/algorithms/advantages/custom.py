"""An advantage estimator that somebody else wrote. Numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.errors import OwnFunctionError
from rolecall.plugins import call_plugin, load_plugin
from rolecall.settings import CustomAdvantage
from rolecall.wire import Array

FIELD = "algorithm.advantage.function"


def load(section: CustomAdvantage) -> Callable[..., Any]:
    """The function that `section` names. ConfigError when there is none that takes its options."""
    return load_plugin(section, FIELD)


def custom(batch: ScoredBatch, section: CustomAdvantage) -> Estimate:
    """Returns what the function estimates for `batch`, 0 outside the loss mask. OwnFunctionError when it raises,
    or answers anything but an Estimate of finite numbers for all N tokens.
    """
    function, result = section.name, call_plugin(section, FIELD, batch)
    if not isinstance(result, Estimate):
        raise OwnFunctionError(f"{FIELD} {function!r} returned {type(result).__name__}; return an Estimate")
    if result.returns_N is None and "values" in batch.columns:
        raise OwnFunctionError(
            f"{FIELD} {function!r} reads values and gave no returns_N; the critic is trained on those"
        )
    returns_N = None if result.returns_N is None else _checked(batch, result.returns_N, function, "returns_N")
    return Estimate(_checked(batch, result.advantages_N, function, "advantages_N"), returns_N)


def _checked(batch: ScoredBatch, values_N: Array, function: str, what: str) -> Array:
    if np.shape(values_N) != batch.rewards_N.shape:
        raise OwnFunctionError(
            f"{FIELD} {function!r}: {what} has shape {np.shape(values_N)}; the batch has {batch.rewards_N.shape}"
        )
    trained_N = np.where(batch.loss_mask_N != 0, values_N, 0).astype(batch.rewards_N.dtype)
    if not np.isfinite(trained_N).all():
        raise OwnFunctionError(f"{FIELD} {function!r}: {what} has numbers that are not finite")
    return trained_N
