"""The figures of an evaluated set.

A response that has no score is in the means of lengths and in no other: a prompt with fewer than k scored responses is
in no figure of k.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import stdev

import numpy as np

from rolecall.algorithms.best_and_worst import best_and_worst_at_k, is_graded
from rolecall.algorithms.pass_and_majority import majority_at_k, pass_at_k, subset_sizes
from rolecall.scoring.scores import Score
from rolecall.telemetry import Metrics
from rolecall.trajectory import is_truncated
from services.controller.evaluation.responses import Response
from services.controller.evaluation.sets import HeldOutSet


def summarise(
    held_out: HeldOutSet,
    responses: Sequence[Response],
    scored: dict[str, Score],
    solved_at: float,
    metrics: Metrics,
) -> None:
    """Adds what is reported of a set, "eval/<set>/...": over its responses, its prompts and its sources."""
    prefix = f"eval/{held_out.name}"
    metrics.sum(f"{prefix}/missing", len(held_out.prompts) * held_out.section.num_responses - len(scored))
    for response in responses:
        metrics.mean(f"{prefix}/response_tokens", response.num_tokens)
        metrics.mean(f"{prefix}/truncated", float(is_truncated(response.answer.meta)))
    for score in scored.values():
        metrics.mean(f"{prefix}/reward", score.total)
        metrics.mean(f"{prefix}/accuracy", float(score.reaches(solved_at)))
        for name, value in score.components.items():
            metrics.mean(f"{prefix}/{name}", value)
    _summarise_prompts(prefix, held_out.section.num_responses, solved_at, scored, metrics)
    _summarise_sources(prefix, held_out.sources, solved_at, scored, metrics)


def _summarise_prompts(
    prefix: str, num_responses: int, solved_at: float, scored: dict[str, Score], metrics: Metrics
) -> None:
    """mean@n with its standard error, and pass@k, maj@k, best@k and worst@k by k, each a mean over prompts. maj@k only
    where the scorer named an answer to anything in the set; best@k and worst@k only of several responses, and where
    some reward in the set is neither 0 nor 1.
    """
    by_prompt: dict[str, list[Score]] = {}
    for id, score in scored.items():
        by_prompt.setdefault(id.rpartition("/")[0], []).append(score)
    votes = any(score.answer is not None for score in scored.values())
    graded = num_responses > 1 and is_graded(np.array([score.total for score in scored.values()]))
    shares = list[float]()
    for scores in by_prompt.values():
        solved_N = np.array([score.reaches(solved_at) for score in scores])
        sizes = [k for k in subset_sizes(num_responses) if k <= len(scores)]
        shares.append(float(solved_N.mean()))
        metrics.mean(f"{prefix}/mean@{num_responses}", shares[-1])
        for k in sizes:
            metrics.mean(f"{prefix}/pass@{k}", pass_at_k(len(scores), int(solved_N.sum()), k))
        if votes:
            for k, chance in majority_at_k([score.answer for score in scores], solved_N, sizes).items():
                metrics.mean(f"{prefix}/maj@{k}", chance)
        if graded:
            rewards_N = np.array([score.total for score in scores])
            for k, (best, worst) in best_and_worst_at_k(rewards_N, sizes).items():
                metrics.mean(f"{prefix}/best@{k}", best)
                metrics.mean(f"{prefix}/worst@{k}", worst)
    if len(shares) > 1:
        metrics.max(f"{prefix}/standard_error", stdev(shares) / math.sqrt(len(shares)))


def _summarise_sources(
    prefix: str, sources: Sequence[str | None], solved_at: float, scored: Mapping[str, Score], metrics: Metrics
) -> None:
    """Reward and accuracy over the scored responses of each source, and the prompts of which there are any."""
    places: dict[str, set[int]] = {source: set() for source in sources if source is not None}
    for id, score in scored.items() if places else ():
        place = int(id.split("/")[-2])
        source = sources[place]
        if source is not None:
            places[source].add(place)
            metrics.mean(f"{prefix}/source/{source}/reward", score.total)
            metrics.mean(f"{prefix}/source/{source}/accuracy", float(score.reaches(solved_at)))
    for source, found in places.items():
        metrics.sum(f"{prefix}/source/{source}/prompts", len(found))
