"""The length of a run in epochs of its prompts: counted in steps by who starts the roles, and by nobody else."""

import io
import json
from pathlib import Path

import pytest

from rolecall.commands.cli import main
from rolecall.errors import ConfigError
from rolecall.launcher.placed import load_unplaced
from rolecall.launcher.plan import write_config
from rolecall.manifests.compose import compose
from rolecall.rpc import role_process
from rolecall.settings import RunSettings, load_settings
from tests.twins.launched import write_light_config

EPOCHS = ["run.num_steps=null", "run.num_epochs=2", "algorithm.groups_per_batch=4", "data.max_prompt_tokens=99"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run on two files of ten prompts, of which one is too long."""
    config = write_light_config(tmp_path)
    for name, words in (("train.jsonl", [1, 2, 100, 3]), ("more.jsonl", [1] * 6)):
        rows = [json.dumps({"prompt": "2 " * number, "ground_truth": "4"}) for number in words]
        (tmp_path / name).write_text("\n".join(rows))
    return config


def counted(config: Path, *overrides: str) -> RunSettings:
    return load_unplaced(config, [*EPOCHS, "data.train=[train.jsonl, more.jsonl]", *overrides], None, io.StringIO())


def test_epochs_are_the_whole_batches_of_the_prompts_that_fit_and_the_run_s_file_has_the_steps(config: Path) -> None:
    settings = counted(config)
    assert (settings.run.num_steps, settings.run.num_epochs) == (2 * 9 // 4, None)
    assert counted(config, "run.num_epochs=4").run.num_steps == 9
    assert counted(config, "run.num_epochs=4", "data.max_prompts=1").run.num_steps == 1, "one prompt, four times"
    settings.run.dir.mkdir()
    again = load_settings(write_config(settings))
    assert (again.run.total_steps, again.run.num_epochs) == (4, None)


def test_check_says_the_steps(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config), *(f"--{override}" for override in EPOCHS)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"counting the prompts of {config.parent / 'train.jsonl'} for run.num_epochs\n")
    assert "run light: 1 steps, " in said
    assert "  1 steps of 4 groups are 1 epochs of these prompts, more where groups are dropped or prompts are" in said


def test_a_schedule_is_held_against_the_counted_steps(config: Path) -> None:
    optimizer = "actor.optimizer={schedule: wsd, decay_steps: 5}"
    with pytest.raises(ConfigError, match=r"decay_steps = 5 exceed the run's 4 optimizer steps"):
        counted(config, optimizer)
    assert counted(config, optimizer, "run.num_epochs=3").run.num_steps == 6


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["run.num_steps=3"], r"run: give one of run\.num_steps and run\.num_epochs"),
        (["run.num_epochs=null"], r"run: give one of run\.num_steps and run\.num_epochs"),
        (["algorithm.curriculum={max_success_rate: 0.9}"], r"run\.num_epochs: with algorithm\.curriculum"),
        (
            ["algorithm.groups_per_batch=19"],
            r"run\.num_epochs 2: 9 of the 10 prompts of data\.train fit, and .* 19 are",
        ),
        (["data.train=gone.jsonl"], r"gone\.jsonl"),
    ],
)
def test_epochs_that_cannot_be_counted_are_refused(config: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        counted(config, *overrides)


def test_who_starts_a_role_alone_is_told_to_give_steps(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"--{override}" for override in EPOCHS]
    with pytest.raises(SystemExit):
        role_process.parse_args("actor", [str(config), *overrides])
    assert "nobody does for others; give run.num_steps, which `rolecall check` says" in capsys.readouterr().err
    tree = load_settings(config, EPOCHS).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"run\.num_epochs: .* give run\.num_steps"):
        compose(tree, config)
