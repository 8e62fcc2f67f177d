"""Recipes: what each one is, and how a configuration takes one."""

from pathlib import Path

import pytest
import yaml

from rolecall.errors import ConfigError
from rolecall.launcher.plan import resolve, write_config
from rolecall.settings import GrpoAdvantage, PlainAdvantage, load_settings, recipe_names
from tests.twins.launched import write_light_config

RECIPES = Path(__file__).resolve().parents[2] / "rolecall" / "recipes"
TASK_SETS = {"groups_per_batch", "num_minibatches", "num_epochs", "max_staleness"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_short_cites_its_source_and_sets_the_method_alone(path: Path, config: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 25
    assert "arXiv:" in text.splitlines()[0] + text.splitlines()[1]
    tree = yaml.safe_load(text)
    assert tree.keys() <= {"algorithm", "critic", "references"}
    assert not TASK_SETS & tree["algorithm"].keys()
    load_settings(config, ["sampling.num_responses=8"], path)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_reads_back_the_same_from_what_is_written_for_the_roles(path: Path, config: Path) -> None:
    overrides = ["sampling.num_responses=8", "algorithm.entropy={entropy_coef: 0.01}"]
    resolved = resolve(load_settings(config, overrides, path))
    resolved.run.dir.mkdir()
    assert load_settings(write_config(resolved)) == resolved


def test_what_the_file_sets_goes_before_the_recipe(config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "algorithm: {groups_per_batch: 7, max_staleness: 3, advantage: {kind: grpo, normalize_std: false}}\n"
    )
    settings = load_settings(config, recipe=recipe)
    assert (settings.algorithm.groups_per_batch, settings.algorithm.max_staleness) == (2, 3)
    assert settings.algorithm.advantage == GrpoAdvantage(normalize_std=False)


def test_a_length_by_the_one_key_goes_before_one_by_the_other_farther_off(config: Path, tmp_path: Path) -> None:
    (recipe := tmp_path / "recipe.yaml").write_text("run: {num_epochs: 3, seed: 5}\n")
    steps = load_settings(config).run.num_steps
    run = load_settings(config, recipe=recipe).run
    assert (run.num_steps, run.num_epochs, run.seed) == (steps, None, 5)
    run = load_settings(config, ["run.num_epochs=2"], recipe).run
    assert (run.num_steps, run.num_epochs) == (None, 2)
    run = load_settings(config, ["run.num_epochs=2", "run.num_steps=null"]).run
    assert (run.num_steps, run.num_epochs) == (None, 2)
    run = load_settings(config, ["run.num_steps=null"], recipe).run
    assert (run.num_steps, run.num_epochs) == (None, 3)


def test_two_lengths_in_one_place_are_refused_with_both(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"give one of run\.num_steps and run\.num_epochs \(0 and 2\): set the other"):
        load_settings(config, ["run.num_steps=0", "run.num_epochs=2"])
    with pytest.raises(ConfigError, match=r"give one of run\.num_steps and run\.num_epochs$"):
        load_settings(config, ["run.num_steps=null"])


def test_of_two_kinds_of_a_section_the_files_own_is_taken_whole(config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {advantage: {kind: grpo, normalize_std: false}}\n")
    assert load_settings(config, ["algorithm.advantage={kind: rloo}"], recipe).algorithm.advantage == PlainAdvantage(
        kind="rloo"
    )


def test_a_file_names_its_recipe_beside_it_and_an_argument_replaces_it(config: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.yaml").write_text("algorithm: {max_staleness: 3}\n")
    (tmp_path / "other.yaml").write_text("algorithm: {max_staleness: 4}\n")
    config.write_text(config.read_text() + "recipe: beside.yaml\n")
    assert load_settings(config).algorithm.max_staleness == 3
    assert load_settings(config, recipe=tmp_path / "other.yaml").algorithm.max_staleness == 4


def test_a_recipe_that_is_wrong_is_named(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_settings(config, recipe=tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("algorithm: {advantages: {kind: grpo}}\n")
    with pytest.raises(ConfigError, match=r"(?s)bad\.yaml.*algorithm\.advantages"):
        load_settings(config, recipe=tmp_path / "bad.yaml")


def test_a_recipe_of_ours_goes_by_its_name_in_the_file_and_as_an_argument(config: Path) -> None:
    config.write_text(config.read_text() + "recipe: rloo\n")
    assert load_settings(config).algorithm.advantage.kind == "rloo"
    assert load_settings(config, recipe="dr_grpo") == load_settings(config, recipe=RECIPES / "dr_grpo.yaml")


def test_a_name_that_is_no_recipe_is_told_with_the_nearest_one(config: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no recipe 'dr_gpro' \(did you mean 'dr_grpo'\?\); give the path of a file, or one of the names cispo, ",
    ):
        load_settings(config, recipe="dr_gpro")


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_file_of_every_recipe_reads_back_the_same(name: str, tmp_path: Path) -> None:
    settings = load_settings(write_light_config(tmp_path), ["sampling.num_responses=8"], name)
    assert type(settings).model_validate(settings.model_dump(mode="json")).model_dump() == settings.model_dump()
