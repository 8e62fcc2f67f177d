"""EnvironmentService over the wire: what `rolecall.environment` serves, and the client that a rollout plays with."""

import asyncio
import contextvars
import itertools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolecall.data.images.files import MAX_BYTES
from rolecall.environment import Action, Answer, Env, Message, Opening, Score, Task, Tool
from rolecall.environment.answers import action_of, schema_problem, spec_problem
from rolecall.environment.client import EnvironmentClient, EpisodeSession, open_environment
from rolecall.environment.server import description
from rolecall.errors import (
    ConfigError,
    EnvironmentAwayError,
    EpisodeLostError,
    FencedError,
    InvalidInputError,
    RateLimitedError,
    RoleCallError,
    SessionLostError,
    TurnConflictError,
    UnauthenticatedError,
)
from rolecall.rpc import deadlines
from rolecall.rpc.channel import open_channel
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.contract.environment_peers import BadWire, Counting, State, client_of, environment, task
from tests.waiting import until

GROUP = "run/7"


def reset(session: str = "run/7/0/a-1", fence: int = 1, group: str = GROUP, **metadata: Any) -> Any:
    return environment_pb2.ResetRequest(session=session, group=group, fence=fence, task=task(**metadata), seed=3)


def step(turn: int, text: str, session: str = "run/7/0/a-1") -> Any:
    return environment_pb2.StepRequest(session=session, turn=turn, action=environment_pb2.Action(text=text))


def close(session: str = "run/7/0/a-1", *, grade: bool = False) -> Any:
    return environment_pb2.CloseRequest(session=session, grade=grade)


def said(answer: Any) -> str:
    return " ".join(part.text for message in answer.messages for part in message.parts)


# --- the server -------------------------------------------------------------------------------------


async def test_an_episode_goes_turn_by_turn_to_its_reward() -> None:
    async with environment() as (address, sessions), client_of(address) as client:
        assert said(await client.stub.Reset(reset())) == "begin t/3"
        first = await client.stub.Step(step(1, "a"))
        assert (said(first), first.state, first.HasField("reward")) == ("1: a", State.EPISODE_STATE_CONTINUES, False)
        last = await client.stub.Step(step(2, "end 0.5"))
        assert (last.state, last.reward.value) == (State.EPISODE_STATE_TERMINATED, 0.5)
        assert not (await client.stub.Close(close())).HasField("reward")
        assert sessions.num_open == 0


async def test_repeated_calls_do_once_what_they_do_and_answer_as_before() -> None:
    async with environment() as (address, _), client_of(address) as client:
        openings = [await client.stub.Reset(reset()) for _ in range(2)]
        answers = [await client.stub.Step(step(1, "a")) for _ in range(3)]
        assert openings[0] == openings[1]
        assert [said(answer) for answer in answers] == ["1: a"] * 3
        assert await client.stub.Reset(reset()) == openings[0], "also after a turn, and nothing begins again"
        assert said(await client.stub.Step(step(2, "b"))) == "2: b"
        graded = [await client.stub.Close(close(grade=True)) for _ in range(2)]
        assert [answer.reward.value for answer in graded] == [0.25, 0.25]


@pytest.mark.parametrize(("turn", "text"), [(1, "other"), (3, "a"), (0, "a"), (-1, "a")])
async def test_another_turn_or_another_action_is_a_conflict_and_does_nothing(turn: int, text: str) -> None:
    async with environment() as (address, _), client_of(address) as client:
        await client.stub.Reset(reset())
        await client.stub.Step(step(1, "a"))
        with pytest.raises(TurnConflictError, match="stands after turn 1"):
            await client.stub.Step(step(turn, text))
        assert said(await client.stub.Step(step(2, "b"))) == "2: b"


async def test_an_episode_that_is_over_takes_no_turn_and_repeats_its_last_answer() -> None:
    async with environment() as (address, _), client_of(address) as client:
        await client.stub.Reset(reset())
        last = await client.stub.Step(step(1, "cut"))
        assert (last.state, last.reward.value) == (State.EPISODE_STATE_TRUNCATED, 0.25)
        with pytest.raises(TurnConflictError, match="its last"):
            await client.stub.Step(step(2, "a"))
        assert await client.stub.Step(step(1, "cut")) == last
        assert (await client.stub.Close(close(grade=True))).reward.value == 0.25, "the reward that it has"


async def test_a_repeated_call_waits_for_the_one_that_its_caller_left() -> None:
    async with environment() as (address, _), client_of(address) as client:
        await client.stub.Reset(reset())
        with pytest.raises(RoleCallError):
            await client.stub.Step(step(1, "sleep 0.6"), timeout=0.1)
        assert said(await client.stub.Step(step(1, "sleep 0.6"))) == "1: sleep 0.6"
        slow = reset("run/7/1/a-1", slow=0.6)
        with pytest.raises(RoleCallError):
            await client.stub.Reset(slow, timeout=0.1)
        assert said(await client.stub.Reset(slow)) == "begin t/3"


async def test_sessions_beyond_the_places_are_refused_and_a_closed_one_frees_its_place() -> None:
    async with environment(max_sessions=2) as (address, sessions), client_of(address) as client:
        for i in range(2):
            await client.stub.Reset(reset(f"run/7/{i}/a-1"))
        with pytest.raises(RateLimitedError, match="all 2 sessions are open") as refused:
            await client.stub.Reset(reset("run/7/2/a-1"))
        assert float(refused.value.details["retry_after_s"]) > 0
        assert sessions.num_open == 2
        await client.stub.Close(close("run/7/0/a-1"))
        await client.stub.Reset(reset("run/7/2/a-1"))


async def test_a_session_is_not_found_before_its_beginning_and_after_its_end() -> None:
    async with environment() as (address, sessions), client_of(address) as client:
        with pytest.raises(SessionLostError, match="begin an episode in another"):
            await client.stub.Step(step(1, "a"))
        with pytest.raises(SessionLostError):
            await client.stub.Close(close(grade=True))
        await client.stub.Close(close())
        for call in (client.stub.Reset(reset()), client.stub.Step(step(1, "a"))):
            with pytest.raises(SessionLostError):
                await call
        assert sessions.num_open == 0, "a Reset that a Close overtook opened nothing"


async def test_sessions_of_older_attempts_are_closed_and_a_late_one_is_fenced() -> None:
    async with environment() as (address, sessions), client_of(address) as client:
        await client.stub.Reset(reset("run/7/0/a-1", fence=1))
        await client.stub.Reset(reset("run/7/0/b-2", fence=2))
        await client.stub.Reset(reset("run/8/0/a-1", fence=1, group="run/8"))
        older = environment_pb2.CloseOlderRequest(group=GROUP, fence=2)
        assert [(await client.stub.CloseOlder(older)).num_closed for _ in range(2)] == [1, 0]
        await until(lambda: sessions.num_open == 2)
        with pytest.raises(FencedError, match="leave it to that"):
            await client.stub.Reset(reset("run/7/1/a-1", fence=1))
        await client.stub.Step(step(1, "a", "run/7/0/b-2"))
        await client.stub.Step(step(1, "a", "run/8/0/a-1"))


async def test_a_session_that_nobody_calls_is_closed_and_one_that_is_called_is_kept() -> None:
    async with environment(lease_s=2.0) as (address, sessions), client_of(address) as client:
        await client.stub.Reset(reset("run/7/0/a-1"))
        await client.stub.Reset(reset("run/7/1/a-1"))

        async def call() -> None:
            while sessions.num_open == 2:
                await client.stub.Reset(reset("run/7/1/a-1"))
                await asyncio.sleep(0.02)

        await asyncio.wait_for(call(), 30)
        assert said(await client.stub.Step(step(1, "a", "run/7/1/a-1"))) == "1: a"
        with pytest.raises(SessionLostError):
            await client.stub.Step(step(1, "a", "run/7/0/a-1"))


async def test_work_that_lasts_longer_than_a_lease_keeps_its_session() -> None:
    begun, released = threading.Event(), threading.Event()

    class Working(Counting):
        def step(self, action: Action) -> str | Answer:
            begun.set()
            assert released.wait(60)
            return super().step(action)

    async with environment(Working, lease_s=1.0) as (address, sessions), client_of(address) as client:
        await client.stub.Reset(reset())
        leaving = asyncio.ensure_future(client.stub.Step(step(1, "a")))
        await until(begun.is_set)
        leaving.cancel()
        await asyncio.sleep(1.5)
        assert sessions.num_open == 1
        again = asyncio.ensure_future(client.stub.Step(step(1, "a")))
        await asyncio.sleep(0.3)  # it arrives, or does so within a lease of the work's end
        released.set()
        assert said(await again) == "1: a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "raised RuntimeError in step, turn 1: lost it"),
        ("exit", "raised SystemExit in step, turn 1: bye"),
        ("mute", "no message that the policy could read"),
        ("end 7", "outside its declared range"),
        ("end nan", "not finite"),
        ("reward", "declares no turn_rewards"),
    ],
)
async def test_what_goes_wrong_ends_the_session_and_is_never_a_reward(text: str, message: str) -> None:
    async with environment() as (address, sessions), client_of(address) as client:
        await client.stub.Reset(reset())
        for request in (step(1, text), step(1, text), step(2, "a")):
            with pytest.raises(EpisodeLostError, match=message):
                await client.stub.Step(request)
        with pytest.raises(EpisodeLostError, match=message):
            await client.stub.Close(close(grade=True))
        assert sessions.num_open == 0


@dataclass(frozen=True)
class Frozen(Env):
    words: str = "well?"

    def reset(self, task: Task, seed: int) -> str:
        return self.words

    def step(self, action: Action) -> Answer:
        return Answer(reward=1.0, is_over=True)


async def test_an_environment_that_cannot_be_changed_is_played_in_where_no_images_are_shown() -> None:
    async with environment(Frozen) as (address, _), client_of(address) as client:
        assert said(await client.stub.Reset(reset())) == "well?"


TEXT: Any = "1.0"
DICTS: Any = [{"name": "weather"}]
NUMBER: Any = 391


class Anything(Env):
    """An environment that answers whatever it was made with."""

    def __init__(self, opening: Any, answer: Any) -> None:
        self.opening, self.answer = opening, answer

    def reset(self, task: Task, seed: int) -> Any:
        return self.opening

    def step(self, action: Action) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("opening", "answer", "message"),
    [
        (None, "", "answered a NoneType in place of a message; give text"),
        ({"role": "user"}, "", "answered a dict of str in place of a message"),
        ([{"role": "user", "content": "Go."}], "", "answered a list of dict in place of a message"),
        (Opening("Go.", DICTS), "", r"answered a dict in place of a tool; give a .*Tool\(name"),
        ("Go.", None, "answered a NoneType in place of a message"),
        ("Go.", ("well?", 1.0, True, {}), "answered a tuple of str in place of a message"),
        ("Go.", Answer(Message("user", NUMBER)), "a message that says a int; write it as text"),
        ("Go.", Answer(reward=TEXT, is_over=True), "gave a str as a reward; give a number"),
        ("Go.", Answer(reward=Score(1.0, {"speed": TEXT}), is_over=True), "gave a str as a reward"),
    ],
)
async def test_an_answer_of_a_wrong_type_is_told_with_what_to_give(opening: Any, answer: Any, message: str) -> None:
    async with environment(lambda: Anything(opening, answer)) as (address, _), client_of(address) as client:

        async def play() -> None:
            await client.stub.Reset(reset())
            await client.stub.Step(step(1, "a"))

        with pytest.raises(EpisodeLostError, match=message):
            await play()


async def test_an_environment_that_cannot_boot_keeps_no_place() -> None:
    async with environment() as (address, sessions), client_of(address) as client:
        for _ in range(2):
            with pytest.raises(EpisodeLostError, match="RuntimeError in reset: cannot boot"):
                await client.stub.Reset(reset(broken=True))
        await client.stub.Close(close())
        assert sessions.num_open == 0


@pytest.mark.parametrize("name", ["", "x" * 513, "a\nb", "é"])
async def test_a_session_needs_a_name(name: str) -> None:
    async with environment() as (address, _), client_of(address) as client:
        with pytest.raises(InvalidInputError, match="printable ASCII"):
            await client.stub.Reset(reset(name))


async def test_callers_without_the_token_are_refused() -> None:
    async with environment(token="secret") as (address, _):
        channel = open_channel(address, RpcSection())
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for call in (
            stub.Describe(environment_pb2.DescribeEnvironmentRequest()),
            stub.Reset(reset()),
            stub.Step(step(1, "a")),
            stub.Close(close()),
            stub.CloseOlder(environment_pb2.CloseOlderRequest(group=GROUP)),
        ):
            with pytest.raises(UnauthenticatedError, match="bearer_token_file"):
                await call
        await channel.close()


class Rich(Env):
    """An environment of several roles, with tools, components and turn rewards."""

    def reset(self, task: Task, seed: int) -> Opening:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        return Opening([Message("system", "Be kind."), Message("user", "Go.")], (Tool("weather", "Says it.", schema),))

    def step(self, action: Action) -> Answer:
        if action.text == "go":
            return Answer(Message("tool", "sun"), 0.25)
        return Answer(reward=Score(1.0, {"speed": 2.0}, answer="7"), is_over=True)


async def test_roles_tools_components_and_turn_rewards_travel() -> None:
    described: dict[str, Any] = {"roles": ("user", "system", "tool"), "turn_rewards": True}
    async with environment(Rich, components={"speed": (0, 3)}, **described) as (address, _):
        async with client_of(address) as client:
            session = client.session("run/7/0/a-1", GROUP, 1)
            opening = await session.reset(task(), 1)
            assert [message.role for message in opening.messages] == ["system", "user"]
            assert opening.tools[0].input_schema.startswith('{"type": "object", ')
            turn = await session.step("go", is_cut=False)
            assert (turn.messages[0].role, turn.reward.value) == ("tool", 0.25)
            last = await session.step("stop", is_cut=False)
            assert last.reward == trajectory_pb2.EpisodeReward(value=1.0, components={"speed": 2.0}, answer="7")
            session.leave()


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"name": ""}, "no name"),
        ({"lease_s": 0.0}, "lease"),
        ({"max_sessions": -1}, "max_sessions"),
        ({"max_sessions": 0}, "give it some"),
        ({"step_timeout_s": -1.0}, "deadlines"),
        ({"turn_rewards": True, "reward_range": None}, "no reward"),
        ({"components": {"": (0, 1)}}, "unique"),
        ({"reward_range": (1, 0)}, "min must not exceed max"),
    ],
)
def test_a_description_that_nobody_could_use_is_refused(described: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        description(**{"name": "odd", "reward_range": (0, 1), **described})


def test_a_description_may_have_no_bound_of_its_sessions() -> None:
    assert spec_problem(environment_pb2.DescribeEnvironmentResponse(name="free", lease_s=1.0)) is None


# --- the client -------------------------------------------------------------------------------------


async def episode(client: EnvironmentClient, name: str, num_turns: int) -> list[str]:
    """What a whole episode of the counting environment says, its reward last."""
    session = client.session(name, GROUP, 1)
    try:
        heard = [said(await session.reset(task(), 3))]
        heard += [said(await session.step(f"{name} {turn}", is_cut=False)) for turn in range(1, num_turns)]
        last = await session.step("end 0.5", is_cut=False)
        return [*heard, str(last.reward.value)]
    finally:
        session.leave()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_the_wire_loses_repeats_or_delays_no_answer_is_shifted(seed: int) -> None:
    """Eight episodes of five turns at a time; half of all calls are lost on their way there or back, sent twice, or
    sent again later, beside what comes next.
    """
    async with environment() as (address, sessions), client_of(address) as client:
        wire = BadWire(client.stub, seed)
        client.stub = wire  # type: ignore[assignment]
        names = [f"run/7/{i}/{seed}-1" for i in range(8)]
        for name, heard in zip(names, await asyncio.gather(*(episode(client, name, 5) for name in names)), strict=True):
            assert heard == ["begin t/3", *(f"{turn}: {name} {turn}" for turn in range(1, 5)), "0.5"]
        assert wire.num_faults > 20
        await until(lambda: client.num_open == 0)
        await wire.quiet()
        await until(lambda: sessions.num_open == 0)


async def test_an_environment_that_is_away_is_no_episode_s_fault_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rolecall.environment.client.AWAY_S", 0.05)
    async with environment(reset_timeout_s=0.5, close_timeout_s=0.2) as (address, _):
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        assert await client.num_free() == 8
    session = client.session("run/7/0/a-1", GROUP, 1)
    with pytest.raises(EnvironmentAwayError, match="does not describe itself"):
        await session.reset(task(), 1)
    session.leave()
    for _ in range(4):
        assert await client.num_free() == 0
        await asyncio.sleep(0.1)
    async with environment(address=address, reset_timeout_s=0.5, close_timeout_s=0.2):
        await until(lambda: client.num_open == 0)
        async with asyncio.timeout(60):
            while await client.num_free() != 8:
                await asyncio.sleep(0.05)
    await client.close()
    told = [line.split("; ")[-1] for line in caplog.messages if line.startswith(f"the environment at {address}")]
    assert told == ["it is asked again until it answers", f"the environment at {address} answers again"]


async def test_an_environment_that_is_gone_for_good_holds_no_episode_for_the_whole_deadline_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with environment(step_timeout_s=3600) as (address, _):
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        await client.describe()
        session = client.session("run/7/0/a-1", GROUP, 1)
        await session.reset(task(), 1)
    monkeypatch.setattr("rolecall.environment.client.NOBODY_S", 0.2)
    async with asyncio.timeout(60):
        with pytest.raises(EnvironmentAwayError, match="does not describe itself"):
            await session.step("a", is_cut=False)
    session.leave()
    await client.close()


async def test_an_environment_that_hangs_on_an_episode_loses_that_one_alone() -> None:
    released = threading.Event()

    class Hanging(Counting):
        def step(self, action: Action) -> str | Answer:
            assert action.text != "hang" or released.wait(60)
            return super().step(action)

    async with environment(Hanging, step_timeout_s=1.5) as (address, sessions), client_of(address) as client:
        session = client.session("run/7/0/a-1", GROUP, 1)
        await session.reset(task(), 1)
        with pytest.raises(EpisodeLostError, match=r"not answered within 1\.5 s"):
            await session.step("hang", is_cut=False)
        assert await episode(client, "run/7/1/a-1", 2)
        session.leave()
        released.set()
        await until(lambda: sessions.num_open == 0)


async def test_an_environment_that_was_started_again_lost_its_episodes() -> None:
    async with environment() as (address, _):
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        await client.describe()
        session = client.session("run/7/0/a-1", GROUP, 1)
        await session.reset(task(), 1)
    async with environment(address=address):
        with pytest.raises(EpisodeLostError, match="SESSION_LOST"):
            await session.step("a", is_cut=False)
        session.leave()
        await client.close()


async def test_a_full_environment_ends_the_wait_at_once_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.environment.sessions.RETRY_AFTER_S", 30.0)
    async with environment(max_sessions=1) as (address, _), client_of(address) as one, client_of(address) as other:
        assert await episode_begins(one, "run/7/0/a-1")
        with pytest.raises(EnvironmentAwayError, match="is full"):
            await episode_begins(other, "run/8/0/b-1")
        assert await other.num_free() == 0


async def episode_begins(client: EnvironmentClient, name: str) -> EpisodeSession:
    session = client.session(name, GROUP, 1)
    await session.reset(task(), 1)
    return session


async def test_a_row_s_images_arrive_as_they_are_above_grpc_s_own_limit() -> None:
    class Seeing(Counting):
        def reset(self, task: Task, seed: int) -> str:
            return " ".join(f"{image.media_type} {len(image.data)}" for image in task.images)

    images = [environment_pb2.ImagePart(media_type="image/jpeg", data=bytes(MAX_BYTES // 2)) for _ in range(2)]
    async with environment(Seeing) as (address, _), client_of(address) as client:
        session = client.session("run/7/0/a-1", GROUP, 1)
        opening = await session.reset(environment_pb2.Task(uid="t", images=images), 1)
        assert said(opening) == " ".join(2 * [f"image/jpeg {MAX_BYTES // 2}"])
        session.leave()


async def test_a_session_is_kept_while_the_policy_thinks() -> None:
    async with environment(lease_s=3.0) as (address, _), client_of(address) as client:
        wire = BadWire(client.stub, 0, rate=0.0)
        client.stub = wire  # type: ignore[assignment]
        session = client.session("run/7/0/a-1", GROUP, 1)
        await session.reset(task(), 1)
        await session.step("a", is_cut=False)
        await until(lambda: wire.num_calls["Step"] >= 3)
        assert said(await session.step("b", is_cut=False)) == "2: b"
        session.leave()


@pytest.mark.parametrize("lease_s", [3.0, 600.0])
async def test_a_session_begun_for_a_call_that_is_over_is_kept_and_closed(lease_s: float) -> None:
    async with environment(lease_s=lease_s) as (address, sessions), client_of(address) as client:
        await client.describe()
        over = contextvars.copy_context()
        over.run(deadlines.inherit, 0.0)
        session = over.run(client.session, "run/7/0/a-1", GROUP, 1)
        await session.reset(task(), 1)
        if lease_s < 10:
            await asyncio.sleep(2 * lease_s)
        assert said(await session.step("a", is_cut=False)) == "1: a"
        over.run(session.leave)
        await until(lambda: sessions.num_open == 0)


async def test_a_client_that_ends_closes_what_it_opened() -> None:
    living = Counting.living
    async with environment() as (address, sessions):
        async with client_of(address) as client:
            for i in range(3):
                await episode_begins(client, f"run/7/{i}/a-1")
        await until(lambda: sessions.num_open == 0)
        assert Counting.living == living


async def test_another_environment_at_the_address_is_not_believed() -> None:
    async with environment() as (address, _):
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        await client.describe()
    async with environment(address=address, turn_rewards=True):
        async with asyncio.timeout(60):  # gRPC needs a moment to connect again
            message = ""
            while "another environment than before" not in message:
                with pytest.raises(EnvironmentAwayError) as refused:
                    await client.describe()
                message = refused.value.message
                await asyncio.sleep(0.05)
    await client.close()


def test_json_that_is_nested_too_deep_is_told_as_any_other_that_cannot_be_read() -> None:
    told = schema_problem(environment_pb2.Tool(name="look", input_schema="[" * 100_000))
    assert told == "answered the tool 'look', whose input_schema is no JSON object"
    with pytest.raises(InvalidInputError, match="of a call of 'look' are no JSON: lists or objects are nested too"):
        action_of(environment_pb2.Action(tool_calls=[environment_pb2.ToolCall(name="look", arguments="[" * 100_000)]))


def test_ten_lines_serve_an_environment(tmp_path: Path) -> None:
    """The docstring of the package is a program."""
    import rolecall.environment as package

    source = (package.__doc__ or "").split("ten lines:\n\n")[1].split("\nAlso")[0]
    lines = [line[4:] for line in source.splitlines()]
    assert len([line for line in lines if line.strip()]) <= 10
    compile("\n".join(lines), "ten_lines", "exec")


class Riddle(Env):
    """Draws its riddle at each beginning, whatever the seed."""

    drawn = itertools.count(1)

    def reset(self, task: Task, seed: int) -> str:
        self.number = next(self.drawn)
        return f"what is {self.number} + {self.number}?"

    def step(self, action: Action) -> Answer:
        return Answer(reward=float(action.text == str(2 * self.number)), is_over=True)


async def test_an_episode_that_a_restarted_environment_began_anew_to_keep_its_lease_is_lost() -> None:
    async with environment(Riddle, lease_s=3.0) as (address, _):
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        await client.describe()
        session = client.session("run/0/0/t-1", "run/0", 1)
        await session.reset(environment_pb2.Task(uid="a"), 7)
    async with environment(Riddle, address, lease_s=3.0) as (_, sessions):  # its next process
        await until(lambda: sessions.num_open)  # while the policy samples its first turn
        with pytest.raises(EpisodeLostError, match="was started again, and began run/0/0/t-1 anew"):
            await session.step("2", is_cut=False)
        session.leave()
        await client.close()
