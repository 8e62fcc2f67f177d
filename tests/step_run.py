"""One run for the machine of steps: the real store, recovery and trainers' calls, and a controller in the order of
services/controller/loop.py.

It passes an arrow between any two effects, and keeps an account of what was sealed and counted. What fails, and what
must hold, is the machine's (tests/integration/test_step_machine.py). The weights of its trainers are hashes
(step_rig.py).
"""

import asyncio
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import StoreRolledBackError
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.training.serving.calls import TrainerCalls
from rolecall.v1.trajectory_pb2 import CommittedGroup, Prompt, PromptGroup, RowRef, TrajectoryMeta
from rolecall.wire import Array
from services.controller.durable.in_flight import encode_prompts, prompts_in_flight
from services.controller.durable.recovery import Recovery
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.durable.saving import CheckpointSaver
from services.controller.groups.assembly import ScoredGroup
from services.controller.recovered import Recovered
from services.controller.step.adaptive import AdaptiveState
from services.controller.step.preparation import columns_read, prepare
from services.controller.step.trainers import CriticTrainer, Trainer
from services.controller.threads import StoreThreads
from tests.fixtures_store import DIGEST, ForgetfulRedis
from tests.step_rig import Arrows, ProcessStub, TrainerProcess, digest_of_inputs

B, G = 2, 2
"""Groups of a batch, responses of a group."""
AHEAD = 3
"""Groups admitted beyond the batch: they are in flight whenever something fails."""
TRAINERS = ("actor", "critic")


class SweptRows(Rows):
    """Rows with an arrow on either side of their deletion."""

    arrows: Arrows

    def delete(self, refs: Sequence[RowRef]) -> None:
        self.arrows.at("rows are about to be deleted")
        super().delete(refs)
        self.arrows.at("rows are deleted")


@dataclass(frozen=True)
class Sealed:
    """What a digest stands for."""

    step: int
    inputs: str
    gids: tuple[int, ...]
    uids: tuple[str, ...]


class StepRun:
    """One run: its store, its trainers, a controller that goes from arrow to arrow, and what was sealed and counted."""

    def __init__(self, run_settings: RunSettings, folder: Path) -> None:
        super().__init__()
        self.settings = run_settings
        self.folder = folder
        self.server = EmbeddedStore(folder / "store", "*", 64 * 2**20)
        self.server.start()
        client = ForgetfulRedis.from_url(self.server.url, protocol=2)
        assert isinstance(client, ForgetfulRedis)
        self.client = client
        self.connection = Connection(client)
        self.arrows = Arrows()
        self.rows = self.make_rows()
        self.rows.arrows = self.arrows
        self.checkpoints = Checkpoints(open_storage(str(folder / "checkpoints")), 2)
        self.controllers: list[Ledger] = []
        self.stale = self.rolled_back = False
        self.backlog: list[Prompt] = []
        self.version = -1
        self.attempts = itertools.count()
        self.sealed: dict[str, Sealed] = {}
        self.timeline: list[str] = []
        """Digests of the steps the store counts, in order."""
        self.states: dict[tuple[str, ...], bytes] = {(): b""}
        """Timeline -> what the algorithm carries on from there."""
        self.lineage = 0
        self.covered: dict[int, tuple[str, ...]] = {}
        """Step of each committed checkpoint -> the timeline then."""
        self.threads = StoreThreads()
        self.runner = asyncio.Runner()
        self.processes = {
            name: TrainerProcess(name, self.connection, run_settings.run.name, self.rows, self.arrows, self.make_calls)
            for name in TRAINERS
        }
        self.runner.run(self.start_trainers())

    # --- where subclasses plant -------------------------------------------------------------------

    make_calls: Callable[..., TrainerCalls] = TrainerCalls

    def make_rows(self) -> SweptRows:
        return SweptRows(self.connection, self.settings.run.name, 2)

    async def recovered(self) -> Recovered:
        """The position to go on from, trainers brought to it."""
        return await self.recovery().run(self.ledger.ctl)

    def before_checkpoint(self) -> None:
        """Nothing may be freed here."""

    def needs_values(self, step: int) -> bool:
        return self.ledger.sealed(step) is None

    # --- the parts --------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self.controllers[-1]

    def trainers(self) -> tuple[Trainer, CriticTrainer]:
        assert self.settings.critic is not None
        actor, critic = (ProcessStub(self.processes[name]) for name in TRAINERS)
        return Trainer("actor", actor, self.settings.actor), CriticTrainer("critic", critic, self.settings.actor)  # type: ignore[arg-type]

    def recovery(self) -> Recovery:
        return Recovery(
            self.settings, self.ledger, self.threads, self.trainers(), self.checkpoints, 0, lambda what: None
        )

    async def start_trainers(self) -> None:
        for process in self.processes.values():
            process.start()

    async def close(self) -> None:
        for process in self.processes.values():
            await process.close()

    def teardown(self) -> None:
        self.runner.run(self.close())
        self.runner.close()
        self.threads.close()
        self.client.close()
        self.server.stop()
        shutil.rmtree(self.folder)

    # --- a controller, as services/controller/loop.py orders it -----------------------------------

    async def one_step(self) -> None:
        actor, critic = self.trainers()
        ledger, step = self.ledger, self.ledger.position().step
        groups = self.next_groups(step)
        refs = [ref for group in groups for ref in group.rows]
        if self.needs_values(step):
            await critic.compute(ledger.ctl, refs, step)
        self.arrows.at("values are computed")
        contents = self.rows.read(refs, (*columns_read(self.settings), "reward"))
        state = AdaptiveState.decode(self.settings.algorithm, ledger.position().algorithm_state)
        batch, columns = prepare(self.settings, step, groups, contents, state=state)
        self.note_sealed(step, batch.digest, refs, contents, columns)
        self.arrows.at("batch is prepared")
        ledger.seal(batch)
        self.arrows.at("batch is sealed")
        self.rows.put(refs, columns)
        self.arrows.at("columns are written")
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(trainer.train(ledger.ctl, step, batch.digest, lambda what: None))
                for trainer in (actor, critic)
            ]
        self.arrows.at("trained")
        results = [call.result() for call in calls]
        ledger.commit_step(
            step, results, state.after(self.settings.algorithm, batch, results).encode(self.settings.algorithm)
        )
        self.arrows.at("step is committed")
        self.publish(step + 1)

    def publish(self, step: int) -> None:
        self.version += 1
        self.ledger.begin_publish(self.version, step)
        self.arrows.at("publish is begun")
        self.ledger.attest(self.version, step, DIGEST, ["r.0"])

    async def checkpoint(self) -> None:
        step = self.ledger.position().step
        self.before_checkpoint()
        self.covered[step] = tuple(self.timeline)  # also when nobody hears that it is committed

        async def committed(path: str) -> None:
            self.arrows.at("checkpoint is committed")
            self.ledger.sweep(self.rows, step)

        saver = CheckpointSaver(self.trainers(), self.checkpoints, self.threads, saved_step=0)
        try:
            await saver.begin(self.ledger.ctl, step, lambda: self.point(step), committed, lambda: None)
            self.arrows.at("the checkpoint is begun")
            await self.one_step()
            await saver.finish()
        finally:
            await saver.cancel()
            await self.threads.settle()  # a commit goes on

    async def point(self, step: int) -> RunPoint:
        position = self.ledger.position()
        if position.step != step:
            raise StoreRolledBackError("restored from an older copy")
        untrained = encode_prompts(prompts_in_flight(self.ledger, self.rows, position.next_gid))
        counters = {
            "trained": position.trained,
            "dropped": dict(position.dropped),
            "cursor": position.cursor.decode(),
            "untrained": untrained,
        }
        counters["algorithm_state"] = position.algorithm_state.decode()
        counters["waiting"] = encode_prompts(self.backlog)
        return RunPoint(
            self.settings.run.name,
            position.lineage,
            step,
            self.version,
            position.epoch,
            position.next_gid,
            **counters,  # type: ignore[arg-type]
        )

    async def recover(self) -> None:
        if not self.controllers or self.stale:
            if self.rolled_back:
                self.controllers.clear()  # the store may give their numbers again
            self.controllers.append(Ledger(self.connection, self.settings.run.name))
            self.ledger.lock(0.01)
            self.stale = False
        recovered = await self.recovered()
        self.backlog = list(recovered.backlog)
        self.version = recovered.policy_version
        self.follow_the_store()
        self.publish(recovered.position.step)

    def next_groups(self, step: int) -> list[ScoredGroup]:
        """Those sealed already, else the oldest; admitted and sampled where they are missing."""
        while len(self.committed()) < B:
            self.admit_and_sample()
        batch = self.ledger.sealed(step)
        committed = self.committed()
        return [self.score(committed[gid]) for gid in (batch.gids if batch else sorted(committed)[:B])]

    def committed(self) -> dict[int, CommittedGroup]:
        return {group.gid: group for _, group in self.ledger.read_committed("0", 1000, 0.0)}

    def admit_and_sample(self) -> None:
        position = self.ledger.position()
        for gid in range(position.next_gid, position.next_gid + B + AHEAD - len(self.ledger.queued())):
            cursor = int(self.ledger.position().cursor or b"0")
            prompt = (
                self.backlog[0]
                if self.backlog
                else Prompt(uid=f"p{cursor}", token_ids=np.arange(3, dtype="<i4").tobytes())
            )
            self.ledger.admit(
                PromptGroup(gid=gid, prompt=prompt, num_responses=G), str(cursor + (not self.backlog)).encode()
            )
            del self.backlog[:1]
        queue = PromptQueue(self.connection, self.settings.run.name, "r.0")
        for claim in queue.claim(B):
            refs: list[RowRef] = []
            rows: list[dict[str, Array]] = []
            for index in range(G):
                rng = np.random.default_rng(next(self.attempts))  # another attempt samples other tokens
                length = 3 + int(rng.integers(1, 6))
                mask = (np.arange(length) >= 3).astype(np.uint8)
                refs.append(self.rows.ref(f"{claim.group.gid}/{index}", claim.token, length))
                logprobs = rng.normal(size=length).astype(np.float32) * mask
                rows.append(
                    {
                        "token_ids": rng.integers(0, 99, length).astype(np.int32),
                        "response_mask": mask,
                        "rollout_logprobs": logprobs,
                    }
                )
            metas = [
                TrajectoryMeta(id=ref.id, gid=claim.group.gid, prompt=claim.group.prompt, num_prompt_tokens=3)
                for ref in refs
            ]
            self.rows.stage_many(refs, rows, metas, 600)
            queue.commit(claim, CommittedGroup(gid=claim.group.gid, rows=refs), {(self.version, DIGEST)})
            self.rows.persist(refs)

    def score(self, group: CommittedGroup) -> ScoredGroup:
        refs = list(group.rows)
        rewards = np.array([(ref.num_tokens + index) % 3 for index, ref in enumerate(refs)], np.float32)
        self.rows.put(refs, [{"reward": rewards[index : index + 1]} for index in range(G)])
        ones = np.ones(G, np.int32)
        return ScoredGroup(group.gid, tuple(refs), 0, rewards, {}, ones, ones > 1, 0.0, 0.0, 0.0)

    # --- the model --------------------------------------------------------------------------------

    def note_sealed(
        self,
        step: int,
        digest: str,
        refs: Sequence[RowRef],
        contents: Sequence[Mapping[str, Array]],
        columns: Sequence[Mapping[str, Array]],
    ) -> None:
        """Whoever prepares the same batch again must find the same bits."""
        inputs = digest_of_inputs(
            refs, [{**content, **column} for content, column in zip(contents, columns, strict=True)]
        )
        gids = tuple(dict.fromkeys(int(ref.id.split("/")[0]) for ref in refs))
        uids = tuple(dict.fromkeys(meta.prompt.uid for meta in self.rows.read_meta(refs)))
        made = Sealed(step, inputs, gids, uids)
        assert self.sealed.setdefault(digest, made) == made

    def follow_the_store(self) -> None:
        """Steps that were counted since the last look; none may be missing unless the store went back or a new lineage
        began.
        """
        position = self.ledger.position()
        if position.lineage != self.lineage:
            self.lineage = position.lineage
            self.timeline = list(self.covered[position.step])
        assert position.step >= len(self.timeline), "the store forgot a step that it had counted"
        for step in range(position.freed_step, position.step):
            batch = self.ledger.sealed(step)
            assert batch is not None, f"batch {step} was freed before its time"
            if step >= len(self.timeline):
                assert step == len(self.timeline)
                algorithm = self.settings.algorithm
                before = AdaptiveState.decode(algorithm, self.states[tuple(self.timeline)])
                self.timeline.append(batch.digest)
                self.states[tuple(self.timeline)] = before.after(algorithm, batch, self.ledger.results(step)).encode(
                    algorithm
                )
            assert batch.digest == self.timeline[step]
        assert position.algorithm_state == self.states[tuple(self.timeline)], "these steps leave another state"
