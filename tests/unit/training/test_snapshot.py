"""What a snapshot asks of a device, and what is said of one whose tensors have other shapes."""

from pathlib import Path

import pytest
import torch

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMismatchError
from rolecall.training.model.box import Box
from rolecall.training.serving.hooks import nothing
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


def test_tensors_in_shapes_of_another_release_are_refused_as_such(tmp_path: Path) -> None:
    """Adapters of experts were [O, R E] once."""
    values = torch.zeros(5, 2, 3)
    part = Part(values.shape, Box((0, 0, 0), values.shape), (values,), is_first=True)
    state = State(lambda: {"model/up": part}, lambda num_updates: None, {}, {}, "float32", tmp_path)
    index = {"notes": {}, "counters": {"num_updates": 0}, "shapes": {"model/up": [5, 6]}, "world_size": 1}
    with pytest.raises(CheckpointMismatchError, match=r"or by a release .*: 1 tensors differ, first 'model/up'"):
        checkpoint.load(open_storage(str(tmp_path)), index, state, torch.device("cpu"), 0, 1, nothing)
