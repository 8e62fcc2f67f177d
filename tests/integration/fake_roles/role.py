"""What the fake roles have in common. A file `<run dir>/exit-<worker>` makes the worker end with the code it holds:
once, or each time with `always`.
"""

import asyncio
import os
import sys
from pathlib import Path

from rolecall.rpc.role_process import ServiceArgs, parse_args, run

POLL_S = 0.05


def main(role: str) -> int:
    """The exit code of the process."""
    args = parse_args(role)
    return run(lambda: obey(args), role)


async def obey(args: ServiceArgs) -> None:
    """Lives until it is told to end."""
    sys.stderr.write(f"{args.worker} is up as {args.incarnation}\n")
    sys.stderr.flush()
    while True:
        end_if_told(args)
        await asyncio.sleep(POLL_S)


def end_if_told(args: ServiceArgs) -> None:
    """Ends the process when the test says so."""
    file = args.settings.run.dir / f"exit-{args.worker}"
    words = _words(file)
    if not words:
        return
    if "always" not in words:
        file.unlink()
    sys.stderr.write(f"{args.worker} failed: told to end\n")
    sys.stderr.flush()
    os._exit(int(words[0]))


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
