"""What a killed rollout's vLLM leaves is removed by the next process of its name, and nothing of others."""

import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.vllm import leftovers
from services.rollout.vllm.leftovers import Leftovers


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files in which sockets have room, as pytest's may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def shared(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of that of shared memory, beside the temporary files."""
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", base / "shm")
    (base / "shm").mkdir()
    return base / "shm"


def taken(shared: Path, name: str) -> tuple[str, int]:
    (shared / name).write_bytes(b"queue")
    return name, (shared / name).stat().st_ino


def test_the_next_process_of_a_name_removes_what_a_killed_one_left(shared: Path, base: Path) -> None:
    killed, other = Leftovers(base / "run", "rollout-0"), Leftovers(base / "run", "rollout-1")
    for place in (killed, other):
        place.begin()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place.folder / "socket"))
    gone = taken(shared, "psm_gone")
    killed.note([taken(shared, "psm_ours"), gone, ("psm_reused", taken(shared, "psm_reused")[1] + 1)])
    other.note([taken(shared, "psm_other")])
    (shared / "psm_gone").unlink()
    again = Leftovers(base / "run", "rollout-0")
    again.begin()
    assert list(again.folder.iterdir()) == []
    assert sorted(path.name for path in shared.iterdir()) == ["psm_other", "psm_reused"]
    assert (other.folder / "socket").exists()
    for place in (again, other, other):
        place.remove()
    assert [path.name for path in base.iterdir()] == ["shm"]
    assert [path.name for path in shared.iterdir()] == ["psm_reused"], "another took that name since"


def test_an_old_process_leaves_the_folder_of_the_one_that_took_its_name(shared: Path, base: Path) -> None:
    old, new = Leftovers(base / "run", "rollout-0"), Leftovers(base / "run", "rollout-0")
    old.begin()
    new.begin()
    new.note([taken(shared, "psm_new")])
    old.remove()
    assert new.folder.is_dir()
    assert (shared / "psm_new").exists()
    new.remove()
    assert not new.folder.exists()
    assert not (shared / "psm_new").exists()


def test_a_list_that_was_cut_keeps_nobody_from_starting(shared: Path, base: Path) -> None:
    place = Leftovers(base / "run", "rollout-0")
    place.begin()
    (place.folder / "shared_memory.json").write_text('[["psm_')
    place.begin()
    assert list(base.glob("vllm-*")) == [place.folder]
    assert list(place.folder.iterdir()) == []


def test_sockets_have_room_where_temporary_files_lie_deep(
    shared: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = base / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    place = Leftovers(base / "run", "rollout-0")
    place.begin()
    assert place.folder.parent == Path("/tmp")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place.folder / str(uuid.uuid4())))
    place.remove()
    assert not place.folder.exists()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", tempfile.mkdtemp(dir="/tmp"))
    place = Leftovers(base / "run", "rollout-0")
    place.begin()
    assert str(place.folder.parent) == os.environ["VLLM_RPC_BASE_PATH"]
    place.remove()
    Path(os.environ["VLLM_RPC_BASE_PATH"]).rmdir()


def test_a_link_under_the_name_stays(shared: Path, base: Path) -> None:
    place = Leftovers(base / "run", "rollout-0")
    place.begin()
    link, theirs = place.folder.with_name(place.folder.name[:-8] + "somebody"), base / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    link.symlink_to(theirs)
    place.begin()
    assert link.is_symlink()
    assert (theirs / "file").exists()
