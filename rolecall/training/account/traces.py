"""Traces of what a process computes on its host and its device, in torch's Chrome format, gzipped."""

import gzip
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.autograd.profiler import profile

from rolecall.disk import writing
from rolecall.errors import DiskFullError, RoleCallError
from rolecall.training.account.operators import operator_times
from rolecall.v1.training_pb2 import RankTrace

_TAIL_BYTES = 64
_NUM_OPERATORS = 10
"""Operators that are named, the longest."""


class Tracer:
    """A profiler of one device, which records once, between start and stop on one thread, and never raises: `failure`
    says why there is nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self.failure = "no pass of the model was made"
        """Why there is no trace."""

    @property
    def is_recording(self) -> bool:
        """Whether it has begun, and may be stopped."""
        return self._profile is not None

    def start(self) -> None:
        """Begins to record."""
        # Not torch.profiler.profile, which imports torch's compiler at its first start: seconds, within a step.
        gpu = None if self._device.type == "cpu" else self._device.type
        started = profile(use_kineto=True, use_device=gpu, record_shapes=True)
        try:
            started.__enter__()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.failure = f"the profiler did not start: {error}"
        else:
            self._profile = started

    def stop(self) -> profile | None:
        """Ends the recording and returns it."""
        stopped, self._profile = self._profile, None
        if stopped is None:
            return None
        try:
            stopped.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self.failure = f"the profiler did not stop: {error}"
            return None
        return stopped


def write_trace(taken: profile, path: Path, device: torch.device) -> RankTrace:
    """Writes a trace whole or not at all; says where it is, or why it is not. Some 35 microseconds an event."""
    try:
        with writing("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as beside:
                plain, packed = Path(beside, path.stem), Path(beside, path.name)
                taken.export_chrome_trace(str(plain))  # type: ignore[no-untyped-call]
                _require_whole(plain, path)
                with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                    shutil.copyfileobj(source, target)
                packed.replace(path)
        times = operator_times(taken, device)
        num_bytes, total_s = path.stat().st_size, sum(operator.self_s for operator in times)
        return RankTrace(path=str(path), num_bytes=num_bytes, operators=times[:_NUM_OPERATORS], total_s=total_s)
    except RoleCallError as error:
        return RankTrace(failure=error.message)
    except Exception as error:  # of torch's exporter: other people's function
        return RankTrace(failure=f"{type(error).__name__}: {error}")


def _require_whole(plain: Path, path: Path) -> None:
    """DiskFullError for a file that the exporter, which tells only the log of a full disk, did not write to its end."""
    tail = b""
    if plain.exists():
        with plain.open("rb") as file:
            file.seek(max(0, plain.stat().st_size - _TAIL_BYTES))
            tail = file.read()
    if not tail.rstrip().endswith(b"}"):
        raise DiskFullError(f"{path} could not be written to its end; is there space on its disk?")
