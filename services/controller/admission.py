"""How many groups may be in flight, and which of the finished ones make the next batch. Pure: no clock, no store.

Words. B = groups_per_batch; S = max_staleness; a *step* is one batch applied; p = published_step, the step whose weights the fleet holds; a group's
admit_step is p at its admission. Whoever samples the group does so from weights of step >= admit_step, so trained as batch k its staleness is at most
k - admit_step. Batch k is trained when k steps have been applied.

The bound. A group is admitted while admitted - dropped < (p + 1 + S) * B. Batches 0..p-1 are in the weights, so p * B groups were trained at most and those
admitted and not dropped fit in the batches 0..p+S: were batches filled in order of admission, a group admitted at p would be in batch p + S at the latest and
its staleness would be at most S. Nobody is ever dropped for being late: that would drop the long responses. Drops give their credit back; without that,
one filtered group would hang the run at S = 0.

The choice. Strict order of admission would let one slow group hold up a batch while others are ready. So batch k takes the B *oldest ready* groups, if after it
every group can still meet its bound: for every j in k..k+S, the live groups left over that were admitted at step <= j - S number at most (j - k) * B (those are
the groups that must be in a batch <= j, and batches k+1..j have (j - k) * B places). Otherwise batch k waits. With S = 0 this is strict: all must be ready.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AdmissionPolicy:
    """The bounds of a run."""

    groups_per_batch: int
    max_staleness: int
    num_steps: int
    """Batches of the whole run: nothing is admitted that no batch would train."""
    max_bytes: int
    """Bytes of rows that the store may hold, live and trained but not yet covered by a checkpoint."""
    group_bytes: int
    """Bytes a group may take at most (`row_bytes` times G)."""

    def may_admit(self, *, admitted: int, dropped: int, published_step: int, num_live: int, retained_bytes: int) -> bool:
        """Whether one more group may be admitted. `retained_bytes` are those of trained rows still kept for replay."""
        num_batches = min(published_step + 1 + self.max_staleness, self.num_steps)
        in_window = admitted - dropped < num_batches * self.groups_per_batch
        fits = retained_bytes + (num_live + 1) * self.group_bytes <= self.max_bytes
        return in_window and fits

    def choose(self, batch: int, ready: Collection[int], live: Mapping[int, int], begun: Collection[int] = ()) -> Sequence[int] | None:
        """The gids of batch number `batch`, oldest first, or None while it must wait.

        `ready` holds gids that could be trained now, a subset of `live`, which maps the gid of every group not terminal to its admit_step. `begun`, another,
        are those that trainers were asked about for this batch already: they come before older ones."""
        if len(ready) < self.groups_per_batch or not set(begun) <= set(ready):
            return None
        chosen = sorted([*sorted(begun), *sorted(set(ready) - set(begun))][: self.groups_per_batch])
        taken = set(chosen)
        left = [step for gid, step in live.items() if gid not in taken]
        for j in range(batch, batch + self.max_staleness + 1):
            due = sum(step <= j - self.max_staleness for step in left)
            if due > (j - batch) * self.groups_per_batch:
                return None
        return chosen
