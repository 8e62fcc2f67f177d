"""The recovery of a run: the ledger's position, and trainers that are brought to it.

A trainer that stands behind the ledger loads the newest checkpoint and applies the sealed batches since (their rows are
kept until a checkpoint covers them), so that nothing is generated again. When the store is not the future of the
checkpoint (it was lost, or its batches are gone), the run goes back to the checkpoint in a new lineage: empty keys, and
the prompts that were in flight at the checkpoint are admitted again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolecall.checkpoint.manifest import Committed
from rolecall.columns import TOPK_IDS
from rolecall.errors import CheckpointMismatchError, ConfigError, StoreRolledBackError
from rolecall.settings import RunSettings
from rolecall.store.budget import PromptBytes, batch_bytes
from rolecall.store.ledger import Ledger
from rolecall.store.position import RunPosition, Snapshot
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics
from rolecall.v1 import training_pb2, trajectory_pb2
from services.controller.durable.in_flight import READ_COUNT, decode_prompts
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.recovered import Recovered
from services.controller.step.adaptive import AdaptiveState
from services.controller.step.trainers import Trainer
from services.controller.tasks import at_once
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """The way back into a run: brings the trainers to where the store stands."""

    settings: RunSettings
    ledger: Ledger
    rows: Rows
    threads: StoreThreads
    trainers: Sequence[Trainer]
    """The actor first."""
    checkpoints: Checkpoints
    prompt_bytes: PromptBytes
    """Bytes that are counted for each prompt."""
    report: Callable[[str], None]
    """Called with what is awaited."""

    async def run(self, ctl: int) -> Recovered:
        """StoreRolledBackError when the trainers are ahead of the store and no checkpoint says how to go on."""
        snapshot = await self.threads.call(self.ledger.snapshot)
        latest = await self.threads.call(self.checkpoints.latest)
        if latest is not None and latest[1].run != self.settings.run.name:
            name = self.settings.run.name
            raise CheckpointMismatchError(
                f"{latest[0].storage.url} is a checkpoint of run {latest[1].run!r}, not of {name!r}; give each run "
                "its own run.dir"
            )
        infos = [await trainer.info() for trainer in self.trainers]
        versions = [info.policy_version for info in infos]
        is_actor_restored = infos[0].step < snapshot.position.step
        sets_back = latest is not None and _was_cut_short(snapshot.position, latest[1], infos)
        if latest is None and snapshot.position.set_back:
            snapshot = await self._begin_anew(snapshot.position, infos)
        elif latest is not None and not sets_back and not await self._continues(snapshot.position, latest[1], infos):
            snapshot, sets_back = await self._begin_lineage(snapshot.position, latest[1]), True
        if latest is not None and sets_back:
            is_actor_restored = True
            loaded = await at_once([trainer.load(ctl, latest[0]) for trainer in self.trainers])
            versions += [answer.policy_version for answer in loaded]
        else:
            step = snapshot.position.step
            trainers = zip(self.trainers, infos, strict=True)
            versions += await at_once([self._bring_up(ctl, *trainer, latest, step) for trainer in trainers])
            if any(info.step > snapshot.position.step for info in infos):
                snapshot = await self._finish_step(ctl, snapshot.position.step)
        await self.threads.call(self.require_one_width)
        curriculum, step = self.settings.algorithm.curriculum, snapshot.position.step
        return Recovered(
            ctl=ctl,
            position=snapshot.position,
            sealed=await self.threads.call(self.ledger.sealed, step),
            begun=frozenset(await self.threads.call(self.ledger.begun, step)),
            rates=await self.threads.call(self.ledger.rates) if curriculum is not None else {},
            saved_step=latest[1].step if latest else 0,
            is_actor_restored=is_actor_restored,
            step_of_version=await self.threads.call(self.ledger.step_of_version),
            live={group.gid: group.admit_published_step for group in snapshot.groups},
            backlog=_backlog(snapshot.position, latest[1] if latest else None),
            retained_bytes=await self.threads.call(self._retained_bytes, snapshot.position),
            untold=await self.threads.call(self._untold, snapshot.position),
            policy_version=max(snapshot.position.begun_version, snapshot.position.policy_version, *versions),
        )

    def require_columns(self, position: RunPosition, saved_step: int) -> None:
        """ConfigError when a sealed batch that may be trained again, after the checkpoint of `saved_step`, lacks a
        column that the settings train on: its rows would be missed as if the store had lost them. Blocks.
        """
        if position.set_back:  # it goes back to the checkpoint, and trains none of them
            return
        asked = self.settings.columns_trained_on
        for step in range(saved_step, position.step + 1):
            batch = self.ledger.sealed(step)
            if batch is None or batch.critic_only:  # the columns are the actor's
                continue
            for name in asked.keys() - set(batch.columns):
                raise ConfigError(
                    f"{asked[name]}: it trains on the column {name}, which the batch of step {step} was sealed "
                    "without, and that batch may be trained again: no checkpoint covers it. Resume once with "
                    f"{asked[name]} as it was, end that by `rolecall stop --checkpoint`, then resume with the new one"
                )

    def require_one_width(self) -> None:
        """ConfigError when groups in flight were ranked by their teacher for another algorithm.distillation.top_k:
        columns are written once, and rows of two widths make no batch. The oldest that was ranked tells. Blocks.
        """
        distillation = self.settings.algorithm.distillation
        if distillation is None or distillation.top_k is None:
            return
        position = "0"
        while entries := self.ledger.read_committed(position, READ_COUNT, 0.0):
            position = entries[-1][0]
            for _, group in entries:
                row = self.rows.read([group.rows[0]], (), [TOPK_IDS])[0]
                if TOPK_IDS not in row:
                    continue
                if (before := row[TOPK_IDS].shape[1]) != distillation.top_k:
                    raise ConfigError(
                        f"algorithm.distillation.top_k: groups in flight were ranked for {before}, and "
                        f"{distillation.top_k} make no batch with them; resume with {before}, or go back to a "
                        "checkpoint by `rolecall rewind`, from where they are sampled again"
                    )
                return

    async def _continues(
        self, position: RunPosition, point: RunPoint, infos: Sequence[training_pb2.GetTrainerInfoResponse]
    ) -> bool:
        """Whether every trainer can reach the ledger's step from where it stands or from the checkpoint."""
        if position.set_back or position.step < point.step or position.lineage < point.lineage:
            return False
        first = min(max(info.step, point.step) for info in infos)
        return position.step <= first or await self.threads.call(self.ledger.sealed, first) is not None

    async def _begin_anew(
        self, position: RunPosition, infos: Sequence[training_pb2.GetTrainerInfoResponse]
    ) -> Snapshot:
        """Begins the run from its beginning, where trainers stand there and no checkpoint was made."""
        if any(info.step for info in infos):
            raise StoreRolledBackError(
                "the store lost what it had acknowledged, trainers have applied steps and "
                f"{self.settings.run.checkpoints} holds no checkpoint to go back to: start the trainers again "
                "(--resume does), and the run begins from its beginning"
            )
        beginning = RunPoint(self.settings.run.name, 0, 0, -1, 0, 0, 0, {}, "", [])
        return await self._begin_lineage(position, beginning)

    async def _begin_lineage(self, position: RunPosition, point: RunPoint) -> Snapshot:
        logger.warning(
            "the store stands at step %d and cannot be continued from; going back to the checkpoint of step %d",
            position.step,
            point.step,
        )
        await self.threads.call(self.checkpoints.discard_uncommitted)
        target = RunPosition(
            lineage=max(position.lineage, point.lineage) + 1,
            step=point.step,
            next_gid=point.next_gid,
            policy_version=point.policy_version,
            epoch=point.epoch,
            cursor=point.cursor.encode(),
            algorithm_state=point.algorithm_state.encode(),
            evaluated_step=point.evaluated_step,
            trained=point.trained,
            dropped=point.dropped,
        )
        await self.threads.call(self.ledger.start_lineage, target)
        return await self.threads.call(self.ledger.snapshot)

    async def _bring_up(
        self,
        ctl: int,
        trainer: Trainer,
        info: training_pb2.GetTrainerInfoResponse,
        latest: tuple[Committed, RunPoint] | None,
        step: int,
    ) -> int:
        """Loads and replays until `trainer` has applied `step` steps; the highest version it knows."""
        applied, version = info.step, info.policy_version
        if applied > step + 1:
            raise StoreRolledBackError(
                f"{trainer.name} has applied {applied} steps, the store knows {step}: restore the store, or restart "
                f"{trainer.name}"
            )
        trained = await self.threads.call(self.ledger.sealed, applied - 1) if info.HasField("last_result") else None
        if trained is not None and trained.digest != info.last_result.digest:
            raise StoreRolledBackError(
                f"{trainer.name} has made step {applied - 1} of another batch than the store holds: restore the "
                f"store, or restart {trainer.name}"
            )
        if latest is not None and applied < latest[1].step <= step:
            self.report(f"{trainer.name} to load the checkpoint of step {latest[1].step}")
            loaded = await trainer.load(ctl, latest[0])
            applied, version = loaded.step, max(version, loaded.policy_version)
        for missed in range(applied, step):
            self.report(f"{trainer.name} to apply step {missed} again")
            batch = await self.threads.call(self.ledger.sealed, missed)
            if batch is None:
                raise StoreRolledBackError(
                    f"{trainer.name} stands at step {applied}, the run in the store at {step}, batch {missed} is "
                    f"gone, and {self.settings.run.checkpoints} "
                    "holds no checkpoint to go on from: give this run its own run.dir again, or, if it is another "
                    "run, another run.name"
                )
            await trainer.train(ctl, missed, batch.digest, self.report)
        return version

    async def _finish_step(self, ctl: int, step: int) -> Snapshot:
        """Counts a step that a trainer has applied and the last controller did not get to count: until then nobody
        could publish those weights.
        """
        batch = await self.threads.call(self.ledger.sealed, step)
        if batch is None:
            raise StoreRolledBackError(
                f"a trainer has applied step {step}, which the store never sealed: restore the store, or resume "
                "from a checkpoint"
            )
        self.report(f"step {step}, which was applied and not counted")
        results = await at_once([trainer.train(ctl, step, batch.digest, self.report) for trainer in self.trainers])
        algorithm = self.settings.algorithm
        state = AdaptiveState.decode(algorithm, (await self.threads.call(self.ledger.position)).algorithm_state).after(
            algorithm, batch, results
        )
        await self.threads.call(self.ledger.commit_step, step, results, state.encode(algorithm))
        logger.info("step %d had been applied and is counted now", step)
        return await self.threads.call(self.ledger.snapshot)

    def _retained_bytes(self, position: RunPosition) -> int:
        batches = [self.ledger.sealed(step) for step in range(position.freed_step, position.step)]
        return sum(batch_bytes(self.settings, batch, self.prompt_bytes) for batch in batches if batch is not None)

    def _untold(self, position: RunPosition) -> dict[int, Metrics]:
        steps = range(max(position.freed_step, position.reported_step), position.step)
        found = ((step + 1, self.ledger.numbers(step)) for step in steps)
        return {step: Metrics.from_proto(numbers) for step, numbers in found if numbers is not None}


def _was_cut_short(
    position: RunPosition, point: RunPoint, infos: Sequence[training_pb2.GetTrainerInfoResponse]
) -> bool:
    """Whether the last controller began a lineage from this checkpoint and ended before every trainer was set back to
    it. A store that has lost writes since needs another lineage.
    """
    return (
        not position.set_back
        and position.lineage > point.lineage
        and position.step == point.step
        and any(info.step > point.step for info in infos)
    )


def _backlog(position: RunPosition, point: RunPoint | None) -> tuple[trajectory_pb2.Prompt, ...]:
    """The prompts of an older checkpoint that this lineage has not admitted again yet.

    A lineage begins with all prompts that were untrained at its checkpoint. Once it has a checkpoint of its own, that
    one says which of them still waited. They are admitted in this order, before anything new.
    """
    if point is None:
        return ()
    began = position.lineage > point.lineage
    prompts, first_gid = (
        (point.untrained + point.waiting, position.lineage_gid) if began else (point.waiting, point.next_gid)
    )
    return decode_prompts(prompts[max(0, position.next_gid - first_gid) :])
