"""One run for the machine of steps: the controller's own loop, store, recovery and calls to trainers, whose weights are
hashes (step_rig.py), and a rollout and a scorer that answer at once.

Every life of the loop makes some steps and ends. It passes an arrow at each of the loop's named instants; calls and
deletions have arrows of their own. What was sealed and counted is kept as an account. What fails, and what must hold,
is the machine's (tests/step_machine.py).
"""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.checkpoint.manifest import Attempt
from rolecall.checkpoint.storage import Storage, open_storage
from rolecall.data.dataset import RawPrompt
from rolecall.errors import StoreUnavailableError
from rolecall.scoring.scores import Score
from rolecall.settings import RunSettings
from rolecall.store.budget import PromptBytes
from rolecall.store.connection import Connection
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics
from rolecall.training.serving.calls import TrainerCalls
from rolecall.v1 import controller_pb2, weights_pb2
from rolecall.v1.reward_pb2 import DescribeResponse, ScoreItem
from rolecall.v1.trajectory_pb2 import FINISH_REASON_STOP, CommittedGroup, Prompt, RowRef, TrajectoryMeta
from rolecall.wire import Array
from services.controller.board import RunBoard
from services.controller.config import admission_policy
from services.controller.durable.commits import Commits
from services.controller.durable.recovery import Recovery
from services.controller.durable.run_point import Checkpoints
from services.controller.fleet.liveness import Rollout, Worker
from services.controller.fleet.members import Fleet
from services.controller.groups.prompts import Cursor
from services.controller.loop import Loop
from services.controller.parts import Parts
from services.controller.recovered import Recovered
from services.controller.step.adaptive import AdaptiveState
from services.controller.step.shifts import DeviceShifts
from services.controller.step.trainers import ActorTrainer, CriticTrainer, Trainer
from services.controller.threads import StoreThreads
from tests.fixtures_store import DIGEST, ForgetfulRedis
from tests.step_rig import (
    TRAINED_COLUMNS,
    ActorStub,
    Arrows,
    ProcessStub,
    RolloutStub,
    TrainerProcess,
    digest_of_inputs,
)

B, G = 2, 2
"""Groups of a batch, responses of a group."""
TRAINERS = ("actor", "critic")
NUM_PROMPTS = 10_000
READ_BLOCK_S = 0.02
"""A life that has ended waits for a read of the trajectories stream for so long."""
SAMPLE_S = 0.002
"""Pause between two looks for prompts."""


class SweptRows(Rows):
    """Rows with an arrow on either side of their deletion."""

    arrows: Arrows

    def delete(self, refs: Sequence[RowRef]) -> None:
        self.arrows.at("rows are about to be deleted")
        super().delete(refs)
        self.arrows.at("rows are deleted")


class SteppedLedger(Ledger):
    """A ledger whose blocking read is short, and which is not published to while a group is sampled."""

    def __init__(self, connection: Connection, run: str) -> None:
        super().__init__(connection, run)
        self.sampling = threading.Lock()
        self.version: int | None = None
        """The attested version; None while a publish is under way."""

    def read_committed(self, position: str, count: int, block_s: float) -> list[tuple[str, CommittedGroup]]:
        return super().read_committed(position, count, min(block_s, READ_BLOCK_S))

    def begin_publish(self, policy_version: int, step: int) -> bool:
        with self.sampling:
            self.version = None
            return super().begin_publish(policy_version, step)

    def attest(self, policy_version: int, step: int, digest: str, workers: Sequence[str]) -> None:
        super().attest(policy_version, step, digest, workers)
        self.version = policy_version


class WatchedCheckpoints(Checkpoints):
    """Checkpoints that are announced when they begin."""

    def __init__(self, storage: Storage, num_kept: int, begins: Callable[[int], None]) -> None:
        super().__init__(storage, num_kept)
        self._begins = begins

    def begin(self, step: int) -> Attempt:
        self._begins(step)
        return super().begin(step)


class OneRollout(Fleet):
    """A fleet whose one rollout answers every call at once and is never lost."""

    def _member(self, request: controller_pb2.JoinRequest) -> Worker:
        return Rollout(
            join=request,
            hang_s=60.0,
            last_seen=0.0,
            moved_at=0.0,
            channel=None,  # type: ignore[arg-type]
            stub=RolloutStub(),  # type: ignore[arg-type]
        )

    @classmethod
    def joined(cls, settings: RunSettings, ledger: Ledger, threads: StoreThreads) -> "OneRollout":
        fleet = cls(settings, ledger, threads, tokenizer="", token_ids="")
        fleet.join(
            controller_pb2.JoinRequest(
                run=settings.run.name,
                worker="r",
                incarnation="0",
                role=controller_pb2.ROLE_ROLLOUT,
                num_weight_ranks=1,
                version=fleet._contracts,
            )
        )
        return fleet


class PlainRenderer:
    """Renders every prompt to the same three tokens."""

    def render(self, raw: RawPrompt, epoch: int) -> Prompt:
        return Prompt(uid=raw.uid, epoch=epoch, token_ids=np.arange(3, dtype="<i4").tobytes())


class LengthReward:
    """A scorer whose score follows from a response's length and place."""

    trouble = ""

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [Score(float((item.num_response_tokens + index) % 3)) for index, item in enumerate(items)]

    async def describe(self) -> DescribeResponse:
        return DescribeResponse()


class NoTrackers:
    """Keeps nothing."""

    def log(self, step: int, metrics: Any) -> None:
        """Numbers are of no account here."""

    def keep_samples(self, step: int, samples: Any) -> None:
        """Neither are samples."""


class NoEvaluation:
    """Has no sets."""

    lacks_rollouts = False

    async def run(self, step: int, version: Callable[[], int]) -> tuple[Metrics, list[Any]]:
        return Metrics(), []


@dataclass(frozen=True)
class Sealed:
    """What a digest stands for."""

    step: int
    inputs: str
    gids: tuple[int, ...]
    uids: tuple[str, ...]


class StepRun:
    """One run: its store, its trainers, controllers one after another, and what was sealed and counted."""

    def __init__(self, run_settings: RunSettings, folder: Path) -> None:
        super().__init__()
        self.settings = run_settings
        self.folder = folder
        run_settings.run.dir.mkdir(parents=True, exist_ok=True)
        self.server = EmbeddedStore(folder / "store", "*", 64 * 2**20)
        self.server.start()
        client = ForgetfulRedis.from_url(self.server.url, protocol=2)
        assert isinstance(client, ForgetfulRedis)
        self.client = client
        self.connection = Connection(client)
        self.arrows = Arrows()
        self.rows = self.make_rows()
        self.rows.arrows = self.arrows
        self.checkpoints = WatchedCheckpoints(open_storage(str(folder / "checkpoints")), 2, self.checkpoint_begins)
        self.controllers: list[SteppedLedger] = []
        self.stale = self.rolled_back = False
        self.backlog: tuple[Prompt, ...] = ()
        self.attempts = itertools.count()
        self.sealed: dict[str, Sealed] = {}
        self.timeline: list[str] = []
        """Digests of the steps the store counts, in order."""
        self.states: dict[tuple[str, ...], bytes] = {(): b""}
        """Timeline -> what the algorithm carries on from there."""
        self.lineage = 0
        self.covered: dict[int, tuple[str, ...]] = {0: ()}
        """Step of each checkpoint that was begun -> the timeline then."""
        self.threads = StoreThreads()
        self.runner = asyncio.Runner()
        self.processes = {
            name: TrainerProcess(
                name,
                self.connection,
                run_settings.run.name,
                self.rows,
                self.arrows,
                str(folder / "checkpoints"),
                self.make_calls,
            )
            for name in TRAINERS
        }
        self.runner.run(self.start_trainers())

    # --- where subclasses plant -------------------------------------------------------------------

    make_calls: Callable[..., TrainerCalls] = TrainerCalls
    make_loop: Callable[..., Loop] = Loop

    def make_rows(self) -> SweptRows:
        return SweptRows(self.connection, self.settings.run.name, 2)

    async def recovered(self) -> Recovered:
        """The position to go on from, trainers brought to it."""
        return await self.recovery().run(self.ledger.ctl)

    def before_checkpoint(self) -> None:
        """Nothing may be freed here."""

    # --- the parts --------------------------------------------------------------------------------

    @property
    def ledger(self) -> SteppedLedger:
        return self.controllers[-1]

    def trainers(self) -> tuple[ActorTrainer, CriticTrainer]:
        actor, critic = ActorStub(self.processes["actor"]), ProcessStub(self.processes["critic"])
        section: Any = self.settings.actor
        return ActorTrainer("actor", actor, section), CriticTrainer("critic", critic, section)  # type: ignore[arg-type]

    def recovery(self) -> Recovery:
        trainers: list[Trainer] = [*self.trainers()]
        return Recovery(
            self.settings,
            self.ledger,
            self.rows,
            self.threads,
            trainers,
            self.checkpoints,
            PromptBytes(0),
            lambda what: None,
        )

    def parts(self, board: RunBoard) -> Parts:
        actor, critic = self.trainers()
        doubles: dict[str, Any] = {
            "renderer": PlainRenderer(),
            "trackers": NoTrackers(),
            "reward": LengthReward(),
            "evaluation": NoEvaluation(),
        }
        return Parts(
            settings=self.settings,
            raw_prompts=[RawPrompt(f"p{n}", (), "", {}) for n in range(NUM_PROMPTS)],
            prompt_bytes=PromptBytes(0),
            probe=weights_pb2.Probe(),
            policy=admission_policy(self.settings, PromptBytes(0)),
            ledger=self.ledger,
            rows=self.rows,
            threads=self.threads,
            checkpoints=self.checkpoints,
            commits=Commits(self.checkpoints, self.threads, 60.0),
            references={},
            actor=actor,
            critic=critic,
            fleet=self.fleet,
            board=board,
            shifts=DeviceShifts(self.settings, self.fleet, board, actor, critic, {}),
            **doubles,
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

    # --- one life of the loop ---------------------------------------------------------------------

    async def one_step(self) -> None:
        await self.live()

    async def two_steps(self) -> None:
        """Makes two steps in one life."""
        await self.live(2)

    async def checkpoint(self) -> None:
        """A step beside a checkpoint; the life ends with another one, of that step."""
        await self.live(save=True)

    async def live(self, num_steps: int = 1, *, save: bool = False) -> None:
        """The loop that ships, from recovery to the end of its last step of `num_steps`."""
        if not self.controllers or self.stale:
            self.take_over()
        recovered = await self.recovered()
        self.follow_the_store()
        board = RunBoard()
        sealed, committed = itertools.count(recovered.position.step), itertools.count(1)
        if save:
            board.request_checkpoint()

        def at(instant: str) -> None:
            if instant == "columns are written":
                self.note_sealed(next(sealed))
            if instant == "step is committed" and next(committed) == num_steps:
                board.stop(checkpoint=save, failure="")
            self.arrows.at(instant)

        loop = self.make_loop(self.parts(board), recovered, at)
        sampling = asyncio.create_task(self.sample())
        try:
            await loop.run()
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})
            await self.threads.settle()
        if not sampling.cancelled():
            sampling.result()
        admitted = self.ledger.position().next_gid - recovered.position.next_gid
        self.backlog = recovered.backlog[admitted:]

    def take_over(self) -> None:
        """Another controller takes the run."""
        if self.rolled_back:
            self.controllers.clear()  # the store may give their numbers again
        self.controllers.append(SteppedLedger(self.connection, self.settings.run.name))
        self.ledger.lock(0.01)
        self.fleet = OneRollout.joined(self.settings, self.ledger, self.threads)
        self.stale = False

    async def sample(self) -> None:
        """The rollout: answers whatever is admitted, under the version that is attested."""
        while True:
            try:
                with self.ledger.sampling:
                    if self.ledger.version is not None:
                        self.sample_some(self.ledger.version)
            except StoreUnavailableError:
                pass  # the store is away; the loop notices, too
            await asyncio.sleep(SAMPLE_S)

    def sample_some(self, version: int) -> None:
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
                TrajectoryMeta(
                    id=ref.id,
                    gid=claim.group.gid,
                    prompt=claim.group.prompt,
                    num_prompt_tokens=3,
                    finish_reason=FINISH_REASON_STOP,
                )
                for ref in refs
            ]
            self.rows.stage_many(refs, rows, metas, 600)
            queue.commit(claim, CommittedGroup(gid=claim.group.gid, rows=refs), {(version, DIGEST)})
            self.rows.persist(refs)

    def committed(self) -> dict[int, CommittedGroup]:
        return {group.gid: group for _, group in self.ledger.read_committed("0", 1000, 0.0)}

    def num_prompts_used(self) -> int:
        """Prompts that the data has given."""
        cursor = Cursor.decode(self.ledger.position().cursor)
        assert cursor.epoch == 0
        return cursor.index

    # --- the model --------------------------------------------------------------------------------

    def checkpoint_begins(self, step: int) -> None:
        is_current = self.ledger.position().step == step
        if is_current:
            self.follow_the_store()  # a run whose store was rolled back to this very step goes on
        self.before_checkpoint()
        if is_current:  # else the store was rolled back since, and the checkpoint is refused
            self.covered[step] = tuple(self.timeline)  # also when nobody hears that it is committed

    def note_sealed(self, step: int) -> None:
        """What the batch of `step` holds. Whoever prepares the same batch again must find the same bits."""
        batch = self.ledger.sealed(step)
        if batch is None:
            return  # the store was rolled back since; so is the loop
        refs = list(batch.rows)
        inputs = digest_of_inputs(refs, self.rows.read(refs, TRAINED_COLUMNS))
        uids = tuple(dict.fromkeys(meta.prompt.uid for meta in self.rows.read_meta(refs) if meta.prompt.uid))
        made = Sealed(step, inputs, tuple(batch.gids), uids)
        assert self.sealed.setdefault(batch.digest, made) == made

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
