"""A judge that sees, behind vLLM's own server with a tiny random model: it takes the images as they are sent."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.data.images.tokens import require_visual_tokens
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Item, Message
from rolecall.settings import ExternalScorer, RpcSection
from rolecall.telemetry.scorers import ScorerMeter
from services.reward.external.judge import Judge
from tests.pictures import picture
from tests.tiny_models import write_vision
from tests.vllm_server import vllm_serve

pytestmark = [pytest.mark.vision, pytest.mark.timeout(600)]
RUBRIC: dict[str, Any] = {
    "model": "judge",
    "images": True,
    "template": "{{ prompt }} {{ response }}",
    "verdicts": {"good": 1.0, "bad": 0.0},
    "answer": "choice",
    "parameters": {"temperature": 0.0, "max_tokens": 16},
}


class Counting(ScorerMeter):
    """A meter that notes the tokens of each question."""

    def __init__(self) -> None:
        super().__init__("it")
        self.asked: list[int] = []

    def used(self, asked: int, answered: int, cost: float | None) -> None:
        """As ScorerMeter.used."""
        self.asked.append(asked)


async def test_each_image_is_as_many_tokens_of_the_question_as_the_judge_makes_of_it(tmp_path: Path) -> None:
    write_vision(tmp_path / "model", "qwen2_5_vl")
    tokens, meter = require_visual_tokens(tmp_path / "model"), Counting()
    images = (picture(24, 16, 1), picture(40, 24, 2, "JPEG"))
    with vllm_serve(tmp_path / "model", tmp_path / "log") as url:
        scorer = ExternalScorer(kind="judge", address=url, rubric=RUBRIC)
        server = JsonServer("it", scorer, RpcSection(), timeout_s=120.0)
        judge = Judge("it", scorer.asked, server, meter)
        for shown, text in ((images, "<image>and<image>"), ((), "and")):
            item = Item("1", response_text="x", messages=(Message("user", text),), images=shown)
            (value,) = await judge.score([item])
            assert value in (0.0, 1.0)
        await server.close()
    marks = 2 * 2  # before and behind each
    assert meter.asked[0] - meter.asked[1] == tokens.number(24, 16) + tokens.number(40, 24) + marks
