"""Admission: the bound of groups in flight, and the choice of the finished ones that make the next batch.

Pure: no clock, no store.

Words. B = groups_per_batch; S = max_staleness; a *step* is one batch applied; p = published_step, the step whose
weights the fleet holds; a group's admit_step is p at its admission. Whoever samples the group does so from weights of
step >= admit_step, so trained as batch k its staleness is at most k - admit_step. Batch k is trained when k steps have
been applied.

The bound. A group is admitted while admitted - dropped < (p + 1 + S) * B. Batches 0..p-1 are in the weights, so p * B
groups were trained at most and those admitted and not dropped fit in the batches 0..p+S: were batches filled in order
of admission, a group admitted at p would be in batch p + S at the latest and its staleness would be at most S. Nobody
is ever dropped for being late: that would drop the long responses. Drops give their credit back; without that, one
filtered group would hang the run at S = 0.

The choice. Each live group has a *last batch*, in which its staleness is at the bound: admit_step + S. Strict order of
admission would let one slow group hold up a batch while others are ready. So batch k takes the B ready groups with the
least (last batch, gid), the *oldest*, if after it every group can still meet its bound: for every j >= k, the live
groups left over whose last batch is at most j number at most (j - k) * B (batches k+1..j have that many places).
Otherwise batch k waits. With S = 0 this is strict: all must be ready.

Another S. A run may go on with another one. What is live then was admitted under the old bound, and with a smaller S
not all of it can meet the new one. So a group that is taken over at step k has as its last batch the later of
admit_step + S and its place in line, k + i // B for the i-th oldest: no later than under the bound it was admitted
with, and never more than B groups to a batch. Whoever is admitted from there on stands behind all of them and inside
the window, so there is always a batch for everyone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AdmissionPolicy:
    """The bounds of a run on the groups in flight, and the choice of a batch among the ready ones."""

    groups_per_batch: int
    max_staleness: int
    num_steps: int
    """Batches of the whole run: nothing is admitted that no batch would train."""
    max_bytes: int
    """Bytes of rows that the store may hold, live and trained but not yet covered by a checkpoint."""
    group_bytes: int
    """Bytes a group may take at most (`row_bytes` times G)."""

    def may_admit(
        self, *, admitted: int, dropped: int, published_step: int, num_live: int, retained_bytes: int
    ) -> bool:
        """Whether one more group may be admitted. `retained_bytes` are those of trained rows still kept for replay."""
        num_batches = min(published_step + 1 + self.max_staleness, self.num_steps)
        in_window = admitted - dropped < num_batches * self.groups_per_batch
        fits = retained_bytes + (num_live + 1) * self.group_bytes <= self.max_bytes
        return in_window and fits

    def last_batch(self, admit_step: int) -> int:
        """The last batch that may hold a group admitted at `admit_step`."""
        return admit_step + self.max_staleness

    def taken_over(self, step: int, live: Mapping[int, int], first: Collection[int]) -> dict[int, int]:
        """The last batch by gid of the groups that are live when a loop goes on at `step`. `live` maps their gids to
        their admit_step; `first` are those that batch `step` is to have.
        """
        line = sorted(live, key=lambda gid: (gid not in first, gid))
        return {
            gid: max(self.last_batch(live[gid]), step + place // self.groups_per_batch)
            for place, gid in enumerate(line)
        }

    def may_choose(
        self, batch: int, ready: Mapping[int, int], live: Mapping[int, int], begun: Mapping[int, int]
    ) -> bool:
        """Whether `choose` would find the batch, told by how many groups there are of each last batch: it is asked
        whenever a group lands, and looks at no group. `begun` are all ready.
        """
        room, num_left = self.groups_per_batch - sum(begun.values()), 0
        if sum(ready.values()) < self.groups_per_batch:
            return False
        for last in sorted(live):
            of_begun = begun.get(last, 0)
            taken = min(room, ready.get(last, 0) - of_begun)
            room -= taken
            num_left += live[last] - of_begun - taken
            if num_left > max(0, last - batch) * self.groups_per_batch:
                return False
        return True

    def choose(
        self, batch: int, ready: Collection[int], live: Mapping[int, int], begun: Collection[int] = ()
    ) -> Sequence[int] | None:
        """The gids of batch number `batch`, in order of admission, or None while it must wait.

        `ready` holds gids that could be trained now, a subset of `live`, which maps the gid of every group not terminal
        to its last batch. `begun`, another, are those that trainers were asked about for this batch already: they come
        before older ones.
        """
        if len(ready) < self.groups_per_batch or not set(begun) <= set(ready):
            return None
        others = sorted(set(ready) - set(begun), key=lambda gid: (live[gid], gid))
        chosen = sorted([*begun, *others][: self.groups_per_batch])
        left = sorted(live[gid] for gid in live.keys() - set(chosen))
        if any(number > (last - batch) * self.groups_per_batch for number, last in enumerate(left, 1)):
            return None
        return chosen
