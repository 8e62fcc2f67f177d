"""The arrays that every estimator reads and gives: trajectories laid end to end, so that no estimator loops over them.

Numpy.

Shapes: B trajectories of the batch, in order; T tokens of one trajectory (prompt + response), another for each; N
tokens of the whole batch, trajectory after trajectory; M sampled tokens among them; L steps of time. Alignment is that
of rolecall/columns.py: a reward at t arrives after token t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from rolecall.errors import InvalidInputError
from rolecall.wire import Array

STD_EPS = 1e-6
"""Added to a standard deviation before dividing, of advantages and of rewards: what is without spread becomes 0, not
nan.
"""


class Runs:
    """Sampled tokens as runs of consecutive ones, a few for each trajectory: what is copied run by run costs no index
    for each token.

    `places` (start, stop, first): tokens [start, stop) of [N] are [first, ...) of [M]; `trajectories` whose each run
    is; `columns` where it begins in time, which is `width` long.
    """

    def __init__(self, response_mask_N: Array, offsets: Array) -> None:
        cuts = np.union1d(np.flatnonzero(response_mask_N[1:] != response_mask_N[:-1]) + 1, offsets)
        is_run = response_mask_N[cuts[:-1]] != 0
        starts, stops = cuts[:-1][is_run], cuts[1:][is_run]
        lengths, trajectories = stops - starts, np.searchsorted(offsets, starts, side="right") - 1
        firsts = np.cumsum(lengths) - lengths
        self.num_sampled_B = np.bincount(trajectories, lengths, offsets.size - 1).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.num_sampled_B)])
        self.places = list(zip(starts.tolist(), stops.tolist(), firsts.tolist(), strict=True))
        self.trajectories = trajectories.tolist()
        # Odd: columns of rows that are a power of two apart would all fall into the same few lines of the processor's
        # cache.
        self.width = int(self.num_sampled_B.max(initial=0)) | 1
        self.columns = (self.width - (self.offsets[trajectories + 1] - firsts)).tolist()


@dataclass(frozen=True)
class ScoredBatch:
    """The batch that estimators read. Made by `of_rows`."""

    gids_B: Array
    """int64: admission number of each trajectory's group; equal numbers are compared with one another."""
    offsets: Array
    """int64 [B + 1]: trajectory b is [offsets[b], offsets[b + 1]) of everything [N]."""
    rewards_N: Array
    """float32 per-token rewards, after shaping, or float64; results are of the same type."""
    totals_B: Array
    """float64: the sum of each trajectory's rewards, rounded to float32, so that what earned the same is equal."""
    response_mask_N: Array
    """uint8, 1 = sampled by the policy."""
    loss_mask_N: Array
    """uint8, subset of response_mask_N that is trained on."""
    columns: Mapping[str, Array] = field(default_factory=dict)
    """What the estimator needs, by column name: "values" [N], "bootstrap_value" [B] (0 where it stopped), ..."""
    components: Mapping[str, Array] = field(default_factory=dict)
    """float32 [B] by name: the reward's components as the scorer gave them, before weights, NaN where one does not
    apply; only for estimators that read them.
    """
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each component, by name."""
    greedy_rewards: Array | None = None
    """float32 [B]: the reward of the greedy response to the trajectory's prompt; only for estimators that ask for it.
    """

    @classmethod
    def of_rows(
        cls,
        gids: Sequence[int],
        rewards: Sequence[Array],
        response_masks: Sequence[Array],
        loss_masks: Sequence[Array],
        columns: Mapping[str, Sequence[Array]] | None = None,
        components: Mapping[str, Array] | None = None,
        component_weights: Mapping[str, float] | None = None,
        greedy_rewards: Array | None = None,
    ) -> Self:
        """Lays B >= 1 trajectories of [T] each end to end."""
        return cls(
            gids_B=np.asarray(gids, np.int64),
            offsets=np.cumsum([0, *(mask_T.size for mask_T in response_masks)]),
            rewards_N=np.concatenate(rewards),
            totals_B=np.array([np.float32(rewards_T.sum(dtype=np.float64)) for rewards_T in rewards], np.float64),
            response_mask_N=np.concatenate(response_masks),
            loss_mask_N=np.concatenate(loss_masks),
            columns={name: np.concatenate(rows) for name, rows in (columns or {}).items()},
            components=components or {},
            component_weights=component_weights or {},
            greedy_rewards=greedy_rewards,
        )

    def column(self, name: str) -> Array:
        """[N], or [B] of a column with one number each. InvalidInputError when nobody has written it."""
        if name not in self.columns:
            raise InvalidInputError(f"the estimator reads the column {name}, which nobody has written")
        return self.columns[name]

    @cached_property
    def num_tokens_B(self) -> Array:
        """int64: T of each trajectory."""
        return np.diff(self.offsets)

    @cached_property
    def runs(self) -> Runs:
        """The runs of sampled tokens."""
        return Runs(self.response_mask_N, self.offsets)

    @property
    def num_sampled_B(self) -> Array:
        """int64: sampled tokens of each trajectory."""
        return self.runs.num_sampled_B

    @property
    def sampled_offsets(self) -> Array:
        """int64 [B + 1]: trajectory b is [sampled_offsets[b], sampled_offsets[b + 1]) of everything [M]."""
        return self.runs.offsets

    def spread(self, values_B: Array) -> Array:
        """[N]: each trajectory's number on the tokens trained on, 0 elsewhere."""
        spread_N = np.repeat(values_B.astype(self.rewards_N.dtype), self.num_tokens_B)
        spread_N *= self.loss_mask_N
        return spread_N

    def scatter(self, values_M: Array) -> Array:
        """[N]: sampled tokens' numbers at their places where trained on, 0 elsewhere."""
        scattered_N = np.zeros_like(self.rewards_N)
        for start, stop, first in self.runs.places:
            scattered_N[start:stop] = values_M[first : first + stop - start]
        scattered_N *= self.loss_mask_N
        return scattered_N

    def at_sampled(self, values_N: Array) -> Array:
        """[M]: the numbers of the sampled tokens. Steps over prompts and what an environment said."""
        return np.concatenate([values_N[start:stop] for start, stop, _ in self.runs.places] or [values_N[:0]])

    def zeros_in_time(self) -> Array:
        """float64 [B, L] of 0: the sampled tokens in time, each trajectory's last one in the last column."""
        return np.zeros((self.gids_B.size, self.runs.width))

    def runs_in(self, time_BL: Array) -> list[tuple[int, int, int, Array]]:
        """(start, stop, trajectory, view of time_BL) of each run: tokens [start, stop) of [N] and their place in
        time.
        """
        placed = zip(self.runs.places, self.runs.trajectories, self.runs.columns, strict=True)
        return [
            (start, stop, trajectory, time_BL[trajectory, column : column + stop - start])
            for (start, stop, _), trajectory, column in placed
        ]

    def in_time(self, values_N: Array) -> Array:
        """float64 [B, L]: the numbers of the sampled tokens; 0 before each trajectory's first."""
        time_BL = self.zeros_in_time()
        for start, stop, _, run_T in self.runs_in(time_BL):
            run_T[:] = values_N[start:stop]
        return time_BL

    def from_time(self, time_BL: Array) -> Array:
        """[N]: `in_time` undone, where trained on; 0 elsewhere."""
        values_N = np.zeros_like(self.rewards_N)
        for start, stop, _, run_T in self.runs_in(time_BL):
            values_N[start:stop] = run_T
        values_N *= self.loss_mask_N
        return values_N

    def rows(self, values_N: Array) -> list[Array]:
        """B views [T] of something [N]."""
        bounds = self.offsets.tolist()
        return [values_N[start:stop] for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Estimate:
    """Columns to write, [N] each in the rewards' dtype, 0 where loss_mask_N is 0."""

    advantages_N: Array
    returns_N: Array | None = None
    """Targets of the value model; None from estimators without one."""
