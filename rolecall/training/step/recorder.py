"""The recorder of a rank: what its host and its device do in a step, as a Chrome trace. Recorded are the last
microbatches of the step's first update and the optimizer's step: whatever the batch, a trace has a bounded size.

    recorder.begin(wanted=True)                     # before a step
    with recorder.update(len(microbatches)): ...    # around each of its updates, in rolecall/training/step/optimize.py
    trace = recorder.write(step)                    # after it

One thread, the device's. Nothing that fails here ends a step: the trace says why it is not there. A step that nobody
asked a trace of is not touched.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from rolecall.training.account.memory import Phase, PhaseMemory
from rolecall.training.account.traces import Tracer, write_trace
from rolecall.training.serving.background import in_background
from rolecall.training.serving.hooks import nothing
from rolecall.v1.training_pb2 import RankTrace

logger = logging.getLogger(__name__)

MAX_MICROBATCHES = 2
"""Microbatches in a trace: one is as the next, and each is some hundred thousand events of a large model, of 300 bytes
in memory and on disk before they are compressed.
"""
WRITE_TIMEOUT_S = 60.0
"""Longest wait for a trace to be written, for which the steps wait too: a disk that hangs costs the trace and not the
role.
"""
_POLL_S = 1.0


class StepRecorder:
    """A recorder that writes `<folder>/<role>-step<step>-rank<rank>.json.gz`."""

    def __init__(
        self,
        memory: PhaseMemory,
        *,
        role: str = "trainer",
        rank: int = 0,
        folder: Path | None = None,
        progressed: Callable[[], None] = nothing,
    ) -> None:
        """`memory` knows the phases by which microbatches are counted, and which the trace names. `folder` None:
        nothing can be written. `progressed` is called while a trace is written.
        """
        self._memory = memory
        self._role, self._rank, self._folder = role.replace("/", "."), rank, folder
        self._progressed = progressed
        self._wanted = False
        self._failure = ""
        self._profile: profile | None = None
        self.num_microbatches = 0
        """Microbatches of the trace."""

    def begin(self, *, wanted: bool) -> None:
        """A step begins, of which a trace is `wanted`, or none."""
        self._wanted, self._profile, self.num_microbatches = wanted, None, 0
        self._failure = "the step made no update"

    @contextmanager
    def update(self, num_microbatches: int) -> Iterator[None]:
        """Records the update inside, of `num_microbatches` on this rank, if it is the first of a step that is
        wanted.
        """
        if not self._wanted:
            yield
            return
        self._wanted = False
        self.num_microbatches = min(num_microbatches, MAX_MICROBATCHES)
        recording = _Recording(self._memory.device, num_microbatches - self.num_microbatches)
        self._memory.around = recording.around
        try:
            yield
        finally:
            self._memory.around = nullcontext
            self._profile, self._failure = recording.stop()

    def write(self, step: int) -> RankTrace:
        """Writes the trace of `step`, which was applied, and says where it is, or why it is not."""
        taken, self._profile = self._profile, None
        if taken is None or self._folder is None:
            trace = RankTrace(failure=self._failure or "there is no folder for it")
        else:
            trace = self._written(taken, self._folder / f"{self._role}-step{step}-rank{self._rank}.json.gz")
        if trace.failure:
            logger.warning("step %d has no trace of rank %d: %s", step, self._rank, trace.failure)
        return trace

    def _written(self, taken: profile, path: Path) -> RankTrace:
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        writer = in_background(lambda: write_trace(taken, path, self._memory.device), "trace")
        while True:
            try:
                return writer.result(timeout=_POLL_S)
            except TimeoutError:
                self._progressed()
                if time.monotonic() > deadline:
                    return RankTrace(failure=f"{path} was still being written after {WRITE_TIMEOUT_S:.0f} s")


class _Recording:
    """The profiler of one update, which begins with the pass after `num_passed` microbatches."""

    def __init__(self, device: torch.device, num_passed: int) -> None:
        self._num_passed = num_passed
        self._num_forward = 0
        self._tracer = Tracer(device)

    def around(self, phase: Phase) -> AbstractContextManager[object]:
        """Called as each phase begins: starts the profiler in time, and then names the phase in the trace."""
        if phase == "forward":
            if self._num_forward == self._num_passed:
                self._tracer.start()
            self._num_forward += 1
        return record_function(phase) if self._tracer.is_recording else nullcontext()

    def stop(self) -> tuple[profile | None, str]:
        """Stops the profiler; returns it with what it recorded, or says why it recorded nothing."""
        return self._tracer.stop(), self._tracer.failure
