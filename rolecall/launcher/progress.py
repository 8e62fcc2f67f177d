"""A run as the terminal shows it: a live table for people at a terminal, plain lines for logs and pipes.

Owns which metrics are shown and how. Reads RunStatus messages and nothing else.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rolecall.terminal import let_go
from rolecall.v1 import controller_pb2

_Format = Callable[[float], str]


def _decimals(value: float) -> str:
    return f"{value:.3f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


SHOWN: Mapping[str, tuple[str, _Format]] = {
    "reward/mean": ("reward", _decimals),
    "reward/accuracy": ("accuracy", _decimals),
    "rollout/tokens_per_s": ("tokens/s", _whole),
    "actor/mfu": ("MFU", _percent),
    "staleness/max": ("staleness", _whole),
    "time/step_s": ("step s", _decimals),
}
"""Metric -> (label, format), in the order shown; evaluation accuracies follow."""

LONG_WAIT_S = 15.0
"""A wait of a running run that lasts this long is worth a line.

It must also be longer than twice the longest of the _NUM_WAITS before, for large models take their time.
"""

_NUM_WAITS = 1000
"""Waits of some two hundred steps, after which one that was long for a reason is forgotten."""

TROUBLE_S = 5.0
"""Trouble that lasts this long is worth a line, LONG_WAIT_S while the roles start: a limit of a scorer's rate comes and
goes.
"""

OTHER_TROUBLE_S = 60.0
"""Least time between two lines of trouble, the second of which says something else: one may last while another comes.
"""

DROPS_S = 10.0
"""Least time between two lines of groups that failed."""

STATES = {
    controller_pb2.RUN_STATE_STARTING: "starting",
    controller_pb2.RUN_STATE_RUNNING: "running",
    controller_pb2.RUN_STATE_PAUSED: "paused",
    controller_pb2.RUN_STATE_STOPPING: "stopping",
    controller_pb2.RUN_STATE_DONE: "done",
    controller_pb2.RUN_STATE_FAILED: "failed",
}


class View(Protocol):
    """Shows a run as it changes."""

    def show(self, status: controller_pb2.RunStatus) -> None:
        """The run now."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Leaves what was shown last."""


def open_view(stream: TextIO) -> View:
    """A live table when `stream` is a terminal, plain lines otherwise."""
    return LiveView(stream) if stream.isatty() else PlainView(stream)


def shown_metrics(status: controller_pb2.RunStatus) -> list[tuple[str, str]]:
    """(label, text) of the metrics that people watch, those that are there."""
    values = {metric.name: metric.value for metric in status.metrics}
    shown = [(label, form(values[name])) for name, (label, form) in SHOWN.items() if name in values]
    evaluations = sorted(
        name
        for name in values
        if name.startswith("eval/") and name.endswith("/accuracy") and _num_of_source(name, values) is None
    )
    return shown + [(name.removesuffix("/accuracy").replace("/", " "), _decimals(values[name])) for name in evaluations]


def source_lines(status: controller_pb2.RunStatus) -> list[str]:
    """A line for each held-out set that has sources: their accuracies, and how many prompts are in them."""
    values = {metric.name: metric.value for metric in status.metrics}
    by_set: dict[str, list[str]] = {}
    for name in sorted(values):
        held_out, _, source = name.removesuffix("/accuracy").partition("/source/")
        if (num_prompts := _num_of_source(name, values)) is not None:
            by_set.setdefault(held_out.replace("/", " "), []).append(
                f"{source} {_decimals(values[name])} ({num_prompts:.0f})"
            )
    return [f"{held_out} by source: {', '.join(found)}" for held_out, found in by_set.items()]


def _num_of_source(name: str, values: Mapping[str, float]) -> float | None:
    """The prompts of the source whose accuracy is `name`; None of other metrics, also of a set whose name looks so."""
    if not name.startswith("eval/") or not name.endswith("/accuracy") or "/source/" not in name:
        return None
    return values.get(f"{name.removesuffix('/accuracy')}/prompts")


class PlainView:
    """A view of a run in plain lines.

    There is a line per step, per change of state, per recovery, per thing awaited before the run moves, per thing
    awaited for long while it should, and per trouble that lasts. Groups that were dropped stand in the next step's
    line, and those that failed have lines of their own.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._said: tuple[object, ...] = ()
        self._num_recoveries = 0
        self._awaited: tuple[int, str] = (0, "")
        """Step and what is awaited in it."""
        self._awaited_since = 0.0
        self._wait_said = True
        self._num_dropped_in_wait = 0
        """Groups that the last line of this wait told of as dropped."""
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)
        self._dropped: Counter[str] = Counter()
        """Groups dropped, by reason, as last heard."""
        self._has_heard_of_drops = False
        self._dropped_in_steps: Counter[str] = Counter()
        """Dropped groups that a step's line has told; what was dropped before the first message is no news."""
        self._dropped_in_failures: Counter[str] = Counter()
        """Dropped groups that a line of failures has told."""
        self._last_drop = ""
        self._drop_said_at = float("-inf")
        self._trouble_since: float | None = None
        self._trouble_said, self._trouble_said_at = "", float("-inf")

    def show(self, status: controller_pb2.RunStatus) -> None:
        """Writes a line when there is something to say."""
        if status.num_recoveries > self._num_recoveries:
            self.note(recovery_line(status))
        self._num_recoveries = status.num_recoveries
        if status.HasField("ledger"):  # a controller that has not locked the run yet, or finds no store, knows none
            self._dropped = Counter(dict(status.ledger.dropped))
            if not self._has_heard_of_drops:
                self._has_heard_of_drops, self._dropped_in_steps, self._dropped_in_failures = (
                    True,
                    self._dropped,
                    self._dropped,
                )
        self._show_state(status)
        self._show_drops(status)
        self._show_trouble(status)
        self._show_wait(status)

    def _show_drops(self, status: controller_pb2.RunStatus) -> None:
        if status.last_drop == self._last_drop or self._clock() - self._drop_said_at < DROPS_S:
            return
        self._last_drop, self._drop_said_at = status.last_drop, self._clock()
        self.note(
            f"dropped  step {status.step}/{status.total_steps}  "
            f"{drops_text(self._dropped - self._dropped_in_failures)}; the last: {status.last_drop}"
        )
        self._dropped_in_failures = self._dropped

    def _show_trouble(self, status: controller_pb2.RunStatus) -> None:
        if not status.trouble:
            if self._trouble_said:
                self.note(f"trouble  step {status.step}/{status.total_steps}  is over")
            self._trouble_since, self._trouble_said, self._trouble_said_at = None, "", float("-inf")
            return
        if self._trouble_since is None:
            self._trouble_since = self._clock()
        long_s = LONG_WAIT_S if status.state == controller_pb2.RUN_STATE_STARTING else TROUBLE_S
        is_new = status.trouble != self._trouble_said and self._clock() - self._trouble_said_at >= OTHER_TROUBLE_S
        if is_new and self._clock() - self._trouble_since >= long_s:
            self._trouble_said, self._trouble_said_at = status.trouble, self._clock()
            self.note(f"trouble  step {status.step}/{status.total_steps}  {status.trouble}")

    def _show_wait(self, status: controller_pb2.RunStatus) -> None:
        awaited = (status.step, "" if status.state == controller_pb2.RUN_STATE_STARTING else status.waiting_for)
        if awaited != self._awaited:
            if self._awaited[1]:
                self._waits_s.append(self._clock() - self._awaited_since)
            self._awaited, self._awaited_since, self._wait_said = awaited, self._clock(), not awaited[1]
            self._num_dropped_in_wait = 0
        if status.state == controller_pb2.RUN_STATE_PAUSED:  # what people asked for is no wait
            self._awaited_since = self._clock()
        waited_s, dropped = self._clock() - self._awaited_since, self._dropped - self._dropped_in_steps
        is_long = not self._wait_said and waited_s >= max(LONG_WAIT_S, 2 * max(self._waits_s, default=0.0))
        # Twice as many each time: filters that drop all there is are seen, in few lines.
        is_dropping = self._wait_said and bool(awaited[1]) and dropped.total() >= 2 * self._num_dropped_in_wait > 0
        if is_long or is_dropping:
            self._wait_said, self._num_dropped_in_wait = True, max(dropped.total(), 1)
            self.note(
                f"waiting  step {status.step}/{status.total_steps}  for {status.waiting_for}, for {waited_s:.0f} s now"
                + (f"; dropped {drops_text(dropped)}" if dropped else "")
            )

    def _show_state(self, status: controller_pb2.RunStatus) -> None:
        starting = status.state == controller_pb2.RUN_STATE_STARTING
        metrics = shown_metrics(status)
        key = (
            status.state,
            status.step,
            status.waiting_for if starting else "",
            [text for label, text in metrics if label.startswith("eval ")],
        )
        if key == self._said:
            return
        self._said = key
        pieces = [f"{STATES.get(status.state, '?'):8} step {status.step}/{status.total_steps}"]
        pieces += (
            [f"waiting for {status.waiting_for}"]
            if starting and status.waiting_for
            else [f"{label} {text}" for label, text in metrics]
        )
        new_drops = self._dropped - self._dropped_in_steps
        pieces += [f"dropped {drops_text(new_drops)}"] if new_drops else []
        self._dropped_in_steps = self._dropped
        self.note("  ".join(pieces))

    def note(self, text: str) -> None:
        """Writes `text` as a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to leave."""


class LiveView:
    """A table that changes in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._started = time.monotonic()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, status: controller_pb2.RunStatus) -> None:
        """Redraws."""
        self._live.update(render(status, time.monotonic() - self._started))

    def note(self, text: str) -> None:
        """Prints above the table."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stops redrawing; the last table stays."""
        self._live.stop()


class Steady:
    """A view that outlives its stream: where nobody reads it any more, its disk is full, or it lacks a character,
    nothing is shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._view = stream, open_view(stream)

    def show(self, status: controller_pb2.RunStatus) -> None:
        """View.show."""
        with contextlib.suppress(OSError, UnicodeError):
            self._view.show(status)

    def note(self, text: str) -> None:
        """View.note."""
        with contextlib.suppress(OSError, UnicodeError):
            self._view.note(text)

    def close(self) -> None:
        """View.close."""
        try:
            self._view.close()
            self._stream.flush()
        except (OSError, UnicodeError):
            let_go(self._stream)


def render(status: controller_pb2.RunStatus, elapsed_s: float | None = None) -> RenderableType:
    """The run as a few lines: where it is, its metrics, its queues, its fleet."""
    head = Table.grid(padding=(0, 2))
    clock = "" if elapsed_s is None else f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02}"
    bar = ProgressBar(total=max(status.total_steps, 1), completed=status.step, width=30)
    head.add_row(
        Text(status.run, style="bold"),
        STATES.get(status.state, "?"),
        bar,
        f"step {status.step}/{status.total_steps}",
        clock,
    )
    lines: list[RenderableType] = [head]
    if status.waiting_for:
        lines.append(Text(f"waiting for {status.waiting_for}", style="dim"))
    metrics = shown_metrics(status)
    if metrics:
        lines.append(Text("   ".join(f"{label} {text}" for label, text in metrics)))
    lines += [Text(line) for line in source_lines(status)]
    if status.HasField("ledger"):  # else it is not locked yet, or the store is away
        lines.append(Text(ledger_line(status.ledger)))
    if status.num_recoveries:
        lines.append(Text(recovery_line(status), style="dim"))
    if status.workers:
        lines.append(_fleet(status))
    if status.last_drop:
        lines.append(Text(f"last dropped: {status.last_drop}", style="dim"))
    if status.trouble:
        lines.append(Text(status.trouble, style="red"))
    if status.error:
        lines.append(Text(status.error, style="red"))
    return Group(*lines)


def recovery_line(status: controller_pb2.RunStatus) -> str:
    """How often the run started over from the store, and what the last failure was."""
    return f"recovery {status.num_recoveries}: {status.last_failure}"


def drops_text(dropped: Mapping[str, int]) -> str:
    """How many groups, by reason."""
    return (
        f"{sum(dropped.values())} (" + ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items())) + ")"
    )


def ledger_line(ledger: controller_pb2.LedgerCounts) -> str:
    """The balance and the queues in words: groups admitted = trained + dropped + live."""
    dropped = drops_text(ledger.dropped) if ledger.dropped else "0"
    queues = f"queued {ledger.queued}, generating {ledger.generating}, committed {ledger.committed}"
    return (
        f"groups: admitted {ledger.admitted} = trained {ledger.trained} + dropped {dropped} + live {ledger.live} "
        f"({queues})"
    )


def _fleet(status: controller_pb2.RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for worker in sorted(status.workers, key=lambda worker: (worker.role, worker.worker)):
        version = f"v{worker.policy_version}" if worker.policy_version >= 0 else ""
        silence = f"silent {worker.silence_s:.0f} s" if worker.silence_s > 3 else ""
        table.add_row(
            worker.worker,
            f"lost: {worker.lost}" if worker.lost else worker.phase,
            version,
            silence,
            style="red" if worker.lost else "dim",
        )
    return table
