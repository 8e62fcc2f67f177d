"""A real Valkey for tests: fixture `store`, one server for the session and a run of its own for every test."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from pydantic import SecretStr

from rolecall.settings import StoreSection
from rolecall.store.connection import RETRY_S, Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import Claim, PromptQueue
from rolecall.store.rows import Rows
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import (
    CommittedGroup,
    EpisodeTokens,
    GroupTokens,
    Prompt,
    PromptGroup,
    RowRef,
    TrainBatch,
    TrajectoryMeta,
)
from rolecall.wire import Array

DIGEST = "d1"
"""What every version of these tests' weights digests to."""


def sample_group(
    gid: int, num_responses: int = 2, *, greedy_response: bool = False, environment: str = ""
) -> PromptGroup:
    """The smallest group to admit."""
    ids = np.arange(3, dtype="<i4").tobytes()
    prompt = Prompt(uid=f"prompt-{gid}", token_ids=ids, environment=environment)
    return PromptGroup(gid=gid, prompt=prompt, num_responses=num_responses, greedy_response=greedy_response)


class ForgetfulRedis(redis.Redis):
    """A client that loses the answers of some commands after the server has acted on them."""

    lose: int = 0
    """Answers still to lose."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if self.lose and args[0] in ("EVALSHA", "EVAL"):
            self.lose -= 1
            raise redis.ConnectionError("the answer was lost")
        return answer


@dataclass
class StoreUnderTest:
    """One run on a real server, with its controller's ledger locked and the moves that most tests make."""

    section: StoreSection
    run: str
    connection: Connection
    ledger: Ledger
    rows: Rows
    opened: list[Connection] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where its server is."""
        return self.section.url.get_secret_value() if self.section.url else ""

    def connect(self, retry_s: float = RETRY_S) -> Connection:
        """Another connection, closed at the end of the test."""
        self.opened.append(connect(self.section, retry_s=retry_s))
        return self.opened[-1]

    def replaced(self) -> int:
        """Another controller takes the run over; its ctl."""
        self.ledger.unlock()
        return Ledger(self.connection, self.run).lock(0.0)

    def admit(self, count: int, *, greedy_response: bool = False, environment: str = "") -> None:
        """Admits the next `count` groups; the cursor after group g is b"after g"."""
        first = self.ledger.position().next_gid
        for gid in range(first, first + count):
            group = sample_group(gid, greedy_response=greedy_response, environment=environment)
            self.ledger.admit(group, f"after {gid}".encode())

    def publish(self, version: int, step: int, *consumers: str) -> None:
        """Begins a publish and attests it to `consumers`."""
        self.ledger.begin_publish(version, step)
        self.ledger.attest(version, step, DIGEST, consumers)

    def worker(self, consumer: str) -> PromptQueue:
        """A worker's side, not attested."""
        return PromptQueue(self.connection, self.run, consumer)

    def attested(self, consumer: str) -> PromptQueue:
        """A worker's side, attested at version 0 of step 0."""
        self.publish(0, 0, consumer)
        return self.worker(consumer)

    def stage(self, claim: Claim, expiry_s: int = 60) -> CommittedGroup:
        """Writes the rows of `claim`, each of four tokens, two of them sampled, and names them."""
        num_responses = claim.group.num_responses
        refs = [
            self.rows.ref(f"{claim.group.gid}/{i}", claim.token, 4)
            for i in range(num_responses + claim.group.greedy_response)
        ]
        columns: list[dict[str, Array]] = [
            {"token_ids": np.arange(4, dtype=np.int32) + i, "response_mask": np.array([0, 0, 1, 1], np.uint8)}
            for i in range(len(refs))
        ]
        metas = [
            TrajectoryMeta(id=ref.id, gid=claim.group.gid, index=i, num_prompt_tokens=2) for i, ref in enumerate(refs)
        ]
        self.rows.stage_many(refs, columns, metas, expiry_s)
        tokens = EpisodeTokens(num_calls=len(refs), num_sampled=2 * len(refs), num_trained=2 * num_responses)
        if claim.group.greedy_response:
            tokens.masked["greedy"] = 2
        return CommittedGroup(
            gid=claim.group.gid,
            rows=refs[:num_responses],
            greedy_row=refs[-1] if claim.group.greedy_response else None,
            tokens=tokens,
        )

    def commit(self, queue: PromptQueue, claim: Claim, version: int = 0) -> CommittedGroup:
        """Stages, commits and persists what `claim` asked for."""
        group = self.stage(claim)
        assert queue.commit(claim, group, {(version, DIGEST)})
        self.rows.persist(rows_of(group))
        return group

    def committed(self, count: int) -> list[CommittedGroup]:
        """`count` groups, admitted and committed by worker "r.0", which is attested at version 0."""
        self.admit(count)
        queue = self.attested("r.0")
        return [self.commit(queue, claim) for claim in queue.claim(count)]

    def batch(self, step: int, groups: list[CommittedGroup], digest: str = "b1") -> TrainBatch:
        """A train batch of `groups`."""
        rows: list[RowRef] = [row for group in groups for row in group.rows]
        greedy_rows = [group.greedy_row for group in groups if group.HasField("greedy_row")]
        gids = [group.gid for group in groups]
        tokens = [GroupTokens(num_sampled=2 * len(group.rows), num_trained=len(group.rows)) for group in groups]
        return TrainBatch(step=step, digest=digest, rows=rows, gids=gids, greedy_rows=greedy_rows, tokens=tokens)

    def trained(self, count: int) -> TrainBatch:
        """`count` groups, committed, sealed and trained as step 0."""
        batch = self.batch(0, self.committed(count))
        self.ledger.seal(batch)
        self.ledger.commit_step(0, [])
        return batch

    def balance(self) -> tuple[int, int, int, int]:
        """admitted, trained, dropped, live; checked to balance, and against the lengths of the streams."""
        counts = self.ledger.counts()
        dropped = sum(counts.dropped.values())
        assert counts.admitted == counts.trained + dropped + counts.live
        assert counts.live == counts.queued + counts.generating + counts.committed
        return counts.admitted, counts.trained, dropped, counts.live


MakeStore = Callable[[str, str], StoreUnderTest]


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """One server for all tests of the session; its user may touch every run."""
    server = EmbeddedStore(tmp_path_factory.mktemp("store"), "*", 2**31)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def make_embedded_store(tmp_path: Path) -> Iterator[Callable[..., EmbeddedStore]]:
    """Makes embedded stores that are stopped at the end of the test; by default of run "test" in a directory of its
    own.
    """
    made: list[EmbeddedStore] = []

    def make(
        dir: Path | None = None, run: str = "test", max_bytes: int = 2**31, binary: str | None = None
    ) -> EmbeddedStore:
        made.append(EmbeddedStore(dir or tmp_path / f"store-{len(made)}", run, max_bytes, binary))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    """Opens run `run` of the server at `url`, as a controller that just locked it."""
    opened: list[Connection] = []

    def make(url: str, run: str) -> StoreUnderTest:
        section = StoreSection(url=SecretStr(url), max_bytes=2**20)
        connection = connect(section)
        opened.append(connection)
        ledger = Ledger(connection, run)
        ledger.lock(0.2)
        return StoreUnderTest(section, run, connection, ledger, Rows(connection, run, 2), opened)

    yield make
    for connection in opened:
        connection.close()


@pytest.fixture
def store(store_server: EmbeddedStore, make_store: MakeStore) -> StoreUnderTest:
    """A fresh run on the session's server."""
    return make_store(store_server.url, f"run-{uuid.uuid4().hex[:12]}")
