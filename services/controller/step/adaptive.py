"""The state that the algorithm carries from step to step: coefficients that adapt, and the rewards seen so far.

Owns no decision and no formula, only their exactness. The state of step s is what batch s is prepared with; the next
one follows from the sealed batch and the trainers' records of it, all durable, and the ledger takes it in the script
that counts the step. So however often a controller dies, every step has one state. Checkpoints keep it. Where nothing
adapts the settings alone count, also when they change between two starts.
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
    """The state before a step, as its batch is prepared with it."""

    control: Control
    rewards: Moments = Moments()
    """Moments of all clipped rewards of the batches before; empty unless they are normalised by it."""

    @classmethod
    def start(cls, algorithm: AlgorithmSection) -> "AdaptiveState":
        """Returns the state before the first step."""
        return cls(control.start(algorithm))

    def encode(self, algorithm: AlgorithmSection) -> bytes:
        """Encodes the part that adapts, for the ledger and checkpoints; floats come back bit by bit. Empty when nothing
        does.
        """
        adapting, everything = _adapting(algorithm), {**asdict(self.control), "rewards": asdict(self.rewards)}
        return json.dumps({name: everything[name] for name in adapting}).encode() if adapting else b""

    @classmethod
    def decode(cls, algorithm: AlgorithmSection, data: bytes) -> "AdaptiveState":
        """Decodes what `encode` wrote, of that the part that adapts; all else is at its start."""
        kept = {name: value for name, value in json.loads(data or b"{}").items() if name in _adapting(algorithm)}
        rewards = Moments(**kept.pop("rewards", {}))
        return cls(replace(control.start(algorithm), **kept), rewards)

    def after(
        self, algorithm: AlgorithmSection, batch: trajectory_pb2.TrainBatch, results: Sequence[training_pb2.TrainResult]
    ) -> "AdaptiveState":
        """Returns the state before the next step: `batch` was applied with `results`, the actor's first. What is not
        finite was not measured. A policy that did not learn of it moves no coefficient.
        """
        measured = {
            name: value
            for name, value in Metrics.from_proto(results[0].metrics).values().items()
            if math.isfinite(value)
        }
        kl = batch.statistics.kl if batch.statistics.HasField("kl") else measured.get("actor/reference_kl")
        moved = self.control
        if not batch.critic_only:
            entropy = measured.get("actor/entropy")
            moved = control.advance(algorithm, moved, kl=kl, entropy=entropy, num_samples=len(batch.rows))
        rewards = batch.statistics.rewards
        return AdaptiveState(moved, self.rewards.merged(Moments(rewards.num, rewards.mean, rewards.deviations)))


def _adapting(algorithm: AlgorithmSection) -> list[str]:
    names = ["kl_coef"] if algorithm.kl is not None and algorithm.kl.adaptive is not None else []
    names += (
        ["entropy_coef", "entropy"] if algorithm.entropy is not None and algorithm.entropy.target is not None else []
    )
    return [*names, *(["rewards"] if algorithm.shaping.normalize == "running" else [])]
