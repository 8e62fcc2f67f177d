"""Who is asked in an evaluation, and what is counted of the prompts that nobody answered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolecall.errors import GenerationError, RoleCallError, UnavailableError
from rolecall.scoring.scores import Score
from rolecall.settings import EvaluationSet, RunSettings
from rolecall.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from services.controller.evaluation import ROUNDS, Evaluation, HeldOutSet

NUM_PROMPTS, NUM_RESPONSES, VERSION = 3, 2, 7


@dataclass
class Replica:
    """A rollout that holds a version and answers, but for what it fails on."""

    consumer: str
    policy_version: int = VERSION
    failing: dict[str, RoleCallError] = field(default_factory=dict)
    """By the uid of a prompt."""
    asked: list[str] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)

    @property
    def stub(self) -> "Replica":
        """As Rollout.stub."""
        return self

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, timeout: float
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """RolloutService.Generate."""
        self.asked.append(request.prompt.uid)
        self.seeds.add(request.seed)
        for index in range(request.num_responses):
            if request.prompt.uid in self.failing:
                raise self.failing[request.prompt.uid]
            meta = trajectory_pb2.TrajectoryMeta(
                id=f"{request.id}/{index}",
                prompt=request.prompt,
                response_text="1",
                finish_reason=trajectory_pb2.FINISH_REASON_STOP,
            )
            yield rollout_pb2.GenerateResponse(meta=meta, response_token_ids=np.ones(3, "<i4").tobytes())


@dataclass
class Replicas:
    """A fleet of them."""

    all: list[Replica]

    def rollouts(self) -> list[Replica]:
        """Fleet.rollouts."""
        return self.all


class Scorer:
    """Finds every response right, as nearly as a sum of parts may be."""

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Score]:
        """RewardClient.score."""
        return [Score(1.0 - 2**-53) for _ in items]


async def evaluated(
    make_settings: Callable[..., RunSettings], *replicas: Replica, scorer: Scorer | None = None
) -> dict[str, float]:
    section = EvaluationSet.model_validate({"path": "held.jsonl", "num_responses": NUM_RESPONSES})
    prompts = [trajectory_pb2.Prompt(uid=str(i), token_ids=np.ones(2, "<i4").tobytes()) for i in range(NUM_PROMPTS)]
    fleet: Any = Replicas(list(replicas))
    reward: Any = scorer or Scorer()
    evaluation = Evaluation(make_settings(), fleet, reward, [HeldOutSet("held", section, tuple(prompts))])
    metrics, _ = await evaluation.run(4, VERSION)
    return metrics.values()


async def test_a_prompt_that_nobody_could_answer_is_missing_and_in_no_mean(
    make_settings: Callable[..., RunSettings],
) -> None:
    values = await evaluated(make_settings, Replica("r.0", failing={"1": GenerationError("it cannot")}))
    assert values["eval/held/missing"] == NUM_RESPONSES
    assert values["eval/held/accuracy"] == 1.0


async def test_what_tokens_earn_is_reported_and_is_no_success(make_settings: Callable[..., RunSettings]) -> None:
    class Generous(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Score]:
            return [Score(0.5, token_rewards=np.array([0.25, 0.5, 0.0], np.float32)) for _ in items]

    values = await evaluated(make_settings, Replica("r.0"), scorer=Generous())
    assert (values["eval/held/reward"], values["eval/held/accuracy"]) == (1.25, 0.0)


async def test_only_rollouts_that_hold_the_version_are_asked(make_settings: Callable[..., RunSettings]) -> None:
    old, new = Replica("r.0", policy_version=VERSION - 1), Replica("r.1")
    values = await evaluated(make_settings, old, new)
    assert (old.asked, sorted(set(new.asked)), values["eval/held/missing"]) == ([], ["0", "1", "2"], 0)


async def test_what_a_rollout_that_goes_away_was_asked_others_answer(make_settings: Callable[..., RunSettings]) -> None:
    gone = Replica("r.0", failing={str(i): UnavailableError("gone") for i in range(NUM_PROMPTS)})
    values = await evaluated(make_settings, gone, Replica("r.1"))
    assert gone.asked
    assert values["eval/held/missing"] == 0


async def test_a_rollout_whose_connection_broke_once_is_asked_again(make_settings: Callable[..., RunSettings]) -> None:
    class Interrupted(Replica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, timeout: float
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            async for answer in super().Generate(request, timeout):
                yield answer
                if len(self.asked) == NUM_PROMPTS:
                    raise UnavailableError("the stream was reset")

    alone = Interrupted("r.0")
    settings = make_settings(rollout={"max_num_seqs": NUM_RESPONSES})  # one prompt at a time
    values = await evaluated(lambda: settings, alone)
    assert alone.asked == ["0", "1", "2", "2"]
    assert values["eval/held/missing"] == 0


async def test_a_rollout_that_breaks_off_each_time_is_given_up(make_settings: Callable[..., RunSettings]) -> None:
    gone = Replica("r.0", failing={"1": UnavailableError("gone")})
    settings = make_settings(rollout={"max_num_seqs": NUM_RESPONSES})
    values = await evaluated(lambda: settings, gone)
    assert gone.asked.count("1") == ROUNDS
    assert values["eval/held/missing"] == NUM_RESPONSES


async def test_a_prompt_whose_rollout_goes_away_when_the_others_have_done_theirs_is_answered(
    make_settings: Callable[..., RunSettings],
) -> None:
    others_are_done = asyncio.Event()

    class Lingering(Replica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, timeout: float
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            await others_are_done.wait()
            async for answer in super().Generate(request, timeout):
                yield answer

    class Other(Replica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, timeout: float
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            async for answer in super().Generate(request, timeout):
                yield answer
            asyncio.get_running_loop().call_later(0.1, others_are_done.set)

    gone = Lingering("r.0", failing={str(i): UnavailableError("gone") for i in range(NUM_PROMPTS)})
    other = Other("r.1")
    settings = make_settings(rollout={"max_num_seqs": NUM_RESPONSES})  # one prompt at a time
    values = await evaluated(lambda: settings, gone, other)
    assert sorted(other.asked) == ["0", "1", "2"]
    assert values["eval/held/missing"] == 0


def test_an_evaluation_gets_the_time_of_all_prompts_of_all_its_sets(make_settings: Callable[..., RunSettings]) -> None:
    prompt = trajectory_pb2.Prompt(token_ids=np.ones(2, "<i4").tobytes())
    small = EvaluationSet.model_validate({"path": "small.jsonl", "max_tokens": 4000})
    large = EvaluationSet.model_validate({"path": "large.jsonl", "num_responses": 16})
    nobody: Any = Replicas([])
    evaluation = Evaluation(
        make_settings(sampling={"max_tokens": 1000}, rollout={"max_num_seqs": 256}),
        nobody,
        nobody,
        [HeldOutSet("small", small, (prompt,) * 30), HeldOutSet("large", large, (prompt,) * 100)],
    )
    one_round_s, seven_rounds_s = 4000 / 2, 7 * 1000 / 2
    assert evaluation.timeout_s == 600 + one_round_s + seven_rounds_s


async def test_each_prompt_is_sampled_by_a_seed_of_its_own_at_every_step(
    make_settings: Callable[..., RunSettings],
) -> None:
    first, later = Replica("r.0"), Replica("r.0")
    await evaluated(make_settings, first)
    await evaluated(make_settings, later)
    assert first.seeds == later.seeds
    assert len(first.seeds) == NUM_PROMPTS
