"""The table of a chaos run: per target and kind of fault, how soon it was noticed, how soon the role and the run were
at work again.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.faults import Fault, role_of


@dataclass
class Record:
    """What became of one fault; seconds on the driver's clock."""

    fault: Fault
    hit_at: float
    exactly: bool
    """It hit at its phase, not after waiting for it in vain."""
    noticed_at: float | None = None
    """A stopped process was killed, or a dead one's successor started."""
    back_at: float | None = None
    """The role did its work again."""
    moved_at: float | None = None
    """Anything of the run moved: a group was committed, scored or trained, or weights attested."""
    step_at: float | None = None
    """A step was applied."""


def table(records: Sequence[Record]) -> str:
    """Rows of target and kind: number, and median / maximum of each time."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((role_of(record.fault.target), record.fault.kind), []).append(record)
    lines = [
        f"{'role':<14}{'fault':<12}{'n':>5}{'at phase':>9}  "
        f"{'noticed':>15}{'back at work':>15}{'run moves':>15}{'step applied':>15}   (median / max, s)"
    ]
    for (role, kind), found in sorted(groups.items()):
        times = [
            _times((record.noticed_at, record.hit_at) for record in found),
            _times((record.back_at, record.hit_at) for record in found),
            _times((record.moved_at, record.hit_at) for record in found),
            _times((record.step_at, record.hit_at) for record in found),
        ]
        exactly = sum(record.exactly for record in found)
        lines.append(f"{role:<14}{kind:<12}{len(found):>5}{exactly:>9}  " + "".join(f"{text:>15}" for text in times))
    return "\n".join(lines)


def coverage(records: Sequence[Record], phases: Mapping[str, Sequence[str]]) -> str:
    """How many of the named `phases` were hit exactly, by whatever fault, and which were not."""
    named = {(role, phase) for role, found in phases.items() for phase in found}
    hit = {(role_of(record.fault.watched), record.fault.phase) for record in records if record.exactly}
    missed = ", ".join(f"{role} {phase}" for role, phase in sorted(named - hit))
    return f"{len(named & hit)} of {len(named)} phases were hit exactly" + (f"; not {missed}" if missed else "")


def _times(pairs: Iterable[tuple[float | None, float]]) -> str:
    found = [at - hit for at, hit in pairs if at is not None]
    return f"{statistics.median(found):.2f} / {max(found):.2f}" if found else "-"
