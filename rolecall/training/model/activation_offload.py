"""Activations in host memory between a layer's forward and its backward.

    offload = ActivationOffload(layers(model), Copies(device))
    with offload.recording():                                            # a forward pass; backward comes after it
        outputs = model(...)

What autograd saves in a layer is copied to the host beside the computation, and its device memory is given back when
the next layer is done. Backward fetches a layer's tensors while the layer after it computes. So at most two layers'
tensors are on the device at once, and those of the last layer, which backward needs first and which stay. With gradient
checkpointing a layer saves its input alone, and that is what moves.

Whole storages move: views of one tensor move once. What stays: parameters, which FSDP frees and gathers by itself;
small tensors; storages that two layers in a row save (rotary tables). Numbers do not change: a copy is a copy. On CPUs
all copies are made at once and free nothing: for tests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

LEAST_BYTES = 2**16
"""Smaller storages stay: a copy costs more than they take."""


class ActivationOffload:
    """The host's copies of the activations of one model's layers, which are given in the order in which they run.

    One forward pass at a time.
    """

    def __init__(self, layers: Sequence[nn.Module], copies: "Copies") -> None:
        self._num_layers = len(layers)
        self._copies = copies
        self._tape: _Tape | None = None
        self.num_bytes = 0
        """Bytes that the latest pass moved to the host."""
        for layer in layers:
            layer.register_forward_pre_hook(self._layer_begins)
            layer.register_forward_hook(self._layer_ends)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps the layers' activations of what is computed inside on the host."""
        self._tape = tape = _Tape(self._num_layers, self._copies)
        # compiled layers save tensors, too: the hooks are not theirs to compile
        hooks = [torch.compiler.disable(hook) for hook in (tape.pack, tape.unpack)]  # type: ignore[no-untyped-call]
        try:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                yield
        finally:
            self._tape = None
            self.num_bytes = tape.num_bytes

    # Backward's recomputation of a checkpointed layer runs the hooks again, when no tape records.
    def _layer_begins(self, layer: nn.Module, _: Any) -> None:
        if self._tape is not None:
            self._tape.weights = {_local(parameter).untyped_storage().data_ptr() for parameter in layer.parameters()}

    def _layer_ends(self, *_: Any) -> None:
        if self._tape is not None:
            self._tape.end_layer()


@dataclass
class _Moved:
    """A storage on its way to the host and back."""

    host: torch.Tensor
    """uint8, all its bytes."""
    device: torch.UntypedStorage | None
    """The original until it is copied; then what was fetched, while its layer's backward runs."""


@dataclass
class _Group:
    """The tensors that one layer saved for its backward."""

    moved: dict[int, _Moved] = field(default_factory=dict)
    """Copies by the original's address, which nobody else has while the original is held."""
    done: torch.Event | None = None
    """When the latest copies are; None: they are."""
    fetched: bool = False


@dataclass(frozen=True)
class _Packed:
    """The stand-in that autograd keeps for a saved tensor."""

    group: int
    moved: _Moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    sharding: "_Sharding | None"


@dataclass(frozen=True)
class _Sharding:
    """The facts that make a DTensor of its local tensor again."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Last:
    """A tensor that stays because backward begins with it."""

    tensor: torch.Tensor


class _Tape:
    """One forward pass and its backward. Lives as long as the graph."""

    def __init__(self, num_layers: int, copies: "Copies") -> None:
        self.weights: set[int] = set()
        """Addresses of the running layer's gathered parameters."""
        self._groups = [_Group() for _ in range(num_layers)]
        self.num_bytes = 0
        self._layer = 0
        self._in_backward = num_layers
        """The layer whose tensors backward used last."""
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._copies = copies

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed | _Last:
        """Called by autograd for each tensor that it saves."""
        if self._layer >= len(self._groups) - 1:
            return _Last(tensor)
        local = _local(tensor)
        storage = local.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < LEAST_BYTES or address in self.weights or address in self._shared:
            return tensor
        group = self._groups[self._layer]
        if self._layer and address in self._groups[self._layer - 1].moved:
            self._shared[address] = storage
            return tensor
        if address not in group.moved:
            self.num_bytes += storage.nbytes()
            group.moved[address] = _Moved(self._copies.to_host(storage), storage)
        sharding = (
            _Sharding(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
            if isinstance(tensor, DTensor)
            else None
        )
        return _Packed(
            self._layer,
            group.moved[address],
            local.dtype,
            local.shape,
            local.stride(),
            int(local.storage_offset()),
            sharding,
        )

    def end_layer(self) -> None:
        """The running layer is done: so are, or must be now, the copies of the one before."""
        if self._layer >= len(self._groups):
            return  # a model that runs a layer again: from there on tensors stay
        if self._layer < len(self._groups) - 1:
            self._groups[self._layer].done = self._copies.mark()
        if self._layer:
            self._release(self._groups[self._layer - 1])
        self.weights = set()
        self._layer += 1

    def unpack(self, packed: torch.Tensor | _Packed | _Last) -> torch.Tensor:
        """Called by autograd when backward needs the tensor."""
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, _Last):
            self._fetch(len(self._groups) - 2)
            return packed.tensor
        if packed.group != self._in_backward:
            self._enter(packed.group)
        assert packed.moved.device is not None
        local = torch.empty(0, dtype=packed.dtype, device=packed.moved.device.device)
        local.set_(packed.moved.device, packed.offset, packed.shape, packed.stride)
        kind = packed.sharding
        return (
            local
            if kind is None
            else DTensor.from_local(
                local, kind.mesh, kind.placements, run_check=False, shape=kind.shape, stride=kind.stride
            )
        )

    def _enter(self, index: int) -> None:
        """Backward has come to this layer: fetches the one before it, and lets those after it go."""
        self._in_backward = index
        self._fetch(index)
        self._copies.gate(self._groups[index].done)
        for later in self._groups[index + 1 :]:
            self._release(later)
        self._fetch(index - 1)

    def _fetch(self, index: int) -> None:
        group = self._groups[index]
        if index < 0 or group.fetched:
            return
        for moved in group.moved.values():
            moved.device = self._copies.to_device(moved.host)
        group.done, group.fetched = self._copies.mark(), True

    def _release(self, group: _Group) -> None:
        """Gives the device memory back, after the copies from or to it."""
        self._copies.gate(group.done)
        group.done, group.fetched = None, False
        for moved in group.moved.values():
            moved.device = None


class Copies:
    """Copies on a stream of their own beside the computation; on CPUs at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """All its bytes; there when mark() is reached. The caller holds `storage` until then."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._copy(source, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._stream is not None))

    def to_device(self, host: torch.Tensor) -> torch.UntypedStorage:
        """A new storage with these bytes; there when mark() is reached."""
        return self._copy(host, torch.empty_like(host, device=self._device)).untyped_storage()

    def mark(self) -> torch.Event | None:
        """Reached when all copies so far are made."""
        return None if self._stream is None else self._stream.record_event()

    def gate(self, event: torch.Event | None) -> None:
        """Lets the computation go on only after `event`; does not block the host."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return target.copy_(source)
        # Both ends belong to the computation's stream: the source is made, and the target's memory free, when it gets
        # here.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            return target.copy_(source, non_blocking=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
