"""The parameters of a rank under transformers' names, and the buffers that model directories hold: read from there,
gathered for publishing, named for checkpoints. All of it follows from the family's map (families.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.distributed as dist

from rolecall.training.megatron.families import Family, Piece
from rolecall.training.megatron.layout import MegatronLayout
from rolecall.training.megatron.model import Stage
from rolecall.training.model.box import Box
from rolecall.training.model.packed_model import state_buffers
from rolecall.training.model.parameters import ParameterFiles
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.state.checkpoint import Part

Values = Callable[[torch.Tensor], torch.Tensor]
"""A tensor of a parameter's or a buffer's shape: itself, or one that the optimizer keeps for it."""


@dataclass(frozen=True)
class Held:
    """The part of one of transformers' parameters that a rank holds."""

    box: Box
    pieces: tuple[tuple[torch.Tensor, Piece], ...]
    """Megatron's parameters that it lies in, in the box's order."""

    def views(self, values: Values) -> tuple[torch.Tensor, ...]:
        """Returns its pieces of `values`, one after another along the first dimension."""
        return tuple(
            values(parameter)[piece.start : piece.start + piece.num_rows].view(piece.box.shape)
            for parameter, piece in self.pieces
        )


class Weights:
    """The parameters of a rank's stages. Made once; a collective."""

    def __init__(
        self,
        stages: Sequence[Stage],
        family: Family,
        shapes: Mapping[str, torch.Size],
        layout: MegatronLayout,
        group: CommandGroup,
    ) -> None:
        """`shapes` of the whole model's parameters and buffers, by name. Marks parameters for Megatron: by
        `tensor_model_parallel` it knows whose gradient counts on every rank, by `allreduce` over which ranks it is
        summed.
        """
        self._layout, self._shapes = layout, shapes
        found: list[tuple[torch.Tensor, Piece]] = []
        for stage in stages:
            for own, tensor in (*stage.named_parameters(), *state_buffers(stage).items()):
                is_expert = family.is_expert(own)
                tensor.tensor_model_parallel = is_expert or family.is_cut(own)
                tensor.allreduce = not is_expert
                found += [(tensor, piece) for piece in family.pieces(own, stage.first_layer, layout.place)]
        found.sort(key=lambda each: (each[1].name, each[1].box.start))
        self._held = {name: _joined(list(pieces)) for name, pieces in groupby(found, lambda each: each[1].name)}
        self._sources = self._exchange(group)

    def read(self, files: ParameterFiles, values: Values, progressed: Callable[[], None]) -> None:
        """Fills `values` of every parameter from a model directory."""
        for name, held in self._held.items():
            part = files.part(name, self._shapes[name], held.box)
            for view, rows in zip(held.views(values), _along(part, held), strict=True):
                view.copy_(rows)
            progressed()

    def gather(self, name: str, values: Values, dtype: torch.dtype) -> torch.Tensor:
        """The whole parameter `name`, in `dtype`, on every rank; a collective."""
        whole: torch.Tensor | None = None
        for rank, box in self._sources[name]:
            if rank == self._layout.rank:
                part = torch.cat([view.to(dtype) for view in self._held[name].views(values)])
            else:
                part = torch.empty(box.shape, dtype=dtype, device=self._layout.device)
            if self._layout.world_size > 1:
                dist.broadcast(part, rank)
            if len(self._sources[name]) == 1:
                return part
            if whole is None:
                whole = torch.empty(self._shapes[name], dtype=dtype, device=self._layout.device)
            whole[box.slices] = part
        assert whole is not None
        return whole

    def parts(self, prefix: str, names: Iterable[str], values: Values) -> dict[str, Part]:
        """Returns the parts of `values` that a checkpoint keeps of `names`, by `prefix` and name. Those names are
        there, too, that this rank has nothing of.
        """
        return {prefix + name: self._part(name, values) for name in names}

    def _part(self, name: str, values: Values) -> Part:
        held = self._held.get(name)
        if held is None:
            nothing = Box((0,) * len(self._shapes[name]), (0,) * len(self._shapes[name]))
            return Part(self._shapes[name], nothing, (torch.empty(0),), False)
        is_first = (self._layout.rank, held.box) in self._sources[name]
        return Part(self._shapes[name], held.box, held.views(values), is_first)

    def _exchange(self, group: CommandGroup) -> dict[str, list[tuple[int, Box]]]:
        """The first rank that holds each box of each parameter."""
        mine = json.dumps({name: (held.box.start, held.box.shape) for name, held in self._held.items()})
        first: dict[str, dict[Box, int]] = {name: {} for name in self._shapes}
        for rank, told in enumerate(group.gather(mine.encode())):
            for name, (start, shape) in json.loads(told).items():
                first[name].setdefault(Box(tuple(start), tuple(shape)), rank)
        return {name: [(rank, box) for box, rank in boxes.items()] for name, boxes in first.items()}


def _joined(pieces: list[tuple[torch.Tensor, Piece]]) -> Held:
    boxes = [piece.box for _, piece in pieces]
    joined = Box(boxes[0].start, (sum(box.shape[0] for box in boxes), *boxes[0].shape[1:]))
    assert all(after.start[0] == before.start[0] + before.shape[0] for before, after in pairwise(boxes))
    return Held(joined, tuple(pieces))


def _along(part: torch.Tensor, held: Held) -> Iterable[torch.Tensor]:
    return torch.split(part, [piece.box.shape[0] for _, piece in held.pieces])
