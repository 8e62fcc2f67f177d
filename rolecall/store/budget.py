"""The memory of the store that a run's rows may take, and that its longest groups would take.

One arithmetic for admission and for `rolecall check`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest

from rolecall.columns import OLD_ROUTED_EXPERTS, ROUTED_EXPERTS, TOPK_IDS, TOPK_LOGPROBS, row_bytes
from rolecall.data.dataset import RawPrompt
from rolecall.data.model.mixture import read_mixture
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.settings.services import STORE_SHARE
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import TrainBatch


@dataclass(frozen=True)
class PromptBytes:
    """The bytes that are counted for each prompt of a run."""

    text: int
    """The largest, without token ids and images; a group holds it once."""
    images: int = 0
    """The images of the prompts of a batch with most bytes of them, divided among its groups; each row holds its own.
    So a single large image is counted once a batch: the prompts of an epoch are distinct, and more of them than a batch
    has take less in the mean.
    """
    where: str = field(default="", compare=False)
    """File and line of the largest, for complaints."""

    @classmethod
    def largest(cls, prompts: Iterable[RawPrompt], groups_per_batch: int) -> "PromptBytes":
        """The bytes of a batch of the largest of `prompts`, for each of its groups."""
        text, where, images = 0, "", list[int]()
        for prompt in prompts:
            images.append(prompt.image_bytes)
            if (num_bytes := prompt.num_bytes) > text:
                text, where = num_bytes, prompt.where
        most = nlargest(groups_per_batch, images)
        return cls(text, -(-sum(most) // max(1, len(most))), where)


@dataclass(frozen=True)
class StoreBudget:
    """The bytes of the store that a run's rows may take, and those of its longest groups and batches."""

    max_bytes: int
    """Rows may take so many."""
    group_bytes: int
    """A group at its longest takes so many."""
    num_batches: int
    """Batches that exist at the same time: those that max_staleness lets in flight, and one trained but not yet covered
    by a checkpoint.
    """
    batch_bytes: int
    """A batch at its longest takes so many."""

    @classmethod
    def of(cls, settings: RunSettings, prompt: PromptBytes) -> "StoreBudget":
        """ConfigError when the store cannot hold the batches that must exist at the same time. A group holds the text
        of `prompt` once, in its first row, and while it is being committed once more in the stream; its images in
        every row, and in the stream. A prompt that is too long to be admitted counts, too: that is known only once
        it is tokenized, when its turn comes.
        """
        algorithm = settings.algorithm
        shown = settings.max_environment_image_bytes
        longest_bytes = _row_bytes(settings, settings.max_row_tokens, 1) + prompt.images + shown
        group_bytes = settings.responses_per_group * longest_bytes + 2 * prompt.text + prompt.images
        budget = cls(
            int(settings.store.max_bytes * STORE_SHARE),
            group_bytes,
            algorithm.max_staleness + 2,
            algorithm.groups_per_batch * group_bytes,
        )
        needed = budget.num_batches * budget.batch_bytes
        if needed > budget.max_bytes:
            raise ConfigError(
                f"store.max_bytes {settings.store.max_bytes} cannot hold {budget.num_batches} batches of "
                f"{algorithm.groups_per_batch} "
                f"groups at their longest ({needed} bytes, of a group {group_bytes}, twice the largest prompt of "
                f"{prompt.text} {f'({prompt.where}) ' if prompt.where else ''}included"
                + (
                    f", and in every row images of {prompt.images} (data.images_field), the mean of as many prompts "
                    "with most of them"
                    if prompt.images
                    else ""
                )
                + (f", and as much as environments.*.max_image_bytes {shown}" if shown else "")
                + f"; rows may take {STORE_SHARE:.0%} of the store); "
                f"raise it to {math.ceil(needed / STORE_SHARE)} or more, or lower sampling.max_tokens, "
                "environments.*.max_row_tokens, algorithm.groups_per_batch"
                + (", environments.*.max_image_bytes" if shown else "")
                + (", sampling.num_responses, the files of images" if prompt.images else "")
                + " or what data.train says of a prompt besides"
            )
        return budget


def batch_bytes(settings: RunSettings, batch: TrainBatch, prompt: PromptBytes) -> int:
    """Bytes that the rows of a trained batch hold at the most until a checkpoint covers it, where each prompt takes
    `prompt`. Images of an environment are counted as they were shown.
    """
    rows = rows_of(batch)
    held = prompt.text * len(batch.gids) + prompt.images * len(rows) + sum(ref.shown_image_bytes for ref in rows)
    return _row_bytes(settings, sum(ref.num_tokens for ref in rows), len(rows)) + held


def _row_bytes(settings: RunSettings, num_tokens: int, num_rows: int) -> int:
    """Bytes of rows of `num_tokens` tokens in all; each has one teacher, however many there are."""
    distillation = settings.algorithm.distillation
    top_k = (distillation.top_k or 0) if distillation is not None else 0
    routed = 0 if settings.actor.router_replay == "off" else read_mixture(settings.model.path).width
    widths = {TOPK_IDS: top_k, TOPK_LOGPROBS: top_k, ROUTED_EXPERTS: routed, OLD_ROUTED_EXPERTS: routed}
    return row_bytes(num_tokens, settings.columns, widths, num_rows=num_rows)
