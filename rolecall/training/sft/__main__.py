"""One rank of `rolecall sft`: `python -m rolecall.training.sft CONFIG [--resume]`, started by rolecall/commands/sft.py,
under torchrun where they are several.

Owns the order of starting and how a failure is told: a line `sft failed: ...` on stderr, and the exit code.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rolecall import telemetry
from rolecall.errors import ConfigError, RoleCallError, WorkerLostError
from rolecall.lifeline import die_with_parent
from rolecall.settings import SftSettings, load_sft_settings, parent_to_die_with, rank_of_process
from rolecall.terminal import INTERRUPTED, USAGE

START_TIMEOUT_S, IMAGES_TIMEOUT_S = 300.0, 3600.0
"""Seconds until all ranks have met; the longer where examples show images, which rank 0 may have to put away."""
TOKENIZED_BYTES_PER_S = 2e5
"""Bytes of examples that the slowest rank tokenizes in a second, all others being done: a fifth of what a core does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process: 0, 1 failed, 2 bad configuration, 130 interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    faulthandler.enable(2)  # a crash of native code writes where each thread was
    if parent_to_die_with() is not None:
        die_with_parent(os.getppid())
    settings = load_sft_settings(arguments.config)
    rank = rank_of_process()[0]
    worker = "sft" if rank == 0 else f"sft rank {rank}"
    # also where whoever started us ignores it; the other ranks end as rank 0 does, which first tells the trackers
    signal.signal(signal.SIGINT, signal.default_int_handler if rank == 0 else signal.SIG_IGN)
    try:
        telemetry.configure(settings.telemetry, "sft", worker, run=settings.run.name)
        _train(settings, resume=arguments.resume)
    except RoleCallError as error:
        _say(error.message)
        return USAGE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # entry point: whatever ended the rank is said once, here
        traceback.print_exc()
        _say(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _train(settings: SftSettings, *, resume: bool) -> None:
    from rolecall.training.sft.train import SftRank

    SftRank(settings, start_timeout_s(settings), lost=_leave).run(resume=resume)


def start_timeout_s(settings: SftSettings) -> float:
    """Seconds until all ranks have met, each after it has tokenized the examples."""
    evaluation = settings.evaluation
    files = [*settings.data.train, *([] if evaluation is None else [evaluation.path])]
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    return (IMAGES_TIMEOUT_S if settings.shows_images else START_TIMEOUT_S) + num_bytes / TOKENIZED_BYTES_PER_S


def _leave(error: WorkerLostError) -> None:
    """Another rank is lost, and a collective may wait for it: any thread ends this process."""
    _say(error.message)
    logging.shutdown()
    os._exit(1)


def _say(message: str) -> None:
    sys.stderr.write(f"sft failed: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # threads of a process group, ended by the interpreter's teardown, may hang or abort the process after all is done
    os._exit(code)
