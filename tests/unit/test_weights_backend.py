"""Which collectives the weight channel uses: one rule, the actor's, from what is so on both sides."""

import pytest

from services.actor.config import channel_backend
from tests.conftest import MakeSettings


@pytest.mark.parametrize(
    ("devices", "receivers_on_gpus", "backend"),
    [((0,), True, "nccl"), ((0,), False, "gloo"), ((), True, "gloo"), ((), False, "gloo")],
)
def test_nccl_needs_gpus_on_both_sides(
    make_settings: MakeSettings, devices: tuple[int, ...], receivers_on_gpus: bool, backend: str
) -> None:
    settings = make_settings(actor={"devices": devices, "address": "10.0.0.1:9000"})
    assert channel_backend(settings, receivers_on_gpus) == backend


def test_the_actors_file_overrules(make_settings: MakeSettings) -> None:
    assert channel_backend(make_settings(actor={"devices": [0]}, weights={"backend": "gloo"}), True) == "gloo"
