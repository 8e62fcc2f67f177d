"""What is copied of parameters before they are computed with, on one rank and on two, and that keeping the copies
changes no number.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolecall.settings import LoraSection
from rolecall.training.account.memory import MemoryLostError
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import local_part
from rolecall.training.model.packed_model import layers
from tests import forks
from tests.checkpoint_rig import load, save
from tests.integration import gathered_ranks
from tests.integration.fsdp_oracle import assert_same_weights
from tests.integration.fsdp_ranks import weights_of
from tests.integration.gathered_ranks import WAYS, WORLD_SIZE, RoomFor, make_engine, one_step

pytestmark = pytest.mark.usefixtures("one_rank")


def computed_with(engine: FsdpEngine, step: int = 0) -> dict[str, set[int]]:
    """Addresses of each of the layers' parameters as their passes saw it, in one step."""
    seen: dict[str, set[int]] = {}

    def note(layer: torch.nn.Module, _: Any) -> None:
        for name, parameter in layer.named_parameters():
            seen.setdefault(f"{names[layer]}.{name}", set()).add(local_part(parameter).data_ptr())

    names = {layer: str(number) for number, layer in enumerate(layers(engine._model))}
    handles = [layer.register_forward_pre_hook(note) for layer in names]
    one_step(engine, step)
    for handle in handles:
        handle.remove()
    return seen


def kept_by(engine: FsdpEngine) -> dict[str, set[int]]:
    """Addresses of the layers' parameters that the optimizer changes."""
    return {
        f"{number}.{name}": {local_part(parameter).data_ptr()}
        for number, layer in enumerate(layers(engine._model))
        for name, parameter in layer.named_parameters()
    }


@pytest.mark.parametrize("keep", [None, False, True])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_one_rank_computes_with_the_very_parameters_that_it_trains(
    models: dict[str, Path], kind: str, keep: bool | None
) -> None:
    engine = make_engine(models[kind], {"keep_gathered": keep}, "float32")
    assert computed_with(engine) == kept_by(engine)
    assert one_step(engine, 1)[2::3] == [0, 0]


def test_adapters_leave_a_base_in_half_precision_where_it_is(models: dict[str, Path]) -> None:
    adapters = LoraSection(rank=4, target_modules=("q_proj", "down_proj"))
    engine = make_engine(models["dense"], {}, "bfloat16", lora=adapters)
    seen, kept = computed_with(engine), kept_by(engine)
    base = {name for name in kept if "lora" not in name}
    assert {name: seen[name] for name in base} == {name: kept[name] for name in base}
    assert all(seen[name] != kept[name] for name in kept.keys() - base)


def test_one_rank_that_casts_computes_the_same_with_its_casts_kept(models: dict[str, Path], tmp_path: Path) -> None:
    engines = {way: make_engine(models["tied"], WAYS[way], "bfloat16") for way in ("given back", "kept")}
    found = {way: [one_step(engine, step) for step in range(2)] for way, engine in engines.items()}
    assert without_bytes(found["kept"]) == without_bytes(found["given back"])
    assert {row[2] for row in found["given back"]} == {0}
    matrices = sum(p.numel() for layer in layers(engines["kept"]._model) for p in layer.parameters())
    assert {row[2] for row in found["kept"]} == {2 * matrices}
    assert_same_weights(weights_of(engines["kept"]), weights_of(engines["given back"]), atol=0)


def test_parameters_are_not_kept_by_measure_in_a_run_that_ran_out_of_memory(
    models: dict[str, Path], tmp_path: Path
) -> None:
    memory = RoomFor(0.5, tmp_path)
    kept = make_engine(models["tied"], {}, "bfloat16", memory)
    assert one_step(kept, 0)[2::3] == [0, 0]
    assert all(num_bytes > 0 for num_bytes in one_step(kept, 1)[2::3])
    with pytest.raises(MemoryLostError, match="keep_gathered: false"), memory.phase("backward"):
        raise MemoryError
    restarted = make_engine(models["tied"], {}, "bfloat16", RoomFor(0.5, tmp_path))
    assert [one_step(restarted, step)[2::3] for step in range(2)] == [[0, 0], [0, 0]]


def test_a_checkpoint_of_one_rank_that_casts_goes_on_where_nothing_is_cast(
    models: dict[str, Path], tmp_path: Path
) -> None:
    casting = make_engine(models["dense"], WAYS["kept"], "bfloat16")
    one_step(casting, 0)
    save(casting, tmp_path / "checkpoint")
    again = make_engine(models["dense"], WAYS["given back"], "bfloat16")
    load(again, tmp_path / "checkpoint")
    assert without_bytes([one_step(again, 1)]) == without_bytes([one_step(casting, 1)])


def without_bytes(steps: list[list[float]]) -> list[list[float]]:
    return [[number for at, number in enumerate(step) if at % 3 < 2] for step in steps]


@pytest.fixture(scope="module")
def two(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks saw, and where their weights lie."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "model").symlink_to(models["dense"])
    forks.run_ranks(folder, WORLD_SIZE, gathered_ranks.main, folder)
    return folder, [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_compute_the_same_bits_with_parameters_kept(
    two: tuple[Path, list[dict[str, Any]]], dtype: str
) -> None:
    folder, seen = two
    for gradients in ("", ", unsharded gradients"):
        for rank in range(WORLD_SIZE):
            base = seen[rank][f"{dtype} given back{gradients}"]["steps"]
            expected = load_file(folder / f"{dtype}-given back{gradients}-{rank}.safetensors")
            for way in (f"kept{gradients}", *(("as measured",) if not gradients else ())):
                assert without_bytes(seen[rank][f"{dtype} {way}"]["steps"]) == without_bytes(base)
                assert_same_weights(load_file(folder / f"{dtype}-{way}-{rank}.safetensors"), expected, atol=0)


def test_kept_parameters_are_gathered_once_for_each_change(two: tuple[Path, list[dict[str, Any]]]) -> None:
    num_layers = 2
    for rank in two[1]:
        # two mini-batches, and before the first a pass of their parameters; the layers, and the root's own
        assert rank["float32 kept"]["gathers"] == 2 * (num_layers + 1)
        # nine passes forward, of which six go back; the root stays between forward and backward and between the first
        assert rank["float32 given back"]["gathers"] > 15 * num_layers


def test_a_checkpoint_goes_on_whether_parameters_are_kept_or_not(two: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in two[1]:
        first, *others = without_bytes(rank["loaded"])
        assert others == [first, first]


def test_parameters_are_kept_where_every_rank_has_room_and_not_again_once_given_up(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in two[1]:
        measured = [step[2::3] for step in rank["float32 as measured"]["steps"]]
        copy = measured[1][1]
        assert copy > 0
        # the first mini-batch is measured without the moments; what was chosen holds from the next one on
        assert measured == [[0, 0], [copy, copy]]
        assert rank["tight"] == [[0, 0], [0, copy], [copy, 0], [0, 0]]
