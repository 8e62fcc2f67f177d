"""Functions that users name in their configuration as `module:function`. No torch."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.settings import PluginSection


def load_function(target: str, field: str, search_path: Path | None = None) -> Callable[..., Any]:
    """The function that `target` names; `search_path` is added to the end of this process's import path. ConfigError
    names `field` when there is none; what a module raises while it is imported passes through.
    """
    module_name, _, function_name = target.partition(":")
    if search_path is not None and str(search_path) not in sys.path:
        sys.path.append(str(search_path))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        where = f" in {search_path} or among the installed packages" if search_path is not None else ""
        raise ConfigError(
            f"{field} {target!r}: there is no module {error.name!r}{where}; correct the name or its folder"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ConfigError(
            f"{field} {target!r}: the module {module_name!r} has no function {function_name!r}; correct it"
        )
    return function  # type: ignore[no-any-return]


def load_plugin(section: PluginSection, field: str, first: str = "a batch") -> Callable[..., Any]:
    """The function of `section`, which is called with `first` and the section's options. ConfigError names `field` when
    there is none, or none that takes them.
    """
    function = load_function(section.name, field, section.folder)
    try:
        inspect.signature(function).bind(None, **section.options)
    except TypeError as error:
        raise ConfigError(
            f"{field} {section.name!r} cannot be called with {first} and the options {sorted(section.options)}: "
            f"{error}; correct one of them"
        ) from error
    return function


def main() -> int:
    """`python -m rolecall.plugins FIELD TARGET`: imports what TARGET names from the folder where it runs; 0 when it is
    there, else the last line says why.
    """
    field, target = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    try:
        load_function(target, field, Path.cwd())
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
