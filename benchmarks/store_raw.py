"""The way through the store that ours is compared with: raw redis-py with streams and hashes.

It has the usual recipe (XREADGROUP, HSET, XADD + XACK + XDEL, HMGET, UNLINK) in plain pipelines and none of our
promises: no fence, no attestation, no write-once columns, no states, no history, no schema.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import redis

from benchmarks.store_ours import (
    CLAIM_COUNT,
    DIGEST,
    EXPIRY_S,
    NUM_RESPONSES,
    PREPARED,
    SCORED,
    TRAINED,
    Payload,
    Shape,
)
from rolecall.store.clients import MAX_CONNECTIONS
from rolecall.store.connection import SOCKET_TIMEOUT_S
from rolecall.store.rows import CHUNK_BYTES, CHUNK_ROWS
from rolecall.trajectory import encode_column
from rolecall.v1 import trajectory_pb2 as pb

Command: TypeAlias = "tuple[str | bytes | int, ...]"


class RawDesk:
    """The controller's side through plain commands."""

    def __init__(self, url: str, run: str, shape: Shape) -> None:
        self._client = raw_client(url)
        self._keys = RawKeys(run, shape.num_shards)
        self._shape, self._payload = shape, Payload(shape.num_tokens)
        self._next_gid = self._step = 0
        self._position = "0"
        self._landed: list[tuple[bytes, pb.CommittedGroup]] = []
        self._client.xgroup_create(self._keys.prompts, "rollout", "0", mkstream=True)

    def admit(self) -> None:
        """Admits the first alone and the rest together, like ours."""
        gids = range(self._next_gid, self._next_gid + self._shape.num_groups)
        self._next_gid = gids.stop
        for part in (gids[:1], gids[1:]):
            together(
                self._client,
                [
                    ("XADD", self._keys.prompts, "*", "gid", gid, "group", self._payload.group(gid).SerializeToString())
                    for gid in part
                ],
            )

    def landed(self) -> None:
        """Reads what was committed."""
        self._landed = []
        while reply := send(self._client, "XREAD", "COUNT", 256, "STREAMS", self._keys.trajectories, self._position):
            for entry, fields in reply[0][1]:
                self._position = entry
                self._landed.append((entry, pb.CommittedGroup.FromString(fields[b"group"])))
        assert len(self._landed) == self._shape.num_groups

    def ack(self) -> None:
        """Seals, counts, notes the garbage, deletes it, forgets it."""
        refs = [ref for _, group in self._landed for ref in group.rows]
        batch = pb.TrainBatch(step=self._step, rows=refs, gids=[group.gid for _, group in self._landed], digest=DIGEST)
        key = self._keys.batch(self._step)
        send(self._client, "HSET", key, "group", batch.SerializeToString(), "digest", DIGEST)
        together(
            self._client,
            [("XDEL", self._keys.trajectories, *(entry for entry, _ in self._landed)), ("HSET", key, "trained", 1)],
        )
        rows = pb.TrainBatch.FromString(send(self._client, "HGET", key, "group")).rows
        for start in range(0, len(rows), CHUNK_ROWS):
            together(self._client, [("UNLINK", self._keys.row(ref)) for ref in rows[start : start + CHUNK_ROWS]])
        send(self._client, "DEL", key)
        self._step += 1


class RawShare:
    """One worker thread's share through plain commands."""

    def __init__(self, client: redis.Redis, run: str, shape: Shape, consumer: str, payload: Payload) -> None:
        self._client, self._keys, self._consumer = client, RawKeys(run, shape.num_shards), consumer
        self._shape = shape
        self._sampled = {
            **{name: encode_column(name, array, shape.num_tokens) for name, array in payload.sampled.items()},
            "meta": payload.meta.SerializeToString(),
        }
        self._reward = {name: encode_column(name, array, shape.num_tokens) for name, array in payload.reward.items()}
        self._trained = {name: encode_column(name, array, shape.num_tokens) for name, array in payload.trained.items()}
        self._claims: list[tuple[bytes, int]] = []
        self._groups: list[list[pb.RowRef]] = []

    def claim(self, num_groups: int) -> None:
        """Claims exactly so many."""
        self._claims = []
        while len(self._claims) < num_groups:
            count = min(CLAIM_COUNT, num_groups - len(self._claims))
            reply = send(
                self._client,
                "XREADGROUP",
                "GROUP",
                "rollout",
                self._consumer,
                "COUNT",
                count,
                "STREAMS",
                self._keys.prompts,
                ">",
            )
            self._claims += [(entry, pb.PromptGroup.FromString(fields[b"group"]).gid) for entry, fields in reply[0][1]]

    def stage(self) -> None:
        """Writes the rows of what was claimed."""
        self._groups = []
        for _, gid in self._claims:
            refs = [self._keys.ref(gid, i, self._consumer, self._shape.num_tokens) for i in range(NUM_RESPONSES)]
            self._write(refs, self._sampled, expire=True)
            self._groups.append(refs)

    def commit(self) -> None:
        """Makes the groups exist, and keeps their rows."""
        for (entry, gid), refs in zip(self._claims, self._groups, strict=True):
            group = pb.CommittedGroup(gid=gid, rows=refs).SerializeToString()
            commit = ("XADD", self._keys.trajectories, "*", "gid", gid, "group", group)
            together(
                self._client,
                [commit, ("XACK", self._keys.prompts, "rollout", entry), ("XDEL", self._keys.prompts, entry)],
            )
            self._persist(refs)

    def read(self) -> None:
        """Reads each group as it is scored, and the batch as it is prepared."""
        for refs in self._groups:
            self._persist(refs)
            self._read(refs, ["meta", *SCORED])
        self._read(self._batch, PREPARED)

    def write(self) -> None:
        """Writes each group's reward and the batch's columns."""
        for refs in self._groups:
            self._write(refs, self._reward)
        self._write(self._batch, self._trained)

    def train(self) -> None:
        """Reads the batch as it is trained."""
        self._read(self._batch, TRAINED)

    @property
    def _batch(self) -> list[pb.RowRef]:
        return [ref for refs in self._groups for ref in refs]

    def _persist(self, refs: Sequence[pb.RowRef]) -> None:
        together(self._client, [("PERSIST", self._keys.row(ref)) for ref in refs])

    def _read(self, refs: Sequence[pb.RowRef], names: Sequence[str]) -> list[Any]:
        rows: list[Any] = []
        for chunk in chunks(refs, 32 * self._shape.num_tokens):
            rows += together(self._client, [("HMGET", self._keys.row(ref), *names) for ref in chunk])
        return rows

    def _write(self, refs: Sequence[pb.RowRef], columns: dict[str, bytes], *, expire: bool = False) -> None:
        """A call a shard and chunk, as ours."""
        fields = [item for pair in columns.items() for item in pair]
        by_shard: dict[int, list[pb.RowRef]] = {}
        for ref in refs:
            by_shard.setdefault(ref.shard, []).append(ref)
        for rows in by_shard.values():
            for chunk in chunks(rows, sum(map(len, columns.values()))):
                commands: list[Command] = [("HSET", self._keys.row(ref), *fields) for ref in chunk]
                commands += [("EXPIRE", self._keys.row(ref), EXPIRY_S) for ref in chunk] if expire else []
                together(self._client, commands)


@dataclass(frozen=True)
class RawKeys:
    """Keys of the same lengths as ours."""

    run: str
    num_shards: int

    @property
    def prompts(self) -> str:
        """Stream of work."""
        return f"{{rl:{self.run}}}:prompts"

    @property
    def trajectories(self) -> str:
        """Stream of what was committed."""
        return f"{{rl:{self.run}}}:trajectories"

    def batch(self, step: int) -> str:
        """Hash of a batch."""
        return f"{{rl:{self.run}}}:batch:{step}"

    def row(self, ref: pb.RowRef) -> str:
        """Hash of a trajectory."""
        return f"{{rl:{self.run}:{ref.shard}}}:row:{ref.id}:{ref.token}"

    def ref(self, gid: int, index: int, consumer: str, num_tokens: int) -> pb.RowRef:
        """Names a row as ours are named."""
        return pb.RowRef(
            id=f"{gid}/{index}",
            shard=zlib.crc32(str(gid).encode()) % self.num_shards,
            token=f"{consumer}-1",
            num_tokens=num_tokens,
        )


def raw_client(url: str) -> redis.Redis:
    """The client that ours is made of."""
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, timeout=SOCKET_TIMEOUT_S, socket_timeout=SOCKET_TIMEOUT_S, protocol=2
    )
    return redis.Redis.from_pool(pool)


def send(client: redis.Redis, *command: str | bytes | int) -> Any:
    """One command, one round trip."""
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


def together(client: redis.Redis, commands: Iterable[Command]) -> list[Any]:
    """A pipeline: one round trip."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
    return pipeline.execute()


def chunks(refs: Sequence[pb.RowRef], row_bytes: int) -> Iterator[Sequence[pb.RowRef]]:
    """Cut as ours are: by rows and by bytes."""
    size = max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))
    for start in range(0, len(refs), size):
        yield refs[start : start + size]
