"""Which addresses of a run's resolved file are left out when its roles are started again."""

import io
from pathlib import Path

import pytest
import yaml

from rolecall.launcher.placed import load_unplaced, note_placed
from rolecall.launcher.plan import resolve, write_config
from rolecall.settings import RunSettings, load_settings
from tests.smallest import smallest_tree


@pytest.fixture
def resolved(tmp_path: Path) -> RunSettings:
    """Of a run that was started, with its reward service elsewhere."""
    reward = {"address": "scorer:1", "components": {"correct": {"scorer": {"kind": "exact_match"}}}}
    references = {"old": {"path": str(tmp_path / "old")}}
    algorithm = {"groups_per_batch": 2, "kl": {"kl_coef": 0.1, "reference": "old"}}
    tree = smallest_tree(tmp_path, reward=reward, references=references, algorithm=algorithm)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    configured = load_settings(tmp_path / "run.yaml")
    configured.run.dir.mkdir()
    resolved = resolve(configured)
    note_placed(configured, resolved)
    return resolved


def test_what_the_launcher_chose_is_left_out_and_what_the_user_gave_stays(resolved: RunSettings) -> None:
    found = load_unplaced(write_config(resolved), [], None, io.StringIO())
    assert (found.controller.address, found.actor.address, found.actor.bind) == (None, None, None)
    assert found.references["old"].address is None
    assert found.reward.address == "scorer:1"


def test_an_override_stays_also_where_it_is_what_the_launcher_chose(resolved: RunSettings) -> None:
    """A role that is started by hand from the resolved file listens where the launcher had placed it."""
    mine = [
        f"actor.address={resolved.actor.address}",
        f"references.old.address={resolved.references['old'].address}",
        f"controller.bind={resolved.controller.bind}",
    ]
    found = load_unplaced(write_config(resolved), mine, None, io.StringIO())
    assert (found.actor.address, found.actor.bind) == (resolved.actor.address, None)
    assert found.references["old"].address == resolved.references["old"].address
    assert (found.controller.address, found.controller.bind) == (None, resolved.controller.bind)
