"""Tensor parallelism: matrices cut over ranks that compute the same tokens, by the plan that transformers ships for the
model.

transformers cuts and hooks the modules (transformers.distributed.tensor_parallel); this file picks what of the plan is
used, and adds three things: the embedding and the output layer are cut over the vocabulary (logprobs.py never puts the
logits together), experts go whole to ranks, and gradients of norms inside attention, each rank's of its own heads, are
summed in autograd, so that a gradient is whole when it reaches FSDP.

Knows the meta device only: it is applied before FSDP shards what is left and before anything is read.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from rolecall.errors import ConfigError
from rolecall.training.model.logits.logprobs import VocabShard

PARTIAL_GRADIENTS = "replicated_with_grad_allreduce"
"""Style of modules that every rank has whole and uses on its own heads."""
_AFTER_A_CUT = ("q_norm", "k_norm", "act_fn")
"""Names of modules whose input is what a matrix beside them gives. Plans of some models forget those."""
INTERLEAVED = ("packed_colwise", "packed_rowwise")
"""Styles that leave a rank several separate pieces of one tensor; those of experts are avoided by giving ranks whole
experts.
"""


def split_tensors(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cuts the parameters of `hf`, on the meta device, over the ranks of `mesh`. ConfigError when it has no plan or
    does not divide.

    That heads divide is trainable.check_parallel's to see.
    """
    try:  # only here: ranks that keep whole matrices need none of it
        from transformers.distributed.tensor_parallel import (
            apply_expert_parallelism,
            apply_tensor_parallelism,
            replace_layer_number_by_wildcard,
        )
    except ImportError as error:
        raise ConfigError(
            f"parallel.tensor needs transformers 5.19, which first cuts experts, too; {transformers_version} is "
            "installed: install the extra `trainer`, or set "
            "parallel.tensor to 1"
        ) from error
    name, size = type(hf).__name__, mesh.size()
    plan = {
        module: style
        for module, style in (hf.tp_plan or {}).items()
        if module not in _named(hf, hf.get_output_embeddings())
    }
    if not plan:
        raise ConfigError(f"transformers ships no tensor-parallel plan for {name}; set parallel.tensor to 1")
    experts: dict[str, str] = hf.ep_plan or {}
    plan = {
        module: style
        for module, style in plan.items()
        if not any(module == expert or module.startswith(f"{expert}.") for expert in experts)
    }
    interleaved = sorted(module for module, style in plan.items() if style in INTERLEAVED)
    if interleaved:
        raise ConfigError(
            f"{name} fuses matrices that tensor parallelism would cut into pieces ({', '.join(interleaved)}); set "
            "parallel.tensor to 1"
        )
    inner = {module for module, style in plan.items() if style == PARTIAL_GRADIENTS} | unnamed_partial(hf, plan)
    whole = {module: style for module, style in plan.items() if module not in inner}
    whole |= dict.fromkeys(_named(hf, hf.get_input_embeddings()), "embedding_rowwise")
    if not hf.config.tie_word_embeddings:
        whole |= dict.fromkeys(_named(hf, hf.get_output_embeddings()), "colwise")
    apply_tensor_parallelism(hf, mesh, whole)
    if experts:
        apply_expert_parallelism(hf, mesh, mesh, experts)
    for path, module in hf.named_modules():
        if replace_layer_number_by_wildcard(path) in inner:
            _sum_gradients(module, mesh.get_group())
    hf.tie_weights()
    _check_shapes(hf, size)


def local_vocabulary(weight_VH: torch.Tensor) -> tuple[torch.Tensor, VocabShard | None]:
    """This rank's rows of an output layer's weight and what they are; all of them, and None, where it was not cut."""
    if not isinstance(weight_VH, DTensor):
        return weight_VH, None
    local = weight_VH.to_local()
    mesh = weight_VH.device_mesh
    return local, VocabShard(mesh.get_group(), mesh.get_local_rank() * local.shape[0])


def unnamed_partial(hf: PreTrainedModel, plan: dict[str, str]) -> set[str]:
    """Returns the modules that `plan` forgets, in its spelling: each rank uses their parameters on its part of what a
    cut matrix gives. ConfigError where each head has parameters of its own.
    """
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    cut, found = {module.rpartition(".")[0] for module, style in plan.items() if style == "colwise"}, set()
    for path, module in hf.named_modules():
        wild = replace_layer_number_by_wildcard(path)
        parent, _, own_name = wild.rpartition(".")
        if own_name in _AFTER_A_CUT and parent in cut and wild not in plan and list(module.parameters()):
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                raise ConfigError(
                    f"{type(hf).__name__} has parameters for each head in {path}, which transformers' plan does not "
                    "cut; set parallel.tensor to 1"
                )
            found.add(wild)
    return found


def _named(hf: PreTrainedModel, wanted: nn.Module | None) -> list[str]:
    return [path for path, module in hf.named_modules() if module is wanted]


def _check_shapes(hf: PreTrainedModel, size: int) -> None:
    for path, parameter in hf.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
                raise ConfigError(
                    f"parallel.tensor is {size}, which does not divide dimension {placement.dim} of {path} "
                    f"{tuple(parameter.shape)}"
                )


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes `module` use its parameters through _Whole."""
    forward = module.forward

    def summing(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = _Whole.apply(parameter, group)  # type: ignore[no-untyped-call]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = summing


class _Whole(torch.autograd.Function):
    """A copied parameter that each rank uses for a part of the work: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
