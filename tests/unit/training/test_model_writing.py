"""A model directory written tensor by tensor is one that safetensors and transformers read."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.training.model.files import GROWING_HEADER_BYTES
from rolecall.training.model.huggingface import INDEX, SINGLE, ModelFiles, write_model
from rolecall.training.serving.hooks import nothing


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, path / SINGLE)
    return path


def tensors(num: int, size: int = 10) -> dict[str, torch.Tensor]:
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    return {f"layer.{i}.weight": torch.arange(size * (i + 1)).view(i + 1, size).to(dtypes[i % 3]) for i in range(num)}


def test_a_small_model_is_one_file_with_the_sources_configuration_beside_it(source: Path, tmp_path: Path) -> None:
    weights = tensors(5)
    num_bytes = write_model(tmp_path / "out", source, weights.items(), progressed=nothing)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", SINGLE]
    assert num_bytes == sum(tensor.nbytes for tensor in weights.values())
    read = load_file(tmp_path / "out" / SINGLE)
    assert list(read) == sorted(weights)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_a_large_model_is_cut_into_files_that_the_index_names(source: Path, tmp_path: Path) -> None:
    weights = tensors(7)
    write_model(tmp_path / "out", source, weights.items(), progressed=nothing, file_bytes=500)
    files = ModelFiles(tmp_path / "out")
    assert sorted(files) == sorted(weights)
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in weights.items())
    parts = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [part.name for part in parts] == [
        f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))
    ]
    assert all(part.stat().st_size <= 8 + GROWING_HEADER_BYTES + 600 for part in parts)
    assert (tmp_path / "out" / INDEX).is_file()


def test_more_names_than_a_header_holds_begin_another_file(source: Path, tmp_path: Path) -> None:
    weights = {f"{'n' * 1000}.{i}": torch.tensor([i]) for i in range(600)}
    write_model(tmp_path / "out", source, weights.items(), progressed=nothing)
    files = ModelFiles(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in weights.items())


def test_a_tensor_is_let_go_before_the_next_is_made(source: Path, tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            assert len(alive) <= 1  # the one that the caller's loop still names
            tensor = torch.zeros(100)
            alive.add(tensor)
            yield str(i), tensor
            del tensor

    write_model(tmp_path / "out", source, made(), progressed=nothing)
