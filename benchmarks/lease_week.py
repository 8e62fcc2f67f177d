"""Leases over a week of a large fleet, in simulated time: which groups a slow store and a busy controller cost, and how
soon a dead rollout is found.

    .venv/bin/python benchmarks/lease_week.py                 # 200 rollouts, 7 days: minutes
    .venv/bin/python benchmarks/lease_week.py --days 0.1 --seed 3 --lease-s 5

The real `Reaper` and `Leases` run on an event loop whose clock jumps from event to event. Simulated around them are the
store's clock and delays, and rollouts that renew as services/rollout/pull.py does: every lease_s / 3 by schedule, all
they hold in one call. The fleet is a handful of arrays, brought up to date at each look. Heartbeats are left out,
though they would find a dead rollout first: here the leases alone must. Exit code 1 when a living rollout's group was
taken, or a dead one's was not.

Every way of every call of the store, there and back, takes 0.025 s in the middle and up to MAX_WAY_S. Stalls of the
store hold all calls back until they end. A call of the controller also waits for a thread, longer in busy half hours,
and now and then its process stands still.
"""

import argparse
import asyncio
import logging
import selectors
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from rolecall.settings import ControllerSection
from rolecall.store.ledger import Ledger
from rolecall.store.position import Overdelivered, PendingEntry
from rolecall.wire import Array
from services.controller.groups.collection import Collection
from services.controller.groups.reaping import Reaper
from services.controller.threads import StoreThreads

P = ParamSpec("P")
R = TypeVar("R")

DAY_S = 86_400.0
LEASE_S = ControllerSection().lease_s
MAX_WAY_S = 3.0
"""Longest way to the store or back, where nothing stalls: with it a renewal is never later than a lease bears."""
MAX_CALL_S = 15.0
"""A rollout gives a call up after it, as rolecall/store/connection.py does."""
STALL_PERIOD_S, MAX_STALL_S = 1200.0, 90.0
"""The store stalls so often in the mean, and for so long at most."""
STILL_PERIOD_S, MAX_STILL_S = 1800.0, 120.0
"""The controller's process stands still so often in the mean, and for so long at most."""
MAX_QUEUE_S = 1.8
"""Longest wait of the controller's call for a thread, in the busiest of NUM_LOADS half hours; in the first there is
none.
"""
NUM_LOADS = 10
DEATH_PERIOD_S = 900.0
"""Some rollout dies so often in the mean."""
RESTART_S = 120.0
"""A rollout is back so long after its group was taken."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next event instead of waiting for it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Lets so much time pass."""
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.jump(max(0.0, timeout or 0.0))
        return super().select(0)


class Intervals:
    """Times of trouble, at random: a Poisson process with a mean period, each as long as an exponential draw of a tenth
    of the longest.
    """

    def __init__(self, rng: np.random.Generator, period_s: float, max_s: float, until_s: float) -> None:
        starts = np.cumsum(rng.exponential(period_s, int(2 * until_s / period_s) + 20))
        self.starts_I = starts[starts < until_s]
        self.ends_I = self.starts_I + np.minimum(rng.exponential(max_s / 10, len(self.starts_I)), max_s)

    def after(self, times_N: Array) -> Array:
        """Each time, or the end of the trouble that it falls into."""
        if not len(self.starts_I):
            return times_N
        last_N = np.searchsorted(self.starts_I, times_N, "right") - 1
        ends_N = np.maximum.accumulate(self.ends_I)[np.maximum(last_N, 0)]
        return np.where((last_N >= 0) & (times_N < ends_N), ends_N, times_N)


@dataclass
class Findings:
    """The events that a simulation saw."""

    num_looks: int = 0
    num_groups: int = 0
    """Groups that ended by being committed."""
    num_lost: int = 0
    """Groups taken from a rollout that lives and renews on time."""
    found_after_s: list[float] = field(default_factory=list)
    """Seconds for each dead rollout, from its last renewal until its group was taken."""
    found_after_looks: list[int] = field(default_factory=list)
    num_not_found: int = 0
    """Dead rollouts that no look had found when the time was up."""
    max_cycle_s: float = 0.0
    """Longest time between two looks."""


class Fleet:
    """`num_rollouts` rollouts, each with a group in hand that stands for all it holds: they are renewed together.
    Serves the reaper as its ledger.
    """

    def __init__(
        self, loop: JumpingLoop, rng: np.random.Generator, num_rollouts: int, until_s: float, lease_s: float
    ) -> None:
        self._loop, self._rng, self._renewal_s = loop, rng, lease_s / 3
        self.stalls = Intervals(rng, STALL_PERIOD_S, MAX_STALL_S, until_s)
        deaths = np.cumsum(rng.exponential(DEATH_PERIOD_S, int(2 * until_s / DEATH_PERIOD_S) + 20))
        self._deaths = [float(time) for time in deaths if time < until_s - 60 * lease_s]
        self._alive_R = np.ones(num_rollouts, bool)
        self._due_R = rng.uniform(0, self._renewal_s, num_rollouts)
        """When the next renewal is sent."""
        self._effect_R = np.zeros(num_rollouts)
        """When the last renewal sent reaches, or reached, the entry."""
        self._renewed_R = np.zeros(num_rollouts)
        """The renewal or claim before that."""
        self._back_R = np.full(num_rollouts, np.inf)
        self._ends_R = self._lengths(num_rollouts)
        self._number_R = np.zeros(num_rollouts, int)
        self._seen_R = np.full(num_rollouts, -1.0)
        """The last renewal or claim, as the last look saw it."""
        self._looks_R = np.zeros(num_rollouts, int)
        """Looks since then, the first that saw it included."""
        self._looked_at_s = 0.0
        self.findings = Findings()

    def ways(self, count: int) -> Array:
        """Seconds of `count` ways to the store or back."""
        return np.minimum(self._rng.lognormal(np.log(0.025), 1.6, count), MAX_WAY_S)

    def _lengths(self, count: int) -> Array:
        """Seconds of `count` generations: a minute in the middle, some half an hour."""
        return np.minimum(self._rng.lognormal(np.log(60), 1.0, count), 1800.0)

    # --- as the ledger ----------------------------------------------------------------------------

    def pending(self) -> list[PendingEntry]:
        """The groups in hand at this instant."""
        now = self._loop.time()
        self._advance(now)
        self.findings.num_looks += 1
        self.findings.max_cycle_s = max(self.findings.max_cycle_s, now - self._looked_at_s)
        self._looked_at_s = now
        renewed_R = self._last_R(now)
        self._looks_R = np.where(renewed_R != self._seen_R, 1, self._looks_R + 1)
        self._seen_R = renewed_R
        held = np.flatnonzero(np.isinf(self._back_R))
        return [PendingEntry(f"{i}-{self._number_R[i]}", f"r.{i}", float(renewed_R[i]), 1) for i in held]

    def reap(self, entries: Sequence[PendingEntry], max_deliveries: int, error: str) -> list[Overdelivered]:
        """Takes them, but for those that were committed or renewed since the look, as the script does."""
        now = self._loop.time()
        self._advance(now)
        renewed_R = self._last_R(now)
        for entry in entries:
            i = int(entry.entry_id.partition("-")[0])
            if entry.entry_id != f"{i}-{self._number_R[i]}" or renewed_R[i] > entry.renewed_at_s:
                continue
            if self._alive_R[i]:
                self.findings.num_lost += 1
                self._claim(np.array([i]), np.array([now]))
            else:
                self.findings.found_after_s.append(now - float(renewed_R[i]))
                self.findings.found_after_looks.append(int(self._looks_R[i]))
                self._back_R[i] = now + RESTART_S
                self._number_R[i] += 1
        return []

    # --- what happens meanwhile -------------------------------------------------------------------

    def _last_R(self, now: float) -> Array:
        """The last renewal or claim that the store had seen by `now`."""
        return np.where(self._effect_R <= now, np.maximum(self._effect_R, self._renewed_R), self._renewed_R)

    def _advance(self, now: float) -> None:
        while self._deaths and self._deaths[0] <= now:
            died_at = self._deaths.pop(0)
            self._live_until(died_at)
            self._alive_R[self._rng.integers(len(self._alive_R))] = False
        self._live_until(now)

    def _live_until(self, now: float) -> None:
        back = np.flatnonzero(self._back_R <= now)
        if len(back):
            self._alive_R[back] = True
            self._claim(back, self._back_R[back])
            self._due_R[back] = self._back_R[back] + self._renewal_s
            self._back_R[back] = np.inf
        while len(due := np.flatnonzero(self._alive_R & (self._due_R <= now))):
            self._renew(due)
        ended = np.flatnonzero(self._alive_R & (self._ends_R <= now))
        if len(ended):
            self.findings.num_groups += len(ended)
            self._claim(ended, np.maximum(self._ends_R[ended], self._last_R(now)[ended]))

    def _renew(self, due: Array) -> None:
        sent = self._due_R[due]
        arrived = self._effect_R[due] <= sent
        self._renewed_R[due] = np.where(
            arrived, np.maximum(self._effect_R[due], self._renewed_R[due]), self._renewed_R[due]
        )
        effect = self.stalls.after(sent + self.ways(len(due)))
        # one that was given up still arrives
        self._effect_R[due] = np.where(arrived, effect, np.minimum(effect, self._effect_R[due]))
        answered = self.stalls.after(effect + self.ways(len(due)))
        self._due_R[due] = np.maximum(sent + self._renewal_s, np.minimum(answered, sent + MAX_CALL_S))

    def _claim(self, which: Array, times: Array) -> None:
        self._number_R[which] += 1
        self._renewed_R[which] = times
        self._ends_R[which] = times + self._lengths(len(which))


class SlowThreads:
    """The controller's calls of the store: the wait for a thread, the way there, the call at one instant, the way back;
    and when its process stands still.
    """

    def __init__(self, loop: JumpingLoop, rng: np.random.Generator, fleet: Fleet, until_s: float) -> None:
        self._loop, self._rng, self._fleet = loop, rng, fleet
        self._stills = Intervals(rng, STILL_PERIOD_S, MAX_STILL_S, until_s)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The answer of `function`."""
        load = self._loop.time() // 1800 % NUM_LOADS / (NUM_LOADS - 1)
        await self._until(self._fleet.stalls, self._rng.uniform(0, load * MAX_QUEUE_S) + float(self._fleet.ways(1)[0]))
        answer = function(*args, **kwargs)
        await self._until(self._stills, float(self._fleet.ways(1)[0]))
        return answer

    async def _until(self, trouble: Intervals, seconds: float) -> None:
        now = self._loop.time()
        await asyncio.sleep(float(trouble.after(np.array([now + seconds]))[0]) - now)


def simulate(seconds: float, *, num_rollouts: int = 200, lease_s: float = LEASE_S, seed: int = 0) -> Findings:
    """Plays so many seconds of a run and says what the leases did in it."""
    rng, loop = np.random.default_rng(seed), JumpingLoop()
    fleet = Fleet(loop, rng, num_rollouts, seconds, lease_s)
    threads = SlowThreads(loop, rng, fleet, seconds)
    nobody: Any = None  # no group is delivered too often here
    reaper = Reaper(
        ControllerSection(lease_s=lease_s),
        cast(Ledger, fleet),
        cast(StoreThreads, threads),
        cast(Collection, nobody),
        nobody,
    )

    async def run() -> None:
        try:
            async with asyncio.timeout(seconds):
                await reaper.run()
        except TimeoutError:
            fleet.findings.num_not_found = int((~fleet._alive_R & np.isinf(fleet._back_R)).sum())

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return fleet.findings


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Leases over a week of a large fleet, in simulated time.")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    found = simulate(asked.days * DAY_S, num_rollouts=asked.rollouts, lease_s=asked.lease_s, seed=asked.seed)
    print(f"{asked.days:g} days, {asked.rollouts} rollouts, controller.lease_s {asked.lease_s:g}, seed {asked.seed}")
    print(
        f"looks: {found.num_looks}, {asked.days * DAY_S / found.num_looks:.2f} s apart in the mean, at most "
        f"{found.max_cycle_s:.0f} s"
    )
    print(f"groups: {found.num_groups} committed, {found.num_lost} taken from rollouts that live")
    if found.found_after_s:
        print(
            f"dead rollouts: {len(found.found_after_s)} found, {found.num_not_found} not; by look "
            f"{np.median(found.found_after_looks):.0f} in the middle and "
            f"{max(found.found_after_looks)} at the latest, after {np.median(found.found_after_s):.1f} s and "
            f"{max(found.found_after_s):.1f} s"
        )
    return 1 if found.num_lost or found.num_not_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
