"""What can go wrong: the catalogue of {role x phase x fault} and the seeded draw from it. The same seed draws the same
faults in the same order.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done to a role."""

    KILL = "kill"
    """SIGKILL."""
    TERM = "term"
    """SIGTERM: it is asked to end."""
    STOP = "stop"
    """SIGSTOP, left so: a hang."""
    ZOMBIE = "zombie"
    """SIGSTOP, and SIGCONT about a lease later."""
    CUT = "cut"
    """Its connections break and are refused for a while."""
    SLOW = "slow"
    """What goes over its connections is held up for a while."""
    LOST_REPLY = "lost reply"
    """The store has done what it was asked, and its answer never arrives."""


WIRED = (Kind.CUT, Kind.SLOW, Kind.LOST_REPLY)
"""What is done on the way to a role."""
RANDOM = "random"
"""The phase of a fault that hits at a random instant."""

_WEIGHTS = {Kind.KILL: 64} | dict.fromkeys([Kind.TERM, Kind.STOP, Kind.ZOMBIE, *WIRED], 6)


def _store(*scripts: str) -> tuple[str, ...]:
    return tuple(f"{when} {script}" for script in scripts for when in ("before", "after"))


_TRAIN = ("train:start", "train:middle", "train:computed", "train:noted", "train:applied")
_SAVE = ("save:start", "save:taken", "save:middle", "save:written", "load:start", "load:end")
_COMPUTE = ("compute:start", "compute:computed", "compute:written")
_BUCKETS = tuple(range(6))
PHASES: dict[str, tuple[str, ...]] = {
    "controller": _store(
        "admit",
        "seal",
        "put_columns",
        "measured",
        "commit_step",
        "reported",
        "begin_publish",
        "next_epoch",
        "attest",
        "free_rows",
        "expel",
        "lock",
    ),
    "rollout": (
        *_store("claim", "stage", "commit", "persist", "renew"),
        *("sample:start", "sample:middle", "sample:end", "join:start", "join:met", "receive:start"),
        *(f"receive:bucket-{i}" for i in _BUCKETS),
        *("receive:loaded", "receive:probe", "resume"),
    ),
    "actor": (
        *_TRAIN,
        *_SAVE,
        "publish:open",
        "publish:meeting",
        *(f"publish:bucket-{i}" for i in _BUCKETS),
        "publish:sent",
    ),
    "critic": (*_TRAIN, *_SAVE, *_COMPUTE),
    "reference": (*_COMPUTE, *_store("put_columns")),
    "reward": ("call", "answer"),
    "scorer": (),
}
"""Phases by role of a light run. Those of the store are the others' scripts, those of the external scorer the reward
service's calls.
"""

SHIFT_PHASES: dict[str, tuple[str, ...]] = {
    "controller": PHASES["controller"],
    "rollout": ("sleep:start", "sleep:end", "wake:start", "wake:end", "receive:bucket-1", "sample:middle"),
    "actor": ("move:offload", "move:offloaded", "move:onload", "move:onloaded", "train:middle", "publish:bucket-1"),
    "critic": ("move:offload", "move:offloaded", "move:onload", "move:onloaded", "train:middle", "compute:start"),
    "reference": ("move:offload", "move:offloaded", *PHASES["reference"]),
    "reward": PHASES["reward"],
    "scorer": (),
}
"""Phases of a run whose rollouts and trainers share a device: those in which it changes hands, and one of each
shift.
"""

REAL_PHASES: dict[str, tuple[str, ...]] = {
    "controller": (),
    "rollout": ("says generating", "says weights", "says idle"),
    "actor": ("says training", "says publishing", "says saving", "says computing"),
    "critic": ("says training", "says saving", "says computing"),
    "reference": ("says computing",),
    "reward": (),
    "scorer": (),
}
"""What workers of a real run say in their heartbeats."""


@dataclass(frozen=True)
class Fault:
    """One fault to come."""

    number: int
    target: str
    """Worker, or "store"."""
    kind: Kind
    watched: str
    """Worker whose phase it waits for; mostly the target itself."""
    phase: str
    size: float
    """In [0, 1): how long a stop, a cut or a slow wire lasts, and when a random instant is."""

    def __str__(self) -> str:
        where = self.phase if self.watched == self.target else f"{self.watched} {self.phase}"
        return f"#{self.number} {self.kind} {self.target} at {where}"


def role_of(worker: str) -> str:
    """ "rollout" of "rollout-1", "reference" of "ref"."""
    return {"ref": "reference"}.get(worker, worker.partition("-")[0])


def draw(seed: int, targets: list[str], phases: Mapping[str, tuple[str, ...]] = PHASES) -> Iterator[Fault]:
    """Faults without end, over `targets` and the store. Where phases are only what heartbeats say, no wire is
    touched.
    """
    rng, number = random.Random(seed), 0
    workers = [target for target in targets if "/" not in target and target != "scorer"]
    wired = phases is not REAL_PHASES
    while True:
        target = rng.choice([*targets, "store"])
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        # A fifth waits for somebody else's phase; whoever has no phases of its own always does.
        watched = target if phases.get(role_of(target)) and rng.random() < 0.8 else rng.choice(workers)
        watched = "reward" if target in ("scorer", "reward/worker") else watched
        found = phases.get(role_of(watched), ())
        if kind is Kind.LOST_REPLY:
            target = watched = rng.choice(
                [worker for worker in workers if any(phase.startswith("after") for phase in phases[role_of(worker)])]
                or workers
            )
            found = tuple(phase for phase in phases[role_of(watched)] if phase.startswith("after"))
        if kind is Kind.STOP and target in ("scorer", "reward/worker"):
            # whoever runs a scorer outside may let it hang; the pool of the reward service kills by deadline
            kind = Kind.ZOMBIE
        exactly = kind is Kind.LOST_REPLY or rng.random() < 0.75
        phase, size = rng.choice(found) if found and exactly else RANDOM, rng.random()
        if kind in WIRED and (not wired or target in ("scorer", "reward/worker")):
            continue
        yield Fault(number, target, kind, watched, phase, size)
        number += 1
