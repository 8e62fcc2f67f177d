"""The file of `rolecall sft` in lines of `rolecall check`: its trainer's model and examples.

Its memory, disk and GPUs are reckoned where a run's are (footprint.py, capacity.py).
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from rolecall.commands.check.preflight import NOTE
from rolecall.data.images.limits import check_sft_images
from rolecall.data.megatron.limits import check_megatron, require_installed
from rolecall.data.model.adapters import check_start, num_adapter_parameters
from rolecall.data.model.files import ModelFacts, check_routers, check_tokenizer, max_model_tokens, text_config
from rolecall.data.model.rope import describe_factors
from rolecall.data.model.trainable import check_parallel, check_trainable
from rolecall.data.sft_examples import end_of_response, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from rolecall.identity import adapters_to_begin_with
from rolecall.settings import SftSettings

NUM_TRIED = 100
"""Examples of each file that are rendered before anything starts: what a template cannot show is mostly in the first.
"""


def trained_model(settings: SftSettings, facts: ModelFacts, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yields a line on the model. ConfigError where the trainer cannot take it, or it has no such ids or lengths."""
    path, actor, model = settings.model.path, settings.actor, settings.model
    yield f"model: {path}, {facts.architecture}, {facts.num_parameters / 1e6:,.2f}M parameters, {model.dtype}"
    check_trainable(path)
    check_parallel(path, actor.parallel)
    if actor.backend == "megatron":
        require_installed()
        check_megatron(path, actor.parallel, actor.megatron, actor.num_ranks)
    check_sft_images(settings)
    check_routers(path, actor.moe, model.freeze_routers)
    if (lora := adapters_to_begin_with(settings, actor.lora)) is not None:
        num_adapter_parameters(path, lora)
        check_start(lora, path)
    check_tokenizer(path, tokenizer.num_ids)
    longest = max_model_tokens(path)
    if settings.data.max_tokens > longest:
        raise ConfigError(f"data.max_tokens {settings.data.max_tokens} exceeds the model's {longest} tokens; lower it")
    yield from describe_factors(text_config(path), settings.data.max_tokens, "model.path")


def examples(settings: SftSettings, tokenizer: ChatTokenizer, tell: Callable[[str], None]) -> Iterator[str]:
    """Yields lines on the examples, of which every row is read and the first are rendered. ConfigError names a row that
    is wrong. `tell` as in load_examples.
    """
    for file in settings.data.train:
        yield from _file(settings, "data.train", file, tokenizer, tell)
    if settings.evaluation is not None:
        yield from _file(settings, "evaluation.path", settings.evaluation.path, tokenizer, tell)


def _file(
    settings: SftSettings, setting: str, file: Path, tokenizer: ChatTokenizer, tell: Callable[[str], None]
) -> Iterator[str]:
    bound, end = settings.data.max_tokens, end_of_response(settings.model.path, tokenizer)
    read = load_examples(file, settings.data, setting, tell)
    tried = tokenize(islice(read, NUM_TRIED), tokenizer, end, bound, check_sft_images(settings))
    if tried.unshown:
        yield (
            f"{NOTE} {setting}: {len(tried.unshown)} of the first examples cannot be shown and will be left out; the "
            f"first: {tried.unshown[0]}"
        )
    num_tried = len(tried.rows) + tried.num_too_long + len(tried.unshown)
    num_read = num_tried + sum(1 for _ in read)
    longest = max((sum(len(segment["token_ids"]) for segment in row) for row in tried.rows), default=0)
    yield (
        f"{setting}: {file}, {num_read} examples; of the first {num_tried} the longest that fits "
        f"has {longest} tokens, and {tried.num_too_long} exceed data.max_tokens {bound} and will be left out"
    )
