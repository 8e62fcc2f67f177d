"""Which way the weights take: one rule, from what is so on both sides, and the ways' names on the wire."""

from typing import Any, get_args

import pytest

from rolecall.errors import InvalidInputError
from rolecall.settings import LoraSection, WeightBackend
from rolecall.v1 import weights_pb2
from rolecall.weights.backends import decode_backend, encode_backend
from tests.conftest import MakeSettings


@pytest.mark.parametrize(
    ("devices", "receivers_on_gpus", "backend"),
    [((0,), True, "nccl"), ((0,), False, "shared"), ((), True, "shared"), ((), False, "shared")],
)
def test_nccl_needs_gpus_on_both_sides(
    make_settings: MakeSettings, devices: tuple[int, ...], receivers_on_gpus: bool, backend: str
) -> None:
    weights = make_settings(actor={"devices": devices, "address": "10.0.0.1:9000"}).weights
    chosen = weights.backend_between(actor_on_gpus=bool(devices), receivers_on_gpus=receivers_on_gpus)
    assert chosen == backend


def test_the_actors_file_overrules(make_settings: MakeSettings) -> None:
    weights = make_settings(actor={"devices": [0]}, weights={"backend": "gloo"}).weights
    assert weights.backend_between(actor_on_gpus=True, receivers_on_gpus=True) == "gloo"


@pytest.mark.parametrize("backend", get_args(WeightBackend))
def test_every_back_end_has_a_value_on_the_wire(backend: WeightBackend) -> None:
    assert decode_backend(encode_backend(backend)) == backend


def test_a_value_that_names_no_back_end_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="backend 0"):
        decode_backend(weights_pb2.WEIGHT_BACKEND_UNSPECIFIED)


def test_deltas_go_through_host_memory_also_where_all_are_on_gpus(make_settings: MakeSettings) -> None:
    weights = make_settings(actor={"devices": [0]}, weights={"deltas": True}).weights
    assert weights.backend_between(actor_on_gpus=True, receivers_on_gpus=True) == "shared"


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"weights": {"deltas": True, "backend": "shared"}}, "does nothing over shared"),
        ({"weights": {"deltas": True, "backend": "nccl"}}, "does nothing over nccl"),
        ({"weights": {"deltas": True}, "actor": {"lora": {}}}, "adapters are small"),
        ({"weights": {"host": "0.0.0.0"}}, "'0.0.0.0' is every interface"),
        ({"weights": {"host": "::"}}, "'::' is every interface"),
        ({"weights": {"host": ""}}, "'' is every interface"),
        ({"weights": {"merge_adapters": True}}, "the actor has no adapters"),
    ],
)
def test_what_means_nothing_for_the_weights_is_refused(
    make_settings: MakeSettings, sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        make_settings(**sections)


def test_merged_adapters_are_published_as_a_whole_model_is(make_settings: MakeSettings) -> None:
    lora = {"rank": 8}
    settings = make_settings(actor={"lora": lora}, weights={"merge_adapters": True, "deltas": True})
    assert (settings.actor.lora, settings.published_adapters) == (LoraSection(**lora), None)
    assert make_settings(actor={"lora": lora}).published_adapters == LoraSection(**lora)
