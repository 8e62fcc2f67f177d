"""The meeting of a trainer's ranks, before the first collective."""

from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, though not in __all__

from rolecall.errors import ConfigError, VersionMismatchError
from rolecall.training.step import start
from tests.pictures import write_seeing


def test_a_rank_of_another_release_is_refused_before_it_hangs_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for rank in range(2):
        start.require_one_release(store, rank)
    monkeypatch.setattr(start, "contract_version", lambda: "9.9.9+0123456789ab")
    with pytest.raises(
        VersionMismatchError, match=r"rank 2 was built with contracts 9\.9\.9\+0123456789ab, rank 0 with "
    ):
        start.require_one_release(store, 2)


def test_a_rank_whose_image_processor_is_another_is_refused(tmp_path: Path) -> None:
    store, first = HashStore(), write_seeing(tmp_path / "first")
    for rank in range(2):
        start.require_one_processor(store, rank, first)
    with pytest.raises(ConfigError, match=r"rank 2 makes other pixels .* its \S+ has another preprocessor_config.json"):
        start.require_one_processor(store, 2, write_seeing(tmp_path / "second", image_mean=[0.5, 0.5, 0.5]))
