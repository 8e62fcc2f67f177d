"""The layout of ranks: `Layout` places the ranks of a group and says who keeps which part of a tensor.

Ranks are numbered replica by replica, inside it slot by slot, inside it sequence part by sequence part, tensor part
innermost (neighbours talk most):

    rank = ((replica * shards + shard) * sequence + sequence_part) * tensor + tensor_part

A *slot* is a set of sequence x tensor ranks that compute the same rows together. Parameters are sharded by FSDP over
all ranks of a replica with the same tensor part, sequence parts included: to FSDP, ranks with other tokens of one
sequence are ranks with other data.
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rolecall.errors import ConfigError
from rolecall.settings import ParallelSection
from rolecall.training.model.box import Box, local_part
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.ranks.device import COLLECTIVE_TIMEOUT_S
from rolecall.training.state.checkpoint import Part


class Layout:
    """The ranks of the default process group. Made once per engine; a collective."""

    def __init__(self, parallel: ParallelSection, device: torch.device) -> None:
        """ConfigError when there is no process group, or its size is not a multiple of replicate x sequence x
        tensor.
        """
        if dist.group.WORLD is None:
            raise ConfigError(
                "the process group does not exist yet; call rolecall.training.ranks.device.start_rank first"
            )
        self.group: dist.ProcessGroup = dist.group.WORLD
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        fixed = parallel.replicate * parallel.slot_size
        if self.world_size % fixed:
            raise ConfigError(
                f"{self.world_size} ranks cannot be laid out as replicate x sequence x tensor = {fixed}; change "
                "num_ranks or parallel"
            )
        self.data_rank = parallel.slot_of(self.rank, self.world_size)
        """Index of the slot that this rank belongs to."""
        self.data_size = self.world_size // parallel.slot_size
        """Number of slots."""
        self.is_slot_leader = parallel.leads_slot(self.rank, self.world_size)
        """Whether this rank counts for its slot: the others compute the same numbers."""
        ranks = torch.arange(self.world_size).view(parallel.replicate, -1, parallel.sequence, parallel.tensor)
        self.sequence: SequenceShare | None = None
        """This rank's part of its slot's sequences; None where each rank has its own."""
        if parallel.sequence > 1:
            group = self._group_of(ranks.movedim(2, -1))
            self.sequence = SequenceShare(group, dist.get_rank(group), parallel.sequence)
        sharded = ranks.flatten(1, 2)
        sizes = {"replicate": parallel.replicate, "shard": sharded.shape[1], "tensor": parallel.tensor}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        groups = [self._group_of(sharded.movedim(list(sizes).index(name), -1)) for name in names]
        cube = sharded.reshape([sizes[name] for name in names])
        self._sizes = {name: sizes[name] for name in names}
        self._coordinate = dict(zip(names, (cube == self.rank).nonzero()[0].tolist(), strict=True))
        mesh = DeviceMesh.from_group(groups, device.type, cube, mesh_dim_names=names)
        self.fsdp_mesh: DeviceMesh = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        self.tensor_mesh: DeviceMesh | None = mesh["tensor"] if "tensor" in names else None

    def num_holders(self, tensor: torch.Tensor) -> int:
        """How many ranks keep the same part of `tensor`."""
        return math.prod(size for name, size in self._sizes.items() if name not in _cut_along(tensor))

    def is_first_holder(self, tensor: torch.Tensor) -> bool:
        """Whether this rank is the first of those that keep its part of `tensor`: the one that writes it."""
        return all(at == 0 for name, at in self._coordinate.items() if name not in _cut_along(tensor))

    def part(self, tensor: torch.Tensor) -> Part:
        """The part of `tensor` that this rank keeps, as checkpoints know it."""
        return Part(tensor.shape, Box.of(tensor), (local_part(tensor).detach(),), self.is_first_holder(tensor))

    def _group_of(self, ranks: torch.Tensor) -> dist.ProcessGroup:
        """This rank's group when the last dimension of `ranks` is cut into groups."""
        lines: list[list[int]] = ranks.reshape(-1, ranks.shape[-1]).tolist()
        if lines == [list(range(self.world_size))]:
            return self.group
        own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )[0]  # type: ignore[no-untyped-call]
        return own


def _cut_along(tensor: torch.Tensor) -> set[str]:
    """The mesh dimensions along which `tensor` is cut, not copied."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return {name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()}
