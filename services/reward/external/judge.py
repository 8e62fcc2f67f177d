"""A generative judge: a language model behind an OpenAI-compatible server that is asked about responses by a rubric.

Owns the questions: what is filled into the template, where the images of the conversation stand in it, which pairs of a
group are compared, and that a question is asked once. What an answer is worth is verdicts.py's.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import Any

from jinja2 import TemplateError

from rolecall.data.images.files import media_type
from rolecall.errors import BadGroundTruthError, InvalidInputError, RoleCallError
from rolecall.scoring.description import component_spec
from rolecall.scoring.items import groups_of
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Item
from rolecall.settings import Rubric
from rolecall.settings.reward.rubric import FIRST, MARKS, SECOND, TIE, templates
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2
from services.reward.external.remembered import Remembered
from services.reward.external.verdicts import Votes, form_of, read_votes, win_of, worth

_READS = {
    "prompt": reward_pb2.SCORE_FIELD_MESSAGES,
    "messages": reward_pb2.SCORE_FIELD_MESSAGES,
    "ground_truth": reward_pb2.SCORE_FIELD_GROUND_TRUTH,
    "ground_truths": reward_pb2.SCORE_FIELD_GROUND_TRUTH,
    "metadata": reward_pb2.SCORE_FIELD_METADATA,
}
"""Fields of an item that a variable of the template is made of, beside the response."""


class Judge:
    """A judge with one rubric. Equal questions get one answer for as long as it lives."""

    def __init__(self, name: str, rubric: Rubric, server: JsonServer, meter: ScorerMeter) -> None:
        self._rubric = rubric
        self._server = server
        self._meter = meter
        self._template = templates().from_string(rubric.template)
        self._fixed = {"model": rubric.model, **form_of(rubric), **rubric.parameters}
        if rubric.num_samples > 1:
            self._fixed["n"] = rubric.num_samples
        self._remembered: Remembered[Votes] = Remembered()
        self._compares = not rubric.variables.isdisjoint(("ground_truth", "ground_truths"))
        values = rubric.choices.values()
        reads = {_READS[variable] for variable in rubric.variables & _READS.keys()}
        if rubric.images:
            reads.add(reward_pb2.SCORE_FIELD_IMAGES)
        self.spec = reward_pb2.DescribeResponse(
            name=name,
            reads=sorted(reads | {reward_pb2.SCORE_FIELD_RESPONSE_TEXT}),
            reward=component_spec("", min(values), max(values)),
            whole_groups=rubric.scope == "group",
        )

    async def look(self) -> None:
        """Returns when the server answers. Raises when it does not, or wants another key."""
        await self._server.look()

    def parted(self, items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
        """Places of the items of each task: one item, or a group."""
        return groups_of(items) if self.spec.whole_groups else [[place] for place in range(len(items))]

    async def score(self, items: Sequence[Item]) -> list[float]:
        """Returns what one item, or each of a group, is worth. AbstainedError when the judge gave no verdict."""
        if self.spec.whole_groups:
            return await self._ranked(items)
        return [await self._asked(item, await _images_of(item), response=item.response_text) for item in items]

    async def _ranked(self, items: Sequence[Item]) -> list[float]:
        """Each response's share of wins over the others of its group; half where there are none. InvalidInputError
        when they follow different conversations, of which a question shows one.
        """
        if any((item.messages, item.images) != (items[0].messages, items[0].images) for item in items):
            raise InvalidInputError(
                f"the responses of group {items[0].group} follow different conversations, as those of episodes do, and "
                "a comparison shows one; leave them to a rubric of scope item, or to a function of scope group"
            )
        images = await _images_of(items[0])
        texts = sorted({item.response_text for item in items})
        pairs = list(combinations(texts, 2))
        # every question ends by itself and is remembered, also where another one fails
        compared = (self._compared(items[0], images, *pair) for pair in pairs)
        wins = await asyncio.gather(*compared, return_exceptions=True)  # bounded: by the deadline of each question
        won = dict(zip(pairs, _all(wins), strict=True))
        won |= {(second, first): 1.0 - win for (first, second), win in won.items()}
        tie = self._rubric.choices[TIE]
        return [
            fmean(
                [won.get((item.response_text, other.response_text), tie) for other in items if other is not item]
                or [tie]
            )
            for item in items
        ]

    async def _compared(self, item: Item, images: "Sequence[_Image]", ours: str, theirs: str) -> float:
        forward, backward = await asyncio.gather(
            self._asked(item, images, **{FIRST: ours, SECOND: theirs}),
            self._asked(item, images, **{FIRST: theirs, SECOND: ours}),
        )
        return win_of(forward, backward, self._rubric)

    async def _asked(self, item: Item, images: "Sequence[_Image]", **shown: str) -> float:
        parts = self._parts(item, images, shown)
        question = {**self._fixed, "parts": [part if isinstance(part, str) else part.digest for part in parts]}
        votes, was_asked = await self._remembered.answer(
            _digest(json.dumps(question, sort_keys=True).encode()).encode(), lambda: self._votes(parts)
        )
        if was_asked:
            self._meter.remembered()
        return worth(votes, self._rubric)

    async def _votes(self, parts: "Sequence[str | _Image]") -> Votes:
        def body() -> dict[str, Any]:
            return {**self._fixed, "messages": [{"role": "user", "content": _content(parts)}]}

        is_text = all(isinstance(part, str) for part in parts)
        answer = await self._server.post("/chat/completions", body() if is_text else body)
        votes = read_votes(answer, self._rubric)
        self._count(answer.get("usage"))
        return votes

    def _parts(self, item: Item, images: "Sequence[_Image]", shown: dict[str, str]) -> "list[str | _Image]":
        """The question: texts, and between them the images, each in place of a character that stood for it while the
        template was filled in. It is filled in twice, each time with others of MARKS, and the same must be around them.
        InvalidInputError where it is not: something remains of a character, or stands for it.
        """
        if self._compares and not item.ground_truths:
            raise BadGroundTruthError(
                f"item {item.id} has no ground truth, which its rubric shows; give every prompt one, or leave "
                "it to another scorer by when"
            )
        if not images:
            return [self._filled(item, "", shown)]
        given = [self._rubric.template, item.conversation, item.ground_truths, item.metadata, shown]
        used = set(json.dumps(given, ensure_ascii=False, default=lambda file: ""))
        ways = ["".join([each for each in map(chr, marks) if each not in used][: len(images)]) for marks in MARKS]
        if min(map(len, ways)) < len(images):
            raise InvalidInputError(
                f"item {item.id} shows {len(images)} images, and no more than {min(map(len, ways))} can be told apart"
            )
        first, second = (_split(self._filled(item, marks, shown), marks) for marks in ways)
        if first != second:
            raise InvalidInputError(
                f"the rubric's template changes what stands for the images of item {item.id}, as urlencode and pprint "
                "do, or is another text each time; show prompt and messages without that"
            )
        return [part if isinstance(part, str) else images[part] for part in first]

    def _filled(self, item: Item, marks: str, shown: dict[str, str]) -> str:
        """The template's text, with one of `marks` for each image."""
        left = iter(marks)
        messages = [
            {"role": role, "content": "".join(part if isinstance(part, str) else next(left) for part in parts)}
            for role, parts in item.conversation
        ]
        prompt = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        try:
            return self._template.render(
                prompt=prompt,
                messages=messages,
                ground_truth=item.ground_truth,
                ground_truths=list(item.ground_truths),
                metadata=item.metadata,
                **shown,
            )
        except TemplateError as error:
            raise InvalidInputError(
                f"item {item.id} does not fill in the rubric's template: {error.message}; give every prompt what the "
                "template uses, or leave it to another scorer by when"
            ) from error

    def _count(self, usage: Any) -> None:
        """Counts the tokens that the server says it took; what it says that is no count is counted as none."""
        if not isinstance(usage, dict):
            return
        asked, answered = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        if not isinstance(asked, int) or not isinstance(answered, int):
            return
        if not all(0 <= count < 2**53 for count in (asked, answered)):
            return
        prices = self._rubric.prices
        cost = None if prices is None else (asked * prices[0] + answered * prices[1]) / 1e6
        self._meter.used(asked, answered, cost)


class _Image:
    """An image as questions show it. Made in a thread, as what is large is."""

    def __init__(self, file: bytes) -> None:
        self._file = file
        self.digest = _digest(file)

    @cached_property
    def uri(self) -> str:
        """The data URI. InvalidInputError where the file is no image."""
        return f"data:{media_type(self._file)};base64,{base64.b64encode(self._file).decode()}"


async def _images_of(item: Item) -> Sequence[_Image]:
    return await asyncio.to_thread(lambda: [_Image(file) for file in item.images]) if item.images else ()


def _split(text: str, marks: str) -> list[str | int]:
    """`text` in pieces, and between them the places in `marks` of the marks that stood there."""
    pieces = re.split(f"([{marks}])", text)
    return [marks.index(piece) if place % 2 else piece for place, piece in enumerate(pieces)]


def _content(parts: Sequence[str | _Image]) -> str | list[dict[str, Any]]:
    """A message's content as OpenAI's clients send it: text alone as it is."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.uri}}
        for part in parts
        if part != ""
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _all(found: Sequence[float | BaseException]) -> list[float]:
    """The values `found`; raises the error to tell when there is one, one that lasts before one that may pass."""
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, RoleCallError) or error.retryable)
    return [each for each in found if not isinstance(each, BaseException)]
