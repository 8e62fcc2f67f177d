"""Every environment variable that RoleCall reads, and the environment it gives to its processes. Nothing else reads
os.environ.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError


def from_environment(tree: dict[str, Any]) -> None:
    """ROLECALL_STORE_URL overrides store.url, so that a password need not stand in the configuration; so does what the
    file holds that ROLECALL_STORE_URL_FILE names.
    """
    url, file = os.environ.get("ROLECALL_STORE_URL"), os.environ.get("ROLECALL_STORE_URL_FILE")
    if not url and file:
        try:
            url = Path(file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"ROLECALL_STORE_URL_FILE: cannot read {file}: {error.strerror}; name a file that holds the store's URL"
            ) from error
    if url:
        tree["store"] = {**(tree.get("store") or {}), "url": url}


def token_variable(component: str) -> str:
    """Name of the variable that may hold the bearer token of a component's scorer."""
    return f"ROLECALL_TOKEN_{re.sub(r'[^A-Za-z0-9]', '_', component).upper()}"


def token_given(component: str) -> str | None:
    """The bearer token of a component's scorer, where its variable holds one."""
    return os.environ.get(token_variable(component), "").strip() or None


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `changes`, for a process that it starts."""
    return {**os.environ, **changes}


_SCORERS = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_CACHE",
        "NLTK_DATA",
        "TOKENIZERS_PARALLELISM",
        "DO_NOT_TRACK",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    ]
)
_SCORERS_BEGIN = ("LC_", "PYTHON", "XDG_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_")
"""Variables that code of others may read: where programs, modules, certificates, caches and devices are. What is not
named is not given, for it may be a secret: store URLs, keys of clouds and trackers, tokens.
"""


def scorer_environment(names: Collection[str], changes: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a process that runs scorers, with the variables of these names besides and `changes`.
    ConfigError when one of `names` is not set.
    """
    absent = sorted(set(names) - os.environ.keys())
    if absent:
        raise ConfigError(
            f"reward.environment names {', '.join(absent)}, which the reward service does not have; set it where the "
            "service is started, or take it out"
        )
    given = {
        name: value
        for name, value in os.environ.items()
        if name in _SCORERS or name in names or name.startswith(_SCORERS_BEGIN)
    }
    return {**given, **changes}


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
    """CUDA_VISIBLE_DEVICES as GPU indices of this machine, in the order torch numbers them; None when it is not set.
    ConfigError when it names GPUs otherwise: nothing here knows their numbers.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    given = [each.strip() for each in value.split(",")]
    named = next((each for each in given if each.startswith(("GPU-", "MIG-"))), None)
    if named is not None:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES names {named}, and devices are numbers; write in both the numbers of the GPUs as "
            "nvidia-smi counts them"
        )
    return tuple(int(each) for each in given if each.isdigit())


def require_visible(devices: Collection[int], name: str) -> None:
    """ConfigError when CUDA_VISIBLE_DEVICES leaves out one of the GPUs `devices` that `name` is given."""
    visible = visible_gpus() if devices else None
    hidden = set() if visible is None else set(devices) - set(visible)
    if hidden:
        raise ConfigError(
            f"{name} names GPU {min(hidden)}, which CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} "
            "leaves out; name others, or unset it: devices are the machine's own numbers"
        )
