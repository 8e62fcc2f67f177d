"""A rubric of the package verifiers as a RewardService, by one call:

    import verifiers as vf
    from rolecall.verifiers import serve_rubric

    sys.exit(serve_rubric(vf.Rubric(funcs=[correct]), "127.0.0.1:50070", name="correct", range=(0, 1)))

Owns what a rubric is shown of an item, and that a function of it that raises gives no number. Takes a rubric by its
shape and imports nothing of that package: whoever makes the rubric has it, in an environment that need not be ours.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from rolecall.errors import RoleCallError, ScorerError
from rolecall.reward import Field, Item, Range, Score, serve_batches

READS: tuple[Field, ...] = ("messages", "response_text", "ground_truth", "metadata")
"""Fields of an item that a rubric is shown."""
_raised: ContextVar[list[Exception]] = ContextVar("_raised")
"""What functions of the rubric raised in the present task, which the rubric itself counts as 0."""


class Rubric(Protocol):
    """The part of `verifiers.Rubric` that is used here."""

    funcs: list[Callable[..., Any]]
    """Reward functions and metrics."""
    has_group_rewards: Any
    """Whether one of them compares the responses to a prompt."""

    async def score_group(self, states: list[Any]) -> None:
        """Writes `reward` and `metrics` into each state."""
        ...


@runtime_checkable
class RubricGroup(Protocol):
    """The part of `verifiers.RubricGroup` that a rubric alone lacks."""

    rubrics: Sequence[Rubric]
    """The rubrics whose rewards are summed."""


def serve_rubric(
    rubric: Rubric,
    address: str = "127.0.0.1:50070",
    *,
    name: str,
    range: Range = (None, None),
    max_items: int = 64,
    bearer_token_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    behind_mesh: bool = False,
) -> int:
    """Serves `rubric` on `address` until SIGTERM or Ctrl-C; returns the exit code. Up to `max_items` responses are
    scored at a time, or whole groups where a function of it compares.

    range: where the weighted sum lies; anything outside is answered as an error. The others are those of
    `rolecall.reward.serve`.
    """
    with AskedRubric(rubric) as asked:
        return serve_batches(
            asked,
            address,
            max_items=max_items,
            name=name,
            range=range,
            reads=READS,
            components=asked.components,
            whole_groups=asked.whole_groups,
            bearer_token_file=bearer_token_file,
            certificate_file=certificate_file,
            key_file=key_file,
            behind_mesh=behind_mesh,
        )


class AskedRubric:
    """A function of many items that asks a rubric, from any thread, one call at a time; `close` at the end, or use
    `with`.
    """

    def __init__(self, rubric: Rubric) -> None:
        """Watches every function of `rubric`, which is this object's from now on."""
        self._rubric = rubric
        self._runner = asyncio.Runner()  # one loop for all calls, which clients of a judge are bound to
        self._turn = threading.Lock()
        self.components: Mapping[str, Range] = dict.fromkeys(_watched(rubric), (None, None))
        """The rubric's functions by name; it does not say where their values lie."""
        self.whole_groups = bool(rubric.has_group_rewards)
        """Whether it is to be given whole groups."""

    def __call__(self, items: Sequence[Item]) -> list[Score | RoleCallError]:
        """One answer per item: the rubric's reward, with each function's value, or why there is none."""
        with self._turn:
            return self._runner.run(self._answers(items))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the loop in which the rubric was asked."""
        self._runner.close()

    async def _answers(self, items: Sequence[Item]) -> list[Score | RoleCallError]:
        if self.whole_groups:
            return await self._scored(items)
        return [answer for (answer,) in await asyncio.gather(*(self._scored([item]) for item in items))]

    async def _scored(self, items: Sequence[Item]) -> list[Score | RoleCallError]:
        raised: list[Exception] = []
        _raised.set(raised)
        states = [_state(item) for item in items]
        await self._rubric.score_group(states)
        if raised:
            error = ScorerError(f"the rubric's function raised {type(raised[0]).__name__}: {raised[0]}")
            return [raised[0] if isinstance(raised[0], RoleCallError) else error] * len(items)
        return [Score(float(state["reward"]), state["metrics"]) for state in states]


def _state(item: Item) -> dict[str, Any]:
    """The part of a rollout's state that rubrics read, in the types of verifiers' data sets."""
    prompt = [{"role": message.role, "content": message.content} for message in item.messages]
    row = {"info": dict(item.metadata), **item.metadata, "prompt": prompt, "answer": item.ground_truth}
    completion = [{"role": "assistant", "content": item.response_text}]
    return {**row, "input": row, "completion": completion, "trajectory": [], "metrics": {}, "reward": 0.0}


def _watched(rubric: Rubric) -> list[str]:
    """Puts a watch around every function of `rubric`, in place; their names."""
    rubrics = rubric.rubrics if isinstance(rubric, RubricGroup) else ()
    rubric.funcs[:] = [_watch(function) for function in rubric.funcs]
    return [*(function.__name__ for function in rubric.funcs), *(name for each in rubrics for name in _watched(each))]


def _watch(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*words: Any, **named: Any) -> Any:
        try:
            answer = function(*words, **named)
            return await answer if inspect.isawaitable(answer) else answer  # bounded: the caller has a deadline
        except Exception as error:  # the entry point of code that is not ours
            _raised.get().append(error)
            raise

    return watched
