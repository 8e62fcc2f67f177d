"""Programs that try to get out of the sandbox, to stay in it for ever, or to use the machine up; and scores of programs
through the service's own worker processes.

Each program says what it was allowed; afterwards nothing of it runs. The machine that runs these tests must let this
user make namespaces and have bubblewrap; else they are skipped, and say so.
"""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from rolecall import sandbox as sandboxes
from rolecall.data.code_tests import CodeTest, read_tests
from rolecall.errors import ConfigError, ScorerUnavailableError, WorkerLostError
from rolecall.sandbox import DISK_BYTES, Bare, Bubblewrap, Ran, Sandbox, sandbox_of
from rolecall.scoring.json_server import JsonServer
from rolecall.settings import CodeScorer, LanguageSection, RpcSection, scorer_environment
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2
from services.reward.external.programs import Programs
from services.reward.pool import WorkerPool
from services.reward.scorers.code import CodeJudge, Run
from tests.file_limits import no_file_is_free
from tests.twins.http_scorer import http_server
from tests.twins.sandbox_server import sandbox_twin
from tests.waiting import until

GENEROUS_S = 120.0
"""For programs that end by themselves."""
SHORT_S = 1.0
"""For programs that do not."""
FROZEN_S = 6.0
"""Of a machine that stands still: longer than the program's own time there, by less than its grace."""
MAX_BYTES = 2**16
ATTEMPT = """
import json, os, socket, sys
def attempt(function, *arguments):
    try:
        return repr(function(*arguments))
    except BaseException as error:
        return type(error).__name__
"""


@pytest.fixture(scope="module")
def bubblewrap() -> Bubblewrap:
    sandbox = Bubblewrap(CodeScorer(num_processes=16))
    try:
        sandbox.check(["python3"])
    except ConfigError as error:
        pytest.skip(error.message)
    return sandbox


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument of the test's programs, none of which is left at its end."""
    mark = uuid4().hex
    yield mark
    deadline = time.monotonic() + GENEROUS_S
    while left := with_argument(mark):
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.05)


def with_argument(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def opened_to_nobody(folder: Path) -> Path:
    """`folder`, which programs may enter that run as nobody."""
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.geteuid() and not each.stat().st_mode & stat.S_IXOTH:
            each.chmod(0o755)
    return folder


def run(sandbox: Sandbox, mark: str, program: str, seconds: float = GENEROUS_S) -> Ran:
    files = {"main.py": (ATTEMPT + program).encode()}
    return sandbox.run(["python3", "main.py", mark], files, b"input", seconds, MAX_BYTES)


def told(sandbox: Sandbox, mark: str, program: str) -> Any:
    """What `program` prints as JSON."""
    ran = run(sandbox, mark, program)
    assert ran.status == 0, ran
    return json.loads(ran.output)


def test_a_fork_bomb_has_few_processes_and_ends_with_its_time(bubblewrap: Bubblewrap, mark: str) -> None:
    count = """
n = 0
while attempt(os.fork) not in ("0", "BlockingIOError"):
    n += 1
else:
    import time
    time.sleep(0.1)
print(json.dumps(n)) if n else None
"""
    lines = run(bubblewrap, mark, count).output.decode().split()
    assert lines
    assert max(map(int, lines)) <= 16
    assert run(bubblewrap, mark, "while True: attempt(os.fork)", SHORT_S).status is None


def test_a_daemon_ends_with_its_program(bubblewrap: Bubblewrap, mark: str) -> None:
    daemon = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        os.close(1)
        time.sleep(1000)
    os._exit(0)
"""
    assert run(bubblewrap, mark, daemon).status == 0


def test_a_program_fills_no_disk(bubblewrap: Bubblewrap, mark: str) -> None:
    fill = """
def fill(folder):
    written = 0
    try:
        for number in range(1000):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                for _ in range(16):
                    written += file.write(bytes(2**20))
    except OSError as error:
        return written, error.errno
print(json.dumps({folder: fill(folder) for folder in ("/tmp", "/dev/shm", "/", "/usr", "/dev", "/etc", "/proc")}))
"""
    filled = told(bubblewrap, mark, fill)
    assert sum(written for written, _ in filled.values()) <= 2 * DISK_BYTES
    assert {folder for folder, (written, _) in filled.items() if written} == {"/tmp", "/dev/shm"}


def test_a_program_finds_no_file_and_no_socket_of_the_machine(
    bubblewrap: Bubblewrap, mark: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    with socket.socket(socket.AF_UNIX) as store, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        store.bind(str(tmp_path / "s"))
        tcp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{mark}")
        for server in (store, tcp, abstract):
            server.listen()
        port = tcp.getsockname()[1]
        tries = f"""
def connect(family, address):
    socket.socket(family).connect(address)
    return "connected"
os.symlink({str(token)!r}, "link")
print(json.dumps([
    attempt(open, {str(token)!r}),
    attempt(open, "link"),
    attempt(open, "/proc/1/root" + {str(token)!r}),
    attempt(connect, socket.AF_UNIX, {str(tmp_path / "s")!r}),
    attempt(connect, socket.AF_INET, ("127.0.0.1", {port})),
    attempt(connect, socket.AF_INET, ("192.0.2.1", 80)),
    attempt(connect, socket.AF_UNIX, "\\0" + {mark!r}),
    sorted(os.listdir("/")),
    [each for each in ("/home", "/root", "/run", "/var", "/sys", "/etc/passwd", "/etc/shadow") if os.path.exists(each)],
]))
"""
        *refused, root, seen = told(bubblewrap, mark, tries)
    assert refused[:4] == ["FileNotFoundError"] * 4
    assert refused[4] == "ConnectionRefusedError"
    assert refused[5] == "OSError"
    assert refused[6] == "ConnectionRefusedError"
    assert set(root) <= {"bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "proc", "dev", "tmp"}
    assert seen == []


def test_a_program_reaches_no_process_but_its_own(bubblewrap: Bubblewrap, mark: str) -> None:
    signals = """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
print(json.dumps([
    attempt(os.kill, os.getppid(), 9),
    attempt(os.kill, os.getppid(), 19),
    attempt(os.kill, -1, 9),
    max(pids),
]))
"""
    # Its parent is the sandbox's first process, to which the kernel delivers none of these.
    assert told(bubblewrap, mark, signals) == ["None", "None", "ProcessLookupError", 2]
    assert run(bubblewrap, mark, "os.kill(os.getpid(), 19)", SHORT_S).status is None
    assert run(bubblewrap, mark, "os.kill(os.getppid(), 15)\nimport time\ntime.sleep(1000)").status != 0


def test_a_program_gets_no_rights_secrets_or_open_files(
    bubblewrap: Bubblewrap, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    rights = """
import ctypes, fcntl, resource
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps([
    attempt(os.setuid, 0), attempt(os.chroot, "/tmp"), attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1)),
    libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.mount(None, b"/", None, 4128, None),
    attempt(os.write, 0, b"x"), attempt(os.ftruncate, 0, 0),
    sorted(os.environ), os.getuid() == os.getgid() == 65534, os.getgroups(),
    [os.readlink(f"/proc/self/fd/{name}").split(":")[0] for name in ("0", "1", "2")],
    [name for name in os.listdir("/proc/self/fd") if int(name) > 3],
    "secret" in open("/proc/1/environ").read() + open("/proc/self/environ").read(),
    sys.stdin.read(),
]))
"""
    told_ = told(bubblewrap, mark, rights)
    assert told_[:3] == ["OSError", "PermissionError", "ValueError"]
    assert told_[3:6] == [-1, -1, -1]
    assert told_[6:8] == ["PermissionError", "PermissionError"]
    assert set(told_[8]) <= {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE", "SHLVL", "_", "OLDPWD"}
    assert told_[9] is True
    assert set(told_[10]) <= {65534}
    assert told_[11] == ["/memfd", "pipe", "/dev/null"]
    assert told_[12:] == [[], False, "input"]


def test_output_without_end_is_cut(bubblewrap: Bubblewrap, mark: str) -> None:
    ran = run(bubblewrap, mark, "while True: sys.stdout.write('x' * 1000)")
    assert ran.status is None
    assert len(ran.output) == MAX_BYTES


def test_a_program_that_sleeps_or_closes_its_output_ends_with_its_time(bubblewrap: Bubblewrap, mark: str) -> None:
    assert run(bubblewrap, mark, "import time\ntime.sleep(1000)", SHORT_S).status is None
    assert run(bubblewrap, mark, "os.close(1)\nimport time\ntime.sleep(1000)", SHORT_S).status is None


def test_a_program_gets_no_more_memory_and_cpu_than_its_own(mark: str, bubblewrap: Bubblewrap) -> None:
    assert told(bubblewrap, mark, "print(json.dumps(attempt(bytearray, 2**33)))") == "MemoryError"
    busy = Bubblewrap(CodeScorer(cpu_s=1))
    started = time.monotonic()
    assert run(busy, mark, "while True: pass").status not in (0, None)
    assert time.monotonic() - started < GENEROUS_S


def test_a_program_ends_with_the_process_that_waits_for_it(bubblewrap: Bubblewrap, mark: str) -> None:
    """A worker is killed at its item's deadline."""
    waits = f"""
from rolecall.settings import CodeScorer
from rolecall.sandbox import Bubblewrap
files = {{"main.py": b"import time; time.sleep(1000)"}}
Bubblewrap(CodeScorer()).run(["python3", "main.py", "{mark}"], files, b"", 1000.0, 10)
"""
    worker = subprocess.Popen([sys.executable, "-c", waits])
    deadline = time.monotonic() + GENEROUS_S
    while not any("main.py" in each.cmdline()[:2] for each in with_argument(mark)):
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.send_signal(signal.SIGKILL)
    worker.wait(GENEROUS_S)  # and the mark's fixture finds nothing left


def test_a_program_sees_the_folders_that_are_named_and_cannot_write_them(
    bubblewrap: Bubblewrap, mark: str, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "words.txt").write_text("hello")
    opened_to_nobody(tmp_path)
    sandbox = Bubblewrap(CodeScorer(read_only=(packages,)))
    sandbox.check(["python3"])
    path = str(packages / "words.txt")
    tries = f"print(json.dumps([open({path!r}).read(), attempt(open, {path!r}, 'w')]))"
    assert told(sandbox, mark, tries) == ["hello", "OSError"]


def test_a_machine_without_bubblewrap_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*install bubblewrap.*or write sandbox: none"):
        Bubblewrap(CodeScorer()).check(["python3"])


def test_a_sandbox_that_does_not_stand_is_an_error_and_no_score(bubblewrap: Bubblewrap, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    sandbox = Bubblewrap(CodeScorer(read_only=(folder,)))
    folder.rmdir()
    with pytest.raises(ScorerUnavailableError, match=r"did not start: bwrap: .*gone"):
        sandbox.run(["true"], {}, b"", GENEROUS_S, 10)
    with pytest.raises(ConfigError, match=r"scorer\.read_only: .*gone is no folder"):
        sandbox.check([])


def test_a_command_that_is_not_there_is_found_at_the_start(bubblewrap: Bubblewrap) -> None:
    for sandbox in (bubblewrap, Bare(CodeScorer())):
        with pytest.raises(ConfigError, match=r"scorer\.language: no-such-language is not found"):
            CodeJudge(
                CodeScorer(language=LanguageSection(file="a", run=("no-such-language", "a"))), sandbox
            )  # it looks around at once


def test_without_a_sandbox_programs_still_have_limits(mark: str) -> None:
    bare = Bare(CodeScorer(sandbox="none", cpu_s=1))
    assert told(bare, mark, "print(json.dumps([sys.stdin.read(), attempt(bytearray, 2**33)]))") == [
        "input",
        "MemoryError",
    ]
    assert run(bare, mark, "while True: sys.stdout.write('x' * 1000)").status is None
    assert run(bare, mark, "while True: pass").status not in (0, None)
    assert run(bare, mark, "import time\nos.fork()\ntime.sleep(1000)", SHORT_S).status is None


class Counted:
    """A sandbox that counts what is run in `sandbox`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.num_runs = 0

    def check(self, commands: Sequence[str]) -> None:
        self._sandbox.check(commands)

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        self.num_runs += 1
        return self._sandbox.run(command, files, stdin, seconds, max_bytes)


@pytest.fixture(params=["none", "bubblewrap"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each sandbox that this machine can have."""
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap")
    return str(request.param)


class Elsewhere:
    """A server that runs programs, as a sandbox."""

    def __init__(self, scorer: CodeScorer) -> None:
        self._scorer = scorer

    def check(self, commands: Sequence[str]) -> None:
        assert not commands or self._scorer.language.run, "it knows its commands itself"

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        async def ran() -> Ran:
            assert self._scorer.server is not None
            server = JsonServer("it", self._scorer.server, RpcSection(), timeout_s=2 * GENEROUS_S)
            try:
                programs = Programs("it", self._scorer, server, ScorerMeter("it"))
                return await programs.ran(Run(command, files, stdin, seconds, max_bytes))
            finally:
                await server.close()

        return asyncio.run(ran())


@pytest.fixture(params=["none", "bubblewrap", "server"])
def place(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Each place where programs may run, as settings name it."""
    if request.param == "server":
        with http_server(sandbox_twin()) as url:
            yield {"address": url}
        return
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap")
    yield {"sandbox": request.param}


def judge_at(place: Mapping[str, Any], **keys: Any) -> CodeJudge:
    scorer = CodeScorer.model_validate({"timeout_s": GENEROUS_S, **place, **keys})
    return CodeJudge(scorer, Elsewhere(scorer) if scorer.address else sandbox_of(scorer))


def judge_of(kind: str, mark: str, **keys: Any) -> tuple[CodeJudge, Counted]:
    language = LanguageSection(file="main.py", run=("python3", "main.py", mark))
    scorer = CodeScorer.model_validate({"sandbox": kind, "language": language, "timeout_s": GENEROUS_S, **keys})
    sandbox = Counted(sandbox_of(scorer))
    return CodeJudge(scorer, sandbox), sandbox


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def twice(x, by=2): return x * by", 1.0),
        ("class Solution:\n    def twice(self, x: int) -> int:\n        print('at', x)\n        return 2 * x", 1.0),
        ("twice = lambda x: 6", 0.5),
        ("twice = lambda x: (2 * x,)", 1.0),
        ("twice = lambda x: {2 * x}", 0.0),
        ("def thrice(x): return 3 * x", 0.0),
        ("import sys\nprint(4)\nsys.exit()", 0.0),
        ("import re\nprint(re.search('[0-9a-f]{32}', open('main.py').read())[0] + 'null')\nraise SystemExit", 0.0),
        ("print(input())\ntwice = lambda x: 2 * x", 0.0),
    ],
    ids=["function", "method", "constant", "tuple", "no JSON", "no such name", "exit", "knows the word", "reads"],
)
def test_a_function_is_called_with_each_list_of_arguments_and_its_results_are_compared(
    place: dict[str, Any], program: str, share: float
) -> None:
    tests = read_tests({"fn_name": "twice", "inputs": [[3], ["ab"]], "outputs": [[6], ["abab"]]})
    assert judge_at(place, partial=True).score(program, tests) == share


TWICE = "def twice(x): return 2 * x\n"


@pytest.mark.parametrize(
    ("program", "score"),
    [
        (TWICE + "if __name__ == '__main__':\n    print(twice(int(input())))", 1.0),
        (TWICE + "def main():\n    print(twice(int(input())))\nmain()", 1.0),
        (TWICE + "import sys\nprint(twice(int(sys.stdin.buffer.readline())))", 1.0),
        ("print(input())\n" + TWICE, 0.0),
        (TWICE + "import sys\nsys.exit()", 0.0),
        ("class Doubler:\n    def twice(self, x): return 2 * x", 1.0),
        ("class Solution: pass\n" + TWICE, 1.0),
        ("class Other:\n    def twice(self, x): return x\nclass Solution:\n    def twice(self, x): return 2 * x", 1.0),
        ("class A:\n    def twice(self, x): return 2 * x\nclass B:\n    def twice(self, x): return 2 * x", 0.0),
        ("class Solution:\n    def twice(self, x: List[int]) -> Optional[int]: return 2 * x", 1.0),
        ("def twice(x): return math.gcd(0, sum(Counter('ab' * x).values()))", 1.0),
        ("def twice(x): return 2 * x * bisect.bisect_left([0], 1) * pow(1, 1, 2)", 1.0),
        ("from __future__ import annotations\ndef twice(x: Set[int]): return 2 * x", 1.0),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Two:\n    x: 'int' = 2\ntwice = lambda x: Two().x * x",
            1.0,
        ),
        ("json = sys = open = print = None\n" + TWICE, 1.0),
        ("def twice(x): return x == 3", 0.0),
        ("def twice(x): return str(2 * x)", 0.0),
        ("def twice(x): return [2 * x]", 0.0),
        ("def twice(x): return float('nan')", 0.0),
        ("def twice(x):", 0.0),
    ],
)
def test_a_right_function_passes_however_its_program_is_written(
    place: dict[str, Any], program: str, score: float
) -> None:
    tests = read_tests({"fn_name": "twice", "inputs": [[3]], "outputs": [6]})
    assert judge_at(place).score(program, tests) == score


@pytest.mark.parametrize(
    ("function", "arguments", "right"),
    [("factorial", [3], 6), ("max", [[1, 2]], 2), ("Counter", ["ab"], {"a": 1, "b": 1})],
)
def test_what_a_program_does_not_define_is_not_called(
    place: dict[str, Any], function: str, arguments: list[object], right: object
) -> None:
    tests = read_tests({"fn_name": function, "inputs": [arguments], "outputs": [right]})
    assert judge_at(place).score("x = 1", tests) == 0.0


def test_only_the_program_s_own_classes_are_looked_at_for_a_method(place: dict[str, Any]) -> None:
    tests = read_tests({"fn_name": "update", "inputs": [[3]], "outputs": [6]})  # as Counter has one
    program = "class Doubler:\n    def update(self, x): return 2 * x"
    assert judge_at(place).score(program, tests) == 1.0


def test_a_call_in_another_language_finds_the_program_beside_it(place: dict[str, Any]) -> None:
    call = 'printf "\\n{token}"\n{function} "$(cat)"'
    language = (
        {"name": "bash", "call": f". ./.program\n{call}"}
        if "address" in place
        else {
            "file": "call.sh",
            "compile": ("sh", "-c", "cat .program call.sh > all.sh"),
            "run": ("sh", "all.sh"),
            "call": call,
        }
    )
    tests = read_tests({"fn_name": "same", "inputs": [[3, 4]], "outputs": [[3, 4]]})
    assert judge_at(place, language=language).score('same() { echo "$1"; }\n', tests) == 1.0


FORKING = """
import ctypes
from rolecall.sandbox import sandbox_of
from rolecall.settings import CodeScorer
libc = ctypes.CDLL(None)
libc.__register_atfork(None, None, libc.abort, None)
ran = sandbox_of(CodeScorer.model_validate({"sandbox": KIND})).run(["echo", "well"], {}, b"", 60.0, 100)
print(ran.status, ran.output)
"""
"""A process of whose forks each aborts, as some do beside gRPC, and a program in a sandbox."""


def test_a_sandbox_starts_though_forks_of_its_process_abort(kind: str) -> None:
    script = FORKING.replace("KIND", repr(kind))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0 b'well\\n'\n"), ran.stderr


async def test_a_program_that_somebody_else_kills_is_run_again(kind: str, mark: str, tmp_path: Path) -> None:
    folder = opened_to_nobody(tmp_path)
    judge, sandbox = judge_of(kind, mark, read_only=(folder,))
    program = f"import os, time\nwhile not os.path.exists({str(folder / 'go')!r}): time.sleep(0.05)\nprint(1)"
    scoring = asyncio.create_task(asyncio.to_thread(judge.score, program, [CodeTest("", "1")]))
    (victim,) = await until(
        lambda: [each for each in with_argument(mark) if each.cmdline()[:2] == ["python3", "main.py"]]
    )
    victim.kill()
    await until(lambda: sandbox.num_runs == 2)
    (folder / "go").touch()
    assert await scoring == 1.0


def test_a_program_that_is_killed_too_late_for_a_second_run_has_no_score(
    kind: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, sandbox = judge_of(kind, mark)
    run = sandbox.run

    def late(*given: Any) -> Ran:
        ran = run(*given)
        return replace(ran, seconds=ran.seconds + GENEROUS_S - 2)

    monkeypatch.setattr(sandbox, "run", late)
    with pytest.raises(WorkerLostError, match="too short to run it a second time"):
        judge.score("import os, time\ntime.sleep(1.5)\nos.kill(os.getpid(), 9)", [CodeTest("", "1")])


@pytest.mark.parametrize(
    ("program", "num_runs"),
    [
        ("import os\nos.kill(os.getpid(), 9)", 2),  # nobody knows who it was: it is looked at twice
        ("bytearray(2**33)", 1),
        ("while True: pass", 1),
        ("import os\nos.abort()", 1),
    ],
)
def test_what_a_program_does_to_itself_scores_0(kind: str, mark: str, program: str, num_runs: int) -> None:
    judge, sandbox = judge_of(kind, mark, cpu_s=1)
    for _ in range(2):
        assert judge.score(program, [CodeTest("", "1")]) == 0.0
    assert sandbox.num_runs == num_runs, "and it is remembered"


def test_a_failure_while_the_machine_has_no_memory_is_no_score(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = tmp_path / "vmstat"
    kills.write_text("nr_free_pages 1\noom_kill 7\n")
    monkeypatch.setattr(sandboxes, "VMSTAT", kills)
    judge, _ = judge_of("none", mark)
    # as a compiler does, one of whose processes was killed
    program = f"""
path = {str(kills)!r}
if "oom_kill 7" in open(path).read():
    open(path, "w").write("oom_kill 8\\n")
    raise SystemExit(1)
print(1)
"""
    with pytest.raises(WorkerLostError, match="no memory"):
        judge.score(program, [CodeTest("", "1")])
    assert judge.score(program, [CodeTest("", "1")]) == 1.0, "nothing was remembered"


def test_a_machine_that_gives_no_process_is_no_score(kind: str, mark: str) -> None:
    judge, _ = judge_of(kind, mark)
    with no_file_is_free(), pytest.raises(ScorerUnavailableError, match="Too many open files"):
        judge.score("print(1)", [CodeTest("", "1")])
    assert judge.score("print(1)", [CodeTest("", "1")]) == 1.0


def test_what_fails_before_the_program_is_not_its_own(kind: str, mark: str) -> None:
    """Its limits leave no room for the shell that starts it."""
    scorer = CodeScorer.model_validate({"sandbox": kind, "memory_bytes": 2**16})
    with pytest.raises(ScorerUnavailableError, match="did not start"):
        sandbox_of(scorer).run(["true"], {}, b"", GENEROUS_S, 10)


async def test_time_in_which_the_machine_stands_still_is_not_the_programs(mark: str, tmp_path: Path) -> None:
    """As when its container is paused: neither the program nor who times it runs."""
    started, go = tmp_path / "started", tmp_path / "go"
    program = f"""
import os, time
open({str(started)!r}, "w").close()
while not os.path.exists({str(go)!r}): time.sleep(0.01)
"""
    watcher = f"""
from rolecall.settings import CodeScorer
from rolecall.sandbox import Bare
ran = Bare(CodeScorer(sandbox="none")).run(
    ["python3", "main.py", "{mark}"], {{"main.py": {program.encode()!r}}}, b"", {FROZEN_S - 1}, 10
)
assert ran.status == 0, ran
assert ran.seconds < {FROZEN_S - 1}, ran
"""
    process = subprocess.Popen([sys.executable, "-c", watcher])
    await until(started.exists)
    frozen = [psutil.Process(process.pid), *with_argument(mark)]
    for each in frozen:
        each.suspend()
    await asyncio.sleep(FROZEN_S)
    go.touch()
    for each in frozen:
        each.resume()
    assert await asyncio.to_thread(process.wait, GENEROUS_S) == 0


@asynccontextmanager
async def pool_of(folder: Path, **keys: Any) -> AsyncIterator[WorkerPool]:
    scorer = CodeScorer(**keys)
    pool = WorkerPool({"tests": scorer}, {"tests": GENEROUS_S}, 1, folder, scorer_environment(()))
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()


def item(id: str, program: str, tests: Any) -> reward_pb2.ScoreItem:
    item = reward_pb2.ScoreItem(id=id, response_text=f"So:\n```python\n{program}\n```")
    if tests is not None:
        item.metadata.update({"tests": tests})
    return item


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
async def test_programs_are_scored_in_the_worker_processes(
    bubblewrap: Bubblewrap, tmp_path: Path, sandbox: str
) -> None:
    doubled = [{"input": "2", "output": "4"}, {"input": "0", "output": "0"}]
    items = [
        item("right", "print(2 * int(input()))", doubled),
        item("half", "print(int(input()))", doubled),
        item("json", "print(2 * int(input()))", json.dumps({"inputs": ["2"], "outputs": ["4"]})),
        item("code", "def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"]),
        item("exits", "import os\nos._exit(0)", ["assert f(1) == 2"]),
        item("wrong", "def f(", doubled),
        item("none", "print(1)", None),
    ]
    async with pool_of(tmp_path, partial=True, timeout_s=GENEROUS_S / 2, sandbox=sandbox) as pool:
        results = await pool.score("tests", items)
    values = {result.id: result.reward.value for result in results if result.HasField("reward")}
    assert values == {"right": 1.0, "half": 0.5, "json": 1.0, "code": 0.5, "exits": 0.0, "wrong": 0.0}
    assert results[-1].error.code == "BAD_GROUND_TRUTH"
    assert "field 'tests'" in results[-1].error.message


async def test_a_program_that_never_ends_scores_0_and_an_item_that_is_late_is_an_error(
    bubblewrap: Bubblewrap, tmp_path: Path
) -> None:
    stuck = item("stuck", "import time\ntime.sleep(1000)", [{"output": "1"}])
    async with pool_of(tmp_path, timeout_s=SHORT_S) as pool:
        (result,) = await pool.score("tests", [stuck])
        assert result.HasField("reward")
        assert result.reward.value == 0.0
    scorer = CodeScorer(timeout_s=1000.0)
    pool = WorkerPool({"tests": scorer}, {"tests": SHORT_S}, 1, tmp_path, scorer_environment(()))
    try:
        await pool.start()
        (late,) = await pool.score("tests", [stuck])
        assert late.error.code == "TIMEOUT"
    finally:
        pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its rights up by chroot")
def test_a_machine_on_which_root_cannot_become_nobody_refuses(
    bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandboxes, "CHROOT", str(tmp_path / "chroot"))
    with pytest.raises(ConfigError, match=r"chroot is not installed.*install coreutils"):
        Bubblewrap(CodeScorer()).check(["python3"])


async def test_a_service_without_a_sandbox_does_not_start(tmp_path: Path) -> None:
    scorer = CodeScorer()
    environment = {**scorer_environment(()), "PATH": str(tmp_path)}
    pool = WorkerPool({"tests": scorer}, {"tests": 10.0}, 1, tmp_path, environment)
    try:
        with pytest.raises(ConfigError, match=r"component 'tests' cannot start: .*: bwrap is not installed"):
            await pool.start()
    finally:
        pool.close()
