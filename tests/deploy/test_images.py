"""What goes into the images: every package that a role needs, nobody's tools, no model, and no secret. No engine."""

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEBIAN_12 = {"python_version": "3.11", "python_full_version": "3.11.2"}
"""The Python of the images."""
UNUSED = {
    "hf-xet",
    "pillow",
    "setuptools",
    "click",
    "shellingham",
    "typer",
    "markdown",
    "tensorboard-data-server",
    "werkzeug",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "pycparser",
    "valkey",
}
"""What light packages name and light roles never load: downloads of models, images; the command of Hugging Face; the
page of TensorBoard; Markdown and colours of code in a terminal; what compiles for cffi; a second client of the store.
"""


def split_lock() -> ModuleType:
    """The script of the build, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("split_lock", DOCKER / "split_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(lines: list[str]) -> set[str]:
    return {str(canonicalize_name(Requirement(line).name)) for line in lines}


def needs(requirements: list[str]) -> set[str]:
    """Everything that installed packages say they need, from these requirements on."""
    todo = [(Requirement(line), "") for line in requirements]
    found: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra, **DEBIAN_12}):
            continue
        name = str(canonicalize_name(requirement.name))
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                todo += [(Requirement(line), wanted) for line in metadata.requires(name) or []]
    return {name for name, _ in found}


@pytest.mark.parametrize(
    ("group", "extras"),
    [("light", ["controller", "reward", "s3"]), ("trainer", ["controller", "reward", "trainer", "megatron", "s3"])],
)
def test_an_image_has_all_that_its_roles_need(group: str, extras: list[str]) -> None:
    parts = split_lock().split((ROOT / "requirements" / "cpu.txt").read_text())
    there = names(parts["light"]) | (names(parts["torch"] + parts["trainer"]) if group == "trainer" else set())
    wanted = needs(
        [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    )
    assert wanted - UNUSED <= there


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_a_lock_is_split_without_loss_and_every_list_matches_something(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    parts = split_lock().split(text)
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line for lines in parts.values() for line in lines} == set(pins)
    assert set(parts["light"]) & set(parts["torch"]) == {line for line in pins if line.startswith("transformers==")}
    assert all(parts.values())
    assert "torch" in names(parts["torch"])
    assert any(name.startswith("vllm") for name in names(parts["rollout"]))
    assert names(parts["none"]) >= {"pytest", "mypy", "ruff", "hatchling"}


def test_the_images_are_run_by_nobody_in_particular_and_end_at_a_signal() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    finals = [
        part for part in re.split(r"^FROM ", text, flags=re.M) if re.match(r"\S+ AS (light|trainer|rollout)\n", part)
    ]
    assert len(finals) == 3
    for part in finals:
        assert "USER 65532:65532" in part
        assert 'ENTRYPOINT ["tini", "--", "rolecall"]' in part
        assert "org.opencontainers.image.revision" in part
        assert "COPY" not in part or "--from=" in part
    assert "# syntax" not in text
    assert not re.search(r"^(ARG|ENV) .*(TOKEN|SECRET|PASSWORD|PIP_INDEX_URL)", text, re.M)


def test_nothing_but_the_code_and_the_locks_reaches_a_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == allowed
