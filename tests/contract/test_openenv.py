"""Environments behind OpenEnv's wire: what becomes of each answer, of one that comes late, and of a server that is full
or not there. The real server is in tests/languages.
"""

import http.server
import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from rolecall.environment import Action, Answer, Message, Opening, Score, Task, Tool
from rolecall.environment.openenv import UNREADABLE, Observed, OpenEnv, tasks_of
from rolecall.errors import EnvironmentAwayError, EpisodeLostError, RateLimitedError
from rolecall.v1 import environment_pb2
from tests.contract.environment_peers import State, client_of, environment, task
from tests.contract.openenv_twin import serving
from tests.ports import free_port
from tests.waiting import until

TASK = Task("t", metadata={"split": "train", "index": 3.0, "level": 1})


def shown(observed: Mapping[str, Any]) -> str:
    return f"{observed['total']} of {observed['goal']}"


def meant(action: Action) -> Mapping[str, Any] | None:
    """Numbers are added, "word" is malformed, everything else means nothing."""
    if action.text == "word":
        return {"add": "a word"}
    return {"add": int(action.text)} if re.fullmatch(r"-?\d+", action.text) else None


def game(url: str, **made: Any) -> OpenEnv:
    return OpenEnv(url, shown, meant, **made)


def taken(env: OpenEnv, text: str) -> Answer:
    answer = env.step(Action(text))
    assert isinstance(answer, Answer)
    return answer


async def test_seed_and_place_of_the_task_arrive_and_a_missing_reward_is_not_0() -> None:
    with serving() as (url, twin):
        env = game(url)
        assert env.reset(TASK, 2**63 - 1) == f"0 of {(2**63 - 1) % 5 + 3}"
        assert twin.seen == [{"type": "reset", "data": {"seed": 2**63 - 1, "split": "train", "index": 3}}]
        assert taken(env, "1") == Answer("1 of 5", None)
        assert taken(env, "5") == Answer("6 of 5", 0.0, is_over=True)
        env.close()
        env.close()
        await until(lambda: twin.num_sessions == 0)


async def test_an_episode_of_turns_and_components_goes_through_the_contract() -> None:
    def worth(observed: Observed) -> Score | None:
        value = observed["reward"]
        return Score(float(value), observed["observation"]["parts"]) if observed["done"] else None

    with serving() as (url, twin):
        described: dict[str, Any] = {"turn_rewards": True, "components": {"exact": (0, 1)}}
        async with (
            environment(lambda: game(url, score=worth), **described) as (address, _),
            client_of(address) as client,
        ):
            session = client.session("run/7/0/a-1", "run/7", 1)
            opening = await session.reset(task(), 4)
            assert opening.messages[0].parts[0].text == "0 of 7"
            assert not (await session.step("3", is_cut=False)).HasField("reward")
            last = await session.step("4", is_cut=False)
            assert (last.state, last.reward.value) == (State.EPISODE_STATE_TERMINATED, 0.25)
            assert dict(last.reward.components) == {"exact": 1.0}
            session.leave()
            await until(lambda: twin.num_sessions == 0)


def test_what_means_no_action_and_what_the_environment_refuses_step_nothing() -> None:
    with serving() as (url, twin):
        env = game(url)
        env.reset(Task("t"), 0)
        assert [env.step(Action(text)) for text in ("hello", "word")] == [UNREADABLE, UNREADABLE]
        assert taken(env, "1") == Answer("1 of 3", None)
        assert [message["type"] for message in twin.seen] == ["reset", "step", "step"]
        env.close()


def test_tools_are_shown_and_their_calls_are_actions() -> None:
    tool = Tool("add", "Adds.", {"type": "object"})
    with serving() as (url, _):
        env = OpenEnv(url, lambda seen: Opening(Message("user", shown(seen)), (tool,)), meant)
        assert env.reset(Task("t"), 0) == Opening(Message("user", "0 of 3"), (tool,))
        assert taken(env, "1").messages == Message("user", "1 of 3")
        env.close()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("100", "answered a step with EXECUTION_ERROR: it broke"),
        ("101", "answered no step: TimeoutError"),
        ("102", "answered no step: JSONDecodeError"),
        ("103", "answered no step: ConnectionClosed"),
        ("104", "answered a step with no observation"),
        ("105", "answered no step: ValueError: lists or objects are nested too deep"),
    ],
)
def test_an_answer_that_is_none_loses_the_episode_and_its_socket_is_never_used_again(text: str, told: str) -> None:
    with serving() as (url, twin):
        env = game(url, step_timeout_s=0.1 if "Timeout" in told else 60.0)
        env.reset(Task("t"), 0)
        with pytest.raises(EpisodeLostError, match=told):
            env.step(Action(text))
        for _ in range(2):
            with pytest.raises(EpisodeLostError, match="its connection was given up"):
                env.step(Action("1"))
        assert (twin.num_opened, len(twin.seen)) == (1, 2)
        env.close()


def test_a_server_without_a_place_or_without_anybody_is_full() -> None:
    with serving(places=1) as (url, _):
        first, second = game(url), game(url)
        first.reset(Task("t"), 0)
        with pytest.raises(RateLimitedError, match="CAPACITY_REACHED: Server at capacity") as full:
            second.reset(Task("t"), 0)
        assert float(full.value.details["retry_after_s"]) > 0
        first.close()
        second.close()
    with pytest.raises(RateLimitedError, match="cannot be reached"):
        game(f"http://127.0.0.1:{free_port()}").reset(Task("t"), 0)


async def test_a_rollout_gives_its_group_back_while_the_server_is_full_and_plays_when_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rolecall.environment.openenv.FULL_S", 30.0)
    with serving(places=1) as (url, twin):
        async with environment(lambda: game(url), turn_rewards=True) as (address, _), client_of(address) as client:
            names = [f"run/7/{i}/a-1" for i in range(2)]
            first, second = (client.session(name, "run/7", 1) for name in names)
            await first.reset(task(), 0)
            with pytest.raises(EnvironmentAwayError, match="is full"):
                await second.reset(task(), 0)
            assert await client.num_free() == 0
            first.leave()
            second.leave()
            await until(lambda: twin.num_sessions == 0)
            third = client.session("run/7/1/a-2", "run/7", 2)
            await third.reset(environment_pb2.Task(uid="t"), 0)
            third.leave()


def test_tasks_of_this_machine_are_listed_beside_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lister(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'["game"]' if self.path == "/list_environments" else b"[]")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http.server.HTTPServer(("127.0.0.1", 0), Lister) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert tasks_of(f"http://127.0.0.1:{server.server_port}", lambda *_: Task("t")) == {}
        finally:
            server.shutdown()
            thread.join(10)
