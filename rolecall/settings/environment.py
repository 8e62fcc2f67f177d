"""Every environment variable that RoleCall reads, and the environment it gives to its processes. Nothing else reads
os.environ.
"""

import os
from collections.abc import Mapping
from typing import Any

from rolecall.errors import ConfigError


def from_environment(tree: dict[str, Any]) -> None:
    """ROLECALL_STORE_URL overrides store.url, so that a password need not stand in a file."""
    url = os.environ.get("ROLECALL_STORE_URL")
    if url:
        tree["store"] = {**(tree.get("store") or {}), "url": url}


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `changes`, for a process that it starts."""
    return {**os.environ, **changes}


def incarnation_given() -> str | None:
    """ROLECALL_INCARNATION: the identity that the launcher gave to this start of a role, by which it knows reports
    about it.
    """
    return os.environ.get("ROLECALL_INCARNATION") or None


def parent_to_die_with() -> int | None:
    """ROLECALL_DIE_WITH_PARENT: pid of the launcher whose death must end this process; 1 when its pid is not told;
    absent: None.
    """
    value = os.environ.get("ROLECALL_DIE_WITH_PARENT", "")
    if not value:
        return None
    if not value.isdigit():
        raise ConfigError(f"ROLECALL_DIE_WITH_PARENT is {value!r}; it must be 1 or the pid of the parent")
    return int(value)


def tied_to_this_process() -> dict[str, str]:
    """The environment that a process must find to end with this one, which starts it."""
    return {"ROLECALL_DIE_WITH_PARENT": str(os.getpid())}


def rank_of_process() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; (0, 1, 0) outside it."""
    rank, world_size, local_rank = (
        os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    return int(rank), int(world_size), int(local_rank)


def visible_gpus() -> tuple[int, ...] | None:
    """CUDA_VISIBLE_DEVICES as GPU indices of this machine, in the order torch numbers them; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else tuple(int(index) for index in value.split(",") if index.strip().isdigit())
