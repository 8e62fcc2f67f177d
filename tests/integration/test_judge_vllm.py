"""A judge behind vLLM's own server, `vllm serve`, with a tiny random model: its answers are held to the verdicts, and
what is none of them is no number.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from rolecall.scoring.scores import Failure, Score
from rolecall.settings import ExternalScorer, RpcSection
from rolecall.v1 import reward_pb2
from services.reward.external.component import open_http
from tests.tiny_models import write_qwen3
from tests.vllm_server import vllm_serve

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough("test_a_choice_is_a_verdict_and_nothing_else")]
RUBRIC: dict[str, Any] = {
    "model": "judge",
    "template": "Is this right? {{ response | tojson }}",
    "verdicts": {"good": 1.0, "bad": 0.0},
    "answer": "choice",
    "parameters": {"temperature": 0.0, "max_tokens": 16},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server, whose model is called judge."""
    folder = tmp_path_factory.mktemp("served")
    write_qwen3(folder / "model", hidden=128)  # heads of 32, which vLLM takes on CPUs
    with vllm_serve(folder / "model", folder / "log") as url:
        yield url


async def scored(server: str, *responses: str, **changed: Any) -> list[Score | Failure]:
    """The outcomes of these responses by a judge of this rubric."""
    scorer = ExternalScorer(kind="judge", address=server, rubric={**RUBRIC, **changed})
    judge = open_http("it", scorer, RpcSection(), timeout_s=120.0, max_attempts=1)
    items = [reward_pb2.ScoreItem(id=str(i), response_text=text) for i, text in enumerate(responses)]
    try:
        return await judge.score(items)
    finally:
        await judge.close()


async def test_choices_are_verdicts_whatever_the_model_would_say(server: str) -> None:
    outcomes = await scored(server, "2 + 2 = 4", "2 + 2 = 5", "<|im_end|>")
    assert all(isinstance(outcome, Score) and outcome.value in (0.0, 1.0) for outcome in outcomes), outcomes
    assert await scored(server, "2 + 2 = 4", "2 + 2 = 5", "<|im_end|>") == outcomes


async def test_several_samples_are_asked_for_in_one_call(server: str) -> None:
    parameters = {"temperature": 1.0, "max_tokens": 16, "seed": 3}
    (outcome,) = await scored(server, "4", num_samples=5, vote="mean", parameters=parameters)
    assert isinstance(outcome, Score)
    assert outcome.value * 5 == pytest.approx(round(outcome.value * 5))


async def test_an_object_that_did_not_end_is_an_abstention(server: str) -> None:
    """The model is random: held to the schema, it writes a reason without end."""
    (outcome,) = await scored(server, "4", answer="json")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("ABSTAINED", False)


async def test_a_comparison_asks_both_orders(server: str) -> None:
    rubric = {"scope": "group", "template": "{{ first }} or {{ second }}?", "verdicts": {}}
    outcomes = await scored(server, "4", **rubric)
    assert outcomes == [Score(0.5)]
    scorer = ExternalScorer(kind="judge", address=server, rubric={**RUBRIC, **rubric})
    judge = open_http("it", scorer, RpcSection(), timeout_s=120.0, max_attempts=1)
    items = [reward_pb2.ScoreItem(id=f"1/{i}", response_text=text, group="1") for i, text in enumerate("abc")]
    found = await judge.score(items)
    await judge.close()
    values = [outcome.value for outcome in found if isinstance(outcome, Score)]
    assert len(values) == 3
    assert sum(values) == pytest.approx(1.5), "a win is another's loss"


async def test_a_model_that_the_server_does_not_know_is_waited_for_and_told(server: str) -> None:
    (outcome,) = await scored(server, "4", model="another")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("VERSION_MISMATCH", True)
    assert "another" in outcome.message
