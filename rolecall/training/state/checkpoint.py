"""Sharded checkpoints without pickle: a safetensors file of every rank, what a model directory has besides weights, and
an index.

    rank-00000.safetensors   parts this rank keeps: model/<name>, <kind>/<name> of the optimizer;
                             rng/<device kind>; metadata `boxes` says which parts
    model/                   config.json, tokenizer, ...: so that a checkpoint can be exported alone
    index.json               {"format", "world_size", "counters", "notes", "dtype", "source", "shapes"}

`Snapshot` takes the state at one instant. What it costs the training loop is a copy to host memory, which goes on
beside it until the first call that would change a tensor in place; writing takes as long as it takes. Loading works at
any world size and layout: a rank reads the part it keeps from whichever files hold some of it; of ranks that keep the
same, one writes. Random state is restored at the same world size only. Why not torch.distributed.checkpoint:
docs/adr/0010-sharded-safetensors-checkpoints.md.
"""

import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from rolecall.checkpoint.manifest import StoredFile, store
from rolecall.checkpoint.storage import Storage
from rolecall.data.json_text import parse_json
from rolecall.data.tokenizer import TEMPLATE, TOKENIZER_CONFIG
from rolecall.disk import writing
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError, WorkerLostError
from rolecall.training.model.box import Box
from rolecall.training.model.files import TensorFile, stream_tensors
from rolecall.training.model.huggingface import companions
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import rng_state, set_rng_state, use_in_thread
from rolecall.training.serving.hooks import nothing

INDEX = "index.json"
MODEL = "model"
"""Folder of the model directory's small files."""
PARAMETER = "model/"
"""Beginning of a parameter's key in a rank's file."""
FORMAT = 2
_PROCESSOR_CONFIG = "processor_config.json"
"""File of a processor's configuration, whose chat template goes before all others."""
_OLDER_TEMPLATE = "chat_template.json"
"""File of a processor's chat template, which goes before TEMPLATE."""
Index: TypeAlias = Mapping[str, Any]
"""What index.json says."""


@dataclass(frozen=True)
class Part:
    """The part of one tensor that this rank keeps."""

    shape: torch.Size
    """Shape of the whole tensor."""
    box: Box
    views: tuple[torch.Tensor, ...]
    """Where it lies: tensors that are the box one after another along its first dimension; changed in place."""
    is_first: bool
    """Whether this rank is the first of those that keep it: the one that writes it."""

    def of(self, shape: torch.Size) -> "Part":
        """The same part of the tensor as one of `shape`, whose columns are in several dimensions: it has them all."""
        if shape == self.shape:
            return self
        box = Box((self.box.start[0], *(0 for _ in shape[1:])), (self.box.shape[0], *shape[1:]))
        return replace(self, shape=shape, box=box, views=tuple(view.view(-1, *shape[1:]) for view in self.views))

    def copy_to(self, target: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Copies the part to `target`, of the box's shape, which is returned."""
        for place, view in zip(_along(target, self.views), self.views, strict=True):
            place.copy_(view, non_blocking=non_blocking)
        return target

    def put(self, inside: Box, values: torch.Tensor) -> None:
        """Overwrites the elements at `inside`, counted from the box's own start, by `values`."""
        if len(self.views) == 1:
            self.views[0][inside.slices].copy_(values)
            return
        rows = torch.cat(self.views)
        rows[inside.slices] = values.to(rows)
        for place, view in zip(_along(rows, self.views), self.views, strict=True):
            view.copy_(place)


@dataclass(frozen=True)
class State:
    """The state of an engine that a checkpoint keeps."""

    parts: Callable[[], Mapping[str, Part]]
    """What there is now of the parameters that train and of what the optimizer keeps for them, by key."""
    prepare: Callable[[int], None]
    """Makes what the optimizer keeps after so many updates, for `parts` to name it and a checkpoint to fill it."""
    counters: Mapping[str, int]
    """Counts by name; num_updates, the optimizer steps applied, is always there."""
    notes: Mapping[str, Any]
    """What must be equal where it is loaded: the head, the adapters' section. JSON."""
    dtype: str
    """What the model computes in and is exported in."""
    source: Path
    """Model directory."""
    chat_template: str | None = None
    """Kept in place of its chat templates."""


class Snapshot:
    """The state at one instant, on its way to host memory and from there to a storage."""

    def __init__(
        self,
        state: State,
        device: torch.device,
        rank: int,
        world_size: int,
        progressed: Callable[[], None] = nothing,
    ) -> None:
        """Copies nothing yet: until `settle` has returned nobody may change the tensors. `progressed` is called, in any
        thread, after each that is copied.
        """
        self._progressed = progressed
        parts = state.parts()
        self._rank = rank
        self._source, self._chat_template = state.source, state.chat_template
        self._parts = {key: part for key, part in parts.items() if part.is_first and not part.box.empty}
        self._tensors: dict[str, torch.Tensor] = {}
        boxes = {key: (part.box.start, part.box.shape) for key, part in self._parts.items()}
        self._metadata = {"boxes": json.dumps(boxes)}
        self._rng = {f"rng/{kind}": value for kind, value in rng_state(device).items()}
        self._index = {
            "format": FORMAT,
            "world_size": world_size,
            "counters": dict(state.counters),
            "notes": dict(state.notes),
            "dtype": state.dtype,
            "source": str(state.source),
            "shapes": {key: list(part.shape) for key, part in parts.items()},
        }
        lies_there = any(view.device.type != "cpu" for part in self._parts.values() for view in part.views)
        self._reached = torch.accelerator.current_stream().record_event() if lies_there else None
        self._lock = threading.Lock()
        self._settled = False

    def settle(self) -> None:
        """Returns when everything is in host memory; any thread may call, and the first does the work."""
        with self._lock:  # bounded: by a copy of this rank's share
            if not self._settled:
                self._tensors = _copied(self._parts, self._reached, self._progressed)
                self._parts = {}
                self._settled = True

    def write(self, storage: Storage, group: CommandGroup, more: Mapping[str, bytes]) -> tuple[StoredFile, ...]:
        """Writes this rank's file, and on rank 0 the index and the files `more`, once. A collective of `group`; rank 0
        returns all files of all ranks.

        DiskFullError and StorageUnavailableError on every rank.
        """
        mine = group.agree(lambda: self._write_share(storage))
        everyone = [
            StoredFile(*json.loads(data))
            for data in group.gather(json.dumps([mine.name, mine.num_bytes, mine.checksum]).encode())
        ]
        rest = group.agree(lambda: self._write_rest(storage, more) if group.is_leader else ())
        return (*everyone, *rest) if group.is_leader else ()

    def _write_rest(self, storage: Storage, more: Mapping[str, bytes]) -> tuple[StoredFile, ...]:
        files = {
            **{f"{MODEL}/{name}": _copy_of(path) for name, path in companions(self._source).items()},
            **{name: _text(data) for name, data in more.items()},
        }
        if self._chat_template is not None:
            theirs = [name for name in files if name.endswith(".jinja") or name == f"{MODEL}/{_OLDER_TEMPLATE}"]
            for name in theirs:
                del files[name]
            files[f"{MODEL}/{TEMPLATE}"] = _text(self._chat_template.encode())
            for name in (TOKENIZER_CONFIG, _PROCESSOR_CONFIG):  # some readers know the template in it alone, or first
                if (path := self._source / name).is_file():
                    config = parse_json(path.read_text(encoding="utf-8"))
                    config.pop("chat_template", None)
                    files[f"{MODEL}/{name}"] = _text(json.dumps(config, indent=2).encode())
        files[INDEX] = _text(json.dumps(self._index, indent=1).encode())
        with writing("write a checkpoint to", Path(storage.url)):
            return tuple(store(storage, name, produce) for name, produce in files.items())

    def _write_share(self, storage: Storage) -> StoredFile:
        try:
            self.settle()
        except (MemoryError, RuntimeError) as error:
            raise WorkerLostError(
                f"the state could not be copied to host memory for a checkpoint ({error}); give this role more of it"
            ) from error
        tensors = {**self._tensors, **self._rng}
        self._tensors = {}  # given back here, beside the steps
        return store(
            storage,
            f"rank-{self._rank:05d}.safetensors",
            lambda file: stream_tensors(file, tensors, self._metadata, nothing),
        )


def load(
    storage: Storage,
    index: Index,
    state: State,
    device: torch.device,
    rank: int,
    world_size: int,
    progressed: Callable[[], None],
) -> dict[str, int]:
    """Restores parameters, the optimizer and random state in place; returns the counters. CheckpointMismatchError,
    StorageUnavailableError.
    """
    counters: dict[str, int] = index["counters"]
    if index["notes"] != dict(state.notes):
        raise CheckpointMismatchError(
            f"{storage.url} was saved with {index['notes']}, this trainer is made with {dict(state.notes)}; use the "
            "same configuration"
        )
    state.prepare(counters["num_updates"])
    wanted = state.parts()
    shapes = {key: list(part.shape) for key, part in wanted.items()}
    if shapes != index["shapes"]:
        differing = sorted(
            key for key in shapes.keys() | index["shapes"].keys() if shapes.get(key) != index["shapes"].get(key)
        )
        raise CheckpointMismatchError(
            f"{storage.url} was saved from another model or optimizer, or by a release that keeps it in other shapes: "
            f"{len(differing)} tensors differ, first {differing[0]!r}; use those it was made with"
        )
    names = rank_files(index)
    # of the same layout the first has everything, and no other is opened
    names = names[rank:] + names[:rank]
    missing = _Missing(wanted)
    for name in names:
        if missing:
            missing.read(_opened(storage, name), progressed)
    if missing:
        raise CheckpointMismatchError(
            f"{storage.url} does not hold all of {next(iter(missing))!r}; restore another checkpoint"
        )
    if index["world_size"] == world_size:
        own = _opened(storage, f"rank-{rank:05d}.safetensors")
        set_rng_state({key.removeprefix("rng/"): own.part(key) for key in own if key.startswith("rng/")}, device)
    return counters


def read_index(storage: Storage) -> Index:
    """Reads index.json. CheckpointMissingError, CheckpointMismatchError."""
    try:
        index: Index = json.loads(storage.read(INDEX))
    except FileNotFoundError:
        raise CheckpointMissingError(
            f"{storage.url} holds no complete checkpoint: {INDEX} is missing; name an earlier one"
        ) from None
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{storage.url}/{INDEX} is not JSON ({error}); restore another checkpoint"
        ) from error
    if index["format"] != FORMAT:
        raise CheckpointMismatchError(
            f"{storage.url} has checkpoint format {index['format']}, this release reads {FORMAT}"
        )
    return index


def rank_files(index: Index) -> list[str]:
    """Names of the files that hold the tensors."""
    return [f"rank-{rank:05d}.safetensors" for rank in range(index["world_size"])]


def boxes_of(file: TensorFile) -> dict[str, Box]:
    """Returns which part of each tensor a rank's file holds, by the tensor's key."""
    return {key: Box(tuple(start), tuple(shape)) for key, (start, shape) in json.loads(file.metadata["boxes"]).items()}


class _Missing:
    """The elements that this rank has yet to read, counted by key."""

    def __init__(self, wanted: Mapping[str, Part]) -> None:
        self._wanted = wanted
        self._left = {key: math.prod(part.box.shape) for key, part in wanted.items() if not part.box.empty}
        self._seen: set[tuple[str, Box]] = set()

    def __bool__(self) -> bool:
        return bool(self._left)

    def __iter__(self) -> Any:
        return iter(self._left)

    def read(self, file: TensorFile, progressed: Callable[[], None]) -> None:
        """Copies what `file` holds of the parts this rank keeps."""
        for key, held in boxes_of(file).items():
            mine = self._wanted[key].box
            common = None if mine.empty else held.within(mine)
            if common is not None and (key, common) not in self._seen:
                self._seen.add((key, common))
                with torch.no_grad():
                    values = file.part(key, common.relative_to(held.start).slices)
                    self._wanted[key].put(common.relative_to(mine.start), values)
                self._left[key] -= values.numel()
                if not self._left[key]:
                    del self._left[key]
            progressed()


def _along(whole: torch.Tensor, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`whole` in pieces like `views`, along its first dimension."""
    return (whole,) if len(views) == 1 else torch.split(whole, [view.shape[0] for view in views])


def _copied(
    parts: Mapping[str, Part], reached: torch.Event | None, progressed: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Copies `parts` to host memory; on an accelerator beside its work, from what is there at `reached`."""
    copies: dict[str, torch.Tensor] = {}
    if reached is None:
        for key, part in parts.items():
            copies[key] = part.copy_to(torch.empty(part.box.shape, dtype=part.views[0].dtype))
            progressed()
        return copies
    device = next(view.device for part in parts.values() for view in part.views if view.device.type != "cpu")
    use_in_thread(device)
    stream = torch.Stream(device=device)
    stream.wait_event(reached)
    with stream:
        for key, part in parts.items():
            # Pinning is what takes long, the first time: 1 to 3 GB/s.
            pinned = torch.empty(part.box.shape, dtype=part.views[0].dtype, pin_memory=True)
            copies[key] = part.copy_to(pinned, non_blocking=True)
            progressed()
    stream.synchronize()
    return copies


def _opened(storage: Storage, name: str) -> TensorFile:
    try:
        return TensorFile(storage, name)
    except FileNotFoundError:
        raise CheckpointMismatchError(
            f"{storage.url}/{name} of a whole checkpoint is gone; restore another one"
        ) from None


def _copy_of(path: Path) -> Callable[[BinaryIO], object]:
    def copy(file: BinaryIO) -> None:
        with path.open("rb") as source:
            shutil.copyfileobj(source, file)

    return copy


def _text(data: bytes) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(data)
