"""A supervised pool of scorer processes: killable, with a deadline per item.

Owns the worker processes and the queue of tasks before them. A task is one item, a batch for a function of many or one
that is awaited on several items at the same time, or a group for one that compares. A `WorkerThread` per worker starts
it, sends it a few tasks at a time, times the one it is on, and kills it when that one is late: that task alone fails
with TIMEOUT, the others go back to the head of the queue. A worker that dies by itself fails the task it was on with
WORKER_DIED, or with CPU_SPENT where its scorer bounds the CPU time of an item. A batch is not failed but cut in two.
What waits for a component that has been late from the start on fails with it. Knows no gRPC and no reward arithmetic.

Bounds: MAX_QUEUED_TASKS wait (more are answered OVERLOADED at once); a worker holds at most MAX_TASKS. A task that
waits is bounded by its call, whose callers may have left (underway.py): a cancelled call's tasks are skipped.
"""

import asyncio
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolecall.errors import DeadlineError, RoleCallError, UnavailableError, WorkerLostError
from rolecall.scoring.awaited import TIMEOUT
from rolecall.scoring.results import error_result
from rolecall.settings import FunctionScorer
from rolecall.v1 import reward_pb2
from services.reward.catalog import LocalScorer, parted
from services.reward.worker_process import CpuSpentError, WorkerProcess

WORKER_DIED = "WORKER_DIED"
"""Code of an item whose worker ended while it was on it: killed from outside (worth another try), or by the item
itself.
"""
CPU_SPENT = "CPU_SPENT"
"""Code of an item that took all the CPU time that its scorer allows."""
AWAITED_GRACE_S = 5.0
"""Seconds past an item's own in which a worker that awaits several is to say which are late. Then one of them holds its
event loop, or refuses to be cancelled, and the worker is killed.
"""
MAX_CANCELLED = 5
"""Late items after which a worker that awaits is replaced. Each may have left a thread hanging that a blocking call was
given to, which cancels nothing; asyncio has at least as many for a process (cores + 4), and then none for anybody.
"""
MIN_LATE = 3
"""Items in a row that were stopped at their deadline, from which on their component is told to hang."""
MIN_STOPPED, HANGS_AFTER_S = 10, 600.0
"""Calls that were stopped, and seconds since the first was, that make it a component's own fault. None of its calls has
ever ended in time then. A machine that is busy while a run starts, or a server that the function asks, has that long.
"""
MAX_QUEUED_TASKS = 65536
MAX_TASKS = 64
START_TIMEOUT_S = 120.0
"""Longest start of a worker, its imports included."""
MAX_FAILED_STARTS = 3
"""Starts in a row that may fail before a thread answers WORKER_FAILED instead of trying again by itself."""
STOP_POLL_S = 0.05
"""Seconds between two kills while a thread ends: it may have been starting a worker."""


@dataclass
class Call:
    """A caller's wait for all its items."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[list[reward_pb2.ScoreResult]]"
    results: list[reward_pb2.ScoreResult | None]
    missing: int


@dataclass
class Task:
    """Items for one component that are scored by one call of it. `places` are theirs in the call's results."""

    call: Call
    places: Sequence[int]
    component: int
    items: Sequence[reward_pb2.ScoreItem]
    timeout_s: float
    may_be_cut: bool
    """Whether parts of it are scored as well: it is a batch."""
    lateness: str
    """What is said of it when it is late: who, and by which setting."""

    def finish(self, results: Sequence[reward_pb2.ScoreResult]) -> None:
        """Hands in the results, one per item; the last ones of a call wake the caller. Called under the pool's lock."""
        for place, item, result in zip(self.places, self.items, results, strict=True):
            result.id = item.id
            self.call.results[place] = result
        self.call.missing -= len(self.places)
        if self.call.missing == 0 and not self.call.loop.is_closed():
            self.call.loop.call_soon_threadsafe(_resolve, self.call)

    def fail(self, code: str, message: str, *, retryable: bool) -> None:
        """Hands in an error for each item. Called under the pool's lock."""
        self.finish([error_result(item.id, code, message, retryable) for item in self.items])

    def halves(self) -> list["Task"]:
        """Two tasks in place of a batch; none where it cannot be cut."""
        if not self.may_be_cut or len(self.places) == 1:
            return []
        middle = len(self.places) // 2
        parts = (slice(None, middle), slice(middle, None))
        return [replace(self, places=self.places[part], items=self.items[part]) for part in parts]


def _resolve(call: Call) -> None:
    if not call.future.done():
        call.future.set_result([result for result in call.results if result is not None])


@dataclass
class Lateness:
    """The calls of a component that were stopped at their deadline."""

    num_in_a_row: int = 0
    """The last ones, those that were cut in two included."""
    num_stopped: int = 0
    """Calls that cannot be cut."""
    first_at_s: float = 0.0
    """When the first was stopped, monotonic."""
    has_answered: bool = False
    """Whether any call has ended in time."""

    def answered(self) -> None:
        """Notes a call that ended in time."""
        self.num_in_a_row, self.has_answered = 0, True

    def stopped(self, num_calls: int, *, are_cut: bool = False) -> bool:
        """Notes calls that were stopped; returns whether the component is to blame, and no item."""
        now_s = time.monotonic()
        self.num_in_a_row += num_calls
        if not are_cut:
            self.first_at_s = self.first_at_s if self.num_stopped else now_s
            self.num_stopped += num_calls
        is_long = self.num_stopped >= MIN_STOPPED and now_s - self.first_at_s >= HANGS_AFTER_S
        return is_long and not self.has_answered


@dataclass
class Queue:
    """Tasks that wait, and the threads that wait for tasks. `condition` guards it."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    tasks: deque[Task] = field(default_factory=deque)
    closed: bool = False
    late: defaultdict[int, Lateness] = field(default_factory=lambda: defaultdict(Lateness))
    """The lateness of each component that was called."""

    def give_up(self, component: int) -> None:
        """Fails what waits for a component that hangs, for good. Called under the condition, after a late call: each
        that is asked for later is a trial of it again.
        """
        waiting = [task for task in self.tasks if task.component == component]
        self.tasks = deque(task for task in self.tasks if task.component != component)
        for task in waiting:
            why = f"{task.lateness} each time since the service started; mend it, or raise that"
            task.fail(TIMEOUT, why, retryable=False)


class WorkerPool:
    """Scores items with the components given, each item of a component within that component's seconds."""

    def __init__(
        self,
        scorers: Mapping[str, LocalScorer],
        timeouts_s: Mapping[str, float],
        num_workers: int,
        search_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        """environment: of the worker processes, whole."""
        self._timeouts_s = dict(timeouts_s)
        self._scorers = dict(scorers)
        self._indices = {name: index for index, name in enumerate(scorers)}
        dumped = {name: scorer.model_dump(mode="json") for name, scorer in scorers.items()}
        setup = json.dumps(
            {"components": dumped, "timeouts_s": self._timeouts_s, "search_path": str(search_path)}
        ).encode()
        self._awaited: frozenset[str] = frozenset()
        self._queue = Queue()
        self._threads = [WorkerThread(self._queue, setup, num_workers, environment) for _ in range(num_workers)]

    async def start(self) -> None:
        """Starts the workers and waits until all have imported their scorers. ConfigError says which component cannot
        start.
        """
        first, *others = self._threads
        await self._start(first)  # alone, so that a scorer that cannot be imported is said once
        self._awaited = first.awaited
        await asyncio.gather(*(self._start(thread) for thread in others))

    async def score(self, component: str, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoreResult]:
        """One result per item, in the items' order. Waits for the slowest; safe to cancel and to repeat."""
        if not items:
            return []
        loop = asyncio.get_running_loop()
        call = Call(loop, loop.create_future(), [None] * len(items), len(items))
        is_awaited, may_be_cut = component in self._awaited, self.batches(component)
        timeout_s = self._timeouts_s[component] + (AWAITED_GRACE_S if is_awaited else 0.0)
        index, lateness = self._indices[component], self._lateness(component)
        tasks = [
            Task(call, places, index, [items[place] for place in places], timeout_s, may_be_cut, lateness)
            for places in parted(self._scorers[component], items, is_awaited=is_awaited)
        ]
        self._submit(tasks)
        return await call.future  # bounded: every task has its timeout_s, past which its worker is killed

    def batches(self, component: str) -> bool:
        """Whether items of it are scored together only because that is faster. Known once it has started."""
        scorer = self._scorers[component]
        return component in self._awaited or (isinstance(scorer, FunctionScorer) and scorer.scope == "batch")

    @property
    def late(self) -> dict[str, str]:
        """The components whose last items, MIN_LATE or more, were all stopped at their deadline, and what is said."""
        return {
            name: self._lateness(name)
            for name, index in self._indices.items()
            if self._queue.late[index].num_in_a_row >= MIN_LATE
        }

    def close(self) -> None:
        """Kills the workers and fails what waits. Returns when every process is reaped."""
        with self._queue.condition:  # bounded: held to look at the queue, never while scoring
            self._queue.closed = True
            _fail(self._queue.tasks, "STOPPING", "the reward service is stopping", retryable=True)
            self._queue.tasks.clear()
            self._queue.condition.notify_all()
        for thread in self._threads:
            thread.stop()

    def _lateness(self, component: str) -> str:
        scorer = self._scorers[component]
        target = scorer.target if isinstance(scorer, FunctionScorer) else None
        setting = f"reward.components.{component}.timeout_s = {self._timeouts_s[component]:g} s"
        return f"{target or f'the scorer of kind {scorer.kind}'} took longer than {setting}"

    async def _start(self, thread: "WorkerThread") -> None:
        thread.start()
        await asyncio.to_thread(thread.wait_ready)

    def _submit(self, tasks: list[Task]) -> None:
        with self._queue.condition:  # bounded: held to look at the queue, never while scoring
            if self._queue.closed:
                _fail(tasks, "STOPPING", "the reward service is stopping", retryable=True)
                return
            room = max(0, MAX_QUEUED_TASKS - len(self._queue.tasks))
            self._queue.tasks.extend(tasks[:room])
            _fail(
                tasks[room:],
                "OVERLOADED",
                f"{MAX_QUEUED_TASKS} tasks wait already; score fewer at a time or add reward.num_workers",
                retryable=True,
            )
            self._queue.condition.notify_all()


class WorkerThread:
    """A thread that drives one worker process."""

    def __init__(self, queue: Queue, setup: bytes, num_threads: int, environment: Mapping[str, str]) -> None:
        self._queue = queue
        self._setup = setup
        self._num_threads = num_threads
        self._environment = environment
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._ready = threading.Event()
        self._num_cancelled = 0
        """Late items of the present worker."""
        self._start_error: RoleCallError | None = None
        self._worker: WorkerProcess | None = None

    def start(self) -> None:
        """Starts the thread, and it the worker."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Blocks until the worker can score. ConfigError when it cannot, WorkerLostError when it was killed,
        DeadlineError after START_TIMEOUT_S.
        """
        if not self._ready.wait(START_TIMEOUT_S):
            raise DeadlineError(
                f"a scorer's worker process did not start within {START_TIMEOUT_S:.0f} s; see the service's log for "
                "what it imports"
            )
        if self._start_error:
            raise type(self._start_error)(f"the reward service cannot start: {self._start_error.message}")

    @property
    def awaited(self) -> frozenset[str]:
        """Components whose items the worker awaits at the same time; known once it is ready."""
        return self._worker.awaited if self._worker is not None else frozenset()

    def stop(self) -> None:
        """Ends the worker and the thread; the queue must be closed."""
        while self._thread.is_alive():
            worker = self._worker
            if worker is not None:
                worker.interrupt()
            self._thread.join(STOP_POLL_S)

    def _run(self) -> None:
        worker, error = self._start_worker(None)
        self._start_error = error
        self._ready.set()
        num_failed_starts = 0
        while True:
            # A lost worker is replaced before the thread takes more: meanwhile the other threads do its work.
            if worker is None or error is not None or not worker.alive():
                worker, error = self._start_worker(worker)
                num_failed_starts = 0 if error is None else num_failed_starts + 1
                if 0 < num_failed_starts < MAX_FAILED_STARTS:
                    continue
            tasks = self._take()
            if not tasks:
                break
            if worker is None or error is not None:
                self._fail(
                    tasks,
                    "WORKER_FAILED",
                    f"a scorer's worker process cannot start: {error.message if error else 'it is stopping'}",
                    retryable=True,
                )
            elif not worker.alive():  # lost while it had nothing to do: no item is to blame
                self._give_back(tasks)
            else:
                self._score(worker, tasks)
        if worker is not None:
            worker.kill()

    def _start_worker(self, old: WorkerProcess | None) -> tuple[WorkerProcess | None, RoleCallError | None]:
        """A new worker in place of `old`, or why there is none."""
        if old is not None:
            old.kill()
        if self._queue.closed:
            return None, UnavailableError("the reward service is stopping")
        self._num_cancelled = 0
        try:
            self._worker = WorkerProcess(self._setup, self._environment)
        except OSError as error:  # a bound of the machine, which may have room again for the next attempt
            return None, UnavailableError(
                f"the machine gives it no process ({error}); look at its memory and its limits of processes and files"
            )
        return self._worker, self._worker.wait_ready(START_TIMEOUT_S)

    def _take(self) -> deque[Task]:
        """The next tasks, at least one; none when the queue is closed."""
        with self._queue.condition:  # bounded: held to look at the queue, never while scoring
            while not self._queue.closed:
                waiting = self._queue.tasks
                share = min(MAX_TASKS, -(-len(waiting) // self._num_threads))
                taken = deque(waiting.popleft() for _ in range(share))
                live = deque(task for task in taken if not task.call.future.done())
                if live:
                    return live
                if not taken:
                    # bounded: by nothing, on purpose: a worker's thread waits for items until close
                    self._queue.condition.wait()
        return deque()

    def _score(self, worker: WorkerProcess, tasks: deque[Task]) -> None:
        """Runs `tasks` until all are answered or the worker is lost; what it did not get to goes back to the queue."""
        payloads = [reward_pb2.ScoreRequest(items=task.items).SerializeToString() for task in tasks]
        sent = [(task.component, payload, task.timeout_s) for task, payload in zip(tasks, payloads, strict=True)]
        hung: int | None = None
        try:
            for results in worker.score(sent):
                num_late = sum(result.error.code == TIMEOUT for result in results)
                self._num_cancelled += num_late
                with self._queue.condition:
                    late = self._queue.late[tasks[0].component]
                    if num_late < len(results):
                        late.answered()
                    elif late.stopped(num_late):
                        hung = tasks[0].component
                        break
                    tasks.popleft().finish(results)
        except DeadlineError:
            with self._queue.condition:
                if self._queue.late[tasks[0].component].stopped(1, are_cut=bool(tasks[0].halves())):
                    hung = tasks[0].component
            if hung is None:
                self._is_to_blame(tasks, TIMEOUT, f"{tasks[0].lateness} and was stopped")
        except CpuSpentError:
            self._fail([tasks.popleft()], CPU_SPENT, "the item took all its CPU time", retryable=False)
        except WorkerLostError as error:
            self._is_to_blame(
                tasks, WORKER_DIED, f"the scorer's process ended while it scored the item ({error.message})"
            )
        if hung is not None or self._num_cancelled >= MAX_CANCELLED:
            worker.kill()
        if tasks:
            self._give_back(tasks)
        if hung is not None:
            with self._queue.condition:  # bounded: held to look at the queue, never while scoring
                self._queue.give_up(hung)

    def _is_to_blame(self, tasks: deque[Task], code: str, message: str) -> None:
        """The worker was lost over the first of `tasks`: a batch is cut in two in its place, anything else fails."""
        task = tasks.popleft()
        halves = task.halves()
        tasks.extendleft(reversed(halves))
        if not halves:
            self._fail([task], code, message, retryable=True)

    def _give_back(self, tasks: deque[Task]) -> None:
        with self._queue.condition:  # bounded: held to look at the queue, never while scoring
            if self._queue.closed:
                _fail(tasks, "STOPPING", "the reward service is stopping", retryable=True)
                return
            self._queue.tasks.extendleft(reversed(tasks))
            self._queue.condition.notify_all()

    def _fail(self, tasks: Iterable[Task], code: str, message: str, *, retryable: bool) -> None:
        with self._queue.condition:  # bounded: held to look at the queue, never while scoring
            _fail(tasks, code, message, retryable=retryable)


def _fail(tasks: Iterable[Task], code: str, message: str, *, retryable: bool) -> None:
    for task in tasks:
        task.fail(code, message, retryable=retryable)
