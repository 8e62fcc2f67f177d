"""No error ever becomes a number: every way in which a scorer can fail, through the client, our reward service and the
controller's scoring, to the rows.

The store is real, the scorers are real gRPC servers that misbehave. Which responses of a group are hit is drawn per
seed. A group with any failed response gets no reward column in any of its rows; the same group, scored honestly
afterwards, gets all: so the check would see one.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rolecall.errors import DeadlineError, InvalidInputError, RoleCallError, ScorerError, UnavailableError
from rolecall.reward import SERVICE_NAME
from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import RewardClient
from rolecall.scoring.description import component_spec
from rolecall.settings import RpcSection
from rolecall.v1 import reward_pb2, training_pb2
from rolecall.v1.trajectory_pb2 import CommittedGroup
from rolecall.wire import encode_tensor
from services.controller.groups.group_scorer import GroupScorer
from services.controller.step.measures import of_batch
from services.controller.threads import StoreThreads
from tests.conftest import MakeSettings
from tests.contract.reward_peers import Liar, reward_service, serving, write_user_module
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port

Result = reward_pb2.ScoreResult
NUM_RESPONSES = 2
TIMEOUT_S = 0.5
"""Deadline of a call that does not end."""
PATIENT_S = 30.0
"""Deadline of a call that ends, on a busy machine too."""
SLOW = "too slow"
REWARD_COLUMNS = ("reward", "reward_components", "reward_component_names", "token_rewards")
REWARD = {"components": {"correct": {"scorer": {"kind": "exact_match"}}}}


def value(number: float) -> Callable[[Result], None]:
    def lie(result: Result) -> None:
        result.reward.value = number

    return lie


def error(code: str, retryable: bool) -> Callable[[Result], None]:
    def lie(result: Result) -> None:
        result.error.code, result.error.message, result.error.retryable = code, "no", retryable

    return lie


def tokens(rewards: object, dtype: str = "float32") -> Callable[[Result], None]:
    def lie(result: Result) -> None:
        result.reward.token_rewards.CopyFrom(encode_tensor(np.asarray(rewards, dtype)))

    return lie


def component(result: Result) -> None:
    result.reward.components["bonus"] = 1.0


def neither(result: Result) -> None:
    result.ClearField("reward")


ITEM_LIES: dict[str, Callable[[Result], None]] = {
    "NaN": value(math.nan),
    "infinity": value(math.inf),
    "minus infinity": value(-math.inf),
    "below its range": value(-0.01),
    "above its range": value(1.01),
    "an unknown component": component,
    "token rewards it never declared": tokens([0.0] * 4),
    "neither reward nor error": neither,
    "an error of the data": error("BAD_GROUND_TRUTH", False),
    "an error without a code": error("", False),
    "an error that may pass": error("OVERLOADED", True),
}


def lose(response: reward_pb2.ScoreResponse) -> None:
    del response.results[-1]


def lose_all(response: reward_pb2.ScoreResponse) -> None:
    del response.results[:]


def double(response: reward_pb2.ScoreResponse) -> None:
    response.results[-1].id = response.results[0].id


def surplus(response: reward_pb2.ScoreResponse) -> None:
    response.results.add(id="99/0").reward.value = 0.5


def rename(response: reward_pb2.ScoreResponse) -> None:
    response.results[0].id = "99/0"


def bloat(response: reward_pb2.ScoreResponse) -> None:
    response.results[0].reward.components["x" * 17_000_000] = 0.5


ANSWER_LIES = {
    "a result too few": lose,
    "no results": lose_all,
    "an id twice": double,
    "a result too many": surplus,
    "another id": rename,
    "17 MB": bloat,
}


def refuse(kind: type[RoleCallError]) -> Callable[[], Any]:
    def fail() -> None:
        raise kind("not today")

    return fail


CALL_FAILURES: dict[str, Callable[[], Any]] = {
    "unavailable": refuse(UnavailableError),
    "a refusal": refuse(InvalidInputError),
    "a crash": refuse(RoleCallError),
    SLOW: lambda: asyncio.sleep(PATIENT_S),
}
KINDS = [*ITEM_LIES, *ANSWER_LIES, *CALL_FAILURES]


def misbehave(liar: Liar, kind: str, hit: Sequence[int]) -> None:
    """From now on, `liar` fails in the manner of `kind` on the responses `hit` (or on all, where it is the call that
    fails).
    """
    liar.lie, liar.fail = (lambda response: None), None
    if kind in ITEM_LIES:
        lie = ITEM_LIES[kind]

        def on_items(response: reward_pb2.ScoreResponse) -> None:
            for result in response.results:
                if int(result.id.partition("/")[2]) in hit:
                    lie(result)

        liar.lie = on_items
    elif kind in ANSWER_LIES:
        liar.lie = ANSWER_LIES[kind]
    else:
        liar.fail = CALL_FAILURES[kind]


@asynccontextmanager
async def scoring(
    store: StoreUnderTest, make_settings: MakeSettings, address: str, timeout_s: float = PATIENT_S, **sections: Any
) -> AsyncIterator[GroupScorer]:
    """The controller's scoring towards the scorer at `address`; a scorer that is away is given up at once, for the
    controller's patience has its own tests.
    """
    settings = make_settings(**{"reward": REWARD | {"away_timeout_s": 0.001}, **sections})
    threads = StoreThreads()
    async with open_channel(address, RpcSection()) as channel:
        reward = RewardClient(channel, name="reward", address=address, timeout_s=timeout_s, max_attempts=1)
        try:
            yield GroupScorer(settings, store.rows, threads, reward, {}, ctl=1)
        finally:
            threads.close()


def external(address: str, timeout_s: float = PATIENT_S) -> dict[str, Any]:
    return {"scorer": {"kind": "external", "address": address}, "timeout_s": timeout_s, "max_attempts": 1}


def reward_columns(store: StoreUnderTest, group: CommittedGroup) -> int:
    """How many reward columns the group's rows have, read past our own code but for its patience with a busy store."""

    def count() -> int:
        found = 0
        for ref in group.rows:
            (key,) = list(store.connection.ledger.scan_iter(f"{{rl:{store.run}:*row:{ref.id}:*"))
            found += sum(bool(store.connection.ledger.hexists(key, column)) for column in REWARD_COLUMNS)
        return found

    return store.connection.attempt(count)


def new_group(store: StoreUnderTest) -> CommittedGroup:
    (group,) = store.committed(1)
    return group


async def check_never_a_number(store: StoreUnderTest, scorer: GroupScorer, liar: Liar, kind: str) -> None:
    """Fails a few drawn responses in the manner of `kind`, looks at the rows, then lets the liar be honest about the
    same group.
    """
    group = new_group(store)
    draw = random.Random(kind)
    for _ in range(1 if kind == SLOW else 3):
        misbehave(liar, kind, draw.sample(range(NUM_RESPONSES), draw.randint(1, NUM_RESPONSES)))
        with pytest.raises((ScorerError, UnavailableError)) as caught:
            await scorer.score(group)
        assert "scorer 'reward'" in caught.value.message
        assert reward_columns(store, group) == 0
    liar.lie, liar.fail = (lambda response: None), None
    scored = await scorer.score(group)
    assert np.isfinite(scored.rewards_G).all()
    assert reward_columns(store, group) >= NUM_RESPONSES


@pytest.mark.parametrize("kind", KINDS)
async def test_a_scorer_of_the_users_own_that_fails_writes_no_reward(
    store: StoreUnderTest, make_settings: MakeSettings, kind: str
) -> None:
    liar = Liar()
    timeout_s = 6 * TIMEOUT_S if kind == SLOW else PATIENT_S
    async with serving(liar) as address, scoring(store, make_settings, address, timeout_s) as scorer:
        await check_never_a_number(store, scorer, liar, kind)


async def test_a_group_without_the_token_rewards_that_a_loss_trains_on_is_not_scored(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    loss = {"kind": "custom", "function": "mine:loss", "columns": ["token_rewards"]}
    algorithm, reward = {"groups_per_batch": 2, "policy_loss": loss}, {"address": "127.0.0.1:1"}
    async with (
        serving(Liar()) as address,
        scoring(store, make_settings, address, algorithm=algorithm, reward=reward) as scorer,
    ):
        group = new_group(store)
        for _ in range(2):  # nothing is kept of it
            with pytest.raises(ScorerError, match=r"trains on token_rewards, and the scorer gave none"):
                await scorer.score(group)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_failing_component_of_our_service_fails_the_item(
    store: StoreUnderTest, make_settings: MakeSettings, kind: str, tmp_path: Path
) -> None:
    honest, liar = Liar(), Liar()
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(scorer)) for scorer in (honest, liar)]
        timeout_s = 6 * TIMEOUT_S if kind == SLOW else PATIENT_S
        service = reward_service(tmp_path, good=external(addresses[0]), bad=external(addresses[1], timeout_s))
        scorer = await stack.enter_async_context(
            scoring(store, make_settings, await stack.enter_async_context(service))
        )
        await check_never_a_number(store, scorer, liar, kind)


class Described(Liar):
    """A scorer that answers as it describes itself, whatever that is, with the reward `value`."""

    def __init__(self, value: float = 0.5, **spec: Any) -> None:
        super().__init__()
        self.spec = reward_pb2.DescribeResponse(
            name="described", reads=self.spec.reads, **{"reward": component_spec("", 0, 1), **spec}
        )
        self.value = value
        self.lie = self._answer

    def become(self, other: "Described") -> "Described":
        """Describes itself and answers as `other` from now on; returns what it was."""
        was = Described(self.value)
        was.spec, self.spec, self.value = self.spec, other.spec, other.value
        return was

    def _answer(self, response: reward_pb2.ScoreResponse) -> None:
        for result in response.results:
            result.reward.value = self.value
            for part in self.spec.components:
                result.reward.components[part.name] = 0.5
            if self.spec.token_rewards:
                result.reward.token_rewards.CopyFrom(encode_tensor(np.zeros(2, np.float32)))


async def test_a_reward_that_an_earlier_attempt_left_in_a_row_is_the_groups(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    """Rows lie on several shards: an attempt that was cut short wrote some of them. A column is written once."""
    group = new_group(store)
    store.rows.put(group.rows[:1], [{"reward": np.array([0.25], np.float32)}])
    async with serving(Described(0.5)) as address, scoring(store, make_settings, address) as scorer:
        scored = await scorer.score(group)
    kept = [float(row["reward"][0]) for row in store.rows.read(list(group.rows), ["reward"])]
    assert scored.rewards_G.tolist() == kept == [0.25] + [0.5] * (len(group.rows) - 1)


async def test_what_tokens_earn_tells_responses_apart_and_is_told_but_is_no_success(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    scorer_of_steps = Described(token_rewards=True)

    def reward_steps(response: reward_pb2.ScoreResponse) -> None:
        for index, result in enumerate(response.results):
            result.reward.value = 0.5
            tokens([0.5 * index, 0.25])(result)

    scorer_of_steps.lie = reward_steps
    group = new_group(store)
    async with serving(scorer_of_steps) as address, scoring(store, make_settings, address) as scorer:
        scored = await scorer.score(group)
        again = await scorer.score(group)
    size = len(group.rows)
    for each in (scored, again):
        assert each.rewards_G.tolist() == [0.5] * size
        assert each.totals_G.tolist() == [0.75 + 0.5 * index for index in range(size)]
        assert each.has_signal
    rows = [{"token_ids": np.zeros(1), "response_mask": np.ones(1), "rollout_logprobs": np.zeros(1)}] * size
    measured = of_batch(make_settings(), 0, [scored], rows, {}).values()
    assert measured["reward/mean"] == pytest.approx(0.75 + 0.25 * (size - 1))
    assert measured["reward/accuracy"] == measured["groups/without_signal"] == 0


async def test_totals_are_of_what_the_rows_hold(store: StoreUnderTest, make_settings: MakeSettings) -> None:
    """In float64 .6 + .8 and .5 + .9 are equal, where a row has .6 as float32 they are not."""
    pairs = ((0.6, 0.8), (0.5, 0.9))
    scorer_of_steps = Described(token_rewards=True)

    def reward_pairs(response: reward_pb2.ScoreResponse) -> None:
        for index, result in enumerate(response.results):
            result.reward.value, earned = pairs[index % 2]
            tokens([0.0, earned])(result)

    scorer_of_steps.lie = reward_pairs
    group = new_group(store)
    async with serving(scorer_of_steps) as address, scoring(store, make_settings, address) as scorer:
        scored = await scorer.score(group)
        again = await scorer.score(group)
    assert scored.totals_G.tolist() == again.totals_G.tolist()
    assert scored.has_signal


async def test_a_component_that_does_not_apply_is_absent_from_rows_and_measures(
    store: StoreUnderTest, make_settings: MakeSettings, tmp_path: Path
) -> None:
    parts: dict[str, dict[str, Any]] = {
        "here": {"scorer": {"kind": "length", "max_tokens": 10**6}},
        "there": {"scorer": {"kind": "json"}, "when": {"source": "elsewhere"}},
    }
    group = new_group(store)
    async with reward_service(tmp_path, **parts) as address, scoring(store, make_settings, address) as scorer:
        scored = await scorer.score(group)
        again = await scorer.score(group)
    (row, *_) = store.rows.read(list(group.rows), ["reward_components"])
    assert np.isnan(row["reward_components"]).tolist() == [False, True], "by name: here, there"
    for each in (scored, again):
        assert np.isfinite(each.components["here"]).all()
        assert np.isnan(each.components["there"]).all()
        np.testing.assert_array_equal(each.rewards_G, each.components["here"])
    rows = [{"token_ids": np.zeros(1), "response_mask": np.ones(1), "rollout_logprobs": np.zeros(1)}] * len(scored.rows)
    measured = of_batch(make_settings(), 0, [scored], rows, {}).values()
    assert "reward/here" in measured
    assert "reward/there" not in measured


async def test_kept_components_keep_their_names_when_a_resumed_run_has_others(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    def scorer_of(*names: str) -> Described:
        return Described(components=[component_spec(name, 0, 1) for name in names])

    group = new_group(store)
    async with serving(scorer_of("correct", "format")) as before, scoring(store, make_settings, before) as scorer:
        await scorer.score(group)
    async with serving(scorer_of("brevity", "correct")) as after, scoring(store, make_settings, after) as scorer:
        kept = await scorer.score(group)
    assert kept.rewards_G.tolist() == [0.5] * NUM_RESPONSES
    assert kept.components["correct"].tolist() == [0.5] * NUM_RESPONSES
    assert np.isnan(kept.components["brevity"]).all(), "it never scored them"


async def test_components_of_rows_without_names_are_those_of_now(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    """They were scored before names were kept."""
    group = new_group(store)
    refs = list(group.rows)
    values = {"reward": np.array([0.5], np.float32), "reward_components": np.array([1, 0], np.float32)}
    store.rows.put(refs, [values] * len(refs))
    described = Described(components=[component_spec(name, 0, 1) for name in ("correct", "format")])
    async with serving(described) as address, scoring(store, make_settings, address) as scorer:
        kept = await scorer.score(group)
    assert kept.components["correct"].tolist() == [1] * NUM_RESPONSES
    assert kept.components["format"].tolist() == [0] * NUM_RESPONSES


async def test_a_group_waits_for_its_scorer_as_long_as_others_are_scored(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    """A scorer that limits its rate lets some groups wait for hours: that is no stall."""
    liar, now = Liar(), 0.0
    starved, served = store.committed(2)
    refused = asyncio.Event()

    def refuse_one(response: reward_pb2.ScoreResponse) -> None:
        if response.results[0].id.startswith(f"{starved.gid}/"):
            refused.set()
            for result in response.results:
                error("RATE_LIMITED", True)(result)

    liar.lie = refuse_one
    settings, threads = make_settings(reward=REWARD | {"away_timeout_s": 600.0}), StoreThreads()
    async with serving(liar) as address, open_channel(address, RpcSection()) as channel:
        reward = RewardClient(channel, name="reward", address=address, timeout_s=20.0, max_attempts=1)
        scorer = GroupScorer(settings, store.rows, threads, reward, {}, 1, clock=lambda: now)
        waiting = asyncio.create_task(scorer.score(starved))
        async with asyncio.timeout(60.0):
            await refused.wait()
            now = 500.0
            await scorer.score(served)
            now = 1000.0
            for _ in range(2):  # the second was sent after the first was judged
                refused.clear()
                await refused.wait()
            assert not waiting.done()
            now = 1101.0
            with pytest.raises(UnavailableError, match="RATE_LIMITED"):
                await waiting
    threads.close()


async def test_a_reward_that_float32_cannot_hold_is_refused_before_it_becomes_infinity(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    async with (
        serving(Described(1e39, reward=component_spec("", None, None))) as address,
        scoring(store, make_settings, address) as scorer,
    ):
        group = new_group(store)
        with pytest.raises(
            ScorerError, match=r"returned the reward 1e\+39, which is not a float32: it would be trained on as infinity"
        ):
            await scorer.score(group)
    assert reward_columns(store, group) == 0


async def test_token_rewards_that_are_not_finite_or_of_another_length_write_nothing(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    liar = Described(token_rewards=True)
    async with serving(liar) as address, scoring(store, make_settings, address) as scorer:
        group = new_group(store)
        for lie in (tokens([0, math.nan]), tokens([0.0] * 3), tokens([0.0] * 2, "int32"), lambda result: None):
            liar.lie = lambda response, lie=lie: lie(response.results[1])  # type: ignore[misc]
            with pytest.raises(ScorerError, match="token_rewards"):
                await scorer.score(group)
            assert reward_columns(store, group) == 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"reward": component_spec("", 0, 10)},
            r"changed the range of its reward from \(0\.0, 1\.0\) to \(0\.0, 10\.0\) within the run",
        ),
        (
            {"components": [component_spec("style", 0, 1)]},
            r"changed its components from \[\] to \['style'\] within the run",
        ),
        ({"token_rewards": True}, "changed token_rewards from False to True within the run"),
    ],
)
async def test_a_scorer_that_describes_itself_otherwise_within_the_run_is_refused(
    store: StoreUnderTest, make_settings: MakeSettings, changed: dict[str, Any], told: str
) -> None:
    liar = Described()
    async with serving(liar) as address, scoring(store, make_settings, address) as scorer:
        first, group = store.committed(2)
        await scorer.score(first)
        before = liar.become(Described(7.0, **changed))
        with pytest.raises(ScorerError):
            await scorer.score(group)  # by its first description no such answer is believed
        with pytest.raises(ScorerError, match=told):
            await scorer.score(group)
        assert reward_columns(store, group) == 0
        liar.become(before)
        await scorer.score(group)
    assert reward_columns(store, group) > 0


async def test_bytes_that_are_no_answer_write_nothing(store: StoreUnderTest, make_settings: MakeSettings) -> None:
    async def describe(request: bytes, context: object) -> bytes:
        return reward_pb2.DescribeResponse(name="noise").SerializeToString()

    async def score(request: bytes, context: object) -> bytes:
        return bytes(random.Random(len(request)).randbytes(200))

    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Score": grpc.unary_unary_rpc_method_handler(score),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    group = new_group(store)
    try:
        async with scoring(store, make_settings, f"127.0.0.1:{port}") as scorer:
            with pytest.raises((ScorerError, UnavailableError), match="scorer 'reward'"):
                await scorer.score(group)
    finally:
        await server.stop(None)
    assert reward_columns(store, group) == 0


async def test_a_scorer_that_is_down_is_infrastructure_and_writes_nothing_until_it_is_back(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    group, address, is_scored = new_group(store), f"127.0.0.1:{free_port()}", False
    async with scoring(store, make_settings, address, 4 * TIMEOUT_S) as scorer:
        with pytest.raises((UnavailableError, DeadlineError), match="scorer 'reward'"):
            await scorer.score(group)
        assert reward_columns(store, group) == 0
        async with serving(Liar(), bind=address), asyncio.timeout(60.0):
            while not is_scored:
                with suppress(UnavailableError, DeadlineError):
                    await scorer.score(group)
                    is_scored = True
    assert reward_columns(store, group) == NUM_RESPONSES


@pytest.mark.parametrize("behaviour", ["raise", "hang", "exit", "segfault", "none", "big"])
async def test_a_users_function_that_fails_beside_a_good_component_writes_nothing(
    store: StoreUnderTest, make_settings: MakeSettings, tmp_path: Path, behaviour: str
) -> None:
    folder = write_user_module(tmp_path / "conf")
    with (folder / "behaviour.py").open("a") as module:
        module.write(f"\ndef fail(item: Item) -> float:\n    return behave(Item('', response_text={behaviour!r}))\n")
    function = {
        "scorer": {"kind": "function", "target": "behaviour:fail", "min": 0, "max": 1},
        "timeout_s": TIMEOUT_S,
        "max_attempts": 2,
    }
    group = new_group(store)
    async with reward_service(folder, short={"scorer": {"kind": "length", "max_tokens": 8}}, mine=function) as address:
        async with scoring(store, make_settings, address, timeout_s=30.0) as scorer:
            with pytest.raises(ScorerError, match="component 'mine'"):
                await scorer.score(group)
    assert reward_columns(store, group) == 0


class AwayAtFirst:
    """A reference that is away when it is first asked."""

    num_asked = 0

    async def ComputeLogprobs(self, request: object, timeout: float) -> training_pb2.ComputeColumnResponse:
        self.num_asked += 1
        if self.num_asked == 1:
            await asyncio.sleep(1.0)  # the scorer has answered by then
            raise UnavailableError("nobody listens")
        return training_pb2.ComputeColumnResponse()


async def test_a_group_whose_reference_is_away_is_scored_once(
    store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    (group,), scored, away = store.committed(1), list[str](), AwayAtFirst()
    liar = Liar()
    liar.lie = lambda response: scored.extend(result.id for result in response.results)
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    settings, threads = make_settings(reward=REWARD, algorithm=kl, references={"ref": {}}), StoreThreads()
    async with serving(liar) as address, open_channel(address, RpcSection()) as channel:
        reward = RewardClient(channel, name="reward", address=address, timeout_s=20.0, max_attempts=1)
        references: Any = {"ref": away}
        await GroupScorer(settings, store.rows, threads, reward, references, ctl=1).score(group)
    threads.close()
    assert away.num_asked == 2
    assert len(scored) == len(set(scored)) == len(group.rows)
