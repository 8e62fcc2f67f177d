"""The scripts of a controller as it calls them: fenced by its number, and by what the store has told it.

A server may lack what it, or the one before it, had acknowledged: a replica took over that lagged behind. So each write
of a controller gets a number, its mark, and a server that is another than before is asked for its last mark, by the
script `confirm`, before anything is read there or written. Not here: what is called (`ledger`).

Bounds: one confirmation at a time; a call is asked again for at most RETRY_S.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rolecall.errors import StoreRolledBackError, StoreUnavailableError
from rolecall.store import scripts
from rolecall.store.connection import RETRY_S, Connection

NEVER_TOLD = 2**53
"""A mark that no store reaches."""


class FencedScripts:
    """The scripts of run `run` as one controller calls them. Threads may share it after `take`."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._run = run
        self._keys = scripts.ledger_keys(run)
        self.ctl = 0
        """Our fencing number; 0 before `take`: then everything but reading is refused."""
        self._server = b""
        """The server on which the ledger was last confirmed."""
        self._mark = 0
        """The highest mark that we were told."""
        self._lock = threading.Lock()
        self._set_back: StoreRolledBackError | None = None
        """What every call raises once the store was found to have lost what it had acknowledged. The run is then to go
        back to a checkpoint, whoever controls it: `RunPosition.set_back` remembers.
        """

    def take(self, ctl: str, beat: str, nonce: str, known_ctl: int) -> int:
        """Takes the run by the script `lock`, whose arguments these are; returns our fencing number."""
        reply = self._connection.script("lock", self._keys, [ctl, beat, nonce, known_ctl])
        number, self._mark, self._server = scripts.check(reply, self._run).values
        self.ctl = int(number)
        return self.ctl

    def call(self, name: str, *args: str | bytes | int) -> scripts.Answer:
        """Returns what script `name` answers. StoreRolledBackError once the store lost what it had acknowledged."""
        return self._confirmed(lambda: [self._connection.script(name, self._keys, [self.ctl, *args])])[0]

    def call_many(self, name: str, calls: Sequence[Sequence[str | bytes | int]]) -> None:
        """Calls script `name` with each of `calls`, in order; safe to repeat where the script is."""
        fenced = [(self.ctl, *args) for args in calls]
        self._confirmed(lambda: self._connection.script_many(name, self._keys, fenced))

    def look(self, name: str, *args: str | bytes | int) -> scripts.Answer:
        """Returns what script `name` answers to those who do not control the run: not fenced, and of any server."""
        return scripts.check(self._connection.script(name, self._keys, [0, *args])[:-2], self._run)

    def take_set_back(self) -> bool:
        """Whether the run is to go back to a checkpoint; from here on calls pass again, for a loop that does."""
        found, self._set_back = self._set_back, None
        return found is not None

    def give_up_rows(self) -> None:
        """Says that rows are gone which a batch needs: the run is to go back to a checkpoint."""
        self._confirm(self._server, rows_lost=True)

    def _confirmed(self, ask: Callable[[], list[list[Any]]]) -> list[scripts.Answer]:
        """Returns the answers of the scripts that `ask` calls, once all come from the server that is confirmed."""
        deadline = time.monotonic() + RETRY_S
        while True:
            if self._set_back is not None:
                raise self._set_back
            known, replies = self._server, ask()
            elsewhere = any(reply[0] == scripts.ELSEWHERE for reply in replies)
            if not elsewhere and all(self._is_current(*reply[-2:]) for reply in replies):
                if self._set_back is not None:  # another thread found it meanwhile
                    raise self._set_back
                return [scripts.check(reply[:-2], self._run) for reply in replies]
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"run {self._run}: servers of the store take turns; see their logs")
            if elsewhere:
                self._confirm(known)

    def _is_current(self, mark: int, server: bytes) -> bool:
        """Takes note of a mark. False for the answer of a server that has been replaced since: what it acknowledged may
        be lost with it.
        """
        with self._lock:  # bounded: by the one confirmation under way, hence by the store's retry_s
            if server and server != self._server:
                return False
            self._mark = max(self._mark, mark)
            return True

    def _confirm(self, known: bytes, *, rows_lost: bool = False) -> None:
        """Confirms the ledger on the server that answers, unless another thread did so since the server was `known`.
        The run is to go back when that does not have all that we were told, or `rows_lost`.
        """
        with self._lock:  # bounded: by the one confirmation under way, hence by the store's retry_s
            if self._server != known:
                return
            told = self._mark
            reply = self._connection.script("confirm", self._keys, [self.ctl, NEVER_TOLD if rows_lost else told])
            self._server, self._mark, set_back = scripts.check(reply, self._run).values
            if set_back == b"1":
                what = "rows of a batch" if rows_lost else f"{told - self._mark} of the controller's last writes"
                self._set_back = StoreRolledBackError(
                    f"run {self._run}: the store lost what it had acknowledged, {what}, and what was written after "
                    "them. A replica took over that lagged behind, or a server without `appendfsync always` started "
                    "again; the run goes back to its last checkpoint"
                )
