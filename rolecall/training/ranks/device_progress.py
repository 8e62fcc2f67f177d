"""The progress of the device, not of the host: a GPU is handed seconds of work in milliseconds, and the host then waits
for all of it at once.

    progress = DeviceProgress(progressed, device)
    progress.follow(layers(model))                                       # counts each layer, in both directions
    progress.mark()                                                      # counts what else was handed over so far

A mark is behind all work handed over so far on the current stream; `progressed` is called when the device has reached
it. On CPUs that is at once. On other devices a thread asks for it, and lives while marks are open.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rolecall.training.ranks.device import mark_of, use_in_thread

POLL_S = 0.05
"""Seconds between two looks at a mark that is not reached: far below any hang_s, far above what a look costs."""


class DeviceProgress:
    """Marks in the order in which the device reaches them. `mark` is called in the device's thread and in
    autograd's.
    """

    def __init__(
        self,
        progressed: Callable[[], None],
        device: torch.device,
        mark: Callable[[torch.device], Callable[[], bool] | None] = mark_of,
    ) -> None:
        """`mark` makes a mark on a device: whether it is reached; or None where work is done when the call that asks
        for it returns.
        """
        self._progressed = progressed
        self._device = device
        self._mark = mark
        self._lock = threading.Lock()
        self._open: deque[Callable[[], bool]] = deque()
        """Bounded by what one microbatch hands over: the host waits for the device in each."""
        self._watching = False

    def mark(self) -> None:
        """Counts what was handed over so far, once the device has done it."""
        reached = self._mark(self._device)
        if reached is None:
            self._progressed()
            return
        with self._lock:  # bounded: nobody waits for anything inside
            self._open.append(reached)
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._watch, name="device-progress", daemon=True).start()

    def follow(self, layers: Iterable[nn.Module]) -> None:
        """Marks the end of each layer's forward pass, and the beginning of its backward pass, from now on."""
        for layer in layers:
            layer.register_forward_hook(self._layer_ran)

    def _layer_ran(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.mark()
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.mark())

    def _watch(self) -> None:
        use_in_thread(self._device)
        while True:
            with self._lock:
                if not self._open:
                    self._watching = False
                    return
                reached = self._open.popleft()
            while not reached():
                time.sleep(POLL_S)
            self._progressed()
