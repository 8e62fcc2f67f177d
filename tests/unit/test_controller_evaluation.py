"""Who is asked in an evaluation, who is waited for, and what is counted of the prompts that nobody answered."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rolecall.data.images.files import ImageFile
from rolecall.errors import GenerationError, RoleCallError, ScorerError, UnavailableError
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import EvaluationSet, RunSettings
from rolecall.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from services.controller.board import RunBoard
from services.controller.evaluation import evaluation, scoring
from services.controller.evaluation.evaluation import ROUNDS, Evaluation, Patience
from services.controller.evaluation.scoring import TRIES
from services.controller.evaluation.sets import HeldOutSet
from tests.waiting import until

NUM_PROMPTS, NUM_RESPONSES, VERSION = 3, 2, 7
LEASE_S = 0.5
"""Pause before a rollout that broke off is asked again."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "LOOK_S", 0.01)
    monkeypatch.setattr(scoring, "PAUSE_S", 0.01)


@dataclass(eq=False)
class Replica:
    """A rollout that holds a version and answers, but for what it fails on."""

    consumer: str
    policy_version: int = VERSION
    failing: dict[str, RoleCallError] = field(default_factory=dict)
    """By the uid of a prompt."""
    asked: list[str] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    shown: dict[str, list[bytes]] = field(default_factory=dict)
    """The images of each prompt that was asked, by its uid."""
    num_shown: int = 0
    """Images that an environment showed in each response."""
    last_seen: float = math.inf

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
        self.shown[request.prompt.uid] = list(request.prompt.images)
        for index in range(request.num_responses):
            if request.prompt.uid in self.failing:
                raise self.failing[request.prompt.uid]
            meta = trajectory_pb2.TrajectoryMeta(
                id=f"{request.id}/{index}",
                prompt=request.prompt,
                response_text="1",
                finish_reason=trajectory_pb2.FINISH_REASON_STOP,
                episode=trajectory_pb2.Episode(num_images=self.num_shown) if self.num_shown else None,
            )
            if self.num_shown:
                meta.episode.turns.add(start=2, end=5)
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

    described: reward_pb2.DescribeResponse | None = None

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
        """RewardClient.score."""
        return [Score(1.0 - 2**-53) for _ in items]


async def evaluated(
    make_settings: Callable[..., RunSettings],
    *replicas: Replica,
    scorer: Scorer | None = None,
    fleet: Replicas | None = None,
    board: RunBoard | None = None,
    settings: RunSettings | None = None,
    images: Mapping[int, tuple[ImageFile, ...]] = {},
    sources: tuple[str | None, ...] = (),
    num_prompts: int = NUM_PROMPTS,
) -> dict[str, float]:
    section = EvaluationSet.model_validate({"path": "held.jsonl", "num_responses": NUM_RESPONSES})
    prompts = [trajectory_pb2.Prompt(uid=str(i), token_ids=np.ones(2, "<i4").tobytes()) for i in range(num_prompts)]
    members: Any = fleet or Replicas(list(replicas))
    reward: Any = scorer or Scorer()
    settings = settings or make_settings(controller={"lease_s": LEASE_S})
    held_out = HeldOutSet("held", section, tuple(prompts), images, sources)
    metrics, _ = await Evaluation(settings, members, reward, board or RunBoard(), [held_out]).run(4, lambda: VERSION)
    return metrics.values()


def one_at_a_time(make_settings: Callable[..., RunSettings]) -> RunSettings:
    """Settings under which a rollout is asked one prompt at a time."""
    return make_settings(rollout={"max_num_seqs": NUM_RESPONSES}, controller={"lease_s": LEASE_S})


async def test_a_prompt_that_nobody_could_answer_is_missing_and_in_no_mean(
    make_settings: Callable[..., RunSettings],
) -> None:
    values = await evaluated(make_settings, Replica("r.0", failing={"1": GenerationError("it cannot")}))
    assert values["eval/held/missing"] == NUM_RESPONSES
    assert values["eval/held/accuracy"] == 1.0


async def test_images_are_read_when_their_prompt_is_asked_and_one_that_is_gone_costs_its_prompt_alone(
    make_settings: Callable[..., RunSettings], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    images = {place: (ImageFile(7, tmp_path / name),) for place, name in enumerate(["a.png", "gone.png"])}
    replica = Replica("r.0")
    values = await evaluated(make_settings, replica, images=images)
    assert replica.shown == {str(i): [b"picture"] if i == 0 else [] for i in range(NUM_PROMPTS) if i != 1}
    assert values["eval/held/missing"] == NUM_RESPONSES


async def test_images_reach_a_scorer_that_reads_them_and_no_other(
    make_settings: Callable[..., RunSettings], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Seeing(Scorer):
        reads: ClassVar[list[Any]] = [reward_pb2.SCORE_FIELD_IMAGES]

        def __init__(self) -> None:
            self.seen: dict[str, list[bytes]] = {}

        async def describe(self) -> reward_pb2.DescribeResponse:
            return reward_pb2.DescribeResponse(reads=self.reads)

        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
            self.seen |= {item.id.split("/")[3]: list(item.images) for item in items}
            return await super().score(items)

    class Blind(Seeing):
        reads: ClassVar[list[Any]] = []

    (tmp_path / "a.png").write_bytes(b"picture")
    images = {0: (ImageFile(7, tmp_path / "a.png"),)}
    settings = make_settings(data={"train": "train.jsonl", "images_field": "images"})
    for scorer, seen in ((Seeing(), [b"picture"]), (Blind(), [])):
        values = await evaluated(make_settings, Replica("r.0"), scorer=scorer, images=images, settings=settings)
        assert scorer.seen == {"0": seen, "1": [], "2": []}
        assert values["eval/held/missing"] == 0

    class Changed(Seeing):
        async def describe(self) -> reward_pb2.DescribeResponse:
            raise ScorerError("it changed")

    changed = await evaluated(make_settings, Replica("r.0"), scorer=Changed(), images=images, settings=settings)
    assert changed["eval/held/missing"] == 6
    replica = Replica("r.0", num_shown=1)
    assert (await evaluated(make_settings, replica, scorer=Seeing(), settings=settings))["eval/held/missing"] == 6
    assert "is not scored: its environment's images are not kept" in caplog.text


async def test_what_tokens_earn_is_reported_and_is_no_success(make_settings: Callable[..., RunSettings]) -> None:
    class Generous(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
            return [Score(0.5, token_rewards=np.array([0.25, 0.5, 0.0], np.float32)) for _ in items]

    values = await evaluated(make_settings, Replica("r.0"), scorer=Generous())
    assert (values["eval/held/reward"], values["eval/held/accuracy"]) == (1.25, 0.0)


async def test_the_best_and_the_worst_are_reported_of_graded_rewards_alone(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Grading(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
            return [Score(0.25 * int(item.id.rpartition("/")[2])) for item in items]

    figures = {f"eval/held/{kind}@{k}" for kind in ("best", "worst") for k in (1, 2)}
    values = await evaluated(make_settings, Replica("r.0"), scorer=Grading())
    assert {name: values[name] for name in figures} == {
        "eval/held/best@1": 0.125,
        "eval/held/best@2": 0.25,
        "eval/held/worst@1": 0.125,
        "eval/held/worst@2": 0.0,
    }
    assert not figures & (await evaluated(make_settings, Replica("r.0"))).keys()


async def test_each_source_is_reported_by_itself_over_its_scored_responses(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Grading(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
            right = {"eval/4/held/0/1", "eval/4/held/2/0", "eval/4/held/2/1"}
            return [Score(1.0 if item.id in right else 0.25) for item in items]

    def of_sources(values: Mapping[str, float]) -> dict[str, float]:
        return {name.removeprefix("eval/held/source/"): value for name, value in values.items() if "/source/" in name}

    scorer, parted = Grading(), ("openai/gsm8k", None, "math")
    assert of_sources(await evaluated(make_settings, Replica("r.0"), scorer=scorer, sources=parted)) == {
        "openai/gsm8k/reward": 0.625,
        "openai/gsm8k/accuracy": 0.5,
        "openai/gsm8k/prompts": 1,
        "math/reward": 1.0,
        "math/accuracy": 1.0,
        "math/prompts": 1,
    }
    mixed, failing = ("a", "a", "b"), Replica("r.0", failing={uid: GenerationError("it cannot") for uid in "12"})
    assert of_sources(await evaluated(make_settings, failing, scorer=scorer, sources=mixed)) == {
        "a/reward": 0.625,
        "a/accuracy": 0.5,
        "a/prompts": 1,
        "b/prompts": 0,
    }, "prompts that nobody could answer are in no mean"
    assert not of_sources(await evaluated(make_settings, Replica("r.0"), scorer=scorer))


async def test_only_rollouts_that_hold_the_version_are_asked(make_settings: Callable[..., RunSettings]) -> None:
    old, new = Replica("r.0", policy_version=VERSION - 1), Replica("r.1")
    values = await evaluated(make_settings, old, new)
    assert (old.asked, sorted(set(new.asked)), values["eval/held/missing"]) == ([], ["0", "1", "2"], 0)


async def test_what_a_rollout_that_goes_away_was_asked_others_answer(make_settings: Callable[..., RunSettings]) -> None:
    gone = Replica("r.0", failing={str(i): UnavailableError("gone") for i in range(NUM_PROMPTS)})
    values = await evaluated(make_settings, gone, Replica("r.1"))
    assert gone.asked
    assert values["eval/held/missing"] == 0


async def test_an_error_that_nobody_foresaw_ends_what_all_others_were_asked(
    make_settings: Callable[..., RunSettings],
) -> None:
    is_left = asyncio.Event()

    class Hanging(Replica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, timeout: float
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            self.asked.append(request.prompt.uid)
            try:
                await asyncio.Event().wait()
            finally:
                is_left.set()
            yield rollout_pb2.GenerateResponse()

    class Broken(Replica):
        async def Generate(
            self, request: rollout_pb2.GenerateRequest, timeout: float
        ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            await until(lambda: bool(hanging.asked))
            yield rollout_pb2.GenerateResponse()
            raise RuntimeError("broken")

    hanging = Hanging("r.0")
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="broken"):
            await evaluated(make_settings, hanging, Broken("r.1"), settings=one_at_a_time(make_settings))
    assert is_left.is_set()


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
    settings = one_at_a_time(make_settings)
    values = await evaluated(make_settings, alone, settings=settings)
    assert alone.asked == ["0", "1", "2", "2"]
    assert values["eval/held/missing"] == 0


async def test_a_rollout_that_breaks_off_each_time_is_given_up(make_settings: Callable[..., RunSettings]) -> None:
    gone = Replica("r.0", failing={"1": UnavailableError("gone")})
    settings = one_at_a_time(make_settings)
    values = await evaluated(make_settings, gone, settings=settings)
    assert gone.asked.count("1") == ROUNDS
    assert values["eval/held/missing"] == NUM_RESPONSES


async def test_a_rollout_that_broke_off_is_asked_again_once_it_was_heard(
    make_settings: Callable[..., RunSettings],
) -> None:
    gone = Replica("r.0", failing={"1": UnavailableError("gone")}, last_seen=time.monotonic())
    running = asyncio.create_task(evaluated(make_settings, gone, settings=one_at_a_time(make_settings)))
    await until(lambda: "1" in gone.asked)
    del gone.failing["1"]
    assert not (await asyncio.wait([running], timeout=2 * LEASE_S))[0]
    gone.last_seen = math.inf
    async with asyncio.timeout(60):
        assert (await running)["eval/held/missing"] == 0


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
    settings = one_at_a_time(make_settings)
    values = await evaluated(make_settings, gone, other, settings=settings)
    assert sorted(other.asked) == ["0", "1", "2"]
    assert values["eval/held/missing"] == 0


async def test_a_rollout_with_the_weights_is_waited_for_as_long_as_there_is_none(
    make_settings: Callable[..., RunSettings],
) -> None:
    late = Replica("r.0", policy_version=VERSION - 1)
    fleet = Replicas([])
    running = asyncio.create_task(evaluated(make_settings, fleet=fleet))
    assert not (await asyncio.wait([running], timeout=0.3))[0]
    fleet.all.append(late)
    assert not (await asyncio.wait([running], timeout=0.3))[0]
    late.policy_version = VERSION
    async with asyncio.timeout(60):
        assert (await running)["eval/held/missing"] == 0


class Away(Scorer):
    """Cannot be reached until it is back, and has no score for one response."""

    def __init__(self) -> None:
        self.is_back = False
        self.num_refused = 0

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> Sequence[Outcome]:
        """RewardClient.score."""
        self.num_refused += not self.is_back
        return [self._outcome(item.id) for item in items]

    def _outcome(self, id: str) -> Outcome:
        if not self.is_back:
            return Failure("SCORER_UNAVAILABLE", "it restarts", retryable=True)
        return Failure("SCORER_EXCEPTION", "it has none") if id.endswith("/0/0") else Score(1.0)


async def test_a_scorer_that_is_away_is_waited_for_and_what_it_cannot_score_is_missing(
    make_settings: Callable[..., RunSettings],
) -> None:
    scorer = Away()
    running = asyncio.create_task(evaluated(make_settings, Replica("r.0"), scorer=scorer))
    await until(lambda: scorer.num_refused > 2 * TRIES)
    assert not running.done()
    scorer.is_back = True
    async with asyncio.timeout(60):
        assert (await running)["eval/held/missing"] == 1


async def test_the_deadline_stands_still_while_people_pause_the_run() -> None:
    ends: list[float] = []

    class Limit:
        def reschedule(self, when: float) -> None:
            ends.append(when)

    board, limit = RunBoard(), Limit()
    patience = Patience(board, 100.0, limit)  # type: ignore[arg-type]
    await patience.wait(0.0)
    assert ends == []
    board.pause()
    await patience.wait(0.0)
    (end,) = ends
    assert end > asyncio.get_running_loop().time() + 50.0


async def test_without_a_rollout_for_as_long_as_one_may_take_to_start_it_is_left_out(
    make_settings: Callable[..., RunSettings],
) -> None:
    settings = make_settings(controller={"lease_s": LEASE_S, "stall_timeout_s": 0.1})
    with pytest.raises(TimeoutError, match="no rollout has held its weights"):
        await asyncio.wait_for(evaluated(make_settings, settings=settings), 60)


def test_an_evaluation_gets_the_time_of_all_prompts_of_all_its_sets(make_settings: Callable[..., RunSettings]) -> None:
    prompt = trajectory_pb2.Prompt(token_ids=np.ones(2, "<i4").tobytes())
    small = EvaluationSet.model_validate({"path": "small.jsonl", "max_tokens": 4000})
    large = EvaluationSet.model_validate({"path": "large.jsonl", "num_responses": 16})
    nobody: Any = Replicas([])

    def timeout_s(**rollout: float) -> float:
        settings = make_settings(
            sampling={"max_tokens": 1000},
            rollout={"max_num_seqs": 256, **rollout},
            reward={"address": "scorer:1", "timeout_s": 20.0, "max_attempts": 3},
        )
        sets = [HeldOutSet("small", small, (prompt,) * 30), HeldOutSet("large", large, (prompt,) * 100)]
        return Evaluation(settings, nobody, nobody, RunBoard(), sets).timeout_s

    one_round_s, seven_rounds_s = 4000 / 2, 7 * 1000 / 2
    one_call_s, seven_calls_s = 60, 7 * 60
    scoring_s = one_call_s + seven_calls_s
    assert timeout_s() == 600 + one_round_s + seven_rounds_s + scoring_s
    assert timeout_s(generation_timeout_s=50_000.0) == 50_000 + scoring_s


async def test_each_prompt_is_sampled_by_a_seed_of_its_own_at_every_step(
    make_settings: Callable[..., RunSettings],
) -> None:
    first, later = Replica("r.0"), Replica("r.0")
    await evaluated(make_settings, first)
    await evaluated(make_settings, later)
    assert first.seeds == later.seeds
    assert len(first.seeds) == NUM_PROMPTS
