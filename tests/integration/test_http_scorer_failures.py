"""Faults of judges and other HTTP servers under a whole light run: the run goes on, nothing is lost, and no number is
wrong. HTTP is real, too; the server misbehaves.
"""

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolecall.v1.trajectory_pb2 import TrajectoryMeta
from tests.integration.faulty_runs import AWAY_S, FAULTY_RUN_S, GROUPS_PER_STEP, TIMEOUT_S, check_run
from tests.ports import free_port
from tests.twins.http_scorer import Answer, Asked, HttpTwin, Reply, http_server, openai_answer, verdict_json
from tests.twins.run import LightRun
from tests.twins.trainer import Row

NUM_STEPS = 4
THOROUGH = pytest.mark.thorough("test_under_every_fault_of_an_http_server_the_run_goes_on_and_no_number_is_wrong")
VERDICTS = {f"grade {i}": i / 16 for i in range(16)}
RUBRIC = {"model": "judge", "template": "{{ response | tojson }}", "verdicts": VERDICTS}


def grade(text: str) -> int:
    """The right verdict on a response: one of 16."""
    return hashlib.sha256(text.encode()).digest()[0] % 16


def is_drawn(text: str) -> bool:
    """Whether a response is one of the 15% on which the server fails whenever it is asked: of 28% of the groups."""
    return random.Random(f"response {text}").random() < 0.15


def worth(row: Row, meta: TrajectoryMeta) -> float:
    return grade(meta.response_text) / 16


class Faulty(HttpTwin):
    """A judge, or a server as TRL's functions, that gives each response its worth, and one fault besides."""

    def __init__(self, kind: str, fault: str) -> None:
        super().__init__(self._answer)
        self._kind = kind
        self._fault = fault
        self._draw = random.Random(fault)
        self.num_faults = 0
        """How often the fault struck."""

    def _answer(self, request: Asked) -> Answer:
        texts = self._texts(request.body)
        number = len(self.requests)
        drawn = any(map(is_drawn, texts))
        match self._fault:
            case "30% errors that pass" if self._draw.random() < 0.3:
                return self._strike(Reply(self._draw.choice([502, 503, 504])))
            case "errors that stay" if drawn:
                return self._strike(Reply(400, b"I do not read that"))
            case "garbage" if drawn:
                return self._strike(self._draw.choice(self._garbage(texts)))
            case "slow" if number % 4 == 0:
                time.sleep(3 * TIMEOUT_S)
                self.num_faults += 1
            case "flapping" if number // 6 % 2 == 0:
                return self._strike(Reply(503, b"not now"))
            case "limits" if number % 5 == 0:
                return self._strike(Reply(429, b"slow down"))
        return self._right(texts)

    def _texts(self, body: Any) -> list[str]:
        if self._kind == "judge":
            return [json.loads(body["messages"][0]["content"])]
        return [completion[0]["content"] for completion in body["completions"]]

    def _right(self, texts: list[str]) -> Answer:
        if self._kind == "judge":
            return openai_answer(verdict_json(f"grade {grade(texts[0])}"))
        return [grade(text) / 16 for text in texts]

    def _garbage(self, texts: list[str]) -> list[Answer]:
        if self._kind == "judge":
            said = verdict_json(f"grade {(grade(texts[0]) + 1) % 16}")
            return [
                openai_answer("grade 1"),
                openai_answer(verdict_json("grade 16")),
                openai_answer(said, finish_reason="length"),
                openai_answer(said + " or not"),
                openai_answer(re.sub("}$", ', "verdict": "grade 0"}', said)),
                Reply(body=b"<html>grade 1</html>"),
                Reply(body=b"NaN"),
            ]
        bad = [b"NaN", b"Infinity", b"-0.1", b"1.1", b"null", b"true", b'"0.5"', b"1e39"]
        return [Reply(body=b"[" + b",".join([choice] * len(texts)) + b"]") for choice in bad] + [[], {"rewards": 1.0}]

    def _strike(self, answer: Answer) -> Answer:
        self.num_faults += 1
        return answer


@contextmanager
def comes_and_goes(scorer: Faulty) -> Iterator[str]:
    """Serves `scorer`, is away for AWAY_S after some calls, and serves it to the end; gives its URL."""
    port, over = free_port(), threading.Event()

    def serve() -> None:
        with http_server(scorer, port):
            come.set()
            while len(scorer.requests) < 2 * GROUPS_PER_STEP and not over.wait(0.01):
                pass
        scorer.num_faults += 1
        if not over.wait(AWAY_S):
            with http_server(scorer, port):
                over.wait(FAULTY_RUN_S)

    come = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert come.wait(60.0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        over.set()
        thread.join(60.0)


LASTING = ("errors that stay", "garbage")
BRIEF = [("judge", "garbage"), ("judge", "away"), ("judge", "limits"), ("trl", "slow")]
OTHERS = [
    *(("judge", fault) for fault in ("30% errors that pass", "errors that stay", "slow", "flapping")),
    *(("trl", fault) for fault in ("garbage", "flapping", "away")),
]


@pytest.mark.parametrize(("kind", "fault"), [*BRIEF, *(pytest.param(*other, marks=THOROUGH) for other in OTHERS)])
async def test_under_every_fault_of_an_http_server_the_run_goes_on_and_no_number_is_wrong(
    light_run: LightRun, tmp_path: Path, kind: str, fault: str
) -> None:
    scorer = Faulty(kind, fault)
    section = {"rubric": RUBRIC} if kind == "judge" else {"range": [0, 1]}
    with comes_and_goes(scorer) if fault == "away" else http_server(scorer) as url:
        mine = {"kind": kind, "address": url, **section}
        await check_run(light_run, tmp_path, mine, worth, NUM_STEPS, is_lasting=fault in LASTING)
    assert scorer.num_faults > 0
