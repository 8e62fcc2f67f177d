"""Coverage: which elements of which engine parameter a load wrote, counted where the writes happen, and which tensors
its loaders left unread.

Owns a dispatch mode that watches copies into the engine's parameters while weight loaders run. Layerwise reload first
runs every loader against parameters without memory (meta), so the watch sees exactly the region each loader means to
fill: fused q/k/v, gate/up and stacked experts each as their slice, padding as its fill. Regions are a set, so a tensor
loaded twice does not make up for one that is missing. It is a count of elements, not a check of values: fingerprints
and the probe check those.

A worker may leave a tensor unread: it belongs to another stage of the pipeline. That somebody reads each is for
whoever hears all workers (report.py).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WRITES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)


class Coverage:
    """Counts for one load. Build it after the parameters were put on the meta device and before the first loader
    runs.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor, int]]) -> None:
        """`parameters`: every (name, parameter, elements) a load must fill, as the loaders will see them."""
        self._wanted: dict[int, tuple[str, int]] = {}
        self._keep = []
        for name, parameter, num_elements in parameters:
            self._wanted[_storage(parameter)] = (name, num_elements)
            self._keep.append(parameter)  # a storage's address names it only while it lives
        self._regions: dict[int, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {
            key: set() for key in self._wanted
        }
        self._unread: dict[str, None] = {}

    def watch(self, named: Sequence[tuple[str, torch.Tensor]] = ()) -> TorchDispatchMode:
        """A context in which writes into the parameters are counted, and what is read of `named`, tensors in buckets
        of their own.
        """
        self._unread |= dict.fromkeys(name for name, _ in named)
        return _Watch(self._record, _Sources(named), self._unread)

    def unread(self) -> list[str]:
        """Returns the names of which no loader looked at an element."""
        return list(self._unread)

    def missing(self) -> dict[str, tuple[int, int]]:
        """Parameters not wholly written: name -> (elements written, elements expected)."""
        written = {key: _num_elements(regions) for key, regions in self._regions.items()}
        return {
            name: (written[key], expected) for key, (name, expected) in self._wanted.items() if written[key] != expected
        }

    def missing_of_tied(self, tied: Iterable[Sequence[str]]) -> dict[str, tuple[int, int]]:
        """Returns `missing` where each of `tied` names one parameter: it is whole when it is under any of its names,
        for after the reload they are one memory again. Names that share memory on the meta device, too, as those of a
        module that stands in two places, are counted under one of them.
        """
        missing = self.missing()
        whole = {name for name, _ in self._wanted.values()} - missing.keys()
        for names in tied:
            if whole & set(names):
                missing = {name: counts for name, counts in missing.items() if name not in names}
        return missing

    def _record(self, target: torch.Tensor) -> None:
        regions = self._regions.get(_storage(target))
        if regions is not None and target.numel():
            regions.add((int(target.storage_offset()), tuple(target.shape), tuple(target.stride())))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: Callable[[torch.Tensor], None], sources: "_Sources", unread: dict[str, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._sources, self._unread = record, sources, unread

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WRITES:
            self._record(args[0])
        for argument in args:
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:  # others have no storage to ask
                    self._unread.pop(self._sources.name_of(tensor), None)
        return func(*args, **(kwargs or {}))


class _Sources:
    """The names of tensors that lie one after another in shared memory, by any view of them."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._starts: dict[int, list[tuple[int, str]]] = {}
        for name, tensor in named:
            self._starts.setdefault(_storage(tensor), []).append((_byte(tensor), name))
        for starts in self._starts.values():
            starts.sort()

    def name_of(self, tensor: torch.Tensor) -> str:
        """Returns the name of what `tensor` is a view of; empty for anything else."""
        starts = self._starts.get(_storage(tensor))
        return starts[bisect_right(starts, _byte(tensor), key=lambda start: start[0]) - 1][1] if starts else ""


def _byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _num_elements(regions: set[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> int:
    """Elements in the union of `regions`; a region with gaps counts as if it overlapped no other."""
    spans, gapped = [], 0
    for offset, shape, stride in regions:
        numel = torch.Size(shape).numel()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if extent == numel:
            spans.append((offset, offset + numel))
        else:
            gapped += numel
    total, end = 0, -1
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total + gapped
