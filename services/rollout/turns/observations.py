"""The length of what an environment answers: of a longer message a part is left out, and a marker says how much.

Owns which part that is. The same text is always cut alike, so that an episode that is begun again reads as before. It
is cut between characters, and stays text: who renders it sees to special tokens that it spells. Images are no part of
the length, and stay. Pure functions of a tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from rolecall.data.continuation import ChatMessage
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.cut import cut_out
from rolecall.wire import Array

Side: TypeAlias = Literal["left", "middle", "right"]
_PIECE_CHARS = 2**18
"""Characters that are tokenized at a time: an answer of 16 MB would take 3 GB at once. No token reaches from one piece
into the next.
"""


class Observations:
    """The shortener of one run's messages."""

    def __init__(self, tokenizer: ChatTokenizer, max_tokens: int | None, cut: Side) -> None:
        """`max_tokens`: most of a message, beside the marker; None: nothing is cut. `cut`: which part is left out."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._cut = cut

    def shortened(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], int]:
        """The messages as the policy reads them, and how many tokens were left out of them."""
        cut = [self._of_content(message["content"]) for message in messages]
        short: list[ChatMessage] = [
            {**message, "content": content} for message, (content, _) in zip(messages, cut, strict=True)
        ]
        return short, sum(num_left_out for _, num_left_out in cut)

    def _of_content(self, content: str | Sequence[Mapping[str, str]]) -> tuple[str | Sequence[Mapping[str, str]], int]:
        if isinstance(content, str):
            (text,), num_left_out = self._of_texts([content])
            return text, num_left_out
        texts, num_left_out = self._of_texts([part.get("text", "") for part in content])
        parts = [{**part, "text": text} if "text" in part else part for part, text in zip(content, texts, strict=True)]
        return [part for part in parts if part.get("text") != ""], num_left_out

    def _of_texts(self, texts: Sequence[str]) -> tuple[Sequence[str], int]:
        """One text that stands in parts, cut as a whole."""
        text = "".join(texts)
        if self._max_tokens is None:
            return texts, 0
        spans = np.concatenate([self._spans(text, at) for at in range(0, max(1, len(text)), _PIECE_CHARS)])
        num_left_out = len(spans) - self._max_tokens
        if num_left_out <= 0:
            return texts, 0
        first = {"left": 0, "middle": (self._max_tokens + 1) // 2, "right": self._max_tokens}[self._cut]
        # a character of which a token is left out is left out whole
        begins, ends = int(spans[first, 0]), int(spans[first + num_left_out - 1, 1])
        return cut_out(texts, begins, ends, f"[{num_left_out:,} tokens left out]"), num_left_out

    def _spans(self, text: str, at: int) -> Array:
        """The characters of each token in the piece of `text` that begins `at` there."""
        return np.array(self._tokenizer.spans(text[at : at + _PIECE_CHARS]), np.int64).reshape(-1, 2) + at
