"""From the files of a checkpoint to a plain Hugging Face directory: no process group, no GPU, none of the run's
processes; one tensor at a time.

    export(*committed.share("actor"), Path("model"))

Adapters are merged into the base's weights, which are read from the run's model directory, and also written apart, in
peft's own format, under `adapter/`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rolecall.checkpoint.manifest import StoredFile, verify
from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError, ConfigError
from rolecall.settings import LoraSection
from rolecall.training.fsdp.checkpoint import MODEL, boxes_of, rank_files, read_index
from rolecall.training.fsdp.layout import Box
from rolecall.training.model import lora
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.files import TensorFile
from rolecall.training.model.huggingface import ModelFiles, write_model
from rolecall.training.model.packed_model import build_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KEY = "model/"


def export(
    storage: Storage,
    files: Sequence[StoredFile],
    path: Path,
    *,
    dtype: str | None = None,
    base: Path | None = None,
    progressed: Callable[[], None] = lambda: None,
) -> int:
    """Writes the model of a trainer's share of a checkpoint to the directory `path`, which must not hold anything;
    returns the bytes of its weights.

    `dtype` absent: what the run computed in. `base`: where the run's model directory is now; only adapters need it.
    `progressed` is called for every part. ConfigError, CheckpointMismatchError (also when a file is not what was
    written), DiskFullError, StorageUnavailableError.
    """
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; name a new directory")
    verify(storage, files, progressed)
    index = read_index(storage)
    weights = _Weights(storage, index)
    wanted = DTYPES[dtype or index["dtype"]]
    with TemporaryDirectory() as folder:
        source = Path(folder)
        for file in files:
            if file.name.startswith(f"{MODEL}/"):
                (source / Path(file.name).name).write_bytes(storage.read(file.name))
        notes = index["notes"]
        if notes["lora"] is None:
            conversion = Conversion(build_model(source, notes["head"], torch.float32).hf)
            tensors = _whole(weights, conversion, wanted)
            return write_model(path, source, tensors, progressed=progressed)
        section = LoraSection(**notes["lora"])
        directory = base or Path(index["source"])
        base_files = ModelFiles(directory)
        if lora.base_digest(base_files, section) != notes["base"]:
            raise CheckpointMismatchError(
                f"{directory} is not the model that the adapters in {storage.url} were trained beside; name that "
                "one as the base"
            )
        num_bytes = write_model(path, source, _merged(weights, base_files, section, wanted), progressed=progressed)
        adapter = ((lora.peft_name(name), weights.tensor(name)) for name in weights)
        return num_bytes + lora.write_adapter(path / "adapter", directory, adapter, section, progressed)


def _whole(weights: "_Weights", conversion: Conversion, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name in weights:
        yield from conversion.to_checkpoint(name, weights.tensor(name).to(dtype)).items()


def _merged(
    weights: "_Weights", base: ModelFiles, section: LoraSection, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in base:
        tensor = base.tensor(name).to(dtype)
        down, up = lora.adapter_names(name)
        yield (
            name,
            lora.merged(tensor, weights.tensor(down), weights.tensor(up), section) if down in weights else tensor,
        )


class _Weights:
    """The parameters in a checkpoint, put together from the parts that its ranks wrote. Holds none."""

    def __init__(self, storage: Storage, index: Mapping[str, Any]) -> None:
        self._url = storage.url
        self._shapes: dict[str, list[int]] = {
            key.removeprefix(_KEY): shape for key, shape in index["shapes"].items() if key.startswith(_KEY)
        }
        self._parts: dict[str, list[tuple[TensorFile, Box]]] = {name: [] for name in self._shapes}
        for file in (TensorFile(storage, name) for name in rank_files(index)):
            for key, box in boxes_of(file).items():
                if key.startswith(_KEY):
                    self._parts[key.removeprefix(_KEY)].append((file, box))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """The whole parameter `name`. CheckpointMismatchError when a part of it is missing."""
        whole: torch.Tensor | None = None
        missing = torch.Size(self._shapes[name]).numel()
        for file, box in {box: (file, box) for file, box in self._parts[name]}.values():
            part = file.part(_KEY + name)
            if whole is None:
                whole = torch.empty(self._shapes[name], dtype=part.dtype)
            whole[box.slices].copy_(part)
            missing -= part.numel()
        if whole is None or missing:
            raise CheckpointMismatchError(f"{self._url} does not hold all of {name!r}; export another checkpoint")
        return whole
