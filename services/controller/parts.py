"""What a run's loop coordinates, as the engine built it: one value instead of sixteen arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trackers import Trackers
from services.controller.board import RunBoard
from services.controller.durable.recovery import Recovery
from services.controller.durable.run_point import Checkpoints
from services.controller.evaluation import Evaluation
from services.controller.fleet.members import Fleet
from services.controller.groups.admission import AdmissionPolicy
from services.controller.groups.group_scorer import GroupScorer
from services.controller.groups.prompts import PromptSequence
from services.controller.publish.publisher import PolicyPublisher
from services.controller.step.trainers import ActorTrainer, CriticTrainer, Trainer
from services.controller.threads import StoreThreads


@dataclass(frozen=True)
class Parts:
    """What the loop coordinates."""

    settings: RunSettings
    ledger: Ledger
    rows: Rows
    threads: StoreThreads
    fleet: Fleet
    publisher: PolicyPublisher
    actor: ActorTrainer
    critic: CriticTrainer | None
    scorer: GroupScorer
    evaluation: Evaluation
    prompts: PromptSequence
    policy: AdmissionPolicy
    trackers: Trackers
    checkpoints: Checkpoints
    recovery: Recovery
    board: RunBoard

    @property
    def trainers(self) -> list[Trainer]:
        """Actor, and critic when there is one."""
        return [self.actor, self.critic] if self.critic else [self.actor]

    def computing(self, columns: Sequence[str]) -> list[ActorTrainer | CriticTrainer]:
        """The trainers that compute any of `columns`."""
        return [
            trainer for trainer in (self.actor, self.critic) if trainer is not None and trainer.columns & set(columns)
        ]
