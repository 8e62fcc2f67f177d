"""Counts the keys of a run's file: every leaf under every section, each member of a union counted as a section of its
own, and a section that stands in several places counted in each.

    python -m tools.settings_keys            # by section, the total, and the keys without a docstring
"""

import argparse
import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel

from rolecall.settings import RunSettings


def leaves(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, str | None]]:
    """Yields the path of every leaf under `section`, with its docstring."""
    for name, field in section.model_fields.items():
        members = sections_in(field.annotation)
        if not members:
            yield ".".join((*above, name)), docstrings(section).get(name)
        for member in members:
            kind = member.model_fields.get("kind")
            chosen = (f"<{member.__name__}>",) if kind is not None and len(members) > 1 else ()
            yield from leaves(member, (*above, name, *chosen))


@cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a section's fields, those that it inherits included."""
    found: dict[str, str] = {}
    for kind in section.__mro__[-3::-1]:  # without object and pydantic's own
        (source,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(source, ast.ClassDef)
        for field, after in pairwise(source.body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def main() -> None:
    """Prints the counts."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    keys = list(leaves(RunSettings))
    for top, count in Counter(path.partition(".")[0] for path, _ in keys).most_common():
        print(f"{count:5}  {top}")
    print(f"{len(keys):5}  keys, each member of a union counted")
    undocumented = [path for path, docstring in keys if not docstring]
    print(f"{len(undocumented):5}  without a docstring")
    for path in undocumented:
        print(f"       {path}")


if __name__ == "__main__":
    main()
