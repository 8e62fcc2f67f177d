"""RewardService over a reward model: items in threads to tokens, one call of the batcher, scores. Reaches no torch.

The servicer itself is that of every scorer in Python, `rolecall/reward.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.errors import InvalidInputError, ScorerError
from rolecall.reward import Results
from rolecall.scoring.results import error_result, failure_of, result_of
from rolecall.scoring.scores import Failure, Item
from rolecall.v1 import reward_pb2
from rolecall.wire import Array
from services.reward_model.batcher import TokenBatcher
from services.reward_model.config import MAX_ITEMS
from services.reward_model.conversations import Conversations, Tokens


class ModelScores:
    """Scores items by what the model says of them."""

    def __init__(self, conversations: Conversations, batcher: TokenBatcher, spec: reward_pb2.DescribeResponse) -> None:
        self._conversations = conversations
        self._batcher = batcher
        self._spec = spec

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Results:
        """One result per item, in order. InvalidInputError for more than MAX_ITEMS, ExhaustedError when too many
        wait.
        """
        if len(items) > MAX_ITEMS:
            raise InvalidInputError(f"items: {len(items)} are more than max_items {MAX_ITEMS}; send fewer at a time")
        read = await asyncio.to_thread(lambda: [self._read(item) for item in items])
        whole = [each.tokens for each in read if isinstance(each, _Readable)]
        outputs = iter(await self._batcher.outputs_of(whole))
        return [
            self._result(item, each, next(outputs)) if isinstance(each, _Readable) else each
            for item, each in zip(items, read, strict=True)
        ]

    def _read(self, item: reward_pb2.ScoreItem) -> "_Readable | reward_pb2.ScoreResult":
        try:
            decoded = Item.from_proto(item)
        except InvalidInputError as error:
            return failure_of(item, error)
        tokens = self._conversations.tokens_of(decoded)
        if isinstance(tokens, Failure):
            return error_result(item.id, tokens.code, tokens.message, tokens.retryable)
        return _Readable(decoded, tokens)

    def _result(self, item: reward_pb2.ScoreItem, readable: "_Readable", outputs: Array) -> reward_pb2.ScoreResult:
        try:
            return result_of(item, self._conversations.score_of(readable.item, readable.tokens, outputs), self._spec)
        except ScorerError as error:  # a score that is not finite
            return failure_of(item, error)


@dataclass(frozen=True)
class _Readable:
    """An item that the model can score."""

    item: Item
    tokens: Tokens
