"""The identity of a run, or of a fine-tuning: the settings that stay as they are, kept beside it and compared whenever
it goes on.

FIXED and FIXED_OF_SFT are the tables of them; every other setting may change (docs/operations.md, "Checkpoints and
resume"). Of files the contents count, not the path.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.config_file import read_tree
from rolecall.disk import replace_text
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings, SftSettings

FILE = "identity.json"
"""File in run.dir."""
_NUM_PARTS, _PART_BYTES = 64, 64 * 2**10
_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "*.safetensors")


@dataclass(frozen=True)
class Fixed:
    """A setting that stays as it is for as long as a run directory is gone on with."""

    setting: str
    why: str
    """What rests on it."""
    value: Callable[[Any], Any]
    """What is compared, of the settings: of JSON's types."""


_OF_BOTH = (
    Fixed("run.seed", "the order of the data derives from it", lambda settings: settings.run.seed),
    Fixed("model.path", "the checkpoints are of this model", lambda settings: _of_model(settings.model.path)),
    Fixed("data.train", "the place in the data is a number of rows", lambda settings: _of_file(settings.data.train)),
    Fixed("data.prompt_field", "it says what the prompts are", lambda settings: settings.data.prompt_field),
    Fixed("data.system_prompt", "it says what the prompts are", lambda settings: settings.data.system_prompt),
    Fixed("data.shuffle", "the place in the data is a number of rows", lambda settings: settings.data.shuffle),
    Fixed(
        "actor.lora",
        "the checkpoints hold these adapters",
        lambda settings: settings.actor.lora and settings.actor.lora.model_dump(mode="json"),
    ),
    Fixed("actor.optimizer.kind", "the checkpoints hold its state", lambda settings: settings.actor.optimizer.kind),
)
FIXED = (
    Fixed("run.name", "the store's keys carry it", lambda settings: settings.run.name),
    *_OF_BOTH,
    Fixed("data.ground_truth_field", "it says what the prompts are", lambda settings: settings.data.ground_truth_field),
    Fixed(
        "sampling.num_responses", "groups in flight have that many", lambda settings: settings.sampling.num_responses
    ),
    Fixed(
        "algorithm.groups_per_batch", "batches are counted in it", lambda settings: settings.algorithm.groups_per_batch
    ),
    Fixed(
        "critic", "the checkpoints hold its state", lambda settings: settings.critic and settings.actor.optimizer.kind
    ),
    Fixed("store.num_shards", "rows are spread by it", lambda settings: settings.store.num_shards),
)
"""The settings of a run."""
FIXED_OF_SFT = (
    *_OF_BOTH,
    Fixed(
        "model.chat_template_kwargs",
        "it says how the examples are rendered",
        lambda settings: json.dumps(settings.model.chat_template_kwargs, sort_keys=True),
    ),
    Fixed("data.response_field", "it says what the examples are", lambda settings: settings.data.response_field),
    Fixed("data.max_tokens", "it says which examples are left out", lambda settings: settings.data.max_tokens),
    Fixed("data.batch_size", "the place in the data is counted in it", lambda settings: settings.data.batch_size),
)
"""The settings of `rolecall sft`."""


def settle(settings: RunSettings | SftSettings) -> None:
    """Keeps in run.dir what the run is when it starts there, and compares when it goes on. ConfigError names what is
    another, as config.yaml there has it and as it is now.
    """
    path = settings.run.dir / FILE
    table = FIXED if isinstance(settings, RunSettings) else FIXED_OF_SFT
    now = {fixed.setting: fixed.value(settings) for fixed in table}
    if not path.is_file():
        replace_text(path, json.dumps(now, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    changed = [
        f"{fixed.setting} ({fixed.why}{_before_and_now(settings, fixed.setting)})"
        for fixed in table
        if fixed.setting in before and not _same(before[fixed.setting], now[fixed.setting])
    ]
    if changed:
        raise ConfigError(
            f"the run in {settings.run.dir} was started with another {', another '.join(changed)}; go on with the "
            "same, or start another run with another "
            "run.dir and run.name (rolecall export makes a model of this one's checkpoint)"
        )


def _before_and_now(settings: RunSettings | SftSettings, setting: str) -> str:
    """Tells `setting` as it was written to run.dir and as it is; empty where it was not, and for whole sections."""
    path = settings.run.dir / "config.yaml"
    before: Any = read_tree(path) if path.is_file() else {}
    now: Any = settings.model_dump(mode="json")
    for name in setting.split("."):
        before, now = (tree.get(name) if isinstance(tree, dict) else None for tree in (before, now))
    if before is None or isinstance(before, dict) or isinstance(now, dict):
        return ""
    return f": {before!r} before, {now!r} now" if before != now else f": {now!r} with other contents before"


def _same(before: Any, now: Any) -> bool:
    """Whether a section is as it was kept: an option that a newer release has added was at its default."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and now[name] == value for name, value in before.items())
    return bool(before == now)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_model(folder: Path) -> str:
    files = [file for pattern in _MODEL_FILES for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps([(file.name, _of_large_file(file)) for file in files]).encode()).hexdigest()


def _of_large_file(path: Path) -> str:
    """The digest of a large file's size and of parts all over it: a model is told from another in a second, however
    large they are.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(_NUM_PARTS):
            file.seek(part * max(0, size - _PART_BYTES) // (_NUM_PARTS - 1))
            digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()
