"""`rolecall sft` as people call it: the same losses on one rank and on two, the same bits after kill -9, and a model
that a run can start from.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rolecall.checkpoint.manifest import IDENTITY, RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.cli import main
from rolecall.data.model.files import read_model
from rolecall.data.sft_examples import load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import DiskFullError
from rolecall.identity import kept
from rolecall.settings import SftDataSection, SftRunSection
from rolecall.training.sft.checkpoints import SftCheckpoints
from tests.integration.fsdp_ranks import make_engine
from tests.integration.sft_ranks import context_of
from tests.tiny_models import write_qwen3, write_qwen3_moe
from tests.tiny_tokenizer import EOS_TOKEN_ID, QWEN3_TEMPLATE, write_tokenizer

pytestmark = pytest.mark.timeout(400)

NUM_STEPS = 12
PROMPT_TOKENS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "dense", hidden=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 29 examples 28 fit; batches of 8 leave 4 for the last of each epoch."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    rows = [{"prompt": f"sort: {''.join(rng.sample('0123456789', k=2 + i % 7))}"} for i in range(28)]
    rows = [{**row, "response": "".join(sorted(row["prompt"][6:]))} for row in rows] + [
        {"prompt": "x" * 2 * PROMPT_TOKENS, "response": "too long"}
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    return folder


def write_config(folder: Path, model: Path, data: Path, /, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tree = {
        "run": {"name": "warm", "dir": "run", "num_steps": NUM_STEPS, "checkpoint_every_steps": 4, "seed": 5},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(data / "train.jsonl"), "max_tokens": PROMPT_TOKENS, "batch_size": 8},
        "evaluation": {"path": str(data / "heldout.jsonl"), "every_steps": 6},
        "actor": {"num_threads": 1, "token_budget": PROMPT_TOKENS, "optimizer": {"learning_rate": 1e-3}},
        "trackers": {"tensorboard": False},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(tree | sections))
    return path


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "rolecall", "sft", str(config), *more]


def sft(config: Path, *more: str) -> str:
    """What the command says; it must succeed."""
    answer = subprocess.run(command(config, *more), capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr + (config.parent / "run" / "logs" / "sft.log").read_text()[-3000:]
    return answer.stdout


def metrics_of(config: Path, name: str) -> dict[int, float]:
    """By step; of a step that was made twice the last."""
    lines = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row[name] for row in map(json.loads, lines) if name in row}


def exported(config: Path) -> dict[str, torch.Tensor]:
    model = config.parent / "exported"
    command = [sys.executable, "-m", "rolecall", "export", str(config.parent / "run"), str(model)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return load_file(model / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> tuple[Path, str]:
    """A `rolecall sft` on one rank that nothing disturbed: its configuration and what it said."""
    config = write_config(tmp_path_factory.mktemp("whole") / "job", model, data)
    return config, sft(config)


def test_it_says_what_it_does_and_how_to_go_on(whole: tuple[Path, str]) -> None:
    config, said = whole
    phases = [line.removeprefix("starting  ").split()[0] for line in said.splitlines() if line.startswith("starting")]
    assert phases == ["checking", "the", "tokenizing", "loading"]
    assert "28 examples, 1 refused (longer than data.max_tokens), 12 steps, 4 an epoch, from step 0\n" in said
    assert f"rolecall export {config.parent / 'run'} MODEL" in said
    assert metrics_of(config, "data/too_long") == {0: 1.0}
    newest = RunCheckpoints(open_storage(str(config.parent / "run" / "checkpoints")), 2).latest()
    assert newest is not None
    assert newest.state[IDENTITY] == kept(config.parent / "run") != {}
    sample = json.loads((config.parent / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<|im_start|>user\nsort: ")
    assert sample["prompt"].endswith("<|im_start|>assistant\n")
    assert sample["response"].endswith("<|im_end|>")
    heldout = metrics_of(config, "eval/loss")
    assert sorted(heldout) == [0, 6, 12]
    assert heldout[12] < heldout[6] < heldout[0]
    assert sorted(metrics_of(config, "sft/loss")) == list(range(1, NUM_STEPS + 1))


def test_one_that_is_done_is_well_where_nobody_reads_what_it_says(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0].parent, tmp_path / "job")
    reader, writer = os.pipe()
    os.close(reader)
    again = command(tmp_path / "job" / whole[0].name, "--resume")
    answer = subprocess.run(again, stdout=writer, stderr=subprocess.PIPE, timeout=300)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_its_checkpoint_becomes_the_model_of_a_run(whole: tuple[Path, str], data: Path) -> None:
    config, _ = whole
    weights = exported(config)
    path = config.parent / "exported"
    assert read_model(path).num_parameters == sum(tensor.numel() for tensor in weights.values())
    tokenizer, network = ChatTokenizer(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total, num_tokens = 0.0, 0
    for row in map(json.loads, (data / "heldout.jsonl").read_text().splitlines()):
        prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": row["prompt"]}]))
        response = [*tokenizer.encode(row["response"]), 2]
        with torch.no_grad():
            logprobs = network(torch.tensor([[*prompt, *response]])).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs[len(prompt) - 1 :].gather(1, torch.tensor(response)[:, None]).sum())
        num_tokens += len(response)
    assert metrics_of(config, "eval/loss")[NUM_STEPS] == pytest.approx(total / num_tokens, rel=1e-5)


def test_every_turn_of_conversations_with_tools_is_learned(tmp_path: Path) -> None:
    """Two questions each, of which the second begins a segment; held to Hugging Face's own log-probabilities. The base
    has no chat template, and what is exported has the one that was named.
    """
    model = write_qwen3(tmp_path / "dense", hidden=32)
    (model / "chat_template.jinja").unlink()
    (tmp_path / "qwen3.jinja").write_text(QWEN3_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "sort", "parameters": {"type": "object"}}}]
    rows, rng = [], random.Random(1)
    for _ in range(16):
        talk: list[dict[str, Any]] = []
        for digits in ("".join(rng.sample("0123456789", k=3)) for _ in range(2)):
            answer = "".join(sorted(digits))
            made = {"type": "function", "function": {"name": "sort", "arguments": json.dumps({"digits": digits})}}
            talk += [
                {"role": "user", "content": digits},
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [made]},
                {"role": "tool", "content": answer},
                {"role": "assistant", "content": answer, "reasoning_content": "so"},
            ]
        rows.append({"prompt": talk, "tools": tools})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    config = write_config(tmp_path / "job", model, tmp_path, aggregation="seq_mean_token_mean")
    named = f"--model.chat_template={tmp_path / 'qwen3.jinja'}"
    sft(config, named, "--data.max_tokens=500", "--actor.token_budget=1500", "--data.batch_size=4")
    losses = metrics_of(config, "sft/loss")
    assert losses[NUM_STEPS] < losses[1] - 0.5
    exported(config)
    section = SftDataSection(train=tmp_path / "heldout.jsonl", batch_size=1)
    examples = load_examples(section.train, section, "data.train")
    tokenizer = ChatTokenizer(config.parent / "exported")
    network = AutoModelForCausalLM.from_pretrained(config.parent / "exported", dtype=torch.float32)
    total, num_tokens, num_segments = 0.0, 0, 0
    for segments in tokenize(examples, tokenizer, EOS_TOKEN_ID, 500).rows:
        num_segments += len(segments)
        for segment in segments:
            ids = torch.from_numpy(segment["token_ids"]).long()
            trained = torch.from_numpy(segment["loss_mask"])[1:] != 0
            with torch.no_grad():
                logprobs = network(ids[None]).logits[0, :-1].log_softmax(-1)
            total -= float(logprobs.gather(1, ids[1:, None])[trained].sum())
            num_tokens += int(trained.sum())
    assert num_segments == 6
    assert metrics_of(config, "eval/loss")[NUM_STEPS] == pytest.approx(total / num_tokens, rel=1e-5)


@pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one")
@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_have_the_losses_of_one(
    whole: tuple[Path, str], model: Path, data: Path, tmp_path: Path, sequence: int
) -> None:
    config = write_config(tmp_path / "job", model, data)
    sft(config, "--actor.num_ranks", "2", f"--actor.parallel.sequence={sequence}")
    for name in ("sft/loss", "eval/loss", "sft/grad_norm"):
        assert metrics_of(config, name) == pytest.approx(metrics_of(whole[0], name), rel=1e-5), name


ENDED = """
import os, pathlib, signal

def fail(number, frame):
    raise RuntimeError("out of memory")

signal.signal(signal.SIGUSR1, fail)

class Ended:
    def __init__(self, run, path, number): self.path, self.number = pathlib.Path(path), number
    def log(self, step, values):
        if step == 1: os.kill(os.getpid(), self.number)
    def keep_samples(self, step, samples): pass
    def close(self): pass
    def end(self, how):
        with self.path.open("a") as file: file.write(how.name + "\\n")
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as programs of a terminal have it; those that a shell began in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "code", "end"),
    [
        pytest.param(0, 0, "DONE", marks=pytest.mark.thorough("test_trackers_are_told_how_it_ended")),
        pytest.param(signal.SIGINT, 130, "STOPPED", marks=pytest.mark.thorough("test_trackers_are_told_how_it_ended")),
        (signal.SIGUSR1, 1, "FAILED"),
        (signal.SIGKILL, 1, "FAILED"),
    ],
)
def test_trackers_are_told_how_it_ended(
    model: Path, data: Path, tmp_path: Path, number: int, code: int, end: str
) -> None:
    """The tracker sends `number` to its process after the first step."""
    (tmp_path / "ended.py").write_text(ENDED)
    told = tmp_path / "told"
    custom = {"function": f"{tmp_path}/ended:Ended", "options": {"path": str(told), "number": int(number)}}
    run = {"name": "warm", "dir": "run", "num_steps": 100000 if number else 2}
    trackers = {"tensorboard": False, "custom": custom}
    config = write_config(tmp_path / "job", model, data, run=run, trackers=trackers)
    answer = subprocess.run(command(config), capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == code, answer.stderr
    assert told.read_text().split() == [end]


@pytest.mark.parametrize(
    ("num_ranks", "number"),
    [
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.thorough("test_one_that_is_asked_to_stop_says_how_to_go_on")),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_one_that_is_asked_to_stop_says_how_to_go_on(
    model: Path, data: Path, tmp_path: Path, num_ranks: int, number: signal.Signals
) -> None:
    """The signal is the command's alone, as of `kill`. A terminal that goes stops nothing under nohup."""
    (tmp_path / "ended.py").write_text(ENDED)
    told = tmp_path / "told"
    custom = {"function": f"{tmp_path}/ended:Ended", "options": {"path": str(told), "number": 0}}
    config = write_config(tmp_path / "job", model, data, trackers={"tensorboard": False, "custom": custom})
    more = ["--run.num_steps=100000", "--evaluation.every_steps=0", f"--actor.num_ranks={num_ranks}"]
    process = subprocess.Popen(["nohup", *command(config, *more)], stdout=subprocess.PIPE, text=True)
    checkpoints, deadline = config.parent / "run" / "checkpoints", time.monotonic() + 200
    folder = RunCheckpoints(open_storage(str(checkpoints)), 2)

    def wait_for(num_steps: int) -> None:
        while not folder.steps() or folder.steps()[-1] < num_steps:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)

    wait_for(4)
    process.send_signal(signal.SIGHUP)
    wait_for(folder.steps()[-1] + 8)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.endswith("interrupted: --resume goes on from the newest checkpoint\n")
    assert told.read_text().split() == ["STOPPED"]


@pytest.mark.thorough("test_killed_trainers_end_with_the_weights_of_trainers_that_were_never_killed")
def test_killed_at_any_step_it_goes_on_bit_by_bit(
    whole: tuple[Path, str], model: Path, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "job", model, data)
    process = subprocess.Popen(command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints, deadline = (
        RunCheckpoints(open_storage(str(config.parent / "run" / "checkpoints")), 2),
        time.monotonic() + 200,
    )
    while not checkpoints.steps():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    _wait_until_unlocked(config.parent / "run", deadline)
    assert checkpoints.steps()[-1] < NUM_STEPS, "it was done before it was killed"
    said = sft(config, "--resume")
    assert 0 < int(said.partition("from step ")[2].split()[0]) < NUM_STEPS
    for name in ("sft/loss", "sft/grad_norm", "sft/learning_rate"):
        assert metrics_of(config, name) == metrics_of(whole[0], name), name
    ours, theirs = exported(config), load_file(_exported_once(whole[0]) / "model.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.thorough("test_trackers_are_told_how_it_ended")
def test_a_rank_that_is_lost_is_named_and_not_the_collective_that_it_left(
    model: Path, data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "job", model, data)
    more = ["--run.num_steps=100000", "--evaluation.every_steps=0", "--actor.num_ranks=2"]
    process = subprocess.Popen(command(config, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not RunCheckpoints(open_storage(str(config.parent / "run" / "checkpoints")), 2).steps():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    next(each for each in below if each.environ().get("RANK") == "1").kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1" in said
    assert "Connection" not in said


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_does_not_fit_gives_its_room_back(tmp_path: Path, data: Path) -> None:
    """Where files may have 2 MB, the state fits, and what is copied after it does not."""
    model = write_qwen3(tmp_path / "dense", hidden=32)
    section = SftDataSection(train=data / "train.jsonl", batch_size=1)
    loaded = load_examples(section.train, section, "data.train")
    examples = tokenize(loaded, ChatTokenizer(model), EOS_TOKEN_ID, PROMPT_TOKENS)
    run = SftRunSection(name="warm", dir=tmp_path / "run", num_steps=2)
    checkpoints = SftCheckpoints(run, context_of(make_engine(model)), examples)
    (model / "merges.txt").write_bytes(bytes(3_000_000))
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, most))
    try:
        checkpoints.save(1)
        with pytest.raises(DiskFullError):
            checkpoints.wait_until_written()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert [file for file in (tmp_path / "run").rglob("*") if file.is_file()] == []
    checkpoints.save(2)
    checkpoints.wait_until_written()
    assert checkpoints.restore() == 2


def test_of_two_at_once_with_one_place_for_checkpoints_one_ends_and_says_why(
    model: Path, data: Path, tmp_path: Path
) -> None:
    elsewhere = f"--run.checkpoint_url={tmp_path}/shared"
    configs = [write_config(tmp_path / name, model, data) for name in ("first", "second")]
    both = [
        subprocess.Popen(command(config, elsewhere), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for config in configs
    ]
    said = {process: process.communicate(timeout=300)[0] for process in both}
    assert sorted(process.returncode for process in both) == [0, 1], said
    refused = next(process for process in both if process.returncode)
    assert "was made by another run, and each needs a place of its own" in said[refused]


@pytest.mark.thorough("test_it_says_what_it_does_and_how_to_go_on")
def test_adapters_and_mixtures_are_fine_tuned_too(data: Path, tmp_path: Path) -> None:
    moe = write_qwen3_moe(tmp_path / "moe", vocab=288)
    write_tokenizer(moe)
    config = write_config(tmp_path / "job", moe, data)
    more = [
        "--run.num_steps",
        "2",
        "--actor.moe.balance_coef",
        "0.01",
        "--actor.lora.rank",
        "2",
        "--actor.lora.target_modules",
        "[q_proj]",
    ]
    sft(config, *more)
    assert set(metrics_of(config, "sft/router_balance")) == {1, 2}
    assert set(metrics_of(config, "sft/expert_load_max")) == {1, 2}


def test_a_fine_tuning_goes_on_without_the_folder_of_the_adapter_that_it_began_with(
    model: Path, data: Path, tmp_path: Path
) -> None:
    start, modules = tmp_path / "start", ["q_proj"]
    theirs = LoraConfig(r=2, lora_alpha=4, target_modules=modules, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), theirs).save_pretrained(start)
    actor = {"lora": {"rank": 2, "alpha": 4, "target_modules": modules, "start": str(start)}, "num_threads": 1}
    config = write_config(tmp_path / "job", model, data, actor=actor | {"token_budget": PROMPT_TOKENS})
    sft(config, "--run.num_steps", "1")
    shutil.rmtree(start)
    sft(config, "--run.num_steps", "2", "--resume")
    assert set(metrics_of(config, "sft/loss")) == {1, 2}


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("--run.num_steps=null", "run: give one of run.num_steps and run.num_epochs"),
        ("--data.max_tokens=9999", "actor.token_budget"),
        ("--actor.address=localhost:1", "actor.address"),
        ("--data.train=none.jsonl", "data.train"),
        ("--evaluation.path=none.jsonl", "evaluation.path"),
        ("--data.response_field=answer", "data.response_field"),
        ("--model.path=nowhere", "model.path"),
        ("--data.nonsense=1", "data.nonsense"),
        ("--actor.moe.z_coef=0.1", "actor.moe"),
        ("--actor.devices=[0, 1]", "actor has 2 GPUs for 1 ranks; give one each"),
        ("--data.train=[train.jsonl, tools.jsonl]", "tools.jsonl, line 1, field 'prompt': the chat template does not"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, complaint: str
) -> None:
    config = write_config(tmp_path / "job", model, data)
    shutil.copy(data / "train.jsonl", config.parent)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "sort"}}]
    (config.parent / "tools.jsonl").write_text(json.dumps({"prompt": talk, "tools": tools}))
    assert main(["sft", str(config), override]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "job" / "run").exists()


def test_a_disk_without_room_for_a_checkpoint_is_told_before_anything_starts(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(free=2**10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    assert main(["sft", str(write_config(tmp_path / "job", model, data))]) == 2
    assert "a checkpoint takes about" in (said := capsys.readouterr().err)
    assert "0.0 MiB free; make room" in said
    assert not (tmp_path / "job" / "run").exists()


def test_a_mistake_that_the_ranks_find_has_the_same_exit_code(model: Path, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "job", model, data)
    answer = subprocess.run(
        command(config, "--data.max_tokens=3"), capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 2
    assert "data.train: no example fits data.max_tokens 3; raise it or shorten the examples" in answer.stderr


def _exported_once(config: Path) -> Path:
    if not (config.parent / "exported").exists():
        exported(config)
    return config.parent / "exported"


def _wait_until_unlocked(run: Path, deadline: float) -> None:
    """The killed one's rank may still write: it is ended by the kernel, a moment later."""
    pattern = str(run)
    while any(
        pattern in _command_line(folder) and "sft_command" in _command_line(folder)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _command_line(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""
