"""Activations on the host: which tensors go, when they come back, and that no number changes."""

from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rolecall.training.model.activation_offload import LEAST_BYTES, ActivationOffload, Copies

CPU = torch.device("cpu")
WIDTH = 64
ROWS = LEAST_BYTES // (4 * WIDTH)


class Layer(nn.Module):
    """Saves its input, a hidden tensor twice (as it is and as a view), its own weights, and a table that all layers
    share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.hidden: list[StorageWeakRef] = []
        self.inputs: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.inputs.append(StorageWeakRef(x.untyped_storage()))  # type: ignore[no-untyped-call]
        hidden = self.inner(x) * table
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))  # type: ignore[no-untyped-call]
        result: torch.Tensor = x + self.outer(torch.tanh(hidden).t().t()) * hidden
        return result


class Model(nn.Module):
    def __init__(self, num_layers: int, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 3)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0, 1, x.numel(), device=x.device).view_as(x)
        for layer in self.layers:
            x = checkpoint(layer, x, table=table, use_reentrant=False) if self.recompute else layer(x, table)
        result: torch.Tensor = self.head(x).logsumexp(-1).sum()
        return result


def num_alive(storages: Iterable[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)  # type: ignore[no-untyped-call]


class CountedCopies(Copies):
    """Copies that are counted."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_to_host = self.num_to_device = self.most_at_once = 0
        self._fetched: list[StorageWeakRef] = []

    def to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        self.num_to_host += 1
        return super().to_host(storage)

    def to_device(self, host: torch.Tensor) -> torch.UntypedStorage:
        self.num_to_device += 1
        storage = super().to_device(host)
        self._fetched.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self.most_at_once = max(self.most_at_once, num_alive(self._fetched))
        return storage


def train(
    num_layers: int, *, recompute: bool, copies: Copies | None, num_passes: int = 2
) -> tuple[Model, list[tuple[int, int]]]:
    """The model with its gradients, and how many layers' inputs and hidden tensors were alive between forward and
    backward of each pass.
    """
    model = Model(num_layers, recompute)
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    activations = ActivationOffload(layers, copies) if copies else None
    alive = []
    for index in range(num_passes):
        generator = torch.Generator().manual_seed(index)
        with activations.recording() if activations else nullcontext():
            loss = model(torch.randn(ROWS, WIDTH, generator=generator))
        alive.append((num_alive(layer.inputs[-1] for layer in layers), num_alive(layer.hidden[-1] for layer in layers)))
        loss.backward()
    return model, alive


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_gradients_are_bit_equal_with_and_without(num_layers: int, recompute: bool) -> None:
    plain, _ = train(num_layers, recompute=recompute, copies=None)
    offloaded, _ = train(num_layers, recompute=recompute, copies=Copies(CPU))
    for one, other in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_between_forward_and_backward_only_the_last_layer_keeps_its_tensors() -> None:
    assert train(5, recompute=False, copies=None)[1] == [(5, 5)] * 2
    assert train(5, recompute=False, copies=Copies(CPU))[1] == [(1, 1)] * 2


def test_of_recomputed_layers_only_the_last_ones_input_stays() -> None:
    assert train(5, recompute=True, copies=None)[1] == [(5, 0)] * 2
    assert train(5, recompute=True, copies=Copies(CPU))[1] == [(1, 0)] * 2


def test_views_move_once_weights_never_and_a_table_that_layers_share_at_most_once() -> None:
    copies = CountedCopies()
    train(4, recompute=False, copies=copies, num_passes=1)
    # input, hidden, its tanh and the outer output: of three layers; and the table, met in the first
    assert copies.num_to_host == copies.num_to_device == 3 * 4 + 1


def test_backward_has_two_layers_on_the_device_at_once_one_in_use_and_one_ahead() -> None:
    copies = CountedCopies()
    train(6, recompute=True, copies=copies, num_passes=1)
    assert (copies.num_to_device, copies.most_at_once) == (5, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_on_a_gpu_gradients_are_bit_equal_and_memory_is_saved(recompute: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(ROWS * 64, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    gradients, peaks = [], []
    for offload in (False, True):
        model = Model(12, recompute).to(device)
        activations = ActivationOffload(list(model.layers), Copies(device))
        for _ in range(3):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)  # weights, input, the workspace of products
            with activations.recording() if offload else nullcontext():
                loss = model(x)
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        peaks.append(torch.cuda.max_memory_allocated(device) - held)
        del model, loss
    assert all(
        torch.equal(one, other) for one, other in zip(*gradients, strict=True) if one is not None and other is not None
    )
    assert peaks[1] < 0.8 * peaks[0]  # layers this small are computed before their copies are made
