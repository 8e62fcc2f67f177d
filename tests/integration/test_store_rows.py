"""Rows on a real server: written once, under a token, gone when nobody committed them."""

import time

import numpy as np
import pytest

from rolecall.errors import InvalidInputError, RowMissingError
from rolecall.store import rows as rows_module
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


def test_calls_about_no_rows_do_nothing(store: StoreUnderTest) -> None:
    store.rows.stage_many([], [], [], 60)
    store.rows.persist([])
    store.rows.delete([])
    assert (store.rows.read([], ["token_ids"]), store.rows.read_meta([]), store.rows.put([], [])) == ([], [], 0)
