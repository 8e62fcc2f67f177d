"""Rows: trajectories as hashes, columns as fields, written once.

A row's key is `{rl:<run>:<shard>}:row:<id>:<token>`. The token is that of the attempt that sampled it, so two attempts
at one group never share a row, and what a zombie writes nobody reads. A group's rows share a shard. A row is staged
before its group is committed, with an expiry that is lifted after it; columns that come later are written once (a
repeated or second writer changes nothing) and never into a row that is gone.

Bounds: what the controller admits, in bytes; rows nobody committed expire. Calls carry at most CHUNK_ROWS rows and
about CHUNK_BYTES each.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rolecall.columns import IMAGES, column
from rolecall.errors import RowMissingError
from rolecall.store import scripts
from rolecall.store.connection import Connection
from rolecall.trajectory import META, decode_column, encode_column
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from rolecall.wire import Array

T = TypeVar("T")

CHUNK_ROWS = 256
CHUNK_BYTES = 8 * 2**20
_WIDTH = 256
"""A guess at the numbers of one token in a wide column, to cut reads into chunks."""
_IMAGE_BYTES = 2**18
"""A guess at the bytes of a row's images, for the same."""


class Rows:
    """The rows of run `run`, spread over `num_shards` hash slots. Threads may share it."""

    def __init__(self, connection: Connection, run: str, num_shards: int) -> None:
        self._connection = connection
        self._run = run
        self._num_shards = num_shards

    def ref(self, id: str, token: str, num_tokens: int, segment_starts: Sequence[int] = ()) -> RowRef:
        """Names the row of trajectory `id` (`<gid>/<i>`) of T = `num_tokens` that the attempt `token` writes, and where
        its segments but the first begin.
        """
        shard = zlib.crc32(id.rpartition("/")[0].encode()) % self._num_shards
        return RowRef(id=id, shard=shard, token=token, num_tokens=num_tokens, segment_starts=segment_starts)

    def stage(self, ref: RowRef, columns: Mapping[str, Array], meta: TrajectoryMeta, expiry_s: int) -> None:
        """Writes one whole row that lives `expiry_s` seconds unless persisted. Safe to repeat. StoreFullError is
        back-pressure: wait and stage again.
        """
        self.stage_many([ref], [columns], [meta], expiry_s)

    def stage_many(
        self,
        refs: Sequence[RowRef],
        columns: Sequence[Mapping[str, Array]],
        metas: Sequence[TrajectoryMeta],
        expiry_s: int,
    ) -> None:
        """Stages rows, a group's in one round trip."""
        fields = [
            {**_encoded(ref, mapping), META: meta.SerializeToString()}
            for ref, mapping, meta in zip(refs, columns, metas, strict=True)
        ]
        for keys, values in self._chunks(refs, fields):
            self._call("stage", keys, [expiry_s, *values])

    def persist(self, refs: Sequence[RowRef]) -> None:
        """Lifts the expiry of rows whose group is committed. RowMissingError when one is gone; none of its chunk is
        touched then.

        Safe to repeat, by the worker and by the controller. Known limit: a copy of the call that the network delivers
        after a row was freed, and staged again by a worker that was expelled, keeps that row for ever; the audit names
        it.
        """
        for keys, _ in self._chunks(refs, [{}] * len(refs)):
            self._call("persist", keys, [])

    def read(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> list[dict[str, Array]]:
        """Per row, its `columns` and those of `optional` that were written, as read-only arrays. RowMissingError when a
        row or column is not there.
        """
        names = [*columns, *optional]
        return [
            _decoded(ref, columns, names, values) for ref, values in zip(refs, self._fields(refs, names), strict=True)
        ]

    def read_with_meta(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> tuple[list[dict[str, Array]], list[TrajectoryMeta]]:
        """Returns what `read` and `read_meta` answer, in the round trips of one."""
        names = [*columns, *optional]
        rows, metas = [], []
        for ref, (meta, *values) in zip(refs, self._fields(refs, [META, *names]), strict=True):
            rows.append(_decoded(ref, columns, names, values))
            metas.append(_meta(ref, meta))
        return rows, metas

    def read_meta(self, refs: Sequence[RowRef]) -> list[TrajectoryMeta]:
        """Per row, what is known of the trajectory beside its arrays. RowMissingError when a row is not there."""
        return [_meta(ref, data) for ref, (data,) in zip(refs, self._fields(refs, [META]), strict=True)]

    def hold(self, refs: Sequence[RowRef], name: str) -> bool:
        """Whether every row of `refs` is there with the column `name`."""
        return all(self._connection.pipeline([("HEXISTS", self._key(ref), name) for ref in refs]))

    def put(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> int:
        """Writes columns into existing rows, once: a column that is there stays as it was. Returns how many rows had
        all of theirs before.

        RowMissingError when a row is gone; nothing of its chunk is written then.
        """
        fields = [_encoded(ref, mapping) for ref, mapping in zip(refs, columns, strict=True)]
        return sum(self._call("put_columns", keys, values) for keys, values in self._chunks(refs, fields))

    def delete(self, refs: Sequence[RowRef]) -> None:
        """Deletes rows; those that are gone are passed over."""
        keys = [self._key(ref) for ref in refs]
        for start in range(0, len(keys), CHUNK_ROWS):
            self._connection.pipeline([("UNLINK", key) for key in keys[start : start + CHUNK_ROWS]])

    def _key(self, ref: RowRef) -> str:
        return f"{{rl:{self._run}:{ref.shard}}}:row:{ref.id}:{ref.token}"

    def _call(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> int:
        reply = self._connection.script(script, keys, args)
        if reply[0] == b"MISSING":
            raise RowMissingError(
                f"row {reply[1].decode()} is gone; it expired or its group was dropped", key=reply[1].decode()
            )
        return sum(map(int, scripts.check(reply, self._run).values))

    def _chunks(
        self, refs: Sequence[RowRef], fields: Sequence[Mapping[str, bytes]]
    ) -> Iterator[tuple[list[str], list[str | bytes | int]]]:
        """Keys of one shard with the arguments of its scripts, cut to the bounds of one call.

        Arguments are the number of fields, then field and value of each.
        """
        by_shard: dict[int, list[tuple[RowRef, Mapping[str, bytes]]]] = {}
        for ref, mapping in zip(refs, fields, strict=True):
            by_shard.setdefault(ref.shard, []).append((ref, mapping))
        for items in by_shard.values():
            for chunk in _cut(items, [sum(map(len, mapping.values())) for _, mapping in items]):
                args: list[str | bytes | int] = []
                for _, mapping in chunk:
                    args.append(len(mapping))
                    for name, data in mapping.items():
                        args += [name, data]
                yield [self._key(ref) for ref, _ in chunk], args

    def _fields(self, refs: Sequence[RowRef], names: Sequence[str]) -> Iterator[list[bytes | None]]:
        per_token = sum(column(name).bytes_per_token(_WIDTH) for name in names if name != META)
        per_row = _IMAGE_BYTES if IMAGES in names else 0
        for chunk in _cut(refs, [ref.num_tokens * per_token + per_row for ref in refs]):
            yield from self._connection.pipeline([("HMGET", self._key(ref), *names) for ref in chunk])


def _decoded(
    ref: RowRef, columns: Sequence[str], names: Sequence[str], values: Sequence[bytes | None]
) -> dict[str, Array]:
    """The columns `names` that were written; RowMissingError when one of `columns` was not."""
    row = {
        name: decode_column(name, data, ref.num_tokens)
        for name, data in zip(names, values, strict=True)
        if data is not None
    }
    missing = [name for name in columns if name not in row]
    if missing:
        absent = ", ".join(missing)
        raise RowMissingError(
            f"row {ref.id} of attempt {ref.token} has no {absent}; it expired, was deleted or was never scored",
            id=ref.id,
        )
    return row


def _encoded(ref: RowRef, columns: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: encode_column(name, array, ref.num_tokens) for name, array in columns.items()}


def _meta(ref: RowRef, data: bytes | None) -> TrajectoryMeta:
    if data is None:
        raise RowMissingError(f"row {ref.id} of attempt {ref.token} is gone; it expired or was deleted", id=ref.id)
    return TrajectoryMeta.FromString(data)


def _cut(items: Sequence[T], sizes: Iterable[int]) -> Iterator[list[T]]:
    """`items` in order, in lists of at most CHUNK_ROWS and about CHUNK_BYTES."""
    chunk: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if chunk and (len(chunk) == CHUNK_ROWS or total + size > CHUNK_BYTES):
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk
