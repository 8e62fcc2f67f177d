"""The norm of all gradients and clipping by it, over parameters that are cut and copied in different ways (FSDP,
replicas, tensor parallel) at once.

torch's own functions stack DTensors, which must then lie on one mesh; here only numbers are added up, with one
all-reduce.
"""

from collections.abc import Iterable
from itertools import groupby

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from rolecall.training.fsdp.layout import Layout
from rolecall.training.model.box import local_part


def gradient_norm(parameters: Iterable[torch.nn.Parameter], layout: Layout) -> torch.Tensor:
    """The 2-norm of the whole gradient, float64, the same on every rank; a collective. A part that several ranks keep
    counts once.
    """
    gradients = sorted(_gradients(parameters), key=layout.num_holders)
    squares = torch.zeros((), dtype=torch.float64, device=layout.device)
    for num_holders, group in groupby(gradients, key=layout.num_holders):
        squares += get_total_norm([local_part(gradient) for gradient in group]).double() ** 2 / num_holders
    dist.all_reduce(squares, group=layout.group)
    return squares.sqrt()


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float, loss_scale: float
) -> None:
    """Divides the gradients by `loss_scale` and scales them, whose norm then is `norm`, down to `max_norm`. Not a
    collective.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    local = [local_part(gradient) for gradient in _gradients(parameters)]
    if local:
        torch._foreach_mul_(local, scale.to(local[0].dtype))


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
