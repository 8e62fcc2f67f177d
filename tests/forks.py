"""Processes for ranks and whole trainers, forked from one that has imported torch and what they need already: an import
takes a rank some seconds of a core, a fork none. It starts no thread, so a child is as a fresh process is.
"""

import faulthandler
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.integration.exact_ranks",
        "tests.integration.parallel_ranks",
        "tests.integration.weights_receivers",
        "transformers.models.qwen3.modeling_qwen3",
        "services.actor.ranks",
        "services.critic.ranks",
        "services.reference.ranks",
    ]
)

LINE_S = 120.0
"""Longest silence of a talking process."""
RANKS_S = 200.0
"""Deadline of ranks that train tiny models, on a busy machine."""


def forked(log: Path, target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Starts a process for `target`; what it says goes to `log`."""
    process = FORKS.Process(target=_run, args=(str(log), target, *arguments))
    process.start()
    return process


def forked_role(role: str, log: Path, environment: Mapping[str, str], *argv: str) -> ForkServerProcess:
    """Starts `role` as its entry point runs it, by the command line `argv`, in a session of its own which ends with the
    server of forks.
    """
    return forked(log, _run_role, role, {**environment, "ROLECALL_DIE_WITH_PARENT": "1"}, argv)


def _run_role(role: str, environment: dict[str, str], argv: Sequence[str]) -> None:
    os.setsid()
    os.environ.update(environment)
    os._exit(importlib.import_module(f"services.{role}.__main__").main(argv))


class Talking:
    """A forked process that says lines, of JSON."""

    def __init__(self, log: Path, target: Callable[..., None], *arguments: Any) -> None:
        """Starts `target`, whose first argument is the end of a pipe (`saying`); its stderr goes to `log`."""
        self._said, theirs = FORKS.Pipe(duplex=False)
        self._log = log
        self.process = forked(log, target, theirs, *arguments)
        theirs.close()

    def line(self) -> Any:
        """Returns the next line."""
        try:
            assert self._said.poll(LINE_S), f"silent for {LINE_S:.0f} s"
            return json.loads(self._said.recv_bytes())
        except EOFError:
            raise AssertionError(ending(self.process, self._log)) from None

    def rest(self) -> list[Any]:
        """Returns the lines that a process had still said when it ended."""
        lines = []
        with suppress(EOFError):
            while True:
                lines.append(json.loads(self._said.recv_bytes()))  # bounded: it has ended
        return lines

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self.process.kill()
        self.process.join(30)


def ending(process: ForkServerProcess, log: Path) -> str:
    """How a process ended that has closed its pipe, for a failure's message."""
    process.join(LINE_S)
    return f"it ended with exit code {process.exitcode}: {log.read_text()[-3000:]}"


def saying(pipe: Connection) -> Callable[[Any], None]:
    """What a talking process says its lines by."""
    return lambda line: pipe.send_bytes(json.dumps(line).encode())


def run_script(path: str, *words: str) -> None:
    """Runs a Python file as its command line does, in a process of its own."""
    sys.argv, sys.path[:0] = [path, *words], [str(Path(path).parent)]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    sys.stdout.flush()
    os._exit(code)


def run_ranks(folder: Path, world_size: int, target: Callable[..., None], *arguments: Any) -> None:
    """Runs `target` on ranks in processes of their own, each with its number as the last argument, and checks that all
    end well; what rank r says stands in rank-r.log in `folder`.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    ranks = [forked(log, target, *arguments, rank) for rank, log in enumerate(logs)]
    try:
        for process in ranks:
            process.join(RANKS_S)
    finally:
        for process in ranks:
            process.kill()
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world_size, "".join(log.read_text()[-2000:] for log in logs)


def _run(log: str, target: Callable[..., None], *arguments: Any) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable(2)
    try:
        target(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # Gloo's threads, ended by the interpreter's teardown, now and then abort the process after all is done
