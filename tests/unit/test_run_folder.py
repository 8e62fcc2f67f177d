"""The run that a command's RUN names: its folder, also where that was moved or copied, or its file; and the files of
`rolecall train` and `rolecall sft`, taken for each other.
"""

import io
import shutil
from pathlib import Path

import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.commands.ledger import ledger
from rolecall.commands.steer import find, steer
from rolecall.errors import CheckpointMissingError, ConfigError, NotFoundError
from rolecall.identity import settle
from rolecall.launcher.plan import write_config
from rolecall.launcher.rewind import rewind
from rolecall.settings import RunSettings, load_settings, load_sft_settings, settings_of_run
from rolecall.training.export.__main__ import find as find_checkpoint
from tests.twins.launched import write_light_config

EXAMPLE = '{"prompt": "2 + 2", "response": "4"}\n'


def started(folder: Path, *overrides: str) -> RunSettings:
    """The settings of a run that left its folder, `folder`/run."""
    settings = load_settings(write_light_config(folder), ["controller.address=127.0.0.1:9", *overrides])
    settings.run.dir.mkdir()
    settle(settings)
    write_config(settings)
    return settings


def sft_file(folder: Path) -> Path:
    """A file of `rolecall sft`."""
    (folder / "examples.jsonl").write_text(EXAMPLE)
    path = folder / "sft.yaml"
    tree = {
        "run": {"name": "tuned", "dir": "tuned", "num_epochs": 1},
        "model": {"path": "model"},
        "data": {"train": "examples.jsonl", "batch_size": 1},
        "actor": {"token_budget": 4096},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("is_copy", [True, False])
@pytest.mark.parametrize("given", ["", "config.yaml"])
def test_what_acts_on_a_folder_acts_where_it_lies_now(tmp_path: Path, is_copy: bool, given: str) -> None:
    original, there = started(tmp_path).run.dir, tmp_path / "there"
    (shutil.copytree if is_copy else shutil.move)(original, there)
    run = there / given
    assert settings_of_run(run).run.dir == there
    with pytest.raises(CheckpointMissingError, match=f"{there}/checkpoints holds no checkpoint of step 3"):
        rewind(str(run), 3, io.StringIO())
    with pytest.raises(NotFoundError, match=f"{there} holds no store"):
        ledger(str(run), None, False, io.StringIO())
    with pytest.raises(CheckpointMissingError, match=f"{there}/checkpoints holds no committed checkpoint"):
        find_checkpoint(str(there))


def test_checkpoints_beneath_the_folder_move_with_it_and_others_are_the_originals(tmp_path: Path) -> None:
    original = started(tmp_path, f"run.checkpoint_url={tmp_path}/run/kept").run.dir
    shutil.copytree(original, tmp_path / "copy")
    assert settings_of_run(tmp_path / "copy").run.checkpoints == str(tmp_path / "copy/kept")
    file = original / "config.yaml"
    file.write_text(file.read_text().replace("run/kept", "elsewhere"))
    shutil.copytree(original, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{tmp_path}/other is a copy of the run in {original}"):
        rewind(str(tmp_path / "other"), 3, io.StringIO())
    assert settings_of_run(tmp_path / "other").run.checkpoints == str(tmp_path / "elsewhere"), "reading is no harm"
    shutil.rmtree(original)
    assert settings_of_run(tmp_path / "other").run.checkpoints == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("command", ["status", "stop", "pause", "resume"])
def test_a_copy_does_not_steer_the_original(tmp_path: Path, command: str) -> None:
    original = started(tmp_path).run.dir
    shutil.copytree(original, tmp_path / "copy")
    with pytest.raises(ConfigError, match=f"copy is a copy of the run in {original}"):
        steer(command, str(tmp_path / "copy"))
    assert find(str(original)).directory == original
    shutil.move(original, tmp_path / "moved")
    assert find(str(tmp_path / "moved")).directory == tmp_path / "moved"


def test_a_folder_with_a_file_of_ones_own_names_the_run_that_was_started_from_it(tmp_path: Path) -> None:
    settings = started(tmp_path)
    (tmp_path / "config.yaml").write_text((settings.run.dir / "config.yaml").read_text())
    assert settings_of_run(tmp_path).run.dir == settings.run.dir
    assert find(str(tmp_path)).directory == settings.run.dir


def test_a_folder_that_cannot_be_looked_at_is_another(tmp_path: Path) -> None:
    folder = started(tmp_path).run.dir
    file = folder / "config.yaml"
    beyond = "/" + "/".join(["deep" * 50] * 25)  # longer than any path, so that root may not look at it either
    file.write_text(file.read_text().replace(str(folder), beyond))
    assert settings_of_run(folder).run.dir == folder
    assert find(str(folder)).directory == folder


@pytest.mark.parametrize("command", ["check", "train"])
def test_nothing_is_started_by_the_file_of_a_folder_that_was_copied(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(started(tmp_path).run.dir, tmp_path / "copy")
    file = str(tmp_path / "copy/config.yaml")
    assert main([command, file]) == 2
    assert f"says that run.dir is {tmp_path}/run, and lies in {tmp_path}/copy" in capsys.readouterr().err
    main(["check", file, "--run.dir", str(tmp_path / "copy")])
    assert f"directory {tmp_path}/copy" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "status", "watch", "ledger"])
def test_the_file_of_a_fine_tuning_is_told_from_a_run_s(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sft_file(tmp_path)
    assert main([command, str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"rolecall: {file} is the file of `rolecall sft`")
    settings = load_sft_settings(file)
    settings.run.dir.mkdir()
    written = write_config(settings)
    assert main([command, str(written)]) == 2
    assert f"{written} is the file of `rolecall sft`" in capsys.readouterr().err


def test_the_file_of_a_run_is_told_from_a_fine_tuning_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_light_config(tmp_path)
    assert main(["sft", str(file)]) == 2
    assert f"{file} is the file of a run; start it with `rolecall train`" in capsys.readouterr().err


def test_a_fine_tuning_takes_no_gpu_that_the_caller_gives_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sft_file(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3c2a1b")
    assert main(["sft", str(file), "--actor.devices=[0]"]) == 2
    assert "CUDA_VISIBLE_DEVICES names GPU-8f3c2a1b, and devices are numbers" in capsys.readouterr().err
