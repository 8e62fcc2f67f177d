"""What scalers of rollouts do on a load that doubles and goes back: a simulation, `python -m benchmarks.scaling`.

The controller's own admission and choice of batches (services/controller/groups/admission.py) around rollouts and a
trainer that are numbers. A second of simulated time is one turn. The scalers decide as the Kubernetes autoscaler does,
by the queries of deploy/kubernetes/components, whose constants stand here, too (tests/unit/test_scaling.py compares
them). Left out: failures, what a publish costs beyond its seconds, and evaluations.
"""

import argparse
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.controller.groups.admission import AdmissionPolicy

GROUPS_PER_BATCH = 32
MAX_GROUPS = 8
"""Groups a replica has room for."""
LONE_SHARE = 0.25
"""Share of a replica's rate that a group alone in its engine is sampled at: decoding one is no faster than that."""
START_S = 120
"""From a replica's start until it waits for weights, which it gets with the next publish."""
PUBLISH_S = 10

LOOK_S = 15
WINDOW_S = 1800
TARGET = 0.9
"""Replicas wanted per replica: a tenth of room."""
TOLERANCE = 0.1
STABLE_S = 300
"""Down to the most, and up to the least, that was asked for in this window."""
DOWN_EVERY_S, UP_EVERY_S = 60, 300
"""Down by one, and up to at most the double, this far apart."""
MIN_REPLICAS, MAX_REPLICAS = 1, 12
WAIT_TARGET = 0.1


@dataclass(frozen=True)
class Load:
    """The costs of a batch."""

    group_s: float = 20.0
    """Seconds of one full replica that a group takes, on average."""
    train_s: float = 160.0
    """Seconds of training a batch."""
    drop_share: float = 0.0
    """Groups that a filter drops; others take their place."""

    @property
    def replicas(self) -> float:
        """Full replicas that sample a batch in the time of training one."""
        return GROUPS_PER_BATCH * self.group_s / (1 - self.drop_share) / self.train_s


NOMINAL = Load()
SCENARIOS = {
    "half of the groups are filtered": Load(drop_share=0.5),
    "responses twice as long": Load(group_s=40.0, train_s=260.0),
    "responses half as long": Load(group_s=10.0, train_s=110.0),
}


@dataclass
class Replica:
    """A rollout: the seconds until it may join, and what is left of the groups in hand."""

    starts_in_s: int = START_S
    serves: bool = False
    in_hand: dict[int, float] = field(default_factory=dict)


@dataclass
class Fleet:
    """A run: admission, sampling, training and publishing, second by second."""

    scaler: "Scaler"
    load_at: Callable[[int], Load]
    num_replicas: int
    seed: int
    policy: AdmissionPolicy
    step: int = 0
    published: int = 0
    admitted: int = 0
    dropped: int = 0
    now: int = 0
    sampling_s: list[int] = field(default_factory=lambda: [0])
    """Replica-seconds of sampling until each second."""
    training_s: list[int] = field(default_factory=lambda: [0])
    replicas_at: list[int] = field(default_factory=list)
    steps_at: list[int] = field(default_factory=list)
    backlog_at: list[int] = field(default_factory=list)

    def run(self, seconds: int) -> None:
        """Simulates that long."""
        self.rng = random.Random(self.seed)
        self.replicas = [Replica(0, serves=True) for _ in range(self.num_replicas)]
        self.live: dict[int, int] = {}
        self.ready: set[int] = set()
        self.queue: deque[int] = deque()
        self.work: dict[int, float] = {}
        self.chosen: Sequence[int] = ()
        self.training_left = self.publishing_left = 0.0
        while self.now < seconds:
            self._turn(self.load_at(self.now))
            if self.now % LOOK_S == 0 and self.now >= WINDOW_S:
                self._scale(self.scaler.wanted(self))

    def rate(self, counter: Sequence[int]) -> float:
        """Increase per second of `counter` over the window."""
        return (counter[-1] - counter[-1 - WINDOW_S]) / WINDOW_S

    @property
    def num_replicas_now(self) -> int:
        """Replicas that were asked for, those that start included."""
        return len(self.replicas)

    def _turn(self, load: Load) -> None:
        self.now += 1
        while self.policy.may_admit(
            admitted=self.admitted,
            dropped=self.dropped,
            published_step=self.published,
            num_live=len(self.live),
            retained_bytes=0,
        ):
            self.live[self.admitted] = self.policy.last_batch(self.published)
            self.queue.append(self.admitted)
            self.work[self.admitted] = load.group_s * self.rng.lognormvariate(-0.125, 0.5)
            self.admitted += 1
        paused = self.publishing_left > 0
        for replica in self.replicas:
            replica.starts_in_s = max(0, replica.starts_in_s - 1)
        sampling = 0 if paused else sum(self._sample(replica, load) for replica in self.replicas if replica.serves)
        self._train(load)
        self.sampling_s.append(self.sampling_s[-1] + sampling)
        self.replicas_at.append(self.num_replicas_now)
        self.steps_at.append(self.step)
        self.backlog_at.append(len(self.work))

    def _sample(self, replica: Replica, load: Load) -> bool:
        """One second of one replica; whether it had anything in hand."""
        while self.queue and len(replica.in_hand) < MAX_GROUPS:
            gid = self.queue.popleft()
            replica.in_hand[gid] = self.work[gid]
        if not replica.in_hand:
            return False
        share = min(LONE_SHARE, 1 / len(replica.in_hand))
        for gid in list(replica.in_hand):
            replica.in_hand[gid] -= share
            if replica.in_hand[gid] <= 0:
                del replica.in_hand[gid], self.work[gid]
                if self.rng.random() < load.drop_share:
                    self.dropped += 1
                    del self.live[gid]
                else:
                    self.ready.add(gid)
        return True

    def _train(self, load: Load) -> None:
        trains = self.training_left > 0
        self.training_s.append(self.training_s[-1] + trains)
        if trains:
            self.training_left -= 1
            if self.training_left <= 0:
                for gid in self.chosen:
                    del self.live[gid]
                self.ready -= set(self.chosen)
                self.step += 1
                self.publishing_left = PUBLISH_S
        elif self.publishing_left > 0:
            self.publishing_left -= 1
            if self.publishing_left <= 0:
                self.published = self.step
                for replica in self.replicas:
                    replica.serves = replica.serves or replica.starts_in_s == 0
        elif (chosen := self.policy.choose(self.step, self.ready, self.live)) is not None:
            self.chosen, self.training_left = chosen, load.train_s

    def _scale(self, wanted: int) -> None:
        while len(self.replicas) < wanted:
            self.replicas.append(Replica())
        while len(self.replicas) > wanted:
            self.queue.extendleft(self.replicas.pop().in_hand)  # sampled anew by others


class Scaler:
    """A fixed fleet, and what every autoscaler shares: its windows and bounds."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque(maxlen=STABLE_S // LOOK_S)
        self._up_at = self._down_at = -(10**6)

    def wanted(self, fleet: Fleet) -> int:
        """The replicas to have from now on."""
        current = fleet.num_replicas_now
        asked = min(max(self.asked(fleet, current), MIN_REPLICAS), MAX_REPLICAS)
        self._asked.append(asked)
        if min(self._asked) > current and fleet.now - self._up_at >= UP_EVERY_S:
            self._up_at = fleet.now
            return min(*self._asked, 2 * current)
        if max(self._asked) < current and fleet.now - self._down_at >= DOWN_EVERY_S:
            self._down_at = fleet.now
            return current - 1
        return current

    def asked(self, fleet: Fleet, current: int) -> int:
        """The replicas that the signal asks for."""
        return current


def _average(total: float, target: float, current: int) -> int:
    """The Kubernetes autoscaler's answer to a metric of type AverageValue."""
    return current if abs(total / (target * current) - 1) <= TOLERANCE else math.ceil(total / target)


class OnShares(Scaler):
    """Follows seconds of sampling per second of training."""

    def asked(self, fleet: Fleet, current: int) -> int:
        training = fleet.rate(fleet.training_s)
        return _average(fleet.rate(fleet.sampling_s) / training, TARGET, current) if training > 0.01 else current


class OnWait(Scaler):
    """Follows the trainer's wait share alone, as a value to be held at WAIT_TARGET."""

    def asked(self, fleet: Fleet, current: int) -> int:
        wait = 1 - fleet.rate(fleet.training_s)
        return current if abs(wait / WAIT_TARGET - 1) <= TOLERANCE else math.ceil(current * wait / WAIT_TARGET)


class OnBacklog(Scaler):
    """Follows the groups that are admitted and not sampled yet, as many per replica as one has room for."""

    def asked(self, fleet: Fleet, current: int) -> int:
        return _average(fleet.backlog_at[-1], MAX_GROUPS, current)


SCALERS: dict[str, type[Scaler]] = {
    "fixed": Scaler,
    "shares": OnShares,
    "wait share alone": OnWait,
    "backlog": OnBacklog,
}
HOUR = 3600
ENDS = (2, 5, 8)
"""Hours after which the load changes, changes back, and the simulation ends."""


def simulate(scaler: type[Scaler], other: Load, max_staleness: int, seed: int = 0) -> Fleet:
    """A run of the nominal load, then of `other`, then of the nominal again, until the hours that ENDS says."""
    first, second, last = (end * HOUR for end in ENDS)
    fleet = Fleet(
        scaler(),
        lambda now: other if first <= now < second else NOMINAL,
        math.ceil(NOMINAL.replicas / TARGET),
        seed,
        AdmissionPolicy(GROUPS_PER_BATCH, max_staleness, 10**6, 10**15, 1),
    )
    fleet.run(last)
    return fleet


def phase(fleet: Fleet, end_h: int) -> tuple[int, int, float, float]:
    """(least replicas, most, seconds of a step, share of training) in the hour before `end_h`."""
    begin, end = (end_h - 1) * HOUR, end_h * HOUR
    replicas = fleet.replicas_at[begin:end]
    steps = fleet.steps_at[end - 1] - fleet.steps_at[begin]
    return min(replicas), max(replicas), HOUR / max(steps, 1), (fleet.training_s[end] - fleet.training_s[begin]) / HOUR


def changes(fleet: Fleet) -> int:
    """Times that the number of replicas changed."""
    return sum(before != after for before, after in zip(fleet.replicas_at, fleet.replicas_at[1:], strict=False))


def main() -> None:
    """Prints a table for each load: what stood in the last hour of each phase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=2)
    arguments = parser.parse_args()
    for name, other in SCENARIOS.items():
        print(f"\n{name}, from hour {ENDS[0]} to {ENDS[1]}: full replicas that keep the trainer at work are")
        print(f"{NOMINAL.replicas:.1f}, {other.replicas:.1f}, {NOMINAL.replicas:.1f}\n")
        print("| scaler | replicas | step s | training | changes | replica-hours |\n|---|---|---|---|---|---|")
        for title, scaler in SCALERS.items():
            fleet = simulate(scaler, other, arguments.max_staleness, arguments.seed)
            phases = [phase(fleet, end) for end in ENDS]
            cells = (
                ", ".join(f"{least}" if least == most else f"{least} to {most}" for least, most, _, _ in phases),
                ", ".join(f"{step_s:.0f}" for _, _, step_s, _ in phases),
                ", ".join(f"{training:.0%}" for _, _, _, training in phases),
                str(changes(fleet)),
                f"{sum(fleet.replicas_at) / HOUR:.1f}",
            )
            print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
