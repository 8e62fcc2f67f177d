"""The way of outputs from the last stage of a pipeline to the others: every rank of a slot has them, and so can do with
them what the last one does.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rolecall.columns import TOPK_IDS
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.megatron.layout import MegatronLayout
from rolecall.training.model.logprobs import Wanted
from rolecall.training.model.packed_model import Head
from rolecall.training.packing.outputs import ranked

Outputs = TokenOutputs | ValueOutputs


class LastStage:
    """The last stage, from where a rank stands. A collective of the ranks of a pipeline; without one it gives back what
    it gets.
    """

    def __init__(self, layout: MegatronLayout, head: Head) -> None:
        self._layout, self._head = layout, head
        self._is_alone = dist.get_world_size(layout.stages) == 1

    def outputs(
        self,
        found: list[Outputs],
        microbatches: Sequence[Microbatch],
        wanted: Wanted | None = None,
        *,
        trained: bool = False,
    ) -> list[Outputs]:
        """Returns the outputs of `microbatches`, without a graph, which the last stage has in `found`: of a pass that
        was made for what is `wanted`, or for a loss (`trained`).
        """
        if self._is_alone:
            return found
        outputs = found if self._layout.is_last_stage else [self._blank(each, wanted, trained) for each in microbatches]
        for each in outputs:
            for value in vars(each).values():
                if isinstance(value, torch.Tensor):
                    value.copy_(self._sent(value))
        return outputs

    def _blank(self, microbatch: Microbatch, wanted: Wanted | None, trained: bool) -> Outputs:
        """Outputs of the right shapes and types, to receive those of the last stage."""
        num_tokens, device = microbatch.token_ids_N.shape[0], self._layout.device
        first, second = torch.empty(num_tokens, device=device), torch.empty(num_tokens, device=device)
        if self._head == "value":
            return ValueOutputs(first, torch.empty(len(microbatch.lengths), device=device))
        if trained and TOPK_IDS in microbatch.columns:
            ids_Nk = microbatch.columns[TOPK_IDS]
            return TokenOutputs(first, second, target_logprobs_Nk=torch.empty(ids_Nk.shape, device=device))
        if wanted is None:
            return TokenOutputs(first, second)
        return ranked(first, second, torch.empty(num_tokens, 2 * wanted.top_k + 1, device=device), wanted)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        if tensor.numel():
            dist.broadcast(tensor, self._layout.last_stage, group=self._layout.stages)
        return tensor
