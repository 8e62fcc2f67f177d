"""Megatron's process groups, laid out so that the ranks of a slot are neighbours, tensor part innermost:

    rank = ((data * pipeline + stage) * sequence + sequence_part) * tensor + tensor_part

A slot of pipeline x sequence x tensor ranks computes the same rows together. Experts are spread over `expert`
neighbouring ranks that a layer's tokens are exchanged between, of several slots where there is no pipeline.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rolecall.errors import ConfigError
from rolecall.settings import ParallelSection
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.ranks.device import COLLECTIVE_TIMEOUT_S


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share matrices and experts."""

    tensor: int
    num_tensor: int
    expert: int
    num_expert: int


class MegatronLayout:
    """The ranks of the default process group. Made once per engine; a collective."""

    def __init__(self, parallel: ParallelSection, device: torch.device, *, virtual_stages: int, experts: bool) -> None:
        """ConfigError when the ranks cannot be laid out so. `experts`: whether the model is a mixture of experts."""
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        shared = parallel.sequence * parallel.tensor
        self.slot_size = shared * parallel.pipeline
        if self.world_size % self.slot_size:
            raise ConfigError(
                f"{self.world_size} ranks cannot be laid out as pipeline x sequence x tensor = {self.slot_size}; "
                "change num_ranks or parallel"
            )
        self.data_rank, self.data_size = self.rank // self.slot_size, self.world_size // self.slot_size
        """The index of the slot that this rank belongs to, and the number of slots."""
        self.is_slot_leader = self.rank % self.slot_size == 0
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=parallel.sequence,
            expert_model_parallel_size=parallel.expert,
            # groups that a dense model makes no use of must fit the order of ranks, too
            expert_tensor_parallel_size=1 if experts else shared,
            order="tp-cp-ep-pp-dp",
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT_S // 60),
        )
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # asked for where nothing is drawn, too
        self.place = Place(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel.tensor,
            parallel_state.get_expert_model_parallel_rank(),
            parallel.expert,
        )
        self.stages: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        """The ranks that have the other stages of this one's part."""
        self.last_stage: int = parallel_state.get_pipeline_model_parallel_last_rank()
        """Rank of the one that computes the loss."""
        self.is_last_stage = self.rank == self.last_stage
        self.sequence: SequenceShare | None = None
        """This rank's part of its slot's sequences; None where each rank has its own."""
        if parallel.sequence > 1:
            group = parallel_state.get_context_parallel_group()
            self.sequence = SequenceShare(group, dist.get_rank(group), parallel.sequence)
