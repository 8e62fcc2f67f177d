"""Loads settings from a file, overrides and the environment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from rolecall.errors import ConfigError
from rolecall.nearest import did_you_mean
from rolecall.settings.environment import from_environment
from rolecall.settings.names import suggestion
from rolecall.settings.run import RunSettings
from rolecall.settings.section import Section
from rolecall.settings.sft import SftSettings

_Settings = TypeVar("_Settings", bound=Section)
_RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load_settings(path: Path, overrides: list[str] | None = None, recipe: str | Path | None = None) -> RunSettings:
    """Reads, overrides and checks the file at `path`. ConfigError names the key and what is wrong with it.

    A recipe (`recipe:` in the file; the argument goes before it) holds the keys of a method, and is the name of one of
    ours or a file; what the file and the overrides say goes before it.
    """
    tree = _read(path)
    named = tree.pop("recipe", None)
    for override in overrides or []:
        _override(tree, override)
    given = ""
    if recipe is not None or named is not None:
        file = recipe_file(str(recipe)) if recipe is not None else recipe_file(str(named), path.parent)
        tree, given = _over(tree, _read(file)), f" with the recipe {file}"
    from_environment(tree)
    return _valid(RunSettings, tree, path, given)


def recipe_names() -> list[str]:
    """The methods of which there is a recipe."""
    return sorted(file.stem for file in _RECIPES.glob("*.yaml"))


def recipe_file(named: str, folder: Path = Path()) -> Path:
    """The file of a recipe: `named` is one of `recipe_names`, or a file, relative to `folder`. ConfigError when it is
    neither.
    """
    if named in recipe_names():
        return _RECIPES / f"{named}.yaml"
    file = folder / Path(named).expanduser()
    if not file.is_file():
        near, known = did_you_mean(named, recipe_names()), ", ".join(recipe_names())
        raise ConfigError(f"there is no recipe {named!r}{near}; give the path of a file, or one of the names {known}")
    return file


def load_sft_settings(path: Path, overrides: list[str] | None = None) -> SftSettings:
    """The same for the file of `rolecall sft`, which has no recipe."""
    tree = _read(path)
    for override in overrides or []:
        _override(tree, override)
    return _valid(SftSettings, tree, path, "")


def checkpoints_of(path: Path) -> str:
    """Folder or URL of the checkpoints by the resolved configuration of a run or of `rolecall sft`."""
    return (
        load_sft_settings(path).run.checkpoints
        if "algorithm" not in _read(path)
        else load_settings(path).run.checkpoints
    )


def _valid(kind: type[_Settings], tree: dict[str, Any], path: Path, given: str) -> _Settings:
    try:
        return kind.model_validate(tree, context={"base": path.resolve().parent})
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) for part in item['loc']) or 'configuration'}: {_said(kind, item)}"
            for item in error.errors(include_url=False)
        ]
        raise ConfigError(f"{path}{given} is not a valid configuration:\n" + "\n".join(lines)) from error


def _said(kind: type[Section], item: ErrorDetails) -> str:
    """Says what is wrong in the words of the file."""
    match item["type"]:
        case "union_tag_not_found":
            return "kind is missing; add it, for it says what the other fields mean"
        case "union_tag_invalid":
            return f"there is no kind {item['ctx']['tag']!r}; there are {item['ctx']['expected_tags']}"
        case "model_attributes_type" | "model_type":
            return "a section is wanted; give its fields, as in {field: value}"
        case "extra_forbidden":
            return f"there is no such setting{suggestion(kind, item['loc'])}; correct or remove it"
    return item["msg"].removeprefix("Value error, ")


def store_url_file(run_dir: Path) -> Path:
    """The file with the URL of a run's embedded store while the store runs.

    The owner alone can read it, for it holds the password.
    """
    return run_dir / "store" / "url"


def with_running_store(settings: RunSettings) -> RunSettings:
    """`settings` with the URL of the run's embedded store, where none is set and one runs: so that a role started by
    hand finds it.
    """
    file = store_url_file(settings.run.dir)
    if settings.store.url is not None or not file.is_file():
        return settings
    url = SecretStr(file.read_text().strip())
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": url})})


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; give the path of a YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of sections (run, model, data, ...), not {type(tree).__name__}")
    return tree


def _over(tree: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """`tree` with what only `recipe` says, section by section. Of two different kinds of a section `tree`'s alone is
    taken.
    """
    merged = dict(recipe)
    for key, value in tree.items():
        below = recipe.get(key)
        if (
            isinstance(value, dict)
            and isinstance(below, dict)
            and value.get("kind", below.get("kind")) == below.get("kind")
        ):
            merged[key] = _over(value, below)
        else:
            merged[key] = value
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    *parents, leaf = key.split(".")
    if not separator or not all([*parents, leaf]):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    for name in parents:
        below = tree.get(name) or {}
        if not isinstance(below, dict):
            raise ConfigError(f"override {override!r}: {name} is {below!r} and has no keys")
        tree[name] = dict(below)
        tree = tree[name]
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is not YAML: {error}") from error


def overrides_from(arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """`--section.key value` and `--section.key=value` as overrides for `load_settings`. ConfigError names a word that
    is neither, with the nearest of `options`, those that the command has besides.
    """
    overrides, words = [], iter(arguments)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            raise ConfigError(
                f"unexpected argument {word!r}{did_you_mean(word, options)}; overrides have the form --section.key "
                "value"
            )
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"--{key} needs a value")
            value = following
        overrides.append(f"{key}={value}")
    return overrides
