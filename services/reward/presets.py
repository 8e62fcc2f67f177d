"""The scorers of published data sets, bound to a component's configuration; the rest of the catalog is catalog.py."""

import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

from rolecall.errors import BadGroundTruthError
from rolecall.scoring.scores import Item, Score, ScoreFunction
from rolecall.settings import ChoiceScorer, InstructionScorer, NumberScorer, PatternScorer, PresetScorer
from rolecall.settings.reward.presets import INSTRUCTIONS_FIELD
from services.reward.scorers.ifeval import followed, followed_loosely
from services.reward.scorers.multiple_choice import choice_answer, choice_match
from services.reward.scorers.numbers import gsm8k_answer, gsm8k_match, last_number, numeric_match
from services.reward.scorers.qa import qa_answer, qa_exact_match, qa_f1


def bind_preset(scorer: PresetScorer) -> ScoreFunction:
    """The function of `scorer`. It raises BadGroundTruthError for an item without what it compares with."""
    match scorer:
        case NumberScorer(kind="gsm8k"):
            flexible = scorer.flexible
            return comparing(partial(gsm8k_match, flexible=flexible), partial(gsm8k_answer, flexible=flexible))
        case NumberScorer():
            match = partial(numeric_match, tolerance=scorer.tolerance)
            return comparing(match, lambda text: _written(last_number(text)))
        case ChoiceScorer():
            choices = scorer.choices
            return comparing(partial(choice_match, choices=choices), partial(choice_answer, choices=choices))
        case InstructionScorer():
            check = followed_loosely if scorer.loose else followed
            is_partial = scorer.partial
            return lambda item: _instructions(item, check, is_partial=is_partial)


def bind_qa(scorer: PatternScorer) -> ScoreFunction:
    """The function of a `scorer` that compares as SQuAD does, as bind_preset."""
    compare = qa_exact_match if scorer.kind == "qa_exact_match" else qa_f1
    pattern = None if scorer.pattern is None else re.compile(scorer.pattern, re.DOTALL)
    return lambda item: _qa(item, compare, pattern)


def comparing(match: Callable[[str, str], float], answer_of: Callable[[str], str | None]) -> ScoreFunction:
    """A scorer by `match` of the response and the ground truth that it is nearest to; `answer_of` reads the answer in
    it. BadGroundTruthError for an item without a ground truth.
    """
    return lambda item: Score(
        max(match(item.response_text, truth) for truth in truths(item)), answer=answer_of(item.response_text)
    )


def truths(item: Item) -> tuple[str, ...]:
    """Every right answer, at least one. BadGroundTruthError when there is none."""
    if not item.ground_truths:
        raise BadGroundTruthError(
            f"item {item.id} has no ground truth to compare with; give every prompt one, or use a scorer that needs "
            "none"
        )
    return item.ground_truths


def _qa(item: Item, compare: Callable[[str | None, str], float], pattern: re.Pattern[str] | None) -> Score:
    answer = qa_answer(item.response_text, pattern)
    return Score(max(compare(answer, truth) for truth in truths(item)), answer=answer)


def _instructions(item: Item, check: Callable[..., list[bool]], *, is_partial: bool) -> float:
    names: Any = item.metadata.get(INSTRUCTIONS_FIELD)
    if not isinstance(names, list) or not names:
        raise BadGroundTruthError(
            f"item {item.id} has no {INSTRUCTIONS_FIELD}; give every prompt one, or leave it to another scorer by when"
        )
    given: Any = item.metadata.get("kwargs") or [{}] * len(names)
    if len(given) != len(names):
        raise BadGroundTruthError(f"item {item.id} has {len(names)} instructions and {len(given)} kwargs; mend it")
    results = check(item.response_text, names, given)
    return sum(results) / len(results) if is_partial else float(all(results))


def _written(number: Decimal | None) -> str | None:
    return None if number is None else format(number.normalize(), "f")
