r"""Multiple choice: the letter that a response settles on."""

import re
from functools import cache

from rolecall.errors import BadGroundTruthError
from services.reward.scorers.boxed import last_boxed


def choice_answer(text: str, choices: str) -> str | None:
    r"""The letter among `choices` that `text` answers; None when it names none.

    The first of these that is there: "answer is (C)"; "Answer: C"; a letter that stands alone (the steps of MMLU-Pro's
    evaluation, Wang et al. 2024, arXiv:2406.01574). Before them a letter in the last \boxed{...}. Of several the last
    one counts, where MMLU-Pro takes the first "answer is": reasoning may weigh others before. A letter that begins a
    word is none.
    """
    boxed = last_boxed(text)
    for pattern, searched in zip(_patterns(choices), (boxed or "", text, text, text), strict=True):
        found = pattern.findall(searched)
        if found:
            return str(found[-1])
    return None


def choice_match(response_text: str, ground_truth: str, choices: str) -> float:
    """1.0 when the response answers the ground truth's letter ("C", "(C)" or "C."), else 0.0. BadGroundTruthError when
    that is none of `choices`.
    """
    truth = ground_truth.strip().strip("().").upper()
    if len(truth) != 1 or truth not in choices:
        raise BadGroundTruthError(
            f"the ground truth {ground_truth[:200]!r} is no letter of {choices}; correct the data set, or the scorer's "
            "choices"
        )
    return float(choice_answer(response_text, choices) == truth)


@cache
def _patterns(choices: str) -> tuple[re.Pattern[str], ...]:
    letter = rf"([{choices}])\b"
    return (
        re.compile(rf"^\W*(?:\\text\w*\{{)?\(?{letter}"),
        re.compile(rf"answer is:?\s*\*{{0,2}}\(?{letter}"),
        re.compile(rf"[aA]nswer\*{{0,2}}:\s*\*{{0,2}}\(?{letter}"),
        re.compile(rf"\b{letter}"),
    )
