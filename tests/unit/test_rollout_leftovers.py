"""What a killed rollout's vLLM leaves is removed by the next process of its name, and nothing of others."""

import socket
import tempfile
from pathlib import Path

import pytest

from services.rollout.vllm import leftovers
from services.rollout.vllm.leftovers import Leftovers


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of that of shared memory, beside the one of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def taken(shared: Path, name: str) -> tuple[str, int]:
    (shared / name).write_bytes(b"queue")
    return name, (shared / name).stat().st_ino


def test_the_next_process_of_a_name_removes_what_a_killed_one_left(shared: Path, tmp_path: Path) -> None:
    killed, other = Leftovers(tmp_path / "run", "rollout-0"), Leftovers(tmp_path / "run", "rollout-1")
    for place in (killed, other):
        place.begin()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place.folder / "socket"))
    gone = taken(shared, "psm_gone")
    killed.note([taken(shared, "psm_ours"), gone, ("psm_reused", taken(shared, "psm_reused")[1] + 1)])
    other.note([taken(shared, "psm_other")])
    (shared / "psm_gone").unlink()
    again = Leftovers(tmp_path / "run", "rollout-0")
    again.begin()
    assert list(again.folder.iterdir()) == []
    assert sorted(path.name for path in shared.iterdir()) == ["psm_other", "psm_reused"]
    assert (other.folder / "socket").exists()
    for place in (again, other, other):
        place.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["shm"]
    assert [path.name for path in shared.iterdir()] == ["psm_reused"], "another took that name since"
