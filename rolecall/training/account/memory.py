"""The accounting of a rank's memory: the peak of each phase, and an account of everything that is held when it runs
out.

    memory = PhaseMemory(device, role="actor", rank=0, folder=run_dir / "memory")
    with memory.phase("forward"):            # phases nest: what is used in an inner one counts for the outer ones, too
        ...
    memory.take_peaks()                      # {"load": 1200000000, "forward": 3400000000}

A lack of memory inside a phase ends the role: neither parameters nor ranks can be trusted to be where they were. It is
told in one sentence that names the phase, the largest tensors and the remedy, and in a JSON file with all of them (and,
on GPUs, the allocator's segments). Where the phase had never yet succeeded another start cannot help: OutOfMemoryError,
which the role's exit code tells (docs/adr/0019). Where it had, memory may be fragmented or a neighbour's:
MemoryLostError, after which the role starts again as ever.

Peaks are of tensors on GPUs and of the whole process on CPUs (device.take_peak_bytes), with whatever else runs in it.
One thread, the device's.
"""

import gc
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from rolecall.errors import OutOfMemoryError
from rolecall.training.model.box import local_part
from rolecall.training.ranks.device import (
    allocator_state,
    bytes_above,
    is_out_of_memory,
    memory_bytes,
    name_of,
    take_peak_bytes,
)

logger = logging.getLogger(__name__)

Phase = Literal["load", "forward", "backward", "optimizer", "publish", "checkpoint"]

Holdings = Callable[[], Mapping[str, Mapping[str, torch.Tensor]]]
"""What is known by name: {kind: {name: tensor}}, the kind in the plural."""

_FEWER_ACTIVATIONS = (
    "lower its token_budget, set actor.gradient_checkpointing or actor.activation_offload, set "
    "parallel.keep_gathered: false, or give it more ranks (num_ranks)"
)
_FEWER_STATES = "give it more ranks (num_ranks), train adapters (lora), or use a smaller model"
_REMEDIES: Mapping[Phase, str] = {
    "load": "give it more ranks (num_ranks) or use a smaller model or dtype",
    "forward": _FEWER_ACTIVATIONS,
    "backward": _FEWER_ACTIVATIONS,
    "optimizer": _FEWER_STATES,
    "publish": "lower weights.bucket_bytes, lower its token_budget, or give it more ranks (num_ranks)",
    "checkpoint": "give it more ranks (num_ranks) on more machines, or more host memory",
}
_NUM_NAMED = 3
"""Tensors that the sentence names."""
_NUM_LISTED = 200
"""Tensors that the file lists."""
_GIB = 2**30


@dataclass(frozen=True)
class Held:
    """One piece of memory that a tensor keeps."""

    kind: str
    """The kind as in Holdings; "other tensors" for those without a name."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    """The bytes of the whole storage, which may be more than the tensor shows."""

    def __str__(self) -> str:
        return f"{self.name or 'a tensor'} {self.dtype} {list(self.shape)} {self.num_bytes / _GIB:.3g} GiB"


class MemoryLostError(RuntimeError):
    """Told already, and not this role's last word: it may start again."""


class PhaseMemory:
    """The phases of one rank."""

    def __init__(
        self, device: torch.device, *, role: str = "trainer", rank: int = 0, folder: Path | None = None
    ) -> None:
        """`role` is for people. `folder` is where the account is written when memory runs out; None: nowhere."""
        self.device = device
        self.holdings: Holdings = dict
        """Set by whoever holds the large tensors."""
        self.around: Callable[[Phase], AbstractContextManager[object]] = nullcontext
        """Entered inside each phase, by its name; set by whoever follows them for a while."""
        self._role, self._rank = role, rank
        self._account = folder / f"{role.replace('/', '.')}-rank{rank}.json" if folder is not None else None
        self._open: list[Phase] = []
        self._peaks: dict[Phase, int] = {}
        self._succeeded: set[Phase] = set()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Counts what is used inside for `phase`. OutOfMemoryError or MemoryLostError, see above, for a lack of memory
        inside.
        """
        self._note()
        self._open.append(phase)
        try:
            with self.around(phase):
                yield
            self._succeeded.add(phase)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryLostError) or not is_out_of_memory(error):
                raise
            message = self._tell(phase, error)
            raise (MemoryLostError if phase in self._succeeded else OutOfMemoryError)(message) from error
        finally:
            self._note()
            self._open.pop()

    def take_peaks(self) -> dict[Phase, int]:
        """Bytes at the height of each phase since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def height(self, *phases: Phase) -> int:
        """Bytes at the height of `phases` since peaks were last taken."""
        return max(self._peaks.get(phase, 0) for phase in phases)

    def room(self, *phases: Phase) -> int:
        """Bytes that the device had left at the height of `phases` since peaks were last taken. Others are taken to use
        it as they do now; negative where they have taken more.
        """
        return bytes_above(self.device, self.height(*phases))

    def has_run_out(self) -> bool:
        """Whether memory ran out on this rank in this run, in this process or one before it: the account is there."""
        return self._account is not None and self._account.exists()

    def _note(self) -> None:
        peak = take_peak_bytes(self.device)
        for phase in self._open:
            self._peaks[phase] = max(self._peaks.get(phase, 0), peak)

    def _tell(self, phase: Phase, error: Exception) -> str:
        """The sentence; writes the file."""
        self._note()
        tensors = held_tensors(self.device, self.holdings())
        by_kind = Counter[str]()
        for tensor in tensors:
            by_kind[tensor.kind] += tensor.num_bytes
        device, (in_use, total) = name_of(self.device) or str(self.device), memory_bytes(self.device)
        written = self._write(
            {
                "role": self._role,
                "rank": self._rank,
                "phase": phase,
                "error": str(error),
                "device": {"name": device, "bytes_in_use": in_use, "bytes": total},
                "peak_bytes": self._peaks,
                "bytes_by_kind": by_kind,
                "tensors": [asdict(tensor) for tensor in tensors[:_NUM_LISTED]],
                "allocator": allocator_state(self.device),
            }
        )
        kinds = ", ".join(f"{kind} {num_bytes / _GIB:.3g} GiB" for kind, num_bytes in by_kind.items())
        parts = (
            f"rank {self._rank} of {self._role} ran out of memory in {phase} on {device}, {in_use / _GIB:.3g} of "
            f"{total / _GIB:.3g} GiB in use",
            str(error).strip().partition("\n")[0] or type(error).__name__,
            f"held by {kinds or 'no tensor'}",
            f"the largest: {', '.join(map(str, tensors[:_NUM_NAMED])) or 'none'}",
            _REMEDIES[phase],
            written,
        )
        return "; ".join(part for part in parts if part)

    def _write(self, account: Mapping[str, object]) -> str:
        if self._account is None:
            return ""
        try:
            self._account.parent.mkdir(parents=True, exist_ok=True)
            self._account.write_text(json.dumps(account, indent=1, default=str))
        except OSError as error:
            logger.warning("the account of what held the memory could not be written: %s", error)
            return ""
        return f"all of it: {self._account}"


def held_tensors(device: torch.device, holdings: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Held]:
    """Every storage of `device` that a tensor of this process keeps, once, the largest first. What only autograd's
    graph keeps is not seen.
    """
    seen: dict[int, Held] = {}
    for kind, named in holdings.items():
        for name, tensor in named.items():
            _add(seen, device, kind, name, tensor)
    for candidate in gc.get_objects():
        # not its class: asking a proxy for that may do anything
        if type(candidate) in (torch.Tensor, torch.nn.Parameter):
            _add(seen, device, "other tensors", "", candidate)
    return sorted(seen.values(), key=lambda held: -held.num_bytes)


def _add(seen: dict[int, Held], device: torch.device, kind: str, name: str, tensor: torch.Tensor) -> None:
    local = local_part(tensor)
    if local.device != device or local.layout != torch.strided:
        return
    storage = local.untyped_storage()
    if storage.nbytes():
        held = Held(kind, name, str(local.dtype).removeprefix("torch."), tuple(local.shape), storage.nbytes())
        seen.setdefault(storage.data_ptr(), held)
