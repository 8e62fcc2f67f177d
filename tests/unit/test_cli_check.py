"""`rolecall check`: what it derives, and that every mistake is named without anything being started."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.check import check
from rolecall.commands.cli import main
from rolecall.data.dataset import MAX_DEPTH
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings, load_settings
from rolecall.shifts import file_system_of
from rolecall.v1 import rollout_pb2
from tests.twins.launched import write_light_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


def findings(settings: RunSettings) -> tuple[int, str]:
    out = io.StringIO()
    return check(settings, out), out.getvalue()


def test_a_sound_configuration_gives_a_line_per_derived_value(config: Path) -> None:
    code, text = findings(load_settings(config))
    assert code == 0, text
    assert "EOS ids: 2" in text
    assert "0.01M parameters" in text
    assert "'<|im_start|>user\\n2 + 2<|im_end|>\\n<|im_start|>assistant\\n'" in text
    assert "2 groups x 2 responses = 4 trajectories" in text
    assert "max model length: 2048 tokens" in text
    assert not (config.parent / "run").exists()


def test_the_budgets_of_failures_are_told_with_their_window(config: Path) -> None:
    _, told = findings(load_settings(config, ["reward.max_failed_groups=5"]))
    assert (
        "failures: of any 1000 groups 5 may be without a score and 32 without a rollout that survives them; one "
        "more ends the run" in told
    )


def test_the_calls_that_a_scorer_elsewhere_gets_at_a_time_are_told(config: Path) -> None:
    def told(scorer: str) -> str:
        return findings(load_settings(config, [f"reward.components.there={{scorer: {scorer}, timeout_s: 30}}"]))[1]

    line = "reward.components.there: at most {} calls at a time of {}, of at most 30 s"
    assert line.format(8, "127.0.0.1:1") in told("{kind: external, address: '127.0.0.1:1'}")
    assert line.format(40, "127.0.0.1:1") in told("{kind: external, address: '127.0.0.1:1', num_calls: 40}")
    assert line.format(64, "http://127.0.0.1:1") in told("{kind: trl, address: 'http://127.0.0.1:1'}")
    assert line.format(16, "http://127.0.0.1:1") in told("{kind: code, address: 'http://127.0.0.1:1'}")


def test_a_warm_up_that_the_run_does_not_outlast_is_noted(config: Path) -> None:
    def told(*overrides: str) -> str:
        return findings(load_settings(config, ["run.num_steps=3", "algorithm.num_minibatches=2", *overrides]))[1]

    note = "NOTE {}.optimizer.warmup_steps {} takes all of its {} optimizer steps: the rate never reaches"
    assert "warmup_steps" not in told("actor.optimizer.warmup_steps=5")
    assert "warmup_steps" not in told("actor.optimizer.warmup_steps=6", "run.num_steps=0"), "nothing is trained"
    assert note.format("actor", 6, 6) in told("actor.optimizer.warmup_steps=6")
    critic = ["algorithm.advantage={kind: gae}", "critic={warmup_steps: 1}", "actor.optimizer.warmup_steps=4"]
    assert note.format("actor", 4, 4) in told(*critic), "in the first step the critic learns alone"
    assert "; 4 optimizer steps of the policy in the run" in told(*critic)
    assert "NOTE critic" not in told(*critic)
    own = "critic={optimizer: {warmup_steps: 6}}"
    assert note.format("critic", 6, 6) in told(critic[0], own)
    assert "NOTE actor.optimizer" not in told(critic[0], own)


def test_what_a_publish_does_with_responses_in_flight_is_told_where_there_are_any(config: Path) -> None:
    def told(mode: str, *more: str, staleness: int = 1) -> str:
        given = [f"algorithm.max_staleness={staleness}", f"rollout.pause_mode={mode}", *more]
        return findings(load_settings(config, given))[1]

    longest = load_settings(config).max_row_tokens
    assert "at a publish" not in told("keep", staleness=0)
    assert f"in flight, up to 4, keep their tokens, up to {4 * longest:,}, whose keys and values" in told("keep")
    assert "in flight, up to 8, keep their tokens, with the keys and values" in told("keep_cache", staleness=2)
    assert "in flight, up to 4, end first (rollout.pause_mode wait)" in told("wait")
    assert "in flight, up to 4, begin again (rollout.pause_mode abort)" in told("abort")
    shifts = "rollout.sleep_mode=true"
    kept = (
        f"between shifts: responses in flight, up to 4, keep their tokens, up to {4 * longest:,}, whose keys and values"
    )
    assert all(kept in told(mode, shifts) for mode in ("keep", "keep_cache"))
    assert all("between shifts: nothing is in flight" in told(mode, shifts) for mode in ("wait", "abort"))


def test_machines_whose_gpus_are_shared_are_told_what_their_run_dir_must_be(config: Path) -> None:
    shared = ["actor.devices=[0]", "actor.num_ranks=2", "actor.address=one:1", "rollout.devices=[[0], [0]]"]
    shared += ["rollout.num_replicas=0", "rollout.sleep_mode=true", "weights.host=one"]
    told = findings(load_settings(config, shared))[1]
    assert "take turns on the GPUs of their machines by locks in run.dir, which all of them must have mounted" in told
    assert f"here it is on {file_system_of(config)}" in told
    assert "locks in run.dir" not in findings(load_settings(config))[1]


def test_a_users_estimator_is_found_and_takes_its_options(config: Path) -> None:
    (config.parent / "median_for_a_check.py").write_text(
        "def f(batch, *, scale):\n    raise AssertionError('not called')\n"
    )
    advantage = "algorithm.advantage={kind: custom, function: 'median_for_a_check:f', options: {%s: 2}}"
    assert "median_for_a_check:f is found" in findings(load_settings(config, [advantage % "scale"]))[1]
    code, text = findings(load_settings(config, [advantage % "size"]))
    assert (code, "the options ['size']" in text) == (2, True), text


def test_the_copies_that_deltas_take_are_told_for_each_end(config: Path) -> None:
    told = findings(load_settings(config, ["weights.deltas=true", "rollout.tensor_parallel_size=2"]))[1]
    assert "at the actor's first rank and as much at each of 2 workers of a rollout" in told
    assert "replicas of 2 workers" in told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["actor.num_ranks=2"], "kept from pass to pass where an eighth of the device is left beside them"),
        (["model.dtype=bfloat16"], "kept from pass to pass where an eighth of the device is left beside them"),
        (["actor.num_ranks=2", "actor.parallel.keep_gathered=true"], "kept from pass to pass (actor.parallel.keep_g"),
        (["actor.num_ranks=2", "actor.parallel.keep_gathered=false"], "given back after each pass"),
        (["model.dtype=float32"], None),
        (["model.dtype=bfloat16", "actor.lora={}"], None),
    ],
)
def test_what_becomes_of_gathered_parameters_is_told_where_there_are_any(
    config: Path, overrides: list[str], told: str | None
) -> None:
    memory = findings(load_settings(config, overrides))[1]
    assert told in memory if told else "gathered parameters" not in memory


def test_moments_that_wait_on_the_host_are_told(config: Path) -> None:
    assert "moments, are in host memory" not in findings(load_settings(config))[1]
    told = findings(load_settings(config, ["actor.optimizer.offload=true"]))[1]
    assert "moments, are in host memory, and a step has at most" in told
    critic = ["algorithm.advantage={kind: gae}", "actor.optimizer.offload=true", "critic={}"]
    assert findings(load_settings(config, critic))[1].count("moments, are in host memory") == 2
    critic[-1] = "critic={optimizer: {offload: false}}"
    assert findings(load_settings(config, critic))[1].count("moments, are in host memory") == 1


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.prompt_field=question", "no field 'question'"),
        ("data.train=none.jsonl", "none.jsonl does not exist"),
        ("data.max_prompt_tokens=4", "all 1 prompts"),
        ("sampling.max_tokens=2000", "exceed the model's 2048"),
        ("store.binary=nowhere/valkey", "store.binary 'nowhere/valkey' is not an executable file; give the path"),
        ("model.path=elsewhere", "`hf download ORGANISATION/NAME --local-dir"),
        ("store.max_bytes=1000", "store.max_bytes 1000"),
        ("actor={devices: [7], address: null}", "GPU 7"),
        ("algorithm.advantage={kind: custom, function: 'mine:f'}", "there is no module 'mine'"),
    ],
)
def test_a_mistake_is_named(config: Path, override: str, told: str) -> None:
    code, text = findings(load_settings(config, [override]))
    assert code == 2
    assert told in text


def test_a_prompt_in_letters_that_the_terminal_lacks_is_shown_by_their_escapes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "train.jsonl").write_text('{"prompt": "\\u00e9 \\u7b54", "ground_truth": "4"}\n')
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert main(["check", str(config)]) == 0
    assert b"\xe9 \\u7b54" in shown.getvalue()


def test_a_reader_that_leaves_gets_no_traceback(config: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for stdout, closing, code in ((writer, "", 1), (None, " >&-", 0)):
        command = f'exec "$0" -m rolecall check "$1"{closing}'
        ended = subprocess.run(
            ["bash", "-c", command, sys.executable, str(config)], stdout=stdout, stderr=subprocess.PIPE, timeout=120
        )
        assert (ended.returncode, ended.stderr) == (code, b"")
    os.close(writer)


def test_children_have_a_stream_that_the_caller_closed() -> None:
    """As the ranks of `rolecall sft`, which write their progress there."""
    child = "import sys; sys.exit(0 if sys.stdout and sys.stderr else 3)"
    ours = f"""
import subprocess, sys
from rolecall import terminal
terminal.open_streams()
sys.exit(subprocess.run([sys.executable, "-c", {child!r}]).returncode)
"""
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        command = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, ours]
        assert subprocess.run(command, timeout=120, check=False).returncode == 0, closed


def test_gpus_that_the_caller_hides_are_not_taken(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code, text = findings(load_settings(config, ["actor.devices=[0]", "actor.address=null"]))
    assert code == 2
    assert "actor names GPU 0, which CUDA_VISIBLE_DEVICES=3 leaves out; name others, or unset it" in text


@pytest.mark.parametrize("mask", ["GPU-8f3c2a1b", "MIG-8f3c2a1b", "0, GPU-8f3c2a1b"])
def test_gpus_that_the_caller_gives_by_name_are_not_taken_for_numbers(
    config: Path, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    told = "write in both the numbers of the GPUs as nvidia-smi counts them"
    code, text = findings(load_settings(config, ["actor.devices=[0]", "actor.address=null"]))
    assert (code, told in text) == (2, True)
    assert findings(load_settings(config))[0] == 0, "CPUs are not given by it"


def test_a_job_that_was_given_no_gpu_takes_none(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert "NoDevFiles leaves out" in findings(load_settings(config, ["actor.devices=[0]", "actor.address=null"]))[1]


def test_roles_that_were_given_no_gpus_beside_others_are_noted(config: Path) -> None:
    on_gpu = ["actor.devices=[0]", "actor.address=null"]
    _, text = findings(load_settings(config, [*on_gpu, "rollout.num_replicas=1"]))
    assert "NOTE rollout on CPUs, and those on GPUs wait for what they compute; give rollout.devices" in text
    assert "NOTE rollout" not in findings(load_settings(config, on_gpu))[1]


def test_a_host_of_the_weight_channel_must_be_here_where_the_actor_is(config: Path) -> None:
    here = ["actor.address=null", "rollout.num_replicas=1", "weights.host=192.0.2.1"]
    told = "weights.host 192.0.2.1 is not an address of this machine; use"
    assert told in findings(load_settings(config, here))[1]
    assert told not in findings(load_settings(config, [*here, "actor.address=127.0.0.1:9"]))[1]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1" * 5000, "line 2: a whole number has more than 4300 digits; shorten it, or write it as text"),
        ("[" * 10_000 + "]" * 10_000, "line 2: lists or objects are nested too deep to be read; shorten it"),
        ("1" * 400, "line 2, field 'x': a number that no message holds"),
        ("[1, NaN]", "line 2, field 'x': a number that no message holds, as NaN or one beyond a float64; write text"),
        ("[" * 25 + "]" * 25, "line 2, field 'x': nested more than 24 deep; flatten it, or write it as text"),
    ],
    ids=["digits", "deep", "number", "no number", "fields"],
)
def test_a_row_that_no_message_could_carry_is_named(config: Path, value: str, told: str) -> None:
    with (config.parent / "train.jsonl").open("a") as file:
        file.write(f'{{"prompt": "1 + 1", "ground_truth": "2", "x": {value}}}\n')
    code, text = findings(load_settings(config))
    assert (code, told in text) == (2, True), text


def test_a_field_as_deep_as_may_be_is_carried_by_the_deepest_message() -> None:
    value: Any = 1.0
    for _ in range(MAX_DEPTH):
        value = {"a": value}
    answer = rollout_pb2.GenerateResponse()
    answer.meta.prompt.metadata.update({"x": value})
    assert rollout_pb2.GenerateResponse.FromString(answer.SerializeToString()) == answer


def test_all_mistakes_are_told_in_one_go(config: Path) -> None:
    _, text = findings(load_settings(config, ["data.train=none.jsonl", "store.max_bytes=1000"]))
    assert "2 problems" in text


def test_two_roles_on_one_gpu_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="GPU 0 is given to actor and to reward"):
        load_settings(config, ["actor.devices=[0]", "actor.address=null", "reward.devices=[0]"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.address=10.0.0.1:9000", "rollout.num_replicas=1", "rollout.devices=[[0]]"],
        ["rollout.num_replicas=0", "rollout.devices=[[0],[1]]"],
    ],
)
def test_one_file_describes_roles_on_two_machines(config: Path, overrides: list[str]) -> None:
    settings = load_settings(config, ["actor.devices=[0]", *overrides])
    assert settings.actor.devices == (0,)
    assert settings.rollout.devices[0] == (0,)


def test_a_trainer_on_several_machines_names_the_gpus_of_one_and_is_not_looked_for_here(config: Path) -> None:
    elsewhere = ["actor.address=10.0.0.1:9000", "actor.devices=[0,1,2,3,4,5,6,7]"]
    _, text = findings(load_settings(config, [*elsewhere, "actor.num_ranks=16"]))
    assert "actor has" not in text
    assert "names GPU" not in text
    code, text = findings(load_settings(config, [*elsewhere, "actor.num_ranks=12"]))
    assert code == 2
    assert "actor has 8 GPUs on each of its machines for 12 ranks" in text


def test_a_token_budget_that_the_longest_trajectory_exceeds_is_refused_with_both_fields(config: Path) -> None:
    longest = r"data.max_prompt_tokens \+ sampling.max_tokens = 100; raise it, or lower one of them"
    with pytest.raises(ConfigError, match=f"actor.token_budget 99 is less than the longest trajectory, {longest}"):
        load_settings(config, ["data.max_prompt_tokens=60", "sampling.max_tokens=40", "actor.token_budget=99"])
    load_settings(config, ["data.max_prompt_tokens=60", "sampling.max_tokens=40", "actor.token_budget=100"])
    critic = ["critic={token_budget: 99}", "algorithm.advantage={kind: gae}"]
    with pytest.raises(ConfigError, match=r"critic\.token_budget 99 is less"):
        load_settings(config, ["data.max_prompt_tokens=60", "sampling.max_tokens=40", *critic])


def test_files_that_are_not_safetensors_are_named(config: Path) -> None:
    (config.parent / "model" / "model.safetensors").write_bytes(b"\xff" * 64)
    code, text = findings(load_settings(config))
    assert code == 2
    assert "is not a safetensors file" in text


def test_a_first_prompt_of_messages_keeps_its_system_turn(config: Path) -> None:
    row: dict[str, Any] = {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "ground_truth": "x",
    }
    (config.parent / "train.jsonl").write_text(json.dumps(row) + "\n")
    _, text = findings(load_settings(config, ["data.system_prompt=never used"]))
    assert "be brief" in text
    assert "never used" not in text


def test_train_asks_the_same_before_it_makes_a_directory_or_starts_a_process(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "train.jsonl").write_text('{"prompt": "2 + 2", "ground_truth": "4"}\n{oops\n')
    (config.parent / "model" / "model.safetensors").unlink()
    assert main(["train", str(config)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rolecall: 2 problems; nothing was started:\n")
    assert "train.jsonl, line 2: not JSON (" in told
    assert "has no *.safetensors; convert the weights with save_pretrained" in told
    assert not (config.parent / "run").exists()


def test_prompts_that_are_too_long_are_counted_and_all_of_them_are_a_problem(config: Path) -> None:
    rows = [{"prompt": "2" * length, "ground_truth": "4"} for length in (1, 100, 200)]
    (config.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = findings(load_settings(config, ["data.max_prompt_tokens=60"]))
    assert code == 0
    assert "of the first 3, the longest has 219 tokens; 2 exceed data.max_prompt_tokens 60 and will be left out" in text
    code, text = findings(load_settings(config, ["data.max_prompt_tokens=19"]))
    assert code == 2
    assert "have more tokens than data.max_prompt_tokens 19, the shortest 20; raise it or shorten the prompts" in text


def test_prompts_are_told_as_a_users_function_gives_them(config: Path) -> None:
    rows = [{"question": "1 + 1", "answer": answer} for answer in ("2", "", "2")]
    (config.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (config.parent / "rows_to_check.py").write_text(
        "def row(fields):\n"
        "    return {'prompt': fields['question'], 'ground_truth': fields['answer']} if fields['answer'] else None\n"
    )
    code, text = findings(load_settings(config, ["data.preprocess={function: 'rows_to_check:row'}"]))
    assert (code, "train.jsonl, 2 prompts through data.preprocess.function rows_to_check:row" in text) == (0, True), (
        text
    )
    code, text = findings(load_settings(config, ["data.preprocess={function: 'rows_to_check:nothing'}"]))
    assert (code, "has no function 'nothing'" in text) == (2, True), text


def test_a_field_of_ground_truths_that_no_row_has_is_seen_where_a_function_scores(config: Path) -> None:
    (config.parent / "scores.py").write_text("def score(item):\n    return 0.0\n")
    scored = "reward.components={own: {scorer: {kind: function, target: 'scores:score'}}}"
    for field, told in (("ground_truth", "with the ground truth '4'\n"), ("answer", "with no ground truth\n")):
        code, text = findings(load_settings(config, [scored, f"data.ground_truth_field={field}"]))
        assert (code, told in text) == (0, True), text


def test_an_evaluation_beside_the_steps_is_said(config: Path) -> None:
    (config.parent / "held.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')
    held = "sets: {held: {path: held.jsonl}}"
    for section, is_said in ((f"{{{held}}}", False), (f"{{{held}, beside: true}}", True)):
        _, text = findings(load_settings(config, [f"evaluation={section}"]))
        assert ("beside the next step, whose publish waits" in text) is is_said


def test_a_chat_template_of_the_run_s_own_is_rendered_and_told(config: Path) -> None:
    own = config.parent / "own.jinja"
    own.write_text("{% for message in messages %}{{ message.content | replace('2', '3') }}!{% endfor %}")
    code, text = findings(load_settings(config, ["model.chat_template=own.jinja"]))
    assert code == 0, text
    assert f"chat template: model.chat_template {own}, in place of the tokenizer's own; checkpoints hold it\n" in text
    assert "tokens as rendered: '3 + 3!', with the ground truth '" in text
    (config.parent / "model" / "chat_template.jinja").unlink()
    code, text = findings(load_settings(config, ["model.chat_template=own.jinja"]))
    assert code == 0, text
    assert f"chat template: model.chat_template {own}, the tokenizer has none; checkpoints hold it\n" in text


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "model.chat_template: cannot read {own}: [Errno 2] No such file or directory"),
        (b"\xff", "model.chat_template: cannot read {own}: 'utf-8' codec can't decode byte 0xff"),
        (b" \n", "model.chat_template: {own} is empty; name a file of Jinja text"),
        (b"{% for", "line 1: the chat template {own} cannot render the turns user (unexpected 'end of template'"),
        (b"{{ raise_exception('no user') }}", "line 1: the chat template {own} cannot render the turns user (no user)"),
    ],
)
def test_a_chat_template_that_renders_nothing_is_refused_by_its_file(
    config: Path, written: bytes | None, told: str
) -> None:
    own = config.parent / "own.jinja"
    if written is not None:
        own.write_bytes(written)
    code, text = findings(load_settings(config, ["model.chat_template=own.jinja"]))
    assert code == 2
    assert told.format(own=own) in text


def test_the_epochs_of_the_run_are_told(config: Path) -> None:
    (config.parent / "train.jsonl").write_text('{"prompt": "2 + 2", "ground_truth": "4"}\n' * 8)
    _, text = findings(load_settings(config, ["run.num_steps=10"]))
    assert "10 steps of 2 groups are 2.5 epochs of these prompts, more where groups are dropped or prompts" in text
    assert " epochs " not in findings(load_settings(config, ["run.num_steps=0"]))[1]
    _, text = findings(load_settings(config, ["data.train=elsewhere.jsonl"]))
    assert " epochs " not in text


def test_when_held_out_sets_are_evaluated_is_said(config: Path) -> None:
    (config.parent / "held.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')

    def told(*keys: str) -> str:
        return findings(
            load_settings(config, [f"evaluation={{{', '.join(['sets: {held: {path: held.jsonl}}', *keys])}}}"])
        )[1]

    assert "temperature 0.0, at step 0 and at the end\n" in told()
    assert "temperature 0.0, at step 0, every 5 steps and at the end\n" in told("every_steps: 5")
    assert "temperature 0.0, every 5 steps and at the end\n" in told("every_steps: 5", "at_start: false")
    assert "temperature 0.0, at the end\n" in told("at_start: false")


def test_prompts_that_are_drawn_of_a_file_are_told_and_counted(config: Path) -> None:
    row = '{"prompt": "2 + 2", "ground_truth": "4"}\n'
    (config.parent / "train.jsonl").write_text(row * 80)
    held = "evaluation.sets={held: {path: train.jsonl, max_prompts: 3}}"
    _, text = findings(load_settings(config, ["data.max_prompts=8", "run.num_steps=10", held]))
    assert f"data.train: {config.parent}/train.jsonl, 8 prompts drawn by data.max_prompts\n" in text
    assert "10 steps of 2 groups are 2.5 epochs of these prompts" in text
    assert "train.jsonl, 3 prompts drawn by evaluation.sets.held.max_prompts, 1 response(s)" in text
    _, text = findings(load_settings(config, ["data.max_prompts=81"]))
    assert f"data.train: {config.parent}/train.jsonl, 80 prompts\n" in text


def test_the_sources_that_a_held_out_set_is_reported_by_are_said(config: Path) -> None:
    def told(*sources: str) -> str:
        rows = ({"prompt": "1 + 1", "ground_truth": "2", **({"source": each} if each else {})} for each in sources)
        (config.parent / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return findings(load_settings(config, ["evaluation.sets={held: {path: held.jsonl}}"]))[1]

    assert "  by field source, each reported by itself, too: math 2, openai/gsm8k 1\n" in told(
        "openai/gsm8k", "math", "math"
    )
    assert "too: math 1\n" in told("math", ""), "the other rows are in the set's own figures alone"
    assert "too: s0 1, s1 1, s2 1, s3 1, s4 1, s5 1, s6 1, s7 1 and 56 others\n" in told(*(f"s{i}" for i in range(64)))
    assert "NOTE evaluation.sets.held.path: its field source has 65 texts, more than the 64 whose rewards" in told(
        *(f"s{i}" for i in range(65))
    )
    for none in (["math", "math"], ["", ""], ["x" * 101, "\n"]):
        assert "field source" not in told(*none)


def test_a_run_of_no_steps_evaluates_what_it_starts_from(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.at_start: a run of no steps is its evaluation, at step 0"):
        load_settings(config, ["run.num_steps=0", "evaluation.at_start=false"])


def test_responses_to_held_out_prompts_that_the_model_s_length_ends_are_told(config: Path) -> None:
    longer = "evaluation.sets={held: {path: train.jsonl, max_tokens: 2000}}"
    code, text = findings(load_settings(config, [longer]))
    assert code == 0, text
    assert (
        "NOTE data.max_prompt_tokens + evaluation.sets.held.max_tokens = 3024 exceed the model's 2048: a response ends "
        "there at the latest\n"
    ) in text


def test_a_judge_that_compares_in_one_conversation_is_noted_where_episodes_may_have_their_own(config: Path) -> None:
    def told(template: str, scope: str = "group", turns: int | None = 16) -> str:
        verdicts = "{good: 1, bad: 0}" if scope == "item" else "{}"
        rubric = f"{{model: m, scope: {scope}, template: '{template}', verdicts: {verdicts}}}"
        judge = f"reward.components.won={{scorer: {{kind: judge, address: 'http://127.0.0.1:1/v1', rubric: {rubric}}}}}"
        played = [f"environments.game={{address: '127.0.0.1:1', max_turns: {turns}}}"] if turns else []
        return findings(load_settings(config, [judge, *played]))[1]

    note = "NOTE reward.components.won.scorer.rubric: scope group shows messages of one conversation"
    assert note in told("{{ messages }} {{ first }} {{ second }}")
    assert note not in told("{{ messages }} {{ first }} {{ second }}", turns=1)
    assert note not in told("{{ messages }} {{ first }} {{ second }}", turns=None)
    assert note not in told("{{ first }} {{ second }}")
    assert note not in told("{{ messages }} {{ response }}", scope="item")


def test_the_rows_of_held_out_sets_are_read_too(config: Path) -> None:
    (config.parent / "held.jsonl").write_text('{"prompt": "1 + 1"}\n')
    _, text = findings(load_settings(config, ["evaluation.sets={held: {path: held.jsonl}}"]))
    assert "held.jsonl, line 1, field 'ground_truth': missing, and reward.components.correct compares with it" in text


@pytest.mark.parametrize(
    ("setting", "folder", "why"),
    [
        ("run.dir", "/proc/run", "No such file or directory in /proc"),
        ("run.checkpoint_url", "{}/light.yaml", "Not a directory in {}/light.yaml"),
        ("run.checkpoint_url", "file://{}/light.yaml/below", "Not a directory in {}/light.yaml"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(config: Path, setting: str, folder: str, why: str) -> None:
    code, text = findings(load_settings(config, [f"{setting}={folder.format(config.parent)}"]))
    assert code == 2
    told = f"{setting} {folder.removeprefix('file://')} cannot be written: {why}".format(*[config.parent] * 2)
    assert told in text
    assert f"make room or it writable, or name another {setting}" in text


@pytest.mark.parametrize(
    ("key", "value"), [("reward.components.correct.weight", ".nan"), ("sampling.temperature", ".inf")]
)
def test_numbers_that_are_not_finite_are_refused_by_name(config: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: Input should be a finite number"):
        load_settings(config, [f"{key}={value}"])


def notes_of(config: Path, about: str, *overrides: str) -> list[str]:
    told = findings(load_settings(config, list(overrides)))[1]
    return [line for line in told.splitlines() if line.startswith(f"NOTE {about}")]


def test_when_to_evaluate_is_noted_where_there_is_nothing_to(config: Path) -> None:
    assert notes_of(config, "evaluation") == []
    assert notes_of(config, "evaluation", "evaluation={every_steps: 2, sets: {held: {path: train.jsonl}}}") == []
    (note,) = notes_of(config, "evaluation", "evaluation={every_steps: 2, beside: true}")
    assert note.startswith("NOTE evaluation.every_steps, evaluation.beside: there are no evaluation.sets")


def test_what_pass_at_k_takes_for_right_is_noted_where_accuracy_takes_another(config: Path) -> None:
    tries, lower = "algorithm.advantage={kind: pass_at_k, k: 2}", "reward.solved_at=0.5"
    assert notes_of(config, "reward.", tries) == notes_of(config, "reward.", lower) == []
    (note,) = notes_of(config, "reward.", tries, lower)
    assert note.endswith("pass_at_k takes a response for right from 1 on")


PLAYED = [
    "environments.game={address: '127.0.0.1:1', when: {task: game}}",
    "environments.tools={address: '127.0.0.1:2', when: {task: [tools, both]}}",
    "environments.lab={address: '127.0.0.1:3', when: {task: lab, level: 2}}",
]


def write_tasks(config: Path, *tasks: str) -> None:
    """Training prompts, one for each task."""
    rows = [{"prompt": f"{task}?", "ground_truth": "4", "task": task} for task in tasks]
    (config.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_check_says_how_many_prompts_are_played_where_and_asks_each_environment(config: Path) -> None:
    write_tasks(config, "game", "maths", "tools", "tools", "maths", "maths")
    row = {"prompt": "why?", "ground_truth": "4", "task": "lab", "level": 2}
    (config.parent / "held.jsonl").write_text(json.dumps(row) + "\n")
    code, text = findings(load_settings(config, [*PLAYED, "evaluation.sets={held: {path: held.jsonl}}"]))
    assert code == 0, text
    assert "  1 are played in game, 2 are played in tools, 0 are played in lab, 3 are answered once" in text
    assert "NOTE environments.lab: no prompt of data.train is played in it (task: 'lab', level: 2); correct" in text
    for name, port in (("game", 1), ("tools", 2), ("lab", 3)):
        assert f"environments.{name}: 127.0.0.1:{port}; an episode ends when the environment says so" in text
        assert f"NOTE environments.{name}.address 127.0.0.1:{port}: " in text


@pytest.mark.parametrize(
    ("when", "told"),
    [
        (
            "{tsk: game}",
            "a field 'tsk' to compare: there are extra_info, level, task (did you mean 'task'?); correct it",
        ),
        ("{kind: game}", "a field 'kind' to compare: it is within the field 'extra_info', and what is within one is"),
        ("{extra_info.kind: game}", "a field 'extra_info.kind' to compare: it is within the field 'extra_info'"),
        ("{prompt: 'lab?'}", "a field 'prompt' to compare: the prompt, its ground truth, images and uid are not"),
        ("{task: gane}", "task: 'gane' (did you mean 'game'?); it is 'game', 'maths'; correct it"),
        ("{task: [lab, mathz]}", "task: ('lab', 'mathz') (did you mean 'maths'?)"),
        ("{level: '1'}", "level: '1' (did you mean 1?); it is 1; correct it"),
    ],
)
def test_a_when_that_names_what_no_row_has_is_refused_by_check_and_train(
    config: Path, capsys: pytest.CaptureFixture[str], when: str, told: str
) -> None:
    rows = [
        {"prompt": f"{task}?", "ground_truth": "4", "task": task, "level": 1, "extra_info": {"kind": "game"}}
        for task in ("game", "maths")
    ]
    (config.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"environments.lab={{address: '127.0.0.1:1', when: {when}}}"]
    for command in ("check", "train"):
        assert main([command, str(config), *(f"--{word}" for word in words)]) == 2
        said = "".join(capsys.readouterr())
        assert f"environments.lab.when: no prompt of data.train or evaluation.sets has {told}" in said
    assert len(notes_of(config, "environments.lab:", *words, "data.max_prompts=1")) == 1, "not every row is looked at"
    run = load_settings(config).run.dir
    run.mkdir()
    (run / "identity.json").write_text('{"run.seed": 0}')
    assert len(notes_of(config, "environments.lab:", *words)) == 1, "a run that goes on keeps its when"


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_prompt_that_two_environments_take_is_named_before_anything_starts(
    config: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(config, "game", "both")
    words = [f"--{word}" for word in (*PLAYED, "environments.game.when.task=[game, both]")]
    assert main([command, str(config), *words]) == 2
    said = "".join(capsys.readouterr())
    assert "train.jsonl, line 2: the environments game and tools take the prompt (task: 'both')" in said
    assert not (load_settings(config).run.dir / "store").exists()
