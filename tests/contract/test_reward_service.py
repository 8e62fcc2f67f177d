"""RewardService, one suite over every server we ship: the reward service, `rolecall.reward.serve` and `serve_batches`;
then what only ours does.
"""

import asyncio
import importlib.util
import logging
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import numpy as np
import pytest
from pydantic import TypeAdapter

from rolecall.errors import (
    InvalidInputError,
    ScorerError,
    ScorerLoadingError,
    ScorerUnavailableError,
    UnauthenticatedError,
)
from rolecall.reward import (
    MAX_AWAITED,
    NUM_THREADS,
    Field,
    Item,
    Score,
    Scorer,
    _tell,
    all_at_once,
    description,
    new_server,
    one_by_one,
)
from rolecall.rpc.channel import open_channel
from rolecall.rpc.listening import rpc_section
from rolecall.scoring.client import RewardClient, open_client
from rolecall.scoring.scores import Failure, Outcome
from rolecall.settings import RewardComponent, RewardSection, RpcSection
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from rolecall.wire import encode_tensor
from services.reward.config import RewardSettings
from services.reward.dispatcher import Dispatcher
from services.reward.service import RewardServicer
from tests.contract.peer import Authority
from tests.contract.reward_peers import Liar, client_of, items_of, serving, write_user_module
from tests.ports import free_port
from tests.twins.http_scorer import http_server, judge_twin
from tests.waiting import until

COMPONENT: TypeAdapter[RewardComponent] = TypeAdapter(RewardComponent)
READS: tuple[Field, ...] = ("response_text",)
StartService = Callable[..., Awaitable[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_user_module(tmp_path / "conf")


@pytest.fixture
async def start_service(folder: Path) -> AsyncIterator[StartService]:
    """Starts the reward service with the components given (as in the file) in this process; gives its address."""
    async with AsyncExitStack() as stack:

        async def start(
            start_timeout_s: float = 10.0,
            plays_all: bool = True,
            awaits_shadows: bool = True,
            **components: dict[str, Any],
        ) -> str:
            parts = {
                name: COMPONENT.validate_python(component, context={"base": folder})
                for name, component in components.items()
            }
            settings = RewardSettings(
                "127.0.0.1:0",
                parts,
                num_workers=2,
                search_path=folder,
                start_timeout_s=start_timeout_s,
                plays_all=plays_all,
            )
            dispatcher = Dispatcher(settings, RpcSection())
            stack.push_async_callback(dispatcher.close)
            await dispatcher.start(awaits_shadows=awaits_shadows)
            return await stack.enter_async_context(serving(RewardServicer(dispatcher, on_score=lambda: None)))

        yield start


def function(target: str, **keys: object) -> dict[str, Any]:
    """A component that is a user's function of the test's module."""
    return {"scorer": {"kind": "function", "target": f"behaviour:{target}", **keys}}


def load_behaviour(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("behaviour", folder / "behaviour.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["reward service", "serve", "serve_batches", "async serve", "async serve_batches"])
async def client(
    request: pytest.FixtureRequest, folder: Path, start_service: StartService
) -> AsyncIterator[RewardClient]:
    """A client of the same function behind each server."""
    async with AsyncExitStack() as stack:
        if request.param == "reward service":
            address = await start_service(behave={**function("behave", min=0, max=1), "max_attempts": 1})
        else:
            behave: Callable[[Item], float] = vars(load_behaviour(folder))["behave"]
            spec = description("behave", (0, 1), READS, {}, token_rewards=False, max_items=50)

            def behave_all(items: Sequence[Item]) -> list[float]:
                return [behave(item) for item in items]

            async def awaited(item: Item) -> float:
                return await asyncio.sleep(0.0, behave(item))

            async def awaited_all(items: Sequence[Item]) -> list[float]:
                return [await awaited(item) for item in items]

            score = {
                "serve": one_by_one(behave, spec),
                "serve_batches": all_at_once(behave_all, spec),
                "async serve": one_by_one(awaited, spec),
                "async serve_batches": all_at_once(awaited_all, spec),
            }[request.param]
            server = new_server(Scorer(spec, score), "127.0.0.1:0", RpcSection())
            address = await server.start()
            stack.push_async_callback(server.drain, 0.0)
        yield await stack.enter_async_context(client_of(address))


def codes(outcomes: list[Outcome]) -> list[str]:
    """Per outcome, its failure's code or "ok"."""
    return [outcome.code if isinstance(outcome, Failure) else "ok" for outcome in outcomes]


async def test_it_describes_what_it_reads_and_where_rewards_lie(client: RewardClient) -> None:
    spec = await client.describe()
    assert (spec.reward.min, spec.reward.max) == (0.0, 1.0)
    assert reward_pb2.SCORE_FIELD_RESPONSE_TEXT in spec.reads
    assert spec.name


async def test_it_scores_every_item_in_its_place(client: RewardClient) -> None:
    outcomes = await client.score(items_of(*["fine"] * 300))
    assert all(isinstance(outcome, Score) and outcome.value == 1.0 for outcome in outcomes)
    assert len(outcomes) == 300


async def test_concurrent_calls_do_not_mix(client: RewardClient) -> None:
    scored = await asyncio.gather(*(client.score(items_of(*["fine"] * number)) for number in range(1, 20)))
    assert [codes(outcomes) for outcomes in scored] == [["ok"] * number for number in range(1, 20)]


@pytest.mark.parametrize(("response", "code"), [("none", "SCORER_FAILED"), ("big", "SCORER_FAILED")])
async def test_an_answer_that_is_no_score_is_an_error_of_its_item(
    client: RewardClient, response: str, code: str
) -> None:
    assert codes(await client.score(items_of("fine", response, "fine"))) == ["ok", code, "ok"]


async def test_an_exception_is_an_error_never_a_number(client: RewardClient) -> None:
    (failure,) = await client.score(items_of("raise"))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("SCORER_EXCEPTION", False)
    assert "ValueError: no such luck" in failure.message


async def test_a_function_says_that_asking_again_may_help(client: RewardClient, tmp_path: Path) -> None:
    marker = tmp_path / "warm"
    (failure,) = await client.score(items_of(f"unavailable_once {marker}"))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("SCORER_UNAVAILABLE", True)
    assert codes(await client.score(items_of(f"unavailable_once {marker}"))) == ["ok"]


async def test_an_empty_request_is_refused(start_service: StartService) -> None:
    address = await start_service(behave=function("behave"))
    async with open_channel(address, RpcSection()) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(InvalidInputError, match="at least one"):
            await stub.Score(reward_pb2.ScoreRequest())
        with pytest.raises(InvalidInputError, match="an id of its own"):
            await stub.Score(reward_pb2.ScoreRequest(items=[*items_of("a"), *items_of("b")]))


# ---- only the reward service


async def test_components_are_summed_and_reported(start_service: StartService) -> None:
    address = await start_service(
        correct={"scorer": {"kind": "exact_match"}},
        shape={"scorer": {"kind": "format", "pattern": "[0-9]+"}, "weight": 0.2},
        length={"scorer": {"kind": "length", "max_tokens": 30}, "weight": 0.5},
        seen={"scorer": {"kind": "json"}, "weight": 0.0},
    )
    async with client_of(address) as client:
        right, wrong = await client.score(items_of("42", "no", truth="42"))
        spec = await client.describe()
    assert right == Score(1.0 + 0.2 - 0.05, {"correct": 1.0, "shape": 1.0, "length": -0.1, "seen": 1.0}, answer="42")
    assert wrong == Score(-0.05, {"correct": 0.0, "shape": 0.0, "length": -0.1, "seen": 0.0}, answer="no")
    assert (spec.reward.min, spec.reward.max) == (-0.5, 1.2)
    assert list(spec.reads) == [reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_GROUND_TRUTH]


def test_what_filters_read_is_no_shadow(tmp_path: Path) -> None:
    parts = {
        name: RewardComponent.model_validate({"scorer": {"kind": "exact_match"}, "weight": weight})
        for name, weight in (("correct", 1), ("read", 0), ("seen", 0))
    }
    settings = RewardSettings("127.0.0.1:0", parts, num_workers=1, search_path=tmp_path, start_timeout_s=10.0)
    assert settings.shadows == {"read", "seen"}
    assert replace(settings, filtered="read/part").shadows == {"seen"}


async def test_a_shadow_is_reported_and_fails_nothing(start_service: StartService, tmp_path: Path) -> None:
    liar = Liar()
    async with serving(liar) as external:
        address = await start_service(
            correct={"scorer": {"kind": "exact_match"}},
            trial={"scorer": {"kind": "external", "address": external}, "weight": 0, "timeout_s": 10.0},
            mine={**function("behave"), "weight": 0},
        )
        async with client_of(address, timeout_s=30.0) as client:
            spec = await client.describe()
            scored = await client.score(items_of("fine", "raise", truth="fine"))
            liar.lie = lambda response: setattr(response.results[0].reward, "value", math.nan)
            without_trial = await client.score(items_of("fine", truth="fine"))
    assert {part.name: part.may_be_absent for part in spec.components} == {
        "correct": False,
        "trial": True,
        "mine": True,
    }
    assert (spec.reward.min, spec.reward.max) == (0, 1)
    assert scored == [
        Score(1.0, {"correct": 1.0, "trial": 0.5, "mine": 1.0}, answer="fine"),
        Score(0.0, {"correct": 0.0, "trial": 0.5}, answer="raise"),
    ]
    assert without_trial == [Score(1.0, {"correct": 1.0, "mine": 1.0}, answer="fine")]


TRIAL = {"weight": 0, "timeout_s": 2.0}


async def test_a_shadow_that_is_away_or_another_than_before_holds_nothing_up(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    correct, liar = {"scorer": {"kind": "exact_match"}}, Liar()
    async with serving(liar) as external:
        address = await start_service(
            correct=correct, trial={"scorer": {"kind": "external", "address": external}, **TRIAL}
        )
    client, channel = open_client(
        RewardSection(address=address, components={"correct": correct}), address, RpcSection()
    )
    async with channel:
        first = await client.describe()
        client.forget()  # as after a call that failed
        assert await client.describe() == first
        assert await client.score(items_of("42", truth="42")) == [Score(1.0, {"correct": 1.0}, answer="42")]
        liar.spec.reward.max = 2
        async with serving(liar, bind=external):
            for _ in range(3):
                client.forget()
                assert await client.score(items_of("42", truth="42")) == [Score(1.0, {"correct": 1.0}, answer="42")]
        told = [line for line in caplog.messages if "changed the range of its reward from (0.0, 1.0)" in line]
        assert len(told) == 1
        liar.spec.reward.max = 1
        async with serving(liar, bind=external):
            (score,) = await client.score(items_of("42", truth="42"))
    assert score == Score(1.0, {"correct": 1.0, "trial": 0.5}, answer="42")


async def test_a_service_starts_while_a_shadow_is_away_which_is_scored_and_sent_what_it_reads_once_it_is_there(
    start_service: StartService,
) -> None:
    correct, liar = {"scorer": {"kind": "exact_match"}}, Liar()
    liar.spec.whole_groups = liar.spec.token_rewards = True
    liar.spec.components.add(name="style", min=0, max=1)

    def give_all(response: reward_pb2.ScoreResponse) -> None:
        for result in response.results:
            result.reward.components["style"] = 1.0
            result.reward.token_rewards.CopyFrom(encode_tensor(np.ones(3, np.float32)))

    liar.lie = give_all
    async with serving(liar) as external:
        pass
    address = await start_service(
        awaits_shadows=False,
        correct=correct,
        trial={"scorer": {"kind": "external", "address": external}, **TRIAL},
        asked={"scorer": {"kind": "openrlhf", "address": f"http://{external}/score", "range": [0, 1]}, **TRIAL},
    )
    client, channel = open_client(
        RewardSection(address=address, components={"correct": correct}), address, RpcSection()
    )
    alone = Score(1.0, {"correct": 1.0}, answer="42")
    async with channel:
        assert [part.name for part in (await client.describe()).components] == ["correct"]
        items = items_of("42", truth="42")
        items[0].prompt_token_ids = b"1234"
        assert await client.score(items) == [alone]
        async with serving(liar, bind=external):
            scores: list[Outcome] = [alone]
            async with asyncio.timeout(30.0):
                while scores == [alone]:
                    scores = await client.score(items)
        assert scores == [Score(1.0, {"correct": 1.0, "trial": 0.5, "trial/style": 1.0}, answer="42")]
        assert liar.requests[-1].items[0].prompt_token_ids == b"1234"
        assert len((await client.describe()).components) == 3


class Slow(Liar):
    """One that takes its time to say what it is."""

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.DescribeResponse:
        await asyncio.sleep(0.3)
        return await super().Describe(request, context)


async def test_a_shadow_that_is_there_is_in_the_first_description_however_long_it_takes_to_say_what_it_is(
    start_service: StartService,
) -> None:
    async with serving(Liar()) as quick, serving(Slow()) as slow:
        address = await start_service(
            awaits_shadows=False,
            right={"scorer": {"kind": "external", "address": quick}},
            trial={"scorer": {"kind": "external", "address": slow}, "weight": 0, "timeout_s": 30.0},
        )
        async with client_of(address) as client:
            assert [part.name for part in (await client.describe()).components] == ["right", "trial"]


async def test_a_shadow_of_single_items_takes_no_whole_groups(start_service: StartService) -> None:
    single = {"scorer": {"kind": "openrlhf", "address": "http://127.0.0.1:9/score", "range": [0, 1]}, **TRIAL}
    right = {"scorer": {"kind": "exact_match"}}
    address = await start_service(awaits_shadows=False, right=right, single=single)
    async with client_of(address) as client:
        assert not (await client.describe()).whole_groups


async def test_a_component_may_compare_the_responses_of_a_group(start_service: StartService) -> None:
    seen: list[list[str]] = []

    def ranked(items: Sequence[Item]) -> list[float]:
        seen.append([item.response_text for item in items])
        order = sorted(item.response_text for item in items)
        return [order.index(item.response_text) / len(items) for item in items]

    spec = description("ranked", (0, 1), READS, {}, token_rewards=False, max_items=2, whole_groups=True)
    async with serving(Scorer(spec, all_at_once(ranked, spec))) as external:
        address = await start_service(
            longest={**function("longest", min=0, max=1, scope="group"), "weight": 0.5},
            ranked={"scorer": {"kind": "external", "address": external}, "timeout_s": 5.0},
        )
        items = items_of("b", "aa", "c", "a")
        for item, group in zip(items, "xxxy", strict=True):
            item.group = group
        async with client_of(address) as client:
            assert (await client.describe()).whole_groups
            scores = await client.score(items)
    parts = [score.components if isinstance(score, Score) else score for score in scores]
    assert parts == [
        {"longest": 0.0, "ranked": 1 / 3},
        {"longest": 1.0, "ranked": 0.0},
        {"longest": 0.0, "ranked": 2 / 3},
        {"longest": 1.0, "ranked": 0.0},
    ]
    assert sorted(seen) == [["a"], ["b", "aa", "c"]]


async def test_a_function_of_many_runs_once_at_a_time_whoever_leaves() -> None:
    begun: list[str] = []
    may_end, num_now, most = threading.Event(), 0, 0

    def many(items: Sequence[Item]) -> list[float]:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        begun.append(items[0].response_text)
        may_end.wait(60)
        num_now -= 1
        return [0.5] * len(items)

    spec = description("many", (0, 1), READS, {}, token_rewards=False, max_items=2)
    score = all_at_once(many, spec)
    left, waiting, last = (asyncio.ensure_future(score(items_of(name))) for name in ("left", "waiting", "last"))
    await until(lambda: begun)
    left.cancel()
    waiting.cancel()
    await asyncio.wait([left, waiting, last], timeout=0.2)
    assert begun == ["left"], "it runs on, and nobody beside it"
    may_end.set()
    (result,) = await last
    assert (result.reward.value, begun, most) == (0.5, ["left", "last"], 1)


async def test_a_coroutine_function_of_many_runs_once_at_a_time_and_ends_with_its_caller() -> None:
    begun: list[str] = []
    ended: list[str] = []
    may_end = asyncio.Event()

    async def many(items: Sequence[Item]) -> list[float]:
        begun.append(items[0].response_text)
        try:
            await may_end.wait()
        finally:
            ended.append(items[0].response_text)
        return [0.5] * len(items)

    spec = description("many", (0, 1), READS, {}, token_rewards=False, max_items=2, whole_groups=True)
    score = all_at_once(many, spec)
    left, last = (asyncio.ensure_future(score(items_of(name))) for name in ("left", "last"))
    await until(lambda: begun)
    left.cancel()
    await until(lambda: begun == ["left", "last"])
    assert ended == ["left"]
    may_end.set()
    (result,) = await last
    assert result.reward.value == 0.5
    assert left.cancelled()


async def test_a_coroutine_function_is_awaited_on_a_bounded_number_of_items_and_ends_with_its_caller() -> None:
    at_once, most, num_ended = 0, 0, 0

    async def one(item: Item) -> float:
        nonlocal at_once, most, num_ended
        at_once += 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(60.0 if item.response_text == "long" else 0.0)
        finally:
            at_once -= 1
            num_ended += 1
        if item.response_text == "cancelled":
            raise asyncio.CancelledError
        return 0.5

    spec = description("one", (0, 1), READS, {}, token_rewards=False, max_items=0)
    score = one_by_one(one, spec)
    left = asyncio.ensure_future(score(items_of(*["long"] * (2 * MAX_AWAITED))))
    await until(lambda: at_once == MAX_AWAITED)
    left.cancel()
    await asyncio.wait([left], timeout=60.0)
    assert (at_once, most, num_ended) == (0, MAX_AWAITED, MAX_AWAITED)
    failed, scored = await score(items_of("cancelled", "fine"))
    assert failed.error.code == "SCORER_FAILED", "and the call goes on"
    assert scored.reward.value == 0.5


def test_a_function_of_many_that_is_slow_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    work: Future[list[reward_pb2.ScoreResult]] = Future()
    work.set_result([])
    _tell(work, "many", time.monotonic())
    assert not caplog.messages


async def test_a_function_of_many_that_hangs_is_told_once_and_when_it_came_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def many(items: Sequence[Item]) -> list[float]:
        begun.set()
        may_end.wait(60)
        return [0.5] * len(items)

    spec = description("many", (0, 1), READS, {}, token_rewards=False, max_items=2)
    score = all_at_once(many, spec, overdue_s=0.2)
    calls = [asyncio.ensure_future(score(items_of(name))) for name in ("left", "waiting")]
    await until(begun.is_set)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await until(lambda: caplog.messages)
    (told,) = caplog.messages
    assert "scorer many: a call of the function is still at work" in told
    may_end.set()
    await score(items_of("last"))
    await until(lambda: len(caplog.messages) > 1)
    assert "scorer many: that call came back" in caplog.messages[1]


@pytest.mark.parametrize("kind", ["one_by_one", "whole_groups"])
async def test_what_is_not_begun_when_the_caller_leaves_is_never_begun(kind: str) -> None:
    begun: list[str] = []
    may_end = threading.Event()

    def one(item: Item) -> float:
        begun.append(item.group)
        may_end.wait(60)
        return 0.5

    def group(items: Sequence[Item]) -> list[float]:
        return [one(item) for item in items]

    spec = description("it", (0, 1), READS, {}, token_rewards=False, max_items=0, whole_groups=kind == "whole_groups")
    score = one_by_one(one, spec) if kind == "one_by_one" else all_at_once(group, spec)
    items = items_of(*["x"] * 64)
    for place, item in enumerate(items):
        item.group = f"g{place}"
    left = asyncio.ensure_future(score(items))
    await until(lambda: begun)
    left.cancel()
    await asyncio.wait([left])
    may_end.set()
    last = items_of("last")
    last[0].group = "last"
    assert len(await score(last)) == 1
    await asyncio.sleep(0.1)  # in which others would be begun
    assert len(begun) <= NUM_THREADS + 1
    assert "last" in begun


async def test_items_are_routed_to_scorers_by_their_fields(start_service: StartService) -> None:
    address = await start_service(
        answer={"scorer": {"kind": "exact_match"}, "when": {"source": ["qa", "trivia"], "level": 1}},
        shape={"scorer": {"kind": "json"}, "when": {"source": "json"}, "weight": 0.5},
        length={"scorer": {"kind": "length", "max_tokens": 30}, "when": {"source": ["qa", "json"]}},
    )
    items = items_of("42", "42", "42", "42", truth="no")
    fields: list[dict[str, Any]] = [
        {"source": "qa", "level": 1},
        {"source": "json"},
        {"source": "qa", "level": "1"},
        {},
    ]
    for item, metadata in zip(items, fields, strict=True):
        item.other_ground_truths.append("42")
        item.metadata.update(metadata)
    async with client_of(address) as client:
        spec = await client.describe()
        outcomes = await client.score(items)
    assert outcomes[:3] == [
        Score(0.9, {"answer": 1.0, "length": -0.1}, answer="42"),
        Score(0.4, {"shape": 1.0, "length": -0.1}),
        Score(-0.1, {"length": -0.1}),
    ]
    assert codes(outcomes)[3] == "NOT_APPLICABLE"
    assert reward_pb2.SCORE_FIELD_METADATA in spec.reads
    assert all(part.may_be_absent for part in spec.components)


async def test_what_an_environment_gives_applies_where_one_played_and_its_silence_is_no_zero(
    start_service: StartService,
) -> None:
    won = {"scorer": {"kind": "environment", "min": 0, "max": 1}}
    games = {**won, "when": {"task": "game"}, "weight": 0.5}
    given = reward_pb2.Reward(value=0.75)
    played, tools, silent, plain = items_of("a", "b", "c", "{}")
    for item, task, name in ((played, "game", "arcade"), (tools, "tools", "lab"), (silent, "game", "arcade")):
        item.environment = name
        item.metadata.update({"task": task})
    played.environment_reward.CopyFrom(given)
    tools.environment_reward.CopyFrom(given)
    address = await start_service(plays_all=False, won=won, games=games, shape={"scorer": {"kind": "json"}})
    async with client_of(address) as client:
        spec = await client.describe()
        outcomes = await client.score([played, tools, silent, plain])
    assert outcomes[:2] == [
        Score(0.75 + 0.375, {"won": 0.75, "games": 0.75, "shape": 0.0}),
        Score(0.75, {"won": 0.75, "shape": 0.0}),
    ]
    assert outcomes[3] == Score(1.0, {"shape": 1.0}), "nobody played it, which is not to be 0"
    assert isinstance(outcomes[2], Failure)
    assert "has no reward of an environment" in outcomes[2].message
    assert {part.name for part in spec.components if part.may_be_absent} == {"won", "games"}
    address = await start_service(won=won)
    async with client_of(address) as client:
        assert not any(part.may_be_absent for part in (await client.describe()).components)


async def test_a_missing_ground_truth_is_bad_data_not_a_zero(start_service: StartService) -> None:
    address = await start_service(correct={"scorer": {"kind": "exact_match"}})
    async with client_of(address) as client:
        (failure,) = await client.score(items_of("42"))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("BAD_GROUND_TRUTH", False)
    assert "component 'correct'" in failure.message


async def test_a_hung_component_fails_its_item_by_name_and_in_time(start_service: StartService) -> None:
    address = await start_service(good={"scorer": {"kind": "json"}}, mine={**function("behave"), "timeout_s": 2.0})
    async with client_of(address, timeout_s=50.0) as client:  # it hangs for 60 s
        outcomes = await client.score(items_of("fine", "hang", "fine"))
    assert codes(outcomes) == ["ok", "TIMEOUT", "ok"]
    assert isinstance(outcomes[1], Failure)
    assert "component 'mine'" in outcomes[1].message


async def test_items_that_hang_for_longer_than_their_caller_waits_are_blamed_when_they_come_again(
    start_service: StartService,
) -> None:
    address = await start_service(mine={**function("behave"), "timeout_s": 1.0, "max_attempts": 3})
    outcomes: list[Outcome] = []
    async with client_of(address, timeout_s=1.5, max_attempts=1) as client, asyncio.timeout(50):
        while not outcomes or any(isinstance(outcome, Failure) and outcome.retryable for outcome in outcomes):
            outcomes = await client.score(items_of(*["hang"] * 3, "fine"))
            await asyncio.sleep(0.5)
    assert codes(outcomes) == ["TIMEOUT"] * 3 + ["ok"]


async def test_items_that_take_longer_than_their_caller_waits_are_scored_when_they_come_again(
    start_service: StartService,
) -> None:
    """Each takes a fraction of its component's time: only together they outlast the call."""
    address = await start_service(mine={**function("behave"), "timeout_s": 30.0})
    items = items_of(*(f"sleep {0.5 + i / 1000}" for i in range(16)))
    outcomes: list[Outcome] = []
    async with client_of(address, timeout_s=1.0, max_attempts=1) as client, asyncio.timeout(60):
        while not outcomes or "ok" not in codes(outcomes):
            outcomes = await client.score(items)
            await asyncio.sleep(0.2)
    assert codes(outcomes) == ["ok"] * len(items)


async def test_an_item_that_hangs_holds_up_no_other_group_that_comes_again_without_it(
    start_service: StartService,
) -> None:
    address = await start_service(mine={**function("behave"), "timeout_s": 60.0})
    hanging, *others = items_of("hang", "fine")  # one for each worker
    async with client_of(address, timeout_s=3.0) as client:
        assert codes(await client.score([hanging, *others])) == ["DEADLINE"] * 2
        async with asyncio.timeout(30):
            while codes(await client.score(others)) != ["ok"]:
                await asyncio.sleep(0.1)


async def test_a_response_that_math_never_finishes_reading_has_no_answer_and_a_truth_of_that_kind_is_bad_data(
    start_service: StartService,
) -> None:
    """Ended by CPU time, which a busy machine does not take from anybody: the deadline is never met by responses."""
    address = await start_service(
        told={"scorer": {"kind": "math"}, "timeout_s": 120.0, "max_attempts": 3},
    )
    tower, integral = r"so \boxed{9^{9^{9}}}", r"it is \boxed{\int_0^1 e^{-x^2}\sin(x^3)dx}"
    async with client_of(address, timeout_s=240.0, max_attempts=1) as client:
        outcomes = await client.score(items_of(tower, r"so \boxed{42}", integral, "0 1 " * 32_000, "41", truth="42"))
    assert codes(outcomes) == ["ok"] * 5
    assert [outcome.total for outcome in outcomes if isinstance(outcome, Score)] == [0.0, 1.0, 0.0, 0.0, 0.0]
    address = await start_service(told={"scorer": {"kind": "math"}, "timeout_s": 3.0, "max_attempts": 1})
    async with client_of(address, timeout_s=60.0, max_attempts=1) as client:
        assert codes(await client.score(items_of("42", truth="9^{9^{9}}"))) == ["TIMEOUT"]
    address = await start_service(told={"scorer": {"kind": "math"}, "timeout_s": 120.0, "max_attempts": 1})
    async with client_of(address, timeout_s=240.0, max_attempts=1) as client:
        assert codes(await client.score(items_of("42", truth="1500000!"))) == ["BAD_GROUND_TRUTH"]
        several = items_of("42", truth="42")
        several[0].other_ground_truths.append("1500000!")
        assert codes(await client.score(several)) == ["ok"], "what stands behind the right one is not looked at"


async def test_a_killed_worker_loses_no_score(start_service: StartService, tmp_path: Path) -> None:
    address = await start_service(mine={**function("behave"), "max_attempts": 2})
    async with client_of(address, timeout_s=20.0) as client:
        assert codes(await client.score(items_of("fine", f"die_once {tmp_path / 'dead'}", "fine"))) == ["ok"] * 3


@pytest.mark.parametrize(("response", "code"), [("exit", "WORKER_DIED"), ("lost", "WORKER_LOST")])
async def test_an_item_that_kills_every_worker_ends_as_bad_data(
    start_service: StartService, response: str, code: str
) -> None:
    address = await start_service(mine={**function("behave"), "max_attempts": 2})
    async with client_of(address, timeout_s=20.0, max_attempts=3) as client:
        killed, fine = await client.score(items_of(response, "fine"))
    assert isinstance(killed, Failure)
    assert (killed.code, killed.retryable) == (code, False)
    assert isinstance(fine, Score)


async def test_a_function_with_details_has_them_declared_and_checked(start_service: StartService) -> None:
    declared = function("detailed", components=["first", "second"], token_rewards=True)
    address = await start_service(mine={**declared, "weight": 2.0}, plain=function("detailed"))
    async with client_of(address) as client:
        (failure,) = await client.score(items_of("a"))
    assert isinstance(failure, Failure)
    assert "component 'plain'" in failure.message
    assert "it declares []" in failure.message
    async with client_of(await start_service(mine={**declared, "weight": 2.0})) as client:
        (score,) = await client.score(items_of("a"))
    assert isinstance(score, Score)
    assert (score.value, score.components) == (1.0, {"mine": 0.5, "mine/first": 1.0, "mine/second": -1.0})
    assert score.token_rewards is not None
    np.testing.assert_array_equal(score.token_rewards, np.full(3, 0.5, np.float32))


async def test_an_external_scorer_is_a_component_over_tls_with_a_token(
    start_service: StartService, folder: Path
) -> None:
    tls = Authority(folder / "tls").issue("scorer")
    (folder / "token").write_text("s3cret\n")
    spec = description("half", (0, 1), READS, {}, token_rewards=False, max_items=0)
    rpc = rpc_section(tls.certificate_file, tls.key_file, behind_mesh=False)
    server = new_server(Scorer(spec, one_by_one(lambda item: 0.5, spec), bearer_token="s3cret"), "localhost:0", rpc)
    scorer = {
        "kind": "external",
        "address": await server.start(),
        "ca_file": str(tls.ca_file),
        "bearer_token_file": "token",
    }
    try:
        address = await start_service(
            half={"scorer": scorer, "weight": 3.0}, correct={"scorer": {"kind": "exact_match"}}
        )
        async with client_of(address) as client:
            assert await client.score(items_of("1", truth="1")) == [
                Score(2.5, {"half": 0.5, "correct": 1.0}, answer="1")
            ]
        (folder / "token").write_text("wrong")
        with pytest.raises(UnauthenticatedError, match="bearer_token_file"):
            await start_service(half={"scorer": scorer})
    finally:
        await server.drain(0.0)


async def test_an_external_scorer_that_is_away_fails_items_until_it_is_back(start_service: StartService) -> None:
    liar = Liar()
    async with serving(liar) as external:
        address = await start_service(
            there={"scorer": {"kind": "external", "address": external}, "timeout_s": 2.0, "max_attempts": 1},
            json={"scorer": {"kind": "json"}, "weight": 0.0},
        )
        async with client_of(address, timeout_s=20.0) as client:
            assert codes(await client.score(items_of("1"))) == ["ok"]
    async with client_of(address, timeout_s=20.0) as client:
        async with serving(liar, bind=external):
            await client.describe()
        (failure,) = await client.score(items_of("1"))
        assert isinstance(failure, Failure)
        assert failure.retryable
        assert "component 'there'" in failure.message
        async with serving(liar, bind=external):
            assert codes(await client.score(items_of("1"))) == ["ok"]


async def test_an_external_scorer_that_lies_is_not_believed(start_service: StartService) -> None:
    liar = Liar()

    def exceed(response: reward_pb2.ScoreResponse) -> None:
        response.results[0].reward.value = 1000.0

    liar.lie = exceed
    async with serving(liar) as external:
        address = await start_service(there={"scorer": {"kind": "external", "address": external}})
        async with client_of(address) as client:
            (failure,) = await client.score(items_of("1"))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("SCORER_FAILED", False)


async def test_an_external_scorer_that_never_answers_stops_the_start_and_is_named(start_service: StartService) -> None:
    async with serving(Liar()) as external:
        pass
    with pytest.raises(ScorerUnavailableError, match="component 'there'"):
        await start_service(start_timeout_s=1.0, there={"scorer": {"kind": "external", "address": external}})


@pytest.mark.parametrize("kind", ["judge", "external"])
async def test_a_server_of_the_run_is_loading_until_it_first_answers_and_away_after_that(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    rubric = {"template": "{{ response }}", "verdicts": {"good": 1.0, "bad": 0.0}}
    scorer = {"kind": kind, "server": "grader"} | ({"rubric": rubric} if kind == "judge" else {})
    grader = {"model": "/grader"} if kind == "judge" else {"reward_model": {"path": "/grader"}}
    section = RewardSection.model_validate(
        {
            "servers": {"grader": {**grader, "address": f"127.0.0.1:{port}"}},
            "components": {"it": {"scorer": scorer, "timeout_s": 2.0, "max_attempts": 1}},
        }
    )
    dispatcher = Dispatcher(
        RewardSettings("127.0.0.1:0", section.placed_components, 1, search_path=Path(), start_timeout_s=60.0),
        RpcSection(),
    )

    def told(level: int) -> list[str]:
        return [record.message for record in caplog.records if record.levelno == level]

    caplog.set_level(logging.INFO, "rolecall.scoring")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(dispatcher.close)
        starting = asyncio.create_task(dispatcher.start())
        address = await stack.enter_async_context(serving(RewardServicer(dispatcher, on_score=lambda: None)))
        client = await stack.enter_async_context(client_of(address, timeout_s=20.0))
        for _ in range(3):
            with pytest.raises(ScorerLoadingError, match=r"scorer 'it' at .* is loading"):
                await client.describe()
        assert (client.trouble, dispatcher.trouble) == ("", "")
        async with AsyncExitStack() as up:
            if kind == "judge":
                up.enter_context(http_server(judge_twin(lambda text: "good"), port))
            else:
                await up.enter_async_context(serving(Liar(), bind=f"127.0.0.1:{port}"))
            await starting
            assert codes(await client.score(items_of("1"))) == ["ok"]
        assert told(logging.WARNING) == []
        assert len(told(logging.INFO)) == 2, "the reward says it once, and the controller"
        assert codes(await client.score(items_of("2"))) != ["ok"]
        assert len(told(logging.WARNING)) == 2
        assert dispatcher.trouble.startswith("no scores from it at")


async def test_the_controllers_client_is_made_from_the_configuration(start_service: StartService) -> None:
    address = await start_service(correct={"scorer": {"kind": "exact_match"}})
    client, channel = open_client(RewardSection(address=address), address, RpcSection())
    assert codes(await client.score(items_of("1", truth="1"))) == ["ok"]
    await channel.close()


@pytest.mark.parametrize("name", ["mean", "time_s", "pass@1", "worst@4"])
async def test_a_whole_reward_whose_component_is_called_as_a_metric_is_refused_and_not_under_a_prefix(
    start_service: StartService, name: str
) -> None:
    liar = Liar()
    liar.spec.components.add(name=name, min=0, max=1)
    liar.spec.components.add(name="recall@5")
    async with serving(liar) as address:
        client, channel = open_client(RewardSection(address=address), address, RpcSection())
        with pytest.raises(ScorerError, match=rf"components \['{name}'\].*rename"):
            await client.describe()
        await channel.close()
        service = await start_service(there={"scorer": {"kind": "external", "address": address}})
        async with client_of(service) as client:
            components = [part.name for part in (await client.describe()).components]
        assert components == ["there", f"there/{name}", "there/recall@5"]
        client, channel = open_client(RewardSection(address=service), service, RpcSection())
        assert await client.describe()
        await channel.close()


async def test_a_batch_of_tiny_items_is_scored_in_milliseconds(start_service: StartService) -> None:
    address = await start_service(correct={"scorer": {"kind": "exact_match"}})
    items = items_of(*["12345"] * 256, truth="12345")
    async with client_of(address) as client:
        await client.score(items)
        fastest = min([await _seconds(client, items) for _ in range(10)])
    assert fastest < 2.0, f"256 items took {fastest * 1000:.1f} ms"
    sys.stdout.write(f"256 items: {fastest * 1000:.1f} ms\n")


async def _seconds(client: RewardClient, items: list[reward_pb2.ScoreItem]) -> float:
    started = time.perf_counter()
    await client.score(items)
    return time.perf_counter() - started
