"""Scorers in killable processes: one item's misfortune is its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from rolecall.errors import ConfigError
from rolecall.settings import AnswerScorer, FunctionScorer, PatternScorer, scorer_environment
from rolecall.v1 import reward_pb2
from services.reward import pool as pools
from services.reward.catalog import LocalScorer
from services.reward.frames import MAX_PAYLOAD_BYTES, FrameBuffer, frame
from services.reward.pool import WorkerPool
from tests.contract.reward_peers import items_of, write_user_module
from tests.file_limits import no_file_is_free
from tests.waiting import until

BEHAVE = FunctionScorer(target="behaviour:behave", min=0, max=1)
StartPool = Callable[..., Awaitable[WorkerPool]]


@pytest.fixture
async def start_pool(tmp_path: Path) -> AsyncIterator[StartPool]:
    """Starts a pool of the scorers given; all end with the test."""
    folder = write_user_module(tmp_path / "conf")
    async with AsyncExitStack() as stack:

        async def start(num_workers: int = 2, timeout_s: float = 30.0, **scorers: LocalScorer) -> WorkerPool:
            pool = WorkerPool(scorers, dict.fromkeys(scorers, timeout_s), num_workers, folder, scorer_environment(()))
            stack.push_async_callback(asyncio.to_thread, pool.close)
            await pool.start()
            return pool

        yield start


def codes(results: list[reward_pb2.ScoreResult]) -> list[str]:
    """Per result, its error's code or "ok"."""
    return [result.error.code if result.HasField("error") else "ok" for result in results]


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "services.reward.worker" in child.cmdline()]


async def test_results_come_in_the_order_of_the_items_whoever_scores_them(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=2, correct=AnswerScorer())
    items = [reward_pb2.ScoreItem(id=str(i), response_text=str(i % 3), ground_truth="0") for i in range(500)]
    results = await pool.score("correct", items)
    assert [result.id for result in results] == [str(i) for i in range(500)]
    assert [result.reward.value for result in results] == [float(i % 3 == 0) for i in range(500)]


async def test_a_hung_function_is_killed_at_its_deadline_and_the_others_are_scored(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=2.0, f=BEHAVE)
    # it hangs for 60 s
    results = await asyncio.wait_for(pool.score("f", items_of("fine", "hang", "fine", "fine")), 50.0)
    assert codes(results) == ["ok", "TIMEOUT", "ok", "ok"]
    assert results[1].error.retryable, (
        "its worker may have been stopped: the engine asks again before it blames the item"
    )
    said = "behaviour:behave took longer than reward.components.f.timeout_s = 2 s and was stopped"
    assert results[1].error.message == said
    assert pool.late == {}


async def test_a_function_whose_last_items_all_hung_is_named_until_it_scores_one(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=3, timeout_s=1.0, f=BEHAVE, g=BEHAVE)
    results = await asyncio.wait_for(pool.score("f", items_of(*["hang"] * 3)), 50.0)
    assert codes(results) == ["TIMEOUT"] * 3
    assert codes(await pool.score("g", items_of("fine"))) == ["ok"]
    assert pool.late == {"f": "behaviour:behave took longer than reward.components.f.timeout_s = 1 s"}
    assert codes(await pool.score("f", items_of("fine"))) == ["ok"]
    assert pool.late == {}


@pytest.mark.parametrize("target", ["behave", "awaits"])
async def test_what_waits_for_a_function_that_was_late_from_the_start_on_fails_with_it(
    start_pool: StartPool, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "HANGS_AFTER_S", 2.5)
    monkeypatch.setattr(pools, "MIN_STOPPED", 3)
    f = FunctionScorer(target=f"behaviour:{target}", min=0, max=1, max_items=2)
    pool = await start_pool(num_workers=1, timeout_s=1.0, f=f)
    item = {"behave": "hang", "awaits": "nap 60"}[target]
    first = asyncio.ensure_future(pool.score("f", items_of(*[item] * 40)))
    results = await asyncio.wait_for(first, 35.0)  # one after the other they would take 40 s, and as long twice again
    assert codes(results) == ["TIMEOUT"] * 40
    errors = {(result.error.retryable, result.error.message) for result in results[20:]}
    said = (
        f"behaviour:{target} took longer than reward.components.f.timeout_s = 1 s each time since the service started"
    )
    assert errors == {(False, f"{said}; mend it, or raise that")}
    assert all(result.error.retryable for result in results[:2])
    assert codes(await pool.score("f", items_of("fine", item))) == ["ok", "TIMEOUT"], "it is tried again"
    late = await pool.score("f", items_of(*[item] * 4))
    assert all(result.error.retryable for result in late), "since then an item is to blame"


async def test_a_function_of_many_is_given_batches(start_pool: StartPool, tmp_path: Path) -> None:
    many = FunctionScorer(target="behaviour:many", min=0, max=1, scope="batch", max_items=4)
    pool = await start_pool(num_workers=1, many=many)
    results = await pool.score("many", [reward_pb2.ScoreItem(id=str(i), response_text="fine") for i in range(10)])
    assert [(result.id, result.reward.value) for result in results] == [(str(i), 1.0) for i in range(10)]
    assert (tmp_path / "conf" / "batches").read_text().split() == ["4", "4", "2"]


@pytest.mark.parametrize(
    ("culprit", "code", "timeout_s"),
    [("exit", "WORKER_DIED", 30.0), ("hang", "TIMEOUT", 1.3)],  # it hangs three times
)
async def test_of_a_batch_that_kills_its_worker_the_one_item_fails(
    start_pool: StartPool, culprit: str, code: str, timeout_s: float
) -> None:
    many = FunctionScorer(target="behaviour:many", min=0, max=1, scope="batch", max_items=4)
    pool = await start_pool(num_workers=1, timeout_s=timeout_s, many=many)
    results = await asyncio.wait_for(pool.score("many", items_of("fine", "fine", culprit, "fine")), 100.0)
    assert codes(results) == ["ok", "ok", code, "ok"]


async def test_of_a_batch_the_one_answer_that_is_no_score_fails(start_pool: StartPool) -> None:
    many = FunctionScorer(target="behaviour:many", min=0, max=1, scope="batch", max_items=4)
    pool = await start_pool(num_workers=1, many=many)
    before = [worker.pid for worker in workers()]
    results = await pool.score("many", items_of("fine", "half", "none"))
    assert codes(results) == ["ok", "SCORER_EXCEPTION", "SCORER_FAILED"]
    assert [worker.pid for worker in workers()] == before, "nothing killed the worker"


async def test_a_function_that_compares_is_given_whole_groups(start_pool: StartPool) -> None:
    compares = FunctionScorer(target="behaviour:longest", min=0, max=1, scope="group")
    pool = await start_pool(num_workers=2, longest=compares)
    texts = {"a": ["x", "xxx"], "b": ["xxxxxx"], "c": ["xx", "x", "xx"], "": ["x"]}
    items = [
        reward_pb2.ScoreItem(id=f"{group}/{i}", group=group, response_text=text)
        for i in range(3)
        for group, of_group in texts.items()
        for text in of_group[i : i + 1]
    ]
    results = await pool.score("longest", items)
    found = {result.id: result.reward.value for result in results}
    assert found == {"a/0": 0, "a/1": 1, "b/0": 1, "c/0": 1, "c/1": 0, "c/2": 1, "/0": 1}
    assert [result.id for result in results] == [item.id for item in items]


async def test_a_worker_is_given_a_group_as_large_as_a_request_may_be(start_pool: StartPool) -> None:
    compares = FunctionScorer(target="behaviour:longest", min=0, max=1, scope="group")
    pool = await start_pool(num_workers=1, timeout_s=60.0, longest=compares)
    results = await pool.score("longest", items_of(*["x" * (MAX_PAYLOAD_BYTES // 4 - 1000)] * 4))
    assert codes(results) == ["ok"] * 4


async def test_a_catastrophic_regular_expression_is_killed_too(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=2.0, r=PatternScorer(kind="regex", pattern=r"(a+)+$"))
    results = await pool.score("r", items_of("a" * 64 + "b", "aa", truth="aa"))
    assert codes(results) == ["TIMEOUT", "ok"]
    assert results[1].reward.value == 1.0


async def test_a_slow_item_has_a_deadline_of_its_own_not_one_for_the_batch(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=3.0, f=BEHAVE)
    assert codes(await pool.score("f", items_of(*["sleep 0.2"] * 17))) == ["ok"] * 17


@pytest.mark.parametrize("death", ["exit", "sys.exit", "segfault"])
async def test_a_worker_that_dies_fails_only_the_item_it_was_on(start_pool: StartPool, death: str) -> None:
    pool = await start_pool(num_workers=1, timeout_s=10.0, f=BEHAVE)
    results = await pool.score("f", items_of("fine", death, "fine"))
    assert codes(results) == ["ok", "WORKER_DIED", "ok"]
    assert results[1].error.retryable
    assert codes(await pool.score("f", items_of("fine"))) == ["ok"]


async def test_killing_idle_workers_loses_nothing(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=2, timeout_s=10.0, f=BEHAVE)
    for worker in workers():
        worker.kill()
        worker.wait()
    assert codes(await pool.score("f", items_of(*["fine"] * 8))) == ["ok"] * 8


async def test_a_worker_that_cannot_be_started_for_now_is_started_later(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=2, timeout_s=1.0, f=BEHAVE)
    with no_file_is_free():
        assert codes(await pool.score("f", items_of("hang", "hang"))) == ["TIMEOUT"] * 2  # both workers are killed
        failed = await asyncio.wait_for(pool.score("f", items_of(*["fine"] * 8)), 60.0)
    assert codes(failed) == ["WORKER_FAILED"] * 8
    assert all(result.error.retryable and "Too many open files" in result.error.message for result in failed)

    async with asyncio.timeout(60.0):
        while len(workers()) < 2 or "ok" not in codes(await pool.score("f", items_of("fine"))):
            await pool.score("f", items_of("fine", "fine"))


@pytest.mark.parametrize(
    ("response", "code"), [("raise", "SCORER_EXCEPTION"), ("none", "SCORER_FAILED"), ("big", "SCORER_FAILED")]
)
async def test_what_a_function_does_wrong_is_an_error_never_a_number(
    start_pool: StartPool, response: str, code: str
) -> None:
    pool = await start_pool(num_workers=1, f=BEHAVE)
    assert codes(await pool.score("f", items_of(response, "fine"))) == [code, "ok"]


async def test_a_function_may_print_and_read_without_touching_the_protocol(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, f=BEHAVE)
    assert codes(await pool.score("f", items_of("print", "read", "print", "fine"))) == ["ok"] * 4


@pytest.mark.parametrize(
    "taken", ["codecs.getwriter('utf-8')(sys.stdout.detach())", "sys.stdout.close() or sys.stderr"]
)
async def test_a_module_that_takes_or_closes_its_stdout_scores_as_others_do(
    start_pool: StartPool, tmp_path: Path, taken: str
) -> None:
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "taking.py").write_text(
        f"import codecs, sys\n\nsys.stdout = {taken}\n\ndef one(item):\n    print(item)\n    return 1.0\n"
    )
    pool = await start_pool(num_workers=1, f=FunctionScorer(target="taking:one", min=0, max=1))
    assert codes(await pool.score("f", items_of("a", "b"))) == ["ok"] * 2


async def test_of_what_a_call_prints_the_first_part_alone_reaches_the_log(
    start_pool: StartPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir(exist_ok=True)
    (tmp_path / "conf" / "talks.py").write_text(
        "def talk(item):\n    for _ in range(1000):\n        print(item.response_text * 100)\n    return 1.0\n"
    )
    pool = await start_pool(num_workers=1, f=FunctionScorer(target="talks:talk", min=0, max=1))
    assert codes(await pool.score("f", items_of("x", "y"))) == ["ok"] * 2
    said = capfd.readouterr().err
    assert 4000 < said.count("x") == said.count("y") <= 4096
    assert said.count(f"[{1000 * 101 - 4096:,} more characters were printed]") == 2


async def test_functions_run_in_the_folder_where_they_are_found(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, w=FunctionScorer(target="behaviour:where"))
    assert (await pool.score("w", items_of("")))[0].reward.value == 1.0


AWAITS = FunctionScorer(target="behaviour:awaits", min=0, max=1, max_items=4)


async def test_a_coroutine_function_is_awaited_on_several_items_at_the_same_time(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, f=AWAITS)
    results = await pool.score("f", items_of("meet", "fine", "raise", "meet"))  # either waits for the other
    assert codes(results) == ["ok", "ok", "SCORER_EXCEPTION", "ok"]
    assert [result.id for result in results] == [f"7/{i}" for i in range(4)]


async def test_no_more_than_max_items_are_awaited_at_a_time(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, f=AWAITS)
    found = [result.reward.value for result in await pool.score("f", items_of(*["count"] * 10))]
    assert max(found) == 0.4


async def test_all_that_a_worker_awaits_is_of_one_event_loop(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, f=AWAITS, g=AWAITS)
    results = [*await pool.score("f", items_of(*["loop"] * 5)), *await pool.score("g", items_of("loop"))]
    assert [result.reward.value for result in results] == [1.0] * 6


async def test_an_awaited_item_that_is_late_is_cancelled_alone(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=1.5, f=AWAITS)
    before = [worker.pid for worker in workers()]
    results = await pool.score("f", items_of("nap 60", "fine", "cancelled", "nap 0.1"))
    assert codes(results) == ["TIMEOUT", "ok", "SCORER_FAILED", "ok"]
    assert results[0].error.retryable
    assert [worker.pid for worker in workers()] == before, "nothing killed the worker"


async def test_a_worker_whose_late_items_may_hold_all_its_threads_is_replaced(start_pool: StartPool) -> None:
    """A blocking call in a thread is not cancelled with the item that waits for it."""
    pool = await start_pool(num_workers=1, timeout_s=3.0, f=AWAITS)
    before = [worker.pid for worker in workers()]
    for num_late in (2, 2, 1):
        results = await pool.score("f", items_of(*["thread 60"] * num_late, "thread 0"))
        assert codes(results) == [*["TIMEOUT"] * num_late, "ok"]
    assert codes(await pool.score("f", items_of("thread 0"))) == ["ok"]
    assert [worker.pid for worker in workers()] != before


async def test_an_awaited_item_that_blocks_takes_nothing_of_the_others_time(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=2.0, f=AWAITS)
    assert codes(await pool.score("f", items_of("nap 1", "block 3", "nap 1"))) == ["ok"] * 3


@pytest.mark.parametrize(
    ("culprit", "code"),
    [("hang", "TIMEOUT"), ("stubborn", "TIMEOUT"), ("exit", "WORKER_DIED"), ("sys.exit", "WORKER_DIED")],
)
async def test_an_awaited_item_that_cannot_be_ended_takes_its_worker_and_no_other_item(
    start_pool: StartPool, culprit: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "AWAITED_GRACE_S", 1.0)
    pool = await start_pool(num_workers=1, timeout_s=1.0, f=AWAITS)
    results = await asyncio.wait_for(pool.score("f", items_of("nap 0.1", culprit, "fine")), 100.0)
    assert codes(results) == ["ok", code, "ok"]


@pytest.mark.parametrize("scope", ["batch", "group"])
async def test_a_coroutine_function_of_many_is_awaited(start_pool: StartPool, scope: str) -> None:
    scorer = {"target": "behaviour:awaits_all", "min": 0, "max": 1, "scope": scope}
    pool = await start_pool(num_workers=1, f=FunctionScorer.model_validate(scorer))
    items = items_of("meet", "meet", "raise")
    for item, group in zip(items, "aab", strict=True):
        item.group = group
    failed = "ok" if scope == "group" else "SCORER_EXCEPTION"
    assert codes(await pool.score("f", items)) == [failed, failed, "SCORER_EXCEPTION"]


@pytest.mark.parametrize("scope", ["item", "batch", "group"])
async def test_a_function_is_called_with_its_options(start_pool: StartPool, scope: str) -> None:
    target = "behaviour:scaled" if scope == "item" else "behaviour:scaled_all"
    options = {"scale": {"by": 2.5}}
    pool = await start_pool(
        num_workers=1, f=FunctionScorer.model_validate({"target": target, "scope": scope, "options": options})
    )
    assert [result.reward.value for result in await pool.score("f", items_of("xx", "xxx"))] == [5.0, 7.5]


async def test_options_that_a_function_does_not_take_stop_the_start(start_pool: StartPool) -> None:
    with pytest.raises(ConfigError, match=r"an item and the options \['size'\]"):
        await start_pool(mine=FunctionScorer(target="behaviour:scaled", options={"size": 1}))


async def test_items_larger_than_a_pipe_go_both_ways(start_pool: StartPool) -> None:
    pool = await start_pool(
        num_workers=1,
        timeout_s=20.0,
        d=FunctionScorer(target="behaviour:detailed", components=("first", "second"), token_rewards=True),
    )
    items = items_of(*["x" * 300_000] * 12)
    for item in items:
        item.num_response_tokens = 100_000
    results = await pool.score("d", items)
    assert codes(results) == ["ok"] * 12
    assert list(results[0].reward.token_rewards.shape) == [100_000]


async def test_a_cancelled_call_gives_its_place_in_the_queue_to_others(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=1, timeout_s=60.0, f=BEHAVE)
    busy = asyncio.ensure_future(pool.score("f", items_of("sleep 0.5")))
    await asyncio.sleep(0.1)
    given_up = asyncio.ensure_future(pool.score("f", items_of(*["sleep 20"] * 20)))
    await asyncio.sleep(0.1)
    given_up.cancel()
    # behind the others it would take 400 s
    assert codes(await asyncio.wait_for(pool.score("f", items_of("fine")), 60.0)) == ["ok"]
    assert codes(await busy) == ["ok"]


async def test_what_a_killed_function_had_started_ends_with_it(start_pool: StartPool, tmp_path: Path) -> None:
    pool = await start_pool(num_workers=1, timeout_s=2.0, f=BEHAVE)
    marker = tmp_path / "pid"
    assert codes(await pool.score("f", items_of(f"child {marker}"))) == ["TIMEOUT"]
    child = int(marker.read_text())
    await until(lambda: has_ended(child))


async def test_what_a_function_had_started_whose_worker_dies_by_itself_ends_too(
    start_pool: StartPool, tmp_path: Path
) -> None:
    pool = await start_pool(num_workers=1, timeout_s=20.0, f=BEHAVE)
    marker = tmp_path / "pids"
    assert codes(await pool.score("f", items_of(*[f"orphan {marker}"] * 8))) == ["WORKER_DIED"] * 8
    children = [int(pid) for pid in marker.read_text().split()]
    assert len(children) >= 8
    await until(lambda: all(map(has_ended, children)))


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("target", "message"),
    [("behaviour:absent", "has no function 'absent'"), ("no_such_module:f", "there is no module 'no_such_module'")],
)
async def test_a_function_that_cannot_be_imported_stops_the_start_and_is_named(
    start_pool: StartPool, target: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as failed:
        await start_pool(mine=FunctionScorer(target=target))
    assert "component 'mine'" in failed.value.message


async def test_closing_answers_what_waits_and_leaves_no_process(start_pool: StartPool) -> None:
    pool = await start_pool(num_workers=2, timeout_s=60.0, f=BEHAVE)
    waiting = asyncio.ensure_future(pool.score("f", items_of(*["sleep 30"] * 6)))
    await asyncio.sleep(0.2)
    before = workers()
    assert len(before) == 2
    await asyncio.to_thread(pool.close)
    results = await waiting
    assert set(codes(results)) <= {"STOPPING", "WORKER_DIED"}
    assert all(result.error.retryable for result in results)
    assert not workers()
    assert codes(await pool.score("f", items_of("fine"))) == ["STOPPING"]


def test_workers_die_with_a_service_that_is_killed(tmp_path: Path) -> None:
    folder = write_user_module(tmp_path)
    program = f"""
import asyncio, sys
from pathlib import Path
from rolecall.settings import FunctionScorer, scorer_environment
from services.reward.pool import WorkerPool
from tests.contract.reward_peers import items_of
async def main():
    folder, environment = Path({str(folder)!r}), scorer_environment(())
    pool = WorkerPool({{"f": FunctionScorer(target="behaviour:behave")}}, {{"f": 60.0}}, 2, folder, environment)
    await pool.start()
    print("ready", flush=True)
    await pool.score("f", items_of("hang", "hang", "hang"))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        children = psutil.Process(service.pid).children(recursive=True)
        assert len(children) == 2
        os.kill(service.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=50)
    assert not alive


def test_frames_survive_any_cut_and_a_senseless_length_is_refused() -> None:
    stream = frame(b"one") + frame(b"", 2) + frame(b"x" * 1000, 65535)
    for size in (1, 3, 7, 4096):
        buffer = FrameBuffer()
        got = [found for start in range(0, len(stream), size) for found in buffer.feed(stream[start : start + size])]
        assert got == [(0, b"one"), (2, b""), (65535, b"x" * 1000)]
    with pytest.raises(ValueError, match="claims"):
        list(FrameBuffer().feed((MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little") + b"\0\0"))


async def test_scorers_find_paths_and_devices_in_their_environment_and_no_secret_that_was_not_named(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "ROLECALL_STORE_URL": "redis://:p@h",
        "AWS_SECRET_ACCESS_KEY": "k",
        "HF_TOKEN": "t",
        "WANDB_API_KEY": "w",
    }
    for name, value in {**secrets, "JUDGE_KEY": "j", "CUDA_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    before = {process.pid for process in psutil.Process().children()}
    await start_pool(f=FunctionScorer(target="behaviour:behave"))
    started = [process for process in psutil.Process().children() if process.pid not in before]
    assert len(started) == 2
    for process in started:
        found = process.environ()
        assert not found.keys() & {*secrets, "JUDGE_KEY"}
        assert (found["CUDA_VISIBLE_DEVICES"], found["PATH"]) == ("3", os.environ["PATH"])
    assert scorer_environment(["JUDGE_KEY"])["JUDGE_KEY"] == "j"
    with pytest.raises(ConfigError, match=r"reward\.environment names NOT_THERE"):
        scorer_environment(["NOT_THERE"])
