"""Megatron's distributed optimizer: AdamW whose moments, and float32 parameters beneath half-precision ones, are cut
over the ranks that hold the same parameters.

What it computes is what fsdp/optimizer.py computes: decay on matrices only, clipping by the norm of the whole gradient.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rolecall.settings import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """The optimizer of a rank's stages."""

    def __init__(
        self, stages: Sequence[DistributedDataParallel], section: OptimizerSection, dtype: torch.dtype
    ) -> None:
        """A collective. `dtype` is the parameters'."""
        self._section, self._stages = section, stages
        config = OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        self._chain = get_megatron_optimizer(config, list(stages), use_gloo_process_groups=False)
        self._shards = {
            parameter: (part, part._get_model_param_range_map(parameter)["param"])
            for part in self._chain.chained_optimizers
            for parameter in part.model_param_group_index_map
        }
        """The optimizer that keeps a part of the parameter here, and which elements that is."""

    def step(self, rate: float, max_norm: float) -> float:
        """Clips to `max_norm` and applies the gradients at learning rate `rate`; returns their norm before. Where that
        is not finite nothing is applied. A collective.
        """
        self._chain.prepare_grads()
        norm = float(self._chain.get_grad_norm())
        if isfinite(norm):
            for part in self._chain.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
            for group in self._chain.param_groups:
                group["lr"], group["weight_decay"] = rate, self._section.weight_decay * group["wd_mult"]
            self._chain.step_with_ready_grads()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._chain.zero_grad()

    def prepare(self, num_updates: int) -> None:
        """Makes the moments that there are after `num_updates` steps, zeros; none for 0. A collective."""
        for part in self._chain.chained_optimizers:
            part.optimizer.state.clear()
        if not num_updates:
            return
        self.zero_grad()
        self.step(0.0, 1.0)  # a step of nothing: every optimizer makes its own kind of state
        for part in self._chain.chained_optimizers:
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(num_updates)
            for group in part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = num_updates

    def kept(self) -> dict[str, torch.Tensor]:
        """The tensors of this rank's part of the optimizer's state, for memory's accounts and for moving it."""
        found: dict[str, torch.Tensor] = {}
        for index, (parameter, (part, _)) in enumerate(self._shards.items()):
            main = self._main(parameter)
            if main.dtype is not parameter.dtype:
                found[f"param/{index}"] = main
            for kind, tensor in part.optimizer.state[main].items() if main in part.optimizer.state else ():
                if isinstance(tensor, torch.Tensor) and tensor.ndim:
                    found[f"{kind}/{index}"] = tensor
        return found

    def whole(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        """float32, of the parameter's shape: a moment, or with kind "param" the parameter itself. A collective of the
        ranks that hold it.
        """
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if parameter in self._shards:
            flat[self._slice(parameter)] = self._shard(parameter, kind).detach().view(-1)
        if parameter.allreduce:  # type: ignore[attr-defined]
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:  # an expert's
            group = parallel_state.get_expert_data_parallel_group()
        dist.all_reduce(flat, group=group)
        return flat.view(parameter.shape)

    def put(self, parameter: torch.Tensor, kind: str, values: torch.Tensor) -> None:
        """Overwrites this rank's part by that of `values`, which are as of `whole`. Not a collective."""
        if parameter in self._shards:
            with torch.no_grad():
                self._shard(parameter, kind).view(-1).copy_(values.view(-1)[self._slice(parameter)])

    def _slice(self, parameter: torch.Tensor) -> slice:
        _, bounds = self._shards[parameter]
        return slice(bounds.start, bounds.end)

    def _main(self, parameter: torch.Tensor) -> Any:
        part, _ = self._shards[parameter]
        group, index = part.model_param_group_index_map[parameter]
        return part.optimizer.param_groups[group]["params"][index]

    def _shard(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        main = self._main(parameter)
        tensor: torch.Tensor = main if kind == "param" else self._shards[parameter][0].optimizer.state[main][kind]
        return tensor
