"""Runs one part of the acceptance and prints its table: `python -m tools.gpu_acceptance --part 1 --out DIR [--dry]
[--only 3 4] [--within SECONDS]`.

Exit code 0 when nothing failed or overran. Imports no torch: what a check does to its process ends with that process.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from rolecall.settings import child_environment
from tools.gpu_acceptance.catalogue import PART_S, Check, part
from tools.gpu_acceptance.findings import Line, read_line, table, write_report
from tools.gpu_acceptance.one import FAILED, SKIPPED

_END_S = 10.0
"""Time for a killed process to be gone: the driver takes its memory back first."""


def run_part(checks: Sequence[Check], folder: Path, *, dry: bool, part_s: float = PART_S) -> list[Line]:
    """Runs `checks` one after the other within `part_s` and prints a line for each.

    What one leaves of its budget is there for those after it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + part_s
    lines = []
    for index, check in enumerate(checks):
        kept_s = sum(later.budget_s for later in checks[index + 1 :])
        limit_s = deadline - time.monotonic() - kept_s
        print(f"{check.number:2d} {check.name} ...", flush=True)
        lines.append(_run(check, folder, dry, limit_s))
        print(f"   {lines[-1].verdict} after {lines[-1].seconds:.0f} s {'; '.join(lines[-1].reasons)}", flush=True)
    return lines


def _run(check: Check, folder: Path, dry: bool, limit_s: float) -> Line:
    found, log = folder / f"check-{check.number:02d}.json", folder / f"check-{check.number:02d}.log"
    found.unlink(missing_ok=True)
    if limit_s <= 0:
        return read_line(check.number, check.name, 0.0, found, "overran: the part's time was used up before it began")
    started = time.monotonic()
    with log.open("w") as output, tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
        command = [
            sys.executable,
            "-m",
            "tools.gpu_acceptance.one",
            check.target,
            str(found),
            scratch,
            *(["--dry"] if dry else []),
        ]
        environment = child_environment({"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"})
        # A session of its own: whatever it started ends with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            end = _how_it_ended(process.wait(limit_s), log)
        except subprocess.TimeoutExpired:
            end = f"overran {limit_s:.0f} s"
        finally:
            _kill_session(process)
    return read_line(check.number, check.name, time.monotonic() - started, found, end)


def _how_it_ended(code: int, log: Path) -> str | None:
    last = next(
        (line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "it said nothing"
    )
    if code == 0:
        return None
    if code == SKIPPED:
        return f"skipped: {last}"
    if code == FAILED:
        return last
    return f"ended by {signal.Signals(-code).name}: {last}" if code < 0 else f"ended with code {code}: {last}"


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _heading(number: int, dry: bool) -> str:
    where = "dry, on CPUs" if dry else _gpu()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    cores = len(os.sched_getaffinity(0))
    return f"GPU acceptance, part {number}: {where}; {packages}, Python {platform.python_version()}, {cores} cores"


def _gpu() -> str:
    """Name, driver and memory of the first GPU, as the driver's own tool says it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"no GPU that nvidia-smi knows ({error})"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=range(1, 9), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the figures and the logs")
    parser.add_argument("--dry", action="store_true", help="on CPUs, with tiny shapes: does it still run?")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of checks")
    parser.add_argument("--within", type=float, default=PART_S, metavar="SECONDS", help="of all its checks together")
    arguments = parser.parse_args(argv)
    checks = [check for check in part(arguments.part) if arguments.only is None or check.number in arguments.only]
    lines = run_part(checks, arguments.out, dry=arguments.dry, part_s=arguments.within)
    heading = _heading(arguments.part, arguments.dry)
    path = write_report(arguments.out, arguments.part, heading, lines)
    print(f"\n{heading}\n\n{table(lines)}\n{path}")
    return int(any(line.verdict in ("failed", "overran") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
