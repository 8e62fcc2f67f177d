"""Calls of an agent at the rollout's endpoint: what is one and the same, what is refused, and what a failure leaves."""

import asyncio
import gc
import json
import logging
import socket
import ssl
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from openai import OpenAI

from rolecall.environment import Agent, Answer, Policy
from rolecall.errors import UnavailableError
from rolecall.settings import RpcSection
from services.rollout.harness import chat
from services.rollout.harness.calls import Answered, ChatCall, Reply
from services.rollout.harness.endpoint import Endpoint
from services.rollout.harness.retries import Exchanges
from tests.contract.environment_peers import environment
from tests.contract.rollout_replica import ReplicaUnderTest
from tests.contract.test_rollout_episodes import LetterEngine, rollout_in
from tests.contract.test_rollout_harness import RUNS, asked, played
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.rotation import Rotation
from tests.waiting import until

SAID: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


class Repeating(Agent):
    """An agent whose answers get lost, and which also asks again on purpose."""

    all_left: threading.Barrier

    def run(self, policy: Policy) -> float | Answer | None:
        body = {"model": policy.model, "messages": SAID}
        url = f"{policy.base_url}/chat/completions"
        with httpx.Client(headers={"Authorization": f"Bearer {policy.api_key}"}, timeout=60) as client:

            def post(body: Any = body, **headers: str) -> Any:
                return client.post(url, json=body, headers={name.replace("_", "-"): headers[name] for name in headers})

            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=body, timeout=httpx.Timeout(60, read=0.1))
            self.all_left.wait(60)
            first = post().json()
            assert first["id"] == "chatcmpl-1", "its client left without the answer"
            assert post().json()["id"] == "chatcmpl-2", "another sample of the same thought"
            assert post(x_stainless_retry_count="0").json()["id"] == "chatcmpl-3"
            assert post(x_stainless_retry_count="1").json()["id"] == "chatcmpl-3"
            named = post(Idempotency_Key="k").json()
            assert named["id"] == "chatcmpl-4"
            assert post(Idempotency_Key="k").json() == named
            assert post({**body, "user": "another"}, Idempotency_Key="k").status_code == 422
        return 0.5


class Silent(LetterEngine):
    """An engine that says nothing before the clients of a group's four agents have left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hold = True
        Repeating.all_left = threading.Barrier(4, self.go_on)

    def go_on(self) -> None:
        self.hold = False


async def test_a_repeated_call_is_answered_once_and_another_sample_is_another(
    store: StoreUnderTest, folder: Path
) -> None:
    for _, meta in await played(store, folder, Repeating, num=1, engine=Silent):
        tokens = meta.episode.tokens
        assert tokens.num_calls == 4
        assert tokens.num_sampled == tokens.num_trained, "four thoughts about one question are four segments"
        assert len(meta.episode.turns) == 4


async def test_a_call_without_an_answer_is_forgotten_and_tried_again() -> None:
    exchanges = Exchanges[str]()

    async def refused() -> str:
        raise UnavailableError("not now")

    for _ in range(3):
        assert exchanges.earlier(b"a", "", 1) is None
        work = asyncio.create_task(refused())
        exchanges.add(b"a", "", 1, work, lambda: False)
        await asyncio.wait({work})
        await asyncio.sleep(0)


async def test_a_call_that_comes_after_its_own_repetition_takes_no_later_one_from_it() -> None:
    exchanges = Exchanges[str]()
    work = asyncio.create_task(asyncio.sleep(0, "an answer"))
    repetition = exchanges.add(b"a", "", 1, work, lambda: False)
    repetition.is_delivered = True
    assert exchanges.earlier(b"a", "", 0) is None
    late = exchanges.add(b"a", "", 0, work, lambda: False)
    assert exchanges.earlier(b"a", "", 2) is repetition
    late.is_delivered = True
    again = exchanges.add(b"a", "", 0, work, lambda: False)
    assert exchanges.earlier(b"a", "", 1) is again, "the same on purpose, and its repetition"
    assert exchanges.earlier(b"b", "", 1) is None
    await work


async def test_the_endpoint_shows_the_certificate_that_its_files_hold_now(folder: Path) -> None:
    rotation, no_attempt = Rotation(folder / "tls"), cast(Any, None)
    tls = rotation.tls("rollout")
    endpoint = Endpoint("127.0.0.1:0", RpcSection(tls=tls), host=None)
    await endpoint.start()
    try:
        for _ in range(2):
            trusted = ssl.create_default_context(cafile=str(tls.ca_file))
            endpoint.open(no_attempt)
            async with httpx.AsyncClient(verify=trusted) as client:
                assert (await client.get(f"{endpoint.base_url('127.0.0.1:1')}/models")).status_code == 401
            await rotation.turn()
    finally:
        await endpoint.close()


@asynccontextmanager
async def listening(rpc: RpcSection | None = None) -> AsyncIterator[tuple[Endpoint, str, int]]:
    """An endpoint that listens, a key of an episode in which nobody answers, and its port."""
    endpoint = Endpoint("127.0.0.1:0", rpc or RpcSection(), host=None)
    await endpoint.start()
    try:
        key, _ = endpoint.open(cast(Any, None))
        yield endpoint, key, httpx.URL(endpoint.base_url("127.0.0.1:1")).port or 0
    finally:
        await endpoint.close()


@pytest.mark.parametrize("head", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"])
async def test_a_connection_on_which_nothing_is_asked_is_closed(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr("services.rollout.harness.endpoint.IDLE_S", 0.3)
    async with listening() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_body_that_never_ends_is_refused_and_its_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.harness.endpoint.BODY_S", 0.2)
    monkeypatch.setattr("services.rollout.harness.endpoint.LINGER_S", 0.2)
    async with listening() as (_, key, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/messages HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: 100\r\n\r\n{{"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body of the request did not come within 0.2 s" in answer
        writer.close()


async def test_a_client_that_leaves_within_its_request_is_no_error_of_the_servers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (_, key, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/messages HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: 100\r\n\r\n{{"
        writer.write(head.encode())
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await asyncio.sleep(0.2)
    assert caplog.messages == []


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
async def test_a_call_whose_body_comes_after_its_episode_is_over_is_refused(path: str) -> None:
    """The attempt is None here: to ask it would be an error of the server's."""
    async with listening() as (endpoint, key, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "policy", "max_tokens": 8, "messages": SAID}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:9])
        await asyncio.sleep(0.2)
        endpoint.seal(key)
        writer.write(body[9:])
        answer = await asyncio.wait_for(reader.readuntil(b"under way"), 30)
        assert answer.startswith(b"HTTP/1.1 401 ")
        writer.close()


class Counts:
    """An attempt that never has counted the tokens of a prompt."""

    def __init__(self) -> None:
        self.is_counting, self.has_ended = asyncio.Event(), asyncio.Event()

    async def num_prompt_tokens(self, call: ChatCall) -> int:
        self.is_counting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended.set()
        return 0


async def test_the_count_of_a_prompts_tokens_ends_with_its_episode() -> None:
    async with listening() as (endpoint, _, _), httpx.AsyncClient() as client:
        attempt = Counts()
        key, _ = endpoint.open(cast(Any, attempt))
        url, headers = f"{endpoint.base_url('127.0.0.1:1')}/messages/count_tokens", {"x-api-key": key}
        asking = asyncio.create_task(client.post(url, json={"messages": SAID}, headers=headers))
        await asyncio.wait_for(attempt.is_counting.wait(), 30)
        endpoint.seal(key)
        assert (await asyncio.wait_for(asking, 30)).status_code == 401
        assert attempt.has_ended.is_set()


class Brief:
    """An attempt that says hello."""

    num_calls = 0

    async def answer(self, call: ChatCall) -> Reply:
        self.num_calls += 1
        return Reply(self.num_calls, {"role": "assistant", "content": "hello"}, "stop", 1, 1)

    def seen(self, number: int) -> None:
        pass


async def test_a_large_body_is_read_beside_the_loop_and_overtaken_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read, may_go_on, read = threading.Event(), threading.Event(), chat.read

    def slow(body: bytes, answered: Answered) -> ChatCall:
        if len(body) > 2**20:
            is_read.set()
            assert may_go_on.wait(30)
        return read(body, answered)

    monkeypatch.setattr(chat, "read", slow)
    async with listening() as (endpoint, _, _), httpx.AsyncClient() as client:
        key, _ = endpoint.open(cast(Any, Brief()))
        url, headers = f"{endpoint.base_url('127.0.0.1:1')}/chat/completions", {"Authorization": f"Bearer {key}"}

        async def call(text: str) -> str:
            said = [{"role": "user", "content": text}]
            response = await client.post(url, json={"messages": said}, headers=headers, timeout=60)
            return str(response.json()["id"])

        first = asyncio.create_task(call("x" * 2**21))
        await until(is_read.is_set)
        second = asyncio.create_task(call("y"))
        await asyncio.sleep(0.2)
        may_go_on.set()
        assert (await first, await second) == ("chatcmpl-1", "chatcmpl-2")


async def test_no_body_outlives_its_answer() -> None:
    """The episode is open, and so is the connection."""
    async with listening() as (endpoint, _, _), httpx.AsyncClient() as client:
        key, _ = endpoint.open(cast(Any, Brief()))
        url = f"data:image/png;base64,{'A' * 2**22}"
        said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

        async def call() -> None:
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.post(
                f"{endpoint.base_url('127.0.0.1:1')}/chat/completions", json={"messages": said}, headers=headers
            )
            assert response.status_code == 200

        await call()
        tracemalloc.start()
        try:
            for _ in range(3):
                await call()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 2**22, "not even one"
        finally:
            tracemalloc.stop()


async def test_an_answer_that_takes_longer_than_idle_connections_live_is_told(
    store: StoreUnderTest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.harness.endpoint.IDLE_S", 0.2)
    for _, meta in await played(store, folder, Patient, num=1, token_s=0.2):
        assert len(meta.episode.turns) == 2


async def test_connections_beyond_what_the_process_has_descriptors_for_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.rollout.harness.endpoint.MAX_CONNECTIONS", 3)
    async with listening() as (endpoint, _, port):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{endpoint.base_url('127.0.0.1:1')}/models")
            for _, writer in kept:
                writer.close()
            await asyncio.sleep(0.1)
            assert (await client.get(f"{endpoint.base_url('127.0.0.1:1')}/models")).status_code == 401


async def test_connections_that_never_shake_hands_are_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.rollout.harness.endpoint.MAX_CONNECTIONS", 3)
    rotation = Rotation(tmp_path)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "rollout" / "ca.crt"))
    async with listening(RpcSection(tls=rotation.tls("rollout"))) as (endpoint, _, port):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
        assert caplog.text.count("agents have more than 3 connections open") == 1
        for _, writer in kept:
            writer.close()
        async with httpx.AsyncClient(verify=trusted) as client:
            statuses: list[int] = []
            while len(statuses) < 5:
                with suppress(httpx.TransportError):  # until it has seen that the others left
                    statuses.append((await client.get(f"{endpoint.base_url('127.0.0.1:1')}/models")).status_code)
        assert set(statuses) == {401}


class Patient(Agent):
    """An agent that waits for long answers, one of which streams."""

    def run(self, policy: Policy) -> float | Answer | None:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, timeout=60, max_retries=0) as client:
            asked(client, SAID)
            for _ in client.chat.completions.create(model=policy.model, messages=SAID, stream=True):
                pass
        return 0.5


class Impatient(Agent):
    """An agent whose client gives up soon and asks again by itself, as SDKs do."""

    def run(self, policy: Policy) -> float | Answer | None:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, timeout=0.1, max_retries=50) as client:
            asked(client, SAID)
        return 0.5


async def test_what_an_sdk_repeats_is_sampled_once(store: StoreUnderTest, folder: Path) -> None:
    for _, meta in await played(store, folder, Impatient, num=1, token_s=0.05):
        assert meta.episode.tokens.num_calls == 1
        assert not meta.episode.tokens.masked


class Refused(Agent):
    """An agent that asks for what nobody gives."""

    def run(self, policy: Policy) -> float | Answer | None:
        bodies: list[bytes] = [
            b"",
            b"[]",
            b"\xff",
            b"[" * 100_000,
            b'{"messages": []}',
            b'{"messages": [1]}',
            b'{"messages": [{"role": "robot", "content": "a"}]}',
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b'{"messages": [{"role": "user", "content": 1}]}',
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            b'{"messages": [{"role": "user", "content": "a"}], "n": 2}',
            b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
            b'{"messages": [{"role": "user", "content": "a"}], "tools": 1}',
            b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web_search"}]}',
            b'{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}',
        ]
        with httpx.Client(base_url=policy.base_url, timeout=60) as client:
            key = {"Authorization": f"Bearer {policy.api_key}"}
            for body in bodies:
                answer = client.post("/chat/completions", content=body, headers=key)
                assert answer.status_code == 400, body[:80]
                assert answer.json()["error"]["message"]
            for wrong in ({}, {"Authorization": policy.api_key}, {"Authorization": "Bearer guessed"}):
                assert client.get("/models", headers=wrong).status_code == 401
                assert client.post("/chat/completions", content=bodies[0], headers=wrong).status_code == 401
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as openai_client:
            asked(openai_client, SAID)
        return 0.5


async def test_what_cannot_be_answered_is_refused_in_words_and_takes_no_call(
    store: StoreUnderTest, folder: Path
) -> None:
    for _, meta in await played(store, folder, Refused, num=1):
        assert meta.episode.tokens.num_calls == 1


class Keyless(Agent):
    """An agent whose clients can set a URL and no key."""

    kept: list[str] = []

    def run(self, policy: Policy) -> float | Answer | None:
        root = policy.base_url.removesuffix("/v1")
        url, wrong = f"{root}/episodes/{policy.api_key}/v1", f"{root}/episodes/guessed/v1"
        right_key = {"Authorization": f"Bearer {policy.api_key}", "x-api-key": policy.api_key}
        with OpenAI(base_url=url, api_key="none") as client:
            asked(client, SAID)
        with httpx.Client(timeout=60) as client:
            assert client.get(f"{url}/models").status_code == 200
            assert client.post(f"{url}/messages/count_tokens", json={"messages": SAID}).status_code == 200
            for answer in (
                client.get(f"{wrong}/models", headers=right_key),
                client.post(f"{wrong}/chat/completions", json={"messages": SAID}, headers=right_key),
            ):
                assert answer.status_code == 401, "the key in the path counts"
        host, _, port = root.removeprefix("http://").rpartition(":")
        for line in ("HTTP/9.x", " HTTP/1.1", "x" * 10_000):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(f"GET /episodes/{policy.api_key}/v1/models {line}\r\n\r\n".encode())
                assert b"400" in connection.recv(1000)
        Keyless.kept.append(policy.api_key)
        return 0.5


async def test_a_key_in_the_path_is_as_good_as_one_in_a_header_and_is_in_no_log(
    store: StoreUnderTest, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keyless.kept.clear()
    with caplog.at_level(logging.DEBUG):
        for _, meta in await played(store, folder, Keyless, num=1):
            assert meta.episode.tokens.num_calls == 1
    assert "refused a malformed request from 127.0.0.1" in caplog.messages
    clients = ("httpx", "httpcore", "openai")  # what they log of their own URLs is the agent's affair
    rollouts = [caplog.handler.format(each) for each in caplog.records if not each.name.startswith(clients)]
    assert len(Keyless.kept) == 4
    assert not [key for key in Keyless.kept if any(key in line for line in rollouts)]


class Late(Agent):
    """An agent that keeps its key."""

    kept: list[Policy] = []

    def run(self, policy: Policy) -> float | Answer | None:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            asked(client, SAID)
        self.kept.append(policy)
        return 0.5


def late(policy: Policy) -> None:
    with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        with pytest.raises(openai.AuthenticationError):
            asked(client, SAID)
        with pytest.raises(openai.AuthenticationError):
            asked(client, SAID, streams=True)


async def test_a_key_is_good_until_its_episode_is_over(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Late, **RUNS) as (address, _), rollout_in(store, folder, address) as rollout:
        rollout.admit(1, max_tokens=600)
        await rollout.publish(1)
        await rollout.committed(1)
        assert len({policy.api_key for policy in Late.kept}) == 4
        await asyncio.gather(*(asyncio.to_thread(late, policy) for policy in Late.kept))


class Wordless(Agent):
    """An agent that asks nothing."""

    def run(self, policy: Policy) -> float | Answer | None:
        return 1.0


class Failing(Agent):
    """An agent that fails after its first call."""

    def run(self, policy: Policy) -> float | Answer | None:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            asked(client, SAID)
        raise RuntimeError("the harness broke")


@pytest.mark.parametrize(
    ("agent", "why"), [(Wordless, "without an answer of the policy"), (Failing, "the harness broke")]
)
async def test_an_episode_that_its_agent_lost_is_no_trajectory(
    store: StoreUnderTest, folder: Path, agent: type[Agent], why: str
) -> None:
    async with environment(agent, **RUNS) as (address, sessions), rollout_in(store, folder, address) as rollout:
        rollout.admit(1, max_tokens=600)
        await rollout.publish(1)
        (letter,) = await until(lambda: store.ledger.reap([]))
        assert why in letter.error
        await until(lambda: sessions.num_open == 0)


class Flaky(Agent):
    """An agent that counts how often it was run."""

    numbers = count()

    def run(self, policy: Policy) -> float | Answer | None:
        next(self.numbers)
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            asked(client, SAID)
        return 0.5


async def test_what_the_engine_fails_in_sends_the_group_back_and_is_not_the_agents_fault(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Flaky, **RUNS) as (address, sessions), rollout_in(store, folder, address) as rollout:
        fails_once(rollout)
        rollout.admit(1, max_tokens=600)
        await rollout.publish(1)
        (group,) = await rollout.committed(1)
        assert all(meta.episode.tokens.num_calls == 1 for meta in store.rows.read_meta(group.rows))
        await until(lambda: sessions.num_open == 0)
    assert next(Flaky.numbers) >= 5
    assert store.balance() == (1, 0, 0, 1)


def fails_once(rollout: ReplicaUnderTest) -> None:
    """The first thing that the engine samples fails, as when it is paused with abort."""
    sample, numbers = rollout.engine.sample, count()

    async def failing(request: Any) -> Any:
        if next(numbers) == 0:
            raise UnavailableError("it was aborted by a pause; ask again")
        return await sample(request)

    rollout.engine.sample = failing  # type: ignore[method-assign]


async def test_a_rollout_that_is_gone_leaves_nothing_behind(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Impatient, max_sessions=16, **RUNS) as (address, sessions):
        async with rollout_in(store, folder, address, consumer="rollout-9.dead") as dying:
            dying.engine.hold = True  # else some may end before all agents have come through
            dying.admit(2, max_tokens=600)
            await dying.publish(1)
            await until(lambda: dying.engine.num_running == 8)
            dying.pulling.cancel()
            await asyncio.gather(dying.pulling, return_exceptions=True)
            assert dying.engine.num_running == 0, "what was under way is given up"
            await asyncio.to_thread(store.ledger.expel, dying.consumer)
            async with rollout_in(store, folder, address) as heir:
                await heir.publish(2)
                await heir.committed(2)
            await until(lambda: sessions.num_open == 0)
    assert store.balance() == (2, 0, 0, 2)
