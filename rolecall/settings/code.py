"""Section of the scorer that runs programs: what they are written in, their tests, their sandbox and its limits."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rolecall.settings.section import ConfigPath, Section

Command = tuple[str, ...]


class LanguageSection(Section):
    """A language that programs are written in: how they are made and started. Commands run in the
    folder of the program, with the system's path.
    """

    file: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """Name of the file that the program is written to."""
    compile: Command = ()
    """Command that makes of it what `run` starts, such as [g++, -O2, -o, main, main.cc]; absent: nothing to do."""
    run: Annotated[Command, Field(min_length=1)]
    """Command that starts it."""
    end: str | None = None
    """Statement that prints {token}, which ends a test that is code: a program that exits before does not pass. Absent:
    tests in this language are inputs and outputs alone.
    """
    call: str | None = None
    """What stands in `file` for a test that is a call. It takes the response's program from the file `.program` beside
    it, calls {function} of that with the JSON array of arguments on standard input, and prints {token} and what was
    returned as JSON. Absent: tests in this language call no function.
    """


_CALL = '''import json, sys, types

program = sys.modules["program"] = types.ModuleType("program")
names = vars(program)
exec("""
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import pow  # that of math knows no modulus
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys, time
""", names)
names.pop("{function}", None)  # a program that does not have it must not find ours
arguments = json.load(sys.stdin)
try:
    exec(compile(open(".program", "rb").read(), ".program", "exec"), names)
except Exception:
    pass  # its own part that reads found nothing; what it defined before is called
if hasattr(names.get("Solution"), "{function}"):
    function = program.Solution().{function}
elif "{function}" in names:
    function = program.{function}
else:
    classes = {each for each in names.values() if isinstance(each, type) and each.__module__ == "program"}
    (owner,) = (each for each in classes if hasattr(each, "{function}"))
    function = owner().{function}
print("\\n{token}" + json.dumps(function(*arguments)))
'''
PYTHON = LanguageSection(file="main.py", run=("python3", "main.py"), end='print("{token}")', call=_CALL)
"""The default language."""


class CodeScorer(Section):
    """1 when the response's program passes every test of its prompt, else 0.

    The program is what the last block of the response between lines of ``` holds, or the whole response where there is
    none. Each test runs it anew, in a sandbox of its own.
    """

    kind: Literal["code"] = "code"
    """The scorer that this section chooses."""
    tests: str = "tests"
    """Field of a prompt's tests, a list: {input, output} for what the program reads and must write, text for code that
    is appended to it and must reach its end. {inputs, outputs}, two lists, is the same as the first, with fn_name the
    arguments and results of a function, and JSON of any may stand in its place.
    """
    partial: bool = False
    """The share of tests passed, in place of 1 or 0."""
    language: LanguageSection = PYTHON
    """What the program is written in; absent: Python, as the system's python3 runs it."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """none: programs run as the reward service's own user, with all that it may read, write and reach; for programs
    that somebody trusts, or where the whole service is in a sandbox.
    """
    read_only: tuple[ConfigPath, ...] = ()
    """Folders that programs see besides /usr, at the same place: tool chains, packages. Nothing else is seen."""
    timeout_s: PositiveFloat = 8.0
    """Seconds for all tests of a response, compiling included; tests that have not passed by then have failed."""
    cpu_s: PositiveInt = 4
    """CPU seconds that each process of a test gets."""
    memory_bytes: PositiveInt = 2**30
    """Address space that each process of a test gets."""
    num_processes: PositiveInt = 64
    """Processes and threads that a test may have at a time."""
