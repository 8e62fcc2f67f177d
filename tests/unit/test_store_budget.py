"""What of a store a run's rows may take."""

from collections.abc import Callable

import numpy as np
import pytest

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.budget import STORE_SHARE, StoreBudget
from rolecall.trajectory import COLUMNS, row_bytes


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


@pytest.mark.parametrize("num_tokens", [1, 1000])
def test_a_row_is_counted_with_every_column_of_the_schema_its_text_and_its_overhead(num_tokens: int) -> None:
    per_token = sum(np.dtype(column.dtype).itemsize for column in COLUMNS.values() if column.per_token)
    # sum_squared_probs counts as a reference; the text takes about 4 bytes a token, keys and meta 2 KiB a row.
    assert row_bytes(num_tokens, 1, critic=True) == num_tokens * (per_token + 4) + 2048
