"""An honest EnvironmentService: it keeps every rule of `proto/rolecall/v1/environment.proto`, in methods small enough
that a liar replaces one of them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from rolecall.errors import (
    FencedError,
    InvalidInputError,
    RateLimitedError,
    RoleCallError,
    SessionLostError,
    TurnConflictError,
)
from rolecall.rpc.server import Server
from rolecall.rpc.server_calls import ServerCalls
from rolecall.scoring.description import component_spec
from rolecall.settings import RpcSection
from rolecall.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.pictures import picture

SERVICE_NAME = "rolecall.v1.EnvironmentService"
NUM_TURNS = 4
"""Turns of an episode, unless a liar says otherwise."""
NUM_TASKS = 20
"""Tasks of its split "train"."""
WORK_S = 0.02
"""Seconds that Reset and Step of one take which a second call is to meet at work; of others they take none."""
CALL_S = 120.0
"""Deadline of a call, for machines that are busy."""
LEASE_S = 1.5
"""The lease of one whose end is waited for."""
T = TypeVar("T")
State = environment_pb2.EpisodeState
Spec: TypeAlias = environment_pb2.DescribeEnvironmentResponse
ResetCall: TypeAlias = environment_pb2.ResetRequest
Opening: TypeAlias = environment_pb2.ResetResponse
StepCall: TypeAlias = environment_pb2.StepRequest
Answer: TypeAlias = environment_pb2.StepResponse
CloseCall: TypeAlias = environment_pb2.CloseRequest
Closed: TypeAlias = environment_pb2.CloseResponse
ListCall: TypeAlias = environment_pb2.ListTasksRequest
Listed: TypeAlias = environment_pb2.ListTasksResponse
OlderCall: TypeAlias = environment_pb2.CloseOlderRequest


@dataclass
class Kept:
    """A session of the honest one."""

    request: ResetCall
    opening: "asyncio.Future[Opening]"
    turn: int = 0
    text: str = ""
    answering: "asyncio.Future[Answer] | None" = None
    said: list[str] = field(default_factory=list)
    failed: bool = False
    touched_at: float = field(default_factory=time.monotonic)
    num_calls: int = 0


class Honest(environment_pb2_grpc.EnvironmentServiceServicer):
    """An environment that keeps every rule. It repeats what was said, ends after NUM_TURNS turns, cannot begin the
    ground truth "never", and fails at the action "fail". One loop, no threads.
    """

    def __init__(self, lease_s: float = 600.0, work_s: float = 0.0) -> None:
        self.work_s = work_s
        self.spec = Spec(
            name="honest",
            reward=component_spec("", 0, 1),
            components=[component_spec("style", -1, 1)],
            turn_rewards=True,
            max_sessions=3,
            lease_s=lease_s,
            roles=["user", "tool"],
            deterministic=True,
            reset_timeout_s=CALL_S,
            step_timeout_s=CALL_S,
            close_timeout_s=CALL_S,
            splits=["train", "test"],
        )
        self.tasks = [
            environment_pb2.Task(uid=str(i), messages=[trajectory_pb2.Message(role="user", content=f"Go {i}.")])
            for i in range(NUM_TASKS)
        ]
        self.open: dict[str, Kept] = {}
        self.closed: dict[str, Closed | None] = {}
        self.fences: dict[str, int] = {}
        self.change_opening: Callable[[Opening], None] = lambda opening: None
        self.change_answer: Callable[[Answer], None] = lambda answer: None
        self.change_grade: Callable[[Closed], None] = lambda closed: None

    async def Describe(self, request: Any, context: Any) -> Spec:
        return self.spec

    async def ListTasks(self, request: ListCall, context: Any) -> Listed:
        if request.split not in self.spec.splits:
            raise InvalidInputError("there is no such split")
        start = int(request.page_token or 0)
        end = start + request.page_size
        page = [] if request.split == "test" else self.page(start, end)  # a split without tasks
        return Listed(tasks=page, next_page_token=str(end) if page and end < NUM_TASKS else "")

    def page(self, start: int, end: int) -> list[environment_pb2.Task]:
        return self.tasks[start:end]

    async def Reset(self, request: ResetCall, context: Any) -> Opening:
        kept = self.open.get(request.session)
        if kept is None:
            self.check_begin(request)
            kept = self.open[request.session] = Kept(request, asyncio.ensure_future(self.boot(request)))
        if kept.failed:
            raise RoleCallError("the episode has failed")
        return await self.calling(kept, kept.opening)

    def most_turns(self, kept: Kept) -> int:
        """Turns of this episode."""
        return NUM_TURNS

    def check_begin(self, request: ResetCall) -> None:
        """Refuses a session that must not be opened."""
        if request.task.ground_truth == "never":
            raise InvalidInputError("no such puzzle")
        self.check_closed(request)
        self.check_fence(request)
        self.check_places()

    def check_closed(self, request: ResetCall) -> None:
        if request.session in self.closed:
            raise SessionLostError("it was closed")

    def check_fence(self, request: ResetCall) -> None:
        self.fences[request.group] = max(request.fence, self.fences.get(request.group, 0))
        if request.fence < self.fences[request.group]:
            raise FencedError("a newer claim was here")

    def check_places(self) -> None:
        if 0 < self.spec.max_sessions <= len(self.open):
            raise RateLimitedError("no place is free")

    async def boot(self, request: ResetCall) -> Opening:
        await asyncio.sleep(self.work_s)
        opening = Opening(messages=[message("user", f"{request.task.uid}, {request.seed}: go.")])
        opening.tools.add(name="look", description="Looks.", input_schema="{}")
        self.change_opening(opening)
        return opening

    async def Step(self, request: StepCall, context: Any) -> Answer:
        kept = self.open.get(request.session)
        if kept is None:
            raise SessionLostError("there is no such session")
        if kept.answering is not None and self.is_repeated(kept, request):
            return await self.calling(kept, kept.answering)
        if not self.is_due(kept, request):
            raise TurnConflictError(f"turn {request.turn} after {kept.turn}")
        kept.turn, kept.text = request.turn, request.action.text
        kept.answering = asyncio.ensure_future(self.take(kept, request))
        return await self.calling(kept, kept.answering)

    async def RunEpisode(self, request: environment_pb2.RunEpisodeRequest, context: Any) -> NoReturn:
        raise TurnConflictError("it runs no episodes by itself; call Step")

    def is_repeated(self, kept: Kept, request: StepCall) -> bool:
        return request.turn == kept.turn and request.action.text == kept.text

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        assert kept.answering is None or kept.answering.done()
        return request.turn == kept.turn + 1 and kept.turn < self.most_turns(kept)

    async def take(self, kept: Kept, request: StepCall) -> Answer:
        await asyncio.sleep(self.work_s)
        kept.said.append(request.action.text)
        if request.action.text == "fail" or kept.failed:
            return self.fail(kept)
        answer = self.answer(kept)
        self.change_answer(answer)
        return answer

    def fail(self, kept: Kept) -> Answer:
        kept.failed = True
        raise RoleCallError("the simulator is gone")

    def answer(self, kept: Kept) -> Answer:
        """The answer follows from everything that was said in the episode."""
        text = f"{len(kept.said)}: {len(''.join(kept.said))} characters, seed {kept.request.seed}"
        answer = Answer(messages=[message("tool", text)], state=State.EPISODE_STATE_CONTINUES)
        answer.messages[0].parts.add().image.data = picture(8, 8, len(kept.said))
        answer.reward.value = 0.125
        if len(kept.said) == self.most_turns(kept):
            answer.state = State.EPISODE_STATE_TERMINATED
            answer.reward.CopyFrom(self.reward(kept))
        return answer

    def reward(self, kept: Kept) -> trajectory_pb2.EpisodeReward:
        return trajectory_pb2.EpisodeReward(value=len(kept.said) / self.most_turns(kept), components={"style": -0.5})

    async def Close(self, request: CloseCall, context: Any) -> Closed:
        kept = self.open.pop(request.session, None)
        if kept is None:
            return self.close_again(request)
        closed = Closed()
        self.closed[request.session] = closed
        await asyncio.wait([kept.answering or kept.opening])
        if request.grade:
            self.grade(kept, closed)
            self.change_grade(closed)
        return closed

    def grade(self, kept: Kept, closed: Closed) -> None:
        if kept.failed:
            raise RoleCallError("the episode has failed")
        closed.reward.CopyFrom(self.reward(kept))

    def close_again(self, request: CloseCall) -> Closed:
        closed = self.closed.setdefault(request.session, None)
        if closed is None and request.grade:
            raise SessionLostError("there is no such session")
        return closed or Closed()

    async def CloseOlder(self, request: OlderCall, context: Any) -> environment_pb2.CloseOlderResponse:
        self.fences[request.group] = max(request.fence, self.fences.get(request.group, 0))
        older = [name for name, kept in self.open.items() if self.is_older(kept, request)]
        for name in older:
            del self.open[name]
            self.closed[name] = Closed()
        return environment_pb2.CloseOlderResponse(num_closed=len(older))

    def is_older(self, kept: Kept, request: OlderCall) -> bool:
        return kept.request.group == request.group and kept.request.fence < request.fence

    async def calling(self, kept: Kept, work: "asyncio.Future[T]") -> T:
        kept.num_calls += 1
        try:
            return await asyncio.shield(work)
        finally:
            kept.num_calls -= 1
            kept.touched_at = time.monotonic()

    def is_left(self, kept: Kept) -> bool:
        """Whether nobody called a session for so long that it is closed."""
        return kept.num_calls == 0 and time.monotonic() - kept.touched_at > 1.5 * self.spec.lease_s

    async def reap(self) -> None:
        """Closes sessions whose lease has ended. Runs until cancelled."""
        while True:
            await asyncio.sleep(self.spec.lease_s / 10)
            for name, kept in list(self.open.items()):
                if self.is_left(kept):
                    del self.open[name]
                    self.closed[name] = Closed()


def message(role: str, text: str) -> environment_pb2.Observation:
    """A message of text."""
    return environment_pb2.Observation(role=role, parts=[environment_pb2.Part(text=text)])


@asynccontextmanager
async def serving(servicer: Honest) -> AsyncIterator[str]:
    """A server of `servicer`; gives its address."""
    server = Server(RpcSection(), "127.0.0.1:0", client_certificates=False)
    server.add(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, servicer, SERVICE_NAME)
    address = await server.start()
    await server.set_serving(True)
    reaping = asyncio.create_task(servicer.reap())
    try:
        yield address
    finally:
        reaping.cancel()
        await server.drain(0.0)


async def start_bare(*options: tuple[str, Any]) -> tuple[grpc.aio.Server, str]:
    """A server with gRPC's defaults but for these options; it and its address."""
    server = grpc.aio.server(interceptors=[ServerCalls()], options=options)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(Honest(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
