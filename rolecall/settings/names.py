"""Names of settings, for whoever wrote one that does not exist."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from rolecall.nearest import did_you_mean


def suggestion(kind: type[BaseModel], location: Sequence[int | str]) -> str:
    """Suggests what may be meant by the unknown setting at `location` of a file of `kind`: a sibling of a similar name,
    or a setting of the same name elsewhere.
    """
    *parents, name = map(str, location)
    near = did_you_mean(name, {field for section in _at(kind, parents) for field in section.model_fields})
    if near:
        return near
    alike = sorted(
        (path for path in set(_paths(kind, ())) if path[-1] == name), key=lambda path: (-_shared(path, parents), path)
    )
    return f" (did you mean {'.'.join(alike[0])!r}?)" if alike else ""


def _at(kind: type[BaseModel], parents: Sequence[str]) -> list[type[BaseModel]]:
    """The sections that may stand there. A name that is no field is a key of a mapping, or the `kind` by which one of
    several sections is chosen.
    """
    sections = [kind]
    for name in parents:
        below = [
            found
            for section in sections
            if name in section.model_fields
            for found in _sections(section.model_fields[name].annotation)
        ]
        chosen = [
            section
            for section in sections
            if "kind" in section.model_fields and name in get_args(section.model_fields["kind"].annotation)
        ]
        sections = below or chosen or sections
    return sections


def _paths(kind: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        yield (*above, name)
        between = ("*",) if "dict" in str(field.annotation) else ()
        for section in _sections(field.annotation):
            yield from _paths(section, (*above, name, *between))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _shared(path: Sequence[str], parents: Sequence[str]) -> int:
    """How many names from the top they share."""
    return next(
        (count for count, (one, other) in enumerate(zip(path, parents, strict=False)) if one != other),
        min(len(path), len(parents)),
    )
