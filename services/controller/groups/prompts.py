"""Prompts: from the rows of a dataset to an endless, deterministic, resumable sequence of tokenized prompts.

Owns the order within an epoch and the cursor, and with a curriculum the success rates that thin out an epoch. Over-long
prompts, and those whose images cannot be shown, are refused here, counted, never truncated. A checkpoint notes prompts
with digests of their images, and what these become again is here, too. The dataset's format is
`rolecall/data/dataset.py`'s. Knows nothing of admission or the store.
"""

import hashlib
import json
import logging
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np
from google.protobuf import struct_pb2

from rolecall.algorithms.curriculum import is_visited, updated_rate
from rolecall.data.dataset import RawPrompt
from rolecall.data.images.prompts import PromptEncoder
from rolecall.errors import ConfigError, InvalidInputError, StorageUnavailableError
from rolecall.settings import CurriculumSection
from rolecall.store.position import SuccessRate
from rolecall.v1 import trajectory_pb2

logger = logging.getLogger(__name__)


class PromptRenderer:
    """Renders and tokenizes once; the ids are the truth from there on."""

    def __init__(self, encoder: PromptEncoder, max_prompt_tokens: int) -> None:
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens

    def render(self, raw: RawPrompt, epoch: int, *, by_heads: bool = False) -> trajectory_pb2.Prompt | None:
        """The prompt with its token ids and images, or None when it is longer than max_prompt_tokens. ConfigError names
        the line that cannot be rendered, InvalidInputError the one whose images cannot be shown, and
        StorageUnavailableError the file that cannot be read now. `by_heads` as in PromptEncoder.encode.
        """
        token_ids, images = self._encoder.encode(raw, by_heads=by_heads)
        if len(token_ids) > self._max_prompt_tokens:
            return None
        metadata = struct_pb2.Struct()
        metadata.update(json.loads(json.dumps(raw.metadata, default=str)))
        return trajectory_pb2.Prompt(
            uid=raw.uid,
            epoch=epoch,
            token_ids=np.asarray(token_ids, "<i4").tobytes(),
            messages=[trajectory_pb2.Message(role=message["role"], content=message["content"]) for message in raw.said],
            ground_truth=raw.ground_truth,
            other_ground_truths=raw.other_ground_truths,
            metadata=metadata,
            images=images,
            environment=raw.environment,
        )


@dataclass(frozen=True)
class Cursor:
    """A place in the sequence of prompts: the next prompt is number `index` of epoch `epoch`'s order."""

    epoch: int = 0
    index: int = 0
    num_too_long: int = 0
    """Prompts refused so far for their length."""
    num_unshown: int = 0
    """Prompts refused so far for images that cannot be shown."""
    prompts: str = ""
    """Digest of the prompts that `index` counts, by their uids in order; empty: of a release that noted none."""

    def encode(self) -> bytes:
        """Bytes for the ledger and checkpoints."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Cursor":
        """Returns what `encode` wrote; empty bytes are the start."""
        return cls(*json.loads(data)) if data else cls()

    def within(self, prompts: Sequence[RawPrompt]) -> "Cursor":
        """Returns the place with the digest of `prompts`. ConfigError when it is one in other prompts."""
        digest = hashlib.sha256("\n".join(raw.uid for raw in prompts).encode()).hexdigest()[:16]
        if self.index > len(prompts) or self.prompts not in ("", digest):
            raise ConfigError(
                f"data.preprocess: it gives other prompts ({len(prompts)} now), or others first, than those in which "
                f"the run has its place, number {self.index} of epoch {self.epoch}; put the function back as it was "
                "(uids, too, must be the same each time), or start another run with another run.dir and run.name "
                "(rolecall export makes a model of this one's checkpoint)"
            )
        return replace(self, prompts=digest)


def digests(files: Sequence[bytes]) -> list[bytes]:
    """Returns what a checkpoint notes of a prompt's images, in the place of their files."""
    return [hashlib.sha256(file).digest() for file in files]


class PromptSequence:
    """The training prompts, epoch after epoch, each epoch in an order of its own drawn from (seed, epoch).

    With a curriculum an epoch leaves out the prompts whose turn it is not (rolecall/algorithms/curriculum.py): what
    comes next follows from seed, cursor and the rates. Rates move while groups are scored, so two runs may differ in
    what they visit, never in what they admitted.
    """

    def __init__(
        self,
        prompts: Sequence[RawPrompt],
        renderer: PromptRenderer,
        *,
        seed: int,
        shuffle: bool,
        curriculum: CurriculumSection | None = None,
        cursor: Cursor = Cursor(),
        rates: Mapping[str, SuccessRate] | None = None,
    ) -> None:
        """Goes on from `cursor`, with the success rates by prompt uid that a curriculum goes by. ConfigError when the
        cursor is a place in other prompts.
        """
        self._prompts = prompts
        self._renderer = renderer
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._rates = dict(rates or {})
        self.cursor = cursor.within(prompts)
        self._ordered = -1
        """Epoch of `_order`, which is drawn when its first prompt is looked at: of millions it takes seconds."""
        self._order = array("q")
        self._num_passed = 0
        """Places looked at since the last prompt."""
        self._unshown = ""
        """Why the newest prompt whose images cannot be shown was refused."""

    def next(self) -> trajectory_pb2.Prompt:
        """The next prompt that fits and whose turn it is; moves the cursor. ConfigError when no epoch has one that
        fits. StorageUnavailableError, with the cursor before the prompt, when an image cannot be read now.
        """
        while (prompt := self._look()) is None:
            continue
        return prompt

    def take(self, number: int, seconds: float) -> list[tuple[trajectory_pb2.Prompt, Cursor]]:
        """The next prompts as `next` gives them, each with the cursor behind it: `number`, or as many as are found
        within so many seconds, perhaps none; or as come before an image that cannot be read now, and
        StorageUnavailableError where it is the first's. For a thread, one call at a time: `visited` and `cursor` may be
        used beside it, for a rate and a cursor are replaced whole.
        """
        taken, end_at = list[tuple[trajectory_pb2.Prompt, Cursor]](), time.monotonic() + seconds
        while len(taken) < number and time.monotonic() < end_at:
            try:
                prompt = self._look()
            except StorageUnavailableError:
                if taken:
                    break
                raise
            if prompt is not None:
                taken.append((prompt, self.cursor))
        return taken

    def take_again(
        self, noted: Sequence[trajectory_pb2.Prompt], seconds: float
    ) -> list[tuple[trajectory_pb2.Prompt, Cursor]]:
        """The prompts that a checkpoint noted, with the files of their images, each with the cursor, which stays where
        it is: as many as are read within so many seconds, one at least; StorageUnavailableError as `take`. For a
        thread, as that. ConfigError names the images that are no longer what they were.
        """
        taken, end_at = list[tuple[trajectory_pb2.Prompt, Cursor]](), time.monotonic() + seconds
        for prompt in noted:
            try:
                whole = self._with_images(prompt) if prompt.images else prompt
            except StorageUnavailableError:
                if taken:
                    break
                raise
            taken.append((whole, self.cursor))
            if time.monotonic() >= end_at:
                break
        return taken

    def _with_images(self, noted: trajectory_pb2.Prompt) -> trajectory_pb2.Prompt:
        raw = self._by_uid.get(noted.uid)
        if raw is None:
            raise ConfigError(
                f"data.train has no prompt {noted.uid!r}, which was in flight at the checkpoint; give the run the data "
                "that it began with"
            )
        try:
            files = [image.read() for image in raw.images]
        except InvalidInputError as error:
            raise ConfigError(f"{raw.where}: {error.message}") from error
        if digests(files) != list(noted.images):
            names = ", ".join(str(image.path) for image in raw.images if image.path) or "in the file itself"
            raise ConfigError(
                f"{raw.where}: its images ({names}) are not those that were in flight at the checkpoint; put back the "
                "files that the run began with"
            )
        whole = trajectory_pb2.Prompt()
        whole.CopyFrom(noted)
        whole.images[:] = files
        return whole

    @cached_property
    def _by_uid(self) -> dict[str, RawPrompt]:
        return {raw.uid: raw for raw in self._prompts}

    def _look(self) -> trajectory_pb2.Prompt | None:
        """The prompt at the cursor, which moves behind it; None when there is none there that fits and has its turn."""
        most_epochs = 1 + (self._curriculum.revisit_epochs if self._curriculum else 1)
        if self._num_passed == most_epochs * (len(self._prompts) + 1):
            raise ConfigError(
                "no prompt of data.train fits data.max_prompt_tokens; raise it or shorten the prompts"
                if not self._unshown
                else f"no prompt of data.train fits data.max_prompt_tokens and has images to show; {self._unshown}"
            )
        cursor = self.cursor
        epoch, index = cursor.epoch, cursor.index
        if index == len(self._prompts):
            self._pass(replace(cursor, epoch=epoch + 1, index=0))
            return None
        if self._ordered != epoch:
            self._ordered, self._order = epoch, self._order_of(epoch)
        raw = self._prompts[self._order[index]]
        if not self._has_its_turn(raw.uid, epoch):
            self._pass(replace(cursor, index=index + 1))
            return None
        try:
            prompt = self._renderer.render(raw, epoch)
        except InvalidInputError as error:
            logger.warning("prompt %s cannot be shown and is left out: %s", raw.uid, error.message)
            self._unshown = error.message
            self._pass(replace(cursor, index=index + 1, num_unshown=cursor.num_unshown + 1))
            return None
        if prompt is None:
            logger.warning("prompt %s is longer than data.max_prompt_tokens and is left out", raw.uid)
            self._pass(replace(cursor, index=index + 1, num_too_long=cursor.num_too_long + 1))
            return None
        self.cursor, self._num_passed = replace(cursor, index=index + 1), 0
        return prompt

    def _pass(self, cursor: Cursor) -> None:
        """Moves to `cursor` without a prompt."""
        self.cursor = cursor
        self._num_passed += 1

    def visited(self, uid: str, gid: int, visit_rate: float) -> SuccessRate | None:
        """Group `gid` answered prompt `uid` rightly in this share of its responses: the prompt's new rate, to be kept;
        None when it counts already, or there is no curriculum.
        """
        known = self._rates.get(uid)
        if self._curriculum is None or (known is not None and known.gid >= gid):
            return None
        self._rates[uid] = SuccessRate(gid, updated_rate(known.rate if known else None, visit_rate))
        return self._rates[uid]

    def _has_its_turn(self, uid: str, epoch: int) -> bool:
        known = self._rates.get(uid)
        return self._curriculum is None or is_visited(
            self._curriculum, self._seed, epoch, uid, known.rate if known else None
        )

    def _order_of(self, epoch: int) -> "array[int]":
        order = array("q", range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
