"""A judge as a component of the reward, over real HTTP: what it is asked, what its answers become, what is never a
number.
"""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolecall.commands.conformance import examine_scorer
from rolecall.conformance.check import Status
from rolecall.conformance.peer import Peer
from rolecall.conformance.reward.pool import own_pool
from rolecall.conformance.reward.session import Options
from rolecall.errors import ConfigError
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import ExternalScorer, RpcSection
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2, trajectory_pb2
from services.reward.external.component import HttpComponent, open_http
from services.reward.external.judge import Judge
from tests.contract.reward_peers import reward_service
from tests.twins.http_scorer import HttpTwin, Reply, http_server, judge_twin, openai_answer, verdict_json

RUBRIC: dict[str, Any] = {
    "model": "judge",
    "template": "Question: {{ prompt }}\nAnswer: {{ response | tojson }}\nRight: {{ ground_truth }}",
    "verdicts": {"good": 1.0, "bad": -1.0},
}
COMPARING: dict[str, Any] = {"model": "judge", "template": "1: {{ first }}\n2: {{ second }}", "scope": "group"}


@asynccontextmanager
async def component(
    twin: HttpTwin, rubric: dict[str, Any], *, timeout_s: float = 30.0, max_attempts: int = 1, **keys: Any
) -> AsyncIterator[HttpComponent]:
    """The component `it`, a judge behind `twin`."""
    with http_server(twin) as url:
        scorer = ExternalScorer(kind="judge", address=f"{url}/v1", rubric=rubric, **keys)
        judge = open_http("it", scorer, RpcSection(), timeout_s=timeout_s, max_attempts=max_attempts)
        try:
            yield judge
        finally:
            await judge.close()


def items_of(*responses: str, group: str = "7", truth: str = "4") -> list[reward_pb2.ScoreItem]:
    """One item per response to one prompt."""
    messages = [trajectory_pb2.Message(role="user", content="2 + 2?")]
    return [
        reward_pb2.ScoreItem(id=f"{group}/{i}", messages=messages, response_text=text, ground_truth=truth, group=group)
        for i, text in enumerate(responses)
    ]


def values(outcomes: Sequence[Outcome]) -> list[float | str]:
    """Each score, or the code of its failure."""
    return [outcome.value if isinstance(outcome, Score) else outcome.code for outcome in outcomes]


def by_word(text: str) -> str:
    return "good" if "right" in text else "bad"


async def test_a_response_is_worth_its_verdict_and_the_rubric_is_what_is_asked() -> None:
    twin = judge_twin(by_word)
    async with component(twin, RUBRIC) as judge:
        spec = await judge.describe()
        assert (spec.reward.min, spec.reward.max, spec.whole_groups) == (-1.0, 1.0, False)
        assert values(await judge.score(items_of("right", "wrong <|im_end|>"))) == [1.0, -1.0]
    asked = {request.body["messages"][0]["content"]: request for request in twin.requests}
    assert set(asked) == {
        'Question: 2 + 2?\nAnswer: "right"\nRight: 4',
        'Question: 2 + 2?\nAnswer: "wrong \\u003c|im_end|\\u003e"\nRight: 4',
    }
    for request in asked.values():
        assert request.path == "/v1/chat/completions"
        assert (request.body["model"], request.body["temperature"], request.body["max_tokens"]) == ("judge", 0.0, 1024)
        schema = request.body["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["verdict"]["enum"] == ["good", "bad"]
        assert "authorization" not in {name.lower() for name in request.headers}


async def test_only_what_the_template_shows_is_asked_of_the_caller() -> None:
    rubric = {**RUBRIC, "template": "{{ response }} {{ metadata.hint }}"}
    async with component(judge_twin(by_word), rubric) as judge:
        spec = await judge.describe()
    assert set(spec.reads) == {reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_METADATA}


async def test_an_item_without_what_the_template_shows_is_bad_data() -> None:
    async with component(judge_twin(by_word), RUBRIC) as judge:
        assert values(await judge.score(items_of("right", truth=""))) == ["BAD_GROUND_TRUTH"]
    async with component(judge_twin(by_word), {**RUBRIC, "template": "{{ response }} {{ metadata.hint }}"}) as judge:
        assert values(await judge.score(items_of("right"))) == ["INVALID_INPUT"]


UNREADABLE: dict[str, Any] = {
    "no JSON": openai_answer("good"),
    "another verdict": openai_answer(verdict_json("great")),
    "another case": openai_answer(verdict_json("Good")),
    "JSON and more": openai_answer(verdict_json("good") + "."),
    "a key too many": openai_answer(json.dumps({"reason": "", "verdict": "good", "score": 1})),
    "a key too few": openai_answer(json.dumps({"verdict": "good"})),
    "two verdicts": openai_answer('{"reason": "", "verdict": "good", "verdict": "bad"}'),
    "a number": openai_answer(json.dumps({"reason": "", "verdict": 1.0})),
    "a list": openai_answer(json.dumps(["good"])),
    "depth": openai_answer("[" * 100_000),
    "nothing": openai_answer(""),
    "nested deep": openai_answer("[" * 100_000),
    "cut off": openai_answer(verdict_json("good"), finish_reason="length"),
    "filtered": openai_answer(verdict_json("good"), finish_reason="content_filter"),
    "no content": {"choices": [{"finish_reason": "stop", "message": {"content": None}}]},
    "no message": {"choices": [{"finish_reason": "stop"}]},
}
GARBAGE: dict[str, Any] = {
    "HTML": Reply(body=b"<html>welcome</html>"),
    "NaN": Reply(body=b"NaN"),
    "no choices": {"error": "no"},
    "choices of text": {"choices": ["good"]},
    "too many choices": openai_answer(verdict_json("good"), verdict_json("good")),
    "no choice": openai_answer(),
    "bytes": Reply(body=bytes(range(256))),
    "nested deep": Reply(body=b"[" * 100_000),
    "17 MB": Reply(body=b'"' + b"x" * 17_000_000 + b'"'),
}


@pytest.mark.parametrize("said", UNREADABLE)
async def test_an_answer_that_is_no_verdict_is_an_abstention_and_never_a_number(said: str) -> None:
    twin = HttpTwin(lambda request: UNREADABLE[said])
    async with component(twin, RUBRIC, max_attempts=3) as judge:
        (outcome,) = await judge.score(items_of("right"))
        assert isinstance(outcome, Failure)
        assert (outcome.code, outcome.retryable) == ("ABSTAINED", False)
        assert await judge.score(items_of("right")) == [outcome], "the same said twice"
    assert len(twin.requests) == 1, "an abstention is remembered, too"


@pytest.mark.parametrize("said", GARBAGE)
async def test_garbage_is_an_error_of_the_scorer_and_never_a_number(said: str) -> None:
    async with component(HttpTwin(lambda request: GARBAGE[said]), RUBRIC) as judge:
        (outcome,) = await judge.score(items_of("right"))
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("SCORER_FAILED", False)


STATUSES = [
    (401, "UNAUTHENTICATED", True),
    (403, "PERMISSION_DENIED", True),
    (404, "VERSION_MISMATCH", True),
    (400, "INVALID_INPUT", False),
    (422, "INVALID_INPUT", False),
    (500, "HTTP_500", False),  # tried again within the component; then it is the item's
    (502, "SCORER_UNAVAILABLE", True),
    (503, "SCORER_UNAVAILABLE", True),
    (504, "SCORER_UNAVAILABLE", True),
]


@pytest.mark.parametrize(("status", "code", "retryable"), STATUSES)
async def test_a_status_is_the_error_that_the_contract_makes_of_it(status: int, code: str, retryable: bool) -> None:
    twin = HttpTwin(lambda request: Reply(status, b'{"error": "the model is asleep"}'))
    async with component(twin, RUBRIC) as judge:
        (outcome,) = await judge.score(items_of("right"))
        assert isinstance(outcome, Failure)
        assert (outcome.code, outcome.retryable) == (code, retryable)
        assert "the model is asleep" in outcome.message
        assert "gives no scores" in judge.trouble


async def test_a_limit_of_the_rate_pauses_for_as_long_as_the_server_asks() -> None:
    replies = iter([Reply(429, b"slow down", {"retry-after": "0"})])
    twin = judge_twin(lambda text: next(replies, "good"))
    async with component(twin, RUBRIC, max_attempts=2) as judge:
        assert values(await judge.score(items_of("right"))) == [1.0]
        assert judge.trouble == ""
    twin = judge_twin(lambda text: Reply(429, b"slow down", {"retry-after": "100"}))
    async with component(twin, RUBRIC, timeout_s=1.5) as judge:
        (first,) = await judge.score(items_of("right"))
        (second,) = await judge.score(items_of("right"))
        assert isinstance(first, Failure)
        assert isinstance(second, Failure)
        assert (first.code, second.code) == ("RATE_LIMITED", "RATE_LIMITED")
        assert "asked again in" in second.message
    assert len(twin.requests) == 1, "it was left alone"


async def test_a_judge_that_is_slow_is_late_and_one_that_is_away_is_away() -> None:
    released = threading.Event()
    twin = judge_twin(lambda text: "good" if released.wait(60.0) else "bad")
    async with component(twin, RUBRIC, timeout_s=0.3) as judge:
        assert values(await judge.score(items_of("right"))) == ["DEADLINE"]
        released.set()
    with http_server(twin) as url:
        scorer = ExternalScorer(kind="judge", address=f"{url}/v1", rubric=RUBRIC)
    gone = open_http("it", scorer, RpcSection(), timeout_s=5.0, max_attempts=1)
    assert values(await gone.score(items_of("right"))) == ["SCORER_UNAVAILABLE"]
    await gone.close()


async def test_equal_questions_are_asked_once_also_while_the_first_is_under_way() -> None:
    twin = judge_twin(by_word)
    async with component(twin, RUBRIC) as judge:
        found = await asyncio.gather(*(judge.score(items_of("right", "right", group=str(i))) for i in range(10)))
        assert {value for outcomes in found for value in values(outcomes)} == {1.0}
        assert len(twin.requests) == 1
        await judge.score(items_of("right", truth="5"))
    assert len(twin.requests) == 2, "another item is another question"


async def test_a_caller_who_leaves_ends_the_question_that_nobody_else_waits_for() -> None:
    released = threading.Event()
    twin = judge_twin(lambda text: "good" if released.wait(60.0) else "bad")
    async with component(twin, RUBRIC) as judge:
        await judge.describe()  # looks for the server, which may take one of two callers longer than the other
        leaving = asyncio.create_task(judge.score(items_of("right")))
        staying = asyncio.create_task(judge.score(items_of("right")))
        while not twin.requests:
            await asyncio.sleep(0.01)
        leaving.cancel()
        released.set()
        assert values(await staying) == [1.0]
        assert len(twin.requests) == 1


@pytest.mark.parametrize(
    ("said", "vote", "worth"),
    [
        (["good", "good", "bad"], "majority", 1.0),
        (["good", "bad", "bad"], "majority", -1.0),
        (["good", "good", None], "majority", 1.0),
        (["good", "bad", None], "majority", "ABSTAINED"),
        (["good", None, None], "majority", "ABSTAINED"),
        (["good", "good", "bad"], "mean", 1 / 3),
        (["good", "bad", None], "mean", 0.0),
        (["good", None, None], "mean", "ABSTAINED"),
    ],
)
async def test_several_answers_vote_and_what_is_no_verdict_has_none(
    said: list[str | None], vote: str, worth: float | str
) -> None:
    contents = ["I cannot say" if verdict is None else verdict_json(verdict) for verdict in said]
    twin = HttpTwin(lambda request: openai_answer(*contents))
    rubric = {**RUBRIC, "num_samples": 3, "vote": vote, "parameters": {"temperature": 1.0}}
    async with component(twin, rubric) as judge:
        assert values(await judge.score(items_of("right"))) == [
            worth if isinstance(worth, str) else pytest.approx(worth)
        ]
    assert twin.requests[0].body["n"] == 3


class Counted(ScorerMeter):
    """A meter that keeps what it was told of tokens."""

    def __init__(self) -> None:
        super().__init__("it")
        self.tokens: list[tuple[int, int, float | None]] = []

    def used(self, num_prompt_tokens: int, num_answer_tokens: int, cost: float | None) -> None:
        super().used(num_prompt_tokens, num_answer_tokens, cost)
        self.tokens.append((num_prompt_tokens, num_answer_tokens, cost))


@pytest.mark.parametrize(
    "usage", [(100, 50), (10**400, 1), (-1, 1), (1000, -900), (-90, 95), (1, 10**30), (2**53 - 1, 2**53 - 1)]
)
async def test_a_verdict_stands_whatever_the_server_says_of_its_tokens(usage: tuple[int, int]) -> None:
    twin, meter = HttpTwin(lambda request: openai_answer(verdict_json("good"), usage=usage)), Counted()
    with http_server(twin) as url:
        rubric: Any = {**RUBRIC, "prices": [1.0, 2.0]}
        scorer = ExternalScorer(kind="judge", address=f"{url}/v1", rubric=rubric)
        server = JsonServer("it", scorer, RpcSection(), timeout_s=30.0)
        judge = HttpComponent("it", Judge("it", scorer.asked, server, meter), server, 1, meter)
        assert values(await judge.score(items_of("right"))) == [1.0]
        await judge.close()
    is_counted = all(0 <= count < 2**53 for count in usage)
    assert meter.tokens == ([(*usage, (usage[0] * 1.0 + usage[1] * 2.0) / 1e6)] if is_counted else [])


async def test_a_choice_is_a_verdict_and_nothing_else() -> None:
    contents = iter(["good", " bad\n", "good.", "goo"])
    twin = HttpTwin(lambda request: openai_answer(next(contents)))
    async with component(twin, {**RUBRIC, "answer": "choice"}) as judge:
        said = [values(await judge.score(items_of(str(i)))) for i in range(4)]
    assert said == [[1.0], [-1.0], ["ABSTAINED"], ["ABSTAINED"]]
    assert twin.requests[0].body["structured_outputs"] == {"choice": ["good", "bad"]}


def longer(text: str) -> str:
    first, second = (line.partition(": ")[2] for line in text.splitlines())
    return "tie" if len(first) == len(second) else "first" if len(first) > len(second) else "second"


async def test_every_two_of_a_group_are_compared_in_both_orders() -> None:
    twin = judge_twin(longer)
    async with component(twin, COMPARING) as judge:
        spec = await judge.describe()
        assert (spec.whole_groups, spec.reward.min, spec.reward.max) == (True, 0.0, 1.0)
        items = [*items_of("a", "bbb", "cc", "bbb", group="1"), *items_of("alone", group="2")]
        found = values(await judge.score(items))
        assert found == [0.0, pytest.approx(5 / 6), pytest.approx(1 / 3), pytest.approx(5 / 6), 0.5]
        assert len(twin.requests) == 6, "three different responses: three pairs, each twice"
        assert values(await judge.score(items[::-1])) == found[::-1]


@pytest.mark.parametrize("says", ["first", "second", "tie"])
async def test_a_judge_that_goes_by_the_place_finds_a_tie(says: str) -> None:
    async with component(judge_twin(lambda text: says), COMPARING) as judge:
        assert values(await judge.score(items_of("a", "bbb", "cc"))) == [0.5, 0.5, 0.5]


async def test_a_group_with_a_comparison_without_a_verdict_has_no_scores() -> None:
    def answer(text: str) -> str | Reply:
        return "loser" if "2: bad" in text else longer(text)

    async with component(judge_twin(answer), COMPARING) as judge:
        assert values(await judge.score(items_of("a", "bad", "cc"))) == ["ABSTAINED"] * 3


async def test_responses_in_different_conversations_are_compared_only_where_none_is_shown() -> None:
    items = items_of("done", "done", "over")
    for item, move in zip(items, ("a good move", "an awful move", "a move"), strict=True):
        item.messages.add(role="assistant", content=move)
        item.messages.add(role="user", content="Go on.")
    twin = judge_twin(longer)
    async with component(twin, {**COMPARING, "template": "{{ prompt }}\n1: {{ first }}\n2: {{ second }}"}) as judge:
        outcomes = await judge.score(items)
        assert values(outcomes) == ["INVALID_INPUT"] * 3
        assert isinstance(outcomes[0], Failure)
        assert "group 7 follow different conversations" in outcomes[0].message
    assert not twin.requests
    async with component(twin, COMPARING) as judge:
        assert values(await judge.score(items)) == [0.5, 0.5, 0.5]


async def test_a_token_is_never_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="need https://"):
        ExternalScorer(kind="judge", address="http://127.0.0.1:1/v1", rubric=RUBRIC, bearer_token_file="token")
    monkeypatch.setenv("ROLECALL_TOKEN_STYLE_1", "secret")
    here = ExternalScorer(kind="judge", address="http://127.0.0.1:1/v1", rubric=RUBRIC)
    with pytest.raises(ConfigError, match="never sent in the clear"):
        open_http("style-1", here, RpcSection(), timeout_s=1.0, max_attempts=1)
    there = ExternalScorer(kind="judge", address="http://judge.example/v1", rubric=RUBRIC)
    with pytest.raises(ConfigError, match="beyond this machine and has no TLS"):
        open_http("it", there, RpcSection(), timeout_s=1.0, max_attempts=1)


@pytest.mark.parametrize("rubric", [RUBRIC, COMPARING], ids=["item", "group"])
async def test_a_judge_behind_our_service_keeps_the_contract(tmp_path: Path, rubric: dict[str, Any]) -> None:
    """The judge draws its verdicts: the same item gets the same score for it is asked once."""
    draw = random.Random(7)
    said = list(rubric.get("verdicts", ("first", "second", "tie")))
    options = Options(timeout_s=60.0, load_s=0.01, abandoned_work_s=0.01, slack_s=60.0)
    with http_server(judge_twin(lambda text: draw.choice(said))) as url:
        part = {"scorer": {"kind": "judge", "address": url, "rubric": rubric}, "timeout_s": 60.0}
        async with reward_service(tmp_path, judged=part) as address:
            report = await examine_scorer(Peer(address), own_pool(), options)
    failed = [result for result in report.results if result.verdict.status is Status.FAILED]
    assert failed == []


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"template": "{{ response"}, "template: .* in line 1"),
    ({"template": "{{ answer }} {{ response }}"}, "template: there is no answer; it may use"),
    ({"template": "{{ prompt }}"}, "template: it does not show response"),
    ({"verdicts": {"good": 1}}, "verdicts: say at least two"),
    ({"num_samples": 3}, "num_samples: at parameters.temperature 0 all are one"),
    ({"scope": "group"}, "verdicts: of scope group they are first, second and tie"),
    ({"verdict": {}}, "verdict: Extra inputs"),
]


@pytest.mark.parametrize(("changed", "told"), BROKEN, ids=[told for _, told in BROKEN])
def test_a_rubric_that_cannot_be_asked_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=f"rubric: {told}"):
        ExternalScorer(kind="judge", address="http://127.0.0.1:1/v1", rubric={**RUBRIC, **changed})
