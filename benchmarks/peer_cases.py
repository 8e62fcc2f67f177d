"""The files that pass between vs_peers.py and a peer in an environment of its own: cases in a folder, and answers. No
torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One call of a peer's function."""

    call: str
    """The function in the peer's file."""
    options: Mapping[str, Any]
    """What JSON can say."""
    inputs: Arrays
    """Arrays by the names that the function knows them by."""


def write_cases(folder: Path, cases: Sequence[Case]) -> None:
    """Leaves `cases` for a peer."""
    (folder / "cases.json").write_text(json.dumps([[case.call, case.options] for case in cases]))
    np.savez(folder / "inputs.npz", **_numbered([case.inputs for case in cases]))  # type: ignore[arg-type]


def answer(folder: Path, functions: Mapping[str, Any], tensor: Callable[[NDArray[Any]], Any]) -> None:
    """Calls every case's function with its inputs as tensors, and leaves what they return, arrays by name."""
    calls = json.loads((folder / "cases.json").read_text())
    given = _by_number(folder / "inputs.npz", len(calls))
    results = [
        functions[call]({name: tensor(array) for name, array in inputs.items()}, **options)
        for (call, options), inputs in zip(calls, given, strict=True)
    ]
    np.savez(folder / "outputs.npz", **_numbered(results))  # type: ignore[arg-type]


def read_answers(folder: Path, num_cases: int) -> list[Arrays]:
    """Returns what each case's function returned."""
    return _by_number(folder / "outputs.npz", num_cases)


def _numbered(arrays: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    return {f"{i}/{name}": array for i, each in enumerate(arrays) for name, array in each.items()}


def _by_number(path: Path, num: int) -> list[Arrays]:
    with np.load(path) as file:
        found: list[dict[str, NDArray[Any]]] = [{} for _ in range(num)]
        for key in file.files:
            number, _, name = key.partition("/")
            found[int(number)][name] = file[key]
    return list(found)
