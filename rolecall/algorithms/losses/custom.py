"""A policy loss that somebody else wrote. Torch."""

from typing import Any

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses
from rolecall.errors import InvalidInputError
from rolecall.plugins import load_plugin
from rolecall.settings import CustomLoss


def load(section: CustomLoss) -> Any:
    """The function that `section` names. ConfigError when there is none that takes its options."""
    return load_plugin(section, "algorithm.policy_loss.function")


def custom(batch: PolicyBatch, section: CustomLoss) -> TokenLosses:
    """Returns what the function gives for `batch`. InvalidInputError unless that is a TokenLosses of all its tokens."""
    result = load(section)(batch, **section.options)
    if not isinstance(result, TokenLosses):
        raise InvalidInputError(
            f"algorithm.policy_loss.function {section.name!r} returned {type(result).__name__}; return a TokenLosses"
        )
    for name, column_N in (("losses_N", result.losses_N), *result.shown.items()):
        if column_N.shape != batch.mask_N.shape:
            raise InvalidInputError(
                f"algorithm.policy_loss.function {section.name!r}: {name} has shape {tuple(column_N.shape)}; "
                f"the microbatch has {tuple(batch.mask_N.shape)}"
            )
    # What stands outside the mask weighs 0, which a number that is not finite would survive.
    return TokenLosses(
        torch.where(batch.mask_N, result.losses_N, 0.0),
        {f"custom/{name}": column_N.detach() for name, column_N in result.shown.items()},
    )
