"""Megatron's process groups, laid out so that the ranks of a stage are neighbours, tensor part innermost:

    rank = ((stage * slots + slot) * sequence + sequence_part) * tensor + tensor_part

A slot of pipeline x sequence x tensor ranks computes the same rows together. Experts are spread over `expert`
neighbouring ranks of a stage, of several slots or of a part of one, that a layer's tokens are exchanged between. Stages
are outermost because Megatron lays its experts over any number of ranks in that order alone; they talk least, too.
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

    def __init__(self, parallel: ParallelSection, device: torch.device, *, virtual_stages: int) -> None:
        """ConfigError when the ranks cannot be laid out so."""
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.slot_size = parallel.slot_size
        if self.world_size % self.slot_size:
            raise ConfigError(
                f"{self.world_size} ranks cannot be laid out as pipeline x sequence x tensor = {self.slot_size}; "
                "change num_ranks or parallel"
            )
        self.data_rank = parallel.slot_of(self.rank, self.world_size)
        """Index of the slot that this rank belongs to."""
        self.data_size = self.world_size // self.slot_size
        """Number of slots."""
        self.is_slot_leader = parallel.leads_slot(self.rank, self.world_size)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=parallel.sequence,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            order="tp-cp-ep-dp-pp",
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
