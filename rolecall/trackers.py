"""Where a run's numbers and samples go: JSONL always, TensorBoard, Weights & Biases and MLflow by their own libraries.

Owns the files metrics.jsonl (one line per step or evaluation) and samples.jsonl (trajectories for people to read). Trackers are told, never asked. The
controller of a run and rank 0 of a warm start write here.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rolecall.disk import append_lines
from rolecall.errors import ConfigError, RoleCallError
from rolecall.settings import RunSettings, SftSettings

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of `step` by name. The same step may come twice (training, then evaluation) with different names."""

    def close(self) -> None:
        """Writes what is buffered."""


class JsonlFile:
    """Whole lines for people. What the disk refuses is lost and counted; the run goes on, for nothing is decided by these files."""

    def __init__(self, path: Path) -> None:
        """DiskFullError or RoleCallError when not even an empty file can be made: then nothing has begun yet."""
        self._path = path
        self._num_lost = 0
        append_lines(path, [])

    def append(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Appends a line per object; one warning when that begins to fail, one when it works again."""
        try:
            append_lines(self._path, [json.dumps(each, ensure_ascii=False) for each in objects])
        except RoleCallError as error:
            if not self._num_lost:
                logger.warning("%s; the run goes on without these lines", error)
            self._num_lost += len(objects)
            return
        if self._num_lost:
            logger.warning("%s is written again; %d lines are missing", self._path, self._num_lost)
        self._num_lost = 0


class JsonlTracker:
    """metrics.jsonl: {"step", "time_s" since the start of this process, name: value...} per line."""

    def __init__(self, path: Path) -> None:
        self._file = JsonlFile(path)
        self._started = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append([{"step": step, "time_s": round(time.monotonic() - self._started, 4), **values}])

    def close(self) -> None:
        """Nothing is buffered."""


class TensorBoardTracker:
    """Event files, written without torch or tensorflow, each event at once: nothing is lost with a killed process, and a full disk is noticed here."""

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
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        try:
            self._write(self._open(), self._event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:
            if not self._failing:
                logger.warning("cannot write to %s (%s); the run goes on without these numbers", self._path, error.strerror)
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


class WandbTracker:
    """One Weights & Biases run, named like ours; resuming continues it."""

    def __init__(self, settings: RunSettings | SftSettings, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("trackers.wandb_project needs the extra wandb: pip install 'rolecall[wandb]'") from error
        name = settings.run.name
        self._run = wandb.init(project=project, name=name, id=name, resume="allow", dir=settings.run.dir, config=settings.model_dump(mode="json"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """One MLflow run in the experiment "rolecall"."""

    def __init__(self, settings: RunSettings | SftSettings, uri: str) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError("trackers.mlflow_uri needs the extra mlflow: pip install 'rolecall[mlflow]'") from error
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("rolecall")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("rolecall")
        self._run_id = self._client.create_run(experiment_id, run_name=settings.run.name).info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackers:
    """All configured trackers and the samples file."""

    def __init__(self, settings: RunSettings | SftSettings) -> None:
        """Opens them in the run directory, which exists. ConfigError when a tracker's library is missing."""
        run_dir, trackers = settings.run.dir, settings.trackers
        self._trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
        if trackers.tensorboard:
            self._trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
        if trackers.wandb_project is not None:
            self._trackers.append(WandbTracker(settings, trackers.wandb_project))
        if trackers.mlflow_uri is not None:
            self._trackers.append(MlflowTracker(settings, trackers.mlflow_uri))
        self._samples = JsonlFile(run_dir / "samples.jsonl")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """To every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def keep_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends to samples.jsonl."""
        self._samples.append(samples)

    def close(self) -> None:
        """Closes all."""
        for tracker in self._trackers:
            tracker.close()
