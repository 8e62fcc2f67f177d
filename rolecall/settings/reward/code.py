"""Section of the scorer that runs programs: what they are written in, their tests, their sandbox and its limits."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import ConfigPath, Roots, ScorerServer, Section, url_of

Command = tuple[str, ...]


class LanguageSection(Section):
    """A language that programs are written in: how they are made and started, or its name where a server does that.
    Commands run in the folder of the program, with the system's path.
    """

    name: str = ""
    """What the server at the scorer's address calls it, such as cpp or nodejs."""
    file: Annotated[str, Field(pattern=r"^(\w[\w.-]*)?$")] = ""
    """Name of the file that the program is written to; a server chooses it itself."""
    compile: Command = ()
    """Command that makes of it what `run` starts, such as [g++, -O2, -o, main, main.cc]; absent: nothing to do."""
    run: Command = ()
    """Command that starts it; a server has its own."""
    end: str | None = None
    """Statement that prints {token}, which ends a test that is code: a program that exits before does not pass. Absent:
    tests in this language are inputs and outputs alone.
    """
    call: str | None = None
    """What stands in the program's place for a test that is a call. It takes the response's program from the file
    `.program` beside it, calls {function} of that with the JSON array of arguments on standard input, and prints
    {token} and what was returned as JSON. Absent: tests in this language call no function.
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
PYTHON = LanguageSection(name="python", file="main.py", run=("python3", "main.py"), end='print("{token}")', call=_CALL)
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
    """What the program is written in; absent: Python, as the system's python3 runs it, or the server's."""
    address: str | None = None
    """URL of a server that runs the programs, in place of a sandbox here: http://host:8080 of one that speaks
    SandboxFusion's HTTP API. Of a test it is sent the program and the input, never the output that is right. What it
    keeps a program from is its own business.
    """
    ca_file: Roots | None = None
    """PEM roots to trust at the address, or `system`; absent: the system's, with https."""
    bearer_token_file: ConfigPath | None = None
    """File with a bearer token for the address, read again when it changes; it is never sent without TLS. Absent: the
    environment variable ROLECALL_TOKEN_<COMPONENT> of the reward service.
    """
    num_calls: PositiveInt = 16
    """Programs that run at the address at a time. More than it has cores take each other's seconds."""
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
    """Address space that each process of a test gets; of a server it is asked in whole MiB."""
    num_processes: PositiveInt = 64
    """Processes and threads that a test may have at a time."""

    @property
    def server(self) -> ScorerServer | None:
        """The server that runs the programs; None: a sandbox here does."""
        if self.address is None:
            return None
        return CodeServer(
            address=self.address,
            ca_file=self.ca_file,
            bearer_token_file=self.bearer_token_file,
            num_calls=self.num_calls,
        )

    @property
    def longest_s(self) -> float:
        """The longest that a call may take which runs a test. A server compiles anew for each, in as many seconds."""
        return self.timeout_s if self.address is None or self.language == PYTHON else 2 * self.timeout_s

    @model_validator(mode="after")
    def _is_run_somewhere(self) -> Self:
        language, is_ours = self.language, self.language == PYTHON
        if self.address is None:
            if not (language.file and language.run):
                raise ValueError("language: file and run are missing, by which a program is started; add them")
            if self.ca_file is not None or self.bearer_token_file is not None:
                raise ValueError("ca_file and bearer_token_file need address: they are how its server is called")
            return self
        url_of(self.address, ("http", "https"))
        if self.address.rstrip("/").endswith("/run_code"):
            raise ValueError("address: write it without /run_code, which is added")
        if (self.ca_file is not None or self.bearer_token_file is not None) and self.address.startswith("http://"):
            raise ValueError("address: ca_file and bearer_token_file need https://; without TLS no token is sent")
        if not is_ours and (not language.name or language.file or language.compile or language.run):
            raise ValueError(
                "language: with an address it has a name, such as cpp, and neither file nor compile nor run: the "
                "server knows them"
            )
        ours = ("sandbox", "read_only", "cpu_s", "num_processes")
        if any(getattr(self, name) != type(self).model_fields[name].default for name in ours):
            raise ValueError(
                f"{', '.join(ours)}: the server at address bounds its programs by its own means; remove them"
            )
        return self


class CodeServer(ScorerServer):
    """A server that runs programs."""

    @property
    def look_path(self) -> str:
        """The path below its URL at which it says that it is there."""
        return "/v1/ping"
