"""What every estimator reads and gives. Numpy.

Shapes: B trajectories of the batch, in order; T tokens of one trajectory (prompt + response), another for each. Alignment is that of rolecall/trajectory.py:
a reward at t arrives after token t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolecall.errors import InvalidInputError
from rolecall.wire import Array

STD_EPS = 1e-6
"""Added to a standard deviation before dividing: groups and batches without spread get advantage 0, not nan."""


@dataclass(frozen=True)
class ScoredBatch:
    """What estimators read. Every sequence has B entries."""

    gids: Sequence[int]
    """Admission number of each trajectory's group; equal numbers are compared with one another."""
    rewards: Sequence[Array]
    """float32 [T] per-token rewards, after shaping; 0 where nothing was sampled."""
    response_masks: Sequence[Array]
    """uint8 [T], 1 = sampled by the policy."""
    loss_masks: Sequence[Array]
    """uint8 [T], subset of response_masks that is trained on."""
    columns: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    """What `needs` asks for, by column name: "values" float32 [T], "bootstrap_value" float32 [1] (0 where the response stopped), ..."""
    components: Mapping[str, Array] = field(default_factory=dict)
    """float32 [B] by name: the reward's components as the scorer gave them, before weights; only for estimators that read them."""
    greedy_rewards: Array | None = None
    """float32 [B]: the reward of the greedy response to the trajectory's prompt; only for estimators that ask for it."""

    def column(self, name: str) -> Sequence[Array]:
        """InvalidInputError when nobody has written it."""
        if name not in self.columns:
            raise InvalidInputError(f"the estimator reads the column {name}, which nobody has written")
        return self.columns[name]


@dataclass(frozen=True)
class Estimate:
    """Columns to write, float32 [T] each, 0 where loss_mask is 0."""

    advantages: list[Array]
    returns: list[Array] | None = None
    """Targets of the value model; None from estimators without one."""
