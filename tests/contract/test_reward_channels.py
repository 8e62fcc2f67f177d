"""How scorers are connected to: how often a call is made, how often a connection is pinged, and how much goes through,
of our own reward service and of somebody else's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rolecall.errors import UnavailableError
from rolecall.reward import Item, Score, Scorer, all_at_once, description, new_server
from rolecall.rpc.options import MAX_GROUP_BYTES
from rolecall.scoring.client import RewardClient, open_client, open_external
from rolecall.scoring.scores import Failure
from rolecall.settings import FEW_CALLS, ControllerSection, ExternalScorer, RewardSection, RpcSection
from rolecall.v1 import reward_pb2
from services.reward.config import RewardSettings
from tests.contract.reward_peers import COMPONENT, Liar, items_of, serving
from tests.waiting import until

Opened = tuple[RewardClient, grpc.aio.Channel]
OURS = {"components": {"correct": COMPONENT.validate_python({"scorer": {"kind": "exact_match"}})}}


def whole(address: str, timeout_s: float = 20.0, max_attempts: int = 3) -> Opened:
    """A whole reward of somebody else's."""
    section = RewardSection(address=address, timeout_s=timeout_s, max_attempts=max_attempts)
    return open_client(section, address, RpcSection())


def ours(address: str, timeout_s: float = 20.0, max_attempts: int = 3) -> Opened:
    """The run's own service."""
    section = RewardSection(address=address, timeout_s=timeout_s, max_attempts=max_attempts, **OURS)
    return open_client(section, address, RpcSection())


def component(address: str, timeout_s: float = 20.0, max_attempts: int = 3) -> Opened:
    """An external scorer as a component."""
    return open_external(
        "it", ExternalScorer(address=address), RpcSection(), timeout_s=timeout_s, max_attempts=max_attempts
    )


@pytest.mark.parametrize("opened", [whole, component])
async def test_a_call_to_somebody_elses_scorer_is_made_max_attempts_times_and_no_more(
    opened: Callable[..., Opened],
) -> None:
    liar = Liar()

    def fail() -> None:
        raise UnavailableError("overloaded")

    liar.fail = fail
    async with serving(liar) as address:
        client, channel = opened(address, max_attempts=2)
        (failure,) = await client.score(items_of("a"))
        await channel.close()
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable, len(liar.requests)) == ("UNAVAILABLE", True, 2)


def component_of_20(address: str) -> Opened:
    scorer = ExternalScorer(address=address, num_calls=20)
    return open_external("it", scorer, RpcSection(), timeout_s=20.0, max_attempts=3)


@pytest.mark.parametrize(
    ("opened", "num_calls"),
    [(ours, ControllerSection.max_score_calls), (whole, FEW_CALLS), (component, FEW_CALLS), (component_of_20, 20)],
)
async def test_a_slow_scorer_is_called_as_often_at_a_time_as_it_may_be(
    opened: Callable[..., Opened], num_calls: int
) -> None:
    liar = Liar()
    liar.fail = lambda: asyncio.sleep(0.2)
    groups = [[reward_pb2.ScoreItem(id=f"{gid}/0", group=str(gid))] for gid in range(20 * num_calls)]
    async with serving(liar) as address:
        client, channel = opened(address)
        await asyncio.gather(*(client.score(group) for group in groups))
        await channel.close()
    assert liar.most_at_once == num_calls


def judge(scope: str, template: str, **more: Any) -> dict[str, Any]:
    verdicts = {"good": 1, "bad": 0} if scope == "item" else {}
    rubric = {"model": "m", "scope": scope, "template": template, "verdicts": verdicts, **more}
    return {"kind": "judge", "address": "http://h:1/v1", "rubric": rubric}


def large_group(num_bytes: int) -> list[reward_pb2.ScoreItem]:
    return [
        reward_pb2.ScoreItem(id=f"7/{i}", group="7", response_text="x" * (num_bytes // 64), num_response_tokens=1)
        for i in range(64)
    ]


@pytest.mark.parametrize("opened", [ours, whole, component])
async def test_a_group_that_is_scored_whole_is_sent_beyond_the_size_of_other_messages_and_not_without_a_bound(
    opened: Callable[..., Opened],
) -> None:
    def total(items: Sequence[Item]) -> list[float]:
        return [float(len(items))] * len(items)

    spec = description("total", (0, 64), ("response_text",), {}, token_rewards=False, max_items=1, whole_groups=True)
    server = new_server(Scorer(spec, all_at_once(total, spec)), "127.0.0.1:0", RpcSection())
    client, channel = opened(await server.start(), 60.0)
    assert await client.score(large_group(MAX_GROUP_BYTES - 2**20)) == [Score(64.0)] * 64
    failure, *_ = await client.score(large_group(MAX_GROUP_BYTES + 2**20))
    await channel.close()
    await server.drain(0.0)
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("EXHAUSTED", False)
    assert "larger than max" in failure.message
    assert failure.message.endswith("send less in a message, or raise the limit of the side that refused it")


@pytest.mark.parametrize(
    ("scorer", "takes_large"),
    [
        ({"kind": "exact_match"}, False),
        ({"kind": "function", "target": "m:f", "scope": "batch"}, False),
        ({"kind": "function", "target": "m:f", "scope": "group"}, True),
        ({"kind": "external", "address": "h:1"}, True),
        ({"kind": "trl", "address": "http://h:1"}, False),
        (judge("item", "{{ response }}"), False),
        (judge("group", "{{ first }} {{ second }}"), True),
        ({"kind": "function", "target": "m:f", "images": True}, True),
        (judge("item", "{{ prompt }} {{ response }}", images=True), True),
    ],
)
def test_our_service_takes_large_requests_where_a_component_may(scorer: dict[str, Any], takes_large: bool) -> None:
    parts = {"exact": COMPONENT.validate_python({"scorer": {"kind": "exact_match"}})}
    parts["it"] = COMPONENT.validate_python({"scorer": scorer})
    assert RewardSettings("127.0.0.1:0", parts, 1, Path(), 1.0).takes_large == takes_large


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A server that takes HTTP/2 connections, which it notes, and says nothing more, to pings neither."""
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS
        await reader.read()  # bounded: by the test, which closes the channel

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}", connections
    finally:
        for writer in connections:
            writer.close()
        server.close()


@pytest.mark.parametrize(("opened", "is_pinged"), [(ours, True), (whole, False), (component, False)])
async def test_our_own_service_is_pinged_and_given_up_when_it_hangs_and_somebody_elses_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Opened], is_pinged: bool
) -> None:
    monkeypatch.setattr("rolecall.rpc.options.KEEPALIVE_S", 0.3)
    monkeypatch.setattr("rolecall.rpc.options.KEEPALIVE_TIMEOUT_S", 0.3)
    async with silent_server() as (address, connections):
        client, channel = opened(address)
        describing = asyncio.create_task(client.describe())
        if is_pinged:
            await until(lambda: len(connections) > 1)  # the first was given up
        else:
            await asyncio.sleep(3.0)
            assert len(connections) == 1
            assert not describing.done()
        describing.cancel()
        await channel.close()
