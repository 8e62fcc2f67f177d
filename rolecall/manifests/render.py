"""Templates of YAML: `@{name}` in a line stands for a text, and alone in a line for lines of that indentation, or for
nothing.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rolecall.errors import ConfigError

_FOLDER = Path(__file__).parent / "templates"
_ALONE = re.compile(r"^( *)@\{(\w+)\}\n", re.MULTILINE)
_WITHIN = re.compile(r"@\{(\w+)\}")


def render(template: str, values: Mapping[str, object]) -> str:
    """The template's file with `values`. KeyError for a name that has none."""

    def lines(match: re.Match[str]) -> str:
        return "".join(f"{match[1]}{line}\n" for line in str(values[match[2]]).rstrip("\n").splitlines())

    text = _ALONE.sub(lines, (_FOLDER / template).read_text(encoding="utf-8"))
    return _WITHIN.sub(lambda match: str(values[match[1]]), text)


def comment(text: str) -> str:
    """`text` as lines of a comment."""
    return "".join(f"{line}\n" for line in textwrap.wrap(text, 112, initial_indent="# ", subsequent_indent="# "))


class _Dumper(yaml.SafeDumper):
    """Writes out what stands in several places, instead of pointing there."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_all(objects: Iterable[Mapping[str, Any]]) -> str:
    """The objects as documents of one file, their smallest parts on a line each."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None)


def flow(value: Any) -> str:
    """`value` on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, default_flow_style=True).strip()


def require_alone(files: Mapping[str, str], folder: Path) -> None:
    """ConfigError when something else than `files` lies in `folder`."""
    known = {folder / name for name in files}
    others = [path for path in folder.rglob("*") if path.is_file() and path not in known] if folder.exists() else []
    if others:
        raise ConfigError(f"{folder} holds files that are not of this run, {others[0]} one of them; name another --out")


def write_all(files: Mapping[str, str], folder: Path) -> None:
    """Writes `files` under `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
