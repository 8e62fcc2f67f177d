"""The optimizer, which turns gradients into new parameters: torch's optimizers over sharded parameters, behind one step
(docs/adr/0025-optimizers-and-offload.md).

    adamw  fused AdamW on everything
    muon   Muon on the layers' matrices; AdamW on embeddings, heads, norms, biases and stacked experts and their
    adapters, which are no matrices

Weight decay on matrices only. Not the learning rate (learning_rate.py) and not clipping, which needs all ranks.

Moments that live in host memory are on the device for their own parameters' update alone, a portion after another.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rolecall.data.model.parameter_counts import UPDATED_AT_A_TIME
from rolecall.settings import OptimizerSection
from rolecall.training.model.box import local_part
from rolecall.training.model.lora import is_of_experts
from rolecall.training.model.packed_model import PackedModel, layers
from rolecall.training.state.host_copies import HostCopies


class Optimizer:
    """The optimizer of one model: of those of its parameters that train."""

    def __init__(self, model: PackedModel, section: OptimizerSection, on_host: HostCopies) -> None:
        """`model` is sharded: what is kept for each parameter is sharded as it is. Those of it that are on the host are
        in `on_host`.
        """
        self._on_host = on_host
        self._offloads = section.offload
        self._names = {parameter: name for name, parameter in model.hf.named_parameters() if parameter.requires_grad}
        of_layers = {parameter for layer in layers(model) for parameter in layer.parameters() if parameter.ndim == 2}
        inner = {
            parameter
            for parameter, name in self._names.items()
            if section.kind == "muon"
            and parameter in of_layers
            and _is_matrix(name, parameter)
            and not is_of_experts(name)
        }
        matrices = [parameter for parameter in self._names if parameter in inner]
        rest = {parameter: name for parameter, name in self._names.items() if parameter not in inner}
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Scaled to the size of AdamW's updates (Liu et al. 2025, "Muon is scalable", section 2.2), so that one rate
            # serves both.
            self._parts.append(
                torch.optim.Muon(matrices, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self._parts.append(
                torch.optim.AdamW(_groups(rest, section), betas=section.betas, eps=section.eps, fused=True)
            )

    def step(self, rate: float) -> None:
        """Applies the gradients at learning rate `rate`, and drops them. A collective with muon, which orthogonalizes
        whole matrices.
        """
        gradients = {parameter: parameter.grad for parameter in self._names}
        self.zero_grad()
        for portion in self._portions():
            for parameter in portion:
                parameter.grad = gradients.pop(parameter)
            self._on_host.give_back("optimizer", self.tensors(portion))
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = rate
                part.step()  # of those that have gradients
            for parameter in portion:
                parameter.grad = None
            if self._offloads:
                moments = {name: local_part(tensor) for name, tensor in self.tensors(portion).items()}
                self._on_host.take("optimizer", moments)

    def _portions(self) -> Iterator[list[nn.Parameter]]:
        """Yields the parameters that are updated together, on every rank the same."""
        portion, size = list[nn.Parameter](), 0
        for parameter in self._names:
            if portion and self._offloads and size + parameter.numel() > UPDATED_AT_A_TIME:
                yield portion
                portion, size = [], 0
            portion.append(parameter)
            size += parameter.numel()
        yield portion

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def tensors(self, parameters: Collection[nn.Parameter] | None = None) -> dict[str, torch.Tensor]:
        """Returns the state kept for each of `parameters`, absent: of all, each of the parameter's shape, by
        "<kind>/<parameter>", as in exp_avg/...; nothing before the first step. Memory of those on the host is gone.
        """
        return {
            f"{kind}/{self._names[parameter]}": value
            for part in self._parts
            for parameter in (self._names if parameters is None else parameters)
            for kind, value in part.state.get(parameter, {}).items()
            if kind != "step"
        }

    def prepare(self, num_updates: int) -> None:
        """Makes what tensors() has after `num_updates` steps, to be filled by whoever restores it. Drops the gradients.
        A collective, as step is.
        """
        self.zero_grad()
        self._on_host.drop("optimizer")
        for part in self._parts:
            part.state.clear()
        if not num_updates:
            return
        for parameter in self._names:
            parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)  # a step of nothing: every optimizer makes its own kind of state
        for part in self._parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(num_updates)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix, or several stacked. Stacked biases, as gpt-oss' experts have, are [experts, outputs]."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _groups(names: Mapping[nn.Parameter, str], section: OptimizerSection) -> list[dict[str, Any]]:
    """Matrices and vectors apart, and those on different meshes, which one fused step cannot take together."""
    groups: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, _is_matrix(name, parameter)), []).append(parameter)
    return [
        {"params": members, "weight_decay": section.weight_decay if is_matrix else 0.0}
        for (_, is_matrix), members in groups.items()
    ]
