"""The way of outputs from the last stage of a pipeline to the others: every rank of a slot has them, and so can do with
them what the last one does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rolecall.algorithms.losses.router import Routing
from rolecall.columns import ROUTED_EXPERTS, TOPK_IDS
from rolecall.data.model.mixture import Mixture, read_mixture
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.megatron.layout import MegatronLayout
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.options import EngineOptions
from rolecall.training.packing.outputs import ranked

Outputs = TokenOutputs | ValueOutputs


class LastStage:
    """The last stage, from where a rank stands. A collective of the ranks of a pipeline; without one it gives back what
    it gets.
    """

    def __init__(self, layout: MegatronLayout, options: EngineOptions, num_routers: int) -> None:
        """`num_routers`: layers of the whole model that have one."""
        self._layout, self._options, self._num_routers = layout, options, num_routers
        self._mixture = read_mixture(options.path) if options.routers or options.router_replay else None
        self._is_alone = dist.get_world_size(layout.stages) == 1

    def outputs(
        self,
        found: list[Outputs],
        microbatches: Sequence[Microbatch],
        wanted: Wanted | None = None,
        *,
        trained: bool = False,
        base: bool = False,
    ) -> list[Outputs]:
        """Returns the outputs of `microbatches`, without a graph, which the last stage has in `found`: of a pass that
        was made for what is `wanted`, for a loss (`trained`), or without adapters (`base`).
        """
        if self._is_alone:
            return found
        outputs = (
            found if self._layout.is_last_stage else [self._blank(each, wanted, trained, base) for each in microbatches]
        )
        for each in outputs:
            for value in _tensors(each):
                value.copy_(self._sent(value))
        return outputs

    def _blank(self, microbatch: Microbatch, wanted: Wanted | None, trained: bool, base: bool) -> Outputs:
        """Outputs of the right shapes and types, to receive those of the last stage."""
        num_tokens, device = microbatch.token_ids_N.shape[0], self._layout.device
        first, second = torch.empty(num_tokens, device=device), torch.empty(num_tokens, device=device)
        if self._options.head == "value":
            return ValueOutputs(first, torch.empty(len(microbatch.lengths), device=device))
        if trained and TOPK_IDS in microbatch.columns:
            ids_Nk = microbatch.columns[TOPK_IDS]
            found = TokenOutputs(first, second, target_logprobs_Nk=torch.empty(ids_Nk.shape, device=device))
        elif wanted is None:
            found = TokenOutputs(first, second)
        else:
            found = ranked(first, second, torch.empty(num_tokens, 2 * wanted.top_k + 1, device=device), wanted)
        return found if self._mixture is None else self._with_routers(found, microbatch, self._mixture, base)

    def _with_routers(
        self, outputs: TokenOutputs, microbatch: Microbatch, mixture: Mixture, base: bool
    ) -> TokenOutputs:
        num_tokens, device = microbatch.token_ids_N.shape[0], self._layout.device
        if self._options.routers:
            shapes = (mixture.num_experts,), (), (self._num_routers, mixture.num_experts), ()
            outputs = replace(outputs, routing=Routing(*(torch.empty(shape, device=device) for shape in shapes)))
        if base:
            return outputs
        if self._options.router_replay and microbatch.lengths and ROUTED_EXPERTS in microbatch.columns:
            return replace(outputs, rerouted_N=torch.empty(num_tokens, device=device))
        if self._options.router_replay:
            record_NW = torch.empty(num_tokens, mixture.width, dtype=torch.uint8, device=device)
            return replace(outputs, routed_experts_NW=record_NW)
        return outputs

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        if tensor.numel():
            dist.broadcast(tensor, self._layout.last_stage, group=self._layout.stages)
        return tensor


def _tensors(outputs: Outputs | Routing) -> Iterator[torch.Tensor]:
    """All of them, in a fixed order."""
    for value in vars(outputs).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Routing):
            yield from _tensors(value)
