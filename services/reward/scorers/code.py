"""Program against its tests, each run in a sandbox of its own: the share that pass.

Reads the program from the response and decides what passes; how a program is kept in is the sandbox's business. What a
program writes, or its function returns, is compared outside of it, so it can pass a test of input and output, or of a
call, only by knowing what is right. A test that is code shares its process: it passes when it reached the end, which an
early exit does not, but a program that sets out to can still deceive it.

A program that SIGKILL or SIGTERM ended is run a second time: nobody here sent it, and neither did its limits. Somebody
outside may have, such as a service that frees memory. Or the program did so itself, and does so again.
"""

import hashlib
import json
import math
import re
import secrets
import signal
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from rolecall.data.code_tests import CodeTest, read_tests, require_language
from rolecall.errors import BadGroundTruthError, WorkerLostError
from rolecall.sandbox import DISK_BYTES, Ran, Sandbox
from rolecall.scoring.scores import Item
from rolecall.settings import CodeScorer, LanguageSection

MAX_REMEMBERED = 65536
"""Programs whose scores a worker process remembers; then the one that was longest not asked for is forgotten."""
MAX_OUTPUT_BYTES = 2**20
"""Most bytes of output beyond the right ones; a program that writes more has failed."""
KILLED = frozenset(status for number in (signal.SIGKILL, signal.SIGTERM) for status in (-number, 128 + number))
"""Exit statuses of a program that was killed: by itself, or by somebody outside."""
FLOAT_TOLERANCE = 1e-5
"""Most by which a result may miss a right float: what LeetCode allows, which writes five digits."""
SMALL_TOLERANCE = 1e-3
"""Most of a small right float by which a result may miss it: else 0 would pass for 1e-6."""
ROUNDING = 1e-12
"""What of a large right float a result may always miss, and of any absolutely: sums differ so by their order."""
PROGRAM = ".program"
"""File of the program beside that which calls its function. No language's own file has such a name."""
ARCHIVE = "program.tar"
"""What compiling made of a program, carried into the sandbox of each test."""
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)")


def program_of(response_text: str) -> str:
    """The content of the last block between fences of three or more backticks, less the first fence's indentation; or
    the whole response when there is none.
    """
    program, block, indent, ticks = response_text, list[str](), "", 0
    for line in response_text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if not ticks:
            if fence is not None:
                block, indent, ticks = [], fence[1], len(fence[2])
        elif fence is not None and len(fence[2]) >= ticks and not fence[3].strip():
            program, ticks = "".join(f"{text}\n" for text in block), 0
        else:
            block.append(line.removeprefix(indent))
    return program


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal, white space at the ends of lines and empty lines at the end aside."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (output, expected))
    return ours == theirs


def same_result(text: str, test: CodeTest) -> bool:
    """Whether the JSON `text` has the value that the function of `test` must return, by the rule of `_same`; where
    the test is wrapped, the one element of the right list does as well.
    """
    try:
        result, right = json.loads(text), json.loads(test.stdout or "")
        return _same(result, right) or (test.wrapped and _same(result, right[0]))
    except (ValueError, OverflowError, RecursionError):
        return False


def _same(result: Any, right: Any) -> bool:
    """Whether both have one shape, with equal texts, truth values and numbers in it. true is no number, 1.0 is 1, and
    NaN equals nothing. Where the right number is written with a point or an exponent, FLOAT_TOLERANCE holds.
    """
    if isinstance(right, list):
        return isinstance(result, list) and len(result) == len(right) and all(map(_same, result, right))
    if isinstance(right, dict):
        return (
            isinstance(result, dict)
            and result.keys() == right.keys()
            and all(_same(result[key], each) for key, each in right.items())
        )
    if isinstance(result, bool) or isinstance(right, bool):  # Python's True is 1
        return result is right
    if isinstance(right, float) and isinstance(result, (int, float)):
        tolerance = max(ROUNDING, min(FLOAT_TOLERANCE, abs(right) * SMALL_TOLERANCE))
        return math.isclose(result, right, rel_tol=ROUNDING, abs_tol=tolerance)
    return bool(result == right)


@dataclass(frozen=True)
class Run:
    """A command that is to be run: the arguments of Sandbox.run."""

    command: Sequence[str]
    files: Mapping[str, bytes]
    stdin: bytes
    seconds: float
    max_bytes: int


Runs: TypeAlias = Generator[Run, Ran, Any]
"""Runs, one after the other, each of which is answered with how it ended."""


def task_of(item: Item, scorer: CodeScorer) -> tuple[str, list[CodeTest]]:
    """The program of a response and its tests. BadGroundTruthError where `scorer` cannot run those."""
    try:
        tests = read_tests(item.metadata.get(scorer.tests))
        require_language(tests, scorer.language)
    except ValueError as error:
        raise BadGroundTruthError(f"item {item.id}, field {scorer.tests!r}: {error}") from error
    return program_of(item.response_text), tests


def digest_of(program: str, tests: Sequence[CodeTest]) -> bytes:
    """Digest by which the score of `program` is remembered."""
    return hashlib.sha256(json.dumps([program, *map(asdict, tests)]).encode()).digest()


class CodeJudge:
    """Scores programs by `scorer` in `sandbox`, each pair of program and tests once."""

    def __init__(self, scorer: CodeScorer, sandbox: Sandbox) -> None:
        """ConfigError when programs cannot be run here."""
        self._scorer = scorer
        self._sandbox = sandbox
        self._remembered: OrderedDict[bytes, float] = OrderedDict()
        first = [command[0] for command in (scorer.language.compile, scorer.language.run) if command]
        sandbox.check([name for name in first if not name.startswith("./")])

    def score(self, program: str, tests: Sequence[CodeTest]) -> float:
        """1.0 when `program` passes all `tests`, else 0.0; with `partial` the share. ScorerUnavailableError and
        WorkerLostError as Sandbox.run: nothing is remembered then.
        """
        digest = digest_of(program, tests)
        if digest not in self._remembered:
            self._remembered[digest] = self._judge(program, tests)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(digest)
        return self._remembered[digest]

    def _judge(self, program: str, tests: Sequence[CodeTest]) -> float:
        runs = judging(self._scorer, program, tests)
        run = next(runs)
        while True:
            ran = self._sandbox.run(run.command, run.files, run.stdin, run.seconds, run.max_bytes)
            try:
                run = runs.send(ran)
            except StopIteration as end:
                return float(end.value)


def judging(scorer: CodeScorer, program: str, tests: Sequence[CodeTest]) -> Runs:
    """The runs by which `program` is judged, wherever they are made, and then its score. WorkerLostError when one was
    killed, and there is no time to run it again.
    """
    time = _Time(scorer.timeout_s)
    files, built = None, None
    passed = 0
    for test in tests:
        token = secrets.token_hex(16)
        wanted = _files(program, test, scorer.language, token)
        if wanted != files:
            files, built = wanted, (yield from _build(scorer.language, wanted, time))
        if built is not None and (yield from _passes(scorer.language, test, built, token, time)):
            passed += 1
        elif not scorer.partial or time.left_s <= 0:
            break
    return passed / len(tests) if scorer.partial else float(passed == len(tests))


def _build(language: LanguageSection, files: Mapping[str, bytes], time: "_Time") -> Runs:
    """The files that `run` needs; None when the program does not compile."""
    if not language.compile:
        return files
    command = ["sh", "-c", '"$@" > /dev/null && exec tar -c -f - .', "sh", *language.compile]
    ran = yield from _counted(command, files, b"", time, DISK_BYTES)
    return {ARCHIVE: ran.output} if ran.status == 0 else None


def _passes(language: LanguageSection, test: CodeTest, files: Mapping[str, bytes], token: str, time: "_Time") -> Runs:
    expected = token if test.stdout is None else test.stdout
    command = list(language.run)
    if ARCHIVE in files:
        command = ["sh", "-c", f'tar -x -f {ARCHIVE} && rm {ARCHIVE} && exec "$@"', "sh", *command]
    max_bytes = MAX_OUTPUT_BYTES + len(expected.encode(errors="replace"))
    ran = yield from _counted(command, files, test.stdin.encode(errors="replace"), time, max_bytes)
    if ran.status != 0:
        return False
    output = ran.output.decode(errors="replace")
    if test.function:
        return same_result(output.rpartition(token)[2].partition("\n")[0], test)
    if test.stdout is None:
        return token in output  # the program may write before and after it
    return same_output(output, expected)


def _counted(command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, time: "_Time", max_bytes: int) -> Runs:
    """The run that counts: the second one where the first was killed. WorkerLostError when there was no time for that:
    nobody knows then whose fault it was.
    """
    ran = time.spent((yield Run(command, files, stdin, time.left_s, max_bytes)))
    if ran.status not in KILLED:
        return ran
    if time.left_s > 0:
        ran = time.spent((yield Run(command, files, stdin, time.left_s, max_bytes)))
    if ran.status is None or time.left_s <= 0:
        raise WorkerLostError("a program was killed, and scorer.timeout_s is too short to run it a second time")
    return ran


class _Time:
    """The seconds that a program has for all its tests. A sandbox's own start is not taken from them."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def spent(self, ran: Ran) -> Ran:
        """Takes what a run took."""
        self.left_s -= ran.seconds
        return ran


def _files(program: str, test: CodeTest, language: LanguageSection, token: str) -> dict[str, bytes]:
    """The program with what is appended to it; of a call, what calls it, and the program."""
    if test.function:
        call = (language.call or "").replace("{function}", test.function).replace("{token}", token)
        sources = {language.file: call, PROGRAM: program}
    elif test.stdout is None:
        end = (language.end or "").replace("{token}", token)
        sources = {language.file: f"{program}\n{test.code}\n{end}\n"}
    else:
        sources = {language.file: program}
    return {name: source.encode(errors="replace") for name, source in sources.items()}
