"""A connection to the store whose script calls may arrive again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.store import scripts
from rolecall.store.connection import Connection
from tests.fixtures_store import ForgetfulRedis

REPEATABLE = {
    "admit",
    "attest",
    "begin_publish",
    "claim",
    "commit",
    "commit_step",
    "drop",
    "forget",
    "free_rows",
    "persist",
    "put_columns",
    "release",
}
REPEATABLE |= {"rate", "renew", "seal", "stage", "start_lineage"}
"""Scripts whose calls may arrive again at any later time."""


@dataclass(frozen=True)
class Call:
    """A script call as it was sent."""

    script: str
    keys: Sequence[str]
    args: Sequence[str | bytes | int]


class ReplayedConnection(Connection):
    """Remembers its last script calls, to send them again. `variants`: texts that are run in the place of some
    scripts.
    """

    def __init__(self, client: ForgetfulRedis, variants: Mapping[str, str]) -> None:
        super().__init__(client)
        self.variants = variants
        self.calls: list[Call] = []

    def script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        self._order(name, keys)
        if name in REPEATABLE:
            self.calls = [*self.calls[-300:], Call(name, keys, args)]
        if name not in self.variants:
            return super().script(name, keys, args)
        answer = self.command("EVAL", self.variants[name], len(keys), *keys, *args)
        assert isinstance(answer, list)
        return answer

    def send_again(self, call: Call) -> None:
        """Now, as the network might."""
        self._order(call.script, call.keys)
        self.command(
            "EVAL", self.variants.get(call.script, scripts.source(call.script)), len(call.keys), *call.keys, *call.args
        )

    def _order(self, script: str, keys: Sequence[str]) -> None:
        """Forgets what lifts the expiry of a row that was freed and is staged again, by a worker that was expelled:
        arriving now, it keeps the row for ever, which is a known limit (`Rows.persist`).
        """
        freed = {key for key in keys if script == "stage" and not self.command("EXISTS", key)}
        self.calls = [call for call in self.calls if call.script != "persist" or not freed & {*call.keys}]

    def forget_calls(self, script: str, consumer: str = "") -> None:
        """The calls of `script` (by `consumer`) do not arrive again."""
        self.calls = [call for call in self.calls if call.script != script or (consumer and call.args[0] != consumer)]
