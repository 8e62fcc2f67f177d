"""What cannot fit a machine is refused with figures; what may is not."""

from pathlib import Path

import pytest

from rolecall.commands.capacity import check_capacity, gpu_memory_bytes, host_memory_bytes
from rolecall.data.model_files import ModelFacts
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from tests.conftest import MakeSettings

SEVEN_B = ModelFacts(architecture="Qwen3ForCausalLM", num_parameters=7_000_000_000, largest_layer=200_000_000)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs of 80 GiB, by an nvidia-smi that says so."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo $i, 81920; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def lines(settings: RunSettings) -> list[str]:
    return list(check_capacity(settings, SEVEN_B))


def test_memory_is_the_machines_or_what_its_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree:        1 kB\n")
    assert host_memory_bytes(tmp_path, tmp_path / "none") == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 2**30
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 2**29


@pytest.mark.usefixtures("gpus")
def test_roles_on_gpus_are_held_against_the_memory_of_each(make_settings: MakeSettings) -> None:
    assert gpu_memory_bytes() == dict.fromkeys(range(4), 80 * 2**30)
    rollout = {"devices": [[3]], "kv_cache_bytes": 2**33}
    (told,) = lines(make_settings(actor={"devices": [0, 1], "num_ranks": 2}, rollout=rollout))
    assert "GPU 3 80.0 GiB" in told
    with pytest.raises(
        ConfigError,
        match=r"actor needs at least 104.3 GiB on GPU 0, and no GPU of this machine has more than 80.0 GiB; "
        r"use more GPUs for it",
    ):
        lines(make_settings(actor={"devices": [0]}, rollout=rollout))
    lines(make_settings(actor={"devices": [0], "optimizer": {"offload": True}}, rollout=rollout))
    lines(make_settings(actor={"address": "elsewhere:1"}, rollout=rollout))
    with pytest.raises(
        ConfigError, match=r"rollout needs at least 109.4 GiB on GPU 3, and no GPU of this machine has more"
    ):
        lines(
            make_settings(
                actor={"devices": [0, 1], "num_ranks": 2}, rollout={"devices": [[3]], "kv_cache_bytes": 96 * 2**30}
            )
        )


def test_gpus_that_nobody_tells_of_are_not_judged(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines(make_settings(actor={"devices": [0]}, rollout={"devices": [[1]]}))
