"""The configuration file as a tree of keys, and the overrides of it on a command line.

Imports nothing heavy: what must answer at once, as `rolecall health`, reads the few keys it needs from the tree. What
the keys mean, and whether they are right, says `rolecall/settings`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rolecall.errors import ConfigError
from rolecall.terminal import did_you_mean

_RECIPES = Path(__file__).resolve().parent / "recipes"
_LENGTHS = ("num_steps", "num_epochs")
"""Keys of the section `run` that say its length, by one of them."""


class _Loader(yaml.SafeLoader):
    """YAML, in which a section that is there twice is a mistake and not the last of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; a YAMLError names a key that is there twice."""
        seen = set[str]()
        for name, mark in ((key.value, key.start_mark) for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> dict[str, Any]:
    """Returns the sections of the file at `path`. ConfigError when it cannot be read or holds none."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8, or name another file") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}; give the path of a YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of sections (run, model, data, ...), not {type(tree).__name__}")
    return tree


def load_tree(path: Path, overrides: Sequence[str], recipe: str | Path | None = None) -> tuple[dict[str, Any], str]:
    """Returns the sections of the file at `path` with `overrides`, and with what its recipe says besides (`recipe`, or
    the one that the file names); and which recipe that is, for complaints. ConfigError as of `read_tree`.
    """
    return complete_tree(read_tree(path), path.parent, overrides, recipe)


def complete_tree(
    tree: dict[str, Any], folder: Path, overrides: Sequence[str], recipe: str | Path | None
) -> tuple[dict[str, Any], str]:
    """Returns what `load_tree` does, of the sections `tree` of a file in `folder`."""
    named = tree.pop("recipe", None)
    tree = overridden(tree, overrides)
    if recipe is None and named is None:
        return tree, ""
    file = recipe_file(str(recipe)) if recipe is not None else recipe_file(str(named), folder)
    return _over(tree, _less_length(read_tree(file), tree)), f" with the recipe {file}"


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `tree` with `overrides`. ConfigError when one is none."""
    said: dict[str, Any] = {}
    for override in overrides:
        override_tree(said, override)
    tree = _less_length(tree, said)
    for override in overrides:
        override_tree(tree, override)
    return tree


def _less_length(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` without the run's length where `above`, which goes before it, gives one, be it by the other key."""
    run, nearer = below.get("run"), above.get("run")
    if not isinstance(run, dict) or not isinstance(nearer, dict) or all(nearer.get(key) is None for key in _LENGTHS):
        return below
    return below | {"run": {key: value for key, value in run.items() if key not in _LENGTHS}}


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


def override_tree(tree: dict[str, Any], override: str) -> None:
    """Sets the key of `override`, `section.key=value`, in `tree`; the value is read as YAML. ConfigError when it is no
    override.
    """
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
        node, tree[leaf] = yaml.compose(value, _Loader), yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is not YAML: {error}") from error
    if value[node.end_mark.index if node is not None else 0 :].strip():
        raise ConfigError(f"override {override!r}: # begins a comment, which is not read; put the value in quotes")


def overrides_from(arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """`--section.key value` and `--section.key=value` as overrides for `load_settings`, and `--section null`, which has
    a section absent. ConfigError names a word that is none of these, with the nearest of `options`, those that the
    command has besides.
    """
    overrides, words = [], iter(arguments)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        following = value if equals else next(words, None)
        if not word.startswith("--") or ("." not in key and following != "null"):
            raise ConfigError(
                f"unexpected argument {word!r}{did_you_mean(word, options)}; overrides have the form --section.key "
                "value, or --section null"
            )
        if following is None:
            raise ConfigError(f"--{key} needs a value")
        overrides.append(f"{key}={following}")
    return overrides
