"""The run's checkpoints as the controller knows them: its own share of one, in the manifest
(rolecall/checkpoint/manifest.py), beside the trainers' files.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rolecall.checkpoint.manifest import Attempt, Committed, RunCheckpoints, StoredFile
from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError, StoreRolledBackError
from rolecall.identity import kept
from rolecall.settings import RunSection
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.v1 import trajectory_pb2
from services.controller.durable.in_flight import encode_prompts, prompts_in_flight


@dataclass(frozen=True)
class RunPoint:
    """The controller's share: what the ledger held when all roles had applied `step` steps."""

    run: str
    lineage: int
    step: int
    policy_version: int
    """Highest version announced by then."""
    epoch: int
    """Last epoch of the weight channel."""
    next_gid: int
    trained: int
    """Groups trained."""
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    cursor: str
    """The data cursor, encoded."""
    untrained: list[str]
    """Prompts in flight, base64 of serialized Prompts with digests of their images: admitted again where the store's
    own memory of them is lost.
    """
    waiting: list[str] = field(default_factory=list)
    """Prompts of an older checkpoint that this lineage had yet to admit again, encoded alike: the store never knew
    them.
    """
    algorithm_state: str = ""
    """What the algorithm carries into the next step, encoded."""
    evaluated_step: int = -1
    """Steps applied at the last evaluation that was recorded; -1 before the first."""
    ctl: int = 0
    """Fencing number of the controller that made it."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What the run is (`rolecall/identity.py`)."""


def take_point(
    run: RunSection,
    step: int,
    policy_version: int,
    ledger: Ledger,
    rows: Rows,
    backlog_at: Callable[[int], Sequence[trajectory_pb2.Prompt]],
) -> RunPoint:
    """The controller's share of the checkpoint of `step`: the ledger at one instant and the prompts in flight then.

    Blocks. `backlog_at` gives what this lineage had yet to admit again when a gid was the next. StoreRolledBackError
    when the ledger stands at another step.
    """
    position = ledger.position()
    if position.step != step:
        raise StoreRolledBackError(
            f"the store stands at step {position.step} and the run at {step}: it was restored from an older copy; "
            "start the run again"
        )
    return RunPoint(
        run=run.name,
        lineage=position.lineage,
        step=step,
        policy_version=policy_version,
        epoch=position.epoch,
        next_gid=position.next_gid,
        trained=position.trained,
        dropped=dict(position.dropped),
        cursor=position.cursor.decode(),
        untrained=encode_prompts(prompts_in_flight(ledger, rows, position.next_gid)),
        waiting=encode_prompts(backlog_at(position.next_gid)),
        algorithm_state=position.algorithm_state.decode(),
        evaluated_step=position.evaluated_step,
        ctl=ledger.ctl,
        identity=kept(run.dir),
    )


class Checkpoints:
    """The checkpoints of one run. Calls block."""

    def __init__(self, storage: Storage, num_kept: int, run_id: str = "") -> None:
        """`run_id`: id of the run, where its directory keeps one (rolecall/identity.py)."""
        self._all = RunCheckpoints(storage, num_kept, run_id)

    def begin(self, step: int) -> Attempt:
        """Starts an attempt at the checkpoint of `step`."""
        return self._all.begin(step)

    def commit(self, attempt: Attempt, files: Sequence[StoredFile], point: RunPoint) -> None:
        """Makes `attempt` a checkpoint of the trainers' `files` and the controller's `point`. CheckpointMismatchError
        when another run keeps its checkpoints there too.
        """
        self._all.commit(attempt, files, asdict(point))

    def discard(self, attempt: Attempt) -> None:
        """Deletes the files of `attempt`, unless it became a checkpoint."""
        self._all.discard(attempt)

    def discard_uncommitted(self) -> None:
        """Deletes what no manifest names."""
        self._all.discard_uncommitted()

    def latest(self) -> tuple[Committed, RunPoint] | None:
        """The newest valid one. CheckpointMismatchError when its manifest was changed, it is another run's, or a newer
        release made it.
        """
        committed = self._all.latest()
        if committed is None:
            return None
        if unknown := committed.state.keys() - {each.name for each in fields(RunPoint)}:
            raise CheckpointMismatchError(
                f"{committed.storage.url} says {sorted(unknown)}, which this release does not know; go on with the one "
                "that made it"
            )
        return committed, RunPoint(**committed.state)
