"""Weights & Biases, by its own library."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.trackers.tracker import End, TrackedRun, tables_of


class WandbTracker:
    """One Weights & Biases run.

    Its horizontal axis is our step: what a run that went back to a checkpoint reports, and what comes late, is shown.
    """

    def __init__(self, run: TrackedRun, project: str) -> None:
        """Raises what the library raises: no key, no server."""
        import wandb

        self._table = wandb.Table
        # Nothing of this machine is sent: a command line may hold a store's password, a repository's address a token.
        own = wandb.Settings(console="off", silent=True, x_disable_meta=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.dir),
            config=dict(run.configuration),
            allow_val_change=True,
            settings=own,
        )
        self._run.define_metric("*", step_metric="step")
        self._exit_code = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        tables = {
            f"samples/{name}": self._table(columns=columns, data=rows)
            for name, (columns, rows) in tables_of(samples).items()
        }
        self._run.log({**tables, "step": step})

    def end(self, how: End) -> None:
        if how in (End.STOPPED, End.GOES_ON):
            self._run.mark_preempting()  # then it is shown as preempted, not as failed
        self._exit_code = int(how is not End.DONE)

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)
