"""Batches of items as JSON, in the shapes that servers of OpenRLHF and functions of TRL take."""

from collections.abc import Sequence
from typing import Any

from rolecall.errors import AbstainedError, RoleCallError, ScorerError
from rolecall.scoring.description import component_spec
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import TEXT_FIELDS, Item
from rolecall.v1 import reward_pb2

MAX_ITEMS = 64
"""Items of one call."""
_READS = [field for field in TEXT_FIELDS if field != reward_pb2.SCORE_FIELD_TOKEN_IDS]


class Batches:
    """The part that the shapes share: MAX_ITEMS in a call, and a list of numbers for an answer."""

    def __init__(self, name: str, bounds: tuple[float, float] | None, server: JsonServer) -> None:
        self._server = server
        self.spec = reward_pb2.DescribeResponse(
            name=name, reads=_READS, reward=component_spec("", *(bounds or (None, None)))
        )

    async def look(self) -> None:
        """Returns when the server answers. Raises when it does not, or wants another token."""
        await self._server.look()

    def parted(self, items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
        """Places of the items of each call."""
        places = list(range(len(items)))
        return [places[start : start + MAX_ITEMS] for start in range(0, len(places), MAX_ITEMS)]


class OpenRlhf(Batches):
    """A server as OpenRLHF's: lists `query` (prompt and response), `prompts` and `labels` in, `rewards` out."""

    async def score(self, items: Sequence[Item]) -> list[float | RoleCallError]:
        """One answer per item."""
        prompts = [text_before(item) for item in items]
        body = {
            "query": [prompt + item.response_text for prompt, item in zip(prompts, items, strict=True)],
            "prompts": prompts,
            "labels": [item.ground_truth for item in items],
        }
        return numbers_in(await self._server.post("", body), items, "rewards")


class Trl(Batches):
    """A function as TRL's, served: its keywords in, lists of `prompts`, of `completions`, each a conversation, and of
    every field of the data set; a list of numbers out, or that list under `rewards`. None abstains.
    """

    async def score(self, items: Sequence[Item]) -> list[float | RoleCallError]:
        """One answer per item."""
        fields = {field for item in items for field in item.metadata}
        body: dict[str, list[Any]] = {field: [item.metadata.get(field) for item in items] for field in sorted(fields)}
        body["ground_truth"] = [item.ground_truth for item in items]
        body["prompts"] = [
            [{"role": message.role, "content": message.content} for message in item.messages] for item in items
        ]
        body["completions"] = [[{"role": "assistant", "content": item.response_text}] for item in items]
        return numbers_in(await self._server.post("", body), items, "rewards")


def numbers_in(answer: Any, items: Sequence[Item], key: str) -> list[float | RoleCallError]:
    """The list under `key` of `answer`, or `answer` itself, one entry per item; null is an abstention. ScorerError when
    there is none.
    """
    found = answer.get(key) if isinstance(answer, dict) else answer
    if not isinstance(found, list) or len(found) != len(items):
        told = f"{len(found)} entries" if isinstance(found, list) else f"{type(found).__name__}"
        raise ScorerError(f"{key!r} of its answer must be a list of {len(items)} numbers, one per item; it is {told}")
    return [AbstainedError("it answered null") if number is None else number for number in found]


def text_before(item: Item) -> str:
    """The conversation before the response as one text, as a server that knows no messages is given it."""
    return "".join(f"{message.content}\n" for message in item.messages)
