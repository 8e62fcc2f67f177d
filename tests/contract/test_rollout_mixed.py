"""A rollout of a run with several environments and prompts that are answered once: each group goes where its prompt
says, and one environment that is away, hangs or is full keeps no other group waiting.
"""

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from openai import OpenAI

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Agent, Answer, Env, Policy, Task
from rolecall.environment.checks import environment_fits
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.prompts import Claim
from rolecall.v1 import trajectory_pb2
from services.rollout.episodes import sampler_of
from services.rollout.groups import GroupSampler, MixedGroups, Room
from services.rollout.replica import Replica
from tests.contract.environment_peers import client_of, environment
from tests.contract.rollout_replica import MAX_GROUPS, ReplicaUnderTest, replica_under_test
from tests.contract.test_rollout_episodes import LetterEngine
from tests.contract.test_rollout_harness import asked
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.smallest import smallest_tree
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until

NUM_TURNS = 2


class Game(Env):
    """Two turns, of which it says so."""

    def reset(self, task: Task, seed: int) -> str:
        self.turns = 0
        return "play"

    def step(self, action: Action) -> Answer:
        self.turns += 1
        return Answer(reward=0.5, is_over=True) if self.turns == NUM_TURNS else Answer("go on")

    def grade(self) -> float:
        return 0.25


class Caller(Agent):
    """An agent that asks once."""

    def run(self, policy: Policy) -> float:
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0, timeout=60) as client:
            asked(client, [{"role": "user", "content": "hello"}])
        return 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    return tmp_path


@asynccontextmanager
async def rollout_of(
    store: StoreUnderTest, folder: Path, **environments: dict[str, Any]
) -> AsyncIterator[ReplicaUnderTest]:
    """A rollout that plays in `environments`, whose sections they are."""
    tree = smallest_tree(
        folder,
        environments={name: {**section, "when": {"task": name}} for name, section in environments.items()},
        sampling={"num_responses": 4, "max_tokens": 300},
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64},
    )
    settings, tokenizer = RunSettings.model_validate(tree), ChatTokenizer(folder / "model")
    engine = LetterEngine(tokenizer)
    under_test = replica_under_test(
        store, folder / "model", engine, sampler=lambda replica: sampler_of(settings, replica, tokenizer)
    )
    async with under_test as rollout:
        yield rollout


def admit(rollout: ReplicaUnderTest, count: int, environment: str) -> None:
    """The next groups, all of one kind."""
    rollout.environment = environment
    rollout.admit(count, max_tokens=300)


async def played(rollout: ReplicaUnderTest, count: int) -> Counter[tuple[str, int, float | None]]:
    """(environment, turns, reward) of the first trajectory of each committed group, counted."""
    found: Counter[tuple[str, int, float | None]] = Counter()
    for group in await rollout.committed(count):
        metas = rollout.store.rows.read_meta(group.rows)
        assert len(metas) == 4
        for meta in metas[:1]:
            reward = meta.episode.reward.value if meta.HasField("episode") else None
            found[meta.prompt.environment, len(meta.episode.turns), reward] += 1
    return found


async def test_each_group_is_played_where_its_prompt_says_and_so_is_what_is_evaluated(
    store: StoreUnderTest, folder: Path
) -> None:
    async with environment(Game) as (game, _), environment(Caller, runs_episodes=True) as (agent, _):
        async with rollout_of(store, folder, game={"address": game}, agent={"address": agent}) as rollout:
            for _ in range(2):
                for name in ("game", "", "agent"):
                    admit(rollout, 1, name)
            await rollout.publish(1)
            assert await played(rollout, 6) == {("game", 2, 0.5): 2, ("", 0, None): 2, ("agent", 1, 1.0): 2}
            said = [trajectory_pb2.Message(role="user", content="hi")]
            sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=300)
            for name, num_turns in (("game", 2), ("", 0), ("agent", 1)):
                rollout.environment = name
                answers = await rollout.generate(2, prompt=trajectory_pb2.Prompt(messages=said), sampling=sampling)
                assert [len(answer.meta.episode.turns) for answer in answers] == [num_turns] * 2
                assert {answer.meta.prompt.environment for answer in answers} == {name}
            rollout.environment = "tools"
            with pytest.raises(ConfigError, match=r"environments\.tools, and this rollout's file has \['agent'"):
                await rollout.generate(1)
    assert store.balance() == (6, 0, 0, 6)


async def test_a_rollout_of_another_file_ends_and_counts_nothing_against_a_group_that_it_cannot_play(
    store: StoreUnderTest, folder: Path
) -> None:
    async with rollout_of(store, folder) as rollout:
        admit(rollout, 1, "game")
        await rollout.publish(1)
        with pytest.raises(ConfigError, match=r"environments\.game, and this rollout's file has none"):
            await asyncio.wait_for(asyncio.shield(rollout.pulling), 30)
        store.publish(2, 2, "r.0")
        assert [claim.deliveries for claim in store.worker("r.0").claim(1)] == [1]


@pytest.mark.parametrize("how", ["away", "hangs"])
async def test_an_environment_that_does_not_answer_delays_its_own_groups_alone(
    store: StoreUnderTest, folder: Path, how: str
) -> None:
    """Of its groups there are more, and they are first in line; the others are not one look at it later."""
    address = f"127.0.0.1:{free_port()}"
    async with environment(Game) as (game, _):
        async with rollout_of(store, folder, game={"address": address}, other={"address": game}) as rollout:
            with socket.socket() as mute:
                if how == "hangs":
                    host, _, port = address.partition(":")
                    mute.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    mute.bind((host, int(port)))
                    mute.listen()
                admit(rollout, 3 * MAX_GROUPS, "game")
                admit(rollout, MAX_GROUPS, "other")
                admit(rollout, MAX_GROUPS, "")
                await rollout.publish(1)
                others = {("other", 2, 0.5): MAX_GROUPS, ("", 0, None): MAX_GROUPS}
                assert await played(rollout, 2 * MAX_GROUPS) == others
                admit(rollout, 1, "")
                await rollout.committed(2 * MAX_GROUPS + 1)
                await until(lambda: rollout.replica.has_work)
                await until(lambda: rollout.phases[-1] == "idle; away or full: environments game")
            async with environment(Game, address):
                found = await played(rollout, 5 * MAX_GROUPS + 1)
                await until(lambda: rollout.phases[-1] == "idle")
    assert found["game", 2, 0.5] == 3 * MAX_GROUPS
    assert store.balance() == (5 * MAX_GROUPS + 1, 0, 0, 5 * MAX_GROUPS + 1)


@pytest.mark.parametrize("where", ["reset", "turn"])
async def test_an_environment_that_hangs_takes_every_slot_and_one_is_left_of_each_other_kind(
    store: StoreUnderTest, folder: Path, where: str
) -> None:
    """It says what it is, and that it has places; its groups are first in line."""
    goes_on = threading.Event()

    class Hanging(Game):
        def reset(self, task: Task, seed: int) -> str:
            if where == "reset":
                goes_on.wait(60)
            return super().reset(task, seed)

        def step(self, action: Action) -> Answer:
            goes_on.wait(60)
            return super().step(action)

    described: dict[str, Any] = {"max_sessions": 64, "reset_timeout_s": 60.0, "step_timeout_s": 60.0}
    async with environment(Hanging, **described) as (game, hanging), environment(Game) as (other, _):
        async with rollout_of(store, folder, game={"address": game}, other={"address": other}) as rollout:
            admit(rollout, 2 * MAX_GROUPS, "game")
            admit(rollout, MAX_GROUPS, "other")
            admit(rollout, MAX_GROUPS, "")
            await rollout.publish(1)
            try:
                others = {("other", 2, 0.5): MAX_GROUPS, ("", 0, None): MAX_GROUPS}
                assert await played(rollout, 2 * MAX_GROUPS) == others
                assert hanging.num_open == 4 * MAX_GROUPS, "it has as many as a run of it alone would give it"
            finally:
                goes_on.set()
            found = await played(rollout, 4 * MAX_GROUPS)
    assert found["game", 2, 0.5] == 2 * MAX_GROUPS
    assert store.balance() == (4 * MAX_GROUPS, 0, 0, 4 * MAX_GROUPS)


class Five:
    """Plays five groups at a time."""

    def __init__(self, server: object = None) -> None:
        self.server = server or self

    async def room(self, num_in_hand: int, max_groups: int) -> int:
        return min(5 - num_in_hand, max_groups)


@dataclass
class Engine:
    """What of a replica says whether it has something to do."""

    is_busy: bool = False


async def test_what_is_in_hand_takes_places_of_its_own_environment_alone() -> None:
    prompts = [trajectory_pb2.Prompt(environment=name) for name in ("game", "", "game", "other", "game")]
    claims = [
        Claim(f"{gid}-0", "r.0-1", trajectory_pb2.PromptGroup(gid=gid, prompt=prompt), 1, 0, "", "")
        for gid, prompt in enumerate(prompts)
    ]
    game, other, idle = (cast(GroupSampler, Five()) for _ in range(3))
    engine = Engine()
    replica = cast(Replica, engine)
    groups = MixedGroups(replica, {"game": game, "other": other, "idle": idle})
    assert await groups.room(claims, 4) == Room(4, {"game": 2, "other": 4, "idle": 4, "": 4})
    assert (await groups.room(claims, 1)).places == {"game": 1, "other": 1, "idle": 1, "": 1}
    assert await groups.room(claims, 0) == Room(1, {"game": 0, "other": 0, "idle": 1, "": 0})
    assert await groups.room([claims[1]], 0) == Room(3, {"game": 1, "other": 1, "idle": 1, "": 0})
    suspect = replace(claims[1], max_in_hand=1)
    assert (await groups.room([suspect], 0)).num_groups == 0, "nothing beside what may have ended a worker"
    assert (await MixedGroups(replica).room([claims[1]], 0)).num_groups == 0
    alone = MixedGroups(replica, {"game": game}, answers_once=False)
    assert (await alone.room([claims[0]], 0)).num_groups == 0, "a run of one kind has its bound and no more"
    beside = MixedGroups(replica, {"game": game, "idle": idle, "other": cast(GroupSampler, Five(game))})
    assert await beside.room(claims, 4) == Room(4, {"game,other": 1, "idle": 4, "": 4})
    assert await beside.room(claims, 0) == Room(1, {"game,other": 0, "idle": 1, "": 0})
    engine.is_busy = True
    assert (await groups.room([claims[1]], 0)).num_groups == 0, "what is sampled would wait for it"


async def test_check_compares_with_each_environment_the_components_that_score_what_it_plays(folder: Path) -> None:
    async with environment(Game, turn_rewards=True) as (game, _), environment(Caller, runs_episodes=True) as (agent, _):
        played = {"game": game, "agent": agent}

        def settings(**components: dict[str, Any]) -> RunSettings:
            scorers = {
                name: {"scorer": {"kind": "environment", **given.pop("scorer", {})}, **given}
                for name, given in components.items()
            }
            sections = {name: {"address": address, "when": {"task": name}} for name, address in played.items()}
            tree = smallest_tree(folder, environments=sections, reward={"components": scorers})
            return RunSettings.model_validate(tree)

        async def ask(asked: RunSettings, name: str) -> None:
            async with client_of(played[name]) as client:
                await environment_fits(asked, name)(client._channel)

        both = settings(won={})
        await ask(both, "agent")
        with pytest.raises(
            ConfigError, match=r"reward\.components\.won\.scorer\..*token_rewards to true, as .* its when"
        ):
            await ask(both, "game")
        apart = settings(
            won={"scorer": {"token_rewards": True}, "when": {"task": "game"}}, done={"when": {"task": ["agent"]}}
        )
        for name in played:
            await ask(apart, name)


async def test_an_environment_with_few_places_is_played_in_one_group_at_a_time_beside_others(
    store: StoreUnderTest, folder: Path
) -> None:
    most = 0

    class Slow(Game):
        def step(self, action: Action) -> Answer:
            nonlocal most
            most = max(most, few.num_open)
            return super().step(action)

    async with environment(Slow, max_sessions=4) as (game, few), environment(Game) as (other, _):
        async with rollout_of(store, folder, game={"address": game}, other={"address": other}) as rollout:
            admit(rollout, MAX_GROUPS, "game")
            admit(rollout, MAX_GROUPS, "other")
            await rollout.publish(1)
            found = await played(rollout, 2 * MAX_GROUPS)
        await asyncio.sleep(0)
    assert found == {("game", 2, 0.5): MAX_GROUPS, ("other", 2, 0.5): MAX_GROUPS}
    assert most == 4, "nothing was refused for want of a place"
    assert store.balance() == (2 * MAX_GROUPS, 0, 0, 2 * MAX_GROUPS)


async def test_a_full_environment_delays_no_claim_of_what_is_admitted_meanwhile(
    store: StoreUnderTest, folder: Path
) -> None:
    """Eight groups one after another, each of which a wait for the end of an episode would cost most of a second."""
    full = threading.Event()

    class Held(Game):
        def step(self, action: Action) -> Answer:
            full.wait(60)
            return super().step(action)

    async with environment(Held, max_sessions=4) as (game, held):
        async with rollout_of(store, folder, game={"address": game}) as rollout:
            admit(rollout, 2, "game")
            await rollout.publish(1)
            await until(lambda: held.num_open == 4)
            try:
                async with asyncio.timeout(3):
                    for count in range(1, 9):
                        await asyncio.sleep(0.1)  # nothing is left to claim
                        admit(rollout, 1, "")
                        await rollout.committed(count)
            finally:
                full.set()
            found = await played(rollout, 10)
    assert found == {("game", 2, 0.5): 2, ("", 0, None): 8}


async def test_two_environments_at_one_address_share_its_places(
    store: StoreUnderTest, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.rollout")
    async with environment(Game, max_sessions=8) as (game, _), environment(Game) as (other, _):
        sections = {"short": game, "other": other, "long": game}
        async with rollout_of(store, folder, **{name: {"address": at} for name, at in sections.items()}) as rollout:
            for name in sections:
                admit(rollout, MAX_GROUPS, name)
            await rollout.publish(1)
            found = await played(rollout, 3 * MAX_GROUPS)
    assert found == {(name, 2, 0.5): MAX_GROUPS for name in sections}
    assert "is full" not in caplog.text
