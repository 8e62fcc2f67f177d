"""The rules by which a local process is taken for lost: the controller gave it up, or it does not become a member.

Pure bookkeeping over what the controller tells; `supervisor.py` kills the processes.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from rolecall.launcher.processes import MODEL_SERVERS, Start
from rolecall.settings import ControllerSection
from rolecall.shifts import Side, is_shift_of
from rolecall.v1 import controller_pb2

_SIDES: dict[str, Side] = {
    "rollout": "rollouts",
    "reference": "references",
    "actor": "trainers",
    "critic": "trainers",
}
"""Roles that may wait for their shift."""

REJOIN_GRACE_S = 15.0
"""Seconds beyond a lease for a worker that had joined to join a controller that was started again. A living one looks
for it every 6 s at the longest (`grpc.max_reconnect_backoff_ms` and its jitter), and tells it with its next heartbeat.
"""
MIN_START_S = 15.0
STARTS_PATIENCE = 3.0
"""A worker that is started again has MIN_START_S, or STARTS_PATIENCE times what its longest start took, to join: one
that hangs before is nobody's member. Beside that it has the time to read its model from its disk: the first start may
have found it in memory, out of which checkpoints push it.
"""


class Joining:
    """The processes that have joined the controller, and how long each worker takes to join."""

    def __init__(
        self,
        section: ControllerSection,
        shifts: Path | None = None,
        references: Collection[str] = (),
        reading_s: float = 0.0,
    ) -> None:
        """`shifts`: the run directory where rollouts and trainers share devices, each of which waits for its shift
        before it loads: it is not lost in that time. `references`: the references that do so, too. `reading_s`: the
        time in which the largest model is read.
        """
        self._section = section
        self._shifts = shifts
        self._references = references
        self._reading_s = reading_s
        self._off_shift: dict[str, float] = {}
        """When a process was last seen to wait for its shift, by incarnation."""
        self._told_at: dict[str, float] = {}
        """When the controller last told of an incarnation."""
        self._longest_start_s: dict[str, float] = {}
        """Seconds by worker, of those starts that ended in a membership."""

    def judge(
        self,
        workers: Iterable[controller_pb2.WorkerStatus],
        running: Mapping[str, Start],
        heard_since: float,
        condemned: Collection[str],
    ) -> Iterator[tuple[str, str]]:
        """Yields (name, verdict) of local workers that are lost.

        The controller has given them up, or they never joined, or the controller does not tell of them any more: one
        that was started again, heard since `heard_since`, cannot give up a worker that it does not know, and a worker
        that has left must end soon. A report is about the process that runs now if it has its incarnation; one that
        joined as another is not ours. Nothing is said of those that are `condemned` already.
        """
        workers = list(workers)
        done = set(condemned)
        self._note_who_waits(running.values())
        for status in workers:
            start = running.get(status.worker)
            if start is not None and start.incarnation == status.incarnation not in self._told_at:
                # with its wait for a shift, in which it imported: the next may begin in its shift, and import there
                took_s = time.monotonic() - start.at
                self._longest_start_s[status.worker] = max(took_s, self._longest_start_s.get(status.worker, 0.0))
            self._told_at[status.incarnation] = time.monotonic()
            is_ours = start is not None and status.incarnation == start.incarnation
            if status.lost and is_ours and status.worker not in done:
                done.add(status.worker)
                yield status.worker, f"{status.worker} was given up by the controller ({status.lost}) and killed"
        members = {status.incarnation for status in workers}
        for name, start in running.items():
            if start.worker.role in ("controller", *MODEL_SERVERS) or start.incarnation in members or name in done:
                continue
            told_at = self._told_at.get(start.incarnation)
            waited_s = time.monotonic() - max(self._begun_at(start), heard_since, told_at or 0.0)
            if told_at is not None:
                limit_s = self._section.lease_s + REJOIN_GRACE_S
                if waited_s > limit_s:
                    yield name, f"the controller has not told of {name} for {limit_s:g} s, and it was killed"
            elif waited_s > (limit_s := self._patience_s(name)):
                yield name, f"{name} had not joined the controller after {limit_s:.0f} s and was killed"

    def _note_who_waits(self, running: Iterable[Start]) -> None:
        if self._shifts is None:
            return
        waiting = {side for side in _SIDES.values() if not is_shift_of(side, self._shifts)}
        for start in running:
            role, name = start.worker.role, start.worker.name
            takes_shifts = role != "reference" or name in self._references
            if takes_shifts and start.incarnation not in self._told_at and _SIDES.get(role) in waiting:
                self._off_shift[start.incarnation] = time.monotonic()

    def _begun_at(self, start: Start) -> float:
        return max(start.at, self._off_shift.get(start.incarnation, 0.0))

    def _patience_s(self, name: str) -> float:
        """Returns how long a worker may take to join: controller.start_timeout_s, less once it is known how long it
        takes.
        """
        limit_s, known_s = self._section.start_timeout_s, self._longest_start_s.get(name)
        if known_s is None:
            return limit_s
        return min(limit_s, max(MIN_START_S, STARTS_PATIENCE * known_s) + self._reading_s)
