"""The end of a run, told to its trackers in the place of a process that ended before it could."""

import subprocess
from contextlib import suppress

from rolecall.launcher.plan import ranks_command
from rolecall.launcher.processes import Worker
from rolecall.lifeline import tied
from rolecall.settings import RunSettings, SftSettings, child_environment
from rolecall.trackers.tracker import shows_a_run_that_goes_on

TIMEOUT_S = 60.0
"""Time for the trackers to be told, their libraries' import included."""


def tell_trackers(settings: RunSettings | SftSettings, ended: Worker) -> None:
    """Has a process show the trackers that the run failed, where `ended`, which had them open, left it as going on.
    What it says goes to that one's log. Blocks. A full disk, of which that one may have died, costs the telling alone.
    """
    if not shows_a_run_that_goes_on(settings.run.dir):
        return
    kind = ["--sft"] if isinstance(settings, SftSettings) else []
    command = ranks_command(1, ["rolecall.trackers", str(settings.run.dir / "config.yaml"), *kind])
    with suppress(OSError, subprocess.TimeoutExpired), ended.log.open("ab") as log:
        subprocess.run(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(ended.environment),
            timeout=TIMEOUT_S,
            check=False,
        )
