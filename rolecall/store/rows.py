"""Rows: trajectories as hashes, columns as fields, written once.

A row's key is `{rl:<run>:<shard>}:row:<id>:<token>`. The token is that of the attempt that sampled it, so two attempts
at one group never share a row, and what a zombie writes nobody reads. A group's rows share a shard. A row is staged
before its group is committed, with an expiry that is lifted after it; columns that come later are written once (a
repeated or second writer changes nothing) and never into a row that is gone.

The largest columns of a row that is larger than a call, as those of many numbers a token, lie in parts: fields
`part:<digest>:<start>-<end>`, written first. The field named as the column then holds what names them (_Parts), and is
written with the row's others at once: a column is there as a whole or not at all, and never of two writers. Who finds
it there writes no parts. Those of a writer that was cut short, or of two at the same time the second's, are nobody's,
not counted by the controller, and go with their row.

Bounds: what the controller admits, in bytes; rows nobody committed expire. Calls carry at most CHUNK_ROWS rows or parts
and about CHUNK_BYTES each.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

from rolecall.columns import IMAGES, TEXT_BYTES, column
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
_IMAGE_BYTES = 2**18
"""A guess at the bytes of a row's images, for the same."""
_STAND_IN = struct.Struct("<8s16sQI")
_MARK = b"\x07parts\r\n"
"""Begins a field that stands for a column in parts. No message and no JSON begins so, and no numbers by chance."""


class Rows:
    """The rows of run `run`, spread over `num_shards` hash slots. Threads may share it."""

    def __init__(self, connection: Connection, run: str, num_shards: int) -> None:
        self._connection = connection
        self._run = run
        self._num_shards = num_shards

    def ref(
        self, id: str, token: str, num_tokens: int, segment_starts: Sequence[int] = (), shown_image_bytes: int = 0
    ) -> RowRef:
        """Names the row of trajectory `id` (`<gid>/<i>`) of T = `num_tokens` that the attempt `token` writes. It says
        where segments but the first begin, and the bytes of images that an environment showed.
        """
        shard = zlib.crc32(id.rpartition("/")[0].encode()) % self._num_shards
        return RowRef(
            id=id,
            shard=shard,
            token=token,
            num_tokens=num_tokens,
            segment_starts=segment_starts,
            shown_image_bytes=shown_image_bytes,
        )

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
        """Stages rows: those of a group in one call, as far as its bounds allow, a larger one in calls of its own."""
        fields = [
            {**_encoded(ref, mapping), META: meta.SerializeToString()}
            for ref, mapping, meta in zip(refs, columns, metas, strict=True)
        ]
        sum(self._write("stage", [expiry_s], refs, fields))

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
        return [_decoded(ref, columns, names, values) for ref, values in chain.from_iterable(self._fields(refs, names))]

    def read_with_meta(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> tuple[list[dict[str, Array]], list[TrajectoryMeta]]:
        """Returns what `read` and `read_meta` answer, in one pass."""
        read = list(chain.from_iterable(self.read_by_calls(refs, columns, optional)))
        return [row for row, _ in read], [meta for _, meta in read]

    def read_by_calls(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[dict[str, Array], TrajectoryMeta]]]:
        """Reads as `read_with_meta` does, in order; after each call, the rows of which it was the last."""
        names = [*columns, *optional]
        for found in self._fields(refs, [META, *names]):
            yield [(_decoded(ref, columns, names, values), _meta(ref, meta)) for ref, (meta, *values) in found]

    def read_meta(self, refs: Sequence[RowRef]) -> list[TrajectoryMeta]:
        """Per row, what is known of the trajectory beside its arrays. RowMissingError when a row is not there."""
        return [_meta(ref, data) for ref, (data,) in chain.from_iterable(self._fields(refs, [META]))]

    def hold(self, refs: Sequence[RowRef], name: str) -> bool:
        """Whether every row of `refs` is there with the column `name`."""
        return all(self._connection.pipeline([("HEXISTS", self._key(ref), name) for ref in refs]))

    def put(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> int:
        """Writes columns into existing rows, once: a column that is there stays as it was. Returns how many rows had
        all of theirs before.

        RowMissingError when a row is gone; no column of its chunk is written then.
        """
        return sum(self.put_by_calls(refs, columns))

    def put_by_calls(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> Iterator[int]:
        """Writes as `put` does; after each call, of how many rows it says that they had all of their columns before."""
        fields = [_encoded(ref, mapping) for ref, mapping in zip(refs, columns, strict=True)]
        # lazily: a row is looked at just before it is written
        lacking = (self._lacking(ref, mapping) for ref, mapping in zip(refs, fields, strict=True))
        yield from self._write("put_columns", [], refs, lacking)

    def delete(self, refs: Sequence[RowRef]) -> None:
        """Deletes rows; those that are gone are passed over."""
        keys = [self._key(ref) for ref in refs]
        for start in range(0, len(keys), CHUNK_ROWS):
            self._connection.pipeline([("UNLINK", key) for key in keys[start : start + CHUNK_ROWS]])

    def _key(self, ref: RowRef) -> str:
        return f"{{rl:{self._run}:{ref.shard}}}:row:{ref.id}:{ref.token}"

    def _write(
        self, script: str, head: Sequence[int], refs: Sequence[RowRef], fields: Iterable[Mapping[str, bytes]]
    ) -> Iterator[int]:
        """Writes `fields` by `script`, whose arguments begin with `head`. After each call, the sum of what it says of
        the rows, 0 of parts.
        """

        def send(items: Sequence[tuple[RowRef, _Fields]]) -> Iterator[int]:
            for keys, values in self._chunks(items):
                yield self._call(script, keys, [*head, *values])

        small = list[tuple[RowRef, _Fields]]()
        for ref, mapping in zip(refs, fields, strict=True):
            cut = {name: _Parts.of(mapping[name]) for name in _too_large(mapping)}
            if not cut:
                small.append((ref, mapping))
                continue
            views = {name: memoryview(mapping[name]) for name in cut}
            parts = [{part: views[name][span]} for name, each in cut.items() for part, span in each.spans.items()]
            yield from (0 for _ in send([(ref, part) for part in parts]))
            yield from send([(ref, {**mapping, **{name: each.packed for name, each in cut.items()}})])
        yield from send(small)

    def _lacking(self, ref: RowRef, fields: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """`fields` without those that lie in parts and are there: nobody would read, or count, a second writer's."""
        names = _too_large(fields)
        there = self._connection.command("HMGET", self._key(ref), *names) if names else []
        held = {name for name, data in zip(names, there, strict=True) if data is not None}
        return {name: data for name, data in fields.items() if name not in held}

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

    def _fields(
        self, refs: Sequence[RowRef], names: Sequence[str]
    ) -> Iterator[list[tuple[RowRef, list[bytes | None]]]]:
        """Reads the fields `names` of each row, in order; after each call, the rows of which it was the last."""
        per_token = sum(TEXT_BYTES if name == META else column(name).bytes_per_token(_WIDTH) for name in names)
        per_row = _IMAGE_BYTES if IMAGES in names else 0
        for chunk in _cut(refs, [ref.num_tokens * per_token + per_row for ref in refs]):
            found = self._connection.pipeline([("HMGET", self._key(ref), *names) for ref in chunk])
            whole = list[tuple[RowRef, list[bytes | None]]]()
            for ref, values in zip(chunk, found, strict=True):
                cut = {at: _Parts.from_field(data) for at, data in enumerate(values) if _is_stand_in(data)}
                spans = {part: span for each in cut.values() for part, span in each.spans.items()}
                parts = dict[str, bytes]()
                for some in _cut(list(spans), [span.stop - span.start for span in spans.values()]):
                    yield whole
                    whole = []
                    parts.update(zip(some, self._connection.command("HMGET", self._key(ref), *some), strict=True))
                if None in parts.values():
                    raise _gone(ref)
                for at, each in cut.items():
                    values[at] = b"".join(parts[part] for part in each.spans)
                whole.append((ref, values))
            yield whole


@dataclass(frozen=True)
class _Parts:
    """A column in parts. The digest of its bytes names them, so a repetition writes the same ones."""

    digest: bytes
    num_bytes: int
    part_bytes: int

    @classmethod
    def of(cls, data: bytes) -> "_Parts":
        return cls(hashlib.blake2b(data, digest_size=16).digest(), len(data), CHUNK_BYTES)

    @classmethod
    def from_field(cls, field: bytes) -> "_Parts":
        _, *values = _STAND_IN.unpack(field)
        return cls(*values)

    @property
    def packed(self) -> bytes:
        """The field that stands for the column."""
        return _STAND_IN.pack(_MARK, self.digest, self.num_bytes, self.part_bytes)

    @property
    def spans(self) -> dict[str, slice]:
        """The bytes of the column that each field holds, in order."""
        starts = range(0, self.num_bytes, self.part_bytes)
        spans = [slice(start, min(start + self.part_bytes, self.num_bytes)) for start in starts]
        return {f"part:{self.digest.hex()}:{span.start}-{span.stop}": span for span in spans}


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


def _too_large(fields: Mapping[str, bytes]) -> list[str]:
    """The largest of `fields`: as many as it takes for the others to fit a call."""
    names = sorted(fields, key=lambda name: len(fields[name]))
    left = sum(map(len, fields.values()))
    large = list[str]()
    while left > CHUNK_BYTES:
        large.append(names.pop())
        left -= len(fields[large[-1]])
    return large


def _is_stand_in(field: bytes | None) -> bool:
    return field is not None and len(field) == _STAND_IN.size and field.startswith(_MARK)


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
