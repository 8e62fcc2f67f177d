"""What is drawn and listed about the code is what the code is: the tree of errors, the files of a service, the links
between pages.
"""

import ast
import re
from collections.abc import Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from pydantic import BaseModel

from rolecall import errors
from rolecall.settings import RewardModelSettings, RunSettings, SftSettings
from tools.docstrings import docstrings
from tools.house import MAX_FILES, PRODUCT, files_per_folder, python_files

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "services", ROOT / "examples", ROOT / "benchmarks")
    for path in folder.glob("*.md" if folder == ROOT else "**/*.md")
    if "node_modules" not in path.parts  # other people's, where an example was built
)
GLOSSARY = ROOT / "docs" / "glossary.md"
LOG = ROOT / "docs" / "log.md"
"""The log is history: its files are called as they were when it was written, and nobody wraps it again."""
SERVICES = sorted(path for path in (ROOT / "services").iterdir() if (path / "__main__.py").exists())


def drawn() -> dict[str, tuple[str, list[str]]]:
    """Class name -> its base and the words right of it, as `errors.py` draws them."""
    found, above = {}, ["RoleCallError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+Error)(.*)", line)
        if match and match[1]:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            found[match[2]] = (above[depth - 1], match[3].split())
    return found


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name: base for name, (base, _) in drawn().items()} == {
        name: kind.__bases__[0].__name__
        for name, kind in classes.items()
        if kind is not errors.RoleCallError and issubclass(kind, Exception)
    }


def test_the_drawing_gives_the_status_and_whether_asking_again_can_help() -> None:
    for name, (base, words) in drawn().items():
        kind, parent = vars(errors)[name], vars(errors)[base]
        status = [word for word in words if word in grpc.StatusCode.__members__]
        assert [kind.status] == status or (not status and kind.status == parent.status), name
        retryable = (words[-2:] != ["never", "retry"]) if status else parent.retryable or "(retry)" in words
        assert kind.retryable == retryable, name


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_a_service_s_readme_lists_its_files(service: Path) -> None:
    lines = (service / "README.md").read_text().splitlines()
    listed = [name for line in lines if line.startswith("| `") for name in re.findall(r"`([\w/]+\.py)`", line)]
    files = {str(path.relative_to(service)) for path in service.rglob("*.py")} - {"__init__.py"}
    assert sorted(listed) == sorted(name for name in files if not name.endswith("/__init__.py"))


FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("rolecall", "services", "proto", "tests", "tools", "examples", "benchmarks", "deploy")
    for path in (ROOT / folder).rglob("*.*")
]
SOURCES = python_files(ROOT, *PRODUCT, "tools", "benchmarks")
SETTINGS: list[type[BaseModel]] = [RunSettings, SftSettings, RewardModelSettings]
NO_SETTINGS = {"run.id", "run.configuration", "model.to", "run.yaml"}
"""Attributes and a file that look like settings."""
OF_USERS = {"my_rewards.py", "runs/my-run/config.yaml"}


def missing_files(text: str) -> list[str]:
    """The source files that a text names, with or without their folders, and that are nowhere."""
    named = re.findall(r"(?<![\w./<>{}:$-])([\w*][\w/*.-]*\.(?:py|lua|proto)|[\w*]+/[\w/*.-]*\.yaml)\b", text)
    return [name for name in named if name not in OF_USERS and not matching(FILES, f"*/{name}")]


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_functions_that_exist(page: Path) -> None:
    for file, name in re.findall(r"`([\w/]+\.py)`,?\s+`(\w+)`", page.read_text()):
        there = [
            path for path in matching(FILES, f"*/{file}") if re.search(rf"\b{name}\b", (ROOT / path[1:]).read_text())
        ]
        assert there, f"`{name}` is nowhere in {file}"


def test_a_docstring_names_files_that_exist() -> None:
    missing = {
        (str(file), line, name)
        for file in SOURCES
        for line, _, _, text in docstrings(ast.parse((ROOT / file).read_text()))
        for name in missing_files(text)
    }
    assert missing == set()


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation names, in unions and containers, too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections(argument)]


def is_setting(models: Sequence[type[BaseModel]], path: list[str]) -> bool:
    """Whether some model has the setting; where sections are kept by name, the name is passed over."""
    fields = [model.model_fields[path[0]] for model in models if path[0] in model.model_fields]
    if len(path) == 1:
        return bool(fields)
    below = [section for field in fields for section in sections(field.annotation)]
    return bool(below) and (is_setting(below, path[1:]) or (len(path) > 2 and is_setting(below, path[2:])))


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_settings_that_exist(page: Path) -> None:
    named = [path.split(".") for path in re.findall(r"`-{0,2}([a-z]+(?:\.(?!proto)[a-z_<>]{3,})+)`", page.read_text())]
    settings = [path for path in named if is_setting(SETTINGS, path[:1]) and ".".join(path) not in NO_SETTINGS]
    assert [".".join(path) for path in settings if not is_setting(SETTINGS, path)] == []


def test_the_readme_draws_the_tree_as_it_is() -> None:
    drawing = (ROOT / "README.md").read_text().split("## The tree\n\n```\n")[1].split("```")[0]
    above: list[Path] = [ROOT]
    drawn_folders = set()
    for line in drawing.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.findall(r"(?:^ *|(?<=\S  ))([\w/]+/)(?= |$)", line):
            above[depth + 1 :] = [above[depth] / name]
            assert above[depth + 1].is_dir(), name
            drawn_folders.add(above[depth + 1])
    inner = {ROOT / "rolecall", ROOT / "rolecall" / "training", ROOT / "services", ROOT / "services" / "controller"}
    there = {path for folder in inner for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert there <= drawn_folders


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{target}: there is no such file"
        assert not anchor or there.suffix != ".md" or anchor in headings(there), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", sorted((ROOT / "examples").glob("*/README.md")), ids=lambda path: path.parent.name)
def test_each_training_of_an_example_has_a_folder_of_its_own(page: Path) -> None:
    """A second one in a run's folder is refused. Where another environment is set before the command, it is the same
    training on another machine.
    """
    commands = re.findall(r"^    rolecall train (\S+)(.*)$", page.read_text().replace("\\\n", ""), re.MULTILINE)
    folders = [(file, *re.findall(r"--run\.dir=(\S+)", words)) for file, words in commands]
    assert len(set(folders)) == len(folders)


def test_no_folder_of_the_product_holds_more_files_than_a_reader_takes_in() -> None:
    assert {
        folder: number
        for folder, number in files_per_folder(python_files(ROOT, *PRODUCT)).items()
        if number > MAX_FILES
    } == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda path: path.stem[:4])
def test_a_decision_has_a_number_a_status_with_a_date_and_three_parts(page: Path) -> None:
    title, _, status, *parts = page.read_text().splitlines()
    assert title.startswith(f"# {int(page.stem[:4])}. ")
    assert re.match(
        r"\*\*Status\.\*\* (Accepted|Superseded by \[ADR \d+\]\(\d{4}-[\w-]+\.md\)), 20\d\d-\d\d-\d\d\.", status
    )
    assert re.findall(r"^\*\*(\w+)\.\*\*", "\n".join(parts), re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_decisions_have_numbers_of_their_own() -> None:
    numbers = [page.stem[:4] for page in (ROOT / "docs" / "adr").glob("*.md")]
    assert all(number.isdigit() for number in numbers)
    assert len(set(numbers)) == len(numbers)  # not in a row: some are given before they are written


@pytest.mark.parametrize("page", sorted(set(PAGES) - {LOG}), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped_at_120_columns(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith(("|", "    "))] == []


def test_the_glossary_explains_each_word_once_in_order() -> None:
    words = [word.lower().replace("_", " ") for word in re.findall(r"^\*\*(.+?)\*\* — ", GLOSSARY.read_text(), re.M)]
    assert words == sorted(set(words))
