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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rolecall.data.code_tests import CodeTest, require_language
from rolecall.errors import WorkerLostError
from rolecall.sandbox import DISK_BYTES, Ran, Sandbox
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
        WorkerLostError as Sandbox.run: nothing is remembered then. ValueError as `require_language`.
        """
        require_language(tests, self._scorer.language)
        digest = hashlib.sha256(json.dumps([program, *map(asdict, tests)]).encode()).digest()
        if digest not in self._remembered:
            self._remembered[digest] = self._judge(program, tests)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(digest)
        return self._remembered[digest]

    def _judge(self, program: str, tests: Sequence[CodeTest]) -> float:
        time = _Time(self._scorer.timeout_s)
        files, built = None, None
        passed = 0
        for test in tests:
            token = secrets.token_hex(16)
            wanted = _files(program, test, self._scorer.language, token)
            if wanted != files:
                files, built = wanted, self._build(wanted, time)
            if built is not None and self._passes(test, built, token, time):
                passed += 1
            elif not self._scorer.partial or time.left_s <= 0:
                break
        return passed / len(tests) if self._scorer.partial else float(passed == len(tests))

    def _build(self, files: Mapping[str, bytes], time: "_Time") -> Mapping[str, bytes] | None:
        """The files that `run` needs; None when the program does not compile."""
        if not self._scorer.language.compile:
            return files
        command = ["sh", "-c", '"$@" > /dev/null && exec tar -c -f - .', "sh", *self._scorer.language.compile]
        ran = self._run(command, files, b"", time, DISK_BYTES)
        return {ARCHIVE: ran.output} if ran.status == 0 else None

    def _passes(self, test: CodeTest, files: Mapping[str, bytes], token: str, time: "_Time") -> bool:
        expected = token if test.stdout is None else test.stdout
        command = list(self._scorer.language.run)
        if ARCHIVE in files:
            command = ["sh", "-c", f'tar -x -f {ARCHIVE} && rm {ARCHIVE} && exec "$@"', "sh", *command]
        max_bytes = MAX_OUTPUT_BYTES + len(expected.encode(errors="replace"))
        stdin = test.stdin.encode(errors="replace")
        ran = self._run(command, files, stdin, time, max_bytes)
        if ran.status != 0:
            return False
        output = ran.output.decode(errors="replace")
        if test.function:
            return same_result(output.rpartition(token)[2].partition("\n")[0], test)
        if test.stdout is None:
            return token in output  # the program may write before and after it
        return same_output(output, expected)

    def _run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, time: "_Time", max_bytes: int
    ) -> Ran:
        """The run that counts: the second one where the first was killed. WorkerLostError when there was no time for
        that: nobody knows then whose fault it was.
        """
        ran = time.spent(self._sandbox.run(command, files, stdin, time.left_s, max_bytes))
        if ran.status not in KILLED:
            return ran
        if time.left_s > 0:
            ran = time.spent(self._sandbox.run(command, files, stdin, time.left_s, max_bytes))
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
