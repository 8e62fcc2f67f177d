"""The steps of a run whose file gives its length in epochs of its prompts (`run.num_epochs`). No torch.

An epoch has the prompts that the controller would admit in one: of all files, those that can be shown and fit. Whole
batches are made of all epochs together, as the controller makes them, which begins no epoch with a batch of its own.
"""

from rolecall.data.dataset import RawPrompt, load_training_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings


def count_steps(settings: RunSettings, num_epochs: int) -> int:
    """The whole batches in so many passes over the prompts. Renders and tokenizes each of them. ConfigError where they
    make none, and of data, tokenizer or images that cannot be used; StorageUnavailableError of an image that cannot be
    read now.
    """
    encoder = PromptEncoder.of(settings, ChatTokenizer.of(settings.model))
    prompts = load_training_prompts(settings)
    num_kept = sum(_fits(encoder, prompt, settings.data.max_prompt_tokens) for prompt in prompts)
    num_steps = num_epochs * num_kept // settings.algorithm.groups_per_batch
    if num_steps == 0:
        raise ConfigError(
            f"run.num_epochs {num_epochs}: {num_kept} of the {len(prompts)} prompts of data.train fit, and "
            f"algorithm.groups_per_batch {settings.algorithm.groups_per_batch} are one step; lower that, or give more "
            "epochs or prompts"
        )
    return num_steps


def _fits(encoder: PromptEncoder, prompt: RawPrompt, max_prompt_tokens: int) -> bool:
    try:
        token_ids, _ = encoder.encode(prompt, by_heads=True)
    except InvalidInputError:
        return False
    return len(token_ids) <= max_prompt_tokens
