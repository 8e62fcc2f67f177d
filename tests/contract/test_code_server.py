"""Programs that a server runs, over real HTTP: what it is sent, what its runs are worth, and that its own failures are
no reward.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolecall.errors import ConfigError, ScorerUnavailableError
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import CodeScorer, RewardComponent, RpcSection
from rolecall.v1 import reward_pb2
from services.reward.config import RewardSettings
from services.reward.dispatcher import Dispatcher
from services.reward.external.component import HttpComponent, open_http
from tests.twins.http_scorer import Asked, HttpTwin, Reply, http_server
from tests.twins.sandbox_server import sandbox_twin
from tests.waiting import until

SHORT_S = 1.0
"""For programs that do not end by themselves."""
GENEROUS_S = 60.0
ADDRESS = "http://127.0.0.1:1"


@asynccontextmanager
async def component(
    twin: HttpTwin, *, call_s: float = 130.0, is_there: bool = True, **keys: Any
) -> AsyncIterator[HttpComponent]:
    """The component `it`, whose programs `twin` runs. `is_there`: it was seen before."""
    with http_server(twin) as url:
        scorer = CodeScorer.model_validate({"address": url, "timeout_s": GENEROUS_S, **keys})
        opened = open_http("it", scorer, RpcSection(), timeout_s=call_s, max_attempts=1)
        try:
            if is_there:
                await opened.describe()
                twin.requests.clear()
            yield opened
        finally:
            await opened.close()


def item(program: str, tests: Any, id: str = "0") -> reward_pb2.ScoreItem:
    found = reward_pb2.ScoreItem(id=id, response_text=f"So:\n```\n{program}\n```")
    if tests is not None:
        found.metadata.update({"tests": tests})
    return found


def values(outcomes: list[Outcome]) -> list[float | str]:
    """Each score, or the code of its failure."""
    return [outcome.value if isinstance(outcome, Score) else outcome.code for outcome in outcomes]


DOUBLED = [{"input": "2", "output": "4"}, {"input": "111", "output": "222"}]
RIGHT = "print(2 * int(input()))"


async def test_programs_are_judged_as_those_that_run_here() -> None:
    call = {"fn_name": "twice", "inputs": [[3]], "outputs": [6]}
    items = [
        item(RIGHT, DOUBLED),
        item("print(4)", DOUBLED),
        item("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"]),
        item("raise SystemExit", ["assert False"]),
        item("def f(", DOUBLED),
        item("twice = lambda x: 2 * x", call),
        item("print('é' * 3)", [{"output": "ééé"}]),
        item("print(1)", None),
    ]
    async with component(sandbox_twin(), partial=True) as scorer:
        spec = await scorer.describe()
        assert (spec.reward.min, spec.reward.max) == (0.0, 1.0)
        outcomes = [outcome for each in items for outcome in await scorer.score([each])]
    assert values(outcomes) == [1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0, "BAD_GROUND_TRUTH"]


async def test_the_right_output_is_never_sent() -> None:
    twin = sandbox_twin()
    async with component(twin) as scorer:
        assert values(await scorer.score([item(RIGHT, DOUBLED)])) == [1.0]
        call = {"fn_name": "twice", "inputs": [[111]], "outputs": [222]}
        assert values(await scorer.score([item("twice = lambda x: 2 * x", call)])) == [1.0]
    assert len(twin.requests) == 3
    assert not [request for request in twin.requests if "222" in str(request.body)]
    body = twin.requests[1].body
    assert (body["language"], body["stdin"], body["code"], body["files"]) == ("python", "111", f"{RIGHT}\n", {})
    assert body["memory_limit_MB"] == 1024
    assert 0 < body["run_timeout"] <= GENEROUS_S


async def test_what_a_program_does_to_itself_scores_0_and_a_killed_one_is_run_again() -> None:
    twin = sandbox_twin()
    tests = [{"output": "1"}]
    async with component(twin) as scorer:
        for program, num_runs in (("import os\nos.kill(os.getpid(), 9)", 2), ("bytearray(2**33)", 1)):
            twin.requests.clear()
            for _ in range(2):
                assert values(await scorer.score([item(program, tests)])) == [0.0]
            assert len(twin.requests) == num_runs, "and it is remembered"
    async with component(twin, timeout_s=SHORT_S) as scorer:
        twin.requests.clear()
        assert values(await scorer.score([item("while True: pass", tests * 3)])) == [0.0]
        assert len(twin.requests) == 1, "its tests share its time"
        late = item("import os, time\ntime.sleep(0.6)\nos.kill(os.getpid(), 9)", tests)
        (killed,) = await scorer.score([late])
        assert isinstance(killed, Failure)
        assert (killed.code, killed.retryable) == ("WORKER_LOST", False), "no score, and it is not waited for"


async def test_a_language_is_the_server_s_and_compiles_there_within_its_own_time() -> None:
    language = {"name": "compiled", "end": "echo {token}"}
    async with component(sandbox_twin(), language=language, partial=True) as scorer:
        for program, tests, value in (
            ("read x; echo $((2 * x))", DOUBLED, 1.0),
            ("no program", DOUBLED, 0.0),
            ("f() { false; }", ["true", "f || exit 0"], 0.5),
        ):
            assert values(await scorer.score([item(program, tests)])) == [value]


async def test_a_compiler_has_the_whole_time_however_much_of_the_tests_is_spent() -> None:
    language = {"name": "compiled", "end": "echo {token}"}
    twin = sandbox_twin()
    async with component(twin, language=language) as scorer:
        assert values(await scorer.score([item("sleep 0.3; read x; echo $((2 * x))", DOUBLED)])) == [1.0]
    assert [request.body["compile_timeout"] for request in twin.requests] == [GENEROUS_S] * 2
    assert twin.requests[1].body["run_timeout"] < GENEROUS_S


async def test_output_without_end_is_a_failed_program() -> None:
    async with component(sandbox_twin()) as scorer:
        assert values(await scorer.score([item("print('1' * 2**22)", [{"output": "1"}])])) == [0.0]


def said(**keys: Any) -> dict[str, Any]:
    run = {"status": "Finished", "return_code": 0, "execution_time": 0.1, "stdout": "4", "stderr": ""}
    return {"status": "Success", "message": "", "compile_result": None, "run_result": {**run, **keys}}


FAILURES: dict[str, tuple[Any, str, bool]] = {
    "sandbox error": ({"status": "SandboxError", "message": "no bash", "run_result": None}, "SANDBOX_ERROR", False),
    "its command failed": (
        {"status": "SandboxError", "message": "", "run_result": {"status": "Error", "stderr": "fork"}},
        "SANDBOX_ERROR",
        False,
    ),
    "500": (Reply(500), "HTTP_500", False),
    "503": (Reply(503), "SCORER_UNAVAILABLE", True),
    "429": (Reply(429), "RATE_LIMITED", True),
    "401": (Reply(401), "UNAUTHENTICATED", True),
    "404": (Reply(404), "VERSION_MISMATCH", True),
    "422": (Reply(422), "INVALID_INPUT", False),
    "no JSON": (Reply(body=b"<html>"), "SCORER_FAILED", False),
    "nothing": ({}, "SCORER_FAILED", False),
    "no run": ({"status": "Success", "message": ""}, "SCORER_FAILED", False),
    "no status": (said(status="Started"), "SCORER_FAILED", False),
    "no code": (said(return_code=None), "SCORER_FAILED", False),
    "no time": (said(execution_time=None), "SCORER_FAILED", False),
    "a time that is none": (Reply(body=str(said(execution_time=-1)).encode()), "SCORER_FAILED", False),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_of_the_server_is_no_reward(name: str) -> None:
    answer, code, retryable = FAILURES[name]
    twin = HttpTwin(lambda request: said())
    async with component(twin) as scorer:
        twin.answer = lambda request: answer
        (failure,) = await scorer.score([item(RIGHT, DOUBLED)])
        assert isinstance(failure, Failure)
        assert (failure.code, failure.retryable) == (code, retryable)
        twin.answer = lambda request: said(stdout=str(2 * int(request.body["stdin"])))
        if code not in ("RATE_LIMITED",):
            assert values(await scorer.score([item(RIGHT, DOUBLED)])) == [1.0], "nothing was remembered"


async def test_a_server_that_is_away_or_late_is_no_reward() -> None:
    async with component(sandbox_twin(), address=ADDRESS, is_there=False) as scorer:
        (away,) = await scorer.score([item(RIGHT, DOUBLED)])
        assert isinstance(away, Failure)
        assert (away.code, away.retryable) == ("SCORER_UNAVAILABLE", True)
        assert f"at {ADDRESS} gives no scores" in scorer.trouble

    def slow(request: Asked) -> dict[str, Any]:
        time.sleep(3)
        return said()

    twin = HttpTwin(lambda request: said())
    async with component(twin, call_s=1.0) as scorer:
        twin.answer = slow
        (late,) = await scorer.score([item(RIGHT, DOUBLED)])
        assert isinstance(late, Failure)
        assert (late.code, late.retryable) == ("DEADLINE", True)
        assert "gives no scores: DEADLINE" in scorer.trouble


@pytest.mark.parametrize(
    ("run", "error", "told"),
    [
        (said(return_code=127), ConfigError, "an empty program fails there with exit status 127"),
        (said(status="TimeLimitExceeded"), ScorerUnavailableError, "takes more than 60 s there"),
        (said(return_code=137), ScorerUnavailableError, "or is killed"),
        ({"status": "SandboxError", "message": "no disk"}, ScorerUnavailableError, "its sandbox failed: no disk"),
        (Reply(500, b"oh"), ScorerUnavailableError, "500"),
        (Reply(422, b"no such language"), ConfigError, "scorer.language.name 'python' is refused there"),
    ],
)
async def test_a_server_whose_python_does_not_start_is_found_at_the_start(
    run: dict[str, Any] | Reply, error: type[Exception], told: str
) -> None:
    async with component(HttpTwin(lambda request: run), is_there=False) as scorer:
        with pytest.raises(error, match=told):
            await scorer.describe()


async def test_no_more_programs_run_at_a_time_than_the_component_allows() -> None:
    def answer(request: Asked) -> dict[str, Any]:
        time.sleep(0.05)
        return said()

    twin = HttpTwin(answer)
    async with component(twin, num_calls=3) as scorer:
        items = [item(f"print({i})", [{"output": "4"}] * 2, id=str(i)) for i in range(12)]
        assert values(await scorer.score(items)) == [1.0] * 12
    assert twin.most_at_once == 3


async def test_equal_programs_that_are_scored_together_run_once() -> None:
    twin = sandbox_twin()
    async with component(twin) as scorer:
        items = [item(RIGHT, DOUBLED, id=str(i)) for i in range(8)]
        assert values(await scorer.score(items)) == [1.0] * 8
    assert len(twin.requests) == 2


async def test_a_reward_whose_programs_run_elsewhere_needs_no_sandbox_and_no_worker_here(tmp_path: Path) -> None:
    twin = sandbox_twin()
    with http_server(twin) as url:
        parts = {"code": RewardComponent.model_validate({"scorer": {"kind": "code", "address": url}})}
        settings = RewardSettings("127.0.0.1:0", parts, num_workers=1, search_path=tmp_path, start_timeout_s=10.0)
        assert not settings.local
        dispatcher = Dispatcher(settings, RpcSection())
        try:
            await dispatcher.start()
            (result,) = await dispatcher.score([item(RIGHT, DOUBLED)])
            assert result.reward.value == 1.0
        finally:
            await dispatcher.close()


async def test_a_caller_who_leaves_ends_what_only_it_waits_for() -> None:
    twin = sandbox_twin()
    async with component(twin) as scorer:
        slow = item("import time\ntime.sleep(0.5)\nprint(1)", [{"output": "1"}] * 20)
        left = asyncio.ensure_future(scorer.score([slow]))
        await until(lambda: twin.requests)
        left.cancel()
        await asyncio.wait([left], timeout=60.0)
        num_sent = len(twin.requests)
        await asyncio.sleep(1.0)
        assert len(twin.requests) <= num_sent + 1


def test_a_token_is_never_sent_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLECALL_TOKEN_IT", "s3cret")
    scorer = CodeScorer(address=ADDRESS)
    with pytest.raises(ConfigError, match="never sent in the clear"):
        open_http("it", scorer, RpcSection(), timeout_s=1.0, max_attempts=1)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"address": "sandbox:8080"}, "address"),
        ({"address": f"{ADDRESS}/run_code"}, "write it without /run_code"),
        ({"address": ADDRESS, "bearer_token_file": "t"}, "need https://"),
        ({"bearer_token_file": "t"}, "need address"),
        ({"address": ADDRESS, "sandbox": "none"}, "bounds its programs by its own means"),
        ({"address": ADDRESS, "cpu_s": 9}, "bounds its programs by its own means"),
        ({"address": ADDRESS, "language": {"file": "main.cc", "run": ["./main"]}}, "the server knows them"),
        ({"address": ADDRESS, "language": {"end": "x"}}, "it has a name, such as cpp"),
        ({"language": {"name": "cpp"}}, "file and run are missing"),
        ({"address": ADDRESS, "language": {"name": "cpp"}, "timeout_s": 5}, ""),
        ({"address": ADDRESS}, ""),
    ],
)
def test_settings_that_cannot_be_meant_are_named(keys: dict[str, Any], told: str) -> None:
    make = {"scorer": {"kind": "code", **keys}, "timeout_s": 11}
    if told:
        with pytest.raises(ValidationError, match=told):
            RewardComponent.model_validate(make)
    else:
        found = RewardComponent.model_validate(make)
        assert RewardComponent.model_validate(found.model_dump(mode="json")) == found, "as roles read it"


def test_a_call_has_more_time_than_compiling_and_running_have() -> None:
    compiled = {"kind": "code", "address": ADDRESS, "language": {"name": "cpp"}}
    with pytest.raises(ValidationError, match=r"which have 16 s by scorer\.timeout_s"):
        RewardComponent.model_validate({"scorer": compiled, "timeout_s": 16})
