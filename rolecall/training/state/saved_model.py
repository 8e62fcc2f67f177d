"""The model in a checkpoint, put together from the files that its ranks wrote (checkpoint.py), without any rank."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError
from rolecall.settings import LoraSection
from rolecall.training.model.box import Box
from rolecall.training.model.files import TensorFile
from rolecall.training.state.checkpoint import MODEL, PARAMETER, boxes_of, rank_files, read_index


class ShardedModel:
    """A `SavedModel` of sharded checkpoints. It keeps no tensor in memory."""

    def __init__(self, storage: Storage, files: Sequence[StoredFile]) -> None:
        """Reads the index and the headers of the ranks' files. CheckpointMissingError, CheckpointMismatchError."""
        index = read_index(storage)
        notes = index["notes"]
        self.head = notes["head"]
        self.dtype = index["dtype"]
        self.lora = None if notes["lora"] is None else LoraSection(**notes["lora"])
        self.base_digest = notes["base"]
        self.source = Path(index["source"])
        self._storage = storage
        self._files = files
        self._shapes: dict[str, list[int]] = {
            key.removeprefix(PARAMETER): shape for key, shape in index["shapes"].items() if key.startswith(PARAMETER)
        }
        self._parts: dict[str, list[tuple[TensorFile, Box]]] = {name: [] for name in self._shapes}
        for file in (TensorFile(storage, name) for name in rank_files(index)):
            for key, box in boxes_of(file).items():
                if key.startswith(PARAMETER):
                    self._parts[key.removeprefix(PARAMETER)].append((file, box))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Reads the whole parameter `name`. CheckpointMismatchError when a part of it is missing."""
        whole: torch.Tensor | None = None
        missing = torch.Size(self._shapes[name]).numel()
        for file, box in {box: (file, box) for file, box in self._parts[name]}.values():
            part = file.part(PARAMETER + name)
            if whole is None:
                whole = torch.empty(self._shapes[name], dtype=part.dtype)
            whole[box.slices].copy_(part)
            missing -= part.numel()
        if whole is None or missing:
            raise CheckpointMismatchError(
                f"{self._storage.url} does not hold all of {name!r}; export another checkpoint"
            )
        return whole

    def companions(self) -> Mapping[str, bytes | bytearray]:
        """Reads the small files of the model directory, by name."""
        names = [file.name for file in self._files if file.name.startswith(f"{MODEL}/")]
        return {name.removeprefix(f"{MODEL}/"): self._storage.read(name) for name in names}
