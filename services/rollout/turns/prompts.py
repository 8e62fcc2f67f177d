"""The thread of a rollout in which conversations become tokens. Long ones take seconds, in which the event loop must go
on: it hears the engine, and feeds the heartbeat.

Owns the thread and a tokenizer of its own. Bounds: one piece of work at a time, in the order in which they were asked
for; what no context has room for is refused by its characters, before it is counted in tokens.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rolecall.data.continuation import Continuation
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.tokenizer import ChatTokenizer

T = TypeVar("T")


class PromptThread:
    """A thread that makes prompts."""

    def __init__(
        self, tokenizer: ChatTokenizer, max_model_tokens: int, visual_tokens: VisualTokens | None = None
    ) -> None:
        """`visual_tokens`: those of images that prompts may show; None: prompts are text."""
        self.visual_tokens = visual_tokens
        self.tokenizer = tokenizer.twin()
        """A copy of the run's that is used in the thread alone."""
        self.continuation = Continuation(self.tokenizer, max_model_tokens, visual_tokens)
        """The continuation of conversations by that tokenizer, used in the thread alone."""
        self._pool = ThreadPoolExecutor(1, "prompts")

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in the thread, after all that was asked for before it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Ends the thread once its work is done, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)
