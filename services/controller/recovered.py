"""The position from which one life of the loop begins, as recovery found or made it.

Everything that belongs to one life of the loop is made from this value: nothing of the life before is carried over.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rolecall.store.position import RunPosition, SuccessRate
from rolecall.telemetry import Metrics
from rolecall.v1 import trajectory_pb2


@dataclass(frozen=True)
class Recovered:
    """The start of a loop: the ledger's position, and the trainers brought to it."""

    ctl: int
    """Fencing number of this controller."""
    position: RunPosition
    live: Mapping[int, int]
    """Live groups: gid to the published step at their admission."""
    backlog: tuple[trajectory_pb2.Prompt, ...]
    """Prompts to admit before the data's next, as they were noted: those in flight at the checkpoint that this lineage
    began with.
    """
    policy_version: int
    """Highest version that anyone may have seen."""
    retained_bytes: int
    """Bytes of the rows of trained batches that no checkpoint covers yet."""
    saved_step: int
    """Steps that the newest checkpoint covers; 0 when there is none."""
    is_actor_restored: bool
    """Whether the actor was loaded or trained again: its weights are then published anew, under another version,
    whatever the fleet holds.
    """
    untold: Mapping[int, Metrics]
    """What is known of steps that were counted and no report told, by the number of steps applied then, in order."""
    step_of_version: Mapping[int, int]
    """Steps behind the weights of each attested version."""
    sealed: trajectory_pb2.TrainBatch | None
    """The batch of the next step, where an earlier loop sealed it."""
    begun: frozenset[int]
    """Groups that trainers were asked about for the next step: its batch is to hold them."""
    rates: Mapping[str, SuccessRate]
    """Success rates by prompt uid; empty without a curriculum."""

    @property
    def sealed_gids(self) -> frozenset[int]:
        """Groups of the sealed batch; empty when there is none."""
        return frozenset(self.sealed.gids) if self.sealed is not None else frozenset()
