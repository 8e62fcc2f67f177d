"""The rows of one sampled group, written under its claim's token with an expiry; they exist for others once the group
is committed.
"""

import asyncio
import logging
from collections.abc import Sequence

from rolecall.columns import IMAGES
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import StoreFullError
from rolecall.store.prompts import Claim
from rolecall.store.rows import Rows
from rolecall.trajectory import trajectory_id
from rolecall.v1 import trajectory_pb2
from services.rollout.replica import Response
from services.rollout.sampling import SampleRequest
from services.rollout.trajectories import columns, images_column, trajectory_meta

logger = logging.getLogger(__name__)
FULL_S = 0.5
"""Wait before rows are staged again in a full store."""


class Staging:
    """The writer of a consumer's rows."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: ChatTokenizer,
        *,
        consumer: str,
        timeout_s: float,
        row_expiry_s: int,
        shows_images: bool,
    ) -> None:
        """`timeout_s` bounds the wait for room in the store; `row_expiry_s` is the life of rows whose group is not
        committed; `shows_images`: whether the run may show images, so that every row has a column of them.
        """
        self._rows = rows
        self._tokenizer = tokenizer
        self._consumer = consumer
        self._timeout_s = timeout_s
        self._row_expiry_s = row_expiry_s
        self._shows_images = shows_images

    async def stage(
        self, claim: Claim, requests: Sequence[SampleRequest], responses: Sequence[Response]
    ) -> list[trajectory_pb2.RowRef]:
        """Writes the rows of a claimed group and returns where they are. StoreFullError when the store has no room for
        `timeout_s`.
        """
        group = claim.group
        refs, arrays, metas = [], [], []
        own = images_column(group.prompt.images)
        for index, (request, response) in enumerate(zip(requests, responses, strict=True)):
            id = trajectory_id(group.gid, index)
            meta = trajectory_meta(id, group.prompt, request, response, self._tokenizer, self._consumer)
            meta.gid, meta.index, meta.traceparent = group.gid, index, claim.traceparent
            if index:
                meta.ClearField("prompt")  # once a group: it may be a megabyte of tests
            ids = request.prompt_token_ids
            num_tokens = len(ids) + len(response.sample.token_ids)
            shown_bytes = sum(map(len, response.images))
            refs.append(self._rows.ref(id, claim.token, num_tokens, response.segment_starts, shown_bytes))
            is_own = not response.images and not response.shown
            files = [*group.prompt.images, *response.images]
            images = own if is_own else images_column(files, response.shown)
            arrays.append({**columns(ids, response), **({IMAGES: images} if self._shows_images else {})})
            metas.append(meta)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                await asyncio.to_thread(self._rows.stage_many, refs, arrays, metas, self._row_expiry_s)
                return refs
            except StoreFullError as error:
                if loop.time() > deadline:
                    raise
                logger.warning("group %d waits for the store: %s", group.gid, error.message)
                await asyncio.sleep(FULL_S)
