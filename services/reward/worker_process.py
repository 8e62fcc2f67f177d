"""One scorer's worker process seen from the service: start, send, time, kill. Blocking; used by one thread."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from rolecall.errors import ConfigError, DeadlineError, RoleCallError, WorkerLostError
from rolecall.v1 import reward_pb2
from services.reward.frames import FrameBuffer, WorkerReady, frame

READ_BYTES = 1 << 16
ROOT = Path(__file__).resolve().parents[2]
"""Where `services` and `rolecall` are imported from: workers run the service's own code, whatever folder the service
was started in.
"""


class CpuSpentError(WorkerLostError):
    """The worker took the CPU time that a scorer allows an item, and was ended by the kernel for it."""


class WorkerProcess:
    """A `python -m services.reward.worker` in a process group and an environment of its own."""

    def __init__(self, setup: bytes, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "services.reward.worker", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            cwd=ROOT,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._is_over = False
        self._buffer = FrameBuffer()
        self._setup = setup
        self.awaited: frozenset[str] = frozenset()
        """Components that await several items at the same time; known once it is ready."""

    def wait_ready(self, timeout_s: float) -> RoleCallError | None:
        """None when the worker is ready; else why it is not, and it is killed: ConfigError when it said so itself, else
        it may be tried again.
        """
        try:
            for payload in self._exchange(frame(self._setup), deque([timeout_s])):
                ready = WorkerReady.model_validate_json(payload)
                if ready.problem:
                    self.kill()
                    return ConfigError(ready.problem)
                self.awaited = frozenset(ready.awaited)
        except (DeadlineError, WorkerLostError) as error:
            return error
        return None

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def score(self, tasks: Sequence[tuple[int, bytes, float]]) -> Iterator[Sequence[reward_pb2.ScoreResult]]:
        """Results of (component, serialized ScoreRequest, timeout in seconds), in order, as they come. DeadlineError,
        CpuSpentError and WorkerLostError speak of the next one.
        """
        frames = b"".join(frame(payload, component) for component, payload, _ in tasks)
        for payload in self._exchange(frames, deque(timeout_s for _, _, timeout_s in tasks)):
            try:
                results = reward_pb2.ScoreResponse.FromString(payload).results
            except DecodeError as error:
                raise self._died("it answered nonsense") from error
            if not results or any(result.WhichOneof("outcome") is None for result in results):
                raise self._died("it answered nothing")
            yield results

    def interrupt(self) -> None:
        """Sends SIGKILL to the process and what it started; the thread that uses this object then sees it end. The one
        call for other threads.
        """
        if not self._is_over:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and left nothing that it started
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process and what it started, reaps it and closes the pipes. Safe to repeat."""
        self.interrupt()
        self._is_over = True  # whose number another process may get
        self._process.wait()  # bounded: SIGKILL has been sent to it
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, data: bytes, timeouts_s: deque[float]) -> Iterator[bytes]:
        """Sends `data` and yields one answer per timeout, each counted from the answer before. Takes turns at reading
        and writing: full pipes stop nobody.
        """
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        poller.register(self._input, select.POLLOUT)
        unsent = memoryview(data)
        deadline = time.monotonic() + timeouts_s[0]
        while timeouts_s:
            events = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
                self.kill()
                raise DeadlineError(f"it gave no answer within {timeouts_s[0]:g} s")
            if self._output in events:
                for payload in self._receive():
                    timeouts_s.popleft()
                    yield payload
                    deadline = time.monotonic() + (timeouts_s[0] if timeouts_s else 0.0)
            elif self._input in events:
                unsent = self._send(unsent)
                if not unsent:
                    poller.unregister(self._input)

    def _receive(self) -> list[bytes]:
        data = os.read(self._output, READ_BYTES)
        if not data:
            raise self._died("it closed its output")
        try:
            return [payload for _, payload in self._buffer.feed(data)]
        except ValueError as error:
            raise self._died(str(error)) from error

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._input, unsent) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError as error:
            raise self._died("it closed its input") from error

    def _died(self, why: str) -> WorkerLostError:
        self.kill()
        lost = CpuSpentError if self._process.returncode == -signal.SIGPROF else WorkerLostError
        return lost(f"{why}, exit status {self._process.returncode}")
