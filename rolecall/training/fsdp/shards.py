"""The parameters of one model over FSDP2: each rank keeps a part of them, and has them whole for as long as passes need
them.

    shards = Shards(model, layout, options, memory)
    shards.begin_backward(is_last=False)   # before a microbatch's forward pass
    ...
    shards.release()                       # before anybody reads, moves or changes the parameters themselves
    shards.choose(held_bytes)              # after passes whose memory was measured, and all state is there

Gathered is every layer by itself. What becomes of it between its passes is `parallel.keep_gathered`: given back after
each, or kept from the first forward pass until the parameters change, over all microbatches of a mini-batch. Numbers
are the same (docs/adr/0080-gathered-parameters-stay-where-memory-allows.md).
"""

import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rolecall.training.account.memory import PhaseMemory
from rolecall.training.fsdp.layout import Layout
from rolecall.training.model.box import local_part
from rolecall.training.model.packed_model import PackedModel, layers
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.ranks.device import memory_bytes

logger = logging.getLogger(__name__)

_SPARE = 1 / 8
"""Share of the device that stays free of kept parameters: for longer batches than were measured, and for what the
allocator cannot join.
"""


class Shards:
    """The parts of one model's parameters on this rank, and the whole ones while they are gathered."""

    def __init__(self, model: PackedModel, layout: Layout, options: EngineOptions, memory: PhaseMemory) -> None:
        """Cuts the parameters of `model`, on the meta device, over the ranks of `layout`: they become DTensors. A rank
        of its own has nothing to gather: what needs no cast either stays the tensor that it is.
        """
        self._layout, self._memory = layout, memory
        self._parallel = options.parallel
        dtype = DTYPES[options.dtype]
        own = {each for each in model.parameters() if layout.world_size == 1 and each.dtype == dtype}
        gathered = {each for layer in layers(model) for each in layer.parameters()} - own
        self._num_bytes = sum(local_part(each).numel() for each in gathered) * dtype.itemsize
        self._keeps = False
        # What stays of a frozen model is given back after each call: not worth a choice by its first, a short one.
        self._measured = self._parallel.keep_gathered is None and self._num_bytes > 0 and options.optimizer is not None
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=DTYPES[self._parallel.reduce_dtype], cast_forward_inputs=False
        )
        self._modules: list[FSDPModule] = [
            fully_shard(module, mesh=layout.fsdp_mesh, mp_policy=policy, ignored_params=own)
            for module in (*layers(model), model)
        ]
        if layout.fsdp_mesh.size() > 1:  # else there is nothing to add up, and to divide by 1 would copy every gradient
            for module in self._modules:
                # Losses hold global counts: gradients add up, they are not averaged; and Gloo knows only the plain sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._keep(bool(self._parallel.keep_gathered))

    @property
    def num_bytes_kept(self) -> int:
        """Bytes of whole parameters that stay on this rank from pass to pass; 0: none does."""
        return self._num_bytes if self._keeps else 0

    def begin_backward(self, *, is_last: bool) -> None:
        """Says of the next backward pass whether it is a mini-batch's last: gradients are then reduced all the way,
        over replicas too, and over shards where they wait unsharded; and parameters given back.
        """
        root = self._modules[-1]
        if self._parallel.accumulate == "unsharded":
            root.set_requires_gradient_sync(is_last)
        else:
            root.set_requires_all_reduce(is_last)
        root.set_reshard_after_backward(is_last or not self._keeps)

    def release(self) -> None:
        """Gives back whatever is gathered; the model's parameters are then the parts."""
        for module in self._modules:
            module.reshard()

    def choose(self, held_bytes: int) -> None:
        """Decides whether parameters stay, unless the settings do: where all ranks have room for them above the peak of
        the passes since peaks were last taken, and once more for what these passes took above `held_bytes`, for a
        microbatch may be half as full as the next. Never after a rank of this run ran out of memory, and not again once
        given up. A collective.
        """
        if not self._measured:
            return
        _, total = memory_bytes(self._layout.device)
        room = self._memory.room("forward", "backward")
        if self._memory.has_run_out():
            room = 0  # the batch that was too large comes again, and the next process must not choose the same
        elif not self._keeps:
            room -= self._num_bytes + max(0, self._memory.height("forward", "backward") - held_bytes)
        spare = torch.tensor(room / total, dtype=torch.float64).to(self._layout.device)
        dist.all_reduce(spare, op=dist.ReduceOp.MIN, group=self._layout.group)
        keep = float(spare) >= (_SPARE / 2 if self._keeps else _SPARE)
        if keep == self._keeps:
            return
        self._measured = keep
        logger.info(
            "gathered parameters, %.3g GiB a rank, %s: %.0f%% of the memory of the fullest device is left",
            self._num_bytes / 2**30,
            "stay between passes" if keep else "no longer stay between passes",
            100 * float(spare),
        )
        self._keep(keep)

    def _keep(self, keep: bool) -> None:
        self._keeps = keep and self._num_bytes > 0
        for module in self._modules[:-1]:  # the root's own stay between forward and backward in any case
            module.set_reshard_after_forward(not self._keeps, recurse=False)
