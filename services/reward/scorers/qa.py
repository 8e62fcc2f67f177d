"""Short answers to questions, compared as SQuAD compares them."""

import re
import string
from collections import Counter

from services.reward.scorers.regex import regex_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """The text as SQuAD's evaluation compares it (Rajpurkar et al. 2016, arXiv:1606.05250): lower case, without ASCII
    punctuation, without a, an and the, single spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def qa_answer(text: str, pattern: re.Pattern[str] | None = None) -> str | None:
    """The normalised answer: of the whole text, or of the last match of `pattern` (its group 1 if it has groups); None
    when there is no match.
    """
    if pattern is None:
        return normalized(text)
    found = regex_answer(text, pattern)
    return None if found is None else normalized(found)


def qa_exact_match(answer: str | None, ground_truth: str) -> float:
    """1.0 when the normalised `answer` is the normalised ground truth, else 0.0."""
    return float(answer == normalized(ground_truth))


def qa_f1(answer: str | None, ground_truth: str) -> float:
    """The harmonic mean of precision and recall over the words of the normalised texts, counted with repetition.

    Where one of them is empty, 1.0 when both are, else 0.0 (SQuAD 2.0, arXiv:1806.03822).
    """
    if answer is None:
        return 0.0
    found, wanted = answer.split(), normalized(ground_truth).split()
    if not found or not wanted:
        return float(found == wanted)
    num_common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * num_common / (len(found) + len(wanted))
