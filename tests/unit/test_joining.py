"""How long the launcher waits for a process to join."""

import subprocess
import time
from pathlib import Path

from rolecall.launcher.joining import Joining
from rolecall.launcher.processes import Start, Worker
from rolecall.settings import ControllerSection
from rolecall.shifts import ShiftLocks

LIMIT_S = 0.3


def start_of(role: str, process: "subprocess.Popen[bytes]") -> Start:
    """A process that begins now."""
    worker = Worker(role, role, (), {}, Path("/dev/null"))
    return Start(worker, 0, f"{role}-incarnation", process, time.monotonic())


def test_the_wait_for_a_shift_is_not_a_start_that_hangs(tmp_path: Path) -> None:
    joining = Joining(ControllerSection(start_timeout_s=LIMIT_S), tmp_path)
    locks = ShiftLocks(tmp_path)
    with subprocess.Popen(["true"]) as process:
        running = {role: start_of(role, process) for role in ("rollout", "actor")}

        def judged() -> set[str]:
            return {name for name, _ in joining.judge([], running, 0.0, ())}

        until = time.monotonic() + 3 * LIMIT_S
        while time.monotonic() < until:  # without a controller nobody begins
            assert judged() == set()
            time.sleep(0.02)
        assert locks.give_to("trainers")
        while judged() != {"actor"}:  # its own time has begun; the rollout's has not
            assert "rollout" not in judged()
            time.sleep(0.02)
        assert locks.give_to("rollouts")
        while "rollout" not in judged():
            time.sleep(0.02)
    locks.close()
