"""The recorder of the passes that one worker of an engine computes. No vLLM."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from rolecall.training.account.traces import Tracer, write_trace
from rolecall.training.serving.background import in_background
from rolecall.v1.training_pb2 import RankTrace

WRITE_TIMEOUT_S = 60.0
"""Longest wait for a trace to be written, beside which the engine goes on."""


class PassRecorder:
    """The recorder of a worker's passes: from the beginning of the next one to the beginning of the one after the last,
    so that sampling is in it. Begins and stops on the thread that computes them.
    """

    def __init__(self, execute: Callable[..., Any], num_passes: int, path: Path, device: torch.device) -> None:
        """`execute` is the worker's execute_model."""
        self._execute = execute
        self._num_passes = num_passes
        self._num_begun = 0
        self._path = path
        self._device = device
        self._tracer = Tracer(device)
        self._deadline = 0.0
        self._writer: Future[RankTrace] | None = None
        self._failure = ""

    def execute(self, scheduler_output: Any) -> Any:
        """Computes as the worker's own execute_model does."""
        if scheduler_output.total_num_scheduled_tokens and self._num_begun <= self._num_passes:
            if self._num_begun == 0:
                self._tracer.start()
            elif self._num_begun == self._num_passes:
                self._stop()
            self._num_begun += 1
        return self._execute(scheduler_output)

    def trace(self) -> RankTrace | None:
        """The trace once it is written, or why there is none; None before."""
        if self._writer is not None and self._writer.done():
            return self._writer.result()  # bounded: it is done
        if self._writer is not None and time.monotonic() > self._deadline:
            self._failure = f"{self._path} was still being written after {WRITE_TIMEOUT_S:.0f} s"
        return RankTrace(failure=self._failure) if self._failure else None

    def end(self) -> None:
        """Drops what it is recording."""
        self._tracer.stop()

    def _stop(self) -> None:
        taken = self._tracer.stop()
        if taken is None:
            self._failure = self._tracer.failure
            return
        self._deadline = time.monotonic() + WRITE_TIMEOUT_S
        self._writer = in_background(lambda: write_trace(taken, self._path, self._device), "trace")
