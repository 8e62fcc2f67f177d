"""Trackers that are files of the run's directory, written at once: metrics.jsonl (one line per step or evaluation),
samples.jsonl and event files.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rolecall.disk import append_lines
from rolecall.errors import RoleCallError
from rolecall.trackers.finite import or_null

logger = logging.getLogger(__name__)


class JsonlFile:
    """Whole lines for people. What the disk refuses is lost and counted; the run goes on, for nothing is decided by
    these files.
    """

    def __init__(self, path: Path) -> None:
        """DiskFullError or RoleCallError when not even an empty file can be made: then nothing has begun yet."""
        self._path = path
        self._num_lost = 0
        append_lines(path, [])

    def append(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Appends a line per object; one warning when that begins to fail, one when it works again."""
        try:
            append_lines(self._path, [json.dumps(or_null(each), ensure_ascii=False) for each in objects])
        except RoleCallError as error:
            if not self._num_lost:
                logger.warning("%s; the run goes on without these lines", error)
            self._num_lost += len(objects)
            return
        if self._num_lost:
            logger.warning("%s is written again; %d lines are missing", self._path, self._num_lost)
        self._num_lost = 0


class JsonlTracker:
    """metrics.jsonl: {"step", "time_s" since the start of this process, name: value...} per line; null for a value that
    is not finite.
    """

    def __init__(self, path: Path) -> None:
        self._file = JsonlFile(path)
        self._started = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append([{"step": step, "time_s": round(time.monotonic() - self._started, 4), **values}])

    def close(self) -> None:
        """Nothing is buffered."""


class TensorBoardTracker:
    """Event files, written without torch or tensorflow, each event at once: nothing is lost with a killed process, and
    a full disk is noticed here.
    """

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        path.mkdir(parents=True, exist_ok=True)
        self._event, self._summary, self._record_writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._path = path
        self._file: BinaryIO | None = None
        self._num_files = 0
        self._failing = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        try:
            self._write(self._open(), self._event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write to %s (%s); the run goes on without these numbers", self._path, error.strerror
                )
            self._failing = True
            self.close()  # what is half written ends this file; the next try begins another
        else:
            self._failing = False

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._num_files += 1
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{self._num_files}"
            self._file = (self._path / name).open("wb")
            self._write(self._file, self._event(wall_time=time.time(), file_version="brain.Event:2"))
        return self._file

    def _write(self, file: BinaryIO, event: Any) -> None:
        self._record_writer(file).write(event.SerializeToString())
        file.flush()
