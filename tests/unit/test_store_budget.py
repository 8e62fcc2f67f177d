"""What of a store a run's rows may take."""

from collections.abc import Callable

import pytest

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.budget import STORE_SHARE, StoreBudget


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_the_store_must_hold_the_batches_in_flight_and_one_that_no_checkpoint_covers_yet(
    make_settings: Callable[..., RunSettings], max_staleness: int
) -> None:
    """At staleness S batches k .. k + S are in flight while the rows of k - 1 wait for a checkpoint: S + 2."""
    algorithm = {"groups_per_batch": 2, "max_staleness": max_staleness}
    num_batches = max_staleness + 2
    enough = int(num_batches * StoreBudget.of(make_settings(algorithm=algorithm)).batch_bytes / STORE_SHARE)
    assert StoreBudget.of(make_settings(algorithm=algorithm, store={"max_bytes": enough + 4})).num_batches == num_batches
    with pytest.raises(ConfigError, match=f"cannot hold {num_batches} batches"):
        StoreBudget.of(make_settings(algorithm=algorithm, store={"max_bytes": enough - 4}))
