"""What is left of a checkpoint whose loop is abandoned while it is committed, and of one that was committed and cannot
clean up after itself.
"""

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeVar

import pytest

from rolecall.checkpoint.manifest import (
    COMMITTED,
    IDENTITY,
    RUN_ID,
    Attempt,
    RunCheckpoints,
    folder_of,
    read_committed,
    store,
    verify,
)
from rolecall.checkpoint.storage import Storage, open_storage
from rolecall.errors import CheckpointMismatchError, SaveHangsError, StorageUnavailableError
from rolecall.settings import RunSettings
from rolecall.training.serving.hooks import nothing
from rolecall.v1 import training_pb2 as pb
from services.controller.durable.commits import Commits
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.durable.saving import CheckpointSaver
from services.controller.step.trainers import Trainer
from services.controller.threads import StoreThreads

T = TypeVar("T")
POINT = RunPoint("test", 0, 1, 1, 1, 2, 2, {}, "", [])
DEADLINE_S = 10.0


class WrappedStorage:
    """A folder that leaves all to another."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url

    def at(self, name: str) -> Storage:
        return self.inner.at(name)

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        return self.inner.write(name, produce)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytearray:
        return self.inner.read(name, start, end)

    def files(self) -> dict[str, int]:
        return self.inner.files()

    def remove(self, names: Iterable[str]) -> None:
        self.inner.remove(names)


class SlowToCommit(WrappedStorage):
    """Waits just before or just after COMMITTED is written until it may go on."""

    def __init__(self, inner: Storage, *, after: bool) -> None:
        super().__init__(inner)
        self._after = after
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        if not self._after:
            self._wait()
        result = self.inner.write(name, produce)
        if self._after:
            self._wait()
        return result

    def _wait(self) -> None:
        self.reached.set()
        assert self.may_go_on.wait(DEADLINE_S)


class SlowToDiscard(Checkpoints):
    """Waits before it discards until it may go on."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, 2)
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def discard(self, attempt: Attempt) -> None:
        self.reached.set()
        assert self.may_go_on.wait(DEADLINE_S)
        super().discard(attempt)


class Undeletable(WrappedStorage):
    """Refuses to delete."""

    def remove(self, names: Iterable[str]) -> None:
        raise StorageUnavailableError(f"cannot delete in {self.url}")


class DeletingOnce(WrappedStorage):
    """Deletes once, and refuses from then on."""

    may_delete = True

    def remove(self, names: Iterable[str]) -> None:
        if not self.may_delete:
            raise StorageUnavailableError(f"cannot delete in {self.url}")
        self.may_delete = False
        super().remove(names)


class QuickStub:
    """A trainer whose share is one file, written at once."""

    async def SaveCheckpoint(
        self, request: pb.SaveTrainerCheckpointRequest, timeout: float
    ) -> AsyncIterator[pb.SaveTrainerCheckpointResponse]:
        yield pb.SaveTrainerCheckpointResponse(snapshot=pb.CheckpointSnapshot())
        file = store(open_storage(request.path), "weights", lambda file: file.write(b"weights"))
        written = pb.CheckpointFile(name=file.name, num_bytes=file.num_bytes, checksum=file.checksum)
        yield pb.SaveTrainerCheckpointResponse(saved=pb.CheckpointFiles(files=[written]))


def saver_of(trainer: Trainer, checkpoints: Checkpoints, threads: StoreThreads) -> CheckpointSaver:
    return CheckpointSaver([trainer], checkpoints, Commits(checkpoints, threads, DEADLINE_S), threads, saved_step=0)


@pytest.mark.parametrize("after", [False, True], ids=["before COMMITTED is written", "after it"])
async def test_a_commit_whose_loop_is_abandoned_makes_a_whole_checkpoint(
    tmp_path: Path, make_settings: Callable[..., RunSettings], after: bool
) -> None:
    storage, threads, given_up = SlowToCommit(open_storage(str(tmp_path)), after=after), StoreThreads(), asyncio.Event()
    trainer = Trainer("actor", QuickStub(), make_settings().actor)  # type: ignore[arg-type]
    checkpoints = Checkpoints(storage, 1)
    saver = saver_of(trainer, checkpoints, threads)

    async def point() -> RunPoint:
        return POINT

    async def committed(folder: str) -> None:
        raise AssertionError("nobody is there any more to free rows")

    await saver.begin(1, POINT.step, point, committed, given_up.set)
    assert await asyncio.to_thread(storage.reached.wait, DEADLINE_S)
    await asyncio.wait_for(saver.cancel(), DEADLINE_S)
    assert given_up.is_set()
    storage.may_go_on.set()
    await threads.settle()
    threads.close()
    latest = checkpoints.latest()
    assert latest is not None
    assert [file.name for file in latest[0].files] == ["actor/weights"]
    verify(latest[0].storage, latest[0].files, nothing)


async def test_what_is_saved_is_told_once_it_is_committed_and_a_failure_takes_nothing_back(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    """By it the loop knows whether the run's end is saved already."""
    threads, folders = StoreThreads(), list[str]()
    trainer = Trainer("actor", QuickStub(), make_settings().actor)  # type: ignore[arg-type]
    checkpoints = Checkpoints(open_storage(str(tmp_path)), 2)
    saver = saver_of(trainer, checkpoints, threads)

    async def point() -> RunPoint:
        return POINT

    async def committed(folder: str) -> None:
        folders.append(folder)

    async def failing() -> RunPoint:
        raise StorageUnavailableError("away")

    await saver.begin(1, 3, point, committed, lambda: None)
    await asyncio.wait_for(saver.finish(), DEADLINE_S)
    assert (saver.saved_step, saver.step, folders) == (3, 3, [str(tmp_path / "step-00000003")])
    with pytest.raises(StorageUnavailableError):
        await saver.begin(1, 4, failing, committed, lambda: None)
    assert (saver.saved_step, saver.step) == (3, 3)
    threads.close()


async def test_a_commit_that_hangs_is_waited_for_no_more_and_has_others_refused_until_it_ends(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    storage, threads, num_given_up = SlowToCommit(open_storage(str(tmp_path)), after=True), StoreThreads(), list[None]()
    trainer = Trainer("actor", QuickStub(), make_settings().actor)  # type: ignore[arg-type]
    checkpoints = Checkpoints(storage, 2)
    commits = Commits(checkpoints, threads, 0.2)
    lives = [CheckpointSaver([trainer], checkpoints, commits, threads, saved_step=0) for _ in range(2)]

    async def point() -> RunPoint:
        return POINT

    async def committed(folder: str) -> None:
        pass

    def give_up() -> None:
        num_given_up.append(None)

    await lives[0].begin(1, 3, point, committed, give_up)
    with pytest.raises(SaveHangsError, match=r"the manifest of step 3 is still being written beside .*step-00000003"):
        await asyncio.wait_for(lives[0].finish(), DEADLINE_S)
    for saver in lives:
        with pytest.raises(SaveHangsError):
            await asyncio.wait_for(saver.begin(1, 3, point, committed, give_up), DEADLINE_S)
    assert len(num_given_up) == 3
    assert lives[0].step == lives[0].saved_step == 0
    storage.may_go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        await threads.settle()
    assert checkpoints.latest() is not None, "it was only slow"
    await lives[1].begin(1, 4, point, committed, give_up)
    await asyncio.wait_for(lives[1].finish(), DEADLINE_S)
    assert lives[1].saved_step == 4
    threads.close()


@pytest.mark.parametrize("kind", [StorageUnavailableError, SaveHangsError])
async def test_what_a_failed_try_has_written_is_deleted_unless_a_save_hangs(
    tmp_path: Path, make_settings: Callable[..., RunSettings], kind: type[StorageUnavailableError]
) -> None:
    threads, trainer = StoreThreads(), Trainer("actor", QuickStub(), make_settings().actor)  # type: ignore[arg-type]
    storage = open_storage(str(tmp_path))
    saver = saver_of(trainer, Checkpoints(storage, 2), threads)

    async def failing() -> RunPoint:
        async with asyncio.timeout(DEADLINE_S):
            while not storage.files():
                await asyncio.sleep(0.01)
        raise kind("away")

    async def committed(folder: str) -> None:
        raise AssertionError("nothing is committed")

    with pytest.raises(kind):
        await saver.begin(1, 3, failing, committed, lambda: None)
    assert bool(storage.files()) == (kind is SaveHangsError)
    threads.close()


async def test_a_loop_that_is_abandoned_while_it_cleans_up_a_failed_try_ends(
    tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    threads, trainer = StoreThreads(), Trainer("actor", QuickStub(), make_settings().actor)  # type: ignore[arg-type]
    checkpoints = SlowToDiscard(open_storage(str(tmp_path)))
    saver = saver_of(trainer, checkpoints, threads)

    async def failing() -> RunPoint:
        raise StorageUnavailableError("away")

    async def committed(folder: str) -> None:
        raise AssertionError("nothing is committed")

    beginning = asyncio.create_task(saver.begin(1, 3, failing, committed, lambda: None))
    assert await asyncio.to_thread(checkpoints.reached.wait, DEADLINE_S)
    beginning.cancel()
    await asyncio.wait({beginning}, timeout=DEADLINE_S)
    checkpoints.may_go_on.set()
    assert beginning.cancelled()
    threads.close()


def commit(checkpoints: RunCheckpoints, step: int, run_id: str = "") -> Attempt:
    attempt = checkpoints.begin(step)
    state = {IDENTITY: {RUN_ID: run_id} if run_id else {}}
    checkpoints.commit(attempt, [store(attempt.storage, "weights", lambda file: file.write(b"weights"))], state)
    return attempt


def test_a_checkpoint_of_another_run_is_neither_taken_nor_written_over(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first, second = (RunCheckpoints(storage, 1, run_id) for run_id in ("first", "second"))
    commit(first, 0, "first")
    commit(second, 0, "second")  # nothing was trained in either
    made = commit(first, 20, "first")
    for refused in (second.latest, lambda: commit(second, 20, "second"), lambda: commit(second, 40, "second")):
        with pytest.raises(
            CheckpointMismatchError, match=r"/step-00000020/\w+ was made by another run, and each needs"
        ):
            refused()
    newest = first.latest()
    assert newest is not None
    assert newest.attempt == made.name
    verify(newest.storage, newest.files, nothing)
    commit(first, 40, "first")


def test_of_two_runs_that_commit_a_step_in_the_same_moment_one_is_told(tmp_path: Path) -> None:
    storage, theirs = open_storage(str(tmp_path)), list[Attempt]()

    class Overtaken(WrappedStorage):
        """Another run commits the step just after."""

        def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
            written = super().write(name, produce)
            theirs.append(commit(RunCheckpoints(self.inner, 1), 20, "second"))
            return written

    with pytest.raises(CheckpointMismatchError, match="was made by another run"):
        commit(RunCheckpoints(Overtaken(storage), 1, "first"), 20, "first")
    newest = RunCheckpoints(storage, 1, "second").latest()
    assert newest is not None
    assert newest.attempt == theirs[0].name
    verify(newest.storage, newest.files, nothing)


def test_a_checkpoint_of_a_newer_release_is_refused_in_words(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(open_storage(str(tmp_path)), 1)
    checkpoints.commit(checkpoints.begin(3), [], asdict(POINT) | {"weather": "fine"})
    with pytest.raises(CheckpointMismatchError, match=r"says \['weather'\], which this release does not know; go on"):
        Checkpoints(open_storage(str(tmp_path)), 1).latest()


def test_whose_run_a_checkpoint_is_counts_where_both_say_it_and_it_can_be_read(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    commit(RunCheckpoints(storage, 9), 1)  # of a release, or of a controller without a directory, that kept no id
    mine = RunCheckpoints(storage, 9, "mine")
    commit(mine, 2, "mine")
    commit(RunCheckpoints(storage, 9), 3)
    (tmp_path / folder_of(3) / COMMITTED).write_text("{}")
    commit(mine, 4, "mine")
    assert mine.latest() is not None


@pytest.mark.parametrize("folder", ["{}", "memory:/{}"], ids=["disk", "memory"])
def test_an_attempt_that_became_a_checkpoint_is_not_discarded_and_another_at_its_step_is(
    tmp_path: Path, folder: str
) -> None:
    checkpoints = RunCheckpoints(open_storage(folder.format(tmp_path)), 1)
    attempt, other = commit(checkpoints, 1), checkpoints.begin(1)
    store(other.storage, "weights", lambda file: file.write(b"others"))
    for each in (attempt, other):
        checkpoints.discard(each)
    latest = checkpoints.latest()
    assert latest is not None
    verify(latest.storage, latest.files, nothing)
    assert not other.storage.files()


@pytest.mark.parametrize(
    ("attempt", "name"),
    [
        *(
            ("3fa2c1d0", name)
            for name in ("actor/model/../../../../victim.txt", "..", "/tmp/victim.txt", "actor//x", "")
        ),
        *((attempt, "actor/index.json") for attempt in ("..", "", "/tmp", "a/b", "x::file:")),
    ],
)
def test_names_of_a_checkpoint_from_elsewhere_lead_nowhere_else(tmp_path: Path, attempt: str, name: str) -> None:
    text = json.dumps({"step": 1, "attempt": attempt, "files": {name: [1, "0"]}, "state": {}})
    outer = {"checkpoint": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (tmp_path / folder_of(1)).mkdir()
    (tmp_path / folder_of(1) / COMMITTED).write_text(json.dumps(outer))
    with pytest.raises(CheckpointMismatchError, match=r"COMMITTED names .*, which is no file of it"):
        read_committed(open_storage(str(tmp_path / folder_of(1))))


def test_a_checkpoint_is_made_though_what_is_old_cannot_be_deleted_which_goes_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path))
    commit(RunCheckpoints(storage, 1), 1)
    with caplog.at_level(logging.WARNING):
        commit(RunCheckpoints(Undeletable(storage), 1), 2)
    assert "the checkpoint of step 2 is committed" in caplog.text
    assert RunCheckpoints(storage, 1).steps() == [1, 2]
    commit(RunCheckpoints(storage, 1), 3)
    assert {name.partition("/")[0] for name in storage.files()} == {"step-00000003"}
    assert f"step-00000003/{COMMITTED}" in storage.files()


def test_a_checkpoint_with_a_file_that_was_cut_short_does_not_count_as_one_to_keep(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    checkpoints = RunCheckpoints(storage, 2)
    commit(checkpoints, 1)
    commit(checkpoints, 2).storage.write("weights", lambda file: file.write(b"w"))
    commit(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("folder", ["{}", "memory:/{}"], ids=["disk", "memory"])
def test_going_back_deletes_what_came_after_and_keeps_the_files_of_the_step(tmp_path: Path, folder: str) -> None:
    storage = open_storage(folder.format(tmp_path))
    checkpoints = RunCheckpoints(storage, 9)
    attempt = [commit(checkpoints, step) for step in (1, 2, 3, 4)][1]
    left = store(checkpoints.begin(5).storage, "weights", lambda file: file.write(b"never committed"))
    checkpoints.go_back(2, {"lineage": 7})
    newest = checkpoints.latest()
    assert newest is not None
    assert (newest.step, newest.state, newest.attempt) == (2, {"lineage": 7}, attempt.name)
    verify(newest.storage, newest.files, nothing)
    assert left.num_bytes > 0
    assert {name.partition("/")[0] for name in storage.files()} == {"step-00000001", "step-00000002"}


def test_going_back_that_is_cut_short_leaves_the_newest_whole(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    checkpoints = RunCheckpoints(storage, 9)
    for step in (1, 2, 3):
        commit(checkpoints, step)
    with pytest.raises(StorageUnavailableError):
        RunCheckpoints(DeletingOnce(storage), 9).go_back(1, {})
    newest = checkpoints.latest()
    assert newest is not None
    assert (checkpoints.steps(), newest.step) == ([1, 3], 3)
    verify(newest.storage, newest.files, nothing)
    checkpoints.go_back(1, {})
    assert checkpoints.steps() == [1]
