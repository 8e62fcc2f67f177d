"""The installed vLLM as far as its source tells, which is read and not imported: an import takes seconds, and this is
asked before anything starts.
"""

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from rolecall.errors import ConfigError
from rolecall.terminal import did_you_mean


def check_engine_arguments(given: Iterable[str], setting: str = "rollout.engine") -> None:
    """ConfigError names the argument of `setting` that the installed vLLM does not have. Where vLLM is not installed
    nothing is known; the replica asks again.
    """
    unknown = sorted(set(given))
    body = _source("engine/arg_utils.py") if unknown else None
    if body is None:
        return
    known = {
        field.target.id
        for node in body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    for name in unknown:
        if name not in known:
            raise ConfigError(
                f"{setting}.{name} is no argument of the installed vLLM{did_you_mean(name, known)}; correct or "
                "remove it"
            )


def check_tool_parser(name: str) -> None:
    """ConfigError when `name`, of environments.*.tool_parser, is none of the installed vLLM's. Where vLLM is not
    installed nothing is known; the replica asks again.
    """
    body = _source("tool_parsers/__init__.py")
    if body is None:
        return
    known = {
        key.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    if name not in known:
        raise ConfigError(
            f"environments.*.tool_parser: the installed vLLM has no parser {name!r}{did_you_mean(name, known)}; it has "
            f"{', '.join(sorted(known))}"
        )


def _source(file: str) -> list[ast.stmt] | None:
    """The statements of a file of the installed vLLM; None where none is installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return ast.parse(Path(spec.origin).parent.joinpath(file).read_text()).body
