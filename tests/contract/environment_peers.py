"""What the environment tests share: a counting environment, its server, and a wire that loses, repeats and delays."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rolecall.environment import Action, Answer, Env, Task
from rolecall.environment.client import EnvironmentClient, open_environment
from rolecall.environment.server import description, new_server
from rolecall.environment.sessions import Sessions
from rolecall.errors import DeadlineError, UnavailableError
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.v1 import environment_pb2

State = environment_pb2.EpisodeState
DESCRIBED = {"max_sessions": 8, "lease_s": 60.0, "reset_timeout_s": 6.0, "step_timeout_s": 6.0, "close_timeout_s": 6.0}


class Counting(Env):
    """An environment that says how often it was called, ends when it is told "end", and misbehaves as it is told."""

    living: int = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        self.num_turns = 0
        with self.lock:
            Counting.living += 1

    def reset(self, task: Task, seed: int) -> str:
        self.task, self.seed = task, seed
        if task.metadata.get("slow"):
            time.sleep(float(task.metadata["slow"]))
        if task.metadata.get("broken"):
            raise RuntimeError("cannot boot")
        return f"begin {task.uid}/{seed}"

    def step(self, action: Action) -> str | Answer:
        self.num_turns += 1
        match action.text.split():
            case ["end", *value]:
                return Answer("over", float(value[0]) if value else 1.0, is_over=True)
            case ["cut"]:
                return Answer("cut", 0.25, is_truncated=True)
            case ["exit"]:
                raise SystemExit("bye")
            case ["raise"]:
                raise RuntimeError("lost it")
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["mute"]:
                return Answer()
            case ["reward"]:
                return Answer("paid", 0.5)
        return f"{self.num_turns}: {action.text}"

    def grade(self) -> float:
        return 0.125 * self.num_turns

    def close(self) -> None:
        with self.lock:
            Counting.living -= 1


@asynccontextmanager
async def environment(
    make: Callable[[], Env] = Counting,
    address: str = "127.0.0.1:0",
    token: str | None = None,
    rpc: RpcSection = RpcSection(),
    tasks: Mapping[str, Sequence[Task]] = {},
    **described: Any,
) -> AsyncIterator[tuple[str, Sessions]]:
    """Serves an environment; gives its address and its sessions."""
    spec = description("counting", (0.0, 1.0), splits=tuple(tasks), **{**DESCRIBED, **described})
    sessions = Sessions(make, spec)
    server = new_server(sessions, address, rpc, token, tasks)
    bound = await server.start()
    await server.set_serving(True)
    reaping = asyncio.create_task(sessions.run())
    try:
        yield bound, sessions
    finally:
        reaping.cancel()
        await sessions.close()
        await server.drain(0.1)


@asynccontextmanager
async def client_of(address: str, rpc: RpcSection = RpcSection(), **reached: Any) -> AsyncIterator[EnvironmentClient]:
    """A client that has asked what the environment is, with further fields of the run's section."""
    client = open_environment(EnvironmentSection(address=address, **reached), rpc)
    try:
        await client.describe()
        yield client
    finally:
        await client.close()


def task(uid: str = "t", **metadata: Any) -> environment_pb2.Task:
    """A task with these fields."""
    made = environment_pb2.Task(uid=uid)
    made.metadata.update(metadata)
    return made


class BadWire:
    """A stub whose calls get lost on their way there or back, arrive twice or again later, as a seed says."""

    def __init__(self, stub: Any, seed: int, rate: float = 0.5) -> None:
        self._stub = stub
        self._draw = random.Random(seed)
        self._rate = rate
        self._later: set[asyncio.Task[Any]] = set()
        self.num_faults = 0
        self.num_calls: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._stub, method)

        async def made(request: Any, timeout: float) -> Any:  # as gRPC calls it
            self.num_calls[method] += 1
            if self._draw.random() >= self._rate:
                return await call(request, timeout=timeout)
            self.num_faults += 1
            match self._draw.choice(["there", "back", "twice", "later"]):
                case "there":
                    raise UnavailableError("lost on the way there")
                case "back":
                    await call(request, timeout=timeout)
                    raise DeadlineError("lost on the way back")
                case "twice":
                    first = asyncio.create_task(_awaited(call(request, timeout=timeout)))
                    try:
                        answer = await call(request, timeout=timeout)
                    finally:
                        await asyncio.wait({first})
                        failed = first.exception()
                    assert failed is None
                    assert method == "CloseOlder" or answer == first.result(), "only what it closed by then differs"
                    return answer
                case _:
                    self._later.add(asyncio.create_task(self._again(call, request)))
                    return await call(request, timeout=timeout)

        return made

    async def _again(self, call: Any, request: Any) -> None:
        await asyncio.sleep(self._draw.random() / 20)
        await asyncio.gather(call(request, timeout=5.0), return_exceptions=True)

    async def quiet(self) -> None:
        """Returns when nothing is under way any more."""
        await asyncio.gather(*self._later)


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call
