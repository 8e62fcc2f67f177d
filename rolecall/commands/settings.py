"""`rolecall settings`: the keys of a configuration file, each with what it takes, its default and its meaning, as the
classes in rolecall/settings/ say them.
"""

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TextIO, get_args

from pydantic import BaseModel

from rolecall.errors import ConfigError
from rolecall.settings import RewardModelSettings, RunSettings, SftSettings
from rolecall.terminal import did_you_mean

FILES: Mapping[str, type[BaseModel]] = {"run": RunSettings, "sft": SftSettings, "reward-model": RewardModelSettings}
"""Kinds of configuration files."""
NAME = "NAME"
"""Part of a key's path that whoever writes the file chooses."""
WIDEST = 120


@dataclass(frozen=True)
class Key:
    """A key of a file, or a section of keys."""

    path: str
    takes: str
    """Kind of value; empty for a section."""
    default: str | None
    """Value in the absence of the key, as YAML has it; None where there is none."""
    meaning: str
    of: tuple[str, ...] = ()
    """Kinds of its section that have it; empty where the section is of one kind."""


def settings(file: str, key: str | None, out: TextIO) -> int:
    """Writes the sections of a kind of file, or what `key` names: a path with all below it, or any part of paths.
    Returns the exit code. ConfigError where nothing is called so.
    """
    keys = list(keys_of(FILES[file]))
    if key is None:
        found = [each for each in keys if "." not in each.path.removesuffix(f".{NAME}")]
    else:
        found = [each for each in keys if each.path == key or each.path.startswith((f"{key}.", f"{key}[]"))]
        found = found or [each for each in keys if key in _parts(each)]
    if not found:
        known = {part for each in keys for part in (each.path, *_parts(each))}
        raise ConfigError(f"a file of {file} has no key {key!r}{did_you_mean(str(key), known)}")
    width = min(shutil.get_terminal_size().columns, WIDEST)
    for each in found:
        default = "" if each.default is None else f" = {each.default}"
        takes = f": {each.takes}" if each.takes else ""
        of = f"  (of {' | '.join(each.of)})" if each.of else ""
        out.write(f"{each.path}{takes}{default}{of}\n")
        meaning = " ".join(each.meaning.split())
        out.write(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    ") + "\n")
    if key is None:
        out.write("\nrolecall settings SECTION shows the keys of one, and rolecall settings KEY one key.\n")
    return 0


def _parts(key: Key) -> list[str]:
    return key.path.replace("[]", "").split(".")


def keys_of(section: type[BaseModel], path: str = "") -> Iterator[Key]:
    """Yields the keys of a section, each section in it before its own."""
    schema = section.model_json_schema()
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        inner = f"{path}.{name}" if path else name
        shown = schema["properties"][name]
        default = _yaml(shown["default"]) if "default" in shown else None
        sections = list(_sections_in(field.annotation))
        if not sections:
            yield Key(inner, _takes(shown), default, meanings[name])
            continue
        if "additionalProperties" in shown:
            inner += f".{NAME}"
        elif shown.get("type") == "array":
            inner += "[]"
        is_left_out = not shown.get("default")  # else its keys say what they are
        yield Key(inner, "", default if is_left_out else None, meanings.get(name) or inspect.getdoc(sections[0]) or "")
        yield from _keys_in(sections, inner, shown.get("additionalProperties", shown).get("discriminator"))


def _keys_in(sections: list[type[BaseModel]], path: str, discriminator: Mapping[str, Any] | None) -> Iterator[Key]:
    """The keys of a section that may be of several kinds, which the one that the schema's `discriminator` names tells
    apart: first that, then the others, of which those that several kinds have alike are one.
    """
    if discriminator is None:
        for section in sections:
            yield from keys_of(section, path)
        return
    told = f"{path}.{discriminator['propertyName']}"
    kinds: dict[Key, list[str]] = {}
    of_kinds: dict[str, str] = {}
    for section in sections:
        keys = {key.path: key for key in keys_of(section, path)}
        key = keys.pop(told)
        of_kinds[key.takes] = key.meaning
        for other in keys.values():
            kinds.setdefault(other, []).append(key.takes)
    yield Key(told, " | ".join(of_kinds), None, next(iter(of_kinds.values())))
    for key, having in kinds.items():
        yield replace(key, of=() if len(having) == len(of_kinds) else tuple(having))


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


@cache
def _meanings(section: type[BaseModel]) -> Mapping[str, str]:
    """The texts under the fields of a class and of its bases, by field."""
    meanings: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                meanings[field.target.id] = str(ast.literal_eval(text.value))
    return meanings


def _takes(shown: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in shown:
        return " | ".join(_takes(each) for each in shown["anyOf"])
    if "enum" in shown or "const" in shown:
        return " | ".join(str(each) for each in shown.get("enum", [shown.get("const")]))
    if shown.get("type") == "array":
        return f"list of {_takes(shown['items'])}" if "items" in shown else "list"
    if shown.get("type") == "object":
        inner = shown.get("additionalProperties")
        return f"map of {_takes(inner)}" if isinstance(inner, dict) else "map"
    bounds = " and ".join(f"{sign} {shown[name]:g}" for name, sign in _BOUNDS.items() if name in shown)
    return f"{shown.get('format', shown.get('type', 'anything'))} {bounds}".strip()


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _yaml(default: Any) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)
