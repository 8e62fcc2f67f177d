"""A whole run whose policy acts in an environment: real controller, store, reward contract, rollouts and environment,
trainers that count.
"""

from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import APITimeoutError, OpenAI

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Agent, Answer, Env, Message, Policy, Task
from rolecall.scoring.scores import Item, Score
from rolecall.store.audit import audit
from services.rollout.sampling import SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.contract.environment_peers import environment
from tests.contract.test_rollout_harness import asked
from tests.ports import free_port
from tests.tiny_tokenizer import THINKING_TEMPLATE
from tests.twins.run import LightRun, TwinRun, balance, check_trained_once
from tests.waiting import until


class Rounds(Env):
    """Three turns, the sum of whose lengths is the reward's parity; every fifth episode is lost once."""

    num_begun = 0

    def reset(self, task: Task, seed: int) -> str:
        Rounds.num_begun += 1
        if Rounds.num_begun % 5 == 0:
            raise RuntimeError("this machine is bad")
        self.turns, self.chars = 0, 0
        return task.messages[0].content

    def step(self, action: Action) -> Answer:
        self.turns, self.chars = self.turns + 1, self.chars + len(action.text)
        if self.turns == 3:
            return Answer(reward=float(self.chars % 2), is_over=True)
        return Answer("on")

    def grade(self) -> float:
        return 0.5


def given(item: Item) -> Score:
    """The environment's word, and nothing else."""
    assert item.environment_reward is not None
    assert item.environment_reward.value in (0.0, 0.5, 1.0)
    return item.environment_reward


def check_tokens(run: TwinRun, *masked: str) -> None:
    """Every sampled token of the run is accounted for by `rolecall ledger`, and masked for these reasons alone, all of
    which occur.
    """
    report = audit(run.store.connection, run.settings.run.name, run.settings.run.dir)
    assert report.problems == ()
    tokens = report.tokens
    assert tokens.is_even
    assert tokens.trained > 0
    assert tokens.sampled == tokens.trained + tokens.masked.total()
    assert sorted(tokens.masked) == sorted(masked)


def leave(client: OpenAI) -> None:
    """Asks, and is gone before the answer comes, which on a busy machine takes another try."""
    for word in ("never", "mind", "forget", "it"):
        try:
            asked(client, [{"role": "user", "content": word}])
        except APITimeoutError:
            return


class Forking(Agent):
    """An agent that talks, thinks aside, and forgets one answer before it came."""

    def run(self, policy: Policy) -> float | Answer | None:
        first: list[Any] = [{"role": "user", "content": "talk"}]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0, timeout=60) as client:
            said = asked(client, first)
            for aside in ("one", "two", "three", "four", "five", "six"):
                asked(client, [*first, {"role": "assistant", "content": said}, {"role": "user", "content": aside}])
                asked(client, [{"role": "user", "content": f"{aside}, in short"}])
            leave(client.with_options(timeout=0.001))
            asked(client, [{"role": "user", "content": "talk on"}])
        return float(len(said) % 2)


async def test_a_run_of_an_agent_that_forks_trains_segments_and_accounts_for_every_token(light_run: LightRun) -> None:
    def engine() -> ScriptedEngine:
        return ScriptedEngine(vocab_size=200, max_model_tokens=320)

    async with AsyncExitStack() as stack, environment(Forking, runs_episodes=True) as (address, _):
        run = await stack.enter_async_context(
            light_run(
                score=given,
                run={"num_steps": 3},
                environments={"game": {"address": address, "max_row_tokens": 400}},
                sampling={"num_responses": 2, "max_tokens": 200},
                data={"max_prompt_tokens": 120},
            )
        )
        await run.to_the_end("rollout-0", engine=engine())
        balance(run)
        check_trained_once(run.actor.trainer, 24)
        check_tokens(run, "row_full", "unseen")
        assert all(line["episode/segments"] > 1 for line in run.metrics())


class Thinker(ScriptedEngine):
    """A scripted engine that thinks before it says anything."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(vocab_size=200, max_model_tokens=640)
        self._thought = tokenizer.encode("<think>\nhm\n</think>\n\n")

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        said, logprob = super()._next(request, position)
        return (self._thought[position], logprob) if position < len(self._thought) else (said, logprob)


class Asked(Env):
    """Four turns, between which a user, a tool and a user speak."""

    def reset(self, task: Task, seed: int) -> str:
        self.turns = 0
        return task.messages[0].content

    def step(self, action: Action) -> Answer:
        self.turns += 1
        if self.turns == 4:
            return Answer(reward=float(len(action.text) % 2), is_over=True)
        return Answer([Message("tool" if self.turns == 2 else "user", "on")])


@pytest.mark.parametrize(
    ("room", "masked", "estimator"), [(2000, [], "grpo"), (2000, [], "gae"), (400, ["row_full"], "gae")]
)
async def test_a_run_whose_template_drops_thinking_trains_its_segments_and_accounts_for_every_token(
    light_run: LightRun, room: int, masked: list[str], estimator: str
) -> None:
    async with AsyncExitStack() as stack, environment(Asked, roles=("user", "tool")) as (address, _):
        run = await stack.enter_async_context(
            light_run(
                score=given,
                template=THINKING_TEMPLATE,
                run={"num_steps": 3},
                algorithm={"groups_per_batch": 4, "advantage": {"kind": estimator}},
                environments={"game": {"address": address, "max_turns": 6, "max_row_tokens": room}},
                sampling={"num_responses": 2, "max_tokens": 300},
                data={"max_prompt_tokens": 100},
            )
        )
        await run.to_the_end("rollout-0", engine=Thinker(ChatTokenizer(run.settings.model.path)))
        balance(run)
        check_trained_once(run.actor.trainer, 24)
        if estimator == "gae":
            check_trained_once(run.critic.trainer, 24)
        check_tokens(run, *masked)
        for line in run.metrics():
            assert line["episode/branches_template"] == 2, "two of the three answers are a user's"
            assert line["episode/calls"] == line["episode/turns"] == 4 or masked
            assert line["episode/segments"] == 3 or masked


async def test_a_run_in_an_environment_trains_what_was_played_and_loses_nothing(light_run: LightRun) -> None:
    address = f"127.0.0.1:{free_port()}"
    described: dict[str, Any] = {
        "max_sessions": 16,
        "reset_timeout_s": 1.0,
        "step_timeout_s": 1.0,
        "close_timeout_s": 1.0,
    }

    def engine() -> ScriptedEngine:
        return ScriptedEngine(vocab_size=200, max_model_tokens=320)

    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(
            light_run(
                score=given,
                run={"num_steps": 4},
                environments={"game": {"address": address, "max_turns": 4}},
                sampling={"num_responses": 2, "max_tokens": 200},
                data={"max_prompt_tokens": 120},
            )
        )
        life = await stack.enter_async_context(run.controller())
        for worker in ("rollout-0", "rollout-1"):
            await stack.enter_async_context(run.rollout(worker, engine=engine()))
        async with environment(Rounds, address, **described):
            await life.reaches(1)
        # it is gone in the middle of everything, and comes back without what it held: the run waits
        async with environment(Rounds, address, **described) as (_, sessions):
            await life.ends()
            await until(lambda: sessions.num_open == 0)
        _, trained, dropped, _ = balance(run)
        assert (trained, dropped) == (16, 0), "what was lost was played again"
        check_trained_once(run.actor.trainer, 32)
        check_tokens(run)
        rewards = [line["reward/mean"] for line in run.metrics()]
        assert len(rewards) == 4
        assert all(0 <= reward <= 1 for reward in rewards)
