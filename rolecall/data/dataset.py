"""Prompts on disk, one a row.

Owns the fields and what makes a row unusable; every complaint names the file, the line (from 1), the field and what to
do. Files are read in row_files.py. `rolecall check` and the controller both read through here, so that what passes the
one is taken by the other. The order of prompts and their rendering are the controller's.
"""

import heapq
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from rolecall.data.code_tests import read_tests, require_language
from rolecall.data.images.files import ImageFile, parts, read_images
from rolecall.data.row_files import Row, rows_of, told
from rolecall.errors import ConfigError
from rolecall.settings import (
    COMPARING,
    CodeScorer,
    DataSection,
    DistillationSection,
    EnvironmentSection,
    RewardSection,
    RunSettings,
    shadows_of,
)
from rolecall.settings.data import IMAGE_MARK
from rolecall.settings.reward.presets import INSTRUCTIONS, INSTRUCTIONS_FIELD

UID_FIELD = "uid"
"""The field of a prompt's id, where it has one."""
MAX_DEPTH = 24
"""Lists and objects in each other in a field of a prompt: protobuf reads messages 100 deep, and an object takes three.
"""

logger = logging.getLogger(__name__)

_OF_CONVERSATIONS = ("tool_calls", "reasoning_content")
"""Fields of a message that are shown in conversations alone (conversations.py)."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One row of the dataset, read and checked, not yet rendered."""

    uid: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) of each turn; the text of one that shows images says IMAGE_MARK in their places."""
    ground_truth: str
    metadata: Mapping[str, Any]
    """The row's other fields."""
    where: str = field(default="", compare=False)
    """File and line, for complaints."""
    other_ground_truths: tuple[str, ...] = ()
    """Further answers that are as right as ground_truth."""
    images: tuple[ImageFile, ...] = ()
    """The images that the messages show, in their order."""
    environment: str = ""
    """Name of the environment that it is played in; empty: it is answered once."""

    @property
    def said(self) -> list[dict[str, str]]:
        """The messages as people and scorers read them."""
        return [{"role": role, "content": content} for role, content in self.messages]

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them: a text that shows images as a list of its parts."""
        return [
            {"role": role, "content": parts(content) if self.images else content} for role, content in self.messages
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes that the prompt takes as a message, without its token ids and images: an upper bound."""
        return _num_bytes((self.uid, self.messages, self.ground_truth, self.other_ground_truths, self.metadata))

    @property
    def image_bytes(self) -> int:
        """Bytes that its images take in each of its rows."""
        return sum(8 + image.num_bytes for image in self.images)


def _num_bytes(value: object) -> int:
    """Bytes of `value` in a protobuf Struct, at most: what it says and 16 for tags and lengths."""
    if isinstance(value, str):  # first, for most are
        return 16 + (len(value) if value.isascii() else len(value.encode(errors="replace")))
    if isinstance(value, Mapping):
        return 16 + sum(_num_bytes(str(key)) + _num_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 16 + sum(map(_num_bytes, value))
    return 16 if isinstance(value, (int, float)) else 16 + len(str(value).encode(errors="replace"))


def load_training_prompts(settings: RunSettings, tell: Callable[[str], None] = lambda what: None) -> list[RawPrompt]:
    """The rows of `data.train` that the run is trained on, in their order. ConfigError, and `tell`, as of
    `load_prompts`.
    """
    return load_prompts(
        settings.data.train,
        settings.data,
        settings.reward,
        settings.algorithm.distillation,
        environments=settings.environments,
        max_prompts=settings.data.max_prompts,
        tell=tell,
    )


def load_prompts(
    files: Path | tuple[Path, ...],
    data: DataSection,
    reward: RewardSection,
    distillation: DistillationSection | None = None,
    *,
    environments: Mapping[str, EnvironmentSection] = {},
    counts_images: bool = False,
    max_prompts: int | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> list[RawPrompt]:
    """All rows of `files` in their order, or `max_prompts` of them, drawn the same each time; no other is looked at.
    Nothing is kept of their images but how many where it `counts_images`. ConfigError names the line (from 1) and the
    field that is wrong.

    At most one of `environments` may take a prompt. A component of `reward` must apply to every prompt, and a ground
    truth must be there when one compares with it; what scorers elsewhere need is theirs to say. A teacher must be there
    for every prompt that is trained on with `distillation`. `tell` as in `told`.
    """
    left_out: set[str] = set()
    paths = (files,) if isinstance(files, Path) else files
    setting = "data.train and evaluation.sets.*.path"
    folders = [None if counts_images else path.parent for path in paths]
    rows = told(rows_of(files, setting, data.preprocess, data.images_field), tell)
    prompts = [
        _parse(
            row,
            where,
            folders[place - 1],
            line if place == 1 else f"{place}:{line}",
            data,
            reward,
            environments,
            left_out,
        )
        for place, line, where, row in (rows if max_prompts is None else _drawn(rows, max_prompts))
    ]
    for name in sorted(left_out):
        logger.warning(
            "field %r of %s: whole numbers that a float64 rounds, as messages hold them, are left out of the metadata; "
            "write them as text if a scorer reads them",
            name,
            ", ".join(map(str, paths)),
        )
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.uid in seen:
            raise ConfigError(
                f"{seen[prompt.uid]} and {prompt.where} share the {UID_FIELD} {prompt.uid!r}; make it unique or remove "
                "the field"
            )
        seen[prompt.uid] = prompt.where
        if distillation is not None:
            _check_teacher(prompt, distillation)
    return prompts


def _drawn(rows: Iterable[Row], num: int) -> list[Row]:
    """`num` of the rows, in their order: those that one shuffle puts first, which is the same for every run, so that a
    smaller draw lies within a larger one. No more are held.
    """
    shuffle = random.Random(0)
    first = heapq.nsmallest(num, ((shuffle.random(), place, row) for place, row in enumerate(rows)))
    return [row for _, _, row in sorted(first, key=itemgetter(1))]


def _check_teacher(prompt: RawPrompt, distillation: DistillationSection) -> None:
    value = prompt.metadata.get(distillation.field) if distillation.field is not None else None
    if distillation.teacher_of(value) is None:
        named = "missing" if value is None else f"{value!r}, which is none of {sorted(distillation.teachers)}"
        raise ConfigError(
            f"{prompt.where}, field {distillation.field!r}: {named}, so the prompt has no teacher; mend it, add it "
            "to algorithm.distillation.teachers, or set "
            "algorithm.distillation.teacher for all others"
        )


def _parse(
    row: dict[str, Any],
    where: str,
    folder: Path | None,
    default_uid: str,
    data: DataSection,
    reward: RewardSection,
    environments: Mapping[str, EnvironmentSection],
    left_out: set[str],
) -> RawPrompt:
    """The prompt of a row; fields that no message holds as they are are added to `left_out`."""
    if data.prompt_field not in row:
        raise ConfigError(
            f"{where}: no field {data.prompt_field!r} (fields: {sorted(row)}); set data.prompt_field or mend the line"
        )
    place = f"{where}, field {data.prompt_field!r}"
    messages = parse_messages(row[data.prompt_field], place, shows_images=data.images_field is not None)
    num_shown = sum(content.count(IMAGE_MARK) for _, content in messages)
    images = images_of(row, where, folder, data.images_field, num_shown, place)
    if data.system_prompt is not None and messages[0][0] != "system":
        messages = (("system", data.system_prompt), *messages)
    known = {data.prompt_field, data.ground_truth_field, data.images_field, UID_FIELD}
    metadata = {sys.intern(key): value for key, value in row.items() if key not in known and value is not None}
    for part in reward.components.values():
        if isinstance(part.scorer, CodeScorer) and isinstance(tests := metadata.get(part.scorer.tests), Mapping):
            # as text: a message knows float64 alone, and calls are made with the numbers that were written
            metadata[part.scorer.tests] = json.dumps(tests, default=str)
    for name, value in list(metadata.items()):
        _check_carried(value, f"{where}, field {name!r}")
        if _is_rounded(value):
            left_out.add(name)
            del metadata[name]
    environment = _environment(environments, metadata, where)
    truths = _ground_truths(row, where, data, _comparing(reward, metadata, environment, where))
    truth = truths[0] if truths else ""
    uid = _uid(row, where, default_uid)
    return RawPrompt(uid, messages, truth, metadata, where, truths[1:], images, environment)


def _environment(environments: Mapping[str, EnvironmentSection], metadata: Mapping[str, Any], where: str) -> str:
    """The name of the environment that takes a prompt with these fields; empty where none does. ConfigError where more
    than one does.
    """
    taking = [name for name, section in environments.items() if section.takes(metadata)]
    if len(taking) > 1:
        fields = sorted({field for name in taking for field in environments[name].when})
        found = ", ".join(f"{field}: {metadata.get(field)!r}" for field in fields) or "they have no when"
        raise ConfigError(
            f"{where}: the environments {' and '.join(taking)} take the prompt ({found}), which can be played in one; "
            f"mend the line, or narrow environments.{taking[0]}.when or environments.{taking[1]}.when"
        )
    return taking[0] if taking else ""


def images_of(
    row: Mapping[str, Any], where: str, folder: Path | None, field: str | None, num_shown: int, place: str
) -> tuple[ImageFile, ...]:
    """The images in `field` of a row, whose messages, which stand at `place`, show `num_shown`. ConfigError where it
    has more, or fewer.
    """
    if field is None:
        return ()
    images = read_images(row.get(field), folder, f"{where}, field {field!r}")
    if num_shown != len(images):
        raise ConfigError(
            f"{place}: the messages show {num_shown} images, by {IMAGE_MARK} in a text or a part {{type: image}}, and "
            f"field {field!r} has {len(images)}; show each once, in their order"
        )
    return images


def _check_carried(value: object, field: str, depth: int = 0) -> None:
    """ConfigError when no message could carry what `field` holds."""
    if isinstance(value, str):  # first, for most are
        return
    if isinstance(value, (Mapping, list, tuple)):
        if depth == MAX_DEPTH:
            raise ConfigError(f"{field}: nested more than {MAX_DEPTH} deep; flatten it, or write it as text")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_carried(item, field, depth + 1)
    elif isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{field}: a number that no message holds, as NaN or one beyond a float64; write text")


def _is_rounded(value: object) -> bool:
    """Whether there is a whole number in `value` that a float64 rounds."""
    if isinstance(value, str):
        return False
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_is_rounded, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int) and float(value) != value


def _comparing(reward: RewardSection, metadata: Mapping[str, Any], environment: str, where: str) -> str | None:
    """The first component that compares the prompt's responses with a ground truth. ConfigError when none scores
    them.
    """
    applying = {name: part for name, part in reward.components.items() if part.applies_to(metadata, environment)}
    if reward.components and not applying.keys() - shadows_of(reward.components):
        fields = sorted({field for part in reward.components.values() for field in part.when})
        found = [f"{field}: {metadata.get(field)!r}" for field in fields]
        widened = "a when of reward.components"
        if any(part.is_given for part in reward.components.values()):
            found.append(f"environment: {environment or 'none'}")
            widened += ", or of the environment that is to play it" if not environment else ""
        raise ConfigError(
            f"{where}: no component of the reward applies to the prompt ({', '.join(found)}); mend the line, or widen "
            f"{widened}"
        )
    if any(part.scorer.kind == "ifeval" for part in applying.values()):
        _check_instructions(metadata, where)
    for part in applying.values():
        if isinstance(part.scorer, CodeScorer):
            _check_tests(metadata, part.scorer, where)
    return next((name for name, part in applying.items() if part.scorer.kind in COMPARING), None)


def _check_instructions(metadata: Mapping[str, Any], where: str) -> None:
    """ConfigError when kind ifeval could not check every instruction of the prompt."""
    names = metadata.get(INSTRUCTIONS_FIELD)
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{where}, field {INSTRUCTIONS_FIELD!r}: no list of instructions, which kind ifeval checks; write one, or "
            "leave the prompt to another component by when"
        )
    unknown = sorted({str(name) for name in names} - INSTRUCTIONS)
    given = metadata.get("kwargs")
    if unknown or (given is not None and (not isinstance(given, list) or len(given) != len(names))):
        wrong = f"kind ifeval has no check of {unknown}" if unknown else "kwargs has not one entry per instruction"
        raise ConfigError(f"{where}, field {INSTRUCTIONS_FIELD!r}: {wrong}; mend the line or leave it out")


def _check_tests(metadata: Mapping[str, Any], scorer: CodeScorer, where: str) -> None:
    """ConfigError when kind code could not run the prompt's tests."""
    try:
        require_language(read_tests(metadata.get(scorer.tests)), scorer.language)
    except ValueError as error:
        raise ConfigError(
            f"{where}, field {scorer.tests!r}: {error}; write a list of tests, or leave the prompt to another "
            "component by when"
        ) from error


def _uid(row: dict[str, Any], where: str, default: str) -> str:
    uid = row.get(UID_FIELD)
    if uid is None:
        return default
    if not isinstance(uid, str | int):
        raise ConfigError(f"{where}, field {UID_FIELD!r}: a {type(uid).__name__}, not text or a whole number; mend it")
    return str(uid)


def _ground_truths(row: dict[str, Any], where: str, data: DataSection, comparing: str | None) -> tuple[str, ...]:
    """Every answer that is right, none of them empty."""
    truth = row.get(data.ground_truth_field)
    several = truth if isinstance(truth, list) else [] if truth is None else [truth]
    field = f"{where}, field {data.ground_truth_field!r}"
    for each in several:
        if not isinstance(each, str):
            raise ConfigError(
                f"{field}: {_named(each)}, not a string; write it as text, or several right answers as a list of texts"
            )
        if not each and len(several) > 1:
            raise ConfigError(f"{field}: an empty text among several answers; remove it")
    if comparing is not None and not any(several):
        raise ConfigError(
            f"{field}: {'missing' if truth is None else 'empty'}, and "
            f"reward.components.{comparing} compares with it; "
            "write it in every line, or set data.ground_truth_field"
        )
    return tuple(filter(None, several))


def parse_messages(value: object, where: str, *, shows_images: bool = False) -> tuple[tuple[str, str], ...]:
    """(role, content) of each turn of a prompt, which is text or a list of messages; with `shows_images` a content may
    be a list of parts, and says IMAGE_MARK for each that is an image. ConfigError says what it is instead.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where}: {_named(value)}, neither text nor a list of messages; write text or [{{role: text, content: "
            f"text}}, ...]"
        )
    messages = []
    for message in value:
        lost = [name for name in _OF_CONVERSATIONS if isinstance(message, dict) and message.get(name)]
        if lost:
            raise ConfigError(
                f"{where}: a message has {lost[0]}, which a list of {{role, content}} does not show; leave it out, or "
                'give `rolecall sft` a conversation (docs/configuration.md, "Conversations and tools")'
            )
        content = message.get("content") if isinstance(message, dict) else None
        if shows_images and isinstance(content, list):
            content = text_of_parts(content, where)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: a message is not {{role: text, content: text}}: {str(message)[:200]}; mend it")
        messages.append((sys.intern(message["role"]), content))  # one for all rows
    if not any(content.strip() for _, content in messages):
        raise ConfigError(f"{where}: the prompt is empty; write one or remove the line")
    return tuple(messages)


def text_of_parts(content: Sequence[object], where: str) -> str:
    """The text of a message's parts, IMAGE_MARK for each that is an image. ConfigError for a part that is neither."""
    return "".join(_said(part, where) for part in content)


def _said(part: object, where: str) -> str:
    """A part of a message as text."""
    fields = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if fields == {"type": "image"}:
        return IMAGE_MARK
    if fields.keys() == {"type", "text"} and fields["type"] == "text" and isinstance(fields["text"], str):
        return str(fields["text"])
    raise ConfigError(
        f"{where}: a part of a message is neither {{type: text, text: text}} nor {{type: image}}, whose file "
        f"data.images_field holds: {str(part)[:200]}; mend it"
    )


def _named(value: object) -> str:
    return "an empty list" if value == [] else "null" if value is None else f"a {type(value).__name__}"
