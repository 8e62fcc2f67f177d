"""A scorer's worker process: `python -m services.reward.worker`, started by the pool and killed by it at an item's
deadline.

Speaks frames (see `frames.py`) on the stdin and stdout it was born with. Those are moved away before any scorer is
imported: what a user's function prints goes to stderr, and it cannot read the service's requests. Holds no state
between items; dies with its parent.
"""

import asyncio
import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field

from rolecall.errors import ConfigError
from rolecall.lifeline import die_with_parent
from rolecall.settings import Section
from rolecall.v1 import reward_pb2
from services.reward.catalog import Bound, LocalScorer, bind_many, describe
from services.reward.frames import FrameBuffer, WorkerReady, frame

READ_BYTES = 1 << 16
MAX_PRINTED_CHARS = 4096
"""Characters that reach the log of what one call of a scorer prints."""


class WorkerSetup(Section):
    """The first message of the pool to a worker."""

    components: dict[str, Annotated[LocalScorer, Field(discriminator="kind")]]
    """Scorers by component; a frame's component is the index in this order."""
    timeouts_s: dict[str, float]
    """Deadlines of an item, by component."""
    search_path: Path
    """Folder in which users' modules are found first, and in which they run."""


class Printed(io.TextIOWrapper):
    """A stdout for users' functions, which may print something for each response: all of it would fill a disk. No
    reward depends on it: what cannot be written is lost.
    """

    num_chars = 0
    """Characters that the present call has printed."""

    def write(self, text: str) -> int:
        """Passes on what the call may still print."""
        with suppress(OSError):  # a full disk, say
            super().write(text[: max(0, MAX_PRINTED_CHARS - self.num_chars)])
        self.num_chars += len(text)
        return len(text)

    def end_call(self) -> None:
        """Tells how much was left out, and begins anew."""
        num_left_out, self.num_chars = self.num_chars - MAX_PRINTED_CHARS, 0
        with suppress(OSError, ValueError):  # ValueError: a user's module closed it, or took its buffer
            if num_left_out > 0:
                super().write(f"\n[{num_left_out:,} more characters were printed]\n")
            self.flush()


def main() -> int:
    """Serves frames until stdin closes. Exit code 0."""
    die_with_parent(int(sys.argv[1]))
    logging.basicConfig(format="reward worker %(process)d: %(message)s", level=logging.INFO)
    requests, answers = _take_pipes()
    stdout = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    sys.stdout = printed = Printed(stdout, "utf-8", "backslashreplace", line_buffering=True)
    buffer = FrameBuffer()
    scorers: list[Bound] = []
    ready = False
    # one event loop for as long as the process lives: connections that a coroutine function keeps are of a loop
    with asyncio.Runner() as runner:
        while data := os.read(requests, READ_BYTES):
            for component, payload in buffer.feed(data):
                if not ready:
                    scorers, ready = _set_up(payload, answers, runner), True
                    printed.end_call()
                    continue
                results = scorers[component].score(reward_pb2.ScoreRequest.FromString(payload).items)
                printed.end_call()
                _write(answers, frame(reward_pb2.ScoreResponse(results=results).SerializeToString()))
    return 0


def _take_pipes() -> tuple[int, int]:
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, answers


def _set_up(payload: bytes, answers: int, runner: asyncio.Runner) -> list[Bound]:
    setup = WorkerSetup.model_validate_json(payload)
    sys.path.insert(0, str(setup.search_path))
    os.chdir(setup.search_path)
    scorers = {}
    for name, scorer in setup.components.items():
        try:
            scorers[name] = bind_many(scorer, describe(name, scorer), setup.timeouts_s[name], runner)
        except ConfigError as error:
            _give_up(answers, name, error.message)
        except Exception as error:  # the entry point of modules that are not ours: any of them may fail to import
            logging.exception("component %s cannot start", name)
            _give_up(answers, name, f"{type(error).__name__}: {error}")
    awaited = tuple(name for name, bound in scorers.items() if bound.is_awaited)
    _write(answers, frame(WorkerReady(awaited=awaited).model_dump_json().encode()))
    return list(scorers.values())


def _give_up(answers: int, name: str, why: str) -> NoReturn:
    ready = WorkerReady(problem=f"component {name!r} cannot start: {why}")
    _write(answers, frame(ready.model_dump_json().encode()))
    sys.exit(1)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main())
