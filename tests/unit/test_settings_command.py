"""`rolecall settings`: the keys of files, as those who write them see them."""

import io

import pytest

from rolecall.commands.cli import main
from rolecall.commands.settings import FILES, NAME, keys_of, settings
from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, RunSettings


def told(key: str | None, of: str = "run") -> str:
    out = io.StringIO()
    settings(of, key, out)
    return out.getvalue()


@pytest.mark.parametrize("of", FILES)
def test_every_key_of_a_file_says_what_it_means_and_takes(of: str) -> None:
    keys = list(keys_of(FILES[of]))
    assert len(keys) > 20
    for key in keys:
        assert key.meaning, key.path
        assert key.takes or any(other.path.startswith(f"{key.path}.") for other in keys), key.path


def test_a_key_is_found_by_its_path_or_by_any_part_of_it() -> None:
    wanted = "actor.optimizer.max_grad_norm: number > 0 = 1.0\n"
    assert told("actor.optimizer.max_grad_norm").startswith(wanted)
    assert wanted in told("max_grad_norm")
    assert wanted in told("actor")
    assert told("optimizer").count("optimizer.max_grad_norm") == 2, "the actor's and the critic's"
    assert told("max_tokens", of="sft") != told("max_tokens"), "another kind of file"


def test_the_sections_of_a_file_are_those_of_its_class() -> None:
    lines = [
        line.partition(" = ")[0] for line in told(None).splitlines() if line and not line.startswith((" ", "rolecall"))
    ]
    assert {line.removesuffix(f".{NAME}") for line in lines} == set(RunSettings.model_fields)


def test_defaults_are_those_of_the_class() -> None:
    defaults = {key.path: key.default for key in keys_of(OptimizerSection)}
    assert (defaults["learning_rate"], defaults["kind"], defaults["betas"]) == ("1e-06", "adamw", "[0.9, 0.95]")
    assert (defaults["offload"], defaults["decay_steps"]) == ("false", "null")


def test_a_key_that_some_kinds_of_a_section_have_names_them() -> None:
    assert "policy_loss.tau_pos: number > 0 = 1.0  (of sapo)" in told("tau_pos")
    assert "(of ppo | gspo | cispo | gmpo)" in told("clip_eps_high")
    kinds = told("algorithm.policy_loss").splitlines()[2]
    assert kinds.startswith("algorithm.policy_loss.kind: ppo | gspo")
    assert told("algorithm.policy_loss").count("policy_loss.kind") == 1


def test_named_sections_and_lists_of_sections_show_where_the_name_stands() -> None:
    assert f"reward.components.{NAME}.weight" in told("reward.components")
    assert "algorithm.correction.reject[].high" in told("algorithm.correction.reject")


def test_a_name_that_no_key_has_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no key 'actor.optimiser' .did you mean 'actor.optimizer'"):
        told("actor.optimiser")
    assert main(["settings", "warmup_step"]) == 2
    assert "did you mean 'warmup_steps'" in capsys.readouterr().err


def test_the_command_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "run.num_steps"]) == 0
    assert capsys.readouterr().out.startswith("run.num_steps: integer >= 0 | null = null\n    ")
