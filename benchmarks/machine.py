"""The machine that a benchmark ran on, in two lines."""

import os
import platform
import sys
from pathlib import Path

import redis


def describe() -> list[str]:
    """Processor, cores, kernel, load, Python and redis-py."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return [
        f"machine: {model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}; load before "
        f"{os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}, redis-py {redis.__version__} with hiredis",
    ]
