"""Whole runs with light roles: nothing lost, nothing trained twice, staleness bounded, failures say what failed, people
steer.
"""

import asyncio
import gc
import json
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import grpc
import pytest

from rolecall.commands import steer
from rolecall.contract import contract_version
from rolecall.data.dataset import load_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import (
    BudgetSpentError,
    ConfigError,
    ConflictError,
    GenerationError,
    InvalidInputError,
    PermissionDeniedError,
    RateLimitedError,
    RoleCallError,
    RunLockedError,
    ScorerLoadingError,
    ScorerUnavailableError,
    StoreUnavailableError,
    UnavailableError,
    UnknownWorkerError,
    VersionMismatchError,
)
from rolecall.launcher.supervisor import RUN_CALL_TIMEOUT_S
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.scoring.scores import Item, Score
from rolecall.store.ledger import Ledger
from rolecall.trajectory import seed_of
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1 import reward_pb2
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from rolecall.weights.transferred import Transferred
from services.controller import awaiting
from services.controller.groups import group_scorer
from services.controller.groups.prompts import PromptRenderer, PromptSequence
from services.controller.run import ControllerRun
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.contract.reward_peers import Liar, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.callers import party, playing
from tests.twins.run import RUN_S, Life, LightRun, TwinRun, balance, check_trained_once, parity
from tests.waiting import until

ROWS_OF_THE_MAIN_THREAD = """import signal
def row(row):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return row
"""
"""The source of a function that Python refuses in any other thread, as it does the timeouts of math_verify."""


async def test_a_run_trains_every_group_once_and_ends_with_a_checkpoint(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    async with light_run() as run, run.controller() as life, run.rollout("rollout-0"):
        states = [update.status async for update in life.stub.WatchRun(pb.WatchRunRequest(), timeout=RUN_S)]
        await life.ends()
    assert (states[0].state, states[-1].state, states[-1].step) == (pb.RUN_STATE_STARTING, pb.RUN_STATE_DONE, 3)
    assert balance(run) == (12, 12, 0, 0)
    check_trained_once(run.actor.trainer, 24)
    assert run.actor.trainer.publishes == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [line["staleness/max"] for line in run.metrics()] == [0, 0, 0]
    assert sorted(path.name for path in (run.settings.run.dir / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert store.connection.command("HLEN", f"{{rl:{store.run}}}:garbage") == 0
    waited = {"starting", "waiting_groups", "training", "publishing", "saving", "working"}
    assert {state for state, seconds in life.states.seconds().items() if seconds} == waited


async def test_every_response_of_every_step_is_written_with_its_score_where_all_are_kept(light_run: LightRun) -> None:
    async with light_run(trackers={"tensorboard": False, "num_samples_kept": None}) as run:
        await run.to_the_end("rollout-0")
    lines = [json.loads(line) for line in (run.settings.run.dir / "samples.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["set"] == "train"]
    assert Counter(line["step"] for line in trained) == {1: 8, 2: 8, 3: 8}
    assert len({line["id"] for line in trained}) == 24
    assert all(line["prompt"] and line["response_tokens"] > 0 for line in trained)
    assert {line["finish_reason"] for line in trained} <= {"stop", "length"}
    by_step = {line["step"]: line for line in run.metrics()}
    for step in (1, 2, 3):
        of_step = [line for line in trained if line["step"] == step]
        assert fmean(line["reward"] for line in of_step) == pytest.approx(by_step[step]["reward/mean"])
        assert fmean(line["response_tokens"] for line in of_step) == pytest.approx(by_step[step]["response/tokens"])


async def test_workers_join_and_people_look_while_the_prompts_are_read(light_run: LightRun, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"  # seconds
    async with light_run(data={"train": str(many), "max_prompt_tokens": 48}) as run:
        many.write_text((tmp_path / "train.jsonl").read_text() * 10_000)
        async with run.controller() as life:
            shown = await life.status()
            assert (shown.state, shown.step) == (pb.RUN_STATE_STARTING, 0)
            assert shown.waiting_for.startswith("the prompts")
            await life.stub.PauseRun(pb.PauseRunRequest())
            async with run.rollout("rollout-0"):
                await life.rests()
                assert run.ledger.position().paused, "a controller after this one would be told"
                await life.stub.ResumeRun(pb.ResumeRunRequest())
                await life.ends()


async def test_a_function_that_makes_prompts_runs_in_the_main_thread(light_run: LightRun, tmp_path: Path) -> None:
    (tmp_path / "main_rows.py").write_text(ROWS_OF_THE_MAIN_THREAD)
    own = {"function": f"{tmp_path}/main_rows:row"}
    prompts = {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 48, "preprocess": own}
    async with light_run(data=prompts) as run, run.controller() as life, run.rollout("rollout-0"):
        await life.ends()


async def test_a_run_whose_prompts_cannot_be_read_fails_and_says_so(light_run: LightRun) -> None:
    async with light_run(data={"prompt_field": "question"}) as run, run.controller() as life:
        with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: no field .question."):
            await life.ends()
        assert (await life.status()).state == pb.RUN_STATE_FAILED


async def test_a_rollout_with_another_tokenizer_is_refused_by_file_and_remedy(light_run: LightRun) -> None:
    async with light_run() as run, run.controller():
        write_tokenizer(run.settings.model.path, more_tokens=["<|tool|>"])  # as in another copy of the directory
        async with run.rollout("rollout-0"):
            with pytest.raises(ConfigError, match=r"rollout-0 makes other tokens .* copy them from the controller's"):
                await asyncio.wait_for(run.memberships["rollout-0"].joined(), 30)


async def test_the_controller_stays_until_the_last_worker_has_heard_of_the_end(light_run: LightRun) -> None:
    async with (
        light_run() as run,
        run.controller() as life,
        run.rollout("rollout-0"),
        open_channel(str(run.settings.controller.address), party(Caller.REFERENCE)) as channel,
    ):
        await life.ends()
        stub, version = ControllerServiceStub(channel), contract_version()
        name, role = run.settings.run.name, pb.ROLE_REFERENCE
        await stub.Join(pb.JoinRequest(run=name, role=role, worker="late", incarnation="1", version=version))
        assert run.latest is not None
        told = asyncio.create_task(run.latest.told_the_end())
        await asyncio.sleep(run.settings.controller.heartbeat_s)
        assert not told.done()
        assert (await stub.Heartbeat(pb.HeartbeatRequest(worker="late", incarnation="1"))).over
        await asyncio.wait_for(told, RUN_S)


async def test_ppo_asks_the_critic_for_values_and_trains_it_on_the_same_batches(light_run: LightRun) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with light_run(algorithm=gae) as run:
        await run.to_the_end("rollout-0")
    assert run.critic.trainer.trained == run.actor.trainer.trained
    assert [record.digest for record in run.critic.trainer.records] == [
        record.digest for record in run.actor.trainer.records
    ]


async def test_two_rollouts_one_late_keep_the_staleness_bound(light_run: LightRun) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with light_run(algorithm=algorithm, run={"num_steps": 8}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.01):
            await life.reaches(2)
            await life.stub.PauseRun(pb.PauseRunRequest())
            async with run.rollout("rollout-1", token_s=0.01) as late:
                await life.shows(lambda status: len(status.workers) == 2)
                await life.stub.ResumeRun(pb.ResumeRunRequest())
                await life.ends()
    assert late.joined, "the late rollout was never taken into an epoch"
    assert balance(run)[1] == 32
    check_trained_once(run.actor.trainer, 64)
    assert max(line["staleness/max"] for line in run.metrics()) == 1


def committers(run: TwinRun) -> Counter[str]:
    """Groups committed by each rollout, as far as the history was moved to its file."""
    file = run.settings.run.dir / "history.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Counter(event["token"].partition(".")[0] for event in events if event["event"] == "committed")


async def test_a_fleet_of_one_grows_to_three_and_shrinks_to_one_inside_a_run(light_run: LightRun) -> None:
    algorithm = {"groups_per_batch": 12, "max_staleness": 1}
    async with light_run(algorithm=algorithm, run={"num_steps": 200, "checkpoint_every_steps": 1000}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.005):
            async with run.rollout("rollout-1", token_s=0.005), run.rollout("rollout-2", token_s=0.005):
                while set(committers(run)) != {"rollout-0", "rollout-1", "rollout-2"}:
                    assert not life.running.done()
                    await asyncio.sleep(0.05)
            alone = await life.shows(lambda status: sum(not worker.lost for worker in status.workers) == 1)
            await life.reaches(alone.step + 3)
            await life.stub.StopRun(pb.StopRunRequest())
            await life.ends()
    admitted, trained, dropped, live = balance(run)
    assert (admitted, dropped) == (trained + live, 0)
    check_trained_once(run.actor.trainer, 2 * trained)


async def test_a_rollout_that_replaces_the_only_one_inside_a_step_gets_the_weights_and_the_groups(
    light_run: LightRun,
) -> None:
    async with light_run(run={"num_steps": 4}) as run, run.controller() as life:
        async with run.rollout("rollout-0") as engine:
            engine.hold = True
            await life.shows(lambda status: status.ledger.generating)
        await life.shows(lambda status: any(worker.lost for worker in status.workers))
        async with run.rollout("rollout-1"):
            await life.ends()
    assert balance(run) == (16, 16, 0, 0)
    check_trained_once(run.actor.trainer, 32)
    assert run.actor.trainer.publishes[:2] == [(0, 0), (0, 1)]


class Unreceiving(ScriptedEngine):
    """An engine that takes the first weights alone."""

    def __init__(self) -> None:
        super().__init__(vocab_size=200)
        self.is_asked = asyncio.Event()

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        if policy_version:
            self.is_asked.set()
            await asyncio.Event().wait()  # bounded: by the end of the rollout
        return await super().receive(epoch, policy_version, bucket_timeout_s)


async def test_a_stop_waits_for_no_rollout_that_would_take_the_weights_and_saves_the_step(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 50, "checkpoint_every_steps": 50}) as run, run.controller() as life:
        engine = Unreceiving()
        async with run.rollout("rollout-0", engine=engine):
            async with asyncio.timeout(RUN_S):
                await engine.is_asked.wait()
        await life.shows(lambda status: any(worker.lost for worker in status.workers))
        await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
        await life.ends()
    assert run.newest().step == 1


async def test_a_pause_that_outlasts_the_stall_timeout_is_no_stall_after_restarts(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with light_run() as run, run.rollout("rollout-0"):
        async with run.controller() as life:
            await life.stub.PauseRun(pb.PauseRunRequest())
            await life.rests()
        monkeypatch.setattr(awaiting, "_patience_s", lambda settings: 0.1)
        for _ in range(2):
            async with run.controller() as life:
                await life.rests()
                assert not (await asyncio.wait([life.running], timeout=0.5))[0], life.running.exception()
        monkeypatch.undo()
        async with run.controller() as life:
            await life.stub.ResumeRun(pb.ResumeRunRequest())
            await life.ends()
    assert balance(run) == (12, 12, 0, 0)


async def test_a_watch_goes_on_when_the_controller_is_started_again(
    light_run: LightRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with light_run(run={"num_steps": 4}) as run:
        watched = steer.Run(str(run.settings.controller.address), playing(run.settings, Caller.VIEWER).rpc)
        told = ""

        def tells(text: str) -> bool:
            nonlocal told
            told += capsys.readouterr().out
            return text in told

        async with run.rollout("rollout-0") as engine:
            engine.hold = True
            async with run.controller() as life:
                watching = asyncio.create_task(steer._steer("watch", watched, False, False))
                await life.shows(lambda status: status.ledger.generating)
                await until(lambda: tells("step 0/4"))
            await until(lambda: tells("controller: it does not answer; it is waited for, 600 s at the most"))
            engine.hold = False
            async with run.controller() as life:
                await life.ends()
                assert await asyncio.wait_for(watching, RUN_S) == 0
        assert tells("step 4/4"), told


async def test_a_profile_waits_while_the_run_is_paused_is_one_at_a_time_and_ends_with_the_trainer(
    light_run: LightRun,
) -> None:
    def asked(life: Life, num_steps: int, worker: str = "actor") -> "asyncio.Task[list[int]]":
        async def told() -> list[int]:
            request = pb.ProfileWorkerRequest(worker=worker, num_steps=num_steps)
            messages = life.stub.ProfileWorker(request, timeout=RUN_S)
            return [message.profile.step async for message in messages if message.HasField("profile")]

        return asyncio.create_task(told())

    async with light_run() as run, run.rollout("rollout-0"), run.controller() as life:
        await life.stub.PauseRun(pb.PauseRunRequest())
        await life.rests()
        for absent in ("critic", "rollout-1"):
            with pytest.raises(InvalidInputError, match="name one of actor, rollout-0"):
                await asked(life, 1, absent)
        with pytest.raises(InvalidInputError, match="1 to 10"):
            await asked(life, 11)
        first = asked(life, 2)
        await until(lambda: run.actor.profiles.begin() is not None)
        with pytest.raises(ConflictError, match="another profile"):
            await asked(life, 1)
        assert not first.done()
        await life.stub.ResumeRun(pb.ResumeRunRequest())
        assert await first == [0, 1]
        late = asked(life, 10)
        await life.ends()
        run.actor.profiles.end()  # as a trainer does when it ends with the run
        with pytest.raises(UnavailableError, match="this role ends"):
            await late


async def test_a_run_that_stalls_ends_with_a_checkpoint_of_where_it_stands(light_run: LightRun) -> None:
    sections: dict[str, Any] = {"run": {"num_steps": 1000, "checkpoint_every_steps": 1000}}
    sections |= {"controller": {"stall_timeout_s": 2.8}, "reward": {"timeout_s": 0.2, "max_attempts": 1}}
    async with light_run(**sections) as run, run.controller() as life, run.rollout("rollout-0") as engine:
        await life.reaches(1)
        engine.hold = True
        with pytest.raises(
            BudgetSpentError,
            match=r"no group was finished for 3 s, controller.stall_timeout_s and .*; "
            r"4 are live, \d ready, rollouts: \['rollout-0",
        ):
            await life.ends()
        step = (await life.status()).step
    assert run.newest().step == step >= 1


async def test_groups_that_cannot_be_scored_are_dropped_and_replaced(light_run: LightRun) -> None:
    def picky(item: Item) -> float:
        if item.ground_truth in ("3", "7"):
            raise ValueError("cannot score this")
        return parity(item)

    async with light_run(score=picky, run={"num_steps": 7}) as run:
        await run.to_the_end("rollout-0")
    counts = run.ledger.counts()
    assert dict(counts.dropped) == {"scorer_error": 2}
    assert balance(run) == (30, 28, 2, 0)


class PoisonedEngine(ScriptedEngine):
    """Fails on every response of group 5, whoever asks and however often."""

    async def sample(self, request: SampleRequest) -> Sample:
        if request.seed in (seed_of(0, 5, 0), seed_of(0, 5, 1)):
            raise GenerationError("this prompt is poison")
        return await super().sample(request)


async def test_a_group_that_fails_wherever_it_is_sampled_is_dropped_after_its_deliveries(light_run: LightRun) -> None:
    async with light_run() as run:
        await run.to_the_end("rollout-0", engine=PoisonedEngine(vocab_size=200))
    assert dict(run.ledger.counts().dropped) == {"over_delivered": 1}
    assert balance(run) == (13, 12, 1, 0)
    check_trained_once(run.actor.trainer, 24)


async def test_a_spent_scoring_budget_fails_the_run_and_names_the_scorer(light_run: LightRun) -> None:
    def broken(item: Item) -> float:
        raise ValueError("no score today")

    async with light_run(score=broken, reward={"max_failed_groups": 2}) as run:
        async with run.controller() as life, run.rollout("rollout-0"):
            with pytest.raises(BudgetSpentError, match="no score today"):
                await life.ends()
            status = await life.status()
    assert status.state == pb.RUN_STATE_FAILED
    assert "reward.max_failed_groups" in status.error
    assert re.fullmatch(r"group \d+: scorer_error: .*no score today.*", status.last_drop)
    assert run.checkpoints.latest() is not None, "a spent budget ends with a checkpoint"


async def test_a_scorer_that_gives_no_scores_is_named_while_the_run_waits_and_when_it_ends(light_run: LightRun) -> None:
    def away(item: Item) -> float:
        raise ScorerUnavailableError("its database is away")

    async with light_run(score=away, reward={"away_timeout_s": 3.0}) as run:
        named = (
            f"scorer 'reward' at {run.settings.reward.address} gives no scores: SCORER_UNAVAILABLE: its "
            "database is away"
        )
        async with run.controller() as life, run.rollout("rollout-0"):
            status = await life.shows(lambda status: status.trouble == named)
            assert status.state in (pb.RUN_STATE_STARTING, pb.RUN_STATE_RUNNING)
            with pytest.raises(BudgetSpentError, match=r"no group was scored for reward\.away_timeout_s = 3") as ended:
                await life.ends()
            assert (await life.status()).num_recoveries == 0, "one that starts over waits as long again"
    assert "scorer 'reward'" in ended.value.message
    assert "its database is away" in ended.value.message
    assert dict(run.ledger.counts().dropped) == {}


async def test_beside_a_scorer_that_gives_no_scores_stands_what_our_reward_service_says_of_it(
    light_run: LightRun,
) -> None:
    def away(item: Item) -> float:
        raise ScorerUnavailableError("it hangs")

    async with (
        light_run(score=away) as run,
        run.controller() as life,
        run.rollout("rollout-0"),
        open_channel(str(run.settings.controller.address), party(Caller.REWARD)) as channel,
    ):
        stub, phase = ControllerServiceStub(channel), "no scores from right (mine:score took longer than ...)"
        name, version, role = run.settings.run.name, contract_version(), pb.ROLE_REWARD
        await stub.Join(pb.JoinRequest(run=name, role=role, worker="reward", incarnation="1", version=version))
        await stub.Heartbeat(pb.HeartbeatRequest(worker="reward", incarnation="1", phase=phase))
        named = f"scorer 'reward' at {run.settings.reward.address} gives no scores: SCORER_UNAVAILABLE: it hangs"
        await life.shows(lambda status: status.trouble == f"{named}; reward: {phase}")
        await life.stub.StopRun(pb.StopRunRequest())
        await life.ends()


async def test_a_run_waits_for_its_scorer_beyond_the_stall_timeout_and_goes_on(light_run: LightRun) -> None:
    is_away = True

    def sometimes(item: Item) -> float:
        if is_away:
            raise ScorerUnavailableError("its database is away")
        return parity(item)

    hasty = {"controller": {"stall_timeout_s": 2.0}, "reward": {"timeout_s": 0.2, "max_attempts": 1}}
    async with light_run(score=sometimes, **hasty) as run, run.controller() as life, run.rollout("rollout-0"):
        waits = "the scorer, for groups of step 0; nothing is admitted beyond those that wait for it"
        await life.shows(lambda status: status.waiting_for == waits)
        assert not (await asyncio.wait([life.running], timeout=3.0))[0], life.running.exception()
        is_away = False
        await life.ends()
    assert balance(run) == (12, 12, 0, 0)
    check_trained_once(run.actor.trainer, 24)


async def test_a_scorer_that_is_away_at_the_start_is_named_in_status_and_in_the_error(light_run: LightRun) -> None:
    away = {"address": "127.0.0.1:9", "timeout_s": 0.5}
    async with light_run(reward=away, controller={"start_timeout_s": 6.0}) as run:
        async with run.controller() as life, run.rollout("rollout-0"):
            status = await life.shows(lambda status: status.trouble)
            assert status.trouble.startswith("scorer 'reward' at 127.0.0.1:9 gives no scores: ")
            with pytest.raises(BudgetSpentError, match=r"reward.* did not come up within .*; reward: 127\.0\.0\.1:9 "):
                await life.ends()


async def test_a_shadow_that_was_never_there_ends_a_new_run_at_its_start_and_is_named(light_run: LightRun) -> None:
    part = {"scorer": {"kind": "exact_match"}}
    reward = {"components": {"right": part, "trial": {**part, "weight": 0}}}
    named = r"reward did not come up within .* of reward\.components\.trial have not answered; correct their addresses"
    async with light_run(
        score=lambda item: Score(parity(item), {"right": 1.0}),
        components={"right": (0.0, 1.0)},
        reward=reward,
        controller={"start_timeout_s": 3.0},
    ) as run:
        with pytest.raises(BudgetSpentError, match=named):
            await run.to_the_end("rollout-0")


class Loading(Liar):
    """A reward service whose judge's server loads."""

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.DescribeResponse:
        raise ScorerLoadingError("scorer 'verdict' at http://127.0.0.1:9/v1 is loading: it cannot be reached")


async def test_a_scorer_whose_server_loads_is_no_trouble_and_status_says_what_is_awaited(light_run: LightRun) -> None:
    hasty = {"controller": {"start_timeout_s": 6.0}}
    async with serving(Loading()) as address, light_run(reward={"address": address}, **hasty) as run:
        async with run.controller() as life, run.rollout("rollout-0"):
            awaited = "reward (a server of its scorers is loading)"
            status = await life.shows(lambda status: status.waiting_for == awaited)
            assert status.trouble == ""
            with pytest.raises(BudgetSpentError, match=r"reward: scorer .verdict. at .* is loading"):
                await life.ends()


async def test_a_limit_of_the_scorers_rate_drops_no_group(light_run: LightRun) -> None:
    draw = random.Random(0)

    def limited(item: Item) -> float:
        if draw.random() < 0.2:
            raise RateLimitedError("quota exceeded")
        return parity(item)

    async with light_run(score=limited, reward={"max_failed_groups": 0, "max_attempts": 1}) as run:
        await run.to_the_end("rollout-0")
    assert balance(run) == (12, 12, 0, 0)


async def test_failures_of_scoring_are_known_to_the_next_controller_and_a_resumed_run_begins_a_new_budget(
    light_run: LightRun,
) -> None:
    def picky(item: Item) -> float:
        if int(item.id.partition("/")[0]) < num_bad:
            raise ValueError("no score today")
        return parity(item)

    num_bad = 2
    sections: dict[str, Any] = {"reward": {"max_failed_groups": 3}, "run": {"num_steps": 1}}
    async with light_run(score=picky, **sections) as run, run.rollout("rollout-0"):
        await run.to_the_end()
        ledger = run.ledger
        assert sorted(ledger.position().failed["scorer_error"]) == [0, 1]
        run.settings = run.settings.model_copy(update={"run": run.settings.run.model_copy(update={"num_steps": 2})})
        num_bad = 1_000_000
        with pytest.raises(BudgetSpentError, match=r"more than reward.max_failed_groups = 3 of 1000 groups"):
            await run.to_the_end()
        num_failed = len(ledger.position().failed["scorer_error"])
        assert 4 <= num_failed <= 6, "and those that were being scored beside it"
        num_bad = max(ledger.position().failed["scorer_error"]) + 2
        await run.to_the_end()
    assert balance(run)[1] == 8


async def test_too_many_dead_letters_end_the_run_and_the_last_is_named(light_run: LightRun) -> None:
    async with light_run(controller={"max_dead_letters": 0, "max_deliveries": 2}) as run:
        with pytest.raises(BudgetSpentError, match=r"controller\.max_dead_letters"):
            await run.to_the_end("rollout-0", engine=PoisonedEngine(vocab_size=200))
    run.newest()


async def test_a_torn_receiver_gets_the_weights_again_under_a_new_version(light_run: LightRun) -> None:
    async with light_run() as run, run.controller() as life, run.rollout("rollout-0") as engine:
        engine.failures.append(RoleCallError("the load broke"))
        await life.ends()
    assert run.actor.trainer.publishes[:3] == [(0, 0), (0, 1), (1, 2)]
    assert balance(run) == (12, 12, 0, 0)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_requests_in_flight_at_a_publish_are_finished_or_sampled_again(light_run: LightRun, mode: str) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with light_run(algorithm=algorithm, rollout={"pause_mode": mode}, run={"num_steps": 4}) as run:
        await run.to_the_end("rollout-0", token_s=0.02)
    assert balance(run)[1:3] == (16, 0)
    check_trained_once(run.actor.trainer, 32)


async def test_weights_that_differ_from_what_was_sent_are_never_attested(light_run: LightRun) -> None:
    budget = {"max_recoveries": 1}
    async with light_run(controller=budget) as run, run.controller() as life, run.rollout("rollout-0"):
        run.actor.trainer.lies = True
        with pytest.raises(BudgetSpentError, match="did not load what was sent"):
            await life.ends()
    assert run.ledger.position().policy_version == -1
    assert balance(run)[1] == 0


class SlowTokenizer:
    """The tokenizer of a run's prompts, which renders one of them when it may, and each after a while."""

    def __init__(self, run: TwinRun, held: int = 0, each_s: float = 0.0) -> None:
        """Takes the place of the tokenizer of the run's newest controller. `held`: the number of the prompt that waits,
        from 1.
        """
        assert run.latest is not None
        renderer: Any = run.latest._connected.renderer
        self._tokenizer: ChatTokenizer = renderer._encoder.tokenizer
        renderer._encoder = PromptEncoder(cast(ChatTokenizer, self))
        self._left, self._each_s = held, each_s
        self.is_held, self.may_go = threading.Event(), threading.Event()
        self.gave_up = False

    def render(self, messages: Any) -> str:
        """As ChatTokenizer.render."""
        self._left -= 1
        time.sleep(self._each_s)
        if self._left == 0:
            self.is_held.set()
            self.gave_up = not self.may_go.wait(30.0)
        return self._tokenizer.render(messages)

    def encode(self, text: str) -> list[int]:
        """As ChatTokenizer.encode."""
        return self._tokenizer.encode(text)


async def test_people_are_answered_while_a_prompt_is_rendered_and_a_pause_then_skips_none(light_run: LightRun) -> None:
    async with light_run() as run, run.controller() as life:
        slow = SlowTokenizer(run, held=6)
        async with run.rollout("rollout-0"):
            await until(slow.is_held.is_set)
            await life.status()
            await life.stub.PauseRun(pb.PauseRunRequest())
            await life.shows(lambda status: status.state == pb.RUN_STATE_PAUSED)
            slow.may_go.set()
            assert not slow.gave_up, "the loop stood still"
            await life.stub.ResumeRun(pb.ResumeRunRequest())
            await life.ends()
        assert admitted_uids(run) == first_uids(run, 12)
    assert balance(run) == (12, 12, 0, 0)


async def test_a_loop_that_is_abandoned_while_it_renders_loses_no_prompt(light_run: LightRun, tmp_path: Path) -> None:
    texts = [f"number {i}" if i % 3 else "1 2 3 4 5 6 7 8 9 " * 10 for i in range(30)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    async with light_run(data={"train": str(tmp_path / "mixed.jsonl")}) as run:
        async with run.controller() as life:
            slow = SlowTokenizer(run, held=9)  # before there is a rollout, and so a loop that renders
            async with run.rollout("rollout-0"):
                await until(slow.is_held.is_set)
                life.running.cancel()
                await asyncio.wait([life.running], timeout=RUN_S)
                slow.may_go.set()
        num_admitted = run.ledger.counts().admitted
        assert num_admitted < 12
        await run.to_the_end("rollout-0")
        assert admitted_uids(run) == first_uids(run, 12)
    assert balance(run) == (12, 12, 0, 0)


async def test_other_prompts_are_refused_before_any_role_is_waited_for(light_run: LightRun, tmp_path: Path) -> None:
    train, edited = tmp_path / "train.jsonl", tmp_path / "edited"
    train.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(30)))
    leaves_out = f"fields['prompt'] == 'number 7' and Path({str(edited)!r}).exists()"
    source = f"from pathlib import Path\n\ndef row(fields):\n    return None if {leaves_out} else fields\n"
    (tmp_path / "rows_of_a_run.py").write_text(source)
    own = {"train": str(train), "preprocess": {"function": f"{tmp_path}/rows_of_a_run:row"}}
    async with light_run(data=own, run={"num_steps": 1}) as run:
        await run.to_the_end("rollout-0")
        edited.touch()
        async with run.controller() as life:
            with pytest.raises(ConfigError, match=r"data\.preprocess: it gives other prompts \(29 now\)"):
                await life.ends()


async def test_prompts_that_are_passed_over_for_longer_than_the_stall_timeout_end_no_run(
    light_run: LightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*["1 2 3 4 5 6 7 8 9 " * 10] * 20, *(f"number {i}" for i in range(4))]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    monkeypatch.setattr(awaiting, "_patience_s", lambda settings: 3.0)  # publishes and starts keep their time
    data = {"train": str(tmp_path / "long.jsonl"), "shuffle": False}
    async with light_run(data=data, run={"num_steps": 1}) as run, run.controller() as life:
        SlowTokenizer(run, each_s=0.4)
        async with run.rollout("rollout-0"):
            await life.ends()
    assert balance(run) == (4, 4, 0, 0)


def admitted_uids(run: TwinRun) -> list[str]:
    """The uids of the prompts that were admitted, in their order."""
    lines = (run.settings.run.dir / "history.jsonl").read_text().splitlines()
    return [event["prompt"] for event in map(json.loads, lines) if event["event"] == "admitted"]


def first_uids(run: TwinRun, number: int) -> list[str]:
    """The uids of the first prompts of the run's sequence."""
    data, renderer = run.settings.data, PromptRenderer(PromptEncoder(ChatTokenizer(run.settings.model.path)), 48)
    prompts = load_prompts(data.train, data, run.settings.reward)
    sequence = PromptSequence(prompts, renderer, seed=run.settings.run.seed, shuffle=data.shuffle)
    return [sequence.next().uid for _ in range(number)]


async def test_people_pause_resume_checkpoint_and_stop_a_run(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 1000, "checkpoint_every_steps": 1000}) as run:
        async with run.controller() as life, run.rollout("rollout-0"):
            saved = await life.saved()
            assert (Path(saved.path) / "COMMITTED").exists()
            assert saved.path.endswith(f"step-{saved.step:08d}")
            await life.stub.PauseRun(pb.PauseRunRequest())
            # what was in flight is trained, until less than a batch is left
            paused = await life.shows(
                lambda status: status.ledger.live < 4 and status.ledger.trained == 4 * status.step
            )
            await asyncio.sleep(0.5)
            assert paused.state == pb.RUN_STATE_PAUSED
            assert (await life.status()).step == paused.step
            await life.stub.ResumeRun(pb.ResumeRunRequest())
            await life.reaches(paused.step + 1)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
            stopped = await life.status()
    assert stopped.state == pb.RUN_STATE_DONE
    assert (run.settings.run.dir / "checkpoints" / f"step-{stopped.step:08d}" / "COMMITTED").exists()
    assert balance(run)[1] == 4 * stopped.step


async def test_a_stop_with_a_checkpoint_before_the_roles_are_up_says_that_there_is_none(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 4, "checkpoint_every_steps": 1}) as run:
        async with run.controller() as life:
            await life.shows(lambda status: "rollouts" in status.waiting_for)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            with pytest.raises(
                BudgetSpentError, match=r"stopped while it waited for rollouts; no checkpoint of step 0 was saved"
            ):
                await life.ends()
        async with run.controller() as life, run.rollout("rollout-0"):
            await life.reaches(1)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
        async with run.controller() as life:
            await life.shows(lambda status: "rollouts" in status.waiting_for)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()  # the step was saved before


async def test_a_stop_ends_a_run_whose_scorer_is_away_with_a_checkpoint(light_run: LightRun) -> None:
    is_away = False

    def score(item: Item) -> float:
        if is_away:
            raise ScorerUnavailableError("people mend it")
        return parity(item)

    sections: dict[str, Any] = {"run": {"num_steps": 1000, "checkpoint_every_steps": 1000}}
    async with light_run(score=score, reward={"max_attempts": 1}, **sections) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.005):
            await life.reaches(1)
            is_away = True
            await life.shows(lambda status: status.trouble)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
            stopped = await life.status()
        assert stopped.state == pb.RUN_STATE_DONE
        assert run.newest().step == stopped.step


async def test_a_paused_run_waits_for_its_scorer_without_end(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scorer, "RETRY_PAUSE_S", 0.05)
    away = False

    def score(item: Item) -> float:
        if away:
            raise ScorerUnavailableError("people mend it")
        return parity(item)

    reward = {"away_timeout_s": 4.0, "timeout_s": 4.0, "max_attempts": 1}
    async with light_run(score=score, run={"num_steps": 1000}, reward=reward) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.005):
            await life.reaches(1)
            away = True
            await life.stub.PauseRun(pb.PauseRunRequest())
            await asyncio.sleep(6.0)
            paused = await life.shows(lambda status: status.state == pb.RUN_STATE_PAUSED)
            assert paused.num_recoveries == 0
            away = False
            await life.stub.ResumeRun(pb.ResumeRunRequest())
            await life.reaches(paused.step + 2)
            await life.stub.StopRun(pb.StopRunRequest())
            await life.ends()


async def test_a_run_is_shown_without_its_counts_while_the_store_is_away(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(ledger: Ledger) -> Any:
        raise StoreUnavailableError("the store did not answer")

    async with light_run(run={"num_steps": 1000}) as run, run.rollout("rollout-0"), run.controller() as life:
        await life.reaches(1)
        monkeypatch.setattr(Ledger, "counts", away)
        shown = await life.status()
        assert (shown.state, shown.HasField("ledger")) == (pb.RUN_STATE_RUNNING, False)
        assert shown.trouble == "the store did not answer"
        assert shown.step > 0
        assert shown.workers
        async for message in life.stub.WatchRun(pb.WatchRunRequest(), timeout=RUN_S):
            assert message.status.trouble == "the store did not answer"
            break
        monkeypatch.undo()
        shown = await life.shows(lambda status: status.ledger.admitted)  # a busy store may give none at once
        assert not shown.trouble
        await life.stub.StopRun(pb.StopRunRequest())
        await life.ends()


async def test_a_store_that_hangs_keeps_no_look_at_the_run_waiting_and_takes_one_thread(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look that fails when all who asked have gone is nobody's to log."""
    gives_up, looks = threading.Event(), list[Ledger]()

    def hangs(ledger: Ledger) -> pb.LedgerCounts:
        looks.append(ledger)
        assert gives_up.wait(RUN_S)
        raise StoreUnavailableError("the store did not answer")

    async with light_run(run={"num_steps": 1000}) as run, run.rollout("rollout-0"), run.controller() as life:
        await life.reaches(1)
        monkeypatch.setattr(Ledger, "counts", hangs)
        for _ in range(2):
            asked = [life.stub.GetRun(pb.GetRunRequest(), timeout=RUN_CALL_TIMEOUT_S) for _ in range(8)]
            for shown in [(await call).status for call in asked]:
                assert (shown.state, shown.HasField("ledger")) == (pb.RUN_STATE_RUNNING, False)
                assert shown.trouble == "the store gave no counts within 2 s"
        assert len(looks) == 1
        gives_up.set()
        await life.shows(lambda status: status.trouble == "the store did not answer")  # of the next look
        monkeypatch.undo()
        shown = await life.shows(lambda status: status.ledger.admitted)  # a busy store may give none at once
        assert not shown.trouble
        await life.stub.StopRun(pb.StopRunRequest())
        await life.ends()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_paused_run_without_rollouts_outlives_a_hiccup_of_its_store(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody pays for rollouts that wait; a loop that starts over then finds none for longer than it would wait."""
    async with light_run(run={"num_steps": 1000}, controller={"stall_timeout_s": 3.0}) as run:
        async with run.controller() as life:
            async with run.rollout("rollout-0", token_s=0.002):
                await life.reaches(1)
                await life.stub.PauseRun(pb.PauseRunRequest())
                await life.shows(lambda status: status.state == pb.RUN_STATE_PAUSED)
            await life.shows(lambda status: all(worker.lost for worker in status.workers))
            await until(lambda: life.states.state == "paused")
            pending = Ledger.pending

            def failing_once(ledger: Ledger) -> Any:
                monkeypatch.setattr(Ledger, "pending", pending)
                raise StoreUnavailableError("the store did not answer")

            monkeypatch.setattr(Ledger, "pending", failing_once)
            await life.shows(lambda status: status.num_recoveries == 1)
            await asyncio.sleep(5.0)
            assert not life.running.done()
            assert life.states.state == "paused", "nobody is to be woken"
            async with run.rollout("rollout-1"):
                step = (await life.rests()).step
                await life.stub.ResumeRun(pb.ResumeRunRequest())
                await life.reaches(step + 1)
                await life.stub.StopRun(pb.StopRunRequest())
                await life.ends()


async def test_a_paused_run_waits_for_rollouts_also_when_its_controller_is_another(light_run: LightRun) -> None:
    hasty = {"start_timeout_s": 5.0, "stall_timeout_s": 5.0}
    async with light_run(run={"num_steps": 1000}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.002):
            await life.reaches(1)
            await life.stub.PauseRun(pb.PauseRunRequest())
            await life.shows(lambda status: status.state == pb.RUN_STATE_PAUSED)
        run.settings = run.settings.model_copy(update={"controller": run.settings.controller.model_copy(update=hasty)})
        async with run.controller() as life:
            await asyncio.sleep(7.0)
            assert not life.running.done()
            assert life.states.state == "paused"
            status, held = await life.status(), run.ledger.position()
            assert status.state == pb.RUN_STATE_PAUSED
            assert (status.step, status.published_step) == (held.step, held.published_step)
            async with run.rollout("rollout-1"):
                await life.rests()
                await life.stub.StopRun(pb.StopRunRequest())
                await life.ends()


async def test_a_paused_run_stays_paused_when_its_controller_starts_again(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 50}) as run, run.rollout("rollout-0", token_s=0.002):
        async with run.controller() as life:
            await life.reaches(1)
            await life.stub.PauseRun(pb.PauseRunRequest())
        async with run.controller() as life:
            paused = await life.shows(lambda status: status.state == pb.RUN_STATE_PAUSED)
            held = run.ledger.position()
            assert (paused.published_step, paused.policy_version) == (held.published_step, held.policy_version)
            await life.stub.ResumeRun(pb.ResumeRunRequest())
            await life.reaches(paused.step + 1)
    assert not run.ledger.position().paused


async def test_strangers_are_refused_and_a_silent_worker_must_join_again(light_run: LightRun) -> None:
    async with (
        light_run() as run,
        run.controller() as life,
        open_channel(str(run.settings.controller.address), party(Caller.REFERENCE)) as channel,
        open_channel(str(run.settings.controller.address), party(Caller.ROLLOUT)) as another,
    ):
        stub, reference = ControllerServiceStub(channel), pb.ROLE_REFERENCE
        join = pb.JoinRequest(
            run=run.settings.run.name,
            role=reference,
            worker="r",
            incarnation="1",
            address="127.0.0.1:1",
            version=contract_version(),
        )
        with pytest.raises(VersionMismatchError, match="install one release"):
            await stub.Join(pb.JoinRequest(run=join.run, role=reference, worker="r", version="9"))
        with pytest.raises(InvalidInputError, match=r"controller\.address"):
            await stub.Join(pb.JoinRequest(run="other", role=reference, worker="r", version=contract_version()))
        with pytest.raises(PermissionDeniedError, match="the reference's token may not speak for r"):
            await stub.Join(pb.JoinRequest(run=join.run, role=pb.ROLE_ACTOR, worker="r"))
        await stub.Join(join)
        beat = pb.HeartbeatRequest(worker="r", incarnation="1")
        await stub.Heartbeat(beat)
        with pytest.raises(PermissionDeniedError, match="the rollout's token may not speak for r"):
            await ControllerServiceStub(another).Heartbeat(beat)
        await life.shows(lambda status: any(worker.lost for worker in status.workers))
        with pytest.raises(UnknownWorkerError):
            await stub.Heartbeat(beat)


ENDED = """
import pathlib

class Ended:
    def __init__(self, run, path): self.path = pathlib.Path(path)
    def log(self, step, values): pass
    def keep_samples(self, step, samples): pass
    def close(self): pass
    def end(self, how):
        with self.path.open("a") as file: file.write(how.name + "\\n")
"""


async def test_trackers_are_told_how_the_run_stands_at_the_end_of_each_controller(
    light_run: LightRun, tmp_path: Path
) -> None:
    is_broken = False

    def picky(item: Item) -> float:
        if is_broken:
            raise ValueError("no score today")
        return parity(item)

    (tmp_path / "ended.py").write_text(ENDED)
    told = tmp_path / "told"
    custom = {"function": f"{tmp_path}/ended:Ended", "options": {"path": str(told)}}
    sections = {"reward": {"max_failed_groups": 2}, "trackers": {"tensorboard": False, "custom": custom}}
    async with light_run(score=picky, run={"num_steps": 1000}, **sections) as run, run.rollout("rollout-0"):
        async with run.controller() as life:
            await life.reaches(1)
            second = ControllerRun(run.settings)
            with pytest.raises(RunLockedError):
                await asyncio.wait_for(second.run(), 30)
            await second.close()
        async with run.controller() as life:
            await life.reaches(2)
            await life.stub.StopRun(pb.StopRunRequest())
            await life.ends()
        async with run.controller() as life:
            await life.reaches(3)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True, failure="rollout-0 ended too often"))
            with pytest.raises(BudgetSpentError, match="rollout-0 ended too often"):
                await life.ends()
            shown = await life.status()
            assert (shown.state, shown.error) == (pb.RUN_STATE_FAILED, "rollout-0 ended too often")
            assert run.newest().step == shown.step
        async with run.controller() as life:
            await life.reaches(4)
            await life.stub.StopRun(pb.StopRunRequest(failure="the actor ended too often"))
        is_broken = True
        with pytest.raises(BudgetSpentError):
            await run.to_the_end()
    assert told.read_text().split() == ["GOES_ON", "STOPPED", "DONE", "FAILED", "FAILED", "FAILED"]


async def test_a_second_controller_on_a_run_is_refused_and_the_first_goes_on(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    async with light_run(run={"num_steps": 8}) as run, run.rollout("rollout-0", token_s=0.02):
        async with run.controller() as life:
            await life.reaches(1)
            second = ControllerRun(run.settings)
            try:
                with pytest.raises(
                    RunLockedError,
                    match=rf"run {store.run}: another controller holds it and is alive; stop that one first",
                ):
                    await asyncio.wait_for(second.run(), 30)
                status = await second.status()
            finally:
                await second.close()
            assert (status.state, status.error) == (
                pb.RUN_STATE_FAILED,
                f"run {store.run}: another controller holds it and is alive; stop that one first",
            )
            assert not life.running.done()
            await life.ends()
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)
