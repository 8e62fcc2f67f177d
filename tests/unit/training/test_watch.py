"""What the watch among ranks promises, with ranks as threads of this process and as processes that are stopped and
killed.
"""

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rolecall.errors import WorkerLostError
from rolecall.training.ranks import watch as ranks_watch
from rolecall.training.ranks.watch import GONE_S, LOST_S, RankWatch
from rolecall.training.serving.hooks import ProcessHooks

BEAT_S = 0.2
SILENT_S = 4.0
"""Many beats: a rank that a busy machine holds up is not taken for hung."""
WAIT_S = 60.0
"""Bound on waits for events, generous: the machine may be busy."""


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this process beat every BEAT_S."""
    monkeypatch.setattr(ranks_watch, "BEAT_S", BEAT_S)


class Rank:
    """A watch whose verdict is kept instead of ending the process."""

    def __init__(self, rank: int, world_size: int, **hooks: Any) -> None:
        self.verdicts: queue.Queue[WorkerLostError] = queue.Queue()
        watched = ProcessHooks("actor", lost=self.verdicts.put, **hooks)
        self.watch = RankWatch(watched, rank, world_size, silent_s=SILENT_S)

    def verdict(self, within_s: float) -> str:
        return self.verdicts.get(timeout=within_s).message


def rank_process(rank: int, address: str, verdicts: Any, *, silent_s: float = SILENT_S) -> None:
    """Another rank, in a process of its own."""
    ranks_watch.BEAT_S = BEAT_S
    watch = RankWatch(
        ProcessHooks("actor", lost=lambda error: verdicts.put((rank, error.message))), rank, 3, silent_s=silent_s
    )
    watch.connect(address, WAIT_S)
    watch.phase = "at train"
    time.sleep(600)


@pytest.fixture
def start_rank() -> Any:
    context = multiprocessing.get_context("spawn")
    verdicts: Any = context.Queue()
    processes = []

    def start(rank: int, address: str) -> tuple[Any, Any]:
        process = context.Process(target=rank_process, args=(rank, address, verdicts), daemon=True)
        process.start()
        processes.append(process)
        return process, verdicts

    yield start
    for process in processes:
        process.kill()
        process.join(30)


def wait_for(happened: Callable[[], bool], within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def phases(rank: Rank) -> list[str]:
    return sorted(peer.phase for peer in rank.watch._peers)


def test_a_killed_rank_is_named_to_every_other_rank(start_rank: Any) -> None:
    leader = Rank(0, 3)
    address = leader.watch.listen("127.0.0.1")
    one, verdicts = start_rank(1, address)
    start_rank(2, address)
    wait_for(lambda: phases(leader) == ["at train", "at train"])
    leader.watch.phase = "at train"
    one.kill()
    message = leader.verdict(LOST_S)
    assert message.startswith("rank 1 of actor is gone; it was at train, rank 0 was at train")
    assert verdicts.get(timeout=LOST_S) == (2, message)


def test_a_stopped_rank_is_noticed_by_its_silence_and_only_a_sibling_would_be_killed(start_rank: Any) -> None:
    leader = Rank(0, 3)
    one, _ = start_rank(1, leader.watch.listen("127.0.0.1"))
    wait_for(lambda: phases(leader) == ["at train"])
    os.kill(one.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    message = leader.verdict(SILENT_S + LOST_S)
    assert "rank 1 of actor has been silent for" in message
    assert time.monotonic() - stopped > 2 * BEAT_S, "its last beat may lie before the stop"
    # it is a child of this process, not a sibling: nobody but torchrun's own ranks is killed
    assert one.is_alive()


def test_the_silence_of_rank_0_ends_the_others(start_rank: Any) -> None:
    context = multiprocessing.get_context("spawn")
    addresses: Any = context.Queue()
    leader = context.Process(target=lead, args=(addresses,), daemon=True)
    leader.start()
    follower = Rank(1, 2)
    try:
        follower.watch.connect(addresses.get(timeout=WAIT_S), WAIT_S)
        wait_for(lambda: phases(follower) == ["at save"])
        assert leader.pid is not None
        os.kill(leader.pid, signal.SIGSTOP)
        assert "rank 0 of actor has been silent" in follower.verdict(SILENT_S + LOST_S)
    finally:
        leader.kill()
        leader.join(30)


def lead(addresses: Any) -> None:
    """Rank 0 in a process of its own."""
    ranks_watch.BEAT_S = BEAT_S
    watch = RankWatch(ProcessHooks("actor"), 0, 2, silent_s=SILENT_S)
    watch.phase = "at save"
    addresses.put(watch.listen("127.0.0.1"))
    time.sleep(600)


def test_rank_0_is_asked_to_stop_where_another_rank_is_and_nobody_is_lost() -> None:
    told, asked = threading.Event(), threading.Event()
    follower = Rank(1, 2, is_stopping=told.is_set)
    leader = Rank(0, 2, stop=asked.set)
    follower.watch.connect(leader.watch.listen("127.0.0.1"), WAIT_S)
    leader.watch.phase = "at train"
    wait_for(lambda: phases(follower) == ["at train"])
    assert not asked.is_set()
    told.set()
    assert asked.wait(WAIT_S)
    assert leader.verdicts.empty()
    assert follower.verdicts.empty()


def test_an_orderly_end_is_no_loss() -> None:
    leader, follower = Rank(0, 2), Rank(1, 2)
    follower.watch.connect(leader.watch.listen("127.0.0.1"), WAIT_S)
    wait_for(lambda: bool(leader.watch._peers) and leader.watch._peers[0].rank == 1)
    tell = leader.watch._tell

    def say_late(message: dict[str, object]) -> None:
        if "bye" in message:
            time.sleep(3 * BEAT_S)
        tell(message)

    leader.watch._tell = say_late  # type: ignore[method-assign]
    for rank in (leader, follower):
        rank.watch.leave()
        rank.watch._thread.join(WAIT_S)
        assert not rank.watch._thread.is_alive()
        wait_for(lambda: follower.watch._peers[0].ended is not None)
        time.sleep(GONE_S + 2 * BEAT_S)  # it would be judged by now
    assert leader.verdicts.empty()
    assert follower.verdicts.empty()


def test_a_stranger_who_connects_and_leaves_ends_nobody() -> None:
    leader, follower = Rank(0, 2), Rank(1, 2)
    address = leader.watch.listen("127.0.0.1")
    follower.watch.connect(address, WAIT_S)
    host, _, port = address.partition("/")[0].rpartition(":")
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"rank": 1, "pid": 1, "token": "guess"}\n{"lost": "you"}\n',
        b"x" * 200_000,
        b"",
    ):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
            stranger.sendall(words)
    time.sleep(GONE_S + 2 * BEAT_S)
    wait_for(lambda: [peer.rank for peer in leader.watch._peers] == [1])
    assert leader.verdicts.empty()
    leader.watch.leave()
    follower.watch.leave()


def test_a_rank_that_finds_nobody_says_so() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        port = silent.getsockname()[1]
        with pytest.raises(WorkerLostError, match="rank 0 of actor does not answer"):
            Rank(1, 2).watch.connect(f"127.0.0.1:{port}/x", 1.0)
