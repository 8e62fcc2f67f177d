"""Episodes in a rollout: the real replica, pull loop, store and client around a scripted engine and a served
environment.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.images.files import parts
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.model.mixture import Mixture
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Answer, Env, Task
from rolecall.environment.checks import environment_fits
from rolecall.environment.client import open_environment
from rolecall.errors import ConfigError, EpisodeLostError, PromptTooLongError
from rolecall.scoring.items import score_item
from rolecall.settings import EnvironmentSection, RpcSection, RunSettings
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.wire import decode_tensor
from services.rollout.episodes import Episodes, EpisodeSettings
from services.rollout.groups import MixedGroups
from services.rollout.harness.endpoint import Endpoint
from services.rollout.replica import Replica
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine, digest_of
from services.rollout.turns.observations import Observations
from services.rollout.turns.prompts import PromptThread
from tests.contract.environment_peers import client_of, environment
from tests.contract.rollout_replica import CONSUMER, ReplicaUnderTest, generate_request, replica_under_test
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.pictures import PAD
from tests.smallest import smallest_tree
from tests.tiny_tokenizer import EOS_TOKEN_ID, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tests.waiting import until

LETTERS = tuple(range(ord("a"), ord("z") + 1))


class LetterEngine(ScriptedEngine):
    """A scripted engine that says words of letters."""

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        super().__init__(eos_token_id=EOS_TOKEN_ID, max_model_tokens=2000, **options)
        self._letters = [tokenizer.encode(chr(letter))[0] for letter in LETTERS]

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        token, logprob = super()._next(request, position)
        return (token, logprob) if token == EOS_TOKEN_ID else (self._letters[token % len(LETTERS)], logprob)


class Talk(Env):
    """A talk of as many turns as its seed says, in which some turns earn something; it fails as it is told."""

    failing: Callable[[], None] = staticmethod(lambda: None)

    def reset(self, task: Task, seed: int) -> str:
        self.turns, self.draw = 0, random.Random(seed)
        self.num_turns = self.draw.randint(1, 6)
        return f"talk {self.num_turns}"

    def step(self, action: Action) -> str | Answer:
        type(self).failing()
        self.turns += 1
        if self.turns == self.num_turns:
            return Answer(reward=self.num_turns / 8, is_over=True)
        return Answer(f"go on <|im_end|> {self.turns}", 0.25 if self.turns % 2 else None)

    def grade(self) -> float:
        return 0.875


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _well() -> None:
    Talk.failing = staticmethod(lambda: None)


def sampler(
    folder: Path,
    address: str,
    problem: str | None = None,
    max_observation_tokens: int | None = None,
    visual_tokens: VisualTokens | None = None,
    **settings: Any,
) -> Callable[[Replica], MixedGroups]:
    """Episodes of groups of 4 in the environment at `address`, with which the run has this `problem`,
    and the middle of whose longer answers is left out; prompts may show images of these tokens.
    """
    sizes = {
        "responses_per_group": 4,
        "max_prompt_tokens": 64,
        "max_turns": 16,
        "max_image_bytes": 0,
        "max_row_tokens": 10**5,
        "max_malformed": 3,
        "max_attempts": 3,
    }
    chosen = EpisodeSettings(run="test", environment="game", **{**sizes, "budget_s": 60.0, **settings})

    def of(replica: Replica) -> MixedGroups:
        endpoint = Endpoint("127.0.0.1:0", RpcSection(), host=None)
        client = open_environment(EnvironmentSection(address=address), RpcSection())
        tokenizer = ChatTokenizer(folder)
        prompts = PromptThread(tokenizer, replica.info.max_model_tokens, visual_tokens)
        observations = Observations(prompts.tokenizer, max_observation_tokens, "middle")
        episodes = Episodes(
            chosen, replica, client, tokenizer, None, endpoint, prompts, observations, lambda *_: problem
        )
        return MixedGroups(replica, {"game": episodes}, endpoint.close)

    return of


@asynccontextmanager
async def rollout_in(
    store: StoreUnderTest, folder: Path, address: str, *, consumer: str = CONSUMER, mixture: Mixture | None = None,
    token_s: float = 0.0, lease_s: float = 1.5, generation_timeout_s: float = 60.0,
    engine: type[LetterEngine] = LetterEngine, **settings: Any,
) -> AsyncIterator[ReplicaUnderTest]:  # fmt: skip
    made = engine(ChatTokenizer(folder), mixture=mixture, token_s=token_s)
    chosen = sampler(folder, address, **settings)
    async with replica_under_test(
        store,
        folder,
        made,
        lease_s=lease_s,
        consumer=consumer,
        sampler=chosen,
        generation_timeout_s=generation_timeout_s,
        shows_images="visual_tokens" in settings,
        environment="game",
    ) as rollout:
        yield rollout


TURNS: dict[str, Any] = {"turn_rewards": True}
PLAYED = trajectory_pb2.Prompt(environment="game")
"""What of a prompt says that it is played."""


async def test_an_episodes_row_is_its_transcript_token_by_token(store: StoreUnderTest, folder: Path) -> None:
    """Against the slow oracle: the whole conversation rendered and tokenized once more."""
    tokenizer = ChatTokenizer(folder)
    async with environment(Plain, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address) as rollout:
            rollout.admit(6, max_tokens=600)
            await rollout.publish(1)
            for group in await rollout.committed(6):
                rows = store.rows.read(group.rows, SAMPLED_COLUMNS)
                for row, meta, ref in zip(rows, store.rows.read_meta(group.rows), group.rows, strict=True):
                    check_row(row, meta)
                    check_messages(meta)
                    last = trajectory_pb2.Message(role="assistant", content=meta.response_text)
                    spoken = [{"role": each.role, "content": each.content} for each in [*meta.episode.messages, last]]
                    oracle = tokenizer.encode(tokenizer.render(spoken, generate=False).removesuffix("\n"))
                    assert row["token_ids"].tolist() == oracle, "the template's own words, and nothing else"
                    assert ref.num_tokens == len(oracle)
                    assert meta.episode.ended_by == "terminated"
                    assert meta.finish_reason == trajectory_pb2.FINISH_REASON_STOP
                    assert len(meta.episode.turns) == round(8 * meta.episode.reward.value)
        await until(lambda: sessions.num_open == 0)
    assert store.balance() == (6, 0, 0, 6)


class Eyes(LetterEngine):
    """A letter engine that remembers what it was shown."""

    shown: list[SampleRequest]

    async def sample(self, request: SampleRequest) -> Sample:
        self.shown = [*vars(self).get("shown", []), request]
        return await super().sample(request)


CHANGED_LATER = VISION_TEMPLATE.replace(
    "{{ '<|im_start|>' + message.role", "{{ '<|im_start|>' + ('a' if loop.last else 'b') + message.role"
)
"""Shows the last message otherwise once another follows."""


@pytest.mark.parametrize("template", [VISION_TEMPLATE, CHANGED_LATER], ids=["extended", "begun anew"])
async def test_every_turn_is_sampled_with_the_images_that_the_row_s_messages_show(
    store: StoreUnderTest, tmp_path: Path, template: str
) -> None:
    write_tokenizer(tmp_path, template, VISION_TOKENS)
    tokens, tokenizer = VisualTokens(PAD, 4, 2, 64, 4096), ChatTokenizer(tmp_path)
    text, files, numbers = "<image> and <image>", [b"one", b"two"], [6, 2]

    def ids_of(conversation: list[dict[str, str]], *, generate: bool = False) -> list[int]:
        shown = [{**said, "content": parts(said["content"])} for said in conversation]
        return tokens.expanded(tokenizer.encode(tokenizer.render(shown, generate=generate).removesuffix("\n")), numbers)

    first = np.array(ids_of([{"role": "user", "content": text}], generate=True), "<i4").tobytes()
    said = [trajectory_pb2.Message(role="user", content=text)]
    prompt = trajectory_pb2.Prompt(uid="u", token_ids=first, images=files, messages=said, environment="game")
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=900)
    async with (
        environment(Plain, **TURNS) as (address, _),
        rollout_in(store, tmp_path, address, engine=Eyes, visual_tokens=tokens, max_prompt_tokens=128) as rollout,
    ):
        assert store.ledger.admit(
            trajectory_pb2.PromptGroup(gid=0, prompt=prompt, num_responses=4, sampling=sampling, run_seed=11), b""
        )
        await rollout.publish(1)
        (group,) = await rollout.committed(1)
        assert isinstance(rollout.engine, Eyes)
        asked = rollout.engine.shown
    assert all(list(request.images) == files for request in asked)
    assert all(request.prompt_token_ids.count(PAD) == sum(numbers) for request in asked)
    rows = store.rows.read(group.rows, SAMPLED_COLUMNS)
    assert max(len(meta.episode.turns) for meta in store.rows.read_meta(group.rows)) > 1
    for row, meta, ref in zip(rows, store.rows.read_meta(group.rows), group.rows, strict=True):
        check_row(row, meta)
        num_segments = 1 + len(ref.segment_starts)
        assert row["token_ids"].tolist().count(PAD) == sum(numbers) * num_segments, "each segment shows them"
        if template == VISION_TEMPLATE:
            last = trajectory_pb2.Message(role="assistant", content=meta.response_text)
            talk = [{"role": each.role, "content": each.content} for each in [*said, *meta.episode.messages, last]]
            assert (row["token_ids"].tolist(), num_segments) == (ids_of(talk), 1)
        else:
            assert num_segments == len(meta.episode.turns)


class Plain(Talk):
    """The same without words that spell special tokens."""

    def step(self, action: Action) -> str | Answer:
        answer = super().step(action)
        assert isinstance(answer, Answer)
        return answer if answer.is_over else Answer(f"go on {self.turns}", answer.reward)


def check_row(row: Any, meta: trajectory_pb2.TrajectoryMeta) -> None:
    """The mask, logprobs and versions say what was sampled; so do turns and spans."""
    mask = row["response_mask"].astype(bool)
    turns = np.zeros(len(mask), bool)
    for turn in meta.episode.turns:
        turns[turn.start : turn.end] = True
    spans = np.zeros(len(mask), bool)
    for span in meta.spans:
        spans[span.start : span.end] = True
        assert (row["policy_versions"][span.start : span.end] == span.policy_version).all()
    assert (mask == turns).all()
    assert (mask == spans).all()
    assert ((row["rollout_logprobs"] < 0) == mask).all()
    assert ((row["policy_versions"] >= 0) == mask).all()
    assert mask[-1], "nothing stands after the last turn"
    assert not mask[: meta.num_prompt_tokens].any()


def check_messages(meta: trajectory_pb2.TrajectoryMeta) -> None:
    """The conversation of an episode of one segment has all of its turns."""
    assert [message.role for message in meta.episode.messages] == [
        "user",
        *["assistant", "user"] * (len(meta.episode.turns) - 1),
    ]


async def test_rewards_travel_to_the_scorer_on_the_turns_last_tokens(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, **TURNS) as (address, _), rollout_in(store, folder, address) as rollout:
        rollout.admit(2, max_tokens=600)
        await rollout.publish(1)
        for group in await rollout.committed(2):
            rows = store.rows.read(group.rows, SAMPLED_COLUMNS)
            for row, meta in zip(rows, store.rows.read_meta(group.rows), strict=True):
                check_row(row, meta)
                check_messages(meta)
                item = score_item(meta, row["token_ids"])
                mask = row["response_mask"].astype(bool)
                assert item.num_response_tokens == mask.sum()
                assert item.response_token_ids == row["token_ids"][mask].tobytes()
                assert item.environment_reward.value == meta.episode.reward.value
                earned = np.zeros(len(mask), np.float32)
                earned[mask] = decode_tensor(item.environment_reward.token_rewards, "token_rewards")
                num_turns = len(meta.episode.turns)
                for number, turn in enumerate(meta.episode.turns, 1):
                    assert earned[turn.end - 1] == (0.25 if number % 2 and number < num_turns else 0.0)
                    assert turn.HasField("reward") == bool(number % 2 and number < num_turns)
                assert (earned != 0).sum() == num_turns // 2


@pytest.mark.parametrize(
    ("settings", "max_tokens", "ended_by"),
    [
        ({"max_turns": 1, "budget_s": 0.0}, 12, "turns"),
        ({"budget_s": 0.0}, 12, "tokens"),
        ({"budget_s": 0.0}, 600, "time"),
    ],
)
async def test_a_spent_budget_is_graded_and_truncated(
    store: StoreUnderTest, folder: Path, settings: dict[str, Any], max_tokens: int, ended_by: str
) -> None:
    async with environment(Talk, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, **settings) as rollout:
            rollout.admit(4, max_tokens=max_tokens)
            await rollout.publish(1)
            metas = [meta for group in await rollout.committed(4) for meta in store.rows.read_meta(group.rows)]
        spent = [meta for meta in metas if meta.episode.ended_by == ended_by]
        assert spent
        for meta in spent:
            assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
            assert meta.episode.reward.value == 0.875
            assert len(meta.episode.turns) == 1 or ended_by == "tokens"
        assert {meta.episode.ended_by for meta in metas} <= {ended_by, "terminated"}
        await until(lambda: sessions.num_open == 0)


async def publish_under_work(
    rollout: ReplicaUnderTest, mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_KEEP
) -> None:
    """Publishes version 2, for which what is being sampled waits."""
    rollout.engine.hold = True
    num_pauses = len(rollout.engine.pauses)
    publishing = asyncio.create_task(rollout.publish(2, mode=mode))
    await until(lambda: len(rollout.engine.pauses) > num_pauses or publishing.done())
    rollout.engine.hold = False
    await publishing


async def test_a_publish_in_the_middle_keeps_episodes_and_their_tokens_say_who_sampled_them(
    store: StoreUnderTest, folder: Path
) -> None:
    mixture = Mixture(num_layers=2, num_experts=300, num_chosen=2)
    async with environment(Plain, **TURNS) as (address, _):
        async with rollout_in(store, folder, address, mixture=mixture, token_s=0.01) as rollout:
            rollout.admit(4, max_tokens=600)
            await rollout.publish(1)
            await until(lambda: rollout.replica.num_sampled_tokens > 40)
            await publish_under_work(rollout)
            groups = await rollout.committed(4)
            versions = set()
            for group in groups:
                rows = store.rows.read(group.rows, [*SAMPLED_COLUMNS, ROUTED_EXPERTS])
                for row, meta in zip(rows, store.rows.read_meta(group.rows), strict=True):
                    check_row(row, meta)
                    check_messages(meta)
                    versions |= {(len(meta.episode.turns) > 1, span.policy_version) for span in meta.spans}
                    check_routing(row, meta)
            assert {(True, 1), (True, 2)} <= versions


@pytest.mark.parametrize("mode", [rollout_pb2.PAUSE_MODE_ABORT, rollout_pb2.PAUSE_MODE_WAIT])
async def test_a_publish_in_the_middle_may_hand_episodes_back_or_let_turns_end(
    store: StoreUnderTest, folder: Path, mode: rollout_pb2.PauseMode.ValueType
) -> None:
    async with environment(Plain, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, token_s=0.01) as rollout:
            rollout.admit(4, max_tokens=600)
            await rollout.publish(1)
            await until(lambda: rollout.replica.num_sampled_tokens > 40)
            await publish_under_work(rollout, mode)
            metas = [meta for group in await rollout.committed(4) for meta in store.rows.read_meta(group.rows)]
        await until(lambda: sessions.num_open == 0)
    assert {2} <= {span.policy_version for meta in metas for span in meta.spans} <= {1, 2}
    assert all(meta.episode.ended_by == "terminated" for meta in metas)
    assert store.balance() == (4, 0, 0, 4), "no delivery was counted"


def check_routing(row: Any, meta: trajectory_pb2.TrajectoryMeta) -> None:
    """Each token is routed by the version of the request that first computed something from it: of the turn that
    sampled it, or where it was the last, of the turn after it.
    """
    first_expert = row[ROUTED_EXPERTS].view("<i2").reshape(-1, 2, 2)[:-1, 0, 0]
    by = first_expert - row["token_ids"][:-1]
    assert set(np.unique(by)) <= {1, 2}
    for turn in meta.episode.turns:
        versions = row["policy_versions"][turn.start : turn.end]
        assert (by[turn.start : turn.end - 1] == versions[:-1]).all()


async def test_evaluation_plays_episodes_too(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, **TURNS) as (address, sessions), rollout_in(store, folder, address) as rollout:
        await rollout.publish(1)
        greedy = trajectory_pb2.SamplingParams(temperature=0.0, top_p=1.0, max_tokens=300)
        request = generate_request(2, prompt=PLAYED, sampling=greedy, policy_version=1)
        answers = [answer async for answer in rollout.stub.Generate(request)]
        assert [answer.meta.index for answer in answers] == [0, 1]
        for answer in answers:
            ids = np.frombuffer(answer.prompt_token_ids + answer.response_token_ids, "<i4")
            assert answer.meta.num_prompt_tokens == len(answer.prompt_token_ids) // 4
            assert score_item(answer.meta, ids).environment_reward.value == answer.meta.episode.reward.value
        await until(lambda: sessions.num_open == 0)


async def test_two_rollouts_that_are_asked_the_same_play_in_sessions_of_their_own(
    store: StoreUnderTest, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with environment(Talk, **TURNS) as (address, _), rollout_in(store, folder, address) as first:
        async with rollout_in(store, folder, address, consumer="rollout-1.def") as second:
            await first.publish(1)
            await second.publish(2)
            answers = await asyncio.gather(first.generate(4), second.generate(4))
    assert [len(each) for each in answers] == [4, 4]
    assert "was lost" not in caplog.text


async def test_an_evaluation_waits_for_places(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, max_sessions=3, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, responses_per_group=2) as rollout:
            await rollout.publish(1)
            answers = await asyncio.gather(*(rollout.generate(2, id=f"eval/0/heldout/{i}") for i in range(6)))
            assert [len(each) for each in answers] == [2] * 6
            await until(lambda: sessions.num_open == 0)


async def test_an_evaluation_that_needs_more_places_than_there_are_is_refused(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Talk, max_sessions=3, **TURNS) as (address, sessions):
        sets = {"held": {"path": "held.jsonl", "num_responses": 3}, "wide": {"path": "held.jsonl", "num_responses": 4}}
        settings = RunSettings.model_validate(
            smallest_tree(
                folder,
                model={"path": str(folder)},
                environments={"game": {"address": address}},
                sampling={"num_responses": 2},
                evaluation={"sets": sets},
            )
        )
        async with client_of(address) as client:
            with pytest.raises(ConfigError, match=r"max_sessions 3, .* needs 4 .* evaluation\.sets\.wide\.num_resp"):
                await environment_fits(settings, "game")(client._channel)
            some = {"game": settings.environments["game"].model_copy(update={"when": {"task": "game"}})}
            await environment_fits(settings.model_copy(update={"environments": some}), "game")(client._channel)
        async with rollout_in(store, folder, address, responses_per_group=2) as rollout:
            await rollout.publish(1)
            assert len(await rollout.generate(3)) == 3
            with pytest.raises(ConfigError, match=r"max_sessions 3, and a prompt of an evaluation needs 4"):
                await rollout.generate(4)
        await until(lambda: sessions.num_open == 0)


async def test_an_episode_that_the_environment_lost_is_begun_again_in_its_place(
    store: StoreUnderTest, folder: Path
) -> None:
    draw = random.Random(5)

    def fails() -> None:
        if draw.random() < 0.1:
            raise EpisodeLostError("a machine went away")

    Talk.failing = staticmethod(fails)
    async with environment(Talk, max_sessions=16, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, max_attempts=10) as rollout:
            rollout.admit(12, max_tokens=600)
            await rollout.publish(1)
            metas = [meta for group in await rollout.committed(12) for meta in store.rows.read_meta(group.rows)]
        assert all(meta.episode.reward.value == len(meta.episode.turns) / 8 for meta in metas), "no zero from a failure"
        await until(lambda: sessions.num_open == 0)
    assert store.balance() == (12, 0, 0, 12)


async def test_a_group_that_the_environment_always_loses_is_a_dead_letter(store: StoreUnderTest, folder: Path) -> None:
    def fails() -> None:
        raise RuntimeError("always")

    Talk.failing = staticmethod(fails)
    async with environment(Talk, **TURNS) as (address, sessions), rollout_in(store, folder, address) as rollout:
        rollout.admit(1)
        await rollout.publish(1)
        (letter,) = await until(lambda: store.ledger.reap([]))
        assert "raised RuntimeError in step, turn 1: always" in letter.error
        await until(lambda: sessions.num_open == 0)


async def test_groups_wait_for_an_environment_that_is_away_and_nothing_is_counted(
    store: StoreUnderTest, folder: Path
) -> None:
    described = {**TURNS, "reset_timeout_s": 0.6, "step_timeout_s": 0.6, "close_timeout_s": 0.6}
    async with environment(Talk, **described) as (address, _):
        pass
    async with rollout_in(store, folder, address) as rollout:
        rollout.admit(8, max_tokens=600)
        await rollout.publish(1)
        await until(lambda: sum(phase.startswith("idle; away or full") for phase in rollout.phases) > 2)
        assert rollout.pull.num_groups == 0, "nothing is claimed"
        for _ in range(3):  # it comes, and goes in the middle
            async with environment(Talk, address, **described):
                await until(lambda: rollout.replica.num_sampled_tokens > 0)
        async with environment(Talk, address, **described) as (_, sessions):
            groups = await rollout.committed(8)
            for group in groups:
                for meta in store.rows.read_meta(group.rows):
                    assert meta.episode.reward.value == len(meta.episode.turns) / 8
            await until(lambda: sessions.num_open == 0)
    assert store.balance() == (8, 0, 0, 8)


async def test_rollouts_that_share_few_places_neither_deadlock_nor_leak(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, max_sessions=6, **TURNS) as (address, sessions):
        async with (
            rollout_in(store, folder, address) as one,
            rollout_in(store, folder, address, consumer="rollout-1.def") as other,
        ):
            one.admit(8, max_tokens=600)
            await asyncio.to_thread(store.ledger.begin_publish, 1, 1)
            for rollout in (one, other):
                await rollout.receive(1)
            await asyncio.to_thread(store.ledger.attest, 1, 1, digest_of(1), [one.consumer, other.consumer])
            for rollout in (one, other):
                await rollout.resume(1)
            await one.committed(8)
        await until(lambda: sessions.num_open == 0)
    assert store.balance() == (8, 0, 0, 8)


async def test_sessions_of_a_killed_rollout_are_closed_by_whoever_takes_its_groups(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Talk, max_sessions=16, **TURNS) as (address, sessions):
        async with rollout_in(store, folder, address, token_s=0.05, consumer="rollout-9.dead") as dying:
            dying.engine.hold = True  # else some may end before all have begun
            dying.admit(2, max_tokens=600)
            await dying.publish(1)
            await until(lambda: sessions.num_open == 8)
            dying.pulling.cancel()  # its sampler says nothing any more: no Close reaches the environment
            for session in list(dying_sessions(dying)):
                session._is_ended = True
            await asyncio.gather(dying.pulling, return_exceptions=True)
            assert sessions.num_open == 8
            await asyncio.to_thread(store.ledger.expel, dying.consumer)
            async with rollout_in(store, folder, address) as heir:
                await heir.publish(2)
                await heir.committed(2)
            await until(lambda: sessions.num_open == 0)
    assert store.balance() == (2, 0, 0, 2)


async def test_another_run_of_the_name_is_not_fenced_by_what_the_environment_remembers_of_the_last(
    store: StoreUnderTest, make_store: MakeStore, folder: Path
) -> None:
    earlier = make_store(store.url, f"{store.run}-earlier")
    async with environment(Talk, **TURNS) as (address, _):
        async with rollout_in(earlier, folder, address) as rollout:
            rollout.admit(2)
            other = earlier.attested("rollout-1.def")
            for _ in range(3):
                other.release(other.claim(2))
            await rollout.publish(1)
            await rollout.committed(2)
        async with rollout_in(store, folder, address) as rollout:
            rollout.admit(2)
            await rollout.publish(1)
            await rollout.committed(2)
    assert store.balance() == (2, 0, 0, 2)


def dying_sessions(rollout: ReplicaUnderTest) -> list[Any]:
    pull: Any = rollout.pull
    episodes = pull._sampler._played["game"]
    assert isinstance(episodes, Episodes)
    return list(episodes._environment._sessions)


class Wordy(Talk):
    """A talk whose environment begins with many words, answers with more, and spells special tokens in them."""

    def reset(self, task: Task, seed: int) -> str:
        return f"{super().reset(task, seed)} in the beginning"

    def step(self, action: Action) -> Answer:
        answer = super().step(action)
        assert isinstance(answer, Answer)
        return answer if answer.is_over else Answer("go on <|im_end|> and on", answer.reward)


async def test_of_a_long_answer_the_policy_reads_as_much_as_the_run_says_and_the_rest_is_counted(
    store: StoreUnderTest, folder: Path
) -> None:
    tokenizer = ChatTokenizer(folder)
    async with environment(Wordy, **TURNS) as (address, _):
        async with rollout_in(store, folder, address, max_observation_tokens=12) as rollout:
            rollout.admit(1, max_tokens=1000)
            await rollout.publish(1)
            (group,) = await rollout.committed(1)
            rows = store.rows.read(group.rows, SAMPLED_COLUMNS)
            for row, meta in zip(rows, store.rows.read_meta(group.rows), strict=True):
                check_row(row, meta)
                opening, *talk = meta.episode.messages
                assert opening.content.endswith(" in the beginning"), "the first prompt is never cut"
                heard = [message.content for message in talk if message.role == "user"]
                assert set(heard) <= {"go on [11 tokens left out]and on"}
                assert meta.episode.num_cut_observation_tokens == 11 * len(heard)
                assert len(heard) == len(meta.episode.turns) - 1
                spelled = tokenizer.spell(row["token_ids"].tolist())
                assert spelled.count("go on [11 tokens left out]and on") == len(heard)


async def test_an_answer_that_fits_into_no_context_ends_the_episode_as_it_stands(
    store: StoreUnderTest, folder: Path
) -> None:
    class Endless(Talk):
        def step(self, action: Action) -> str | Answer:
            return "x" * 10**6

    async with environment(Endless, **TURNS) as (address, _), rollout_in(store, folder, address) as rollout:
        rollout.admit(1, max_tokens=600)
        await rollout.publish(1)
        (group,) = await rollout.committed(1)
        for meta in store.rows.read_meta(group.rows):
            assert (meta.episode.ended_by, len(meta.episode.turns), meta.episode.reward.value) == ("tokens", 1, 0.875)
        request = generate_request(1, prompt=PLAYED)
        request.prompt.messages.add(role="user", content="x" * 10**6)
        with pytest.raises(PromptTooLongError, match=r"the first prompt of episode .* characters does not fit into"):
            await anext(aiter(rollout.stub.Generate(request)))


async def test_an_environment_with_fewer_places_than_a_group_ends_the_role(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, max_sessions=3, **TURNS) as (address, _):
        async with rollout_in(store, folder, address) as rollout:
            rollout.admit(1)
            await rollout.publish(1)
            with pytest.raises(ConfigError, match="max_sessions 3, and a group needs 4"):
                await asyncio.wait_for(rollout.pulling, 60)


async def test_a_first_prompt_that_is_too_long_is_refused_and_never_cut(store: StoreUnderTest, folder: Path) -> None:
    async with environment(Talk, **TURNS) as (address, _), rollout_in(store, folder, address) as rollout:
        await rollout.publish(1)
        request = generate_request(1, prompt=PLAYED)
        request.prompt.messages.add(role="user", content="x" * 100)
        with pytest.raises(PromptTooLongError, match=r"data\.max_prompt_tokens is 64"):
            await anext(aiter(rollout.stub.Generate(request)))
