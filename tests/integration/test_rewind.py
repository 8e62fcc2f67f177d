"""`rolecall rewind`: runs over a real store that go back to a checkpoint of the people's choice."""

import io
import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from rolecall.checkpoint.manifest import IDENTITY, RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.cli import main
from rolecall.identity import settle
from rolecall.launcher.plan import write_config
from rolecall.launcher.rewind import rewind
from rolecall.launcher.run_dir import is_under_way, prepare_run_dir
from rolecall.settings import load_settings
from rolecall.store.ledger import Ledger
from tests.failover import check
from tests.twins.launched import write_light_config
from tests.twins.run import LightRun, TwinRun

ALL_KEPT = {"num_steps": 6, "checkpoint_every_steps": 2, "keep_checkpoints": 3}


class Watched(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that sees, at each change of it, whether a launcher would be kept out of the run's directory."""

    protocol = "watched"
    directory: ClassVar[Path]
    seen: ClassVar[list[bool]] = []

    def _look(self) -> None:
        if self.directory.is_dir():
            self.seen.append(is_under_way(self.directory))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Looks before a file is written, too."""
        self._look()
        return super().open(path, mode, **options)

    def rm_file(self, path: str) -> None:
        """Looks, then deletes."""
        self._look()
        super().rm_file(path)


def rewound(run: TwinRun, step: int) -> str:
    """Goes back to the checkpoint of `step`; what is told."""
    told = io.StringIO()
    assert rewind(str(write_config(run.settings)), step, told) == 0
    return told.getvalue()


@pytest.mark.parametrize(("step", "deleted"), [(2, "; deleted: 4, 6"), (6, "")])
async def test_a_run_that_is_over_goes_on_from_the_checkpoint_that_was_chosen(
    light_run: LightRun, step: int, deleted: str
) -> None:
    async with light_run(run=ALL_KEPT) as run:
        await run.to_the_end("rollout-0", token_s=0.005)
        assert f"step {step} is the newest in {run.settings.run.checkpoints}{deleted}\n" in rewound(run, step)
        longer = run.settings.run.model_copy(update={"num_steps": 9})
        run.settings = run.settings.model_copy(update={"run": longer})
        await run.to_the_end("rollout-0", token_s=0.005)
        check(run)
        assert [int(line["step"]) for line in run.metrics()] == [*range(1, 7), *range(step + 1, 10)]
    position = Ledger(run.store.connection, run.store.run).position()
    assert (position.step, position.trained) == (9, 36)


async def test_what_was_trained_since_the_newest_checkpoint_is_left_out_once(light_run: LightRun) -> None:
    """Without a rewind it would be trained again as it was sealed; a second start goes on from where the first is."""
    async with light_run(run=ALL_KEPT | {"num_steps": 100, "checkpoint_every_steps": 4}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.005):
            await life.reaches(6)
        ledger = Ledger(run.store.connection, run.store.run)
        before = ledger.position()
        run.actor.restart()
        rewound(run, 4)
        for num_steps in (5, 7):
            section = run.settings.run.model_copy(update={"num_steps": num_steps, "checkpoint_every_steps": 100})
            run.settings = run.settings.model_copy(update={"run": section})
            await run.to_the_end("rollout-0", token_s=0.005)
        check(run)
        steps = [int(line["step"]) for line in run.metrics()]
    assert steps == [*range(1, max(steps[:-3]) + 1), 5, 6, 7]
    after = ledger.position()
    assert (after.step, after.lineage_gid >= before.next_gid) == (7, True)


def test_each_rewind_begins_above_all_lineages_that_the_checkpoints_tell_of(tmp_path: Path) -> None:
    config = write_light_config(tmp_path)
    checkpoints = RunCheckpoints(open_storage(str(tmp_path / "run" / "checkpoints")), 9)
    for step, lineage in ((2, 0), (4, 3), (6, 5)):
        checkpoints.commit(checkpoints.begin(step), [], {"run": "test", "lineage": lineage})
    (tmp_path / "run" / "checkpoints" / "step-00000006" / "COMMITTED").write_text("{}")
    lineages = []
    for step in (4, 2):
        assert main(["rewind", str(config), str(step)]) == 0
        lineages.append(checkpoints.read(step).state["lineage"])
    assert 5 < lineages[0] < lineages[1]


def test_a_checkpoint_that_is_not_there_and_a_run_that_is_under_way_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_light_config(tmp_path))
    assert main(["rewind", str(tmp_path), "2"]) == 2
    assert "neither a run directory" in capsys.readouterr().err
    assert main(["rewind", config, "2"]) == 1
    assert "holds no checkpoint of step 2; there are none" in capsys.readouterr().err
    checkpoints = RunCheckpoints(open_storage(str(tmp_path / "run" / "checkpoints")), 9)
    for step in (2, 4):
        checkpoints.commit(checkpoints.begin(step), [], {"run": "test", "lineage": 3, IDENTITY: {}})
    assert main(["rewind", config, "3"]) == 1
    assert "there are those of steps 2, 4" in capsys.readouterr().err
    settings = load_settings(Path(config))
    settle(settings)
    write_config(settings)
    lock = prepare_run_dir(settings, resume=True)
    assert main(["rewind", config, "2"]) == 1
    assert f"works in {tmp_path / 'run'}; stop it first" in capsys.readouterr().err
    os.close(lock)
    assert checkpoints.steps() == [2, 4]
    assert main(["rewind", config, "2"]) == 0
    assert checkpoints.steps() == [2]


@pytest.mark.parametrize("has_directory", [True, False])
def test_no_launcher_starts_beside_a_rewind_which_needs_no_run_dir(tmp_path: Path, has_directory: bool) -> None:
    fsspec.register_implementation("watched", Watched, clobber=True)
    url = f"watched://{tmp_path.name}"
    config, directory = write_light_config(tmp_path), tmp_path / "run"
    tree = yaml.safe_load(config.read_text())
    tree["run"]["checkpoint_url"] = url
    config.write_text(yaml.safe_dump(tree))
    checkpoints = RunCheckpoints(open_storage(url), 9)
    Watched.directory = directory
    for step in (2, 4):
        checkpoints.commit(checkpoints.begin(step), [], {"run": "test", "lineage": 3, IDENTITY: {}})
    if has_directory:
        directory.mkdir()
    Watched.seen.clear()
    assert main(["rewind", str(config), "2"]) == 0
    assert checkpoints.steps() == [2]
    if has_directory:
        assert len(Watched.seen) >= 2, "one file was written, one deleted"
        assert all(Watched.seen)
        assert not is_under_way(directory)
    else:
        assert not directory.exists()


def test_checkpoints_of_a_fine_tuning_have_no_lineage(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(
        "run: {name: warm, dir: run, num_epochs: 1}\nmodel: {path: model}\ndata: {train: [a.jsonl], batch_size: 2}\n"
    )
    checkpoints, state = RunCheckpoints(open_storage(str(tmp_path / "run" / "checkpoints")), 9), {"examples": "a"}
    for step in (2, 4):
        checkpoints.commit(checkpoints.begin(step), [], state)
    assert main(["rewind", str(config), "2"]) == 0
    assert (checkpoints.steps(), checkpoints.read(2).state) == ([2], state)
