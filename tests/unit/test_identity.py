"""What must stay when a run goes on, and what may change."""

import json
import re
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint.manifest import IDENTITY, RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.cli import main
from rolecall.errors import CheckpointMismatchError, ConfigError, NotFoundError
from rolecall.identity import FILE, FIXED, kept, run_id, settle
from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings, load_settings, load_sft_settings
from tests.conftest import MakeSettings
from tests.twins.launched import write_light_config, write_model

DATA = [{"prompt": f"{i} + {i}", "ground_truth": str(2 * i)} for i in range(4)]


@pytest.fixture
def begin(tmp_path: Path, make_settings: MakeSettings) -> MakeSettings:
    """Settings of a run that was begun with the defaults; keywords are what changes when it goes on."""
    write_model(tmp_path / "model")
    write_data(tmp_path, DATA)
    (tmp_path / "run").mkdir()
    settle(make_settings())
    return make_settings


def write_data(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_goes_on_with_the_same(begin: MakeSettings) -> None:
    settle(begin())


def test_data_that_is_not_there_yet_is_named_with_its_setting(begin: MakeSettings, tmp_path: Path) -> None:
    settings = begin()
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=rf"data.train: there is no file {tmp_path}/train.jsonl on this machine"):
        settle(settings)


def test_a_model_that_was_not_there_yet_is_not_another_one_once_it_is(begin: MakeSettings, tmp_path: Path) -> None:
    settings = begin(run={"name": "test", "num_steps": 1, "dir": str(tmp_path / "late")})
    (tmp_path / "late").mkdir()
    (tmp_path / "model").rename(tmp_path / "moved")
    settle(settings)
    (tmp_path / "moved").rename(tmp_path / "model")
    settle(settings)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match=r"another model\.path"):
        settle(settings)


def test_a_model_that_is_still_being_copied_is_named_and_not_kept(begin: MakeSettings, tmp_path: Path) -> None:
    settings = begin(run={"name": "test", "num_steps": 1, "dir": str(tmp_path / "late")})
    (tmp_path / "late").mkdir()
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{weights} is cut short: {len(whole) - 1} bytes of {len(whole)}"):
        settle(settings)
    weights.write_bytes(whole)
    settle(settings)


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("run.name", {"run": {"name": "other", "num_steps": 1}}),
        ("run.seed", {"run": {"name": "test", "num_steps": 1, "seed": 7}}),
        ("data.shuffle", {"data": {"shuffle": False}}),
        ("data.system_prompt", {"data": {"system_prompt": "Be brief."}}),
        ("data.preprocess", {"data": {"preprocess": {"function": "mine:row"}}}),
        ("data.max_prompts", {"data": {"max_prompts": 5}}),
        ("sampling.num_responses", {"sampling": {"num_responses": 4}}),
        ("algorithm.groups_per_batch", {"algorithm": {"groups_per_batch": 3}}),
        ("actor.lora", {"actor": {"lora": {"rank": 8}}}),
        ("actor.optimizer.kind", {"actor": {"optimizer": {"kind": "muon"}}}),
        ("critic", {"critic": {}, "algorithm": {"groups_per_batch": 2, "advantage": {"kind": "gae"}}}),
        (
            "critic",
            {
                "critic": {"optimizer": {"kind": "muon"}},
                "algorithm": {"groups_per_batch": 2, "advantage": {"kind": "gae"}},
            },
        ),
        ("store.num_shards", {"store": {"num_shards": 4}}),
    ],
)
def test_another_run_is_refused_by_name(
    begin: MakeSettings, tmp_path: Path, setting: str, changed: dict[str, Any]
) -> None:
    paths = {"run": {"dir": str(tmp_path / "run")}, "data": {"train": str(tmp_path / "train.jsonl")}}
    with pytest.raises(
        ConfigError, match=rf"started with another {setting} \(.*; go on with the same, or start another run"
    ):
        settle(begin(**{name: paths.get(name, {}) | section for name, section in changed.items()}))


def test_a_function_for_rows_may_lie_in_another_folder_and_gets_the_same_options(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path, DATA)
    (tmp_path / "run").mkdir()

    def settings(folder: str, **options: object) -> RunSettings:
        preprocess = {"function": f"{folder}/mine:row", "options": options}
        return make_settings(data={"train": str(tmp_path / "train.jsonl"), "preprocess": preprocess})

    odd = {"names": {1: "a", 2: "b"}, "since": date(2024, 1, 1), "x": float("nan")}  # YAML has them, JSON has not
    settle(settings("/one", split="main", **odd))
    settle(settings("/other", split="main", **odd))
    with pytest.raises(ConfigError, match=r"started with another data\.preprocess \("):
        settle(settings("/one", split="rest"))


@pytest.mark.parametrize(
    "rows",
    [DATA[:3], [*DATA, DATA[0]], [*DATA[:3], {"prompt": "3 + 3", "ground_truth": "7"}]],
    ids=["shorter", "longer", "other"],
)
def test_other_data_under_the_same_name_is_refused(
    begin: MakeSettings, tmp_path: Path, rows: list[dict[str, str]]
) -> None:
    write_data(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"another data\.train"):
        settle(begin())


def test_another_model_is_refused_also_at_the_same_place_and_the_same_one_may_move(
    begin: MakeSettings, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "model", tmp_path / "moved")
    settle(begin(model={"path": str(tmp_path / "moved")}))
    write_model(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ConfigError, match=r"another model\.path"):
        settle(begin())


def test_another_template_for_tools_is_refused_where_the_release_that_began_kept_them(
    begin: MakeSettings, tmp_path: Path
) -> None:
    settings, file = begin(), tmp_path / "run" / "identity.json"
    named = tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("tools")
    with pytest.raises(ConfigError, match=r"another model\.path/additional_chat_templates"):
        settle(settings)
    kept = json.loads(file.read_text())
    del kept["model.path/additional_chat_templates"]
    file.write_text(json.dumps(kept))
    settle(settings)
    named.write_text("other tools")
    with pytest.raises(ConfigError, match=r"another model\.path/additional_chat_templates"):
        settle(settings)  # it was kept where the run first went on with a release that keeps it


def test_another_chat_template_is_refused_and_the_same_one_may_move(
    tmp_path: Path, make_settings: MakeSettings
) -> None:
    def own(name: str, text: str) -> RunSettings:
        (tmp_path / name).write_text(text)
        return make_settings(model={"path": str(tmp_path / "model"), "chat_template": str(tmp_path / name)})

    write_model(tmp_path / "model")
    write_data(tmp_path, DATA)
    (tmp_path / "run").mkdir()
    settle(own("a.jinja", "{{ messages }}"))
    settle(own("b.jinja", "{{ messages }}"))
    with pytest.raises(ConfigError, match=r"another model\.chat_template \(it says how conversations are shown"):
        settle(own("a.jinja", "{{ messages }}!"))
    with pytest.raises(ConfigError, match=r"another model\.chat_template"):
        settle(make_settings())


def test_everything_that_changed_is_named_at_once(begin: MakeSettings, tmp_path: Path) -> None:
    write_data(tmp_path, DATA[:1])
    with pytest.raises(ConfigError, match=r"another data\.train \(.*\), another sampling\.num_responses \("):
        settle(begin(sampling={"num_responses": 4}))


def test_what_is_not_fixed_may_change(begin: MakeSettings, tmp_path: Path) -> None:
    algorithm = {"groups_per_batch": 2, "max_staleness": 2, "advantage": {"kind": "rloo"}}
    actor = {"optimizer": {"learning_rate": 1e-5}, "token_budget": 20_000}
    settle(
        begin(
            run={"name": "test", "dir": str(tmp_path / "run"), "num_steps": 9},
            algorithm=algorithm,
            actor=actor,
            sampling={"max_tokens": 9},
        )
    )


def test_a_setting_that_an_older_release_did_not_keep_is_not_held_against_the_run(
    begin: MakeSettings, tmp_path: Path
) -> None:
    path = tmp_path / "run" / FILE
    kept = json.loads(path.read_text())
    del kept["store.num_shards"], kept["id"]
    path.write_text(json.dumps(kept))
    settle(begin(store={"num_shards": 4}))
    assert run_id(tmp_path / "run"), "from here on it has one"


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("data.images_field", {"data": {"images_field": "images"}}),
        ("data.preprocess", {"data": {"preprocess": {"function": "mine:row"}}}),
        ("data.max_prompts", {"data": {"max_prompts": 5}}),
        ("model.freeze_vision_tower", {"model": {"freeze_vision_tower": True}}),
        ("model.freeze_routers", {"model": {"freeze_routers": True}}),
        ("environments", {"environments": {"game": {"address": "127.0.0.1:1", "when": {"task": ["a", "b"]}}}}),
        (
            "environments.*.max_image_bytes",
            {"environments": {"game": {"address": "127.0.0.1:1", "max_image_bytes": 9}}},
        ),
        (
            "critic.lora",
            {
                "algorithm": {"groups_per_batch": 2, "advantage": {"kind": "gae"}},
                "critic": {"lora": {"rank": 8}},
            },
        ),
    ],
)
def test_a_setting_that_came_with_a_newer_release_was_at_its_default(
    begin: MakeSettings, tmp_path: Path, setting: str, changed: dict[str, Any]
) -> None:
    path = tmp_path / "run" / FILE
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != setting})
    )
    paths = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "train.jsonl")}}
    with pytest.raises(ConfigError, match=f"another {re.escape(setting)} "):
        settle(begin(**{name: paths.get(name, {}) | section for name, section in changed.items()}))
    settle(begin())


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (1, True, False),
        ([0, 1], [False, True], False),
        (1, "1", False),
        (["a", "b"], ["a", "b", "c"], False),
        (["a", "b"], ["b", "a", "b"], True),
        ("a", ["a"], True),
        ([1, 2.5], [2.5, 1.0], True),
    ],
)
def test_the_prompts_of_an_environment_stay_however_its_conditions_are_written(
    begin: MakeSettings, tmp_path: Path, before: Any, now: Any, is_same: bool
) -> None:
    (tmp_path / "played").mkdir()
    for wanted in (before, now):
        run = {"name": "test", "num_steps": 1, "dir": str(tmp_path / "played")}
        game = {"address": "127.0.0.1:1", "when": {"task": wanted}}
        settings = begin(run=run, environments={"game": game})
        if wanted is before or is_same:
            settle(settings)
        else:
            with pytest.raises(ConfigError, match="another environments "):
                settle(settings)


def test_an_option_that_a_newer_release_adds_to_adapters_is_not_held_against_the_run(
    begin: MakeSettings, tmp_path: Path
) -> None:
    path = tmp_path / "run" / FILE
    kept = json.loads(path.read_text())
    kept["actor.lora"] = {"rank": 8}  # by a release whose adapters had no other option
    path.write_text(json.dumps(kept))
    settle(begin(actor={"lora": {"rank": 8}}))
    settle(begin(actor={"lora": {"rank": 8, "start": "where/the/first/began"}}))
    with pytest.raises(ConfigError, match=r"another actor\.lora"):
        settle(begin(actor={"lora": {"rank": 8, "alpha": 8}}))
    with pytest.raises(ConfigError, match=r"another actor\.lora"):
        settle(begin(actor={"lora": {"rank": 16}}))
    with pytest.raises(ConfigError, match=r"another actor\.lora"):
        settle(begin())


def test_other_adapters_of_the_critic_and_another_base_of_theirs_are_refused(
    begin: MakeSettings, tmp_path: Path
) -> None:
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    (tmp_path / "run" / FILE).unlink()
    settle(begin(algorithm=gae, critic={"lora": {"rank": 8}}))
    shutil.copytree(tmp_path / "model", tmp_path / "critic")
    settle(begin(algorithm=gae, critic={"path": str(tmp_path / "critic"), "lora": {"rank": 8, "start": "gone"}}))
    (tmp_path / "critic" / "config.json").write_text("{}")
    for changed in (
        {"lora": {"rank": 16}},
        {},
        {"path": str(tmp_path / "critic"), "lora": {"rank": 8}},
    ):
        with pytest.raises(ConfigError, match=r"another critic\.lora \(the checkpoints hold these adapters"):
            settle(begin(algorithm=gae, critic=changed))


def test_the_manual_names_every_fixed_setting_with_its_reason() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert [fixed.setting for fixed in FIXED if f"`{fixed.setting}`" not in manual] == []


def test_train_refuses_other_data_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_light_config(tmp_path)
    settings = load_settings(config)
    settings.run.dir.mkdir()
    settle(settings)
    write_config(settings)
    write_data(tmp_path, DATA)
    assert main(["train", str(config), "--resume"]) == 2
    assert "was started with another data.train" in capsys.readouterr().err
    assert not (settings.run.dir / "store").exists()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("--model.path={0}/other", "another model.path (the checkpoints are of this model: '{0}/model' before, "),
        ("--data.batch_size=4", "another data.batch_size (the place in the data is counted in it: 8 before, 4 now)"),
        ("--run.seed=7", "another run.seed"),
        ("--model.chat_template_kwargs={{brief: true}}", "another model.chat_template_kwargs (it says how"),
        ("--data.max_tokens=99", "another data.max_tokens"),
        ("--data.response_field=prompt", "another data.response_field"),
    ],
)
def test_sft_refuses_another_model_or_other_examples_and_leaves_the_directory_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, complaint: str
) -> None:
    config = _begun_sft(tmp_path)
    kept = (tmp_path / "run" / "config.yaml").read_bytes()
    assert main(["sft", str(config), "--resume", override.format(tmp_path)]) == 2
    assert complaint.format(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_bytes() == kept
    assert not (tmp_path / "run" / "logs" / "sft.log").exists()


def test_what_changed_under_the_same_name_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _begun_sft(tmp_path)
    (tmp_path / "examples.jsonl").write_text('{"prompt": "3", "response": "4"}\n')
    assert main(["sft", str(config), "--resume"]) == 2
    assert f"'{tmp_path}/examples.jsonl' with other contents before)" in capsys.readouterr().err


def test_a_run_whose_directory_is_lost_is_held_against_its_checkpoint(begin: MakeSettings, tmp_path: Path) -> None:
    run = _lost_but_for_a_checkpoint(tmp_path, {"run": "test", IDENTITY: kept(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"the run whose checkpoints are in .* was started with another run\.name \("):
        settle(begin(run=run | {"name": "other"}))
    with pytest.raises(ConfigError, match=r"another sampling\.num_responses \(.*: 8 before, 4 now\)"):
        settle(begin(run=run, sampling={"num_responses": 4}))
    assert not list((tmp_path / "new").iterdir())
    settle(begin(run=run))
    assert kept(tmp_path / "new") == kept(tmp_path / "run")


def test_a_run_whose_directory_is_there_is_held_against_the_checkpoints_at_another_place(
    begin: MakeSettings, tmp_path: Path
) -> None:
    """Of another run, or of a fine-tuning: where the controller restores, whatever run.dir says."""
    elsewhere = {"name": "test", "dir": str(tmp_path / "run"), "num_steps": 1, "checkpoint_url": f"{tmp_path}/others"}
    mine = kept(tmp_path / "run")
    _commit(tmp_path / "others", {"run": "test", IDENTITY: mine})
    settle(begin(run=elsewhere))
    _commit(tmp_path / "others", {"run": "other", IDENTITY: mine | {"run.name": "other"}}, step=6)
    with pytest.raises(
        ConfigError, match=r"the run whose checkpoints are in .*/others was started with another run\.n"
    ):
        settle(begin(run=elsewhere))
    _commit(tmp_path / "others", {"examples": ""}, step=8)
    with pytest.raises(NotFoundError, match=r"checkpoints of `rolecall sft`"):
        settle(begin(run=elsewhere))


def test_the_checkpoints_of_another_run_with_the_same_settings_are_not_its_own(
    begin: MakeSettings, tmp_path: Path
) -> None:
    """As two of a sweep, which were started at once with one run.checkpoint_url."""
    run = _lost_but_for_a_checkpoint(tmp_path, {})
    shutil.rmtree(tmp_path / "checkpoints")
    settle(begin(run=run))
    assert run_id(tmp_path / "new") != run_id(tmp_path / "run") != ""
    _commit(tmp_path / "checkpoints", {"run": "test", IDENTITY: kept(tmp_path / "run")})
    with pytest.raises(
        CheckpointMismatchError, match=r"was made by another run, and each needs a place of its own: go"
    ):
        settle(begin(run=run))
    settle(begin(run=run | {"dir": str(tmp_path / "run")}))
    settle(begin(run=run | {"checkpoint_url": str(tmp_path / "another")}))


def test_a_checkpoint_of_step_0_holds_nothing_against_a_new_run(begin: MakeSettings, tmp_path: Path) -> None:
    run = _lost_but_for_a_checkpoint(tmp_path, {"run": "test", IDENTITY: kept(tmp_path / "run")}, step=0)
    settle(begin(run=run, sampling={"num_responses": 4}))


def _lost_but_for_a_checkpoint(folder: Path, state: dict[str, Any], step: int = 4) -> dict[str, Any]:
    """The section `run` of a run that has a new directory, and a checkpoint elsewhere."""
    _commit(folder / "checkpoints", state, step)
    (folder / "new").mkdir()
    return {
        "name": "test",
        "dir": str(folder / "new"),
        "num_steps": 1,
        "checkpoint_url": str(folder / "checkpoints"),
    }


OTHER_SFT = {
    "--data.batch_size=4": "another data.batch_size (the place in the data is counted in it: 8 before, 4 now)",
    "--data.shuffle=false": "another data.shuffle (the place in the data is a number of rows: True before, False now)",
    "--run.seed=9": "another run.seed (the order of the data derives from it: 0 before, 9 now)",
}


@pytest.mark.parametrize("override", [*OTHER_SFT, "--model.path=other"])
def test_sft_whose_directory_is_lost_is_held_against_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    config = _begun_sft(tmp_path)
    _commit(tmp_path / "checkpoints", {"examples": "", IDENTITY: kept(tmp_path / "run")})
    shutil.rmtree(tmp_path / "run")
    elsewhere = f"--run.checkpoint_url={tmp_path}/checkpoints"
    override = override.replace("=other", f"={tmp_path}/other")
    assert main(["sft", str(config), "--resume", elsewhere, override]) == 2
    assert OTHER_SFT.get(override, "another model.path (the checkpoints are of this model") in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_checkpoints_of_the_other_command_are_refused_where_the_directory_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = f"--run.checkpoint_url={tmp_path}/checkpoints"
    for command, config, state, its in (
        ("sft", _begun_sft(tmp_path), {"run": "test"}, "train"),
        ("train", write_light_config(tmp_path), {"examples": ""}, "sft"),
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        _commit(tmp_path / "checkpoints", state)
        assert main([command, str(config), "--resume", elsewhere]) != 0
        told = f"holds checkpoints of `rolecall {its}`, and `rolecall {command}` cannot go on with them; name another"
        assert told in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def _commit(folder: Path, state: dict[str, Any], step: int = 4) -> None:
    checkpoints = RunCheckpoints(open_storage(str(folder)), num_kept=1)
    checkpoints.commit(checkpoints.begin(step), [], state)


def _begun_sft(folder: Path) -> Path:
    """A fine-tuning's file in `folder`, whose run directory is as one that was begun leaves it; another model beside
    it.
    """
    for name, head_dim in (("model", 32), ("other", 64)):
        path = write_model(folder / name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": head_dim}))
    (folder / "examples.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    config = folder / "sft.yaml"
    config.write_text(
        "run: {name: warm, dir: run, num_epochs: 1}\nmodel: {path: model}\n"
        "data: {train: examples.jsonl, batch_size: 8}\nactor: {token_budget: 4096}\n"
    )
    settings = load_sft_settings(config)
    settings.run.dir.mkdir()
    settle(settings)
    write_config(settings)
    return config
