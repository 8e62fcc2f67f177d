"""MLflow, by its own library."""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.trackers.tracker import End, TrackedRun, tables_of

EXPERIMENT = "rolecall"
ID_TAG = "rolecall.run_id"
"""Tag of an MLflow run: the id of ours, by which it is found again after a restart."""
TABLES_TAG = "mlflow.loggedArtifacts"
"""Names the artifacts that MLflow's pages show as tables."""
MAX_BATCH = 1000
"""Metrics that MLflow takes in one call."""
MAX_NAME_CHARS = 250
STATUSES = {End.DONE: "FINISHED", End.FAILED: "FAILED", End.STOPPED: "KILLED"}
"""What becomes of RUNNING, in which a run stays that goes on."""


class MlflowTracker:
    """One MLflow run in the experiment "rolecall"."""

    def __init__(self, run: TrackedRun, uri: str) -> None:
        """Raises what the library raises."""
        import mlflow

        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT)
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags={ID_TAG: run.id}).info.run_id
        self._client.log_dict(self._run_id, dict(run.configuration), "configuration.json")
        self._tables: dict[str, str] = {}
        """Newest table by set."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(metric_name(name), value, now_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self._run_id, metrics[start : start + MAX_BATCH])

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for name, (columns, rows) in tables_of(samples).items():
            path = f"samples/{metric_name(name)}/step-{step:08d}.json"
            self._client.log_dict(self._run_id, {"columns": columns, "data": rows}, path)
            self._tables[name] = path
        self._client.set_tag(
            self._run_id, TABLES_TAG, json.dumps([{"path": path, "type": "table"} for path in self._tables.values()])
        )

    def end(self, how: End) -> None:
        if how in STATUSES:
            self._client.set_terminated(self._run_id, STATUSES[how])

    def close(self) -> None:
        """Nothing is buffered."""


def metric_name(name: str) -> str:
    """`name` as MLflow takes it: `eval/x/mean@1` becomes `eval/x/mean_1`. Another part of it that is refused gets a
    digest in the place of what it loses, so that two names stay two.

    Its names are paths, of letters, digits and `_-. :` between slashes.
    """
    taken = "/".join(map(_part, re.sub(r"@(?=\d+$)", "_", name).split("/")))
    return taken if len(taken) <= MAX_NAME_CHARS else f"{taken[: MAX_NAME_CHARS - 9]}-{_digest(name)}"


def _part(part: str) -> str:
    taken = re.sub(r"[^\w\-. :]", "_", part, flags=re.ASCII)
    return part if taken == part and part not in ("", ".", "..") else f"{taken.strip('.')}-{_digest(part)}"


def _digest(text: str) -> str:
    """8 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
