"""Loads settings from a file, overrides and the environment; says what may be meant by one that does not exist."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from rolecall.config_file import load_tree, overridden, read_tree
from rolecall.errors import ConfigError
from rolecall.settings.data import JobSection, RunSection
from rolecall.settings.environment import from_environment
from rolecall.settings.reward_model import RewardModelSettings
from rolecall.settings.run import RunSettings
from rolecall.settings.section import Section
from rolecall.settings.sft import SftRunSection, SftSettings
from rolecall.terminal import did_you_mean

CONFIG = "config.yaml"
"""The resolved configuration in a run's folder."""
_OF_A_RUN = "identity.json"
"""A file beside it in the folder of every run that was started."""
_Settings = TypeVar("_Settings", bound=Section)
_Job = TypeVar("_Job", bound=JobSection)


def load_settings(path: Path, overrides: list[str] | None = None, recipe: str | Path | None = None) -> RunSettings:
    """Reads, overrides and checks the file at `path`. ConfigError names the key and what is wrong with it.

    A recipe (`recipe:` in the file; the argument goes before it) holds the keys of a method, and is the name of one of
    ours or a file; what the file and the overrides say goes before it.
    """
    tree, given = load_tree(path, overrides or (), recipe)
    from_environment(tree)
    return _valid(RunSettings, tree, path, given)


def validated(tree: dict[str, Any], path: Path, given: str = "") -> RunSettings:
    """The settings that `tree` says, of the file at `path` and what else was `given` (`load_tree`). ConfigError, as of
    `load_settings`.
    """
    return _valid(RunSettings, tree, path, given)


def load_sft_settings(path: Path, overrides: list[str] | None = None) -> SftSettings:
    """The same for the file of `rolecall sft`, which has no recipe."""
    tree = overridden(read_tree(path), overrides or ())
    return _valid(SftSettings, tree, path, "")


def is_of_sft(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether the file at `path`, overridden, is of `rolecall sft`. ConfigError when it cannot be read."""
    return _is_of_sft(overridden(read_tree(path), overrides))


def load_reward_model_settings(path: Path, overrides: list[str]) -> RewardModelSettings:
    """The same for the file of `rolecall serve reward-model`."""
    tree = overridden(read_tree(path), overrides)
    return _valid(RewardModelSettings, tree, path, "")


def config_of(run: Path) -> Path:
    """The configuration of the run that `run` names: itself, or the one in a run's folder. ConfigError when there is
    none.
    """
    file = run / CONFIG if run.is_dir() else run
    if not file.is_file():
        raise ConfigError(f"{run} is neither a run directory with a config.yaml nor a configuration file")
    return file


def settings_of_run(run: Path) -> RunSettings:
    """The settings of the run that `run` names, its folder or its configuration. Of a folder that was moved or copied,
    run.dir is that folder. ConfigError as `config_of` and `load_settings`.
    """
    settings = load_settings(config_of(run))
    return settings.model_copy(update={"run": _at_home(settings.run, run)})


def run_section_of(run: Path, *, owns_checkpoints: bool = False) -> RunSection | SftRunSection:
    """The section `run` of a run or of `rolecall sft`, as `settings_of_run` has it. ConfigError where it is to own its
    checkpoints, and is a copy of a run that is here, with the same ones.
    """
    file = config_of(run)
    said = load_sft_settings(file).run if is_of_sft(file) else load_settings(file).run
    section = _at_home(said, run)
    if owns_checkpoints and section.checkpoints == said.checkpoints:
        require_no_copy(run, said)
    return section


def require_home(run: Path, section: JobSection) -> None:
    """ConfigError when `run` is the folder of a run, or the configuration in it, and `section` says that the run is in
    another folder: whoever starts something there would do so in the other.
    """
    if (home := _home_of(run)) is not None and not _is_same(section.dir, home):
        raise ConfigError(
            f"{config_of(run)} says that run.dir is {section.dir}, and lies in {home}: the folder was moved or copied; "
            f"give --run.dir {home} (and --run.checkpoint_url where it is set), or edit them there; or name "
            f"{section.dir / CONFIG}"
        )


def require_no_copy(run: Path, section: JobSection) -> None:
    """ConfigError when `run` is the folder of a run, or the configuration in it, and a copy of another that is here."""
    home = _home_of(run)
    if home is not None and os.path.isdir(section.dir) and not _is_same(section.dir, home):
        raise ConfigError(
            f"{home} is a copy of the run in {section.dir}, whose controller and checkpoints it names; name that, or "
            f"edit run.dir, run.checkpoint_url and controller.address in {config_of(run)}"
        )


def _at_home(section: _Job, run: Path) -> _Job:
    """`section` with its folder, and checkpoints beneath it, where they lie now."""
    home, url = _home_of(run), section.checkpoint_url
    if home is None or _is_same(section.dir, home):
        return section
    if url is not None:
        folder = Path(url.removeprefix("file://"))
        if folder.is_relative_to(section.dir):
            url = str(home / folder.relative_to(section.dir))
    return section.model_copy(update={"dir": home, "checkpoint_url": url})


def _home_of(run: Path) -> Path | None:
    """The folder of the run that `run` names; None for a configuration that lies elsewhere."""
    folder = run if run.is_dir() else run.parent if run.name == CONFIG else None
    return folder.absolute() if folder is not None and (folder / _OF_A_RUN).is_file() else None


def _is_same(folder: Path, home: Path) -> bool:
    """Whether both are one; a folder that this user may not see is another."""
    return os.path.isdir(folder) and folder.samefile(home)


def _is_of_sft(tree: dict[str, Any]) -> bool:
    """Whether `tree` is of `rolecall sft`: a run's says something that the other's cannot."""
    data = tree.get("data")
    return tree.keys() <= SftSettings.model_fields.keys() and isinstance(data, dict) and "batch_size" in data


def _valid(kind: type[_Settings], tree: dict[str, Any], path: Path, given: str) -> _Settings:
    # A section that is null is absent, whatever a recipe says of it.
    said = {name: value for name, value in tree.items() if value is not None or name not in kind.model_fields}
    try:
        return kind.model_validate(said, context={"base": path.resolve().parent})
    except ValidationError as error:
        if kind is RunSettings and _is_of_sft(tree):
            raise ConfigError(
                f"{path} is the file of `rolecall sft`, which starts it; no other command but check, rewind and export "
                "takes it, and how far it is stands in metrics.jsonl and logs/sft.log in its run.dir"
            ) from error
        if kind is SftSettings and {"algorithm", "reward"} <= tree.keys():
            raise ConfigError(f"{path} is the file of a run; start it with `rolecall train`") from error
        lines = [
            f"  {_as_written(kind, item) or 'configuration'}: {_said(kind, item)}"
            for item in error.errors(include_url=False)
        ]
        raise ConfigError(f"{path}{given} is not a valid configuration:\n" + "\n".join(lines)) from error


def _as_written(kind: type[Section], item: ErrorDetails) -> str:
    """The setting that `item` is about as a file has it: without the `kind` by which one of several sections is chosen.
    An unknown setting may be called as one.
    """
    parts = [str(part) for part in item["loc"]]
    unknown = len(parts) - 1 if item["type"] == "extra_forbidden" else None
    return ".".join(
        part for place, part in enumerate(parts) if place == unknown or not _is_kind(kind, parts[:place], part)
    )


def _is_kind(kind: type[BaseModel], parents: Sequence[str], name: str) -> bool:
    """Whether `name`, below `parents`, is the `kind` of a section rather than a field or a key of a mapping."""
    sections = _sections_at(kind, parents)
    return not any(name in section.model_fields for section in sections) and name in _kinds(sections)


def _kinds(sections: Sequence[type[BaseModel]]) -> set[str]:
    return {
        name
        for section in sections
        if "kind" in section.model_fields
        for name in get_args(section.model_fields["kind"].annotation)
    }


def _said(kind: type[Section], item: ErrorDetails) -> str:
    """Says what is wrong in the words of the file."""
    match item["type"]:
        case "union_tag_not_found":
            return "kind is missing; add it, for it says what the other fields mean"
        case "union_tag_invalid":
            return f"there is no kind {item['ctx']['tag']!r}; there are {item['ctx']['expected_tags']}"
        case "model_attributes_type" | "model_type":
            *parents, name = map(str, item["loc"])
            if _holds_names(kind, parents) and any(name in each.model_fields for each in _sections_at(kind, parents)):
                return f"{parents[-1]} holds sections by their names; write {parents[-1]}: {{NAME: {{{name}: ...}}}}"
            return "a section is wanted; give its fields, as in {field: value}"
        case "extra_forbidden":
            return f"there is no such setting{_suggestion(kind, item['loc'])}; correct or remove it"
    return item["msg"].removeprefix("Value error, ")


def _suggestion(kind: type[BaseModel], location: Sequence[int | str]) -> str:
    """Suggests what may be meant by the unknown setting at `location` of a file of `kind`: a sibling of a similar name,
    or a setting of the same name elsewhere. Where a `kind` decides on siblings it is one above, or else any of these.
    """
    *parents, name = map(str, location)
    sections = _sections_at(kind, parents)
    siblings = {field for section in sections for field in section.model_fields}
    near = did_you_mean(name, siblings)
    if near:
        return near
    alike = sorted(
        (path for path in set(_paths(kind, ())) if path[-1] == name),
        key=lambda path: (-_shared(path, parents), path),
    )
    if "kind" in siblings:
        above = [path for path in alike if _shared(path, parents) == len(path) - 1]
        alike = [path for path in above if set(sections).isdisjoint(_sections_at(kind, path[:-1]))]
        if not alike:
            return f" beside this kind (there are {', '.join(sorted(siblings - {'kind'})) or 'none'})"
    return f" (did you mean {'.'.join(alike[0])!r}?)" if alike else ""


def _sections_at(kind: type[BaseModel], parents: Sequence[str]) -> list[type[BaseModel]]:
    """The sections that may stand there. A name that is no field is a key of a mapping, or the `kind` by which one of
    several sections is chosen.
    """
    sections = [kind]
    for name in parents:
        below = [
            found
            for section in sections
            if name in section.model_fields
            for found in _sections(section.model_fields[name].annotation)
        ]
        chosen = [
            section
            for section in sections
            if "kind" in section.model_fields and name in get_args(section.model_fields["kind"].annotation)
        ]
        sections = below or chosen or sections
    return sections


def _holds_names(kind: type[BaseModel], location: Sequence[str]) -> bool:
    """Whether sections stand there by names."""
    *above, name = location or ("",)
    fields = [section.model_fields[name] for section in _sections_at(kind, above) if name in section.model_fields]
    return any(_is_mapping(field.annotation) for field in fields)


def _is_mapping(annotation: Any) -> bool:
    return "dict" in str(annotation)


def _paths(kind: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        yield (*above, name)
        between = ("*",) if _is_mapping(field.annotation) else ()
        for section in _sections(field.annotation):
            yield from _paths(section, (*above, name, *between))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _shared(path: Sequence[str], parents: Sequence[str]) -> int:
    """How many names from the top they share; the path has * for any."""
    return next(
        (count for count, (one, other) in enumerate(zip(path, parents, strict=False)) if one not in ("*", other)),
        min(len(path), len(parents)),
    )


def store_url_file(run_dir: Path, role: str) -> Path:
    """The file with the URL of a run's embedded store for `role` while the store runs; the reward role has none.

    The owner alone can read it, for it holds the password.
    """
    return run_dir / "store" / f"url.{role}"


def with_running_store(settings: RunSettings, role: str) -> RunSettings:
    """`settings` with the URL of the run's embedded store for `role`, where none is set and one runs: so that a role
    started by hand finds it.
    """
    file = store_url_file(settings.run.dir, role)
    if settings.store.url is not None or not file.is_file():
        return settings
    url = SecretStr(file.read_text().strip())
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": url})})
