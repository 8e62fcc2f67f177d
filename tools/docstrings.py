"""Prints which docstrings do not stand alone in a hover, and the share of those that do.

    python tools/docstrings.py [--floor PERCENT] [PATH ...]     # default: the product, rolecall and services

A reader meets a docstring by itself, under a cursor or in `help()`. So its first sentence is a noun phrase that says
what the thing is ("A queue of ...", "The bytes ..."), or it begins with a verb ("Returns ..."). This checker knows no
grammar: it finds the openings, lengths and words that have shown that a docstring leans on the line above it. What it
passes can still be poor.

    opening     the first word continues another sentence (Of, And, That, By, Its, ...); or it asks (What, Who, Where,
                ...), except at an attribute, whose name is beside it, and "How many" and its like at a function
    scope       the docstring of a class or a module has at most four words: it names a scope and not the thing
    length      the first sentence has more than 25 words
    word        a private word of this project stands in it
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("rolecall", "services")
MAX_WORDS = 25
MIN_SCOPE_WORDS = 5

CONTINUES = re.compile(
    "of|and|that|by|in|theirs|whose|which|with|without|for|to|as|from|at|on|but|or|nor|before|after|while|around"
    "|between|until|if|unless|because|it|its|they|their|them|those|these|hers|his|ours|so|also|then|else|same|again"
    "|not|into|over|under|upon|beside|besides|within",
    re.IGNORECASE,
)
"""First words that need the sentence before them."""
ASKS = re.compile("what|who|whom|where|why|when|how", re.IGNORECASE)
"""First words of a clause that stands for a noun; fine beside an attribute's name, vague elsewhere."""
PRIVATE = re.compile(r"\b(affairs?|bench|workplace|vitals|lanes?|nursery)\b", re.IGNORECASE)
"""Words that only this project uses, or once used, in their sense."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_sentence(docstring: str) -> str:
    """The text up to the first full stop, colon, semicolon or empty line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.:;!?])\s", paragraph, maxsplit=1)[0]


def problem(kind: str, docstring: str) -> str | None:
    """The reason why a docstring does not stand alone, or None."""
    sentence = first_sentence(docstring)
    words = sentence.split()
    opening = [word.strip(".,:;") for word in words[:2]]
    counts = opening[1:] in (["many"], ["much"], ["long"], ["often"], ["far"])
    if CONTINUES.fullmatch(opening[0]):
        return f"opening: begins with {opening[0]}"
    if ASKS.fullmatch(opening[0]) and kind != "attribute" and not (counts and kind == "function"):
        return f"opening: begins with {opening[0]}"
    if kind in ("class", "module") and len(docstring.split()) < MIN_SCOPE_WORDS:
        return f"scope: {len(docstring.split())} words do not say what it is"
    if len(words) > MAX_WORDS:
        return f"length: the first sentence has {len(words)} words"
    if private := PRIVATE.search(docstring):
        return f"word: {private[0]}"
    return None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """Yields line, kind, name and text of every docstring: of modules, classes, functions, and below attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, Documented):
            continue
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        if (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, kind, getattr(node, "name", ""), text
        for above, below in zip(node.body, node.body[1:], strict=False):
            match above, below:
                case ((ast.Assign() | ast.AnnAssign()), ast.Expr(value=ast.Constant(value=str(text)))):
                    target = above.target if isinstance(above, ast.AnnAssign) else above.targets[0]
                    yield below.lineno, "attribute", ast.unparse(target), text


def product_files(paths: list[str]) -> list[Path]:
    """The Python files below the paths, without the generated stubs."""
    found = [file for path in paths for file in ([Path(path)] if path.endswith(".py") else Path(path).rglob("*.py"))]
    return sorted(file for file in found if "v1" not in file.parts)


def main() -> int:
    """Runs the command; exit code 1 says that the share is below the floor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--floor", type=float, default=0.0, help="percent that must stand alone")
    parser.add_argument("paths", nargs="*", default=list(PRODUCT))
    args = parser.parse_args()
    total = poor = 0
    for file in product_files(args.paths):
        for line, kind, name, text in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
            total += 1
            if reason := problem(kind, text):
                poor += 1
                print(f"{file}:{line}: {kind} {name}: {reason}: {first_sentence(text)[:80]}")
    share = 100.0 * (total - poor) / total if total else 100.0
    print(f"{total - poor} of {total} docstrings stand alone: {share:.1f}%")
    return 0 if share >= args.floor else 1


if __name__ == "__main__":
    sys.exit(main())
