"""Rows on a real server: written once, under a token, gone when nobody committed them."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rolecall.columns import TOPK_IDS, TOPK_LOGPROBS
from rolecall.errors import InvalidInputError, RowMissingError, StoreUnavailableError
from rolecall.store import rows as rows_module
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.trajectory import trajectory_id
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from rolecall.wire import Array
from tests.fixtures_store import StoreUnderTest


def reward(value: float) -> dict[str, Array]:
    return {"reward": np.array([value], np.float32)}


def stage(store: StoreUnderTest, count: int = 1, num_tokens: int = 4) -> list[RowRef]:
    """Rows of groups 0, 1, ... with one trajectory each."""
    refs = [store.rows.ref(trajectory_id(gid, 0), "r.0-1", num_tokens) for gid in range(count)]
    columns: list[dict[str, Array]] = [{"token_ids": np.full(num_tokens, gid, np.int32)} for gid in range(count)]
    store.rows.stage_many(refs, columns, [TrajectoryMeta(id=ref.id) for ref in refs], 60)
    return refs


def test_what_was_staged_is_read_back_with_its_dtypes_in_order(store: StoreUnderTest) -> None:
    refs = stage(store, count=5)
    assert {ref.shard for ref in refs} == {0, 1}
    assert [row["token_ids"].tolist() for row in store.rows.read(refs[::-1], ["token_ids"])] == [
        [gid] * 4 for gid in (4, 3, 2, 1, 0)
    ]
    assert store.rows.read(refs[:1], ["token_ids"])[0]["token_ids"].dtype == np.int32
    assert [meta.id for meta in store.rows.read_meta(refs)] == [ref.id for ref in refs]


def test_staging_one_row_twice_is_staging_it_once(store: StoreUnderTest) -> None:
    ref = store.rows.ref("0/0", "r.0-1", 2)
    for _ in range(2):
        store.rows.stage(ref, {"token_ids": np.array([1, 2], np.int32)}, TrajectoryMeta(id="0/0"), 60)
    assert store.rows.read([ref], ["token_ids"])[0]["token_ids"].tolist() == [1, 2]


def test_staging_that_the_network_kept_back_does_not_expire_a_committed_row(store: StoreUnderTest) -> None:
    ref = stage(store)[0]
    store.rows.persist([ref])
    store.rows.stage(ref, {"token_ids": np.zeros(4, np.int32)}, TrajectoryMeta(id="late"), 1)
    assert store.connection.command("TTL", f"{{rl:{store.run}:{ref.shard}}}:row:{ref.id}:{ref.token}") == -1
    assert store.rows.read_meta([ref])[0].id == ref.id


def test_a_column_is_written_once(store: StoreUnderTest) -> None:
    refs = stage(store, count=2)
    assert store.rows.put(refs[:1], [reward(1)]) == 0
    assert store.rows.put(refs, [reward(2), reward(3)]) == 1
    assert [float(row["reward"][0]) for row in store.rows.read(refs, ["reward"])] == [1, 3]
    columns = {**reward(9), "values": np.zeros(4, np.float32)}
    assert store.rows.put(refs[:1], [columns]) == 0, "one of the two columns was new"
    assert float(store.rows.read(refs[:1], ["reward"])[0]["reward"][0]) == 1


def test_a_late_scorer_cannot_bring_a_deleted_row_back(store: StoreUnderTest) -> None:
    refs = stage(store, count=4)
    store.rows.delete(refs[:1])
    with pytest.raises(RowMissingError):
        store.rows.put(refs, [reward(1)] * 4)
    assert "reward" not in store.rows.read(refs[2:3], [], ["reward"])[0], (
        "nothing of the refused call's shard is written"
    )
    with pytest.raises(RowMissingError):
        store.rows.read_meta(refs[:1])


def test_a_column_of_another_length_or_dtype_is_refused_before_it_is_sent(store: StoreUnderTest) -> None:
    refs = stage(store)
    for wrong in (np.zeros(3, np.float32), np.zeros(4, np.float64)):
        with pytest.raises(InvalidInputError):
            store.rows.put(refs, [{"values": wrong}])


def test_a_missing_column_is_an_error_unless_it_is_optional(store: StoreUnderTest) -> None:
    refs = stage(store)
    with pytest.raises(RowMissingError, match="values"):
        store.rows.read(refs, ["token_ids", "values"])
    assert set(store.rows.read(refs, ["token_ids"], ["values"])[0]) == {"token_ids"}


def test_rows_nobody_committed_expire_and_persisted_ones_stay(store: StoreUnderTest) -> None:
    lost, kept = stage(store, count=2)
    store.rows.persist([kept])
    store.rows.persist([kept])
    lost_key, kept_key = (f"{{rl:{store.run}:{ref.shard}}}:row:{ref.id}:{ref.token}" for ref in (lost, kept))
    assert store.connection.command("TTL", kept_key) == -1
    assert 0 < store.connection.command("TTL", lost_key) <= 60
    assert store.connection.command("PEXPIRE", lost_key, 1) == 1
    deadline = time.monotonic() + 60
    while store.rows.read([lost], [], ["token_ids"])[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    store.rows.read([kept], ["token_ids"])
    with pytest.raises(RowMissingError):
        store.rows.persist([lost, kept])


def test_the_attempts_of_two_tokens_do_not_share_a_row(store: StoreUnderTest) -> None:
    first, second = (store.rows.ref("0/0", token, 1) for token in ("r.0-1", "r.1-2"))
    for ref, value in ((first, 1), (second, 2)):
        store.rows.stage(ref, {"token_ids": np.array([value], np.int32)}, TrajectoryMeta(), 60)
    assert [row["token_ids"].tolist() for row in store.rows.read([first, second], ["token_ids"])] == [[1], [2]]


def test_a_group_lies_in_one_shard_and_groups_spread_over_all(store: StoreUnderTest) -> None:
    rows = Rows(store.connection, store.run, 4)
    shards = [{rows.ref(trajectory_id(gid, i), "t", 1).shard for i in range(8)} for gid in range(64)]
    assert all(len(shard) == 1 for shard in shards)
    assert set.union(*shards) == {0, 1, 2, 3}


def test_more_rows_than_one_call_carries_are_cut_into_several(store: StoreUnderTest) -> None:
    refs = stage(store, count=2 * rows_module.CHUNK_ROWS + 3)
    store.rows.persist(refs)
    assert store.rows.put(refs, [reward(1)] * len(refs)) == 0
    assert store.rows.put(refs, [reward(1)] * len(refs)) == len(refs)
    assert [int(row["token_ids"][0]) for row in store.rows.read(refs, ["token_ids", "reward"])] == list(
        range(len(refs))
    )
    store.rows.delete(refs)
    assert not any(store.rows.read(refs, [], ["token_ids"]))


def test_rows_larger_than_the_bound_of_a_call_still_travel(store: StoreUnderTest) -> None:
    num_tokens = rows_module.CHUNK_BYTES // 8
    refs = stage(store, count=5, num_tokens=num_tokens)
    assert [row["token_ids"].shape for row in store.rows.read(refs, ["token_ids"])] == [(num_tokens,)] * 5


class CountedConnection(Connection):
    """A connection that knows the bytes of each call's arguments."""

    def __init__(self, store: StoreUnderTest) -> None:
        super().__init__(store.connection.rows)
        self.calls = list[int]()

    def command(self, *args: str | bytes | int | float) -> Any:
        self.calls.append(0)
        return super().command(*args)

    def pipeline(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        self.calls.append(0)
        return super().pipeline(commands)

    def script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        self.calls.append(sum(len(arg) for arg in args if isinstance(arg, bytes)))
        return super().script(name, keys, args)


class StoppedConnection(Connection):
    """A connection whose process ends after `num_calls` scripts."""

    def __init__(self, store: StoreUnderTest, num_calls: int) -> None:
        super().__init__(store.connection.rows)
        self.num_calls = num_calls

    def script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        if not self.num_calls:
            raise StoreUnavailableError("it ended")
        self.num_calls -= 1
        return super().script(name, keys, args)


def wide(value: int) -> dict[str, Array]:
    """Columns of 128 numbers for each of 5000 tokens: a row of several calls."""
    ids = np.full((5000, 128), value, np.int32)
    return {TOPK_IDS: ids, TOPK_LOGPROBS: ids.astype(np.float32) / 2}


def assert_holds(store: StoreUnderTest, ref: RowRef, columns: dict[str, Array]) -> None:
    (row,) = store.rows.read([ref], list(columns))
    assert all(np.array_equal(row[name], column) for name, column in columns.items())


@pytest.mark.parametrize("num_calls", [1, 3, 5])
def test_a_large_row_whose_writer_ends_under_way_has_none_of_its_columns_and_then_those_of_the_next(
    store: StoreUnderTest, num_calls: int
) -> None:
    ref = stage(store, num_tokens=5000)[0]
    with pytest.raises(StoreUnavailableError):
        Rows(StoppedConnection(store, num_calls), store.run, 2).put([ref], [wide(1)])
    assert store.rows.read([ref], [], list(wide(1))) == [{}]
    assert not store.rows.hold([ref], TOPK_IDS)
    assert store.rows.put([ref], [wide(2)]) == 0
    assert_holds(store, ref, wide(2))


def test_a_large_row_is_written_once_by_small_calls_and_goes_as_a_whole(store: StoreUnderTest) -> None:
    refs, num_bytes = stage(store, count=2, num_tokens=5000), sum(column.nbytes for column in wide(1).values())
    calls = list(store.rows.put_by_calls(refs, [wide(1), reward(1)]))
    assert sum(calls) == 0
    assert len(calls) > num_bytes / rows_module.CHUNK_BYTES
    key = f"{{rl:{store.run}:{refs[0].shard}}}:row:{refs[0].id}:r.0-1"
    fields = set(store.connection.command("HKEYS", key))
    assert store.rows.put(refs[:1], [wide(2)]) == 1
    assert store.rows.put(refs[:1], [{**wide(2), **reward(2)}]) == 0, "the reward was new"
    assert set(store.connection.command("HKEYS", key)) == {*fields, b"reward"}, "nobody would read the second's parts"
    assert_holds(store, refs[0], {**wide(1), **reward(2)})
    assert len(list(store.rows.read_by_calls(refs[:1], list(wide(1))))) > num_bytes / rows_module.CHUNK_BYTES
    assert store.rows.hold(refs[:1], TOPK_IDS)
    store.rows.delete(refs)
    with pytest.raises(RowMissingError):
        store.rows.put(refs[:1], [wide(1)])
    assert not store.connection.command("EXISTS", f"{{rl:{store.run}:{refs[0].shard}}}:row:{refs[0].id}:r.0-1")


def test_a_large_row_can_be_staged_again_by_who_ended_under_way(store: StoreUnderTest) -> None:
    ref, meta = store.rows.ref("0/0", "r.0-1", 5000), TrajectoryMeta(id="0/0")
    routed: dict[str, Array] = {
        "token_ids": np.arange(5000, dtype=np.int32),
        "routed_experts": np.arange(5000 * 700, dtype=np.uint8).reshape(5000, 700),
    }
    with pytest.raises(StoreUnavailableError):
        Rows(StoppedConnection(store, 2), store.run, 2).stage(ref, routed, meta, 60)
    with pytest.raises(RowMissingError):
        store.rows.read_meta([ref])
    store.rows.stage(ref, routed, meta, 60)
    store.rows.persist([ref])
    assert_holds(store, ref, routed)
    assert store.rows.read_meta([ref]) == [meta]


def test_the_small_columns_of_large_rows_are_read_together(store: StoreUnderTest) -> None:
    refs = [store.rows.ref(f"0/{i}", "r.0-1", 6000) for i in range(8)]
    routed: dict[str, Array] = {
        "token_ids": np.zeros(6000, np.int32),
        "response_mask": np.ones(6000, np.uint8),
        "routed_experts": np.zeros((6000, 384), np.uint8),
    }
    connection = CountedConnection(store)
    rows = Rows(connection, store.run, 2)
    rows.stage_many(refs, [routed] * len(refs), [TrajectoryMeta(id=ref.id) for ref in refs], 60)
    assert len(connection.calls) == 4 * len(refs), "three megabytes begun, and all the rest"
    connection.calls.clear()
    rows.read_with_meta(refs, ["token_ids", "response_mask"])
    assert len(connection.calls) == 1


def test_large_columns_of_no_token_and_a_large_meta_travel_in_small_calls(store: StoreUnderTest) -> None:
    connection, ref, meta = CountedConnection(store), store.rows.ref("0/0", "r.0-1", 4), TrajectoryMeta(id="0/0")
    meta.prompt.ground_truth = "x" * 4_000_000
    names: dict[str, Array] = {"reward_component_names": np.arange(3_000_000, dtype=np.int32).astype(np.uint8)}
    rows = Rows(connection, store.run, 2)
    rows.stage(ref, {"token_ids": np.zeros(4, np.int32)}, meta, 60)
    assert rows.put([ref], [{**names, **reward(1)}]) == 0
    assert max(connection.calls) < 1.01 * rows_module.CHUNK_BYTES
    assert rows.read_meta([ref]) == [meta]
    assert_holds(store, ref, {**names, **reward(1)})


def test_a_large_row_that_goes_while_it_is_read_is_missing(store: StoreUnderTest) -> None:
    (ref,) = stage(store, num_tokens=5000)
    store.rows.put([ref], [wide(1)])
    reading = store.rows.read_by_calls([ref], [TOPK_IDS])
    assert next(reading) == [], "what stands for its parts is read, and they are not"
    store.rows.delete([ref])
    with pytest.raises(RowMissingError):
        list(reading)


def test_a_row_that_another_version_wrote_as_a_whole_is_read(store: StoreUnderTest) -> None:
    ref = stage(store, num_tokens=5000)[0]
    key = f"{{rl:{store.run}:{ref.shard}}}:row:{ref.id}:{ref.token}"
    for name, column in wide(1).items():
        store.connection.command("HSET", key, name, column.tobytes())
    assert_holds(store, ref, wide(1))


def test_calls_about_no_rows_do_nothing(store: StoreUnderTest) -> None:
    store.rows.stage_many([], [], [], 60)
    store.rows.persist([])
    store.rows.delete([])
    assert (store.rows.read([], ["token_ids"]), store.rows.read_meta([]), store.rows.put([], [])) == ([], [], 0)
