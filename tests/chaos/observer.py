"""What the driver sees of a run, and what became of each fault: when it was noticed, when its target was at work again,
when the run moved on.

Told of events by whoever sees them: the links and hooks of a light run (links.py), the controller's status of a real
one (status.py).
"""

import time
from dataclasses import dataclass, field

from tests.chaos.faults import Kind
from tests.chaos.report import Record

MOVES = {"commit", "put_columns", "commit_step", "attest"}
"""Scripts whose success is progress of the run."""
OUTSIDE = "scorer"
"""The external scorer, whose work nobody sees directly: it is back when the reward service answers."""
ON_ITS_WAY_S = 0.15
"""How long after a process was stopped something that it had said may still arrive."""
_ENDS = (Kind.KILL, Kind.STOP, Kind.ZOMBIE)


@dataclass
class Story:
    """What happened."""

    records: list[Record] = field(default_factory=list)
    max_still_s: float = 0.0
    """Longest time without progress, between the first step and the end."""
    still_after: str = ""
    """The last faults before it."""
    steps: int = 0
    """Steps seen to be counted."""
    num_judged_live: int = 0
    """Committed trajectories whose tokens were looked at while the run went on, each as often as it was seen."""
    wall_s: float = 0.0
    exit_code: int | None = None

    @property
    def num_kills(self) -> int:
        """Faults that were a SIGKILL."""
        return sum(record.fault.kind is Kind.KILL for record in self.records)


class Observer:
    """One run's."""

    def __init__(self) -> None:
        self.story = Story()
        self.up: set[str] = set()
        """Targets seen at work since their last fault."""
        self.open: dict[str, Record] = {}
        """The last fault of each target that is not back from it."""
        self.pids: dict[str, int] = {}
        """Process by worker, as it said itself."""
        self.moved_at = self.stepped_at = time.monotonic()
        self._unmoved: list[Record] = []
        self._unstepped: list[Record] = []

    def hit(self, record: Record) -> None:
        """A fault was done."""
        self.story.records.append(record)
        self.up.discard(record.fault.target)
        self.open[record.fault.target] = record
        self._unmoved.append(record)
        self._unstepped.append(record)

    def visited(self, worker: str, pid: int, phase: str) -> None:
        """A worker said a phase, or the link to it saw one."""
        if pid:
            self.pids[worker] = pid
        if phase == "starting":
            self.noticed(worker)
        elif pid or phase == "answer":
            self.back(worker)
        if phase == "answer":
            self.back("reward/worker")
            self.back(OUTSIDE)

    def done(self, worker: str, script: str) -> None:
        """A script of `worker` succeeded."""
        self.back(worker)
        self.back("store")
        if script in MOVES:
            self.moved()
        if script == "commit_step":
            self.stepped()

    def noticed(self, target: str) -> None:
        """The fault of `target` was noticed: its process was killed, or another started."""
        record = self.open.get(target)
        if record is not None and record.noticed_at is None:
            record.noticed_at = time.monotonic()

    def back(self, target: str) -> None:
        """`target` does its work; what was on its way when it was killed or stopped is none."""
        now, record = time.monotonic(), self.open.get(target)
        if record is not None and record.fault.kind in _ENDS and now - record.hit_at < ON_ITS_WAY_S:
            return
        if record is not None and record.fault.kind is Kind.TERM and record.noticed_at is None:
            return  # it drains
        self.up.add(target)
        if record is not None:
            del self.open[target]
            record.back_at = now
            if record.fault.kind in (Kind.KILL, Kind.STOP) and record.noticed_at is None:
                record.noticed_at = record.back_at

    def moved(self) -> None:
        """The run made progress."""
        self.still()
        for record in self._unmoved:
            record.moved_at = self.moved_at
        self._unmoved.clear()

    def stepped(self, steps: int = 1) -> None:
        """Steps were counted."""
        self.stepped_at = time.monotonic()
        self.story.steps += steps
        for record in self._unstepped:
            record.step_at = self.stepped_at
        self._unstepped.clear()

    def still(self) -> float:
        """Ends a time without progress and returns its length."""
        now = time.monotonic()
        still_s, self.moved_at = now - self.moved_at, now
        if still_s > self.story.max_still_s and self.story.steps:
            self.story.max_still_s = still_s
            self.story.still_after = ", ".join(str(record.fault) for record in self.story.records[-3:])
        return still_s
