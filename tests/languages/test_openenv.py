"""A real server of OpenEnv's (PyPI openenv, in an environment of its own): a game written with its base class, played
over its WebSocket, listed over its Task API, and held to the contract.
"""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.conformance import examine_environment
from rolecall.conformance.environment.rows import read_file
from rolecall.conformance.peer import Peer
from rolecall.environment import Action, Answer, Message, Task
from rolecall.environment.openenv import UNREADABLE, OpenEnv, tasks_of
from rolecall.errors import ConfigError, EpisodeLostError, RateLimitedError
from tests.contract.environment_peers import environment
from tests.contract.test_openenv import game, taken
from tests.languages.test_http_servers import wait_for
from tests.ports import free_port
from tests.waiting import until

pytestmark = [pytest.mark.languages, pytest.mark.timeout(900)]
PLACES = 3
SERVER = """
import sys, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, create_app
from openenv.core.env_server.types import State

class Add(Action):
    add: int

class Sum(Observation):
    total: int
    goal: int

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, split="train", index=0, **kwargs):
        self.total, self.goal = 0, seed % 5 + 3
        return Sum(total=0, goal=self.goal, metadata={"at": f"{split}/{index}"})

    def step(self, action):
        if action.add == 100:
            raise RuntimeError("it broke")
        if action.add == 101:
            time.sleep(2)
        self.total += action.add
        reward = 0.25 if self.total == self.goal else 0.0 if self.total > self.goal else None
        return Sum(total=self.total, goal=self.goal, reward=reward, done=self.total >= self.goal)

    @property
    def state(self):
        return State()

    def list_splits(self):
        return ["train", "test"] if TASKS else 1 / 0

    def list_tasks(self, split):
        return [{"id": f"{split}-{i}"} for i in range(self.num_tasks(split))]

    def num_tasks(self, split):
        return {"train": 700, "test": 2}[split]

    def get_task(self, split, index):
        return self.list_tasks(split)[index]

    def get_task_range(self, split, start=None, stop=None):
        return self.list_tasks(split)[start:stop]

TASKS = True
if sys.argv[2] == "without":
    for name in ("list_splits", "list_tasks", "num_tasks", "get_task", "get_task_range"):
        delattr(Game, name)
app = create_app(Game, Add, Sum, env_name="sum", max_concurrent_envs=3)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
ROWS = [{"actions": ["1", "word", "x", "2", "9"]}, {"uid": "b", "prompt": "Add.", "actions": ["3", "1", "1", "1", "1"]}]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with OpenEnv."""
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    program = str(folder / "bin" / "python")
    subprocess.run([program, "-m", "pip", "install", "-q", "openenv==0.10.0"], check=True, timeout=600)
    return program


@pytest.fixture(params=["with"])
def url(request: pytest.FixtureRequest, python: str, tmp_path: Path) -> Iterator[str]:
    """The game on a free port, "with" tasks or "without"."""
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    server = subprocess.Popen([python, str(tmp_path / "server.py"), str(port), request.param])
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(60)


def test_a_real_server_is_played_in_with_seeds_places_and_its_own_errors(url: str) -> None:
    env = game(url, step_timeout_s=0.5)
    assert env.reset(Task("t"), 2**63 - 1) == "0 of 5"
    assert [env.step(Action(text)) for text in ("hello", "word")] == [UNREADABLE, UNREADABLE]
    assert taken(env, "1") == Answer("1 of 5", None)
    others = [game(url) for _ in range(PLACES)]
    for other in others[:-1]:
        other.reset(Task("t"), 0)
    with pytest.raises(RateLimitedError, match="CAPACITY_REACHED"):
        others[-1].reset(Task("t"), 0)
    with pytest.raises(EpisodeLostError, match="EXECUTION_ERROR: it broke"):
        others[0].step(Action("100"))
    assert taken(env, "4") == Answer("5 of 5", 0.25, is_over=True)
    with pytest.raises(EpisodeLostError, match="TimeoutError"):
        env.step(Action("101"))
    with pytest.raises(EpisodeLostError, match="given up"):
        env.step(Action("1"))
    for each in (env, *others):
        each.close()


async def test_it_keeps_the_contract(url: str, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    described: dict[str, Any] = {"turn_rewards": True, "deterministic": True, "max_sessions": 2, "lease_s": 2.0}
    tasks = await asyncio.to_thread(tasks_of, url, row)
    async with environment(lambda: game(url), tasks=tasks, **described) as (address, _):
        report = await examine_environment(Peer(address), read_file(tmp_path / "items.jsonl"))
    assert report.has_passed, report.text()


def row(split: str, index: int, task: Any) -> Task:
    told = (Message("user", f"Add up to the goal of {task['id']}."),)
    return Task(f"{split}/{index}", told, metadata={"split": split, "index": index, "id": task["id"]})


def test_the_tasks_of_a_real_server_are_listed_and_begun(url: str) -> None:
    tasks = tasks_of(url, row)
    assert {split: len(listed) for split, listed in tasks.items()} == {"train": 700, "test": 2}
    assert tasks["train"][255:258] == [row("train", i, {"id": f"train-{i}"}) for i in (255, 256, 257)]
    assert tasks["test"][-1] == row("test", 1, {"id": "test-1"})
    with pytest.raises(IndexError):
        tasks["test"][2]
    seen: list[Mapping[str, Any]] = []
    env = OpenEnv(url, lambda observed: seen.append(observed) or "", lambda action: None)  # type: ignore[func-returns-value]
    env.reset(tasks["train"][699], 1)
    assert seen[0]["metadata"] == {"at": "train/699"}
    env.close()


@pytest.mark.parametrize("url", ["without"], indirect=True)
def test_a_server_without_tasks_is_said_to_have_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"/sum/splits lists no tasks: .*501"):
        tasks_of(url, row)


async def test_a_session_there_ends_with_ours_however_it_ends(url: str) -> None:
    envs = [game(url) for _ in range(PLACES)]
    for env in envs:
        env.reset(Task("t"), 0)
    for env in envs:
        env.close()

    def is_free() -> bool:
        again = game(url)
        try:
            again.reset(Task("t"), 0)
        except RateLimitedError:
            return False
        finally:
            again.close()
        return True

    await until(is_free)
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert answer.status == 200
