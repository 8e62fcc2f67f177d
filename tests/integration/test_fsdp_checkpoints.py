"""What FsdpEngine writes and reads: checkpoints that go on bit for bit, exports, full disks, what is half written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError, DiskFullError
from rolecall.settings import LoraSection
from rolecall.training.model.huggingface import write_model
from rolecall.training.serving.hooks import nothing
from tests.checkpoint_rig import exported, load, save
from tests.file_sizes import files_up_to
from tests.integration.fsdp_oracle import assert_same_weights, make_engine
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of
from tests.tiny_models import write_glm4_moe, write_qwen3

pytestmark = pytest.mark.usefixtures("one_rank")


def test_resuming_on_one_rank_is_bit_equal(models: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(10)
    straight = make_engine(models["tied"])
    for step in range(2):
        train_step(straight, rows, token_budget=64, seed=step)
    assert save(straight, tmp_path)
    resumed = make_engine(models["tied"])
    load(resumed, tmp_path)
    for step in (2, 3):
        assert train_step(straight, rows, token_budget=64, seed=step) == train_step(
            resumed, rows, token_budget=64, seed=step
        )
    assert_same_weights(weights_of(straight), weights_of(resumed), atol=0)
    assert resumed.num_updates == 4


def test_an_exported_directory_is_a_plain_hugging_face_model(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(models["tied"])
    train_step(engine, make_rows(4), token_budget=64, seed=0)
    save(engine, tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "again")
    assert_same_weights(weights_of(engine), load_file(tmp_path / "again" / "model.safetensors"), atol=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_biases_of_routers_are_published_kept_and_exported_as_they_were_in_half_precision(tmp_path: Path) -> None:
    source = write_glm4_moe(tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    expected = {name: tensor for name, tensor in stored.items() if name.endswith("e_score_correction_bias")}
    engine = make_engine(source, dtype="bfloat16")
    adapted = make_engine(source, dtype="bfloat16", lora=LoraSection(rank=2, target_modules=["q_proj"]))
    found = [weights_of(engine), weights_of(make_engine(source, dtype="bfloat16", optimizer=None))]
    for name, each in (("checkpoint", engine), ("adapters", adapted)):
        save(each, tmp_path / name)
        found.append(load_file(exported(tmp_path / name) / "model.safetensors"))
    for weights in found:
        assert weights.keys() == stored.keys()
        assert_same_weights({name: weights[name] for name in expected}, expected, atol=0)
        assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert len(expected) == 2


def test_an_export_has_every_chat_template_of_its_tokenizer(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    digest = ChatTokenizer(source).digest
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "TOOLS " + tokenizer.chat_template}
    tokenizer.save_pretrained(source)
    save(make_engine(source), tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint")
    assert AutoTokenizer.from_pretrained(model).chat_template == tokenizer.chat_template
    assert ChatTokenizer(model).digest == ChatTokenizer(source).digest != digest
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    assert ChatTokenizer(source).digest != ChatTokenizer(model).digest


def test_an_export_has_the_run_s_own_chat_template_in_place_of_all_others(tmp_path: Path) -> None:
    source = write_qwen3(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "theirs", "tool_use": "theirs, with tools"}
    tokenizer.save_pretrained(source)
    config = source / "tokenizer_config.json"
    plain = json.loads(config.read_text())
    config.write_text(json.dumps(plain | {"chat_template": "theirs, for readers that know this place alone"}))
    # of a processor these two go before chat_template.jinja
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "theirs, with images"}))
    processor = {"image_processor": {"patch_size": 4}}
    whole = source / "processor_config.json"
    whole.write_text(json.dumps(processor | {"chat_template": "theirs, with images"}))
    save(make_engine(source, chat_template="mine"), tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint")
    assert not (model / "chat_template.json").exists()
    assert json.loads((model / "processor_config.json").read_text()) == processor
    assert AutoTokenizer.from_pretrained(model).chat_template == "mine"
    assert json.loads((model / "tokenizer_config.json").read_text()) == plain


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_an_export_is_loaded_as_it_was_written_whatever_the_source_says(tmp_path: Path, dtype: str | None) -> None:
    source = write_qwen3(tmp_path / "source", dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "auto_map": {"AutoModelForCausalLM": "modeling_theirs.Theirs"}}
    (source / "config.json").write_text(json.dumps(config))
    engine = make_engine(source, dtype="float16")
    train_step(engine, make_rows(4), token_budget=64, seed=0)
    save(engine, tmp_path / "checkpoint")
    model = exported(tmp_path / "checkpoint", dtype)
    written = json.loads((model / "config.json").read_text())
    assert written["dtype"] == (dtype or "float16")
    assert not written.keys() & {"torch_dtype", "auto_map"}
    loaded = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, tensor in load_file(model / "model.safetensors").items():
        assert torch.equal(tensor, loaded[name])
        assert tensor.dtype == loaded[name].dtype


def test_no_file_of_a_checkpoint_is_a_pickle(models: dict[str, Path], tmp_path: Path) -> None:
    save(make_engine(models["dense"]), tmp_path)
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja", ".txt"}


def test_a_full_disk_is_named_and_leaves_the_engine_usable(models: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(models["dense"])
    with files_up_to(100_000), pytest.raises(DiskFullError, match="no space"):
        save(engine, tmp_path / "full")
    assert save(engine, tmp_path / "roomy")


def test_an_export_to_a_full_disk_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    weights = make_engine(models["dense"]).named_weights()
    with files_up_to(100_000), pytest.raises(DiskFullError, match="export"):
        write_model(tmp_path / "out", models["dense"], weights, progressed=nothing)


def test_a_half_written_checkpoint_is_missing_and_another_models_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    save(make_engine(models["dense"]), tmp_path)
    with pytest.raises(CheckpointMismatchError, match="lm_head"):
        load(make_engine(models["tied"]), tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(CheckpointMissingError):
        load(make_engine(models["dense"]), tmp_path)
