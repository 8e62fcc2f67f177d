"""The run's checkpoints as the controller knows them: its own share of one, in the manifest
(rolecall/checkpoint/manifest.py), beside the trainers' files.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rolecall.checkpoint.manifest import Attempt, Committed, RunCheckpoints, StoredFile
from rolecall.checkpoint.storage import Storage


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
    """Prompts in flight, base64 of serialized Prompts: admitted again where the store's own memory of them is lost."""
    waiting: list[str] = field(default_factory=list)
    """Prompts of an older checkpoint that this lineage had yet to admit again, encoded alike: the store never knew
    them.
    """
    algorithm_state: str = ""
    """What the algorithm carries into the next step, encoded."""
    ctl: int = 0
    """Fencing number of the controller that made it."""


class Checkpoints:
    """The checkpoints of one run. Calls block."""

    def __init__(self, storage: Storage, num_kept: int) -> None:
        self._all = RunCheckpoints(storage, num_kept)

    def begin(self, step: int) -> Attempt:
        """RunCheckpoints.begin."""
        return self._all.begin(step)

    def commit(self, attempt: Attempt, files: Sequence[StoredFile], point: RunPoint) -> None:
        """RunCheckpoints.commit; `files` of the trainers."""
        self._all.commit(attempt, files, asdict(point))

    def discard(self, attempt: Attempt) -> None:
        """RunCheckpoints.discard."""
        self._all.discard(attempt)

    def discard_uncommitted(self) -> None:
        """RunCheckpoints.discard_uncommitted."""
        self._all.discard_uncommitted()

    def latest(self) -> tuple[Committed, RunPoint] | None:
        """The newest valid one. CheckpointMismatchError when its manifest was changed."""
        committed = self._all.latest()
        return None if committed is None else (committed, RunPoint(**committed.state))
