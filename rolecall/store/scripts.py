"""The store's Lua scripts as callables: where their text comes from and which error each refusal is.

Owns nothing of the protocol: keys, rules and bounds stand in `scripts/common.lua` and in the scripts themselves.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from rolecall import errors

REFUSALS: dict[str, type[errors.RoleCallError]] = {
    "FENCED": errors.FencedError,
    "ROLLED_BACK": errors.StoreRolledBackError,
    "LOCKED": errors.RunLockedError,
    "DENIED": errors.NotAttestedError,
    "LOST": errors.LeaseLostError,
    "UNATTESTED": errors.WrongVersionError,
    "ORDER": errors.OutOfOrderError,
    "MISMATCH": errors.BatchMismatchError,
    "STALE": errors.StaleVersionError,
    "DIGEST": errors.WeightsMismatchError,
    "STATE": errors.ConflictError,
    "MISSING": errors.NotFoundError,
}
"""First element of a script's answer to the error it is raised as; OK and DONE are the others."""

ELSEWHERE = b"ELSEWHERE"
"""The verdict of a server on which the ledger was not confirmed."""

_ROW_SCRIPTS = ("stage", "put_columns", "persist")

_MARKED = """local function script()
%s
end
local answer = script()
answer[#answer + 1] = marked
answer[#answer + 1] = serving
return answer
"""


def ledger_keys(run: str) -> list[str]:
    """The keys that a script of run `run`'s ledger is called with: those that `common.lua` explains."""
    prefix = f"{{rl:{run}}}:"
    return [prefix, f"{prefix}prompts"]


@cache
def source(name: str) -> str:
    """Text of script `name` as the server runs it: its shebang line, the shared functions (ledger scripts only), its
    body; and where that begins with `fenced`, mark and server after its answer.
    """
    folder = files("rolecall.store") / "scripts"
    shebang, body = (folder / f"{name}.lua").read_text().split("\n", 1)
    if name in _ROW_SCRIPTS:
        return f"{shebang}\n{body}"
    shared = (folder / "common.lua").read_text()
    return f"{shebang}\n{shared}{_MARKED % body if 'fenced(' in body else body}"


@cache
def digest(name: str) -> str:
    """The digest by which the server knows script `name`, once it has run it."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Answer:
    """The outcome of a script and its values."""

    fresh: bool
    """Whether it had an effect now (OK), not at an earlier call (DONE)."""
    values: list[Any]
    """What it says beside its verdict."""


def check(reply: list[Any], run: str) -> Answer:
    """The answer in `reply`, an array whose first element is the verdict. Raises the error of a refusal."""
    verdict = reply[0].decode()
    if verdict in ("OK", "DONE"):
        return Answer(verdict == "OK", reply[1:])
    raise REFUSALS[verdict](f"run {run}: {reply[1].decode()}")
