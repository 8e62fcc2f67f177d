"""What `rolecall check` says of the file of `rolecall sft`, which starts nothing while something is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.launcher.plan import write_config
from rolecall.settings import load_sft_settings
from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer
from tests.twins.launched import write_model
from tests.unit.test_megatron_stages import write_shapes

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "eos_token_id": EOS_TOKEN_ID,
}
LAYER = 192_946_432
"""Parameters of one."""
EXAMPLE = '{"prompt": "2 + 2", "response": "4"}\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fine-tuning of 8B with 8k tokens on one GPU of 80 GB."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, 81559\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shapes = {f"model.layers.{layer}.mlp.gate_proj.weight": [LAYER] for layer in range(36)}
    shapes |= {name: [151936, 4096] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write_tokenizer(write_shapes(tmp_path / "model", shapes, QWEN3_8B))
    (tmp_path / "examples.jsonl").write_text(120 * EXAMPLE)
    tree = {
        "run": {"name": "tuned", "dir": "tuned", "num_epochs": 2, "checkpoint_url": "memory://checkpoints"},
        "model": {"path": "model"},
        "data": {"train": "examples.jsonl", "max_tokens": 8192, "batch_size": 64},
        "actor": {"devices": [0]},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "sft.yaml"


def host_of(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolecall.commands.check.footprint.host_memory_bytes", lambda: num_bytes)


def checked(file: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    main(["check", str(file), *overrides])
    return capsys.readouterr().out


def test_state_that_a_gpu_cannot_hold_is_refused_with_bytes_and_remedies(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = checked(file, capsys)
    assert "\nactor.gradient_checkpointing: true, derived: without it a microbatch keeps about 119 GiB" in said
    assert (
        "PROBLEM  actor needs at least 122.1 GiB on GPU 0, and no GPU of this machine has more than 79.6 GiB; use more "
        "GPUs for it, actor.optimizer.offload, actor.lora, or a smaller model or dtype\n"
    ) in said
    assert "data.train" not in said, "which take long, and wait until all else is well"
    assert main(["sft", str(file)]) == 2
    refused = capsys.readouterr().err
    assert "actor needs at least 122.1 GiB on GPU 0" in refused
    assert not (file.parent / "tuned").exists()


def test_moments_in_host_memory_have_to_fit_there(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = "--actor.optimizer.offload=true"
    host_of(256 * 2**30, monkeypatch)
    said = checked(file, capsys, offload)
    assert "actor needs" not in said
    assert "host memory (estimate): 91.5 GiB while a checkpoint is copied and written, beside 61.0 GiB of mom" in said
    assert "NOTE the trainers put" not in said
    host_of(128 * 2**30, monkeypatch)
    noted = "NOTE the trainers put up to 152.6 GiB into this machine's memory, which has 128.0 GiB; give it more or tra"
    assert noted in checked(file, capsys, offload)
    host_of(32 * 2**30, monkeypatch)
    refused = "PROBLEM  the trainers keep at least 61.0 GiB in this machine's memory, which has 32.0 GiB; give it more"
    assert refused in checked(file, capsys, offload)


def test_a_pass_that_outgrows_the_gpu_is_noted(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_of(256 * 2**30, monkeypatch)
    fits = checked(file, capsys, "--actor.optimizer.offload=true")
    assert "a pass of 16384 tokens (estimate): 8.5 GiB of activations a rank, with gradient_checkpointing" in fits
    assert "NOTE" not in fits
    noted = checked(file, capsys, "--actor.optimizer.offload=true", "--data.max_tokens=40000")
    assert "\nactor.token_budget: 40000, derived: data.max_tokens; at least 16384\n" in noted
    assert "NOTE actor: at the height of a pass a rank takes about" in noted
    assert "or shorten examples (data.max_tokens)\n" in noted
    assert "20.8 GiB of activations" in noted


def test_what_fits_is_read_to_its_end(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(file.parent / "model")
    here = ("--actor.devices=[]", "--data.max_tokens=32")
    too_long = json.dumps({"prompt": "2 + 2" * 50, "response": "4"}) + "\n"
    with (file.parent / "examples.jsonl").open("a") as examples:
        examples.write(too_long)
    assert main(["check", str(file), *here]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"run tuned: 2 epoch(s), seed 0, directory {file.parent}/tuned (is new)\n")
    assert "placement: all on CPUs" in said
    assert "NOTE no role here has devices, so that none computes on the GPUs of this machine, which has 1; give" in said
    assert f"\ndata.train: {file.parent}/examples.jsonl, 121 examples; of the first 100 the longest that fits" in said
    assert "and 0 exceed data.max_tokens 32 and will be left out\nok: nothing was started\n" in said
    with (file.parent / "examples.jsonl").open("a") as examples:
        examples.write("{}\n")
    assert main(["check", str(file), *here]) == 2
    assert "PROBLEM" in (said := capsys.readouterr().out)
    assert "line 122: no field 'prompt'" in said


def test_the_first_examples_of_each_file_are_rendered(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A response that goes on after its end is seen in the second file, too, whose examples are after many others."""
    write_model(file.parent / "model")
    (file.parent / "bad.jsonl").write_text(json.dumps({"prompt": "a", "response": "b<|im_end|>c"}) + "\n")
    both = f"--data.train=[{file.parent}/examples.jsonl, {file.parent}/bad.jsonl]"
    said = checked(file, capsys, "--actor.devices=[]", "--data.max_tokens=32", both)
    assert "examples.jsonl, 120 examples; of the first 100" in said
    assert f"PROBLEM  {file.parent}/bad.jsonl, line 1" in said


def test_what_a_folder_keeps_is_derived_again_of_what_is_overridden(file: Path) -> None:
    settings = load_sft_settings(file)
    assert settings.actor.gradient_checkpointing
    settings.run.dir.mkdir()
    written = write_config(settings)
    assert load_sft_settings(written).actor == settings.actor
    assert not load_sft_settings(written, ["actor.devices=[]"]).actor.gradient_checkpointing
    given = load_sft_settings(written, ["actor.gradient_checkpointing=false", "actor.token_budget=8192"])
    assert not given.derived_sizes
    assert given.actor.token_budget == 8192
