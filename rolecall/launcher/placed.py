"""The note of what the launcher added to a run's file: `<run.dir>/placed.json`, the addresses that it chose for local
roles.

The resolved `config.yaml` no longer tells them from a user's own. They are nobody's once the run is over, so whoever
starts other roles from that file, or the same ones again, leaves them out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rolecall.config_file import complete_tree, read_tree
from rolecall.disk import replace_text
from rolecall.launcher.epochs import count_steps
from rolecall.settings import AddressSection, RunSettings, from_environment, validated

FILE = "placed.json"
"""File in run.dir."""


def note_placed(configured: RunSettings, resolved: RunSettings) -> None:
    """Writes which addresses `resolved` has that `configured` has not."""
    sections: dict[str, tuple[AddressSection, AddressSection]] = {
        "controller": (configured.controller, resolved.controller),
        "actor": (configured.actor, resolved.actor),
        "reward": (configured.reward, resolved.reward),
    }
    if configured.critic is not None and resolved.critic is not None:
        sections["critic"] = (configured.critic, resolved.critic)
    placed: dict[str, dict[str, Any]] = {name: _added(*pair) for name, pair in sections.items()}
    references = {name: _added(before, resolved.references[name]) for name, before in configured.references.items()}
    servers = {
        name: _added(before, resolved.reward.servers[name]) for name, before in configured.reward.servers.items()
    }
    placed["reward"] = {**placed["reward"], "servers": servers}
    replace_text(resolved.run.dir / FILE, json.dumps({**placed, "references": references}) + "\n")


def load_unplaced(path: Path, overrides: Sequence[str], recipe: str | None, out: TextIO) -> RunSettings:
    """`load_settings` for whoever starts the roles, of what `load_unplaced_tree` returns; epochs are counted in steps,
    which a line in `out` says before. RoleCallError of who counts, too.
    """
    tree, given = load_unplaced_tree(path, overrides, recipe)
    from_environment(tree)
    settings = validated(tree, path, given)
    if settings.run.num_epochs is None:
        return settings
    files = ", ".join(map(str, settings.data.train))
    out.write(f"counting the prompts of {files} for run.num_epochs\n")
    out.flush()  # many take minutes
    length = {"num_epochs": None, "num_steps": count_steps(settings, settings.run.num_epochs)}
    return validated({**tree, "run": tree["run"] | length}, path, given)


def load_unplaced_tree(path: Path, overrides: Sequence[str], recipe: str | None) -> tuple[dict[str, Any], str]:
    """`load_tree` without the addresses that are noted beside the file. What was changed in the file since stays, and
    so does an override, even of a noted value: somebody may have started that role there by hand.
    """
    tree, note = read_tree(path), path.parent / FILE
    if note.is_file():
        tree = _less(tree, json.loads(note.read_text()))
    return complete_tree(tree, path.parent, overrides, recipe)


def _added(before: AddressSection, after: AddressSection) -> dict[str, Any]:
    pairs = {"address": (before.address, after.address), "bind": (before.bind, after.bind)}
    return {field: added for field, (given, added) in pairs.items() if given != added}


def _less(tree: dict[str, Any], placed: dict[str, Any]) -> dict[str, Any]:
    kept = dict(tree)
    for name, noted in placed.items():
        if isinstance(noted, dict) and isinstance(kept.get(name), dict):
            kept[name] = _less(kept[name], noted)
        elif name in kept and kept[name] == noted:
            del kept[name]
    return kept
