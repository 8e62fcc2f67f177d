"""Conversions between the contract's messages and the engine's types: prompt groups to sample requests, responses to
rows. Pure functions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import InvalidInputError
from rolecall.settings.data import MAX_RESPONSES, TEMPERATURES, is_sampled_at
from rolecall.trajectory import seed_of
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array, decode_array
from services.rollout.replica import Response
from services.rollout.sampling import SampleRequest


def prompt_token_ids(prompt: trajectory_pb2.Prompt) -> list[int]:
    """Returns the token ids of the rendered prompt."""
    data = prompt.token_ids
    ids: list[int] = decode_array(data, "<i4", (len(data) // 4,), "prompt.token_ids").tolist()
    return ids


def check_sampling(sampling: trajectory_pb2.SamplingParams, num_responses: int) -> None:
    """InvalidInputError names the field that is out of range."""
    if not 1 <= num_responses <= MAX_RESPONSES:
        raise InvalidInputError(f"num_responses is {num_responses}; it must be 1 to {MAX_RESPONSES}")
    if sampling.temperature != 0 and not is_sampled_at(sampling.temperature):
        least, most = TEMPERATURES
        raise InvalidInputError(
            f"sampling.temperature is {sampling.temperature}; it must be 0 (greedy) or {least:g} to {most:g}"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidInputError(f"sampling.top_p is {sampling.top_p}; it must be in (0, 1]")
    if sampling.top_k < 0:
        raise InvalidInputError(f"sampling.top_k is {sampling.top_k}; it must be 0 (all) or more")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidInputError(f"sampling.min_p is {sampling.min_p}; it must be in [0, 1]")
    if sampling.max_tokens < 1:
        raise InvalidInputError(f"sampling.max_tokens is {sampling.max_tokens}; it must be at least 1")


def group_requests(group: trajectory_pb2.PromptGroup, attempt: str) -> list[SampleRequest]:
    """G requests, and the greedy one last where the group wants it; seeds are those of (run seed, gid, i), whoever
    samples and however often. `attempt` keeps request ids of two attempts apart.
    """
    ids = prompt_token_ids(group.prompt)
    check_sampling(group.sampling, group.num_responses)
    if group.sampling.top_p != 1 or group.sampling.top_k or group.sampling.min_p:
        raise InvalidInputError(
            f"group {group.gid} has top_p {group.sampling.top_p}, top_k {group.sampling.top_k} and min_p "
            f"{group.sampling.min_p}; training needs the sampler's distribution whole (1, 0 and 0)"
        )
    samplings = [group.sampling] * group.num_responses
    if group.greedy_response:
        greedy = trajectory_pb2.SamplingParams()
        greedy.CopyFrom(group.sampling)
        greedy.temperature = 0
        samplings.append(greedy)
    images = tuple(group.prompt.images)
    return [
        SampleRequest(f"{group.gid}/{i}:{attempt}", ids, sampling, seed_of(group.run_seed, group.gid, i), images)
        for i, sampling in enumerate(samplings)
    ]


def columns(ids: Sequence[int], response: Response) -> dict[str, Array]:
    """The sampled columns of one trajectory whose prompt is `ids`: token_ids int32, response_mask uint8,
    rollout_logprobs float32, policy_versions int32, all [T]; routed_experts uint8 [T, W] where the engine says them.
    What no span covers an environment said.
    """
    sample, start = response.sample, len(ids)
    num_tokens = start + len(sample.token_ids)
    token_ids = np.array([*ids, *sample.token_ids], dtype=np.int32)
    mask = np.zeros(num_tokens, dtype=np.uint8)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    logprobs[start:] = sample.logprobs
    versions = np.full(num_tokens, -1, dtype=np.int32)
    for span in sample.spans:
        versions[start + span.start : start + span.end] = span.policy_version
        mask[start + span.start : start + span.end] = 1
    routed = {} if sample.routing is None else {ROUTED_EXPERTS: sample.routing}
    return {
        "token_ids": token_ids,
        "response_mask": mask,
        "rollout_logprobs": logprobs,
        "policy_versions": versions,
        **routed,
    }


def images_column(files: Iterable[bytes], shown: Iterable[Sequence[int]] = ()) -> Array:
    """The column `images` of a row that shows `files`: uint8 [bytes], none of one that shows none. `shown`: which of
    them each segment shows; empty: each shows all.
    """
    segments = [trajectory_pb2.SegmentImages(files=each) for each in shown]
    return np.frombuffer(trajectory_pb2.Images(files=files, segments=segments).SerializeToString(), dtype=np.uint8)


def token_ledger(responses: Sequence[Response], num_responses: int) -> trajectory_pb2.EpisodeTokens:
    """Sums the token ledgers of a group's responses; those after the first `num_responses` are greedy."""
    total = trajectory_pb2.EpisodeTokens()
    masked: Counter[str] = Counter()
    for index, response in enumerate(responses):
        tokens = _tokens(response)
        total.num_calls += tokens.num_calls
        total.num_sampled += tokens.num_sampled
        if index >= num_responses:
            masked["greedy"] += tokens.num_sampled
            continue
        total.num_trained += tokens.num_trained
        masked.update(tokens.masked)
    total.masked.update(masked)
    return total


def _tokens(response: Response) -> trajectory_pb2.EpisodeTokens:
    """The token ledger of one response: what its episode says, else all that was sampled is in its row."""
    episode = response.episode
    if episode is not None and episode.HasField("tokens"):
        return episode.tokens
    num_sampled = sum(span.end - span.start for span in response.sample.spans)
    num_calls = 1 if episode is None else len(episode.turns)
    return trajectory_pb2.EpisodeTokens(num_calls=num_calls, num_sampled=num_sampled, num_trained=num_sampled)


def trajectory_meta(
    id: str,
    prompt: trajectory_pb2.Prompt,
    request: SampleRequest,
    response: Response,
    tokenizer: ChatTokenizer,
    consumer: str,
) -> trajectory_pb2.TrajectoryMeta:
    """Returns what is known of one trajectory beside its arrays; gid, index and traceparent are left to the caller.
    `request`: what it began with, of an episode its first turn's.
    """
    sample, num_prompt_tokens = response.sample, len(request.prompt_token_ids)
    said = sample.token_ids
    if response.episode is not None:
        said = said[response.episode.turns[-1].start - num_prompt_tokens :]
    described = trajectory_pb2.Prompt()
    described.CopyFrom(prompt)
    described.ClearField("token_ids")
    described.ClearField("images")
    return trajectory_pb2.TrajectoryMeta(
        id=id,
        prompt=described,
        num_prompt_tokens=num_prompt_tokens,
        response_text=tokenizer.decode(said),
        sampling=request.sampling,
        finish_reason=sample.finish_reason,
        spans=[
            trajectory_pb2.Span(
                policy_version=span.policy_version,
                weights_digest=response.digests[span.policy_version],
                worker=consumer,
                start=num_prompt_tokens + span.start,
                end=num_prompt_tokens + span.end,
            )
            for span in sample.spans
        ],
        tokenizer_digest=tokenizer.digest,
        generation_s=response.generation_s,
        episode=response.episode,
    )
