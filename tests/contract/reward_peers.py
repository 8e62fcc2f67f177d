"""What the reward tests share: items, a user's module of well and badly behaved scorers, and a RewardService that lies
on request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rolecall.reward import SERVICE_NAME
from rolecall.rpc.channel import open_channel
from rolecall.rpc.server import Server
from rolecall.scoring.client import RewardClient
from rolecall.scoring.description import component_spec
from rolecall.settings import RewardComponent, RpcSection
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from services.reward.config import RewardSettings
from services.reward.dispatcher import Dispatcher
from services.reward.service import RewardServicer

COMPONENT: TypeAdapter[RewardComponent] = TypeAdapter(RewardComponent)
ALL_FIELDS = [field for field in reward_pb2.ScoreField.values() if field]

USER_MODULE = '''
import asyncio, os, signal, subprocess, sys, time
import numpy as np
from rolecall.errors import ScorerUnavailableError, WorkerLostError
from rolecall.scoring.scores import Item, Score

def behave(item: Item) -> float:
    """Does what the response says, so that one module serves every test."""
    match item.response_text.split():
        case ["hang"]:
            while True:
                pass
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["exit"]:
            os._exit(3)
        case ["sys.exit"]:
            sys.exit(4)
        case ["segfault"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["lost"]:
            raise WorkerLostError("a program failed while the machine had no memory left")
        case ["raise"]:
            raise ValueError("no such luck")
        case ["print"]:
            print("noise " * 1000, flush=True)
            sys.stdout.write("more noise")
            os.write(1, b"raw noise")
        case ["read"]:
            assert sys.stdin.read() == ""
        case ["none"]:
            return None
        case ["big"]:
            return 2.0
        case ["half"]:
            return Score(1.0, answer="\\ud83d")
        case ["unavailable_once", marker]:
            if not os.path.exists(marker):
                open(marker, "w").close()
                raise ScorerUnavailableError("warming up")
        case ["die_once", marker]:
            if not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(9)
        case ["child", marker]:
            child = subprocess.Popen(["sleep", "60"])
            with open(marker, "w") as file:
                file.write(str(child.pid))
            time.sleep(60)
        case ["orphan", marker]:
            child = subprocess.Popen(["sleep", "300"])
            with open(marker, "a") as file:
                file.write(f"{child.pid} ")
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

barrier = asyncio.Barrier(2)
loops = set()
at_once = 0

async def awaits(item: Item) -> float:
    """Does what the response says where that is to be awaited; else behaves."""
    global at_once
    match item.response_text.split():
        case ["meet"]:
            await barrier.wait()
        case ["nap", seconds]:
            await asyncio.sleep(float(seconds))
        case ["block", seconds]:
            time.sleep(float(seconds))
        case ["thread", seconds]:
            await asyncio.to_thread(time.sleep, float(seconds))
        case ["stubborn"]:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        case ["cancelled"]:
            raise asyncio.CancelledError
        case ["count"]:
            at_once += 1
            await asyncio.sleep(0.1)
            at_once -= 1
            return (at_once + 1) / 10
        case ["loop"]:
            loops.add(asyncio.get_running_loop())
            return float(len(loops) == 1)
        case _:
            return behave(item)
    return 1.0

async def awaits_all(items: list[Item]) -> list[float]:
    return await asyncio.gather(*map(awaits, items))

def where(item: Item) -> float:
    return float(os.path.samefile(os.getcwd(), os.path.dirname(__file__)))

def detailed(item: Item) -> Score:
    return Score(0.5, {"first": 1.0, "second": -1.0}, np.full(item.num_response_tokens, 0.25, np.float32))

def scaled(item: Item, *, scale: dict[str, float]) -> float:
    return scale["by"] * len(item.response_text)

def scaled_all(items: list[Item], *, scale: dict[str, float]) -> list[float]:
    return [scaled(item, scale=scale) for item in items]

def many(items: list[Item]) -> list[float]:
    """Behaves for each, and says in its log how many it was given."""
    with open("batches", "a") as log:
        log.write(f"{len(items)}\\n")
    return [behave(item) for item in items]

def longest(items: list[Item]) -> list[float]:
    """1 for the longest response of the group."""
    assert len({item.group for item in items}) == 1
    most = max(len(item.response_text) for item in items)
    return [float(len(item.response_text) == most) for item in items]
'''


def items_of(*responses: str, truth: str = "") -> list[reward_pb2.ScoreItem]:
    """One item per response, three response tokens each."""
    return [
        reward_pb2.ScoreItem(id=f"7/{i}", response_text=text, ground_truth=truth, num_response_tokens=3)
        for i, text in enumerate(responses)
    ]


def write_user_module(folder: Path) -> Path:
    """Writes `behaviour.py` into `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "behaviour.py").write_text(USER_MODULE)
    return folder


class Liar(reward_pb2_grpc.RewardServiceServicer):
    """A RewardService that answers honestly (reward 0.5) until `lie` says otherwise; it notes what it was sent."""

    def __init__(self) -> None:
        self.spec = reward_pb2.DescribeResponse(name="liar", reads=ALL_FIELDS, reward=component_spec("", 0, 1))
        self.lie: Callable[[reward_pb2.ScoreResponse], None] = lambda response: None
        self.fail: Callable[[], Any] | None = None
        """Called first; may raise or return an awaitable."""
        self.requests: list[reward_pb2.ScoreRequest] = []
        self.num_described = 0
        self.most_at_once = 0
        self._at_once = 0

    async def Describe(self, request: reward_pb2.DescribeRequest, context: Any) -> reward_pb2.DescribeResponse:
        self.num_described += 1
        return self.spec

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.requests.append(request)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
            if self.fail is not None:
                awaitable = self.fail()
                if awaitable is not None:
                    await awaitable
        finally:
            self._at_once -= 1
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(id=item.id).reward.value = 0.5
        self.lie(response)
        return response


@asynccontextmanager
async def serving(
    servicer: reward_pb2_grpc.RewardServiceServicer, rpc: RpcSection | None = None, bind: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """A server of `servicer`; gives its address."""
    server = Server(rpc or RpcSection(), bind, client_certificates=False)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, SERVICE_NAME)
    address = await server.start()
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.drain(0.0)


@asynccontextmanager
async def reward_service(folder: Path, **components: dict[str, Any]) -> AsyncIterator[str]:
    """Our reward service over the components given as in the file."""
    parts = {name: COMPONENT.validate_python(part, context={"base": folder}) for name, part in components.items()}
    dispatcher = Dispatcher(
        RewardSettings("127.0.0.1:0", parts, num_workers=1, search_path=folder, start_timeout_s=60.0), RpcSection()
    )
    try:
        await dispatcher.start()
        async with serving(RewardServicer(dispatcher, on_score=lambda: None)) as address:
            yield address
    finally:
        await dispatcher.close()


@asynccontextmanager
async def client_of(
    address: str,
    *,
    timeout_s: float = 5.0,
    max_attempts: int = 1,
    is_foreign: bool = False,
    hedge_after_s: float | None = None,
    is_joint: bool = False,
) -> AsyncIterator[RewardClient]:
    """A client of the scorer at `address`."""
    async with open_channel(address, RpcSection()) as channel:
        yield RewardClient(
            channel,
            name="it",
            address=address,
            timeout_s=timeout_s,
            max_attempts=max_attempts,
            is_foreign=is_foreign,
            hedge_after_s=hedge_after_s,
            is_joint=is_joint,
        )
