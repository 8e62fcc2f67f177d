"""The worth of a judge's answers: each is read strictly, then all of them count together. Pure functions."""

import json
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeAlias

from rolecall.data.json_text import parse_json
from rolecall.errors import AbstainedError, ScorerError
from rolecall.settings import Rubric
from rolecall.settings.reward.rubric import TIE

Votes: TypeAlias = tuple[str | None, ...]
"""The verdict of each answer; None where it could not be read."""


def form_of(rubric: Rubric) -> dict[str, Any]:
    """Fields of a request that hold an answer to its form."""
    verdicts = list(rubric.choices)
    if rubric.answer == "choice":
        return {"structured_outputs": {"choice": verdicts}}
    schema = {
        "type": "object",
        "properties": {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": verdicts}},
        "required": ["reason", "verdict"],
        "additionalProperties": False,
    }
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
    }


def read_votes(answer: Any, rubric: Rubric) -> Votes:
    """The verdicts in the `answer` of a server to one request. ScorerError when it is no answer to it."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ScorerError("its answer has no list of choices; address must be an OpenAI-compatible server's")
    if len(choices) != rubric.num_samples:
        raise ScorerError(
            f"it answered {len(choices)} choices to n={rubric.num_samples}; a server that does not know n takes "
            "num_samples: 1"
        )
    return tuple(_verdict(choice, rubric) for choice in choices)


def worth(votes: Votes, rubric: Rubric) -> float:
    """Returns what `votes` are worth together. AbstainedError when no more than half of them can be read or, for a
    majority, agree.
    """
    read = [vote for vote in votes if vote is not None]
    if 2 * len(read) <= len(votes):
        raise AbstainedError(
            f"{len(votes) - len(read)} of {len(votes)} answers hold no verdict in the form that was asked for, to "
            f"its end; the verdicts are {list(rubric.choices)}, and max_tokens bounds an answer"
        )
    if rubric.vote == "mean":
        worths = [rubric.choices[vote] for vote in read]
        return min(max(fmean(worths), min(worths)), max(worths))  # rounding leads out of a range
    (verdict, count), *_ = Counter(read).most_common(1)
    if 2 * count > len(votes):
        return rubric.choices[verdict]
    if rubric.scope == "group":
        return rubric.choices[TIE]
    raise AbstainedError(f"no verdict has more than half of {len(votes)} answers: {dict(Counter(read))}")


def win_of(forward: float, backward: float, rubric: Rubric) -> float:
    """Returns what a comparison is worth to the response that was shown first in `forward`, and second in `backward`.
    Both are what the answers were worth to whoever was first.
    """
    ours = (forward, 1.0 - backward)
    return fmean(ours) if rubric.vote == "mean" or ours[0] == ours[1] else rubric.choices[TIE]


def _verdict(choice: dict[str, Any], rubric: Rubric) -> str | None:
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str) or choice.get("finish_reason") != "stop":  # what is cut may read as another verdict
        return None
    verdict = content.strip() if rubric.answer == "choice" else _of_json(content)
    return verdict if verdict in rubric.choices else None


def _of_json(content: str) -> str | None:
    try:
        found = parse_json(content, json.JSONDecoder(object_pairs_hook=_pairs))
    except ValueError:
        return None
    if not isinstance(found, dict) or found.keys() != {"reason", "verdict"}:
        return None
    verdict = found["verdict"]
    return verdict if isinstance(verdict, str) else None


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")  # two verdicts are none
    return dict(pairs)
