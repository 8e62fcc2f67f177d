"""Trackers of a run's numbers and samples: JSONL always, TensorBoard, W&B, MLflow, and a tracker of the user's own.

Trackers are told, never asked: what is written to this machine is written at once (file_trackers.py), what goes to a
server behind a thread and a bounded queue (background_tracker.py), so that a run never waits for one and never ends by
one. The controller of a run and rank 0 of `rolecall sft` write here.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from rolecall.errors import ConfigError
from rolecall.plugins import load_plugin
from rolecall.settings import PluginSection, RunSettings, SftSettings, TrackersSection
from rolecall.trackers.background_tracker import BackgroundTracker
from rolecall.trackers.file_trackers import JsonlFile, JsonlTracker, TensorBoardTracker
from rolecall.trackers.mlflow import MlflowTracker
from rolecall.trackers.tracker import TrackedRun, Tracker
from rolecall.trackers.wandb import WandbTracker

__all__ = ["TrackedRun", "Tracker", "Trackers", "require"]


def require(section: TrackersSection) -> Iterator[str]:
    """A line for people per tracker that is not a file. ConfigError when a library or the user's function is
    missing.
    """
    for field, value, library in (
        ("wandb_project", section.wandb_project, "wandb"),
        ("mlflow_uri", section.mlflow_uri, "mlflow"),
    ):
        if value is None:
            continue
        if find_spec(library) is None:
            raise ConfigError(f"trackers.{field} needs the extra {library}: pip install 'rolecall[{library}]'")
        yield f"trackers.{field}: {library} is installed; a server that does not answer will not stop the run"
    if section.custom is not None:
        load_plugin(section.custom, "trackers.custom.function", "the run")
        yield f"trackers.custom.function: {section.custom.name} is found and takes its options"


class Trackers:
    """All configured trackers and the samples file."""

    def __init__(self, settings: RunSettings | SftSettings) -> None:
        """Opens them in the run directory, which exists. ConfigError as `require`."""
        run_dir, section = settings.run.dir, settings.trackers
        for _ in require(section):
            pass
        self._files: list[JsonlTracker | TensorBoardTracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
        if section.tensorboard:
            self._files.append(TensorBoardTracker(run_dir / "tensorboard"))
        self._samples = JsonlFile(run_dir / "samples.jsonl")
        self._remote: list[BackgroundTracker] = []
        if section.wandb_project is None and section.mlflow_uri is None and section.custom is None:
            return
        run = TrackedRun.of(settings)
        if section.wandb_project is not None:
            self._remote.append(BackgroundTracker("wandb", partial(WandbTracker, run, section.wandb_project)))
        if section.mlflow_uri is not None:
            self._remote.append(BackgroundTracker("mlflow", partial(MlflowTracker, run, section.mlflow_uri)))
        if section.custom is not None:
            self._remote.append(BackgroundTracker(section.custom.name, partial(_open_custom, section.custom, run)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gives a step's numbers to every tracker."""
        for tracker in [*self._files, *self._remote]:
            tracker.log(step, values)

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends to samples.jsonl, and shows them as tables elsewhere."""
        self._samples.append(samples)
        for tracker in self._remote:
            tracker.keep_samples(step, samples)

    def flush(self) -> None:
        """Closes all, the remote ones at the same time: within background_tracker.FLUSH_S."""
        for file in self._files:
            file.close()
        for tracker in self._remote:
            tracker.begin_to_flush()
        for tracker in self._remote:
            tracker.flush()


def _open_custom(section: PluginSection, run: TrackedRun) -> Tracker:
    tracker = load_plugin(section, "trackers.custom.function", "the run")(run, **section.options)
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"trackers.custom.function {section.name!r} returned {type(tracker).__name__}; return an object "
            "with log, keep_samples and close"
        )
    return tracker
