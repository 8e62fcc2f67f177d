"""What the algorithm carries from one step to the next: coefficients that adapt, and the rewards seen so far.

Owns no decision and no formula, only their exactness. The state of step s is what batch s is prepared with; the next one follows from the sealed batch and
the trainers' records of it, all durable, and the ledger takes it in the script that counts the step. So however often a controller dies, every step has one
state. Checkpoints keep it. Where nothing adapts the settings alone count, also when they change between two starts.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rolecall.algorithms import control
from rolecall.algorithms.control import Control
from rolecall.algorithms.shaping import Moments
from rolecall.settings import AlgorithmSection
from rolecall.telemetry import Metrics
from rolecall.v1 import training_pb2, trajectory_pb2


@dataclass(frozen=True)
class AdaptiveState:
    """Before a step."""

    control: Control
    rewards: Moments = Moments()
    """Of all clipped rewards of the batches before; empty unless they are normalised by it."""

    @classmethod
    def start(cls, algorithm: AlgorithmSection) -> "AdaptiveState":
        """Before the first step."""
        return cls(control.start(algorithm))

    def encode(self) -> bytes:
        """Bytes for the ledger and checkpoints; floats come back bit by bit."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, algorithm: AlgorithmSection, data: bytes) -> "AdaptiveState":
        """What `encode` wrote, of that what adapts; empty bytes are the start."""
        state = cls.start(algorithm)
        if not data:
            return state
        tree = json.loads(data)
        kept, started = Control(**tree["control"]), state.control
        if algorithm.kl is not None and algorithm.kl.adaptive is not None:
            started = replace(started, kl_coef=kept.kl_coef)
        if algorithm.entropy is not None and algorithm.entropy.target is not None:
            started = replace(started, entropy_coef=kept.entropy_coef, entropy=kept.entropy)
        return cls(started, Moments(**tree["rewards"]))

    def after(self, algorithm: AlgorithmSection, batch: trajectory_pb2.TrainBatch, results: Sequence[training_pb2.TrainResult]) -> "AdaptiveState":
        """Before the next step: `batch` was applied with `results`, the actor's first. What is not finite was not measured."""
        measured = {name: value for name, value in Metrics.from_proto(results[0].metrics).values().items() if math.isfinite(value)}
        kl = batch.statistics.kl if batch.statistics.HasField("kl") else measured.get("actor/reference_kl")
        moved = control.advance(algorithm, self.control, kl=kl, entropy=measured.get("actor/entropy"), num_samples=len(batch.rows))
        rewards = batch.statistics.rewards
        return AdaptiveState(moved, self.rewards.merged(Moments(rewards.num, rewards.mean, rewards.deviations)))
