"""The way from the files of a checkpoint to a plain Hugging Face directory: no process group, no GPU, none of the run's
processes; one tensor at a time.

    export(*committed.share("actor"), Path("model"))

Adapters are merged into the base's weights, which are read from the run's model directory, and an actor's also written
apart, in peft's own format, under `adapter/`; a critic's are not, for that format has no place for its value head.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from rolecall.checkpoint.manifest import StoredFile, verify
from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError
from rolecall.settings import LoraSection
from rolecall.training.backends import read_model
from rolecall.training.engine import SavedModel
from rolecall.training.model import lora
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.huggingface import ModelFiles, write_model
from rolecall.training.model.packed_model import PackedModel, build_model, state_buffers
from rolecall.training.options import DTYPES


def export(
    storage: Storage,
    files: Sequence[StoredFile],
    path: Path,
    *,
    dtype: str | None = None,
    base: Path | None = None,
    progressed: Callable[[], None] = lambda: None,
) -> int:
    """Writes the model of a trainer's share of a checkpoint to the directory `path`, which holds nothing yet; returns
    the bytes of its weights.

    `dtype` absent: what the run computed in. `base`: where the run's model directory is now; only adapters need it.
    `progressed` is called for every part. ConfigError, CheckpointMismatchError (also when a file is not what was
    written), DiskFullError, StorageUnavailableError.
    """
    verify(storage, files, progressed)
    saved = read_model(storage, files)
    wanted = DTYPES[dtype or saved.dtype]
    with TemporaryDirectory() as folder:
        source = Path(folder)
        for name, data in saved.companions().items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_bytes(data)

        def written(tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
            _describe(source / "config.json", dtype or saved.dtype)
            return write_model(path, source, tensors, progressed=progressed)

        section = saved.lora
        if section is None:
            return written(_whole(saved, build_model(source, saved.head, torch.float32).hf, wanted))
        directory = base or saved.source
        base_files = ModelFiles(directory)
        if lora.base_digest(base_files, section) != saved.base_digest:
            raise CheckpointMismatchError(
                f"{directory} is not the model that the adapters in {storage.url} were trained beside; name that "
                "one as the base"
            )
        model = build_model(source, saved.head, torch.float32)
        num_bytes = written(_merged(saved, base_files, section, wanted, model))
        if saved.head == "value":
            return num_bytes
        adapter = (lora.to_peft(name, saved.tensor(name)) for name in saved)
        stacked = lora.stacked_experts(model.hf)
        return num_bytes + lora.write_adapter(path / "adapter", directory, adapter, section, stacked, progressed)


def _describe(config: Path, dtype: str) -> None:
    """Has the configuration say what is exported: weights in `dtype`, which loaders would round to the source's, of a
    class of transformers, without the source's own code.
    """
    tree = json.loads(config.read_text(encoding="utf-8"))
    tree.pop("auto_map", None)
    for part in (tree, tree.get("text_config"), tree.get("vision_config")):
        if part is not None:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    config.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _whole(saved: SavedModel, hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    conversion, state = Conversion(hf), state_buffers(hf)
    for name in saved:
        tensor = saved.tensor(name) if name in state else saved.tensor(name).to(dtype)
        yield from conversion.to_checkpoint(name, tensor).items()


def _merged(
    saved: SavedModel, base: ModelFiles, section: LoraSection, dtype: torch.dtype, model: PackedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's tensors with their adapters, but for the output layer that a value head took the place of; then the
    value head, which was trained whole. Experts come a layer's parameter at a time.
    """
    conversion = Conversion(model.hf)
    state = {each for own, buffer in state_buffers(model.hf).items() for each in conversion.to_checkpoint(own, buffer)}
    names = lora.parameter_names(model.hf, conversion)
    heads = [name for name in saved if not lora.is_adapter(name)]
    stacked = set(lora.stacked_experts(model.hf)) if section.experts else set()
    written = set[str]()
    for name in base:
        own = names.get(name, name)
        if name in heads or own in written or (model.replaced_head and name.startswith(f"{model.replaced_head}.")):
            continue
        if own in stacked:
            written.add(own)
            shape = model.hf.get_parameter(own).shape
            tensor = conversion.from_checkpoint(own, shape, base.tensor, slice(None)).to(dtype)
        else:
            tensor = base.tensor(name) if name in state else base.tensor(name).to(dtype)
        tensor = lora.with_adapter(own, tensor, saved, saved.tensor, section, conversion, DTYPES[saved.dtype])
        yield from conversion.to_checkpoint(own, tensor).items() if own in stacked else [(name, tensor)]
    for name in heads:
        yield name, saved.tensor(name).to(dtype)
