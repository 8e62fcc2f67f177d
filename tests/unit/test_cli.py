"""The command line: what is parsed, what is refused, and what is not imported for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolecall.commands.cli import main
from rolecall.commands.steer import find
from rolecall.config_file import overrides_from
from rolecall.errors import ConfigError
from rolecall.settings import EvaluationSection, load_settings
from rolecall.settings.reward.rubric import rubric_tree
from tests.twins.launched import write_light_config


def test_help_imports_nothing_heavy() -> None:
    heavy = {"grpc", "pydantic", "torch", "rich"}
    code = (
        "import sys; from rolecall.commands import cli\ntry: cli.main(['--help'])\nexcept SystemExit: "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert "train" in answer.stdout


def test_a_bad_configuration_is_answered_before_grpc_or_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: x, dir: y}\n")
    code = (
        f"import sys; from rolecall.commands import cli; code = cli.main(['train', {str(file)!r}]); print(code, "
        f"sorted({{'grpc', 'torch'}} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "2 []"
    assert "run.num_steps" in answer.stderr


@pytest.mark.parametrize("words", [[], ["fly"], ["serve", "cook"], ["train"], ["sft"]])
def test_bad_usage_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_help_tells_of_sft_and_of_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["sft", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "fine-tune a model" in said
    assert "CONFIG" in said
    assert "--resume" in said
    assert "--section.key value" in said


@pytest.mark.parametrize(("folder", "said"), [(".", "is not empty"), ("run.yaml", "is a file")])
def test_an_export_to_a_place_that_is_taken_is_refused_before_torch_is_imported(
    tmp_path: Path, folder: str, said: str
) -> None:
    (tmp_path / "run.yaml").touch()
    code = (
        "import sys; from rolecall.training.export.__main__ import main\n"
        f"print(main(['x', {str(tmp_path / folder)!r}]), sorted({{'torch'}} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "2 []"
    assert said in answer.stderr


def test_an_sft_with_a_bad_file_is_answered_before_grpc_or_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("run: {name: x}\n")
    words = ["sft", str(file)]
    code = (
        f"import sys; from rolecall.commands import cli; code = cli.main({words!r}); print(code, sorted({{'grpc', "
        f"'torch'}} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "2 []"
    assert "data" in answer.stderr


def test_a_missing_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_overrides_come_with_a_space_or_an_equals_sign() -> None:
    assert overrides_from(["--run.seed", "3", "--data.system_prompt=a=b"]) == ["run.seed=3", "data.system_prompt=a=b"]


def test_a_section_is_absent_by_null_whatever_the_file_and_its_recipe_say(tmp_path: Path) -> None:
    config, held = write_light_config(tmp_path), "evaluation.sets={held: {path: held.jsonl}}"
    (recipe := tmp_path / "recipe.yaml").write_text("evaluation: {at_start: false}\n")
    config.write_text(config.read_text() + "telemetry:\n")
    given = overrides_from(["--evaluation", "null"])
    assert not load_settings(config, [held], recipe).evaluation.at_start
    assert load_settings(config, [held, *given], recipe).evaluation == EvaluationSection()
    assert load_settings(config, [*given, held], recipe).evaluation.sets.keys() == {"held"}
    with pytest.raises(ConfigError, match="gae reads values: add a critic section"):
        load_settings(config, overrides_from(["--critic=null"]), "ppo")
    with pytest.raises(ConfigError, match="reward: Field required"):
        load_settings(config, ["reward=null"])
    with pytest.raises(ConfigError, match="there is no such setting"):
        load_settings(config, ["critics=null"])


def test_an_option_that_does_not_exist_is_told_with_the_nearest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_light_config(tmp_path)), "--resum"]) == 2
    assert (
        "unexpected argument '--resum' (did you mean '--resume'?); overrides have the form --section.key value"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words",
    [["--run.seed"], ["seed", "3"], ["--seed", "3"], ["--run.seed", "3", "more"], ["--critic", "{}"], ["--critic"]],
)
def test_what_is_no_override_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        overrides_from(words)


def test_a_run_is_found_by_its_address() -> None:
    run = find("127.0.0.1:4000")
    assert (run.address, run.rpc.tls, run.directory) == ("127.0.0.1:4000", None, None)


def test_what_names_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run directory"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "run.yaml"], "there is no command 'trian' (did you mean 'train'?)"),
        (["serve", "rolout", "run.yaml"], "there is no role 'rolout' (did you mean 'rollout'?)"),
        (["xyz"], "there is no command 'xyz'; there are train, check, settings, manifests, evaluate, sft"),
    ],
)
def test_a_command_or_role_that_does_not_exist_is_told_with_the_nearest_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optimizer.betas=[0.9, 1.5]", "less than 1"),
        ("run.seed=99999999999999999999999", "less than 9223372036854775808"),
        ("reward.components={accuracy: {scorer: {kind: exact_match}}}", "is a metric of the whole reward"),
        ("reward.components={source: {scorer: {kind: exact_match}}}", "source: reward/source or eval/SET/source is a"),
        ("reward.components={'': {scorer: {kind: exact_match}}}", "one has no name"),
        (
            "reward.components={a: {scorer: {kind: function, target: 'm:f', components: [b]}}, "
            "a/b: {scorer: {kind: exact_match}}}",
            "a/b is the name of two",
        ),
    ],
)
def test_what_no_role_could_work_with_is_refused_with_the_file(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(write_light_config(tmp_path), [override])


def test_sets_and_components_have_names_in_any_script(tmp_path: Path) -> None:
    overrides = [
        "evaluation.sets={math/AIME 2024 (v1.1): {path: held.jsonl}, '\u6570\u5b66': {path: held.jsonl}}",
        "reward.components={'\u6b63\u786e': {scorer: {kind: exact_match}}, a/b: {scorer: {kind: json}}}",
    ]
    settings = load_settings(write_light_config(tmp_path), overrides)
    assert (*settings.evaluation.sets, *settings.reward.components) == (
        "math/AIME 2024 (v1.1)",
        "\u6570\u5b66",
        "\u6b63\u786e",
        "a/b",
    )


def test_files_are_utf_8_where_the_locale_is_not(tmp_path: Path) -> None:
    for name, text in (("rubric.yaml", "template: é 答"), ("config.json", '{"name": "é 答"}')):
        (tmp_path / name).write_text(text, encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from rolecall.manifests.render import write_all\n"
        "from rolecall.settings.reward.rubric import rubric_tree\n"
        "from rolecall.training.export.export import _describe\n"
        "folder = Path(sys.argv[1])\n"
        "rubric = rubric_tree(folder / 'rubric.yaml', SimpleNamespace(context=None))\n"
        "write_all({'made.yaml': rubric['template']}, folder)\n"
        "_describe(folder / 'config.json', 'float32')\n"
    )
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=ascii_alone, check=True, timeout=120)
    assert (tmp_path / "made.yaml").read_text(encoding="utf-8") == "é 答"
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["name"] == "é 答"


def test_a_rubric_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "rubric.yaml").write_bytes("template: é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"rubric\.yaml is not UTF-8"):
        rubric_tree(file, SimpleNamespace(context=None))


@pytest.mark.parametrize(
    ("added", "said"),
    [(b"\nrun: {name: other}\n", "run is there twice"), ("\n# caf\u00e9\n".encode("latin-1"), "is not UTF-8")],
)
def test_a_file_that_says_two_things_or_none_is_refused(tmp_path: Path, added: bytes, said: str) -> None:
    config = write_light_config(tmp_path)
    config.write_bytes(config.read_bytes() + added)
    with pytest.raises(ConfigError, match=said):
        load_settings(config)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.num_step=3", "run.num_step: there is no such setting (did you mean 'num_steps'?); correct or remove it"),
        ("actr.num_ranks=2", "actr: there is no such setting (did you mean 'actor'?)"),
        (
            "actor.learning_rate=0.1",
            "actor.learning_rate: there is no such setting (did you mean 'actor.optimizer.learning_rate'?)",
        ),
        (
            "critic={learning_rate: 0.1}",
            "critic.learning_rate: there is no such setting (did you mean 'critic.optimizer.learning_rate'?)",
        ),
        (
            "algorithm.advantage={kind: gae, lamda: 0.9}",
            "algorithm.advantage.lamda: there is no such setting (did you mean 'gae_lambda'?)",
        ),
        (
            "references={ref: {adress: 'h:1'}}",
            "references.ref.adress: there is no such setting (did you mean 'address'?)",
        ),
        (
            "reward.components={c: {scorer: {kind: function, targt: 'm:f'}}}",
            "c.scorer.targt: there is no such setting (did you mean 'target'?)",
        ),
        (
            "reward.components={c: {scorer: {kind: length, length: 1}}}",
            "c.scorer.length: there is no such setting beside this kind (there are max_tokens)",
        ),
        (
            "actor.optimizer.muon=1",
            "actor.optimizer.muon: there is no such setting beside this kind (there are betas, ",
        ),
        (
            "actor.optimizer.gradient_checkpointing=true",
            "no such setting (did you mean 'actor.gradient_checkpointing'?)",
        ),
        (
            "reward.components={c: {scorer: {kind: length, weight: 1}}}",
            "no such setting (did you mean 'reward.components.*.weight'?)",
        ),
        (
            "reward.components={c: {scorer: {kind: length, target: 'm:f'}}}",
            "c.scorer.target: there is no such setting beside this kind (there are max_tokens)",
        ),
        ("run.xyzzy=1", "run.xyzzy: there is no such setting; correct or remove it"),
        ("reward.components={math: {scorr: 1}}", "reward.components.math.scorr: there is no such setting (did you"),
    ],
)
def test_a_setting_that_does_not_exist_is_told_with_the_nearest_one(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(write_light_config(tmp_path), [override])
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "reward.components={c: {scorer: {kind: function, target: mine.score}}}",
            "c.scorer.target: 'mine.score' is not module:function, as in my_rewards:words",
        ),
        ("data.preprocess={function: mine.py}", "data.preprocess.function: '"),
        ("data.preprocess={function: mine.py}", "mine.py' is not module:function or folder/module:function"),
        ("run.name=my run", "run.name: 'my run' is not a name of up to 63 letters, digits"),
    ],
)
def test_a_text_of_another_form_is_told_with_the_form(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(write_light_config(tmp_path), [override])
    assert said in refused.value.message


@pytest.mark.parametrize("setting", ["controller.address", "actor.bind", "rollout.bind", "reward.address"])
@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "here:there"])
def test_what_is_no_address_is_refused_with_its_setting(tmp_path: Path, setting: str, address: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{setting}: '{address}' is not an address.*; write host:port or unix:/path"
    ):
        load_settings(write_light_config(tmp_path), [f"{setting}={address}"])


def test_an_address_with_tls_is_found_with_the_certificates_of_a_folder(tmp_path: Path) -> None:
    found = find("localhost:9000", tls=tmp_path)
    assert found.rpc.tls is not None
    assert found.rpc.tls.key_file == tmp_path / "tls.key"


def test_the_store_s_url_may_stand_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, secret = write_light_config(tmp_path), tmp_path / "secret"
    monkeypatch.setenv("ROLECALL_STORE_URL_FILE", str(secret))
    with pytest.raises(ConfigError, match="ROLECALL_STORE_URL_FILE"):
        load_settings(config)
    secret.write_text("redis://rolecall:word@store:6379/0\n")
    url = load_settings(config).store.url
    assert url is not None
    assert url.get_secret_value() == "redis://rolecall:word@store:6379/0"
