"""The prompts of a run in lines of `rolecall check`: what their files hold, and how long they are."""

import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rolecall.commands.check.footprint import store
from rolecall.commands.check.preflight import NOTE
from rolecall.data.dataset import UID_FIELD, RawPrompt, load_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.identity import kept
from rolecall.scoring.sources import MAX_SOURCES, SOURCE_FIELD, count_sources, source_of
from rolecall.settings import RunSettings
from rolecall.settings.section import holds
from rolecall.terminal import did_you_mean, in_bytes

_MAX_MEASURED_PROMPTS = 2000
"""Prompts of a file that are rendered and counted; the controller looks at every one when its turn comes."""
_MAX_TRUTH_CHARS = 200
"""Characters of the first prompt's ground truth that are shown."""
_NAMED_SOURCES = 8
"""Sources of a held-out set that are named, the most frequent."""
_NAMED_VALUES, _COMPARED_VALUES = 8, 1000
"""Values of a field that are named, and compared, where a `when` finds none of its own."""


def all_prompts(
    settings: RunSettings, tokenizer: ChatTokenizer | None, tell: Callable[[str], None]
) -> Iterator[Iterator[str]]:
    """Yields iterators of lines, on each file of prompts and on what follows from those of data.train. Each is read to
    its end before the next one: the first reads the training prompts, which those after it count. One that raises
    ConfigError ends alone. `tell` as in load_prompts.
    """
    train: list[RawPrompt] = []
    data = settings.data
    yield _prompts(settings, tokenizer, "data.train", data.train, data.max_prompts, "", train, tell)
    yield _epochs(settings, train)
    yield store(settings, train)
    yield _unused_evaluation(settings)
    held_outs: dict[str, list[RawPrompt]] = {}
    for name, section in settings.evaluation.sets.items():
        times = ["at step 0"] if settings.evaluation.at_start else []
        times += [f"every {settings.evaluation.every_steps} steps"] if settings.evaluation.every_steps else []
        when = " and ".join(filter(None, (", ".join(times), "at the end")))
        about = f", {section.num_responses} response(s) at temperature {section.temperature}, {when}"
        if settings.evaluation.beside:
            about += ", beside the next step, whose publish waits"
        held_out = held_outs[name] = list[RawPrompt]()
        setting = f"evaluation.sets.{name}.path"
        yield _prompts(settings, tokenizer, setting, section.path, section.max_prompts, about, held_out, tell)
        yield _sources(setting, held_out)
    for name in settings.environments:
        yield _unplayed(settings, name, train, held_outs)


def _unplayed(
    settings: RunSettings, name: str, train: list[RawPrompt], held_outs: Mapping[str, list[RawPrompt]]
) -> Iterator[str]:
    """The note on an environment that no training prompt is played in, where those could be read. ConfigError where
    what its when names is in no row, all rows were read, and a run is to begin: one that goes on keeps its `when`, and
    evaluates other sets if it likes.
    """
    if not train or any(prompt.environment == name for prompt in train):
        return
    when = settings.environments[name].when
    bounds = [settings.data.max_prompts, *(section.max_prompts for section in settings.evaluation.sets.values())]
    begins = settings.run.num_steps != 0 and not kept(settings.run.dir)
    if begins and all(held_outs.values()) and not any(bounds):
        rows = [prompt.metadata for prompts in (train, *held_outs.values()) for prompt in prompts]
        for field, wanted in when.items():
            if not any(holds({field: wanted}, row) for row in rows):
                raise ConfigError(f"environments.{name}.when: {_missing(settings, field, wanted, rows)}")
    told = ", ".join(f"{field}: {wanted!r}" for field, wanted in when.items())
    yield (
        f"{NOTE} environments.{name}: no prompt of data.train is played in it ({told}); correct its when, "
        "unless it is for held-out prompts"
    )


def _missing(settings: RunSettings, field: str, wanted: object, rows: list[Mapping[str, Any]]) -> str:
    """Tells what no row has, what rows have in its place, and what to do."""
    data, values = settings.data, {str(row[field]): row[field] for row in rows if field in row}
    if values:
        asked = wanted if isinstance(wanted, tuple) else (wanted,)
        compared = list(values)[:_COMPARED_VALUES]
        near = [close for value in asked for close in get_close_matches(str(value), compared, n=1)]
        meant = f" (did you mean {values[near[0]]!r}?)" if near else ""
        there = ", ".join(map(reprlib.repr, list(values.values())[:_NAMED_VALUES]))
        there += ", ..." if len(values) > _NAMED_VALUES else ""
        return f"no prompt of data.train or evaluation.sets has {field}: {wanted!r}{meant}; it is {there}; correct it"
    known = sorted(set().union(*rows))
    holders = [
        outer
        for row in rows
        for outer, inner in row.items()
        if isinstance(inner, Mapping) and field.removeprefix(f"{outer}.") in inner
    ]
    if field in (data.prompt_field, data.ground_truth_field, data.images_field, UID_FIELD):
        why = "the prompt, its ground truth, images and uid are not compared"
    elif holders:
        why = f"it is within the field {holders[0]!r}, and what is within one is not compared"
    else:
        why = f"there are {', '.join(known) or 'none'}{did_you_mean(field, known)}"
    return (
        f"no prompt of data.train or evaluation.sets has a field {field!r} to compare: {why}; correct it, or have "
        "data.preprocess add the field"
    )


def _unused_evaluation(settings: RunSettings) -> Iterator[str]:
    section = settings.evaluation
    asked = {"every_steps": section.every_steps > 0, "beside": section.beside, "at_start": not section.at_start}
    named = ", ".join(f"evaluation.{name}" for name, is_set in asked.items() if is_set)
    if named and not section.sets:
        yield f"{NOTE} {named}: there are no evaluation.sets, so that nothing is evaluated; add one"


def _sources(setting: str, prompts: list[RawPrompt]) -> Iterator[str]:
    counts = count_sources(source_of(prompt.metadata) for prompt in prompts)
    if len(counts) > MAX_SOURCES:
        yield (
            f"{NOTE} {setting}: its field {SOURCE_FIELD} has {len(counts)} texts, more than the {MAX_SOURCES} whose "
            "rewards are reported by themselves, so that none is; have data.preprocess give rows coarser ones"
        )
    elif counts:
        named = ", ".join(f"{source} {num}" for source, num in counts.most_common(_NAMED_SOURCES))
        others = f" and {len(counts) - _NAMED_SOURCES} others" if len(counts) > _NAMED_SOURCES else ""
        yield f"  by field {SOURCE_FIELD}, each reported by itself, too: {named}{others}"


def _prompts(
    settings: RunSettings,
    tokenizer: ChatTokenizer | None,
    setting: str,
    files: Path | tuple[Path, ...],
    max_prompts: int | None,
    about: str,
    read: list[RawPrompt],
    tell: Callable[[str], None],
) -> Iterator[str]:
    """Every row is read, into `read`; the first ones are measured, and more only while none fits."""
    prompts = load_prompts(
        files,
        settings.data,
        settings.reward,
        settings.algorithm.distillation if files == settings.data.train else None,
        environments=settings.environments,
        max_prompts=max_prompts,
        tell=tell,
    )
    read += prompts
    names = str(files) if isinstance(files, Path) else ", ".join(map(str, files))
    own = settings.data.preprocess
    through = "" if own is None else f" through data.preprocess.function {own.name}"
    drawn = f" drawn by {setting.rpartition('.')[0]}.max_prompts" if len(prompts) == max_prompts else ""
    yield f"{setting}: {names}, {len(prompts)} prompts{through}{drawn}{about}"
    if settings.environments:
        counts = Counter(prompt.environment for prompt in prompts)
        played = [f"{counts[name]} are played in {name}" for name in settings.environments]
        yield f"  {', '.join(played)}, {counts['']} are answered once"
    if tokenizer is not None:
        yield from _measured(settings, tokenizer, setting, names, prompts)


def _measured(
    settings: RunSettings, tokenizer: ChatTokenizer, setting: str, names: str, prompts: list[RawPrompt]
) -> Iterator[str]:
    """The lengths of the first prompts of the files `names`, rendered."""
    encoder = PromptEncoder.of(settings, tokenizer)
    first: RawPrompt | None = None
    bound, lengths, shown, unshown = settings.data.max_prompt_tokens, list[int](), list[int](), list[str]()
    for prompt in prompts:
        if len(lengths) + len(unshown) >= _MAX_MEASURED_PROMPTS and min(lengths, default=bound + 1) <= bound:
            break
        try:
            ids, _ = encoder.encode(prompt)
        except InvalidInputError as error:
            unshown.append(error.message)
            continue
        first = first or prompt
        lengths.append(len(ids))
        shown += [ids.count(encoder.visual_tokens.token_id)] if encoder.visual_tokens is not None else []
    if unshown:
        yield (
            f"{NOTE} {setting}: of the first {len(lengths) + len(unshown)} prompts {len(unshown)} cannot be shown and "
            f"will be left out; the first: {unshown[0]}"
        )
    if first is None:
        raise ConfigError(f"{setting}: none of the {len(unshown)} prompts of {names} can be shown; {unshown[0]}")
    too_long = sum(length > bound for length in lengths)
    truth = f"the ground truth {first.ground_truth[:_MAX_TRUTH_CHARS]!r}" if first.ground_truth else "no ground truth"
    yield f"  the first is {lengths[0]} tokens as rendered: {tokenizer.render(first.chat)!r}, with {truth}"
    yield (
        f"  of the first {len(lengths)}, the longest has {max(lengths)} tokens; {too_long} exceed "
        f"data.max_prompt_tokens {bound} and will be left out"
    )
    if shown:
        num_images = sum(len(prompt.images) for prompt in prompts[: len(lengths) + len(unshown)])
        most = max(prompt.image_bytes for prompt in prompts)
        yield (
            f"  they show {num_images} images (data.images_field), those of one prompt up to {max(shown)} of its "
            f"tokens and {in_bytes(most)}"
        )
    if too_long == len(lengths):
        raise ConfigError(
            f"{setting}: all {too_long} prompts of {names} have more tokens than data.max_prompt_tokens {bound}, the "
            f"shortest {min(lengths)}; "
            "raise it or shorten the prompts"
        )


def _epochs(settings: RunSettings, prompts: list[RawPrompt]) -> Iterator[str]:
    """How often the run goes through the training prompts; nothing where they could not be read."""
    steps, groups = settings.run.total_steps, settings.algorithm.groups_per_batch
    if prompts and steps:
        yield (
            f"  {steps} steps of {groups} groups are {steps * groups / len(prompts):.4g} epochs of these prompts, more "
            "where groups are dropped or prompts are left out"
        )
