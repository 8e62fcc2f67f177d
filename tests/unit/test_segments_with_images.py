"""Random trees of an agent's calls that show images, as rows: each segment shows what the engine was given for it, and
trainers read that of the row.
"""

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall.columns import IMAGES
from rolecall.data.images.tokens import VisualTokens, run_lengths
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.training.packing.pieces import cut
from rolecall.v1 import trajectory_pb2
from services.rollout.harness.attempt import Attempt, Limits
from services.rollout.harness.calls import DIGEST, ChatCall, RefusedError, digests_of
from services.rollout.replica import Response
from services.rollout.sampling import EngineInfo, Sample, SampleRequest, VersionSpan
from services.rollout.trajectories import columns, images_column
from services.rollout.turns.prompts import PromptThread
from tests.pictures import PAD, picture
from tests.tiny_tokenizer import EOS_TOKEN_ID, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer

LONGEST = 900
TOKENS = VisualTokens(PAD, 4, 2, 64, 4096)
FILES = [*(picture(16, 16, seed) for seed in range(3)), picture(24, 16, 3)]
"""Three of as many tokens, and one of more. The first is the row's own."""
NUMBERS = dict(zip(FILES, (4, 4, 4, 6), strict=True))
DIGESTS = {hashlib.sha256(file).hexdigest(): file for file in FILES}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["root", "on", "again", "swapped"]),
        st.integers(0, 99),
        st.lists(st.integers(0, len(FILES) - 1), max_size=2),
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=8,
)
"""How a call follows an earlier one, which, what it shows, and whether the answer has a placeholder of an image."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VISION_TEMPLATE, VISION_TOKENS)
    return ChatTokenizer(folder)


@dataclass
class Sampler:
    """A replica that remembers, of each answer, every id up to its end and the images that stand before it."""

    tokenizer: ChatTokenizer
    info: EngineInfo = EngineInfo(LONGEST, 1, (EOS_TOKEN_ID,), ())
    has_placeholder: bool = False
    """Whether the next answer has one."""
    asked: list[tuple[list[int], list[bytes]]] = field(default_factory=list)

    async def sample(self, request: SampleRequest) -> Response:
        said = [*self.tokenizer.encode(f"said {len(self.asked)}"), EOS_TOKEN_ID]
        said[:0] = [PAD, PAD] if self.has_placeholder else []
        self.asked.append(([*request.prompt_token_ids, *said], list(request.images)))
        logprobs = np.full(len(said), -1, np.float32)
        spans = (VersionSpan(1, 0, len(said)),)
        sample = Sample(tuple(said), logprobs, spans, trajectory_pb2.FINISH_REASON_STOP)
        return Response(sample, {1: "d"}, 0.1)


def shown(number: int, files: list[int]) -> dict[str, Any]:
    images = [{"type": "image", DIGEST: [*DIGESTS][file]} for file in files]
    return {"role": "user", "content": [*images, {"type": "text", "text": f"more {number}"}]}


async def played(tokenizer: ChatTokenizer, steps: list[Any], room: int) -> tuple[Attempt, Sampler]:
    """An agent that calls as `steps` say: from nothing, from an earlier answer, the same again, with the images of the
    first message swapped.
    """
    attempt, sampler, prompts = attempt_of(tokenizer, room, sum(map(len, FILES[1:])), 600)
    calls: list[tuple[list[dict[str, Any]], Any]] = []
    for number, (kind, choice, files, has_placeholder) in enumerate(steps):
        sampler.has_placeholder = has_placeholder
        more = shown(number, files)
        messages, reply = calls[choice % len(calls)] if calls and kind != "root" else ([], None)
        if reply is None:
            messages = [more]
        elif kind != "again":
            head = shown(0, files) if kind == "swapped" else messages[0]
            messages = [head, *messages[1:], dict(reply), more]
        answer = await attempt.answer(ChatCall(tuple(messages), files=DIGESTS))
        attempt.seen(answer.number)
        showing = [DIGESTS[digest] for message in messages for digest in digests_of(message)]
        assert sampler.asked[-1][1] == showing, "the engine sees what the agent shows"
        calls.append((messages, answer.message))
    prompts.close()
    return attempt, sampler


def attempt_of(
    tokenizer: ChatTokenizer, room: int, max_image_bytes: int, seconds: float
) -> tuple[Attempt, Sampler, PromptThread]:
    sampler = Sampler(tokenizer)
    first = SampleRequest("r", (), trajectory_pb2.SamplingParams(temperature=1, max_tokens=LONGEST), 1, (FILES[0],))
    limits = Limits(LONGEST, 100, room, max_image_bytes, time.monotonic() + seconds)
    prompts = PromptThread(tokenizer, LONGEST, TOKENS)
    return Attempt(first, limits, cast(Any, sampler), tokenizer, prompts, None, asyncio.Semaphore()), sampler, prompts


async def test_a_question_of_tokens_has_the_bounds_of_a_call_and_spends_none(tokenizer: ChatTokenizer) -> None:
    attempt, _, prompts = attempt_of(tokenizer, LONGEST, len(FILES[1]), 600)
    both = ChatCall((shown(0, [1, 2]),), files={digest: DIGESTS[digest] for digest in [*DIGESTS][:3]})
    with pytest.raises(RefusedError, match="bytes of images that it may") as refused:
        await attempt.num_prompt_tokens(both)
    assert (refused.value.status, attempt.refused_by) == (400, "")
    one = ChatCall((shown(0, [0, 1]),), files={digest: DIGESTS[digest] for digest in [*DIGESTS][:2]})
    num_tokens = await attempt.num_prompt_tokens(one)
    assert (await attempt.answer(one)).num_prompt_tokens == num_tokens
    prompts.close()
    late, _, prompts = attempt_of(tokenizer, LONGEST, len(FILES[1]), -1)
    with pytest.raises(RefusedError, match="the episode's time is spent"):
        await late.num_prompt_tokens(one)
    prompts.close()


@pytest.mark.parametrize(("room", "token_budget"), [(10**6, 10**6), (10**6, 100), (LONGEST, 10**6)])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_segment_shows_the_images_that_the_engine_was_given_for_it(
    tokenizer: ChatTokenizer, room: int, token_budget: int, steps: list[Any]
) -> None:
    attempt, sampler = asyncio.run(played(tokenizer, steps, room))
    first, response = attempt.ended("terminated", None, [], 1.0)
    files = [FILES[0], *response.images]
    assert len(set(files)) == len(files), "each once"
    row = {**columns(first.prompt_token_ids, response), IMAGES: images_column(files, response.shown)}
    bounds = [0, *response.segment_starts, len(row["token_ids"])]
    pieces = cut([np.diff(bounds).tolist()], token_budget, between_segments=True)
    segments = [segment for piece in pieces for segment in piece.segments(row)]
    assert len(segments) == len(bounds) - 1
    for segment in segments:
        own = list(trajectory_pb2.Images.FromString(segment[IMAGES].tobytes()).files)
        assert (segment["token_ids"].tolist(), own) in sampler.asked
        runs = run_lengths(segment["token_ids"].tolist(), PAD)[: len(own)]
        assert runs == [NUMBERS[file] for file in own], "each image stands before what was sampled as one"
    assert room < 10**6 or row["response_mask"].sum() == response.episode.tokens.num_sampled  # type: ignore[union-attr]
