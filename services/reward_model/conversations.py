"""The way from an item to the tokens that the model reads, and from what the model says of them to a score.

Owns the reward model's tokenizer and template, and every reason why an item is none that it can score. It is called in
threads. No torch, no gRPC.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.scoring.scores import Failure, Item, Score
from rolecall.settings import ProcessSection, RewardModelSettings
from rolecall.wire import Array

REDUCTIONS: dict[str, Callable[[Array], float]] = {
    "min": lambda scores: float(scores.min()),
    "mean": lambda scores: float(scores.mean()),
    "last": lambda scores: float(scores[-1]),
}
"""The reward that the scores of steps make."""


@dataclass(frozen=True)
class Tokens:
    """A conversation with its response as the model reads it."""

    ids_T: Array
    """int32 [T]."""
    places: Array
    """int32, ascending: the tokens at which the head's output is wanted, at least one."""
    step_ends: tuple[int, ...] = ()
    """The response's token that ends each step, where steps are rewarded by tokens."""


_OF_THE_EPISODE = ("assistant", "tool")
"""Roles whose words are the policy's, or what it made a tool say."""


class Conversations:
    """Items rendered by the reward model's own template, and their scores."""

    def __init__(self, settings: RewardModelSettings, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        """ConfigError when the separator of steps is not one token."""
        self._tokenizer = tokenizer
        self._special = tokenizer.special_tokens
        self._max_tokens = max_tokens
        self._reference = settings.reference
        self._is_probability = settings.output == "probability"
        self._process = settings.process
        if settings.process is not None:
            self._separator = separator_id(settings.process, tokenizer)
            policy = settings.process.policy
            self._policy = tokenizer if policy is None else ChatTokenizer(policy, renders=False)

    def tokens_of(self, item: Item) -> Tokens | Failure:
        """Renders and tokenizes the item, or says why it cannot be scored."""
        messages = [{"role": message.role, "content": message.content} for message in item.messages]
        if self._reference is not None:
            if not item.ground_truth:
                return Failure("BAD_GROUND_TRUTH", "the item has no ground truth, and this model compares with one")
            users = [message for message in messages if message["role"] == "user"]
            if not users:
                return Failure("NO_USER_TURN", "no turn of a user, after which the reference answer is put")
            users[-1]["content"] += self._reference.replace("{ground_truth}", item.ground_truth)
        content = item.response_text
        if self._process is not None:
            if self._process.separator in content:
                return Failure("SEPARATOR_IN_RESPONSE", "the response holds the separator that is put after its steps")
            content = "".join(step + self._process.separator for step, _ in steps_of(content, self._process.split))
        if found := sorted(token for token in self._special if token in item.response_text):
            return Failure(
                "SPECIAL_TOKEN_IN_RESPONSE",
                f"the response spells {', '.join(found)}, by which it could end its turn and write another's",
            )
        roles = [message.role for message in item.messages]
        begins = next((place for place, role in enumerate(roles) if role in _OF_THE_EPISODE), len(roles))
        earlier = [message.content for message in item.messages[begins:]]  # an environment may echo what was said
        if found := sorted(token for token in self._special if any(token in content for content in earlier)):
            return Failure(
                "SPECIAL_TOKEN_IN_TURN",
                f"an earlier turn spells {', '.join(found)}, by which it could end itself and write another's",
            )
        turn = {"role": "assistant", "content": content}
        try:
            ids = self._tokenizer.encode(self._tokenizer.render([*messages, turn], generate=False))
        except InvalidInputError as error:
            return Failure(error.reason, error.message)
        if len(ids) > self._max_tokens:
            return Failure(
                "TOO_LONG",
                f"{len(ids)} tokens of conversation and response exceed the reward model's {self._max_tokens}; nothing "
                "is cut: raise max_tokens where the model allows it, or sample shorter responses",
            )
        ids_T = np.asarray(ids, np.int32)
        if self._process is None:
            return Tokens(ids_T, np.asarray([len(ids) - 1], np.int32))
        return self._with_steps(item, ids_T, self._process)

    def score_of(self, item: Item, tokens: Tokens, outputs: Array) -> Score:
        """The score of the item by the head's `outputs` (float32) at the wanted tokens."""
        scores = _sigmoid(outputs.astype(np.float64)) if self._is_probability else outputs.astype(np.float64)
        if self._process is None:
            return Score(float(scores[0]))
        value = REDUCTIONS[self._process.reduce](scores)
        if not self._process.token_rewards:
            return Score(value)
        rewards = np.zeros(item.num_response_tokens, np.float32)
        np.add.at(rewards, list(tokens.step_ends), scores.astype(np.float32))
        return Score(value, token_rewards=rewards)

    def _with_steps(self, item: Item, ids_T: Array, process: ProcessSection) -> Tokens | Failure:
        steps = steps_of(item.response_text, process.split)
        places = np.flatnonzero(ids_T == self._separator).astype(np.int32)
        if len(places) != len(steps):
            return Failure("SEPARATOR_IN_PROMPT", "the conversation holds the separator that is put after steps")
        if not process.token_rewards:
            return Tokens(ids_T, places)
        ends = tokens_at(self._policy, item, [end for _, end in steps])
        return ends if isinstance(ends, Failure) else Tokens(ids_T, places, ends)


def steps_of(response: str, split: str) -> list[tuple[str, int]]:
    """Returns the steps of a response, each with the offset of its end; those of white space alone are none, and a
    response without any is one step.
    """
    parts = response.split(split)
    ends = list(accumulate(parts, lambda end, part: end + len(split) + len(part), initial=-len(split)))[1:]
    return [(part, end) for part, end in zip(parts, ends, strict=True) if part.strip()] or [(response, len(response))]


def separator_id(process: ProcessSection, tokenizer: ChatTokenizer) -> int:
    """Returns the id of the separator of steps. ConfigError when it is not one token of the model."""
    ids = tokenizer.encode(process.separator)
    if len(ids) != 1:
        raise ConfigError(
            f"process.separator {process.separator!r} is {len(ids)} tokens of the reward model; use the one that it "
            "was trained with"
        )
    return ids[0]


def tokens_at(policy: ChatTokenizer, item: Item, offsets: Sequence[int]) -> tuple[int, ...] | Failure:
    """Returns the index of the response's token that reaches each of these offsets of its text, by the tokenizer of the
    policy.
    """
    ids = [int(token) for token in item.response_token_ids]
    if not ids:
        return Failure("NO_TOKENS", "the response has no tokens that its steps' rewards could stand at")
    if policy.decode(ids) != item.response_text:
        return Failure(
            "OTHER_TOKENIZER", "the response's tokens do not spell its text; set process.policy to the policy's folder"
        )
    lengths = range(1, len(ids) + 1)
    return tuple(
        min(len(ids) - 1, bisect_left(lengths, offset, key=lambda num: len(policy.decode(ids[:num]))))
        for offset in offsets
    )


def _sigmoid(logits: Array) -> Array:
    return np.asarray([1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits])
