"""`rolecall manifests`: writes a run's deployment from its file."""

import argparse
from typing import TextIO

from rolecall.errors import ConfigError
from rolecall.manifests.compose import compose
from rolecall.manifests.kubernetes import kubernetes
from rolecall.manifests.render import require_alone, write_all
from rolecall.manifests.slurm import slurm
from rolecall.settings import load_tree


def manifests(arguments: argparse.Namespace, overrides: list[str], out: TextIO) -> int:
    """Writes the files that the command line asks for (`config`, `recipe`, `to`, `out`) and says which; 0. ConfigError
    for a run that has no place there.
    """
    tree, _ = load_tree(arguments.config, overrides, arguments.recipe)
    write = {"compose": compose, "kubernetes": kubernetes, "slurm": slurm}[arguments.to]
    files = write(tree, arguments.config)
    if arguments.config.resolve() in {(arguments.out / name).resolve() for name in files}:
        raise ConfigError(f"{arguments.config} would be overwritten by what is made of it; name another --out")
    if arguments.to == "kubernetes":  # beside a Compose project lie .env and overrides, by right
        require_alone(files, arguments.out)
    write_all(files, arguments.out)
    out.write("".join(f"{arguments.out / name}\n" for name in sorted(files)))
    return 0
