"""`rolecall evaluate` before anything starts: which run it makes of a run's file, and how it tells what came of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.commands.evaluate import evaluation_settings, figures, write_figures
from rolecall.errors import ConfigError
from rolecall.launcher.placed import note_placed
from rolecall.launcher.plan import resolve, write_config
from rolecall.settings import RunSettings, load_settings

TREE: dict[str, dict[str, Any]] = {
    "run": {"name": "big", "dir": "run", "num_steps": 100, "seed": 7, "checkpoint_url": "s3://bucket/big"},
    "model": {"path": "base", "dtype": "float32"},
    "data": {"train": "train.jsonl"},
    "evaluation": {"sets": {"held": {"path": "held.jsonl", "num_responses": 4, "temperature": 1.0}}, "at_start": False},
    "algorithm": {"groups_per_batch": 8, "advantage": {"kind": "gae"}},
    "critic": {},
    "actor": {"optimizer": {"schedule": "wsd", "decay_steps": 50}, "lora": {"rank": 8}},
    "weights": {"merge_adapters": True},
    "sampling": {"num_responses": 1, "max_tokens": 64},
    "store": {
        "url": "redis://elsewhere:6379",
        "durability": "vouched",
        "max_bytes": 2**31 + 1,
        "binary": "/opt/valkey/bin/valkey-server",
    },
    "trackers": {"wandb_project": "mine", "num_samples_kept": 3},
    "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
}


def settings(folder: Path, *overrides: str, **sections: dict[str, Any]) -> RunSettings:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**TREE, **sections}))
    return evaluation_settings(file, list(overrides), None, folder / "trained", folder / "out")


def test_what_belongs_to_training_is_left_out(tmp_path: Path) -> None:
    made = settings(tmp_path, "evaluation.sets.held.num_responses=2")
    assert (made.run.num_steps, made.evaluation.at_start) == (0, True)
    assert (made.run.name, made.run.seed, made.run.dir) == ("big", 7, tmp_path / "out")
    assert made.run.checkpoints == str(tmp_path / "out" / "checkpoints"), "the run's own stay as they are"
    assert (made.model.path, made.model.dtype) == (tmp_path / "trained", "float32")
    assert made.critic is None
    assert made.actor.lora is None
    assert (made.store.url, made.store.durability) == (None, "strict")
    assert (made.store.max_bytes, made.store.binary) == (2**31 + 1, "/opt/valkey/bin/valkey-server"), "those of its own"
    assert (made.trackers.wandb_project, made.trackers.num_samples_kept) == (None, 3)
    assert made.sampling.max_tokens == 64
    assert made.algorithm.groups_per_batch == 1, "none is made, and the store holds room for some"
    assert made.evaluation.sets["held"].num_responses == 2
    assert made.evaluation.sets["held"].path == tmp_path / "held.jsonl"


def test_a_file_without_held_out_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.sets is empty; name the held-out sets"):
        settings(tmp_path, evaluation={})


def test_roles_elsewhere_are_refused_and_a_scorer_elsewhere_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.address, rollout\.address names roles elsewhere"):
        settings(tmp_path, actor={"address": "a:1"}, rollout={"address": "b:2"})
    assert settings(tmp_path, reward={"address": "scorer:1"}).reward.address == "scorer:1"


def test_a_run_s_own_file_is_evaluated_as_the_one_that_it_was_made_of(tmp_path: Path) -> None:
    """The launcher wrote the addresses of its roles into it, which are nobody's once the run is over."""
    tree = {**TREE, "critic": None, "algorithm": {"groups_per_batch": 8}, "controller": {"bind": "127.0.0.1:4321"}}
    tree["sampling"] = {**TREE["sampling"], "num_responses": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    configured = load_settings(tmp_path / "run.yaml")
    configured.run.dir.mkdir()
    resolved = resolve(configured)
    note_placed(configured, resolved)
    config = write_config(resolved)
    made = evaluation_settings(config, [], None, tmp_path / "trained", tmp_path / "out")
    assert (made.controller.address, made.actor.address, made.reward.address) == (None, None, None)
    assert (made.controller.bind, made.actor.bind) == ("127.0.0.1:4321", None)
    assert made.reward.components.keys() == {"correct"}
    elsewhere = evaluation_settings(config, ["reward.address=mine:1"], None, tmp_path / "trained", tmp_path / "out")
    assert elsewhere.reward.address == "mine:1"
    with pytest.raises(ConfigError, match=r"actor\.address names roles elsewhere"):
        evaluation_settings(config, ["actor.address=a:1"], None, tmp_path / "trained", tmp_path / "out")
    reward = f"reward.address={resolved.reward.address}"
    again = evaluation_settings(config, [reward], None, tmp_path / "trained", tmp_path / "out")
    assert again.reward.address == resolved.reward.address, "one that was started there by hand"


def test_figures_are_told_by_set(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": 0, "eval/held/reward": 0.5, "eval/held/pass@2": 0.75, "eval/other/reward": None, "reward/mean": 0.1},
        {"step": 0, "eval/held/won/by_turns": 0.25, "eval/held/math/aime/won/by_turns": 0.125},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures(tmp_path / "metrics.jsonl", ["held", "held/math/aime", "other"])
    assert found == {
        "held": {"reward": 0.5, "pass@2": 0.75, "won/by_turns": 0.25},
        "other": {"reward": None},
        "held/math/aime": {"won/by_turns": 0.125},
    }
    told = io.StringIO()
    write_figures(found, told)
    assert told.getvalue() == (
        "held\n  pass@2        0.75\n  reward        0.5\n  won/by_turns  0.25\nother\n  reward  not finite\n"
        "held/math/aime\n  won/by_turns  0.125\n"
    )
