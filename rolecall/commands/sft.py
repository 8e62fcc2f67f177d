"""`rolecall sft`: makes the checks of its file, then starts its ranks and waits for them. No torch.

The run directory is laid out as a run's: config.yaml, logs/sft.log, metrics.jsonl, checkpoints/. No store and no
service is needed.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from rolecall.commands.check import require
from rolecall.data.images.spool import without_spools
from rolecall.errors import ConfigError, RoleCallError
from rolecall.identity import settle
from rolecall.launcher.last_words import describe_failure, final_line
from rolecall.launcher.plan import ranks_command, role_environment, write_config
from rolecall.launcher.processes import STARTED, STOP_TIMEOUT_S, Worker
from rolecall.launcher.run_dir import prepare_run_dir, require_place
from rolecall.launcher.tell_trackers import tell_trackers
from rolecall.lifeline import tied
from rolecall.settings import SftSettings, child_environment
from rolecall.terminal import INTERRUPTED, USAGE, say


def sft(settings: SftSettings, *, resume: bool) -> int:
    """Runs `settings` to its end and returns the exit code: 0 done, 130 interrupted. Call it from the main thread.
    ConfigError or RoleCallError says what its ranks failed of.
    """
    require_place(settings, resume=resume)
    say("starting  checking the model and the examples\n")
    require(settings, sys.stdout)
    lock = prepare_run_dir(settings, resume=resume)
    try:
        settle(settings)
        worker = _plan(settings, resume)
        say(f"starting  the ranks, whose log is {worker.log}\n")
        with without_spools(settings.run.dir):
            code = _run(worker)
        if code == 0:
            say(
                f"done: checkpoints in {settings.run.checkpoints}\n"
                f"a run starts from it with model.path MODEL, a new directory:  rolecall export {settings.run.dir} "
                "MODEL\n"
            )
            return 0
        tell_trackers(settings, worker)
        if code == INTERRUPTED:
            say("interrupted: --resume goes on from the newest checkpoint\n")
            return code
        failed = ConfigError if code == USAGE else RoleCallError
        raise failed(final_line(worker) or describe_failure(worker, code))
    finally:
        os.close(lock)


def _plan(settings: SftSettings, resume: bool) -> Worker:
    arguments = ["rolecall.training.sft", str(write_config(settings)), *(["--resume"] if resume else [])]
    # "1": ranks under torchrun are tied to torchrun.
    environment = {**role_environment(settings.actor, settings.actor.num_threads), "ROLECALL_DIE_WITH_PARENT": "1"}
    return Worker(
        "sft",
        "sft",
        ranks_command(settings.actor.num_ranks, arguments),
        environment,
        settings.run.dir / "logs" / "sft.log",
    )


def _run(worker: Worker) -> int:
    """Runs the ranks and returns their exit code, or INTERRUPTED where this process is asked to stop. Progress goes to
    our stdout, everything else to the log.
    """
    with worker.log.open("ab") as log:
        log.write(f"{STARTED} {worker.name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            tied(worker.command),
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=child_environment(worker.environment),
            start_new_session=True,  # else a terminal would interrupt the ranks, too, and twice
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        return process.wait()  # bounded: by the training, whose ranks watch each other
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        return 0 if process.returncode == 0 else INTERRUPTED  # 0: it had just ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
