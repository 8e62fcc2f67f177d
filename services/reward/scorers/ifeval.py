"""Verifiable instructions: checks of IFEval (Zhou et al. 2023, arXiv:2311.07911), by the data set's own ids and
arguments.

Each check is a function of the response and its arguments. Where the published code splits words and sentences with
NLTK, these do it by characters: a word is a run of letters, digits and underscores, a sentence ends with . ! or ?.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rolecall.errors import BadGroundTruthError

_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
_WORD = re.compile(r"\w+")


def followed(response_text: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Whether the response follows each instruction: IFEval's strict accuracy. An empty response follows none.
    BadGroundTruthError names an instruction that is not known or lacks arguments.
    """
    return [
        bool(response_text.strip()) and _check(name, response_text, given)
        for name, given in zip(instructions, arguments, strict=True)
    ]


def followed_loosely(
    response_text: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]]
) -> list[bool]:
    """Whether the response, or the response without its first line, last line, both, or asterisks follows each
    instruction: IFEval's loose accuracy.
    """
    lines = response_text.split("\n")
    cut = [response_text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    variants = [followed(text, instructions, arguments) for each in cut for text in (each, each.replace("*", ""))]
    return [any(of_one) for of_one in zip(*variants, strict=True)]


def _check(name: str, text: str, given: Mapping[str, Any]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        raise BadGroundTruthError(f"the instruction {name!r} is not among those that kind ifeval checks; leave it out")
    try:
        return check(text, **{key: value for key, value in given.items() if value is not None})
    except (TypeError, ValueError) as error:
        raise BadGroundTruthError(f"the instruction {name!r} has other arguments than it needs: {error}") from error


def _compared(number: int, relation: str, bound: float) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")
    return number >= bound if relation == "at least" else number < bound


def _has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: float, relation: str) -> bool:
    return _compared(text.lower().count(keyword.lower()), relation, frequency)


def _no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: float, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _num_sentences(text: str, num_sentences: float, relation: str) -> bool:
    rest = _SENTENCE_END.split(text.strip())
    return _compared(len([part for part in rest if part.strip()]), relation, num_sentences)


def _num_words(text: str, num_words: float, relation: str) -> bool:
    return _compared(len(_WORD.findall(text)), relation, num_words)


def _parts(text: str, divider: str) -> list[str]:
    """Parts between dividers, without an empty one at either end."""
    parts = [part.strip() for part in re.split(divider, text)]
    return parts[0 if parts[0] else 1 : len(parts) if parts[-1] else -1]


def _num_paragraphs(text: str, num_paragraphs: float) -> bool:
    parts = _parts(text, r"\s?\*\*\*\s?")
    return all(parts) and len(parts) == num_paragraphs


def _nth_paragraph_begins(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    word = re.match(r"[^.,?!'\"]*", paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("'\""))
    return word is not None and word.group().lower() == first_word.lower()


def _num_placeholders(text: str, num_placeholders: float) -> bool:
    # each ends at the first ] behind a [ of its line; a pattern would look through a line once for each [
    found = ("[" in part for line in text.split("\n") for part in line.split("]")[:-1])
    return sum(found) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    spelled = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(postscript_marker)
    return re.search(spelled or re.escape(postscript_marker.lower()), text.lower()) is not None


def _num_bullets(text: str, num_bullets: float) -> bool:
    starred, dashed = re.findall(r"^\s*\*[^*].*$", text, re.M), re.findall(r"^\s*-.*$", text, re.M)
    return len(starred) + len(dashed) == num_bullets


def _constrained(text: str) -> bool:
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


def _num_highlights(text: str, num_highlights: float) -> bool:
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return len([part for part in found if part.strip("*").strip()]) >= num_highlights


def _num_sections(text: str, section_spliter: str, num_sections: float) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) - 1 >= num_sections


def _json(text: str) -> bool:
    bare = re.sub(r"^```(?:json|JSON|Json)?|```$", "", text.strip()).strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    lines = (line[: line.rfind(">>") + 2] for line in text.split("\n"))  # behind the last >> each << would be tried
    return any(title.strip() for line in lines for title in re.findall(r"<<(.+?)>>", line))


def _two_responses(text: str) -> bool:
    parts = _parts(text, r"\*{6}")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _capital_words(text: str, capital_frequency: float, capital_relation: str) -> bool:
    return _compared(sum(word.isupper() for word in _WORD.findall(text)), capital_relation, capital_frequency)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "combination:repeat_prompt": _repeats_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _num_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _num_sections,
    "detectable_format:number_bullet_lists": _num_bullets,
    "detectable_format:number_highlighted_sections": _num_highlights,
    "detectable_format:title": _title,
    "keywords:existence": _has_keywords,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_begins,
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_sentences": _num_sentences,
    "length_constraints:number_words": _num_words,
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
}
"""The check of each instruction, by IFEval's id."""
