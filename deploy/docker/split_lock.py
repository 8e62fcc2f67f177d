#!/usr/bin/env python3
"""Splits a lock into the packages of each image, as packages.toml says: split_lock.py LOCK FOLDER writes
FOLDER/light.txt, torch.txt, trainer.txt and rollout.txt, each with what it adds to the one before.

Uses the standard library alone: it runs inside the build, before anything is installed.
"""

import re
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

LISTS = Path(__file__).with_name("packages.toml")


def canonical(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def split(lock: str) -> dict[str, list[str]]:
    """The lines of `lock` by the list of packages.toml that names them; `rollout` for those that none names."""
    lists = {group: [canonical(name) for name in names] for group, names in tomllib.loads(LISTS.read_text()).items()}
    parts: dict[str, list[str]] = {group: [] for group in (*lists, "rollout")}
    for line in lock.splitlines():
        if not line or line.startswith("#"):
            continue
        name = canonical(line.partition("==")[0].partition("[")[0])
        found = [group for group, globs in lists.items() if any(fnmatchcase(name, glob) for glob in globs)]
        for group in found or ["rollout"]:
            parts[group].append(line)
    return parts


def main() -> None:
    """Command line."""
    lock, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True)
    for group, lines in split(lock.read_text()).items():
        (folder / f"{group}.txt").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
