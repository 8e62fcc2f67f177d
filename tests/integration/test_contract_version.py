"""Stubs of another version: of RoleCall, told apart by release and content, and of protobuf, which says what to
install.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import google.protobuf
import pytest

import rolecall.v1
from rolecall import __version__
from rolecall.contract import contract_version

ROOT = Path(__file__).parents[2]


def run_python(code: str, *path: Path) -> "subprocess.CompletedProcess[str]":
    """Runs `code` with the folders of `path` before ours."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(folder) for folder in (*path, ROOT)]}; {code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_version_is_the_release_and_a_digest_and_is_the_same_in_every_process() -> None:
    assert re.fullmatch(re.escape(__version__) + r"\+[0-9a-f]{12}", contract_version())
    answer = run_python("from rolecall.contract import contract_version; print(contract_version())")
    assert answer.stdout.strip() == contract_version()


def test_one_field_more_is_another_version(tmp_path: Path) -> None:
    """A real build of contracts that differ in one field, with the library around them as it is."""
    shutil.copytree(ROOT / "rolecall", tmp_path / "other" / "rolecall", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    changed = tmp_path / "proto" / "rolecall" / "v1" / "tensor.proto"
    text = changed.read_text()
    changed.write_text(text.rstrip().removesuffix("}") + "  // Of another build.\n  bytes another = 99;\n}\n")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{tmp_path / 'proto'}",
        f"--python_out={tmp_path / 'other'}",
        str(changed),
    ]
    subprocess.run(command, check=True, timeout=60)
    answer = run_python("from rolecall.contract import contract_version; print(contract_version())", tmp_path / "other")
    assert answer.stdout.startswith(f"{__version__}+"), answer.stderr
    assert answer.stdout.strip() != contract_version()


def older_protobuf(folder: Path) -> Path:
    """The installed protobuf under another version number."""
    package = folder / "google" / "protobuf"
    shutil.copytree(Path(google.protobuf.__path__[0]), package, ignore=shutil.ignore_patterns("__pycache__"))
    version = package / "runtime_version.py"
    version.write_text(version.read_text().replace("OSS_MAJOR = 6", "OSS_MAJOR = 5"))
    return folder


@pytest.mark.parametrize("what", ["an older one", "one from before versions were compared"])
def test_a_protobuf_that_does_not_fit_the_stubs_is_named_with_what_to_install(tmp_path: Path, what: str) -> None:
    folder = older_protobuf(tmp_path)
    if what != "an older one":
        (folder / "google" / "protobuf" / "runtime_version.py").unlink()
    answer = run_python("from rolecall.commands.cli import main; sys.exit(main(['status', '127.0.0.1:9']))", folder)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("rolecall: the installed protobuf ")
    assert f"pip install '{rolecall.v1.PROTOBUF}'" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_what_it_says_to_install_is_what_the_distribution_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert rolecall.v1.PROTOBUF in project["dependencies"]
