"""Held-out sets: read and rendered before a run begins."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.data.dataset import load_prompts
from rolecall.data.images.files import ImageFile
from rolecall.errors import InvalidInputError
from rolecall.scoring.sources import MAX_SOURCES, SOURCE_FIELD, count_sources, source_of
from rolecall.settings import EvaluationSet, RunSettings
from rolecall.v1 import trajectory_pb2
from services.controller.groups.prompts import PromptRenderer

logger = logging.getLogger(__name__)

TOLD_PROMPTS = 25_000
"""Prompts between two words on how far their tokenizing is: some seconds."""


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set, rendered once. Files of images are read again for each evaluation, and not kept."""

    name: str
    section: EvaluationSet
    prompts: tuple[trajectory_pb2.Prompt, ...]
    """The prompts that fit, without their images."""
    images: Mapping[int, tuple[ImageFile, ...]] = field(default_factory=dict)
    """The images of a prompt, by its place in `prompts`."""
    sources: tuple[str | None, ...] = ()
    """The source of each prompt; empty where none is reported."""


def load_sets(
    settings: RunSettings, renderer: PromptRenderer, tell: Callable[[str], None] = lambda what: None
) -> list[HeldOutSet]:
    """All configured sets. ConfigError, and `tell`, as load_prompts; prompts that are too long, or cannot be shown by
    the heads of their images' files, are left out with a warning. StorageUnavailableError for an image that cannot be
    read now.
    """
    sets = []
    for name, section in settings.evaluation.sets.items():
        prompts, images, num_too_long = list[trajectory_pb2.Prompt](), dict[int, tuple[ImageFile, ...]](), 0
        sources = list[str | None]()
        read = load_prompts(
            section.path,
            settings.data,
            settings.reward,
            environments=settings.environments,
            max_prompts=section.max_prompts,
            tell=tell,
        )
        for number, raw in enumerate(read, 1):
            if number % TOLD_PROMPTS == 0:
                tell(f"the prompts of evaluation.sets.{name}, {number:,} of {len(read):,} tokenized")
            try:
                prompt = renderer.render(raw, 0, by_heads=True)  # all of a set before a run begins: opened, minutes
            except InvalidInputError as error:
                logger.warning("evaluation set %s: a prompt cannot be shown and is left out: %s", name, error.message)
                continue
            if prompt is None:
                num_too_long += 1
                continue
            if raw.images:
                del prompt.images[:]
                images[len(prompts)] = raw.images
            prompts.append(prompt)
            sources.append(source_of(raw.metadata))
        if num_too_long:
            logger.warning(
                "evaluation set %s: %d prompts exceed data.max_prompt_tokens and are left out", name, num_too_long
            )
        sets.append(HeldOutSet(name, section, tuple(prompts), images, _reported(name, sources)))
    return sets


def _reported(name: str, sources: Sequence[str | None]) -> tuple[str | None, ...]:
    """`sources`, or none where they part the set into one, or into too many."""
    num_sources = len(count_sources(sources))
    if num_sources > MAX_SOURCES:
        logger.warning(
            "evaluation set %s: its field %s has %d texts, more than the %d that are reported by themselves: none is",
            name,
            SOURCE_FIELD,
            num_sources,
            MAX_SOURCES,
        )
    return tuple(sources) if 0 < num_sources <= MAX_SOURCES else ()
