"""The parts that a run's loop works with as long as the process lives: settings, data and connections.

Holds nothing that a life of the loop changes, but for the board and the fleet, which outlive it on purpose: what people
ask for and who is a member does not end with a failure of the store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolecall.data.dataset import RawPrompt
from rolecall.scoring.client import RewardClient
from rolecall.settings import RunSettings
from rolecall.store.budget import PromptBytes
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trackers import Trackers
from rolecall.v1 import weights_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.durable.commits import Commits
from services.controller.durable.run_point import Checkpoints
from services.controller.evaluation.evaluation import Evaluation
from services.controller.fleet.members import Fleet
from services.controller.groups.admission import AdmissionPolicy
from services.controller.groups.prompts import PromptRenderer
from services.controller.step.shifts import DeviceShifts
from services.controller.step.trainers import ActorTrainer, CriticTrainer, Trainer
from services.controller.threads import StoreThreads


@dataclass(frozen=True)
class Connections:
    """The settings of one run and the ways to its store, roles and trackers: what there is before the data is read."""

    settings: RunSettings
    renderer: PromptRenderer
    ledger: Ledger
    rows: Rows
    threads: StoreThreads
    checkpoints: Checkpoints
    commits: Commits
    trackers: Trackers
    reward: RewardClient
    references: Mapping[str, ReferenceServiceStub]
    actor: ActorTrainer
    critic: CriticTrainer | None
    fleet: Fleet
    board: RunBoard
    shifts: DeviceShifts

    @property
    def trainers(self) -> list[Trainer]:
        """Actor, and critic when there is one."""
        return [self.actor, self.critic] if self.critic else [self.actor]

    def computing(self, columns: Sequence[str]) -> list[ActorTrainer | CriticTrainer]:
        """The trainers that compute any of `columns`."""
        return [
            trainer for trainer in (self.actor, self.critic) if trainer is not None and trainer.columns & set(columns)
        ]


@dataclass(frozen=True)
class Data:
    """The prompts of one run and what follows from them."""

    raw_prompts: Sequence[RawPrompt]
    """The training prompts as the data has them."""
    prompt_bytes: PromptBytes
    """Bytes of the largest prompt."""
    probe: weights_pb2.Probe
    """What every publish is checked with."""
    policy: AdmissionPolicy
    evaluation: Evaluation


@dataclass(frozen=True)
class Parts(Data, Connections):
    """The settings, data and connections of one run."""
