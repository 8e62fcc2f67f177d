"""A tracker of your own: every step's numbers as JSON, posted to an address. Samples are left out."""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.trackers import TrackedRun
from rolecall.trackers.finite import or_null


class Webhook:
    """Posts to `url`. What it raises is counted, and the note is sent again later."""

    def __init__(self, run: TrackedRun, url: str, timeout_s: float) -> None:
        self._run = run
        self._url = url
        self._timeout_s = timeout_s

    def log(self, step: int, values: Mapping[str, float]) -> None:
        body = json.dumps({"run": self._run.name, "id": self._run.id, "step": step, **or_null(values)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._timeout_s):
            pass

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Sends nothing: samples stay here."""

    def close(self) -> None:
        """Nothing is buffered."""


def webhook(run: TrackedRun, *, url: str, timeout_s: float = 10.0) -> Webhook:
    """Called once at the start of the controller, on a thread of the tracker's own."""
    return Webhook(run, url, timeout_s)
