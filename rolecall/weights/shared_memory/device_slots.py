"""Slots in a GPU's memory that two processes see: the ring of the shared channel (ring.py) where actor and receiver
are on one GPU, on which NCCL takes no two ranks.

The root allocates them outside torch's allocator, so that a handle means them alone, and receivers open that handle by
CUDA's IPC. Reference: CUDA Runtime API, section 6.11, "cudaIpcGetMemHandle" and its neighbours.
"""

import ctypes
import functools
import logging
from typing import Any

import torch

from rolecall.training.ranks.device import backend_of

logger = logging.getLogger(__name__)
HANDLE_BYTES = 64
"""Bytes of a handle (cudaIpcMemHandle_t)."""
CHUNK_BYTES = 16 * 2**20
"""Most bytes of one chunk. More than in host memory: two processes on one GPU take turns there, and a turn is long."""
NUM_SLOTS = 4
"""Chunks that the root may be ahead of the slowest receiver; all slots are 64 MiB."""


class DeviceSlots:
    """One end's view of the slots. Whoever puts or takes waits for the copy, so that a receipt means what it says; what
    the current stream did before is to be done by then, or it is waited for, too.
    """

    num_slots = NUM_SLOTS
    chunk_bytes = CHUNK_BYTES

    def __init__(self, memory: torch.Tensor, pointer: int | None = None) -> None:
        """`memory`: uint8 [slots, bytes of a slot]. `pointer`: what `close` gives back, where this end opened it."""
        self.device = memory.device
        self._memory, self._pointer = memory, pointer

    def put(self, slot: int, chunk: torch.Tensor) -> None:
        """Copies `chunk` (uint8 [n], on this device) into slot `slot`; done when it returns."""
        self._memory[slot, : chunk.numel()].copy_(chunk)
        torch.cuda.current_stream(self.device).synchronize()

    def take(self, slot: int, into: torch.Tensor) -> int:
        """Copies the start of slot `slot` into `into` (uint8 [n], on this device), done when it returns; n."""
        into.copy_(self._memory[slot, : into.numel()])
        torch.cuda.current_stream(self.device).synchronize()
        return into.numel()

    def close(self) -> None:
        """Lets go of what was opened; nothing is put or taken afterwards. Idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            with torch.cuda.device(self.device):
                _call("cudaIpcCloseMemHandle", pointer)


def own_slots(device: torch.device) -> tuple[DeviceSlots, bytes] | None:
    """This process's slots on a GPU, and their handle; None on CPUs, and where the driver gives none."""
    if backend_of(device) != "nccl":
        return None
    try:
        return _made_once(device)
    except (_CudaError, ImportError) as error:
        logger.warning("weights go by way of the host: %s shares no memory with another process: %s", device, error)
        return None


def open_slots(handle: bytes, device: torch.device) -> DeviceSlots | None:
    """The slots of another process on this GPU; None where it has none, they are on another GPU, or the driver does not
    open them.
    """
    if not any(handle) or backend_of(device) != "nccl":
        return None
    try:
        return _opened(handle, device)
    except (_CudaError, ImportError) as error:
        logger.warning("weights go by way of the host: the actor's memory does not open on %s: %s", device, error)
        return None


@functools.cache
def _made_once(device: torch.device) -> tuple[DeviceSlots, bytes]:
    """One memory for all epochs, which ends with the process: what CUDA does with a receiver that still copies from
    memory that was freed is undefined.
    """
    with torch.cuda.device(device):
        pointer = int(_call("cudaMalloc", NUM_SLOTS * CHUNK_BYTES))
        try:
            handle = _call("cudaIpcGetMemHandle", pointer)
        except _CudaError:
            _call("cudaFree", pointer)
            raise
        return DeviceSlots(_tensor(pointer, device)), ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _opened(handle: bytes, device: torch.device) -> DeviceSlots | None:
    from cuda.bindings import runtime

    with torch.cuda.device(device):
        given = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        pointer = int(_call("cudaIpcOpenMemHandle", given, runtime.cudaIpcMemLazyEnablePeerAccess))
        is_here = _call("cudaPointerGetAttributes", pointer).device == torch.cuda.current_device()
        if not is_here:
            _call("cudaIpcCloseMemHandle", pointer)
        return DeviceSlots(_tensor(pointer, device), pointer) if is_here else None


def identity_of(device: torch.device) -> str:
    """Returns the GPU's own name, the same in every process, however it counts its devices; "" on CPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if backend_of(device) == "nccl" else ""


class _CudaError(Exception):
    """The driver refused a call."""


def _call(name: str, *arguments: Any) -> Any:
    from cuda.bindings import runtime  # comes with builds of torch for CUDA

    code, *values = getattr(runtime, name)(*arguments)
    if code != runtime.cudaError_t.cudaSuccess:
        raise _CudaError(f"{name} said {code.name}")
    return values[0] if values else None


def _tensor(pointer: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Memory(pointer, (NUM_SLOTS, CHUNK_BYTES)), device=device)


class _Memory:
    """Device memory as other libraries describe it to each other."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (pointer, False), "version": 3}
