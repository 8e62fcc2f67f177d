"""Functions that users name in their configuration as `module:function`. No torch."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError, OwnFunctionError
from rolecall.settings import PluginSection

MAY_BE_ASYNC = "--may-be-async"
"""The flag before the other words of the command: TARGET is awaited where it is a coroutine function."""


def load_function(
    target: str,
    field: str,
    search_path: Path | None = None,
    *,
    first: str,
    options: Iterable[str] = (),
    may_be_async: bool = False,
) -> Callable[..., Any]:
    """The function that `target` names, which is called with `first` and with `options` as keywords; `search_path` is
    added to the end of this process's import path. ConfigError names `field` when there is none, none that takes them,
    or none that returns its answer, which a coroutine function does where it `may_be_async`; what a module raises while
    it is imported passes through.
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
    except SystemExit as error:
        raise ConfigError(
            f"{field} {target!r}: the module {module_name!r} calls sys.exit({error.code!r}) when it is imported; keep "
            "that under if __name__ == '__main__'"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        own = None if search_path is None else search_path / f"{module_name}.py"
        place = vars(module).get("__file__", "Python itself")
        if own is not None and own.is_file() and own.resolve() != Path(place).resolve():
            raise ConfigError(
                f"{field} {target!r}: the name {module_name!r} is taken by {place}, so that {own} is not imported; "
                "rename it"
            )
        raise ConfigError(
            f"{field} {target!r}: the module {module_name!r} has no function {function_name!r}; correct it"
        )
    _check_call(function, f"{field} {target!r}", first, sorted(options), may_be_async)
    return function  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether what `function` returns is to be awaited, as far as can be seen."""
    return _is(inspect.iscoroutinefunction, function)


def _is(is_kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    return is_kind(function) or is_kind(type(function).__call__)


def _check_call(function: Callable[..., Any], named: str, first: str, options: list[str], may_be_async: bool) -> None:
    """ConfigError unless a call with `first` and the keywords `options` returns an answer, as far as can be seen."""
    for is_kind, kind in (
        (inspect.iscoroutinefunction, "async"),
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if _is(is_kind, function) and not (kind == "async" and may_be_async):
            raise ConfigError(
                f"{named} is {kind}, and nobody awaits or iterates it; return the answer from a plain def"
            )
    try:
        # what is called is the decorator's wrapper, whatever it wraps
        inspect.signature(function, follow_wrapped=False).bind(None, **dict.fromkeys(options))
    except ValueError:  # a built-in that does not tell its signature
        return
    except TypeError as error:
        given = f"{first} and the options {options}" if options else first
        raise ConfigError(f"{named} cannot be called with {given}: {error}; correct it") from error


def load_plugin(section: PluginSection, field: str, first: str = "a batch") -> Callable[..., Any]:
    """The function of `section`, which is called with `first` and the section's options. ConfigError names `field` when
    there is none, or none that takes them, or what its module raises while it is imported.
    """
    try:
        return load_function(section.name, field, section.folder, first=first, options=section.options)
    except ConfigError:
        raise
    except Exception as error:  # anything may come out of a module of the user's
        raise ConfigError(
            f"{field} {section.name!r} cannot be imported: {type(error).__name__}: {error}; correct the module"
        ) from error


def call_plugin(section: PluginSection, field: str, batch: object, *, passing: tuple[type[Exception], ...] = ()) -> Any:
    """Calls the function of `section` with `batch` and the section's options. OwnFunctionError names `field`, the
    line of its module and what it raised; errors of `passing` say nothing of the function, and pass through.
    """
    function = load_plugin(section, field)
    try:
        return function(batch, **section.options)
    except passing:
        raise
    except Exception as error:  # anything may come out of a function of the user's
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [f" in {frame.filename}, line {frame.lineno}" for frame in frames if frame.filename == frames[0].filename]
        raise OwnFunctionError(
            f"{field} {section.name!r} raised {type(error).__name__}{''.join(own[-1:])}: {error}; correct it, and go "
            "on with --resume"
        ) from error


def main() -> int:
    """`python -m rolecall.plugins [--may-be-async] FIELD TARGET FIRST [OPTION ...]`: imports what TARGET names from the
    folder where it runs; 0 when it is there and takes FIRST and the options, else the last line says why.
    """
    may_be_async = sys.argv[1] == MAY_BE_ASYNC
    field, target, first, *options = sys.argv[2 if may_be_async else 1 :]
    sys.path.insert(0, os.getcwd())
    try:
        load_function(target, field, Path.cwd(), first=first, options=options, may_be_async=may_be_async)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
