"""What a snapshot asks of a device."""

from pathlib import Path

import pytest
import torch

from rolecall.training.model.box import Box
from rolecall.training.state import checkpoint
from rolecall.training.state.checkpoint import Part, Snapshot, State


@pytest.mark.parametrize("is_first", [True, False])
def test_a_snapshot_of_nothing_on_the_device_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """There is no GPU here. What a rank writes may lie on the host, as Megatron's does, or be nothing, as on every
    rank of a second replica.
    """
    monkeypatch.setattr(checkpoint, "rng_state", lambda device: {})
    values = torch.arange(6.0)
    part = Part(values.shape, Box((0,), (6,)), (values,), is_first)
    state = State(lambda: {"model/w": part}, lambda num_updates: None, {"num_updates": 0}, {}, "float32", tmp_path)
    snapshot = Snapshot(state, torch.device("cuda"), rank=0, world_size=1)
    snapshot.settle()
    assert [tensor.tolist() for tensor in snapshot._tensors.values()] == [values.tolist()] * is_first
