"""The report of rank 0 of `rolecall sft`: numbers to the trackers, and one line of progress to people. No torch."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rolecall.data.sft_examples import TokenizedExamples
from rolecall.settings import SftSettings
from rolecall.terminal import say
from rolecall.trackers import End, Trackers

LINE_S = 5.0
"""Seconds between two lines where the output is no terminal; lines with a held-out loss, and the last, are always
written.
"""


class SftReport:
    """The report of an SFT run, which opens the trackers."""

    def __init__(self, settings: SftSettings, num_steps: int, num_per_epoch: int) -> None:
        self._trackers = Trackers(settings)
        self._num_steps = num_steps
        self._in_steps = settings.run.num_steps is not None
        self._num_per_epoch = num_per_epoch
        self._live = sys.stdout.isatty()
        self._first = 0
        self._started = time.monotonic()
        self._written = float("-inf")
        self._heldout = ""

    def begin(self, step: int, examples: TokenizedExamples) -> None:
        """Training goes on from `step`, with `examples`."""
        self._first = step
        num_examples, num_too_long, num_unshown = len(examples.rows), examples.num_too_long, len(examples.unshown)
        refused = f", {num_too_long} refused (longer than data.max_tokens)" if num_too_long else ""
        refused += f", {num_unshown} left out (images that cannot be shown)" if num_unshown else ""
        length = f"run.{'num_steps' if self._in_steps else 'num_epochs'}"
        done = f", which is all; a larger {length} goes on" if step >= self._num_steps else ""
        say(
            f"{num_examples} examples{refused}, {self._num_steps} steps, {self._num_per_epoch} an epoch, from "
            f"step {step}{done}\n"
        )
        values = {"data/examples": num_examples, "data/too_long": num_too_long, "data/unshown": num_unshown}
        self._trackers.log(step, values)

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Appends to samples.jsonl, and shows them elsewhere."""
        self._trackers.keep_samples(step, samples)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics after `step` steps."""
        self._trackers.log(step, values)
        if "eval/loss" in values:
            self._heldout = f"  held-out loss {values['eval/loss']:.4f}"
        now = time.monotonic()
        if self._live or "eval/loss" in values or step == self._num_steps or now - self._written >= LINE_S:
            self._written = now
            line = self._line(step, values, now)
            say(f"\r{line:<110}" if self._live else f"{line}\n")

    def close(self, end: End) -> None:
        """Leaves the last line and closes the trackers, which show `end`."""
        if self._live:
            say("\n")
        self._trackers.flush(end)

    def _line(self, step: int, values: Mapping[str, float], now: float) -> str:
        pieces = [f"step {step}/{self._num_steps}"]
        if "sft/loss" in values:
            left_s = (now - self._started) / (step - self._first) * (self._num_steps - step)
            pieces += [
                f"epoch {(step - 1) // self._num_per_epoch + 1}",
                f"loss {values['sft/loss']:.4f}{self._heldout}",
            ]
            pieces += [f"{values['sft/tokens_per_s']:,.0f} tokens/s", f"{timedelta(seconds=round(left_s))} left"]
            return "  ".join(pieces)
        return "  ".join(pieces) + self._heldout
