"""Rows: trajectories as hashes, columns as fields, written once.

A row's key is `{rl:<run>:<shard>}:row:<id>:<token>`. The token is that of the attempt that sampled it, so two attempts
at one group never share a row, and what a zombie writes nobody reads. A group's rows share a shard. A row is staged
before its group is committed, with an expiry that is lifted after it; columns that come later are written once (a
repeated or second writer changes nothing) and never into a row that is gone.

Columns with which a row is larger than a call, as those of many numbers a token, lie in parts: fields
`part:<digest>:<i>`, written first. The field named as the column then holds their digest and number, and is written
with the row's others at once: a column is there as a whole or not at all, and never of two writers. Parts of a writer
that was cut short or came second are nobody's, and go with their row.

Bounds: what the controller admits, in bytes; rows nobody committed expire. Calls carry at most CHUNK_ROWS rows or parts
and about CHUNK_BYTES each.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from rolecall.columns import column
from rolecall.errors import RowMissingError
from rolecall.store import scripts
from rolecall.store.connection import Connection
from rolecall.trajectory import META, decode_column, encode_column
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from rolecall.wire import Array

T = TypeVar("T")

_Fields: TypeAlias = Mapping[str, bytes | memoryview]

CHUNK_ROWS = 256
CHUNK_BYTES = 2**20
"""Small enough for a socket's timeout where many write at once through a slow link: 0.2 MB/s for each will do. And the
server does nothing else while it runs a call and brings it to its disk.
"""
_WIDTH = 256
"""A guess at the numbers of one token in a wide column, to cut reads into chunks."""
_PARTS = struct.Struct("<16sI")
"""What a field holds in place of its column: the digest of its bytes and the number of its parts."""


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
        self._write("stage", [expiry_s], refs, fields)

    def persist(self, refs: Sequence[RowRef]) -> None:
        """Lifts the expiry of rows whose group is committed. RowMissingError when one is gone; none of its chunk is
        touched then.

        Safe to repeat, by the worker and by the controller. Known limit: a copy of the call that the network delivers
        after a row was freed, and staged again by a worker that was expelled, keeps that row for ever; the audit names
        it.
        """
        for keys, _ in self._chunks([(ref, {}) for ref in refs]):
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
        self,
        refs: Sequence[RowRef],
        columns: Sequence[str],
        optional: Sequence[str] = (),
        progressed: Callable[[], None] = lambda: None,
    ) -> tuple[list[dict[str, Array]], list[TrajectoryMeta]]:
        """Returns what `read` and `read_meta` answer, in one pass. `progressed` is called after each row."""
        names = [*columns, *optional]
        rows, metas = [], []
        for ref, (meta, *values) in zip(refs, self._fields(refs, [META, *names]), strict=True):
            rows.append(_decoded(ref, columns, names, values))
            metas.append(_meta(ref, meta))
            progressed()
        return rows, metas

    def read_meta(self, refs: Sequence[RowRef]) -> list[TrajectoryMeta]:
        """Per row, what is known of the trajectory beside its arrays. RowMissingError when a row is not there."""
        return [_meta(ref, data) for ref, (data,) in zip(refs, self._fields(refs, [META]), strict=True)]

    def hold(self, refs: Sequence[RowRef], name: str) -> bool:
        """Whether every row of `refs` is there with the column `name`."""
        return all(self._connection.pipeline([("HEXISTS", self._key(ref), name) for ref in refs]))

    def put(
        self,
        refs: Sequence[RowRef],
        columns: Sequence[Mapping[str, Array]],
        progressed: Callable[[], None] = lambda: None,
    ) -> int:
        """Writes columns into existing rows, once: a column that is there stays as it was. Returns how many rows had
        all of theirs before. `progressed` is called after each call.

        RowMissingError when a row is gone; no column of its chunk is written then.
        """
        fields = [_encoded(ref, mapping) for ref, mapping in zip(refs, columns, strict=True)]
        return self._write("put_columns", [], refs, fields, progressed)

    def delete(self, refs: Sequence[RowRef]) -> None:
        """Deletes rows; those that are gone are passed over."""
        keys = [self._key(ref) for ref in refs]
        for start in range(0, len(keys), CHUNK_ROWS):
            self._connection.pipeline([("UNLINK", key) for key in keys[start : start + CHUNK_ROWS]])

    def _key(self, ref: RowRef) -> str:
        return f"{{rl:{self._run}:{ref.shard}}}:row:{ref.id}:{ref.token}"

    def _write(
        self,
        script: str,
        head: Sequence[int],
        refs: Sequence[RowRef],
        fields: Sequence[Mapping[str, bytes]],
        progressed: Callable[[], None] = lambda: None,
    ) -> int:
        """Writes `fields` by `script`, whose arguments begin with `head`. Returns the sum of what it says of the rows,
        parts left out.
        """

        def send(items: Sequence[tuple[RowRef, _Fields]]) -> int:
            total = 0
            for keys, values in self._chunks(items):
                total += self._call(script, keys, [*head, *values])
                progressed()
            return total

        total, small = 0, list[tuple[RowRef, _Fields]]()
        for ref, mapping in zip(refs, fields, strict=True):
            parts, rest = _cut_up(ref, mapping)
            if parts:
                send([(ref, part) for part in parts])
                total += send([(ref, rest)])
            else:
                small.append((ref, rest))
        return total + send(small)

    def _call(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> int:
        reply = self._connection.script(script, keys, args)
        if reply[0] == b"MISSING":
            raise RowMissingError(
                f"row {reply[1].decode()} is gone; it expired or its group was dropped", key=reply[1].decode()
            )
        return sum(map(int, scripts.check(reply, self._run).values))

    def _chunks(self, items: Sequence[tuple[RowRef, _Fields]]) -> Iterator[tuple[list[str], list[str | bytes | int]]]:
        """Keys of one shard with the arguments of its scripts, cut to the bounds of one call.

        Arguments are the number of fields, then field and value of each.
        """
        by_shard: dict[int, list[tuple[RowRef, _Fields]]] = {}
        for ref, mapping in items:
            by_shard.setdefault(ref.shard, []).append((ref, mapping))
        for own in by_shard.values():
            for chunk in _cut(own, [sum(map(len, mapping.values())) for _, mapping in own]):
                args: list[str | bytes | int] = []
                for _, mapping in chunk:
                    args.append(len(mapping))
                    for name, data in mapping.items():
                        args += [name, bytes(data)]
                yield [self._key(ref) for ref, _ in chunk], args

    def _fields(self, refs: Sequence[RowRef], names: Sequence[str]) -> Iterator[list[bytes | None]]:
        per_token = sum(column(name).bytes_per_token(_WIDTH) for name in names if name != META)
        for chunk in _cut(refs, [ref.num_tokens * per_token for ref in refs]):
            found = self._connection.pipeline([("HMGET", self._key(ref), *names) for ref in chunk])
            for ref, values in zip(chunk, found, strict=True):
                yield [self._whole(ref, name, data) for name, data in zip(names, values, strict=True)]

    def _whole(self, ref: RowRef, name: str, data: bytes | None) -> bytes | None:
        """The column `name` whose field holds `data`, put together where it lies in parts."""
        if data is None or len(data) != _PARTS.size or not _is_cut(ref, name):
            return data
        digest, num_parts = _PARTS.unpack(data)
        parts = [self._connection.command("HGET", self._key(ref), _part(digest, index)) for index in range(num_parts)]
        if None in parts:
            raise _gone(ref)
        return b"".join(parts)


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


def _cut_up(ref: RowRef, fields: Mapping[str, bytes]) -> tuple[list[_Fields], _Fields]:
    """The parts of the columns in `fields`, and the fields that are left: all, where they fit a call. A digest of what
    a column holds names its parts, so a repetition writes the same ones.
    """
    if sum(map(len, fields.values())) <= CHUNK_BYTES:
        return [], fields
    parts, rest = list[_Fields](), dict(fields)
    for name, data in fields.items():
        if _is_cut(ref, name):
            digest = hashlib.blake2b(data, digest_size=16).digest()
            starts = range(0, len(data), CHUNK_BYTES)
            parts += [{_part(digest, i): memoryview(data)[at : at + CHUNK_BYTES]} for i, at in enumerate(starts)]
            rest[name] = _PARTS.pack(digest, len(starts))
    return parts, rest


def _is_cut(ref: RowRef, name: str) -> bool:
    """Whether the column `name` lies in parts when its row is large: it has more bytes than what would stand for it."""
    return name != META and ref.num_tokens * column(name).bytes_per_token() > _PARTS.size


def _part(digest: bytes, index: int) -> str:
    """The field of a part."""
    return f"part:{digest.hex()}:{index}"


def _meta(ref: RowRef, data: bytes | None) -> TrajectoryMeta:
    if data is None:
        raise _gone(ref)
    return TrajectoryMeta.FromString(data)


def _gone(ref: RowRef) -> RowMissingError:
    return RowMissingError(f"row {ref.id} of attempt {ref.token} is gone; it expired or was deleted", id=ref.id)


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
