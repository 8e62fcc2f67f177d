"""The findings of a check: figures, what was required, the verdict; and the table made of several. Imports nothing
heavy.

Written to the disk after every entry: whoever ends the check's process reads what it had found by then.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Verdict = Literal["passed", "failed", "skipped", "overran"]


class SkippedCheckError(Exception):
    """This machine cannot show what the check asks."""


@dataclass
class Findings:
    """The findings of one check."""

    path: Path
    """JSON; beside it lies the process's log."""
    dry: bool
    """Whether what depends on the device is left unjudged."""
    figures: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_required: int = 0
    """Requirements that were judged."""

    def figure(self, name: str, value: object) -> None:
        """Notes a number, of whatever is worth telling; floats with three digits."""
        self.figures[name] = f"{value:.3g}" if isinstance(value, float) else str(value)
        self._write()

    def require(self, what: str, met: bool, *, on_device: bool = False) -> None:
        """Notes that `what` was required and whether it is `met`; the check goes on.

        `on_device`: of speed and memory, which a dry run does not judge.
        """
        if on_device and self.dry:
            return
        self.num_required += 1
        if not met:
            self.failures.append(what)
        self._write()

    def at_most(self, name: str, value: float, bound: float, *, on_device: bool = False) -> None:
        """Notes the figure and requires that it is a number of at most `bound`."""
        self.figure(name, value)
        self.require(f"{name} {value:.3g} is more than {bound:.3g}", value <= bound, on_device=on_device)

    def at_least(self, name: str, value: float, bound: float, *, on_device: bool = False) -> None:
        """Notes the figure and requires that it is a number of at least `bound`."""
        self.figure(name, value)
        self.require(f"{name} {value:.3g} is less than {bound:.3g}", value >= bound, on_device=on_device)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An exception inside is a failure of `what`; the check goes on after it."""
        try:
            yield
        except SkippedCheckError:
            raise
        except Exception as error:  # an edge: whatever a part of a check dies of is its finding
            logger.exception("%s", what)
            self.require(f"{what}: {type(error).__name__}: {error}".splitlines()[0][:300], False)

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(
            json.dumps(
                {"figures": self.figures, "failures": self.failures, "num_required": self.num_required}, indent=1
            )
        )
        partial.replace(self.path)


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    number: int
    name: str
    verdict: Verdict
    seconds: float
    figures: dict[str, str]
    reasons: tuple[str, ...]
    """Why not passed."""


def read_line(number: int, name: str, seconds: float, path: Path, end: str | None) -> Line:
    """Returns what the check of this number left at `path`.

    `end`: how its process ended, None when it did so by itself and had nothing to say against it.
    """
    left: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"figures": {}, "failures": [], "num_required": 0}
    )
    reasons = [*left["failures"], *([end] if end else [])]
    verdict: Verdict = "failed" if reasons else "passed"
    if end is not None and end.startswith(("skipped", "overran")) and not left["failures"]:
        verdict = "skipped" if end.startswith("skipped") else "overran"
    if verdict == "passed" and not left["num_required"]:
        verdict, reasons = "failed", ["nothing was required of it"]
    return Line(number, name, verdict, seconds, left["figures"], tuple(reasons))


def table(lines: Sequence[Line]) -> str:
    """Markdown, for docs/log.md."""
    rows = ["| # | check | | s | figures |", "|---|---|---|---|---|"]
    for line in lines:
        verdict = f"{line.verdict}: {'; '.join(line.reasons)}" if line.reasons else line.verdict
        figures = "; ".join(f"{name} {value}" for name, value in line.figures.items())
        rows.append(
            f"| {line.number} | {_cell(line.name)} | {_cell(verdict)} | {line.seconds:.0f} | {_cell(figures)} |"
        )
    return "\n".join(rows) + "\n"


def write_report(folder: Path, part: int, heading: str, lines: Sequence[Line]) -> Path:
    """The table and all figures as `part-<n>.md` and `part-<n>.json` in `folder`; the table's path."""
    (folder / f"part-{part}.json").write_text(
        json.dumps({"heading": heading, "checks": [asdict(line) for line in lines]}, indent=1)
    )
    path = folder / f"part-{part}.md"
    path.write_text(f"{heading}\n\n{table(lines)}")
    return path


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
