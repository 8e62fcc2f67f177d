"""Prints the measures of the tree: rooms, arrows, floors, circles, files per folder, lines.

    python tools/house.py [ROOT]        # default: this repository

The product is `rolecall` and `services`, without the generated stubs. The *rooms* of a folder are the folders of Python
in it, each with all that lies below, and its own files. An *arrow* leads from a room to another that it imports. The
*floors* are the rooms of the longest chain of arrows; a *circle* is a set of rooms that reach each other. Imports for
types count.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("rolecall", "services")
MAX_COLUMNS = 120
MAX_FILES = 18
"""Python files of a folder that a reader still takes in at a look."""
NO_RIG = ("test_", "conftest")
"""Beginnings of the names of files in tests that are no rigs: what pytest collects, and its configuration."""

Arrows = dict[str, set[str]]
"""Room -> the rooms that it imports."""


def python_files(root: Path, *folders: str) -> list[Path]:
    """Every Python file of the folders, relative to the root, without the generated stubs."""
    found = [file.relative_to(root) for folder in folders for file in (root / folder).rglob("*.py")]
    return sorted(file for file in found if "v1" not in file.parts and not any(part[0] == "." for part in file.parts))


def files_per_folder(files: list[Path]) -> Counter[str]:
    """Folder -> its Python files, those that only open a package (`__init__.py`) included."""
    return Counter(str(file.parent) for file in files)


def rooms(files: list[Path], folders: tuple[str, ...]) -> dict[str, str]:
    """Module -> its room, of the modules in the folders; `__init__.py` that only opens one of the folders is none."""
    found = {}
    for file in files:
        for folder in map(Path, folders):
            if file.is_relative_to(folder) and file != folder / "__init__.py":
                module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
                found[module] = str(folder / file.relative_to(folder).parts[0])
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Yields what a module imports, as the longest dotted name that may be a module of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(root: Path, files: list[Path], *folders: str) -> Arrows:
    """The imports between the rooms of the folders."""
    room_of = rooms(files, folders)
    found: Arrows = {room: set() for room in room_of.values()}
    for file in files:
        room = room_of.get(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
        if room is not None:
            for name in imported(ast.parse((root / file).read_text(encoding="utf-8"))):
                target = room_of.get(name) or room_of.get(name.rpartition(".")[0])
                if target is not None and target != room:
                    found[room].add(target)
    return found


def reached(found: Arrows) -> Arrows:
    """Room -> every room at the end of a chain that begins with it."""
    ends: Arrows = {}
    for room in found:
        ends[room], waiting = set(), list(found[room])
        while waiting:
            if (following := waiting.pop()) not in ends[room]:
                ends[room].add(following)
                waiting += found[following]
    return ends


def circles(found: Arrows) -> list[list[str]]:
    """Sets of rooms that reach each other."""
    ends = reached(found)
    sets = {frozenset(other for other in ends if other in ends[room] and room in ends[other]) for room in ends}
    return sorted(sorted(each) for each in sets if each)


def num_floors(found: Arrows) -> int:
    """The rooms of the longest chain; a circle counts as one."""
    ends = reached(found)
    floors: dict[str, int] = {}
    for room in sorted(found, key=lambda room: (len(ends[room]), room not in ends[room])):
        below = [floors[other] for other in found[room] if room not in ends[other]]
        floors[room] = 1 + max(below, default=0)
    return max(floors.values(), default=0)


def of_the_graph(root: Path, product: list[Path]) -> Iterator[tuple[str, str]]:
    """Yields the words on the whole house and on every folder that holds folders or is crowded."""
    crowded = {folder for folder, number in files_per_folder(product).items() if number > MAX_FILES}
    inner = sorted({str(file.parents[1]) for file in product} - {".", *PRODUCT} | crowded - {*PRODUCT})
    for folders in [PRODUCT, *((folder,) for folder in inner)]:
        found = arrows(root, product, *folders)
        if len(found) < 2:
            continue
        number = sum(map(len, found.values()))
        names = "; ".join(", ".join(Path(room).name for room in circle) for circle in circles(found)) or "none"
        words = f"{len(found)} rooms, {number} arrows, {num_floors(found)} floors, circles: {names}"
        yield "the whole house" if folders == PRODUCT else folders[0], words


def of_the_files(root: Path, product: list[Path]) -> Iterator[tuple[str, str]]:
    """Yields the words on files and lines."""
    tests = python_files(root, "tests")
    text = {file: (root / file).read_text(encoding="utf-8").splitlines() for file in product + tests}
    folders = files_per_folder(product)
    long = sum(len(line) > MAX_COLUMNS for file in product for line in text[file])
    rigs = [file for file in tests if not file.name.startswith(NO_RIG)]
    yield "folders", str(len(folders))
    yield "most files in a folder", ", ".join(f"{folder} {number}" for folder, number in folders.most_common(3))
    yield "longest file", "{1} {0}".format(*max((len(text[file]), file) for file in product))
    for name, files in (("product", product), ("tests", tests), ("rigs, of the tests", rigs)):
        yield name, f"{len(files)} files, {sum(len(text[file]) for file in files):,} lines"
    yield f"lines over {MAX_COLUMNS}", f"{100 * long / sum(len(text[file]) for file in product):.1f}% of the product"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args().root
    product = python_files(root, *PRODUCT)
    for measure, words in [*of_the_graph(root, product), *of_the_files(root, product)]:
        print(f"{measure:30} {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
