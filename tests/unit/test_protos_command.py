"""`rolecall protos`: who writes a service in another language makes stubs from its files, and needs nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.commands.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_are_the_contracts_and_all_that_stubs_of_them_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "proto"
    for _ in range(2):  # a newer release's go over an older one's
        assert main(["protos", str(folder)]) == 0
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written] * 2
    names = [str(path.relative_to(folder)) for path in written]
    assert names == [f"rolecall/v1/{name}.proto" for name in ("environment", "reward", "tensor", "trajectory")]
    for name, path in zip(names, written, strict=True):
        assert path.read_text() == (ROOT / "proto" / name).read_text()
        assert not path.is_symlink()
    stubs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", *stubs, *names]
    subprocess.run(protoc, check=True, timeout=60)  # bounded: by the timeout
    assert (tmp_path / "rolecall" / "v1" / "environment_pb2_grpc.py").is_file()


def test_a_place_that_is_no_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "proto").write_text("")
    assert main(["protos", str(tmp_path / "proto")]) == 1
    assert "cannot write" in capsys.readouterr().err
