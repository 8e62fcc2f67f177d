"""The meeting of a trainer's ranks, before the first collective."""

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, though not in __all__

from rolecall.errors import VersionMismatchError
from rolecall.training.step import start


def test_a_rank_of_another_release_is_refused_before_it_hangs_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for rank in range(2):
        start.require_one_release(store, rank)
    monkeypatch.setattr(start, "contract_version", lambda: "9.9.9+0123456789ab")
    with pytest.raises(
        VersionMismatchError, match=r"rank 2 was built with contracts 9\.9\.9\+0123456789ab, rank 0 with "
    ):
        start.require_one_release(store, 2)
