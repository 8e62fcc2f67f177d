"""Publishing as a whole, model-checked: rollouts join, leave, die, hang, stop, wake up, come late and lie, in any phase
of any publish; publishes are cancelled; the actor fails.

After every move: no committed token is of torn or unattested weights and a version is one digest (tests/attestation.py,
which asks nobody but the store); whoever serves holds whole what the store says is attested. At the end, once failures
stop: everyone alive serves, and every group is committed.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rolecall.errors import DeadlineError, RoleCallError, WorkerLostError
from rolecall.store.embedded import EmbeddedStore
from services.controller.publish.receivers import AttemptFailed
from services.rollout.replica import Replica
from tests.attestation import read_attested
from tests.fixtures_store import MakeStore, StoreUnderTest
from tests.twins.collective import PHASES, Fault, Kind, RogueReplica, digest_of
from tests.twins.publishing import RolloutProcess, gone, publishing_run

T = TypeVar("T")
NAMES = ("rollout-0", "rollout-1", "rollout-2")
PUBLISH_S = 60.0
"""Far more than any publish here takes; a longer one hangs."""
faults = st.dictionaries(
    st.sampled_from(NAMES),
    # It still samples while it joins, is probed before it resumes, and nothing shows a run that weights change in
    # memory outside any load.
    st.builds(Fault, st.sampled_from(PHASES), st.sampled_from(Kind)).filter(
        lambda each: each.kind is not Kind.LIE or each.phase not in ("join", "resume")
    ),
    max_size=2,
)


async def outcomes(*moves: Awaitable[Any]) -> list[Any]:
    """What came of each; errors are returned, too."""
    return await asyncio.gather(*moves, return_exceptions=True)


class PublishMachine(RuleBasedStateMachine):
    """One run in an event loop that stands still between two moves."""

    def __init__(self, store: StoreUnderTest, folder: Path, replica: type[Replica] = Replica) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        # No group is given up for poison here, however many of its workers die.
        self.rig = self.do(
            self.stack.enter_async_context(publishing_run(store, {"controller": {"max_deliveries": 1000}}, folder))
        )
        self.rig.replica = replica

    def do(self, move: Coroutine[Any, Any, T]) -> T:
        """Runs `move` to its end."""
        return self.loop.run_until_complete(asyncio.wait_for(move, PUBLISH_S))

    def twin(self, name: str) -> RolloutProcess | None:
        """The living process of this name."""
        return next((twin for twin in self.rig.alive if twin.name == name), None)

    def teardown(self) -> None:
        try:
            self.do(self.come_to_rest())
            self.check()
        finally:
            self.do(self.stack.aclose())
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.do(outcomes(*left))
            self.loop.close()

    async def come_to_rest(self) -> None:
        """Progress under finitely many failures."""
        rig = self.rig
        for twin in rig.alive:
            twin.engine.fault = None
            if twin.engine.frozen:
                await twin.kill()
        keeper = asyncio.create_task(self.keep_one())
        try:
            await rig.publisher.publish(rig.actor.step)
            while not (rig.publisher.holds(rig.actor.step) or any(not twin.is_alive for twin in rig.twins)):
                # whoever was late on a busy machine was left out until the next
                await rig.publisher.publish(rig.actor.step)
            await rig.admit(1)
            await rig.committed(rig.num_admitted, 45.0)
        finally:
            keeper.cancel()
            await outcomes(keeper)
        assert any(twin.replica.gate.is_open for twin in rig.alive)

    async def keep_one(self) -> None:
        """What the launcher does: a worker that learns only now that it was given up ends, and another takes its
        place.
        """
        while True:
            if not self.rig.alive:
                await self.rig.rollout("rollout-9")
            await asyncio.sleep(0.05)

    @initialize()
    def first_publish(self) -> None:
        for name in NAMES[:2]:
            self.do(self.rig.rollout(name))
        self.do(self.rig.admit(4))
        self.do(self.rig.publisher.publish(0))

    # --- the fleet --------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        """Another incarnation of a name whose process, if there is one, was stopped or lives."""
        self.do(self.rig.rollout(name))

    @precondition(lambda self: self.rig.alive)
    @rule(data=st.data(), move=st.sampled_from(["kill", "leave", "stop", "wake"]))
    def befall(self, data: st.DataObject, move: str) -> None:
        twin = data.draw(st.sampled_from(self.rig.alive))
        match move:
            case "kill":
                self.do(twin.kill())
            case "leave":
                self.do(twin.leave())
            case "stop":
                twin.engine.is_stopped = twin.engine.frozen = True
            case "wake":
                twin.wake()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def let_run(self, seconds: float) -> None:
        self.do(self.rig.admit(2))
        self.do(asyncio.sleep(seconds))

    # --- the controller and the actor -------------------------------------------------------------

    @rule(faults=faults, steps=st.integers(0, 1))
    def publish(self, faults: dict[str, Fault], steps: int) -> None:
        rig = self.rig
        rig.actor.step += steps
        for name, fault in faults.items():
            if twin := self.twin(name):
                twin.engine.fault = fault
        try:
            self.do(rig.publisher.publish(rig.actor.step))
        except (WorkerLostError, DeadlineError):
            assert not [twin for twin in rig.alive if not twin.engine.frozen and twin.name not in faults]
        else:
            assert rig.publisher.published_step == rig.actor.step
        for twin in rig.alive:
            twin.engine.fault = None

    @rule(fault=faults, after_s=st.sampled_from([0.0, 0.02, 0.1, 0.6]))
    def cancel(self, fault: dict[str, Fault], after_s: float) -> None:
        for name, each in fault.items():
            if twin := self.twin(name):
                twin.engine.fault = each
        self.do(self.publish_and_leave(after_s))

    async def publish_and_leave(self, after_s: float) -> None:
        publishing = asyncio.create_task(self.rig.publisher.publish(self.rig.actor.step))
        await asyncio.sleep(after_s)
        publishing.cancel()
        await outcomes(publishing)
        await self.rig.threads.settle()

    @rule(faults=faults, after_s=st.sampled_from([0.02, 0.3, 5.0]))
    def catch_up(self, faults: dict[str, Fault], after_s: float) -> None:
        """Whoever has no weights gets those of the others, who go on; left after a while."""
        joiners, rig = self.rig.publisher.joiners(), self.rig
        names = {rollout.join.worker for rollout in joiners}
        for twin in rig.alive:
            twin.engine.fault = faults.get(twin.name) if twin.name in names else None
        serving = [twin for twin in rig.alive if twin.replica.gate.is_open]
        if joiners:
            self.do(self.catch_up_and_leave(after_s))
        assert all(twin.replica.gate.is_open for twin in serving if twin.is_alive)

    async def catch_up_and_leave(self, after_s: float) -> None:
        with suppress(AttemptFailed, RoleCallError, TimeoutError):
            async with asyncio.timeout(after_s):
                await self.rig.publisher.catch_up(self.rig.publisher.joiners())
        for twin in self.rig.alive:
            twin.engine.fault = None
        await self.rig.threads.settle()

    @precondition(lambda self: self.rig.alive)
    @rule(phase=st.sampled_from(["open", "publish"]))
    def actor_fails(self, phase: str) -> None:
        self.rig.actor.failures = {phase: gone("the actor")}
        failures = self.do(outcomes(self.rig.publisher.publish(self.rig.actor.step)))
        assert all(error.retryable for error in failures if isinstance(error, RoleCallError))
        self.rig.actor.failures = {}

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        assert self.rig.violations() == []
        attested = read_attested(self.rig.store.connection, self.rig.store.run)
        for twin in self.rig.alive:
            if twin.replica.gate.is_open:
                assert attested[twin.replica.held.policy_version] == digest_of(twin.engine.buckets), (
                    f"{twin.consumer} serves what nobody attested"
                )


@pytest.fixture
def machine(store_server: EmbeddedStore, make_store: MakeStore, tmp_path: Path) -> Callable[..., PublishMachine]:
    """Makes machines over runs of their own."""
    return lambda **options: PublishMachine(
        make_store(store_server.url, f"run-{uuid.uuid4().hex[:12]}"), tmp_path, **options
    )


def run(make: Callable[[], PublishMachine], max_examples: int) -> None:
    """Without shrinking: a failing example takes seconds, and says what it did."""
    run_state_machine_as_test(
        make,  # type: ignore[arg-type]  # anything that makes a machine will do
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=8,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.thorough("test_whoever_fails_in_any_phase_is_left_out_and_the_others_serve_soon")
@pytest.mark.timeout(400)
def test_no_token_leaves_unattested_weights_and_publishing_goes_on(machine: Callable[..., PublishMachine]) -> None:
    run(machine, max_examples=8)


def test_the_machine_catches_an_engine_that_serves_torn_weights(machine: Callable[..., PublishMachine]) -> None:
    for replica in (Replica, RogueReplica):
        played = machine(replica=replica)
        played.first_publish()
        played.publish({"rollout-0": Fault("bucket", Kind.FAIL)}, steps=1)
        played.let_run(0.3)
        if replica is Replica:
            played.check()
            played.teardown()
        else:
            with pytest.raises(AssertionError, match=r"nobody attested|; weights"):
                played.check()
            with suppress(AssertionError):
                played.teardown()
