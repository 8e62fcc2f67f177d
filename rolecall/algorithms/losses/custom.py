"""A policy loss that somebody else wrote. Torch."""

from typing import Any

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses
from rolecall.errors import OwnFunctionError
from rolecall.plugins import call_plugin, load_plugin
from rolecall.settings import CustomLoss

FIELD = "algorithm.policy_loss.function"
_OF_THE_DEVICE = (torch.OutOfMemoryError, MemoryError, torch.AcceleratorError)


def load(section: CustomLoss) -> Any:
    """The function that `section` names. ConfigError when there is none that takes its options."""
    return load_plugin(section, FIELD)


def custom(batch: PolicyBatch, section: CustomLoss) -> TokenLosses:
    """Returns what the function gives for `batch`. OwnFunctionError when it raises, or that is no
    TokenLosses of all its tokens.
    """
    result = call_plugin(section, FIELD, batch, passing=_OF_THE_DEVICE)
    if not isinstance(result, TokenLosses):
        raise OwnFunctionError(f"{FIELD} {section.name!r} returned {type(result).__name__}; return a TokenLosses")
    for name, column_N in (("losses_N", result.losses_N), *result.shown.items()):
        if not isinstance(column_N, torch.Tensor):
            raise OwnFunctionError(f"{FIELD} {section.name!r}: {name} is no tensor but {type(column_N).__name__}")
        if column_N.shape != batch.mask_N.shape:
            raise OwnFunctionError(
                f"{FIELD} {section.name!r}: {name} has shape {tuple(column_N.shape)}; "
                f"the microbatch has {tuple(batch.mask_N.shape)}"
            )
    if batch.logprobs_N.requires_grad and not result.losses_N.requires_grad and batch.mask_N.any():
        raise OwnFunctionError(
            f"{FIELD} {section.name!r}: losses_N has no graph to the policy; compute it from batch.logprobs_N or "
            "batch.ratio_N(), without detach()"
        )
    # What stands outside the mask weighs 0, which a number that is not finite would survive. It has a graph all the
    # same: where nothing is trained on, the function may have given plain zeros.
    return TokenLosses(
        torch.where(batch.mask_N, result.losses_N, torch.where(batch.mask_N, batch.logprobs_N, 0.0)),
        {f"custom/{name}": column_N.detach() for name, column_N in result.shown.items()},
    )
