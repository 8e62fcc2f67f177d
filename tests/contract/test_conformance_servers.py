"""The conformance kits and whole servers: those that are built with `rolecall.reward` and `rolecall.environment`, and
those that read too little, hide their health, want no token, lose calls or die.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from rolecall.commands.conformance import examine, examine_environment, examine_scorer
from rolecall.conformance.environment.rows import own_rows, read_file
from rolecall.conformance.peer import Peer, peer
from rolecall.conformance.report import junit
from rolecall.conformance.reward.pool import own_pool
from rolecall.conformance.reward.session import Options
from rolecall.environment.client import open_environment
from rolecall.errors import (
    ConfigError,
    EpisodeLostError,
    RateLimitedError,
    UnavailableError,
    VersionMismatchError,
)
from rolecall.reward import SERVICE_NAME, Scorer, description, new_server, one_by_one
from rolecall.rpc.listening import rpc_section
from rolecall.rpc.options import server_options
from rolecall.rpc.server import Server
from rolecall.rpc.server_calls import ServerCalls
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.v1 import environment_pb2, environment_pb2_grpc, reward_pb2, reward_pb2_grpc
from tests.contract import environment_honest
from tests.contract.environment_peers import environment as counting
from tests.contract.kits import QUICK, ROOT, ROWS, UNLISTED, broken, skipped, written
from tests.contract.peer import Authority
from tests.contract.reward_liars import Honest
from tests.contract.reward_peers import serving
from tests.ports import free_port


async def test_a_served_env_keeps_every_rule(tmp_path: Path) -> None:
    """Of `rolecall.environment`, whose sessions are no twin's."""
    rows: list[Mapping[str, object]] = [{"actions": ["a", "b", "c", "end 0.5"]}, {"actions": ["raise"], "fails": True}]
    async with counting(max_sessions=4, lease_s=2.0, deterministic=True) as (address, sessions):
        report = await examine_environment(Peer(address), read_file(written(tmp_path, *rows)))
        assert broken(report) == [], report.text()
        assert skipped(report) == {"calls.token", "reset.task", *UNLISTED}
        assert sessions.num_open == 0, "what the kit opened it closes"


async def test_without_items_short_texts_are_played() -> None:
    async with counting(max_sessions=2) as (address, _):
        report = await examine_environment(Peer(address), own_rows())
    assert broken(report) == [], report.text()
    assert {"reward.end", "describe.deterministic", "session.lease", "failure.status"} <= skipped(report)


async def test_an_environment_that_refuses_what_is_played_is_told_apart(tmp_path: Path) -> None:
    async with environment_honest.serving(environment_honest.Honest()) as address:
        rows = read_file(written(tmp_path, {"ground_truth": "never"}))
        with pytest.raises(ConfigError, match=r"refuses line 1 .*mark those that it cannot begin"):
            await examine_environment(Peer(address), rows)


async def test_a_call_that_runs_into_its_deadline_says_how_long_that_is_and_what_names_it() -> None:
    class Slow(Honest):
        async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
            await asyncio.sleep(60)
            raise AssertionError

    async with serving(Slow()) as address:
        report = await examine_scorer(Peer(address), own_pool(), replace(QUICK, timeout_s=0.5))
    assert broken(report) == ["results.complete"]
    assert "DEADLINE_EXCEEDED: Score was not answered within 0.5 s (--timeout)" in report.text()


async def test_where_one_side_alone_speaks_tls_the_way_of_the_call_is_told(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "tls").issue("scorer")
    stranger = Authority(tmp_path / "theirs").issue("scorer")
    spec = description("half", (0, 1), ("response_text",), {}, token_rewards=False, max_items=0)

    async def said(rpc: RpcSection, ca_file: Path | None) -> str:
        server = new_server(Scorer(spec, one_by_one(lambda item: 0.5, spec)), "localhost:0", rpc)
        address = await server.start()
        trusted = None if ca_file is None else str(ca_file)
        try:
            with pytest.raises(UnavailableError) as raised:
                await examine(peer(address, ca_file=trusted, folder=None, token=None), None, QUICK)
        finally:
            await server.drain(0.0)
        return raised.value.message

    encrypted = rpc_section(pair.certificate_file, pair.key_file, behind_mesh=False)
    assert "it was called in the clear: where it speaks TLS give --ca-file" in await said(encrypted, None)
    for rpc, ca_file in ((RpcSection(), pair.ca_file), (encrypted, stranger.ca_file)):
        assert "it was called over TLS: where it speaks none leave --ca-file" in await said(rpc, ca_file)


async def test_both_contracts_at_one_address_get_a_report_each() -> None:
    server = Server(RpcSection(), "127.0.0.1:0", client_certificates=False)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, Honest(), SERVICE_NAME)
    add = environment_pb2_grpc.add_EnvironmentServiceServicer_to_server
    server.add(add, environment_honest.Honest(), environment_honest.SERVICE_NAME)
    address = await server.start()
    await server.set_serving(True)
    told: list[str] = []
    reports = await examine(Peer(address), None, QUICK, told.append)
    await server.drain(0.0)
    assert "".join(told) == "\n".join(report.text() for report in reports)
    assert [(report.kit, broken(report)) for report in reports] == [("RewardService", []), ("EnvironmentService", [])]
    assert [suite.get("failures") for suite in ElementTree.fromstring(junit(reports))] == ["0", "0"]


async def test_an_address_that_serves_neither_contract_is_told() -> None:
    server = Server(RpcSection(), "127.0.0.1:0", client_certificates=False)
    address = await server.start()
    with pytest.raises(VersionMismatchError, match="neither"):
        await examine(Peer(address), None, QUICK)
    await server.drain(0.0)


async def test_an_environment_whose_server_reads_small_requests_or_is_not_serving_is_found(tmp_path: Path) -> None:
    rows = read_file(written(tmp_path, *ROWS))
    small, address = await environment_honest.start_bare(("grpc.max_receive_message_length", 2**20))
    assert broken(await examine_environment(Peer(address), rows)) == ["calls.bytes"]
    await small.stop(0.0)
    server = Server(RpcSection(), "127.0.0.1:0", client_certificates=False)
    add = environment_pb2_grpc.add_EnvironmentServiceServicer_to_server
    server.add(add, environment_honest.Honest(), environment_honest.SERVICE_NAME)
    report = await examine_environment(Peer(await server.start()), rows)
    await server.drain(0.0)
    assert broken(report) == ["calls.health"]


async def test_an_environment_whose_server_has_grpcs_own_limit_keeps_every_rule(tmp_path: Path) -> None:
    bare, address = await environment_honest.start_bare()
    report = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
    await bare.stop(0.0)
    assert broken(report) == [], report.text()


async def test_a_server_that_reads_small_requests_alone_is_found() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2**20)])
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Honest(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report = await examine_scorer(Peer(f"127.0.0.1:{port}"), own_pool(), QUICK)
    await server.stop(0.0)
    assert broken(report) == ["calls.bytes"]


async def test_a_server_that_takes_whole_groups_reads_large_ones() -> None:
    honest = Honest()
    honest.spec.whole_groups = True
    default = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(honest, default)
    port = default.add_insecure_port("127.0.0.1:0")
    await default.start()
    report = await examine_scorer(Peer(f"127.0.0.1:{port}"), own_pool(), QUICK)
    await default.stop(0.0)
    assert broken(report) == ["calls.bytes"]
    async with serving(honest) as address:
        assert broken(await examine_scorer(Peer(address), own_pool(), QUICK)) == []


class TwoAtATime(Honest):
    """It turns away a third call, which its caller is to make again."""

    num_calls = 0

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        if self.num_calls == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "two at a time")
        self.num_calls += 1
        try:
            await asyncio.sleep(0.01)
            return await super().Score(request, context)
        finally:
            self.num_calls -= 1


class NineOfTen(Honest):
    """It turns away every tenth call."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.num_calls = num_calls

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.num_calls += 1
        if self.num_calls % 10 == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "now and then")
        return await super().Score(request, context)


@pytest.mark.parametrize("servicer", [TwoAtATime(), *map(NineOfTen, (0, 4, 5, 8))])
async def test_a_server_that_turns_calls_away_for_now_keeps_every_rule(servicer: Honest) -> None:
    async with serving(servicer) as address:
        assert broken(await examine_scorer(Peer(address), own_pool(), QUICK)) == []


class GoneAfterTwelve(Honest):
    """Its model has died, behind a server that lives."""

    num_calls = 0

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.num_calls += 1
        if self.num_calls > 12:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model died")
        return await super().Score(request, context)


async def test_a_server_that_turns_every_call_away_is_given_up_once_and_not_by_every_rule() -> None:
    async with serving(GoneAfterTwelve()) as address, asyncio.timeout(60):
        report = await examine_scorer(Peer(address), own_pool(), QUICK)
    assert "calls.load" in broken(report)


class Spent(Honest):
    """Its quota is spent."""

    num_calls = 0

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        self.num_calls += 1
        if self.num_calls > 12:
            raise RateLimitedError("no quota is left")
        return await super().Score(request, context)


async def test_a_quota_that_is_spent_is_given_up_once_and_not_by_every_rule() -> None:
    async with serving(Spent()) as address, asyncio.timeout(60):
        report = await examine_scorer(Peer(address), own_pool(), QUICK)
    assert broken(report)[1:] == ["calls.load", "calls.abandoned"]
    assert "since a call was given up, all are refused" in " ".join(report.text().split())


class GoneSlowly(GoneAfterTwelve):
    """Behind a proxy that waits for the dead model, each call for another time."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        if self.num_calls >= 12:
            await asyncio.sleep(0.5 + self.num_calls % 7 / 10)
        return await super().Score(request, context)


async def test_calls_that_are_turned_away_at_different_times_are_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.conformance.reward.session.UNANSWERED_S", 2.0)
    async with serving(GoneSlowly()) as address, asyncio.timeout(120):
        report = await examine_scorer(Peer(address), own_pool(), QUICK)
    assert "calls.load" in broken(report)


async def test_a_service_that_scores_and_says_that_it_does_not_serve_is_found() -> None:
    server = Server(RpcSection(), "127.0.0.1:0", client_certificates=False)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, Honest(), SERVICE_NAME)
    report = await examine_scorer(Peer(await server.start()), own_pool(), QUICK)
    await server.drain(0.0)
    assert broken(report) == ["calls.health"]


@asynccontextmanager
async def with_token(folder: Path, token: str | None) -> AsyncIterator[Peer]:
    """A scorer behind TLS that wants `token`, and a caller that sends "s3cret"."""
    authority = Authority(folder)
    tls = authority.issue("scorer")
    spec = description("half", (0, 1), ("response_text",), {}, token_rewards=False, max_items=0)
    scorer = Scorer(spec, one_by_one(lambda item: 0.5, spec), token)
    server = new_server(scorer, "localhost:0", rpc_section(tls.certificate_file, tls.key_file, behind_mesh=False))
    address = await server.start()
    await server.set_serving(True)
    try:
        yield peer(address, ca_file=str(authority.ca_file), folder=None, token="s3cret")
    finally:
        await server.drain(0.0)


async def test_a_server_that_serves_callers_without_its_token_is_found(tmp_path: Path) -> None:
    async with with_token(tmp_path, "s3cret") as honest:
        assert broken(await examine_scorer(honest, own_pool(), QUICK)) == []
    async with with_token(tmp_path, None) as liar:
        assert broken(await examine_scorer(liar, own_pool(), QUICK)) == ["calls.token"]


SLOW = """
import asyncio, sys, time
from rolecall.reward import serve
def score(item):
    time.sleep(0.002)
    return 0.5
if sys.argv[2] == "liar":
    asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = lambda *_: None  # SIGTERM ends it at once
sys.exit(serve(score, sys.argv[1], name="slow", range=(0, 1), reads=("response_text",)))
"""


@asynccontextmanager
async def running(program: str, *words: str) -> AsyncIterator[tuple[str, int]]:
    """A program that serves at the address that is its first word; gives the address and the process."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, "-c", program, address, *words], cwd=ROOT)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
        yield address, process.pid
    finally:
        process.kill()
        process.wait(timeout=20)


@pytest.mark.parametrize("kind", ["honest", "liar"])
async def test_a_server_that_loses_the_calls_that_it_has_is_found(kind: str) -> None:
    async with running(SLOW, kind) as (address, pid):
        options = Options(timeout_s=60.0, load_s=0.0, abandoned_work_s=0.01, slack_s=60.0, drain_pid=pid)
        report = await examine_scorer(Peer(address), own_pool(), options)
    assert broken(report) == (["calls.drain"] if kind == "liar" else []), report.text()


CUT = "CUT"
"""The text in whose place an answer has three of an emoji's four bytes: it is no message any more."""


@asynccontextmanager
async def cutting(file: Any, service: str, servicer: Any) -> AsyncIterator[str]:
    """A server of a service of a proto file's module, which does not see what it sends."""

    def cut(answer: Any) -> bytes:
        return bytes(answer.SerializeToString().replace(CUT.encode(), "\N{GRINNING FACE}".encode()[:3]))

    def handler(method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        read = GetMessageClass(method.input_type).FromString
        return grpc.unary_unary_rpc_method_handler(getattr(servicer, method.name), read, cut)

    described = file.DESCRIPTOR.services_by_name[service]
    methods = {method.name: handler(method) for method in described.methods}
    server = grpc.aio.server(interceptors=[ServerCalls()], options=server_options())
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(described.full_name, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0.0)


async def test_an_answer_that_is_no_message_breaks_the_rule_that_is_looked_at_and_is_explained(tmp_path: Path) -> None:
    def cut_grade(closed: environment_pb2.CloseResponse) -> None:
        closed.reward.answer = CUT

    honest = environment_honest.Honest()
    honest.change_grade = cut_grade
    async with cutting(environment_pb2, "EnvironmentService", honest) as address:
        played = await examine_environment(Peer(address), read_file(written(tmp_path, *ROWS)))
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        await client.describe()
        session = client.session("run/group/0/token", "run/group", 1)
        await session.reset(environment_pb2.Task(), 1)
        with pytest.raises(EpisodeLostError, match=r"bytes that are not its message; .* no UTF-8"):
            await session.grade()
        await client.close()

    def cut_answers(request: reward_pb2.ScoreRequest, response: reward_pb2.ScoreResponse) -> None:
        for item, result in zip(request.items, response.results, strict=True):
            if item.id == "long":
                result.reward.answer = CUT

    scorer = Honest()
    scorer.lie = cut_answers
    async with cutting(reward_pb2, "RewardService", scorer) as address:
        scored = await examine_scorer(Peer(address), own_pool(), QUICK)
    for report, rule in ((played, "close.grade"), (scored, "item.long")):
        assert broken(report) == [rule]
        assert "bytes that are not its message" in " ".join(report.text().split())


DYING = """
import os, sys
from rolecall.reward import serve
def score(item):
    if "\\0" in item.response_text:
        os._exit(3)
    return 0.5
sys.exit(serve(score, sys.argv[1], name="dying", range=(0, 1), reads=("response_text",)))
"""


async def test_a_service_that_dies_is_blamed_once() -> None:
    async with running(DYING) as (address, _):
        report = await examine_scorer(Peer(address), own_pool(), QUICK)
    assert broken(report) == ["item.unicode"]
    assert "answers no more" in report.text()
