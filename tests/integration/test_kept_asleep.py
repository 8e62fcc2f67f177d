"""A real vLLM that falls asleep with responses unfinished."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.thorough("test_a_group_kept_over_a_sleep_goes_on_with_the_next_weights_and_its_deadline_stands_still")
@pytest.mark.timeout(600)
def test_what_is_unfinished_at_a_sleep_is_finished_after_it_as_if_there_had_been_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.sleeping_engine", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=580, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not all(found["asleep"])
    assert found["still"] == found["asleep"], "it sampled in its sleep"
    for whole, kept in zip(found["whole"], found["kept"], strict=True):
        assert whole[0] == kept[0]
        assert np.abs(np.subtract(whole[1], kept[1])).max() < 1e-4
