"""The work that store.py measures, phase by phase, and our way through the store; the raw one is store_raw.py.

Both make the same round trips in the same order and carry the same bytes of prompts, columns and messages; every round
trip that writes costs an fsync either way.

A *desk* is the controller's side, one a run; a *share* is the part of one worker thread with groups in hand: it plays
the rollout that samples them, the controller that reads and writes their columns and the trainer that reads the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import SecretStr

from rolecall.settings import StoreSection
from rolecall.store.connection import Connection, connect
from rolecall.store.ledger import Admission, Ledger
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import trajectory_pb2 as pb
from rolecall.wire import Array

PROMPT_TOKENS = 256
TEXT_BYTES_PER_TOKEN = 4
NUM_RESPONSES = 8
CLAIM_COUNT = 4
"""Groups a claim asks for."""
EXPIRY_S = 600
DIGEST = "d" * 32
SCORED = ["token_ids", "response_mask"]
"""Read of every group as it lands, with meta."""
PREPARED = ["token_ids", "response_mask", "rollout_logprobs"]
"""Read of a whole batch before it is sealed."""
TRAINED = ["token_ids", "loss_mask", "advantages", "rollout_logprobs", "policy_versions"]
"""Read of a whole batch by the trainer."""
_BYTES_PER_TOKEN = {
    "token_ids": 4,
    "response_mask": 1,
    "rollout_logprobs": 4,
    "policy_versions": 4,
    "loss_mask": 1,
    "advantages": 4,
}
PHASES = ("admit", "claim", "stage", "commit", "read", "write", "train", "ack")
DESK_PHASES = ("admit", "ack")


@dataclass(frozen=True)
class Shape:
    """The shape of what is sent through the store."""

    num_tokens: int
    """Tokens of a trajectory, prompt included."""
    num_shards: int
    num_groups: int
    """Groups of a round; all of it is one batch."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories of a round."""
        return self.num_groups * NUM_RESPONSES

    def megabytes(self, phase: str) -> float:
        """Columns and text of a phase, in a round."""
        columns = {
            "read": SCORED + PREPARED,
            "write": ["loss_mask", "advantages"],
            "train": TRAINED,
            "stage": SAMPLED_COLUMNS,
        }.get(phase, ())
        per_token = sum(_BYTES_PER_TOKEN[name] for name in columns) + (
            TEXT_BYTES_PER_TOKEN if phase in ("read", "stage") else 0
        )
        return self.num_trajectories * self.num_tokens * per_token / 1e6


class Payload:
    """The content of every trajectory: made once, of bits that do not compress."""

    def __init__(self, num_tokens: int) -> None:
        draw = np.random.default_rng(0)
        self.prompt = pb.Prompt(
            uid="prompt",
            token_ids=draw.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32).tobytes(),
            ground_truth="42",
        )
        mask = (np.arange(num_tokens) >= PROMPT_TOKENS).astype(np.uint8)
        self.sampled: dict[str, Array] = {
            "token_ids": draw.integers(0, 150_000, num_tokens, dtype=np.int32),
            "response_mask": mask,
            "rollout_logprobs": -draw.random(num_tokens, dtype=np.float32),
            "policy_versions": np.zeros(num_tokens, np.int32),
        }
        self.reward: dict[str, Array] = {"reward": np.ones(1, np.float32)}
        self.trained: dict[str, Array] = {
            "loss_mask": mask,
            "advantages": draw.standard_normal(num_tokens, dtype=np.float32),
        }
        text = draw.integers(97, 123, num_tokens * TEXT_BYTES_PER_TOKEN, dtype=np.uint8).tobytes().decode()
        self.meta = pb.TrajectoryMeta(
            id="0/0", num_prompt_tokens=PROMPT_TOKENS, response_text=text, tokenizer_digest=DIGEST
        )

    def group(self, gid: int) -> pb.PromptGroup:
        """One to admit."""
        return pb.PromptGroup(gid=gid, prompt=self.prompt, num_responses=NUM_RESPONSES)


class Desk(Protocol):
    """The controller's side of one run."""

    def admit(self) -> None:
        """Admits a round's groups."""

    def landed(self) -> None:
        """Reads what was committed."""

    def ack(self) -> None:
        """Seals the batch, counts it as trained, deletes its rows."""


class Share(Protocol):
    """One worker thread's share of a round."""

    def claim(self, num_groups: int) -> None:
        """Claims exactly so many."""

    def stage(self) -> None:
        """Writes the rows of what was claimed."""

    def commit(self) -> None:
        """Makes the groups exist, and keeps their rows."""

    def read(self) -> None:
        """Reads each group as it is scored, and the batch as it is prepared."""

    def write(self) -> None:
        """Writes each group's reward and the batch's columns."""

    def train(self) -> None:
        """Reads the batch as it is trained."""


class OurDesk:
    """The controller's side through our Ledger."""

    def __init__(self, url: str, run: str, shape: Shape, consumers: Sequence[str], history: Path) -> None:
        self._connection = connect(StoreSection(url=SecretStr(url)))
        self._ledger = Ledger(self._connection, run)
        self._rows = Rows(self._connection, run, shape.num_shards)
        self._shape, self._payload, self._history = shape, Payload(shape.num_tokens), history
        self._next_gid = self._step = 0
        self._position = "0"
        self._landed: list[pb.CommittedGroup] = []
        self._ledger.lock(1.0)
        self._ledger.begin_publish(0, 0)
        self._ledger.attest(0, 0, DIGEST, consumers)

    def admit(self) -> None:
        """Admits a round's groups."""
        gids = range(self._next_gid, self._next_gid + self._shape.num_groups)
        self._ledger.admit_all([Admission(self._payload.group(gid), b"[0, 0, 0]") for gid in gids])
        self._next_gid = gids.stop

    def landed(self) -> None:
        """Reads what was committed."""
        self._landed = []
        while entries := self._ledger.read_committed(self._position, 256, 0.0):
            self._position = entries[-1][0]
            self._landed += [group for _, group in entries]
        assert len(self._landed) == self._shape.num_groups

    def ack(self) -> None:
        """Seals the batch, counts it as trained, deletes its rows."""
        refs = [ref for group in self._landed for ref in group.rows]
        self._ledger.seal(
            pb.TrainBatch(step=self._step, rows=refs, gids=[group.gid for group in self._landed], digest=DIGEST)
        )
        self._ledger.commit_step(self._step, [])
        self._step += 1
        self._ledger.sweep(self._rows, self._step)
        self._ledger.drain("history", self._history)


class OurShare:
    """One worker thread's share through our PromptQueue and Rows."""

    def __init__(self, connection: Connection, run: str, shape: Shape, consumer: str, payload: Payload) -> None:
        self._queue = PromptQueue(connection, run, consumer)
        self._rows = Rows(connection, run, shape.num_shards)
        self._shape, self._payload = shape, payload
        self._claims: list[Claim] = []
        self._groups: list[list[pb.RowRef]] = []

    def claim(self, num_groups: int) -> None:
        """Claims exactly so many."""
        self._claims = []
        while len(self._claims) < num_groups:
            self._claims += self._queue.claim(min(CLAIM_COUNT, num_groups - len(self._claims)))

    def stage(self) -> None:
        """Writes the rows of what was claimed."""
        self._groups = []
        for claim in self._claims:
            refs = [
                self._rows.ref(f"{claim.group.gid}/{i}", claim.token, self._shape.num_tokens)
                for i in range(NUM_RESPONSES)
            ]
            self._rows.stage_many(
                refs, [self._payload.sampled] * NUM_RESPONSES, [self._payload.meta] * NUM_RESPONSES, EXPIRY_S
            )
            self._groups.append(refs)

    def commit(self) -> None:
        """Makes the groups exist, and keeps their rows."""
        for claim, refs in zip(self._claims, self._groups, strict=True):
            assert self._queue.commit(claim, pb.CommittedGroup(gid=claim.group.gid, rows=refs), {(0, DIGEST)})
            self._rows.persist(refs)

    def read(self) -> None:
        """Reads each group as it is scored, and the batch as it is prepared."""
        for refs in self._groups:
            self._rows.persist(refs)
            self._rows.read_with_meta(refs, SCORED)
        self._rows.read(self._batch, PREPARED)

    def write(self) -> None:
        """Writes each group's reward and the batch's columns."""
        for refs in self._groups:
            self._rows.put(refs, [self._payload.reward] * NUM_RESPONSES)
        self._rows.put(self._batch, [self._payload.trained] * len(self._batch))

    def train(self) -> None:
        """Reads the batch as it is trained."""
        self._rows.read(self._batch, TRAINED)

    @property
    def _batch(self) -> list[pb.RowRef]:
        return [ref for refs in self._groups for ref in refs]
