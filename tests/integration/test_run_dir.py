"""What a run directory means to the next command: an attempt that is begun anew, a run that is gone on with, one that
is over.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.cli import main
from rolecall.identity import kept
from rolecall.launcher.finished import is_finished
from rolecall.launcher.run_dir import holds_a_run
from rolecall.launcher.run_record import keep_record
from rolecall.settings import load_settings
from rolecall.v1 import controller_pb2
from tests.twins.launched import FAILS_IN_A_ROLE, start_train, wait_until_up, write_light_config

END_LIMIT_S = 100.0
"""A busy machine's."""


def interrupt(config: Path, *arguments: str) -> None:
    """Starts the run, and asks it to end once it is up."""
    train = start_train(config, *arguments)
    wait_until_up(train)
    train.send_signal(signal.SIGINT)
    train.communicate(timeout=END_LIMIT_S)


@pytest.mark.thorough("test_status_of_a_run_that_is_over_says_how_it_ended")
@pytest.mark.timeout(300)
def test_an_attempt_in_which_nothing_was_trained_does_not_block_the_mended_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILS_IN_A_ROLE)
    config, run = write_light_config(tmp_path, target="mine:score"), tmp_path / "run"
    first = start_train(config)
    output, _ = first.communicate(timeout=END_LIMIT_S)
    assert (first.returncode, "no_such_file" in output) == (1, True), output
    (tmp_path / "mine.py").write_text("def score(item):\n    return 0.0\n")
    (run / "store" / "left").touch()
    (run / "mine.txt").touch()
    interrupt(config, "--sampling.num_responses=3")
    assert not (run / "store" / "left").exists(), "another attempt has another store"
    assert (run / "mine.txt").exists()
    assert json.loads((run / "store.json").read_text()) == {"store": "embedded"}
    assert (run / "logs" / "reward.log").read_text().count("=== started reward") == 2, "logs go on"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 0}\n{"step": 1}\n'),
        ("history.jsonl", '{"event": "admitted"}\n{"event": "trained"}\n'),
        ("checkpoints/step-00000001", ""),
    ],
)
def test_a_directory_in_which_something_was_trained_is_a_runs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "identity.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step"')
    assert not holds_a_run(tmp_path), "half a line of a killed process, and an evaluation before the first step"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert holds_a_run(tmp_path)


@pytest.mark.timeout(300)
def test_a_run_that_is_finished_starts_nothing_when_it_is_resumed_and_one_that_lacks_something_does(
    tmp_path: Path,
) -> None:
    config, run = write_light_config(tmp_path), tmp_path / "run"
    interrupt(config)
    done = controller_pb2.RunStatus(run="light", state=controller_pb2.RUN_STATE_DONE, step=1, total_steps=1)
    keep_record(load_settings(config).run, done, exit_code=0)
    checkpoints = RunCheckpoints(open_storage(str(run / "checkpoints")), num_kept=1)
    checkpoints.commit(checkpoints.begin(1), [], {"identity": kept(run), "run": {}})
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/heldout/accuracy": 0.5}\n{"step": 1, "reward/mean": 1}\n')
    again = start_train(config, "--resume")
    output, _ = again.communicate(timeout=END_LIMIT_S)
    assert again.returncode == 0
    assert "is finished, its step 1 trained and kept: nothing is started. More steps: raise run.num_steps" in output
    assert (run / "logs" / "controller.log").read_text().count("=== started controller") == 1
    evaluated = load_settings(config, ["evaluation.sets={heldout: {path: heldout.jsonl}}"])
    assert not is_finished(evaluated), "it is to be evaluated"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "eval/heldout/accuracy": 0.6}\n')
    assert is_finished(evaluated)
    assert not is_finished(load_settings(config, ["run.num_steps=2"]))
    keep_record(evaluated.run, done, exit_code=130)
    assert not is_finished(evaluated), "it was interrupted"
    keep_record(evaluated.run, done, exit_code=0)
    shutil.rmtree(run / "checkpoints")
    assert not is_finished(load_settings(config)), "its checkpoint is gone"


@pytest.mark.timeout(300)
def test_status_of_a_run_that_is_over_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = write_light_config(tmp_path), str(tmp_path / "run")
    train = start_train(config)
    wait_until_up(train)
    assert main(["status", str(config), "--json"]) == 0, "the configuration that it was started from names it, too"
    said = json.loads(capsys.readouterr().out)
    assert (said["run"], said["state"], said["step"], said["total_steps"], said["over"]) == (
        "light",
        "starting",
        0,
        1,
        None,
    )
    assert said["ledger"] is None or said["ledger"]["admitted"] == 0, "it may have locked the run, or not yet"
    train.kill()
    train.communicate(timeout=END_LIMIT_S)
    for command in ("status", "watch"):
        assert main([command, run]) == 0
        told = capsys.readouterr().out
        assert "over; its last news is of 20" in told
        assert "at step 0/1: its rolecall train was killed or the machine went down; --resume goes on" in told
    assert main(["pause", run]) == 1
    assert "run light is over (its rolecall train was killed" in capsys.readouterr().err
    interrupt(config, "--resume")
    assert main(["status", run, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    over = said["over"]
    assert said["workers"] == []
    assert (over["exit_code"], over["how"]) == (130, "interrupted; --resume goes on")


@pytest.mark.parametrize("damaged", ["\0\0\0\n", "3\n", '{"step": null}\n'])
def test_what_cannot_be_read_is_taken_for_a_run_and_left_alone(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "identity.json").touch()
    (tmp_path / "metrics.jsonl").write_text(damaged)
    assert holds_a_run(tmp_path)
