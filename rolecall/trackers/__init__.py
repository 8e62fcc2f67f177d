"""Trackers of a run's numbers and samples: JSONL always, TensorBoard, W&B, MLflow, and a tracker of the user's own.

Trackers are told, never asked: what is written to this machine is written at once (file_trackers.py), what goes to a
server behind a thread and a bounded queue (background_tracker.py), so that a run never waits for one and never ends by
one. The controller of a run and rank 0 of `rolecall sft` write here.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.plugins import load_plugin
from rolecall.settings import PluginSection, RunSettings, SftSettings, TrackersSection
from rolecall.trackers.background_tracker import BackgroundTracker
from rolecall.trackers.file_trackers import JsonlFile, JsonlTracker, TensorBoardTracker
from rolecall.trackers.mlflow import MlflowTracker
from rolecall.trackers.tracker import End, TrackedRun, Tracker, note_end
from rolecall.trackers.wandb import WandbTracker

__all__ = ["End", "TrackedRun", "Tracker", "Trackers", "require", "show_failure"]


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


SAMPLES_AT_A_TIME = 64
"""Samples that are in memory and written at once, of however many come."""
MAX_SHOWN = 64
"""Samples of a set that a table elsewhere gets at a time: what people read, and a queue of notes holds."""


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
        self._remote = _open_remote(settings)
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gives a step's numbers to every tracker."""
        for tracker in [*self._files, *self._remote]:
            tracker.log(step, values)

    def keep_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends to samples.jsonl, some at a time as they come, and shows the first MAX_SHOWN of each set as tables
        elsewhere.
        """
        coming, shown = iter(samples), defaultdict[str, list[Mapping[str, Any]]](list)
        while some := list(islice(coming, SAMPLES_AT_A_TIME)):
            self._samples.append(some)
            for sample in some:
                if len(kept := shown[sample.get("set", "samples")]) < MAX_SHOWN:
                    kept.append(sample)
        for tracker in self._remote:
            tracker.keep_samples(step, [sample for kept in shown.values() for sample in kept])

    def flush(self, end: End) -> None:
        """Closes all, the remote ones at the same time: within background_tracker.FLUSH_S. They show `end`, how the run
        stands.
        """
        for file in self._files:
            file.close()
        _flush(self._remote, end, self._run_dir)


def show_failure(settings: RunSettings | SftSettings) -> None:
    """Shows in the remote trackers that the run failed, in the place of a process that ended before it could. Returns
    as `Trackers.flush` does. ConfigError as `require`.
    """
    for _ in require(settings.trackers):
        pass
    _flush(_open_remote(settings), End.FAILED, settings.run.dir)


def _open_remote(settings: RunSettings | SftSettings) -> list[BackgroundTracker]:
    section, remote = settings.trackers, list[BackgroundTracker]()
    if section.wandb_project is None and section.mlflow_uri is None and section.custom is None:
        return remote
    run = TrackedRun.of(settings)
    if section.wandb_project is not None:
        remote.append(BackgroundTracker("wandb", partial(WandbTracker, run, section.wandb_project)))
    if section.mlflow_uri is not None:
        remote.append(BackgroundTracker("mlflow", partial(MlflowTracker, run, section.mlflow_uri)))
    if section.custom is not None:
        remote.append(BackgroundTracker(section.custom.name, partial(_open_custom, section.custom, run)))
    note_end(settings.run.dir, None)
    return remote


def _flush(trackers: list[BackgroundTracker], end: End, run_dir: Path) -> None:
    for tracker in trackers:
        tracker.begin_to_flush(end)
    for tracker in trackers:
        tracker.flush()
    if trackers:
        note_end(run_dir, end)


def _open_custom(section: PluginSection, run: TrackedRun) -> Tracker:
    tracker = load_plugin(section, "trackers.custom.function", "the run")(run, **section.options)
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"trackers.custom.function {section.name!r} returned {type(tracker).__name__}; return an object "
            "with log, keep_samples and close"
        )
    return tracker
