"""What a run's loop coordinates, as the engine built it: one value instead of sixteen arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trackers import Trackers
from services.controller.admission import AdmissionPolicy
from services.controller.board import RunBoard
from services.controller.checkpoints import Checkpoints
from services.controller.evaluation import Evaluation
from services.controller.fleet import Fleet
from services.controller.prompts import PromptSequence
from services.controller.publish import PolicyPublisher
from services.controller.recovery import Recovery
from services.controller.scoring import GroupScorer
from services.controller.threads import StoreThreads
from services.controller.trainers import ActorTrainer, CriticTrainer, Trainer


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
        return [trainer for trainer in (self.actor, self.critic) if trainer is not None and trainer.columns & set(columns)]
