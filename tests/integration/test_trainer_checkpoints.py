"""What the checkpoints of a run promise when their writer is killed, comes late, or finds files damaged; and what a
trainer's snapshot promises.
"""

import functools
import hashlib
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.checkpoint.manifest import (
    COMMITTED,
    Attempt,
    RunCheckpoints,
    StoredFile,
    folder_of,
    read_committed,
    verify,
)
from rolecall.checkpoint.storage import DiskStorage, Storage, open_storage
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError
from rolecall.settings import OptimizerSection
from rolecall.training.export.__main__ import main
from rolecall.training.export.export import export
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.files import CHUNK_BYTES, TensorFile, stream_tensors, write_tensors
from rolecall.training.options import EngineOptions
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.hooks import nothing
from rolecall.training.state.checkpoint import read_index
from tests.checkpoint_rig import load, save
from tests.forks import Talking
from tests.integration.checkpoint_writer import NUM_FILES, write, write_on
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of
from tests.s3_server import s3_bucket
from tests.tiny_models import write_qwen3

NUM_KILLS = 60


def numbers_held(checkpoints: RunCheckpoints) -> set[int]:
    """Every number in the newest checkpoint, after a look at its checksums: one, when it is whole."""
    latest = checkpoints.latest()
    assert latest is not None
    verify(latest.storage, latest.files, nothing)
    assert len(latest.files) == NUM_FILES
    return {
        latest.state["number"],
        *(number for file in latest.files for number in json.loads(latest.storage.read(file.name))),
    }


@pytest.mark.timeout(300)
def test_a_writer_killed_at_any_instant_leaves_the_old_checkpoint_or_the_new_one_whole(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoints, instants, held = RunCheckpoints(open_storage(str(tmp_path)), 2), random.Random(7), 1
    log = tmp_path_factory.mktemp("logs") / "writers.log"
    for _ in range(NUM_KILLS):
        writer = Talking(log, write_on, str(tmp_path), held + 1)
        first = writer.line()
        time.sleep(instants.uniform(0, 0.02))
        writer.kill()
        told = [first, *writer.rest()][-1]
        (held,) = numbers_held(checkpoints)
        assert told <= held <= told + 1
    assert len(checkpoints.steps()) <= 3  # two kept, and one that a kill kept from being deleted
    attempt = checkpoints.begin(10**6)
    checkpoints.commit(attempt, write(attempt, 10**6), {"number": 10**6})
    assert len(checkpoints.steps()) == 2
    named = {f"{folder_of(step)}/{COMMITTED}" for step in checkpoints.steps()}
    for step in checkpoints.steps():
        committed = checkpoints.read(step)
        named |= {
            f"{folder_of(step)}/{committed.storage.url.rpartition('/')[2]}/{file.name}" for file in committed.files
        }
    assert set(open_storage(str(tmp_path)).files()) == named, "what the killed ones left is gone"


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}")


def commit(checkpoints: RunCheckpoints, step: int, number: int = 0) -> Attempt:
    attempt = checkpoints.begin(step)
    checkpoints.commit(attempt, write(attempt, number), {"number": number})
    return attempt


def test_retention_counts_whole_checkpoints_and_deletes_what_nobody_names(storage: Storage) -> None:
    checkpoints = RunCheckpoints(storage, 2)
    commit(checkpoints, 1)
    commit(checkpoints, 2)
    storage.remove(name for name in storage.files() if name.startswith(folder_of(2)) and name.endswith("/3"))
    write(checkpoints.begin(2), 7)  # of an attempt that was cut short
    commit(checkpoints, 3)
    assert checkpoints.steps() == [1, 3], "step 2 is damaged and no reason to delete step 1"
    assert not any(name.startswith(folder_of(2)) for name in storage.files())
    write(checkpoints.begin(9), 7)
    commit(checkpoints, 4)
    assert checkpoints.steps() == [3, 4]
    assert any(name.startswith(folder_of(9)) for name in storage.files()), "perhaps somebody is at work there"
    checkpoints.discard_uncommitted()
    assert not any(name.startswith(folder_of(9)) for name in storage.files())
    assert numbers_held(checkpoints) == {0}


def test_an_attempt_that_lost_a_file_is_not_committed_and_one_given_up_leaves_nothing(storage: Storage) -> None:
    checkpoints = RunCheckpoints(storage, 1)
    commit(checkpoints, 1)
    attempt = checkpoints.begin(2)
    files = write(attempt, 2)
    attempt.storage.remove([files[0].name])
    with pytest.raises(CheckpointMismatchError, match="lacks 1 files"):
        checkpoints.commit(attempt, files, {"number": 2})
    checkpoints.discard(attempt)
    assert checkpoints.steps() == [1]
    assert not any(name.startswith(folder_of(2)) for name in storage.files())
    if isinstance(storage, DiskStorage):
        assert [path.name for path in Path(storage.url).iterdir()] == [folder_of(1)], "its folders are gone, too"


def test_who_writes_late_changes_nothing_of_what_is_committed(storage: Storage) -> None:
    checkpoints = RunCheckpoints(storage, 2)
    zombie = checkpoints.begin(5)
    write(zombie, 1)
    commit(checkpoints, 5, number=2)
    write(zombie, 3)
    assert numbers_held(checkpoints) == {2}


def test_a_manifest_that_was_changed_and_files_that_are_not_what_was_written_are_told(storage: Storage) -> None:
    checkpoints = RunCheckpoints(storage, 2)
    attempt = commit(checkpoints, 1)
    latest = checkpoints.latest()
    assert latest is not None
    attempt.storage.write("actor/2", lambda file: file.write(b"[1]"))
    with pytest.raises(CheckpointMismatchError, match=r"actor/2 is not what was written"):
        verify(*latest.share("actor"), nothing)
    attempt.storage.remove(["actor/1"])
    with pytest.raises(CheckpointMismatchError, match=r"actor/1 of a committed checkpoint is gone"):
        verify(latest.storage, latest.files, nothing)
    with pytest.raises(CheckpointMissingError, match="'critic'"):
        latest.share("critic")
    manifest = storage.read(f"{folder_of(1)}/{COMMITTED}").replace(b"number", b"numbre")
    for damaged in (manifest, manifest[:50], b"[]", b""):
        storage.write(f"{folder_of(1)}/{COMMITTED}", functools.partial(_write, damaged))
        with pytest.raises(CheckpointMismatchError, match="was damaged after it was written"):
            checkpoints.latest()
    with pytest.raises(CheckpointMissingError, match="holds no COMMITTED"):
        read_committed(storage.at(folder_of(2)))


def _write(data: bytes | bytearray, file: BinaryIO) -> None:
    file.write(data)


def test_tensors_are_written_in_parts_that_show_progress_and_read_back_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "large": torch.arange(3 * CHUNK_BYTES // 2, dtype=torch.uint8),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "turned": torch.randn(4, 6).T,
        "number": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 7),
    }
    moves = []
    num_bytes = write_tensors(tmp_path / "file.safetensors", tensors, {"format": "pt"}, lambda: moves.append(1))
    read = load_file(tmp_path / "file.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert len(moves) == 5  # two chunks of the large one, one of each other that has any


def test_parts_of_tensors_are_read_as_safetensors_wrote_them(storage: Storage, tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(7, 5, 3),
        "half": torch.randn(9).to(torch.bfloat16),
        "number": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "theirs", {"written": "by safetensors"})
    storage.write("theirs", functools.partial(_write, (tmp_path / "theirs").read_bytes()))
    storage.write("ours", lambda file: stream_tensors(file, tensors, {"written": "by safetensors"}, nothing))
    cuts = [(), (slice(2, 5),), (slice(1, 7), slice(0, 3)), (slice(0, 7), slice(4, 5), slice(1, 3)), (slice(3, 3),)]
    for name in ("theirs", "ours"):
        file = TensorFile(storage, name)
        assert (set(file), file.metadata, file.shape("wide")) == (
            set(tensors),
            {"written": "by safetensors"},
            (7, 5, 3),
        )
        for key, tensor in tensors.items():
            for cut in cuts:
                if len(cut) <= tensor.ndim:
                    assert torch.equal(file.part(key, cut), tensor[cut]), (name, key, cut)
    storage.write("text", functools.partial(_write, b"not a tensor in sight"))
    with pytest.raises(CheckpointMismatchError, match="text is no safetensors file"):
        TensorFile(storage, "text")


@pytest.fixture(scope="module")
def engines(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> list[FsdpEngine]:
    """Two trainers of one tiny model."""
    path = write_qwen3(tmp_path_factory.mktemp("model"), vocab=288)
    options = EngineOptions(
        path=path, head="policy", dtype="float32", optimizer=OptimizerSection(learning_rate=1e-2), total_steps=8
    )
    return [FsdpEngine(options, device=torch.device("cpu")) for _ in range(2)]


@pytest.mark.parametrize("change", ["step", "load", "offload", "snapshot"])
def test_a_snapshot_that_is_written_late_holds_the_state_of_its_instant(
    engines: list[FsdpEngine], tmp_path: Path, change: str
) -> None:
    engine, restored = engines
    rows = make_rows(6)
    train_step(engine, rows, token_budget=64, seed=0)
    save(engine, tmp_path / "at once")
    save(restored, tmp_path / "another")
    expected, late = weights_of(engine), engine.snapshot()
    match change:
        case "step":
            train_step(engine, rows, token_budget=64, seed=1)
            assert any(not torch.equal(tensor, expected[name]) for name, tensor in weights_of(engine).items())
        case "load":
            load(engine, tmp_path / "another")
        case "offload":
            engine.offload()
            engine.onload()
            train_step(engine, rows, token_budget=64, seed=1)
        case "snapshot":
            engine.snapshot()
            train_step(engine, rows, token_budget=64, seed=1)
    late.write(open_storage(str(tmp_path / "late")), CommandGroup(0, 1, None), {})
    assert (tmp_path / "late" / "rank-00000.safetensors").read_bytes() == (
        tmp_path / "at once" / "rank-00000.safetensors"
    ).read_bytes()
    load(restored, tmp_path / "late")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(restored).items())


def test_a_checkpoint_in_an_object_store_is_committed_verified_and_restored(engines: list[FsdpEngine]) -> None:
    engine, restored = engines
    train_step(engine, make_rows(6), token_budget=64, seed=0)
    with s3_bucket() as url:
        checkpoints = RunCheckpoints(open_storage(f"{url}/run"), 1)
        for step in (1, 2):
            attempt = checkpoints.begin(step)
            files = engine.snapshot().write(attempt.storage.at("actor"), CommandGroup(0, 1, None), {})
            checkpoints.commit(attempt, [replace(file, name=f"actor/{file.name}") for file in files], {})
        assert checkpoints.steps() == [2]
        latest = checkpoints.latest()
        assert latest is not None
        storage, files = latest.share("actor")
        verify(storage, files, nothing)
        restored.load(storage, read_index(storage))
    first, second = (train_step(each, make_rows(6), token_budget=64, seed=3) for each in (engine, restored))
    assert first == second


def test_the_export_command_takes_a_step_or_the_newest_of_all_and_says_what_is_wrong(
    engines: list[FsdpEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, _ = engines
    checkpoints = RunCheckpoints(open_storage(str(tmp_path / "checkpoints")), 2)
    expected = {}
    for step in (1, 2):
        train_step(engine, make_rows(6), token_budget=64, seed=step)
        attempt = checkpoints.begin(step)
        files = engine.snapshot().write(attempt.storage.at("actor"), CommandGroup(0, 1, None), {})
        checkpoints.commit(attempt, [replace(file, name=f"actor/{file.name}") for file in files], {})
        expected[step] = weights_of(engine)
    for place, step in (("checkpoints", 2), ("checkpoints/step-00000001", 1)):
        out = tmp_path / f"model-{step}"
        assert main([str(tmp_path / place), str(out)]) == 0
        written = load_file(out / "model.safetensors")
        assert written.keys() == expected[step].keys()
        assert all(torch.equal(tensor, expected[step][name]) for name, tensor in written.items())
        assert f"actor of step {step}: " in capsys.readouterr().out
    assert main([str(tmp_path / "checkpoints"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    for words, code, message in [
        ([str(tmp_path / "checkpoints"), str(tmp_path / "half")], 2, "is not empty"),
        ([str(tmp_path / "nothing"), str(tmp_path / "new")], 1, "holds no committed checkpoint"),
        (
            [str(tmp_path / "checkpoints"), str(tmp_path / "new"), "--role", "critic"],
            1,
            "holds nothing of role 'critic'",
        ),
    ]:
        assert main(words) == code
        assert message in capsys.readouterr().err
    latest = checkpoints.read(2)
    latest.storage.write("actor/rank-00000.safetensors", functools.partial(_write, b"short"))
    assert main([str(tmp_path / "checkpoints"), str(tmp_path / "new")]) == 1
    assert "is not what was written" in capsys.readouterr().err


def test_a_parameter_of_which_a_part_is_missing_is_not_exported(engines: list[FsdpEngine], tmp_path: Path) -> None:
    engine, _ = engines
    storage = open_storage(str(tmp_path / "share"))
    files = engine.snapshot().write(storage, CommandGroup(0, 1, None), {})
    index = json.loads(storage.read("index.json"))
    name, shape = next(
        (name, shape) for name, shape in index["shapes"].items() if name.startswith("model/") and len(shape) == 2
    )
    index["shapes"][name] = [shape[0] + 1, shape[1]]
    data = json.dumps(index).encode()
    storage.write("index.json", functools.partial(_write, data))
    changed = StoredFile("index.json", len(data), hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointMismatchError, match="does not hold all of"):
        export(storage, [changed if file.name == changed.name else file for file in files], tmp_path / "model")


def test_a_checkpoint_is_restored_from_any_storage_and_one_of_another_configuration_is_refused(
    engines: list[FsdpEngine], tmp_path: Path
) -> None:
    engine, restored = engines
    train_step(engine, make_rows(6), token_budget=64, seed=0)
    memory = open_storage(f"memory://{tmp_path.name}/actor")
    files = engine.snapshot().write(memory, CommandGroup(0, 1, None), {"trainer.json": b"{}"})
    drawn = torch.rand(3)
    assert {file.name: file.num_bytes for file in files} == memory.files()
    assert {
        "rank-00000.safetensors",
        "trainer.json",
        "model/config.json",
        "model/tokenizer.json",
    } <= memory.files().keys()
    assert all(file.checksum == hashlib.sha256(memory.read(file.name)).hexdigest() for file in files)
    restored.load(memory, read_index(memory))
    assert torch.equal(torch.rand(3), drawn), "random state is part of it"
    first, second = (train_step(each, make_rows(6), token_budget=64, seed=3) for each in (engine, restored))
    assert first == second
    index = json.loads(memory.read("index.json"))
    changes: list[tuple[dict[str, object], str]] = [
        ({"notes": {"head": "value", "lora": None}}, "use the same configuration"),
        ({"format": 1}, "has checkpoint format 1"),
        ({"world_size": 0}, "does not hold all of"),
    ]
    for change, message in changes:
        memory.write("index.json", functools.partial(_write, json.dumps({**index, **change}).encode()))
        with pytest.raises(CheckpointMismatchError, match=message):
            restored.load(memory, read_index(memory))
    assert np.isfinite(first["loss"])
