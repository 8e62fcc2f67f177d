"""Programs of responses that a server runs, by SandboxFusion's HTTP API. What its runs mean is decided here, by the
rules that hold for our own sandbox.

A test is a call. The server is sent the program and what it reads; the right output stays here.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from rolecall.data.code_tests import CodeTest
from rolecall.errors import (
    ConfigError,
    InvalidInputError,
    RoleCallError,
    ScorerError,
    ScorerUnavailableError,
    WorkerLostError,
)
from rolecall.sandbox import Ran
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Item
from rolecall.settings import CodeScorer
from rolecall.settings.reward.code import PYTHON
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2
from services.reward.catalog import describe
from services.reward.external.remembered import Remembered
from services.reward.scorers.code import KILLED, MAX_OUTPUT_BYTES, Run, digest_of, judging, task_of


class _Command(BaseModel):
    """The end of one command."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    execution_time: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    stdout: str | None = None


class _Answer(BaseModel):
    """The server's answer to a run."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: _Command | None = None
    run_result: _Command | None = None


class Programs:
    """Programs that a server runs, each pair of program and tests once."""

    def __init__(self, name: str, scorer: CodeScorer, server: JsonServer, meter: ScorerMeter) -> None:
        self._scorer = scorer
        self._server = server
        self._meter = meter
        self._remembered: Remembered[float] = Remembered()
        self.spec = describe(name, scorer)

    async def look(self) -> None:
        """Returns when the server runs programs. Raises when it does not answer, or wants another token, and a
        ConfigError when it knows no such language, or an empty Python program fails there: then all would, and score 0.
        """
        await self._server.look()
        language = self._scorer.language
        empty = Run(language.run, {language.file: b""}, b"", self._scorer.timeout_s, MAX_OUTPUT_BYTES)
        try:
            ran = await self.ran(empty)
        except InvalidInputError as error:
            raise ConfigError(f"scorer.language.name {language.name!r} is refused there: {error.message}") from error
        except RoleCallError as error:
            if type(error) is not RoleCallError:
                raise
            raise ScorerUnavailableError(error.message) from error  # a flaw of the server, which the start outwaits
        if language == PYTHON:
            if ran.status is None or ran.status in KILLED:
                raise ScorerUnavailableError(
                    f"an empty program takes more than {self._scorer.timeout_s:g} s there, or is killed"
                )
            if ran.status != 0:
                raise ConfigError(
                    f"an empty program fails there with exit status {ran.status}; look at the server's Python, or "
                    "raise scorer.memory_bytes"
                )

    def parted(self, items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
        """Places of the items of each task: one item."""
        return [[place] for place in range(len(items))]

    async def score(self, items: Sequence[Item]) -> list[float]:
        """Returns the score of one item's program."""
        (item,) = items
        program, tests = task_of(item, self._scorer)
        digest = digest_of(program, tests)
        score, was_asked = await self._remembered.answer(digest, lambda: self._judged(program, tests))
        if was_asked:
            self._meter.remembered()
        return [score]

    async def ran(self, run: Run) -> Ran:
        """The end of `run`, whose command the server has itself. Raises what a call does, and what is tried again and
        then dropped where the server failed at the program.
        """
        language = self._scorer.language
        files = dict(run.files)
        code = files.pop(language.file)
        body = {
            "language": language.name,
            "code": code.decode(),
            "stdin": run.stdin.decode(),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "compile_timeout": self._scorer.timeout_s,
            "run_timeout": run.seconds,
            "memory_limit_MB": max(1, self._scorer.memory_bytes // 2**20),
        }
        return _ended(await self._server.post("/run_code", body), run)

    async def _judged(self, program: str, tests: Sequence[CodeTest]) -> float:
        runs = judging(self._scorer, program, tests)
        try:
            run = next(runs)
            while True:
                run = runs.send(await self.ran(run))
        except StopIteration as end:
            return float(end.value)
        except WorkerLostError as error:  # such a program is not waited for: it may be killed each time
            raise RoleCallError(error.message, code=error.reason) from error


def _ended(said: object, run: Run) -> Ran:
    """The end of `run`, by what the server says. A program that does not compile ends as its compiler did."""
    try:
        answer = _Answer.model_validate(said)
    except ValidationError as error:
        raise ScorerError(f"it answered what is no end of a run: {said!r:.200}") from error
    if answer.status == "SandboxError":
        raise RoleCallError(f"its sandbox failed: {answer.message:.200}", code="SANDBOX_ERROR")
    compiled, command = answer.compile_result, answer.run_result
    if command is None and compiled is not None:
        command, compiled = compiled, None
    is_late = command is not None and command.status == "TimeLimitExceeded"
    if command is None or command.execution_time is None or (command.return_code is None and not is_late):
        raise ScorerError(f"it answered what is no end of a run: {said!r:.200}")
    output = (command.stdout or "").encode(errors="replace")
    is_cut = is_late or len(output) > run.max_bytes
    return Ran(None if is_cut else command.return_code, output[: run.max_bytes], command.execution_time)
