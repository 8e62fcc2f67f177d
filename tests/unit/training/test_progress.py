"""Progress is the device's: what was handed over counts when it is done."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rolecall.training.ranks.device_progress import DeviceProgress

WAIT_S = 20.0
CPU = torch.device("cpu")


class SlowDevice:
    """A device that does what it is given when it is told to, and a count of the progress that was heard."""

    def __init__(self) -> None:
        self.given = 0
        self._done = 0
        self.heard = 0
        self._moved = threading.Condition()

    def mark(self, device: torch.device) -> Callable[[], bool]:
        self.given += 1
        number = self.given
        return lambda: self._done >= number

    def progressed(self) -> None:
        with self._moved:
            self.heard += 1
            self._moved.notify_all()

    def do(self, number: int) -> None:
        self._done += number

    def hears(self, number: int) -> bool:
        with self._moved:
            return self._moved.wait_for(lambda: self.heard >= number, WAIT_S)


def test_work_that_was_handed_over_is_no_progress_until_the_device_has_done_it() -> None:
    device = SlowDevice()
    progress = DeviceProgress(device.progressed, CPU, device.mark)
    for _ in range(5):
        progress.mark()
    assert (device.given, device.heard) == (5, 0), "the host ran ahead"
    device.do(2)
    assert device.hears(2)
    assert device.heard == 2
    device.do(3)
    assert device.hears(5)
    progress.mark()
    device.do(1)
    assert device.hears(6), "marks after a quiet time are watched, too"


def test_the_thread_that_asks_for_marks_is_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread().name))
    )
    device, second = SlowDevice(), torch.device("cuda", 1)
    DeviceProgress(device.progressed, second, device.mark).mark()
    device.do(1)
    assert device.hears(1)
    assert chosen == [(second, "device-progress")]


def test_a_layer_counts_in_both_directions_with_gradient_checkpointing_too() -> None:
    device = SlowDevice()
    progress = DeviceProgress(device.progressed, CPU, device.mark)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    progress.follow(layers)
    hidden = layers[1](layers[0](torch.ones(1, 2)))
    assert device.given == 2
    hidden.sum().backward()
    assert device.given == 4
    with torch.no_grad():
        layers[0](torch.ones(1, 2))
    assert device.given == 5
    kept: torch.Tensor = checkpoint(layers[0], torch.ones(1, 2), use_reentrant=False)
    kept.sum().backward()  # type: ignore[no-untyped-call]
    assert device.given == 7


def test_on_a_cpu_what_was_handed_over_is_done() -> None:
    heard: list[int] = []
    progress = DeviceProgress(lambda: heard.append(1), CPU)
    progress.mark()
    assert heard == [1]
