"""The identity of a run, or of a fine-tuning: the settings that stay as they are, kept in run.dir and in each
checkpoint and compared whenever it goes on.

FIXED and FIXED_OF_SFT are the tables of them; every other setting may change (docs/operations.md, "Checkpoints and
resume"). Of files the contents count, not the path.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.checkpoint.manifest import RUN_ID, Committed, RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.config_file import read_tree
from rolecall.data.model.files import model_shapes
from rolecall.disk import reading, replace_text
from rolecall.errors import ConfigError, NotFoundError
from rolecall.settings import LoraSection, PluginSection, RunSettings, SftSettings

FILE = "identity.json"
"""File in run.dir."""
_NUM_PARTS, _PART_BYTES = 64, 64 * 2**10
_MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "*.safetensors",
)
_UNTOLD = object()
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True)
class Fixed:
    """A setting that stays as it is for as long as a run directory is gone on with."""

    setting: str
    why: str
    """What rests on it."""
    value: Callable[[Any], Any]
    """What is compared, of the settings: of JSON's types."""
    default: Any = _UNTOLD
    """The value of a run that an earlier release kept without this setting, for it knew none: the default, as if it
    had been kept. Not given where such a run may have had any value.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """The same of a section's options, by name."""
    meaning: Callable[[Any], Any] = lambda value: value
    """The part of a value that is compared: how it is written may not matter."""

    def is_kept(self, before: Mapping[str, Any], now: Any) -> bool:
        """Whether the setting, which is `now`, is as it was in the table `before`."""
        was = before.get(self.setting, self.default)
        if isinstance(was, dict) and isinstance(now, dict):
            was = {**self.options, **was}
        return was is _UNTOLD or bool(self.meaning(was) == self.meaning(now))


def _chosen(whens: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """The values that each environment's conditions take, as rolecall/settings/section.py compares them: true is no
    number, and of alternatives the order says nothing.
    """
    return {
        name: {
            field: {
                json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
                for value in (wanted if isinstance(wanted, list) else [wanted])
            }
            for field, wanted in when.items()
        }
        for name, when in whens.items()
    }


_OF_BOTH = (
    Fixed("run.seed", "the order of the data derives from it", lambda settings: settings.run.seed),
    Fixed(
        "model.path", "the checkpoints are of this model", lambda settings: _of_model(settings.model.path, "model.path")
    ),
    Fixed(
        "model.path/additional_chat_templates",
        "they say how tools and conversations are shown",
        lambda settings: _of_named_templates(settings.model.path),
    ),
    Fixed(
        "model.chat_template",
        "it says how conversations are shown",
        lambda settings: settings.model.chat_template and _of_file(settings.model.chat_template),
        default=None,
    ),
    Fixed("data.train", "the place in the data is a number of rows", lambda settings: _of_files(settings.data.train)),
    Fixed("data.prompt_field", "it says what the prompts are", lambda settings: settings.data.prompt_field),
    Fixed("data.system_prompt", "it says what the prompts are", lambda settings: settings.data.system_prompt),
    Fixed(
        "data.preprocess",
        "it says what the prompts are",
        lambda settings: settings.data.preprocess and _of_function(settings.data.preprocess),
        default=None,
    ),
    Fixed(
        "data.images_field", "it says what the prompts are", lambda settings: settings.data.images_field, default=None
    ),
    Fixed("data.shuffle", "the place in the data is a number of rows", lambda settings: settings.data.shuffle),
    Fixed(
        "model.freeze_vision_tower",
        "the checkpoints hold the state of what is trained",
        lambda settings: settings.model.freeze_vision_tower,
        default=False,
    ),
    Fixed(
        "model.freeze_routers",
        "the checkpoints hold the state of what is trained",
        lambda settings: settings.model.freeze_routers,
        default=False,
    ),
    Fixed(
        "actor.lora",
        "the checkpoints hold these adapters",
        lambda settings: settings.actor.lora and settings.actor.lora.as_kept(),
        options=LoraSection().as_kept(),
    ),
    Fixed("actor.optimizer.kind", "the checkpoints hold its state", lambda settings: settings.actor.optimizer.kind),
)
FIXED = (
    Fixed("run.name", "the store's keys carry it", lambda settings: settings.run.name),
    *_OF_BOTH,
    Fixed(
        "environments.*.max_image_bytes",
        "whether one is set says what rows hold and whether a vision tower is trained",
        lambda settings: settings.max_environment_image_bytes > 0,
        default=False,
    ),
    Fixed(
        "environments",
        "prompts in flight name the one that they are played in",
        lambda settings: {
            name: section.model_dump(mode="json")["when"] for name, section in settings.environments.items()
        },
        default={},
        meaning=_chosen,
    ),
    Fixed(
        "data.max_prompts",
        "the place in the data is a number of rows",
        lambda settings: settings.data.max_prompts,
        default=None,
    ),
    Fixed("data.ground_truth_field", "it says what the prompts are", lambda settings: settings.data.ground_truth_field),
    Fixed(
        "sampling.num_responses", "groups in flight have that many", lambda settings: settings.sampling.num_responses
    ),
    Fixed(
        "algorithm.groups_per_batch", "batches are counted in it", lambda settings: settings.algorithm.groups_per_batch
    ),
    Fixed(
        "critic", "the checkpoints hold its state", lambda settings: settings.critic and settings.critic_optimizer.kind
    ),
    Fixed(
        "critic.lora",
        "the checkpoints hold these adapters, of this base",
        lambda settings: _of_critic(settings),
        default=None,
        options=LoraSection().as_kept(),
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


def kept(directory: Path) -> dict[str, Any]:
    """The table that `settle` keeps in the run directory, and the run's id; empty where it keeps none."""
    path = directory / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def run_id(directory: Path) -> str:
    """The id of the run in that directory, which no other run has; empty where `settle` keeps nothing."""
    return str(kept(directory).get(RUN_ID, ""))


def newest_checkpoint(settings: RunSettings | SftSettings) -> Committed | None:
    """The newest checkpoint from the first step on, where `settings` keep them. NotFoundError when it is of
    `rolecall sft` and `settings` are of a run, or the other way round; CheckpointMismatchError when it was changed, or
    it is of another run than run.dir.
    """
    checkpoints = RunCheckpoints(open_storage(settings.run.checkpoints), num_kept=1, run_id=run_id(settings.run.dir))
    steps = [step for step in checkpoints.steps() if step > 0]
    if not steps:
        return None
    newest = checkpoints.read(steps[-1])
    mine, its = (
        "train" if is_of_run else "sft" for is_of_run in (isinstance(settings, RunSettings), "run" in newest.state)
    )
    if mine != its:
        raise NotFoundError(
            f"{settings.run.checkpoints} holds checkpoints of `rolecall {its}`, and `rolecall {mine}` cannot go on "
            "with them; name another run.checkpoint_url"
        )
    checkpoints.require_ours(newest)
    return newest


def adapters_to_begin_with(settings: RunSettings | SftSettings, lora: LoraSection | None) -> LoraSection | None:
    """`lora`, the actor's or the critic's, for whoever makes or checks that trainer: without a folder `start` that is
    gone where there is a checkpoint, which has the adapters and is loaded before they are used. Raises as
    `newest_checkpoint`.
    """
    if lora is None or lora.start is None or lora.start.is_dir() or newest_checkpoint(settings) is None:
        return lora
    return lora.model_copy(update={"start": None})


def settle(settings: RunSettings | SftSettings) -> None:
    """Keeps in run.dir what the run is when it starts there, and compares when it goes on. Raises as
    `require_unchanged`.
    """
    keeps = require_unchanged(settings)
    if keeps != kept(settings.run.dir):
        replace_text(settings.run.dir / FILE, json.dumps(keeps, indent=1) + "\n")


def require_unchanged(settings: RunSettings | SftSettings) -> dict[str, Any]:
    """Compares `settings` with what is kept in run.dir and in the newest checkpoint, and returns what is to be kept.
    ConfigError names what is another, as it was and as it is now; else raises as `newest_checkpoint`.
    """
    directory = settings.run.dir
    table = FIXED if isinstance(settings, RunSettings) else FIXED_OF_SFT
    now = {fixed.setting: _value_now(fixed, settings) for fixed in table}
    config = directory / "config.yaml"
    written = _in_tree(read_tree(config) if config.is_file() else {}, table)
    given = _in_tree(settings.model_dump(mode="json"), table)
    plain = {name for name, value in given.items() if now[name] == value}  # compared as written; files are by contents
    in_dir, newest = kept(directory), newest_checkpoint(settings)
    befores = {
        f"the run in {directory}": in_dir,
        f"the run whose checkpoints are in {settings.run.checkpoints}": newest.identity if newest else {},
    }
    for where, before in befores.items():
        changed = [
            f"{name} ({fixed.why}{_before_and_now((before if name in plain else written).get(name), given.get(name))})"
            for fixed in table
            if before and not fixed.is_kept(before, now[name := fixed.setting])
        ]
        if changed:
            raise ConfigError(
                f"{where} was started with another {', another '.join(changed)}; go on with the same, or start another "
                "run with another run.dir, run.name and, where it is set, run.checkpoint_url (rolecall export makes a "
                "model of this one's checkpoint)"
            )
    # of what was kept nothing changes; the rest is what a release that it began with did not keep
    keeps = {**{name: value for name, value in now.items() if value is not _UNTOLD}, **in_dir}
    if not keeps.get(RUN_ID):  # a run whose directory is lost is still the one that its checkpoints are of
        keeps[RUN_ID] = (newest.run_id if newest else "") or secrets.token_hex(8)
    return keeps


def _value_now(fixed: Fixed, settings: RunSettings | SftSettings) -> Any:
    try:
        return fixed.value(settings)
    except FileNotFoundError as error:
        raise ConfigError(f"{fixed.setting}: there is no file {error.filename} on this machine; give one") from error


def _in_tree(tree: Any, table: tuple[Fixed, ...]) -> dict[str, Any]:
    """Returns what a tree of settings says of those in `table`, by name; what it does not say is left out."""
    found = {}
    for fixed in table:
        value = tree
        for name in fixed.setting.split("."):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[fixed.setting] = value
    return found


def _before_and_now(before: Any, now: Any) -> str:
    """Tells a setting as it was and as it is; empty where it is not known how it was, and for whole sections."""
    if before is None or isinstance(before, dict) or isinstance(now, dict):
        return ""
    return f": {before!r} before, {now!r} now" if before != now else f": {now!r} with other contents before"


def _of_critic(settings: RunSettings) -> Any:
    """The critic's adapters and the model beneath them, which critic.path may name; the actor's is fixed by itself."""
    critic = settings.critic
    if critic is None or critic.lora is None:
        return None
    base = _of_model(critic.path, "critic.path") if critic.path else _of_model(settings.model.path, "model.path")
    return _UNTOLD if base is _UNTOLD else {**critic.lora.as_kept(), "base": base}


def _of_function(section: PluginSection) -> list[str]:
    """The name of a function and its options, which may be of YAML's types that JSON lacks."""
    return [section.name, json.dumps(section.options, sort_keys=True, default=str)]


def _of_files(paths: tuple[Path, ...]) -> str | list[str]:
    digests = [_of_file(path) for path in paths]
    return digests[0] if len(digests) == 1 else digests


def _of_file(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_weights(folder: Path) -> bool:
    """Whether there is a model at all. Whoever loads it says so where there is none; what lies in its place, kept,
    would be another one than the model once that is there.
    """
    return any(folder.glob("*.safetensors"))


def _of_model(folder: Path, setting: str) -> Any:
    """ConfigError where only a part of the weights is there, as while they are copied: kept, it would be another model
    than the whole.
    """
    if not _has_weights(folder):
        return _UNTOLD
    model_shapes(folder, setting)
    files = [file for pattern in _MODEL_FILES for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps([(file.name, _of_large_file(file)) for file in files]).encode()).hexdigest()


def _of_named_templates(folder: Path) -> Any:
    return [_of_file(file) for file in sorted(folder.glob(_NAMED_TEMPLATES))] if _has_weights(folder) else _UNTOLD


def _of_large_file(path: Path) -> str:
    """The digest of a large file's size and of parts all over it: a model is told from another in a second, however
    large they are.
    """
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        for part in range(_NUM_PARTS):
            file.seek(part * max(0, size - _PART_BYTES) // (_NUM_PARTS - 1))
            digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()
