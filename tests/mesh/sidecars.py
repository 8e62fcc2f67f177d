"""Envoys as processes: started, asked over their admin port, killed and started again."""

import http.client
import json
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rolecall.lifeline import tied
from tests.mesh.envoy import ADMIN_PORT, Habits, Participant, config

ENVOY = Path(__file__).parents[2] / "build" / "mesh" / "envoy"
"""Where `make test-mesh` puts it."""
START_S = 60.0
ASK_S = 5.0


class Sidecar:
    """The Envoy of one participant."""

    def __init__(self, own: Participant, others: Mapping[str, Participant], run: str, folder: Path) -> None:
        self.own, self._others, self._run, self._folder = own, others, run, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, habits: Habits) -> None:
        """Starts it with these habits; `ready` waits until it takes calls."""
        path = self._folder / f"{self.own.name}.envoy.json"
        path.write_text(json.dumps(config(self.own, self._others, self._run, habits), indent=1))
        words = [str(ENVOY), "-c", str(path), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
        with (self._folder / f"{self.own.name}.envoy.log").open("ab") as log:
            self._process = subprocess.Popen(tied(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ready(self) -> None:
        """Returns once it takes calls."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            code = self._process.poll()
            assert code is None, f"the sidecar of {self.own.name} ended with {code}; see {self._folder}"
            assert time.monotonic() < deadline, f"the sidecar of {self.own.name} is not ready; see {self._folder}"
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self, habits: Habits) -> None:
        """Kills it, hung as it may be, and starts it again; returns once it takes calls."""
        self.kill()
        self.start(habits)
        self.ready()

    def freeze(self) -> None:
        """Stops it where it stands: its connections stay open and nothing moves on them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def set(self, values: Mapping[str, int | None]) -> None:
        """Sets keys of its runtime; None takes one back."""
        words = "&".join(f"{key}={'' if value is None else value}" for key, value in values.items())
        self._ask("POST", f"/runtime_modify?{words}")

    def count(self, ending: str) -> int:
        """The sum of the counters whose names end so."""
        lines = (line.split(": ") for line in self._ask("GET", "/stats").splitlines() if line.count(": ") == 1)
        return sum(int(value) for name, value in lines if name.endswith(ending) and value.isdigit())

    def _is_ready(self) -> bool:
        with suppress(OSError, AssertionError):
            return self._ask("GET", "/ready").strip() == "LIVE"
        return False

    def _ask(self, method: str, path: str) -> str:
        connection = http.client.HTTPConnection(self.own.here, ADMIN_PORT, timeout=ASK_S)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        assert answer.status == 200, f"{self.own.name}: {text}"
        return text
