"""A held-out set's responses against a real RewardService that takes its time, or fails in every way that one may."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from rolecall.errors import InvalidInputError, UnavailableError
from rolecall.scoring.client import RewardClient
from rolecall.scoring.scores import Score
from rolecall.settings import FEW_CALLS, ControllerSection, RunSettings
from rolecall.v1 import rollout_pb2, trajectory_pb2
from services.controller.board import RunBoard
from services.controller.held_out import scoring
from services.controller.held_out.patience import Patience
from services.controller.held_out.scoring import HeldOutResponse, HeldOutScorer
from tests.contract.reward_peers import Liar, client_of, serving

MakeSettings = Callable[..., RunSettings]
NUM_PROMPTS, NUM_RESPONSES = 64, 4


def responses() -> list[HeldOutResponse]:
    found = []
    for index in range(NUM_PROMPTS):
        prompt = trajectory_pb2.Prompt(uid=str(index), token_ids=np.ones(2, "<i4").tobytes())
        for place in range(NUM_RESPONSES):
            id = f"eval/4/held/{index}/{place}"
            meta = trajectory_pb2.TrajectoryMeta(id=id, prompt=prompt, response_text="1")
            answer = rollout_pb2.GenerateResponse(meta=meta, response_token_ids=np.ones(3, "<i4").tobytes())
            found.append(HeldOutResponse(prompt, answer, ()))
    return found


async def scores_by(client: RewardClient, settings: RunSettings) -> dict[str, Score]:
    """The scores, which must be there within a minute."""
    async with asyncio.timeout(60) as limit:
        return await HeldOutScorer(settings, client, responses(), Patience(RunBoard(), 60, limit)).scores()


async def test_a_slow_scorer_is_called_as_often_at_a_time_as_for_groups_that_are_trained_on(
    make_settings: MakeSettings,
) -> None:
    """None of the first calls is answered before all are under way."""
    liar, together = Liar(), asyncio.Barrier(FEW_CALLS)
    liar.fail = lambda: together.wait() if len(liar.requests) <= FEW_CALLS else None
    async with serving(liar) as address, client_of(address, timeout_s=60.0, is_joint=True) as client:
        scored = await scores_by(client, make_settings(sampling={"num_responses": NUM_RESPONSES}))
    assert len(scored) == NUM_PROMPTS * NUM_RESPONSES
    assert liar.most_at_once == FEW_CALLS
    per_call = NUM_PROMPTS * NUM_RESPONSES // ControllerSection.max_score_calls
    assert [len(request.items) for request in liar.requests[:FEW_CALLS]] == [per_call] * FEW_CALLS


@pytest.mark.parametrize("error", [UnavailableError("it restarts"), InvalidInputError("no such items")])
async def test_a_scorer_that_fails_for_a_while_is_asked_again_and_one_that_refuses_is_not(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, error: UnavailableError | InvalidInputError
) -> None:
    monkeypatch.setattr(scoring, "PAUSE_S", 0.1)
    liar = Liar()

    def fail() -> None:
        if len(liar.requests) <= FEW_CALLS:
            raise error

    liar.fail = fail
    async with serving(liar) as address, client_of(address, is_joint=True) as client:
        scored = await scores_by(client, make_settings(sampling={"num_responses": NUM_RESPONSES}))
    refused = 0 if error.retryable else FEW_CALLS * len(liar.requests[0].items)
    assert len(scored) == NUM_PROMPTS * NUM_RESPONSES - refused
