"""`rolecall score FILE --config CONFIG`: scores a file of responses by the reward of a run, without a run.

Rows are those of a data set with the responses beside each prompt. They take the way of a run's: the components in the
file through the dispatcher and its worker processes, or whoever answers at `reward.address`. Nothing is kept.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from rolecall.config_file import overrides_from
from rolecall.data.dataset import RawPrompt, load_prompts
from rolecall.data.images.files import ImageFile
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.row_files import rows_of
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, RoleCallError
from rolecall.scoring.client import open_client
from rolecall.scoring.exchange import believed
from rolecall.scoring.items import CHUNK_IMAGE_BYTES, chunked
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import RunSettings, load_settings
from rolecall.terminal import exit_code
from rolecall.v1 import reward_pb2, trajectory_pb2
from services.reward.config import reward_settings
from services.reward.dispatcher import Dispatcher

CHUNK = 256
"""Items per call, or a prompt's responses where they are more."""
MAX_CALLS = 4
"""Calls under way."""
_FLAGS = ("--config", "--json", "--response-field")
Images: TypeAlias = Mapping[str, Sequence[ImageFile]]
"""Images of prompts by uid."""
ScoreItems: TypeAlias = Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[list[Outcome]]]

Describe: TypeAlias = Callable[[], Awaitable[reward_pb2.DescribeResponse]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: sys.argv); returns the exit code: 1 when a response has no score, 2 for bad
    usage or configuration.
    """
    parser = argparse.ArgumentParser(
        prog="rolecall score",
        description="score a file of responses by the reward of a run, to try it before training",
        epilog="Any key of CONFIG can be overridden: --section.key value (read as YAML).",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL or parquet: rows of the data set with responses")
    parser.add_argument("--config", type=Path, required=True, metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("--response-field", default="response", help="the field of a response, or a list of them")
    parser.add_argument("--json", action="store_true", help="for programs: every score and the table")
    arguments, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    return exit_code(lambda: _score(arguments, rest))


def _score(arguments: argparse.Namespace, rest: list[str]) -> int:
    settings = load_settings(arguments.config, overrides_from(rest, _FLAGS))
    items = items_of(settings, arguments.file, arguments.response_field)
    started = time.monotonic()
    outcomes = asyncio.run(scored(settings, items, lambda: _images(settings, arguments.file)))
    seconds = time.monotonic() - started
    table = table_of(outcomes, settings.reward.solved_at)
    if arguments.json:
        rows = [_as_json(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]
        sys.stdout.write(json.dumps({"scores": rows, "table": table, "seconds": seconds}) + "\n")
    else:
        _write(table, outcomes, seconds, sys.stdout)
    return int(any(isinstance(outcome, Failure) for outcome in outcomes))


def items_of(settings: RunSettings, file: Path, field: str) -> list[reward_pb2.ScoreItem]:
    """One item for each response in `file`, with every field that a run would send but images; a response counts as
    stopped, and no image is looked at: in its prompt_token_ids each is one token. ConfigError names a row without a
    response.
    """
    if not file.is_file():
        raise ConfigError(f"FILE: {file} is no file; name one of rows with responses, .jsonl or .parquet")
    encoder = PromptEncoder(ChatTokenizer.of(settings.model))  # an image is the one token of its template
    prompts = _prompts(settings, file, counts_images=True)
    # as they were written: the field may be that of the prompt or the truth, or one that data.preprocess drops
    given = {where: row.get(field) for _, _, where, row in rows_of(file, "FILE")}
    return [item for prompt in prompts for item in _items(prompt, given[prompt.where], field, encoder)]


def _items(prompt: RawPrompt, given: object, field: str, encoder: PromptEncoder) -> list[reward_pb2.ScoreItem]:
    """Items of the responses `given`, which the row of `prompt` has in `field`."""
    responses = given if isinstance(given, list) else [given]
    if not responses or not all(isinstance(response, str) for response in responses):
        raise ConfigError(
            f"{prompt.where}, field {field!r}: no response; write text or a list of texts, or set --response-field"
        )
    metadata = {name: value for name, value in prompt.metadata.items() if name != field}
    tokenizer, prompt_ids = encoder.tokenizer, np.asarray(encoder.encode(prompt)[0], "<i4").tobytes()
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    items = []
    for number, response in enumerate(responses):
        ids = [*(tokenizer.encode(response) if response else []), *eos]
        item = reward_pb2.ScoreItem(
            id=f"{prompt.uid}/{number}",
            messages=[
                trajectory_pb2.Message(role=message["role"], content=message["content"]) for message in prompt.said
            ],
            response_text=response,
            prompt_token_ids=prompt_ids,
            response_token_ids=np.asarray(ids, "<i4").tobytes(),
            ground_truth=prompt.ground_truth,
            other_ground_truths=prompt.other_ground_truths,
            finish_reason=trajectory_pb2.FINISH_REASON_STOP,
            num_response_tokens=len(ids),
            group=prompt.uid,
            environment=prompt.environment,
        )
        item.metadata.update(json.loads(json.dumps(metadata, default=str)))
        items.append(item)
    return items


def _images(settings: RunSettings, file: Path) -> Images:
    """The images of each prompt in `file`."""
    return {prompt.uid: prompt.images for prompt in _prompts(settings, file)}


def _prompts(settings: RunSettings, file: Path, *, counts_images: bool = False) -> list[RawPrompt]:
    return load_prompts(
        file, settings.data, settings.reward, environments=settings.environments, counts_images=counts_images
    )


async def scored(
    settings: RunSettings, items: Sequence[reward_pb2.ScoreItem], images: Callable[[], Images] = dict
) -> list[Outcome]:
    """One outcome per item, in order. `images` is asked for those of prompts where the scorer reads images."""
    room = asyncio.Semaphore(MAX_CALLS)
    async with _scorer(settings) as (score, describe):
        may_show = settings.data.images_field is not None
        reads_images = may_show and reward_pb2.SCORE_FIELD_IMAGES in (await describe()).reads
        shown = images() if reads_images else {}
        chunks = [part for chunk in chunked(items, CHUNK) for part in (_lighter(chunk, shown) if shown else [chunk])]

        async def one(chunk: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
            async with room:  # bounded: by the calls that hold it
                return await (_scored_with_images(score, chunk, shown) if reads_images else score(chunk))

        # bounded: a scorer has its components' deadlines
        return [outcome for chunk in await asyncio.gather(*map(one, chunks)) for outcome in chunk]


def _lighter(items: Sequence[reward_pb2.ScoreItem], shown: Images) -> list[list[reward_pb2.ScoreItem]]:
    return chunked(items, CHUNK_IMAGE_BYTES, lambda item: sum(image.num_bytes for image in shown[item.group]))


async def _scored_with_images(score: ScoreItems, items: Sequence[reward_pb2.ScoreItem], shown: Images) -> list[Outcome]:
    """One outcome per item, in order; a failure for one whose images cannot be read."""
    found = await asyncio.to_thread(lambda: [_showing(item, shown) for item in items])
    whole = [each for each in found if isinstance(each, reward_pb2.ScoreItem)]
    scored = iter(await score(whole) if whole else [])
    return [each if isinstance(each, Failure) else next(scored) for each in found]


def _showing(item: reward_pb2.ScoreItem, shown: Images) -> reward_pb2.ScoreItem | Failure:
    """A copy of `item` with the files of its images, or why it has none."""
    copy = reward_pb2.ScoreItem()
    copy.CopyFrom(item)
    try:
        copy.images.extend(image.read() for image in shown[item.group])
    except RoleCallError as error:
        return Failure(error.reason, error.message)
    return copy


@asynccontextmanager
async def _scorer(settings: RunSettings) -> AsyncIterator[tuple[ScoreItems, Describe]]:
    """The run's reward service at its address, or its components in this process."""
    if settings.reward.address is not None:
        client, channel = open_client(settings.reward, settings.reward.address, settings.rpc)
        async with channel:
            yield client.score, client.describe
        return
    dispatcher = Dispatcher(reward_settings(settings), settings.rpc)

    async def score(items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        response = reward_pb2.ScoreResponse(results=await dispatcher.score(items))
        return believed(response, items, await dispatcher.describe(), "reward")

    try:
        await dispatcher.start()
        yield score, dispatcher.describe
    finally:
        await dispatcher.close()


def table_of(outcomes: Sequence[Outcome], solved_at: float) -> dict[str, dict[str, float]]:
    """The statistics of the reward and of each component, by name: how many responses have it, mean, standard
    deviation, least and greatest value; of the reward also the share that reaches `solved_at`.
    """
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    names = sorted({name for score in scores for name in score.components})
    table = {"reward": _statistics([score.total for score in scores])} | {
        name: _statistics([score.components[name] for score in scores if name in score.components]) for name in names
    }
    if scores:
        table["reward"]["accuracy"] = float(np.mean([score.reaches(solved_at) for score in scores]))
    return table


def _statistics(values: Sequence[float]) -> dict[str, float]:
    found = np.array(values)
    if not found.size:
        return {"responses": 0}
    return {
        "responses": found.size,
        "mean": float(found.mean()),
        "std": float(found.std()),
        "min": float(found.min()),
        "max": float(found.max()),
    }


def _write(table: Mapping[str, Mapping[str, float]], outcomes: Sequence[Outcome], seconds: float, out: TextIO) -> None:
    names = ("mean", "std", "min", "max")
    width = max(len("component"), *map(len, table))
    out.write(f"{'component':<{width}}{'responses':>11}{''.join(f'{name:>10}' for name in names)}\n")
    for component, row in table.items():
        numbers = "".join(f"{row[name]:>10.4g}" if name in row else f"{'-':>10}" for name in names)
        out.write(f"{component:<{width}}{row['responses']:>11.0f}{numbers}\n")
    accuracy = table["reward"].get("accuracy")
    told = "" if accuracy is None else f"; {100 * accuracy:.1f}% are accurate"
    out.write(f"{len(outcomes)} responses in {seconds:.2f} s{told}\n")
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    for code, count in Counter(failure.code for failure in failures).most_common():
        first = next(failure.message for failure in failures if failure.code == code)
        out.write(f"no score: {count} x {code}, the first: {first}\n")


def _as_json(item: reward_pb2.ScoreItem, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"id": item.id, "error": outcome.code, "message": outcome.message}
    return {"id": item.id, "reward": outcome.total, "components": outcome.components, "answer": outcome.answer}


if __name__ == "__main__":
    sys.exit(main())
