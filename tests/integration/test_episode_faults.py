"""Many episodes, stepped and run by agents, of which every kind of call loses its way, comes twice or late, and whose
environment and engine fail: what is committed is exactly what was said, every group is, and no session is left.
"""

import asyncio
import logging
import random
import threading
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolecall.environment import Action, Agent, Answer, Env, Policy, Task
from rolecall.errors import UnavailableError
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import trajectory_pb2
from services.rollout.episodes import Episodes
from services.rollout.sampling import SampleRequest
from tests.contract.environment_peers import BadWire, environment
from tests.contract.rollout_replica import ReplicaUnderTest
from tests.contract.test_rollout_episodes import check_row, rollout_in
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until

logger = logging.getLogger(__name__)
NUM_GROUPS = 125
"""Groups of 4 episodes of one seed."""
EVERY = 25
"""Groups after which weights are published, in the middle of what is under way."""
LOST = 0.02
"""Share of an environment's turns, or an agent's calls, that fail for good."""
ODD = 0.15
"""Share of calls whose reply is lost, or which come twice or late."""
AWAY = 0.002
"""Share of samples in which the engine fails."""


class Faults:
    """What went wrong, by kind. Its draws follow from the seed, but for the order in which threads take them."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._lock = threading.Lock()

    def strikes(self, what: str, share: float) -> bool:
        with self._lock:
            hit = self._draw.random() < share
            self.counts[what] += hit
            return hit


def heard(turn: int, text: str) -> str:
    """What is said after a turn: which it was, and a digest."""
    return f"{turn}:{zlib.crc32(text.encode())}"


def worth(text: str) -> float:
    """The reward by the last turn; never 0."""
    return 0.25 + zlib.crc32(text.encode()) % 64 / 128


class Talk(Env):
    """A talk of as many turns as its seed says."""

    faults: Faults

    def reset(self, task: Task, seed: int) -> str:
        self.turn, self.num_turns = 0, random.Random(seed).randint(1, 5)
        self.fail("reset raised")
        return "talk"

    def step(self, action: Action) -> Answer:
        self.fail("step raised")
        self.turn += 1
        if self.turn == self.num_turns:
            return Answer(reward=worth(action.text), is_over=True)
        return Answer(heard(self.turn, action.text))

    def fail(self, what: str) -> None:
        if self.faults.strikes(what, LOST):
            raise RuntimeError(what)


class Calling(Agent):
    """The same by an agent whose replies get lost: it asks again, as SDKs do."""

    faults: Faults
    client: httpx.Client

    def run(self, policy: Policy) -> float:
        said: list[Any] = [{"role": "user", "content": "talk"}]
        num_turns = random.Random(self.seed).randint(1, 5)
        for turn in range(1, num_turns + 1):
            if self.faults.strikes("run raised", LOST):
                raise RuntimeError("the agent broke")
            text = self.ask(policy, {"model": policy.model, "messages": said})
            said.append({"role": "assistant", "content": text})
            said.append({"role": "user", "content": heard(turn, text)})
        return worth(text)

    def ask(self, policy: Policy, body: Any) -> str:
        url, key = f"{policy.base_url}/chat/completions", {"Authorization": f"Bearer {policy.api_key}"}
        retries = 0
        if self.faults.strikes("call left", ODD):
            retries += 1
            with suppress(httpx.TransportError):
                self.client.post(url, json=body, headers=key, timeout=0.001)
        if self.faults.strikes("reply lost", ODD):
            again = {**key, "x-stainless-retry-count": str(retries)} if retries else key
            self.client.post(url, json=body, headers=again).raise_for_status()
            retries += 1
        answer = self.client.post(url, json=body, headers={**key, "x-stainless-retry-count": str(retries)})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


def fail_at_times(rollout: ReplicaUnderTest, faults: Faults, seed: int) -> BadWire:
    """Lets the engine and the wire to the environment fail."""
    sample, sampler = rollout.engine.sample, rollout.pull._sampler._played["game"]
    assert isinstance(sampler, Episodes)

    async def failing(request: SampleRequest) -> Any:
        if faults.strikes("engine failed", AWAY):
            raise UnavailableError("it was aborted by a pause; ask again")
        return await sample(request)

    rollout.engine.sample = failing  # type: ignore[method-assign]
    client = sampler._environment
    wire = BadWire(client.stub, seed, rate=ODD)
    client.stub = wire  # type: ignore[assignment]
    return wire


def check(row: Any, meta: trajectory_pb2.TrajectoryMeta) -> None:
    """A row is what was said, and worth what that is."""
    check_row(row, meta)
    assert meta.episode.ended_by == "terminated"
    assert meta.episode.reward.value == worth(meta.response_text)
    spoken = [message.content for message in meta.episode.messages]
    assert spoken[0] == "talk"
    # an answer to a call that was left a moment ago may still be written, and is a branch of its own then
    if sum(meta.episode.tokens.branches.values()) <= 1:
        for turn in range(1, len(meta.episode.turns)):
            assert spoken[2 * turn] == heard(turn, spoken[2 * turn - 1])
    if meta.episode.HasField("tokens"):
        tokens = meta.episode.tokens  # a call that was left may come after its own repetition, and is sampled then
        assert tokens.num_trained == row["response_mask"].sum()
        assert tokens.num_sampled == tokens.num_trained + sum(tokens.masked.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(
            pytest.param(seed, marks=pytest.mark.thorough("test_an_episodes_row_is_its_transcript_token_by_token"))
            for seed in range(1, 4)
        ),
    ],
)
@pytest.mark.parametrize("kind", [Talk, Calling])
async def test_episodes_among_faults_are_what_was_said_and_leave_nothing(
    store: StoreUnderTest, tmp_path: Path, kind: Any, seed: int
) -> None:
    write_tokenizer(tmp_path)
    kind.faults = faults = Faults(seed)
    deadlines = {"reset_timeout_s": 20.0, "step_timeout_s": 20.0, "close_timeout_s": 20.0}
    described: dict[str, Any] = {"max_sessions": 64, "lease_s": 30.0, "runs_episodes": kind is Calling, **deadlines}
    rows = 0
    with httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=64)) as Calling.client:
        async with environment(kind, **described) as (address, sessions):
            async with rollout_in(store, tmp_path, address, generation_timeout_s=60.0, lease_s=30.0) as rollout:
                wire = fail_at_times(rollout, faults, seed)
                for part in range(NUM_GROUPS // EVERY):
                    rollout.admit(EVERY, max_tokens=600)
                    await rollout.publish(part + 1)
                    groups = await committed(rollout, (part + 1) * EVERY)
                    for group in groups[part * EVERY :]:
                        rows += checked(store, group)
                await wire.quiet()
            await until(lambda: sessions.num_open == 0)
    assert rows == 4 * NUM_GROUPS
    assert store.balance() == (NUM_GROUPS, 0, 0, NUM_GROUPS)
    faults.counts["wire"] = wire.num_faults
    logger.info("%s, seed %d: %d episodes committed; faults: %s", kind.__name__, seed, rows, dict(faults.counts))


async def committed(rollout: ReplicaUnderTest, num: int) -> list[trajectory_pb2.CommittedGroup]:
    """The groups that are committed once there are `num`; fails as the pull loop does."""
    waiting = asyncio.ensure_future(rollout.committed(num))
    await asyncio.wait({waiting, rollout.pulling}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        rollout.pulling.result()
    return await waiting


def checked(store: StoreUnderTest, group: trajectory_pb2.CommittedGroup) -> int:
    """Checks the rows of a group; how many there are."""
    rows, metas = store.rows.read(group.rows, SAMPLED_COLUMNS), store.rows.read_meta(group.rows)
    for row, meta in zip(rows, metas, strict=True):
        check(row, meta)
    return len(rows)
