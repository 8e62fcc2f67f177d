"""Waiting for what another task brings about."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Nothing that a test waits for takes longer on a machine that is ten times slower than ours."""
LOOK_S = 0.005
"""Pause between two looks."""


async def until(holds: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """Returns what `holds` returns, once that is true; TimeoutError when it does not become so."""
    async with asyncio.timeout(timeout_s):
        while not (held := holds()):
            await asyncio.sleep(LOOK_S)
    return held
