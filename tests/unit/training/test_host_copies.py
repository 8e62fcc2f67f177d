"""Storages that wait on the host and come back in place."""

import pytest
import torch

from rolecall.training.state.host_copies import HostCopies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_views_and_padding_come_back_as_the_same_objects(device: str) -> None:
    padded = torch.arange(12.0, device=device)
    view = padded[:10].view(2, 5)
    other = torch.arange(3, dtype=torch.bfloat16, device=device)
    copies = HostCopies()
    copies.take("parameters", {"view": view, "padded": padded, "other": other})
    assert padded.untyped_storage().nbytes() == view.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    copies.give_back("parameters")
    assert padded.tolist() == list(range(12))
    assert view.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert other.tolist() == [0, 1, 2]
    view += 1
    assert padded.tolist() == [*range(1, 11), 10, 11]


def test_taking_or_giving_twice_is_taking_or_giving_once() -> None:
    weight, moment = torch.ones(4), torch.full((4,), 2.0)
    copies = HostCopies()
    copies.give_back("parameters")
    copies.take("parameters", {"weight": weight})
    copies.take("parameters", {"weight": weight})
    copies.take("optimizer", {"moment": moment, "none": torch.zeros(0)})
    copies.give_back("parameters")
    copies.give_back("parameters")
    assert weight.tolist() == [1, 1, 1, 1]
    assert moment.untyped_storage().nbytes() == 0
    copies.give_back("optimizer")
    assert moment.tolist() == [2, 2, 2, 2]
