"""Checkpoints of `rolecall sft`: the actor's share of a run's, so that `rolecall export` reads them, with the step,
the digest of the examples, the lengths of their images' files and what the fine-tuning is.

Written beside the steps, as a run's are; one at a time. All ranks make the same calls; rank 0 commits.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from rolecall.checkpoint.manifest import IDENTITY, Attempt, RunCheckpoints, StoredFile, folder_of, verify_pieces
from rolecall.checkpoint.storage import open_storage
from rolecall.data.sft_examples import TokenizedExamples
from rolecall.errors import CheckpointMismatchError, DiskFullError, StorageUnavailableError
from rolecall.identity import kept, run_id
from rolecall.settings import SftRunSection
from rolecall.training.engine import Snapshot
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.writers import Writers
from rolecall.training.state.checkpoint import read_index
from rolecall.training.step.rank_context import RankContext

logger = logging.getLogger(__name__)

ROLE = "actor"
"""The role whose share of a checkpoint SFT writes."""


class SftCheckpoints:
    """The checkpoints of SFT, on one rank."""

    def __init__(self, run: SftRunSection, context: RankContext, examples: TokenizedExamples) -> None:
        """A collective. `examples` are those that are trained on, whose digest must be the same where a checkpoint is
        restored. Settings are compared before ranks start (`rolecall/identity.py`).
        """
        self._storage = open_storage(run.checkpoints)
        self._checkpoints = RunCheckpoints(self._storage, run.keep_checkpoints, run_id(run.dir))
        self._context = context
        self._files = examples.image_files
        self._state = {
            "examples": examples.digest,
            "image_bytes": [file.num_bytes for file in self._files],
            IDENTITY: kept(run.dir),
        }
        self._writers = Writers(context.group)
        self._writing: Future[None] | None = None

    def restore(self) -> int:
        """Loads the newest; the steps it covers, 0 when there is none. CheckpointMismatchError."""
        group = self._context.group
        found = group.agree(self._checkpoints.latest)
        if found is None:
            return 0
        if found.state.get("examples") != self._state["examples"]:
            before = found.state.get("image_bytes", ())
            pairs = zip(self._files, before, strict=False)
            changed = [str(file.path) for file, num_bytes in pairs if file.num_bytes != num_bytes]
            raise CheckpointMismatchError(
                f"{found.storage.url} was made with other files of {len(changed)} images, the first {changed[0]}; put "
                "them back, or start anew"
                if changed
                else f"{found.storage.url} was made with examples of other tokens; resume with the same data, images, "
                "tokenizer and function of data.preprocess, or start anew"
            )
        storage, files = found.share(ROLE)
        mine = files[group.rank :: group.world_size]
        group.agree_on_pieces(verify_pieces(storage, mine), self._context.progressed)
        index = group.agree(lambda: read_index(storage))
        group.agree(lambda: self._context.state.load(storage, index))
        return found.step

    def save(self, step: int) -> None:
        """Takes the state of `step` and begins to write it, once the one before is written. What the storage refuses
        costs this checkpoint only.
        """
        try:
            self.wait_until_written()
        except (DiskFullError, StorageUnavailableError) as error:
            logger.warning("the last checkpoint was not written, training goes on: %s", error.message)
        group = self._context.group
        name = group.gather(self._checkpoints.begin(step).name.encode() if group.is_leader else b"")[0].decode()
        attempt = Attempt(step, self._storage.at(f"{folder_of(step)}/{name}"), name)
        snapshot = self._context.state.snapshot()
        self._writing = self._writers.begin(lambda writers: self._write(snapshot, attempt, writers))

    def wait_until_written(self) -> None:
        """Waits for the one in flight. DiskFullError, StorageUnavailableError."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()  # bounded: by COMMAND_TIMEOUT_S between ranks, and by the storage's own tries

    def _write(self, snapshot: Snapshot, attempt: Attempt, writers: CommandGroup) -> None:
        try:
            files = snapshot.write(attempt.storage.at(ROLE), writers, {})
            # together: at the next checkpoint every rank waits here for rank 0, and none in a step's group
            writers.agree(lambda: self._commit(attempt, files))
        except (DiskFullError, StorageUnavailableError):
            if self._context.group.is_leader:
                self._checkpoints.discard(attempt)  # no rank writes any more, and the next one needs the room
            raise

    def _commit(self, attempt: Attempt, files: Sequence[StoredFile]) -> None:
        if self._context.group.is_leader:
            named = [StoredFile(f"{ROLE}/{file.name}", file.num_bytes, file.checksum) for file in files]
            self._checkpoints.commit(attempt, named, self._state | {"step": attempt.step})
            logger.info("checkpoint of step %d: %.1f MB", attempt.step, sum(file.num_bytes for file in files) / 1e6)
