"""Where a run's numbers and samples go: JSONL always, TensorBoard, Weights & Biases and MLflow by their own libraries.

Owns the files metrics.jsonl (one line per step or evaluation) and samples.jsonl (trajectories for people to read). Trackers are told, never asked.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of `step` by name. The same step may come twice (training, then evaluation) with different names."""

    def close(self) -> None:
        """Writes what is buffered."""


class JsonlTracker:
    """metrics.jsonl: {"step", "time_s" since the start of this process, name: value...} per line, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._started = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "time_s": round(time.monotonic() - self._started, 4), **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files, written without torch or tensorflow."""

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(path))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One Weights & Biases run, named like ours; resuming continues it."""

    def __init__(self, settings: RunSettings, project: str) -> None:
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

    def __init__(self, settings: RunSettings, uri: str) -> None:
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

    def __init__(self, settings: RunSettings) -> None:
        """Opens them in the run directory, which exists. ConfigError when a tracker's library is missing."""
        run_dir, trackers = settings.run.dir, settings.trackers
        self._trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
        if trackers.tensorboard:
            self._trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
        if trackers.wandb_project is not None:
            self._trackers.append(WandbTracker(settings, trackers.wandb_project))
        if trackers.mlflow_uri is not None:
            self._trackers.append(MlflowTracker(settings, trackers.mlflow_uri))
        self._samples: TextIO = (run_dir / "samples.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """To every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def keep_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends to samples.jsonl."""
        for sample in samples:
            self._samples.write(json.dumps(sample, ensure_ascii=False) + "\n")
        self._samples.flush()

    def close(self) -> None:
        """Closes all."""
        for tracker in self._trackers:
            tracker.close()
        self._samples.close()
