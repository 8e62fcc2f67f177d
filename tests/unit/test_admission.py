"""Admission and the choice of batches: the staleness bound holds, nothing deadlocks, and breaking the rule is seen."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.columns import column, row_bytes
from rolecall.trajectory import SAMPLED_COLUMNS
from services.controller.groups.admission import AdmissionPolicy


def policy(
    groups_per_batch: int = 4, max_staleness: int = 0, num_steps: int = 10, max_bytes: int = 10**9
) -> AdmissionPolicy:
    return AdmissionPolicy(groups_per_batch, max_staleness, num_steps, max_bytes, group_bytes=100)


class OldestReady(AdmissionPolicy):
    """A planted violation: takes the oldest ready groups without looking at who would be late."""

    def choose(self, batch, ready, live, begun=()):  # type: ignore[no-untyped-def]
        return sorted(ready)[: self.groups_per_batch] if len(ready) >= self.groups_per_batch else None


class KeptCredit(AdmissionPolicy):
    """A planted violation: a dropped group's place is not given to another."""

    def may_admit(self, *, admitted, dropped, published_step, num_live, retained_bytes):  # type: ignore[no-untyped-def]
        return super().may_admit(
            admitted=admitted,
            dropped=0,
            published_step=published_step,
            num_live=num_live,
            retained_bytes=retained_bytes,
        )


class LateWindow(AdmissionPolicy):
    """A planted violation: the window is one batch wider than the bound allows, so that some groups can meet it no
    more.
    """

    def may_admit(self, *, admitted, dropped, published_step, num_live, retained_bytes):  # type: ignore[no-untyped-def]
        return super().may_admit(
            admitted=admitted,
            dropped=dropped,
            published_step=published_step + 1,
            num_live=num_live,
            retained_bytes=retained_bytes,
        )


class DeadlockError(AssertionError):
    """Nothing can happen any more, and the run is not at its end."""


@dataclass
class SimulatedRun:
    """Groups finish in any order; sampled and finished ones are dropped; a batch is published some time after it was
    trained. Records the staleness.
    """

    policy: AdmissionPolicy
    seed: int
    drop_share: float
    publish_lag: float = 0.0
    """Share of moments at which a trained batch is not published yet although it could be."""
    bounds: tuple[int, ...] = ()
    """Other max_staleness of loops that go on where the last one ended, at moments of chance."""
    staleness: list[int] = field(default_factory=list)
    too_late: list[int] = field(default_factory=list)
    """Groups that were trained later than under any bound since their admission."""

    begun: tuple[int, ...] = ()

    def run(self) -> None:
        self.rng = random.Random(self.seed)
        self.step = self.published = self.admitted = self.dropped = 0
        self.live: dict[int, int] = {}
        self.last_batch: dict[int, int] = {}
        self.bound: dict[int, int] = {}
        self.ready: set[int] = set()
        bounds = list(self.bounds)
        while self.published < self.policy.num_steps:
            if bounds and self.rng.random() < 0.1:
                self._start_over(bounds.pop())
            self._admit()
            if self.published < self.step and self.rng.random() >= self.publish_lag:
                self.published = self.step
            elif not self._train() and not self._happen():
                if self.published == self.step:
                    raise DeadlockError(
                        f"step {self.step}: {len(self.live)} live groups are all ready and no batch may be made of them"
                    )
                self.published = self.step
        assert self.admitted == self.policy.num_steps * self.policy.groups_per_batch + self.dropped + len(self.live)

    def _admit(self) -> None:
        while self.policy.may_admit(
            admitted=self.admitted,
            dropped=self.dropped,
            published_step=self.published,
            num_live=len(self.live),
            retained_bytes=0,
        ):
            self.live[self.admitted] = self.published
            self.last_batch[self.admitted] = self.policy.last_batch(self.published)
            self.bound[self.admitted] = self.policy.max_staleness
            self.admitted += 1

    def _start_over(self, max_staleness: int) -> None:
        """A loop with another bound, perhaps in the middle of a step: some of its batch's groups are marked as those
        that trainers were asked about.
        """
        self.begun = (
            tuple(self.policy.choose(self.step, self.ready, self.last_batch) or ()) if self.rng.random() < 0.5 else ()
        )
        self.policy = replace(self.policy, max_staleness=max_staleness)
        self.last_batch = self.policy.taken_over(self.step, self.live, self.begun)
        self.bound = {gid: max(bound, max_staleness) for gid, bound in self.bound.items()}

    def _train(self) -> bool:
        """The next batch, if one may be made; not before the last is published."""
        begun = self.live.keys() & set(self.begun)
        chosen = (
            self.policy.choose(self.step, self.ready, self.last_batch, begun) if self.published == self.step else None
        )
        if chosen is None:
            return False
        self.begun = ()
        self.staleness += [self.step - self.live[gid] for gid in chosen]
        self.too_late += [gid for gid in chosen if self.step - self.live[gid] > self.bound[gid]]
        for gid in chosen:
            del self.live[gid], self.last_batch[gid]
        self.ready -= set(chosen)
        self.step += 1
        return True

    def _happen(self) -> bool:
        """Something befalls a group: it is finished, or dropped before or (seldom) after that."""
        working = sorted(set(self.live) - self.ready)
        if not working:
            return False
        gid = self.rng.choice(working)
        if self.rng.random() >= self.drop_share:
            self.ready.add(gid)
            return True
        if self.ready and self.rng.random() < 0.2:
            gid = self.rng.choice(sorted(self.ready))
            self.ready.remove(gid)
        del self.live[gid], self.last_batch[gid]
        self.dropped += 1
        return True


@settings(max_examples=300, deadline=None)
@given(
    batch=st.integers(1, 6),
    staleness=st.integers(0, 4),
    drop_share=st.floats(0, 0.6),
    lag=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
)
def test_no_schedule_exceeds_max_staleness_and_none_deadlocks(
    batch: int, staleness: int, drop_share: float, lag: float, seed: int
) -> None:
    run = SimulatedRun(policy(batch, staleness, num_steps=12), seed, drop_share, lag)
    run.run()
    assert max(run.staleness) <= staleness
    assert len(run.staleness) == 12 * batch


@settings(max_examples=300, deadline=None)
@given(
    batch=st.integers(1, 6),
    bounds=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    drop_share=st.floats(0, 0.6),
    lag=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
)
def test_a_run_goes_on_with_another_max_staleness_and_no_group_is_later_than_its_bounds_allow(
    batch: int, bounds: list[int], drop_share: float, lag: float, seed: int
) -> None:
    run = SimulatedRun(policy(batch, bounds[0], num_steps=12), seed, drop_share, lag, bounds=tuple(bounds[1:]))
    run.run()
    assert run.too_late == []
    assert len(run.staleness) == 12 * batch


@pytest.mark.parametrize(("old", "new"), [(2, 0), (2, 1), (1, 0), (4, 0), (0, 2)])
def test_a_run_that_is_resumed_with_another_bound_trains_what_was_admitted_under_the_old_one(
    old: int, new: int
) -> None:
    before, after = policy(2, old), policy(2, new)
    live = dict.fromkeys(range(2 * (old + 1)), 0)  # all of one window
    last_batch, ready = after.taken_over(0, live, ()), set(live)
    for step in range(old + 1):
        chosen = after.choose(step, ready, last_batch)
        assert chosen == [2 * step, 2 * step + 1]
        assert all(step <= before.last_batch(live[gid]) for gid in chosen)
        ready -= set(chosen)
        last_batch = {gid: last for gid, last in last_batch.items() if gid in ready}


class AllAtOnce(AdmissionPolicy):
    """A planted violation: what was admitted under another bound is held to this one."""

    def taken_over(self, step, live, first):  # type: ignore[no-untyped-def]
        return {gid: self.last_batch(admit_step) for gid, admit_step in live.items()}


def test_the_simulation_catches_a_bound_that_old_groups_cannot_meet() -> None:
    runs = [SimulatedRun(AllAtOnce(2, 2, 12, 10**9, 100), seed, 0.0, bounds=(0,)) for seed in range(20)]
    with pytest.raises(DeadlockError):
        run_all(runs)


def test_the_simulation_catches_a_choice_that_ignores_who_would_be_late() -> None:
    worst = 0
    for seed in range(50):
        run = SimulatedRun(OldestReady(2, 1, 12, 10**9, 100), seed, 0.0)
        run.run()
        worst = max(worst, *run.staleness)
    assert worst > 1


def run_all(runs: list[SimulatedRun]) -> None:
    for run in runs:
        run.run()


@pytest.mark.parametrize(("planted", "drop_share"), [(KeptCredit, 0.2), (LateWindow, 0.0)])
def test_the_simulation_catches_a_policy_that_deadlocks(planted: type[AdmissionPolicy], drop_share: float) -> None:
    runs = [SimulatedRun(planted(2, 1, 12, 10**9, 100), seed, drop_share) for seed in range(50)]
    with pytest.raises(DeadlockError):
        run_all(runs)


def test_without_staleness_exactly_one_batch_is_in_flight() -> None:
    window = [
        policy().may_admit(admitted=n, dropped=0, published_step=0, num_live=n, retained_bytes=0) for n in range(6)
    ]
    assert window == [True, True, True, True, False, False]


def test_a_drop_gives_its_credit_back() -> None:
    assert not policy().may_admit(admitted=4, dropped=0, published_step=0, num_live=4, retained_bytes=0)
    assert policy().may_admit(admitted=4, dropped=1, published_step=0, num_live=3, retained_bytes=0)


def test_nothing_is_admitted_that_no_step_would_train() -> None:
    last = policy(max_staleness=3, num_steps=2)
    assert last.may_admit(admitted=7, dropped=0, published_step=1, num_live=3, retained_bytes=0)
    assert not last.may_admit(admitted=8, dropped=0, published_step=1, num_live=4, retained_bytes=0)


@pytest.mark.parametrize(("retained", "allowed"), [(0, True), (600, True), (601, False)])
def test_bytes_in_flight_and_retained_rows_share_one_bound(retained: int, allowed: bool) -> None:
    full = policy(max_bytes=1000)
    assert full.may_admit(admitted=3, dropped=0, published_step=0, num_live=3, retained_bytes=retained) is allowed


def test_a_late_group_holds_the_batch_up_only_when_its_bound_needs_it() -> None:
    relaxed = policy(groups_per_batch=2, max_staleness=1)
    live = {0: 1, 1: 1, 2: 1, 3: 1}
    assert relaxed.choose(0, {1, 2}, live) == [1, 2]  # group 0 may still be in batch 1
    # batch 1 is the last that may hold groups 0 and 3
    assert relaxed.choose(1, {4, 5}, {0: 1, 3: 1, 4: 2, 5: 2}) is None


def test_row_bytes_grow_with_every_column() -> None:
    sampled = [column(name) for name in SAMPLED_COLUMNS]
    more = [column(name) for name in ("values", "ref/logprobs", "loss_mask", "reward")]
    assert row_bytes(1000, sampled, {}) == 17_000 + 2048
    assert row_bytes(1000, [*sampled, *more], {}) - row_bytes(1000, sampled, {}) == 9_000


@given(
    lasts=st.lists(st.integers(0, 5), max_size=14),
    batch=st.integers(0, 3),
    groups_per_batch=st.integers(1, 4),
    data=st.data(),
)
def test_the_counts_of_groups_tell_whether_there_is_a_batch_to_choose(
    lasts: list[int], batch: int, groups_per_batch: int, data: st.DataObject
) -> None:
    live = dict(enumerate(lasts))
    ready = data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()
    begun = data.draw(st.sets(st.sampled_from(sorted(ready)), max_size=groups_per_batch)) if ready else set()
    bounds = policy(groups_per_batch)
    counts = [Counter(live[gid] for gid in gids) for gids in (ready, live, begun)]
    assert bounds.may_choose(batch, *counts) == (bounds.choose(batch, ready, live, begun) is not None)


def test_groups_that_trainers_were_asked_about_come_before_older_ones_and_are_waited_for() -> None:
    relaxed = policy(groups_per_batch=2, max_staleness=1)
    live = {0: 1, 1: 1, 2: 1, 3: 1}
    assert relaxed.choose(0, {0, 1, 2, 3}, live) == [0, 1]
    assert relaxed.choose(0, {0, 1, 2, 3}, live, begun={1, 3}) == [1, 3]
    assert relaxed.choose(0, {0, 1, 2, 3}, live, begun={3}) == [0, 3], "the other was dropped since"
    assert relaxed.choose(0, {0, 1, 2}, live, begun={1, 3}) is None
