"""The quickstart's run, with torch and vLLM, where every role stands behind an Envoy."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sort_digits.quickstart import EVALUATION, HERE, read_jsonl, train_command
from rolecall.config_file import overrides_from
from rolecall.settings import load_settings
from tests.mesh.runs import MeshRun

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.mesh, pytest.mark.timeout(1200)]

RUN_S = 900.0
"""On a machine that does much else; 2 minutes on two quiet cores."""


async def test_sort_digits_is_learned_with_every_role_behind_a_sidecar(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(tmp_path), "--seed", "0"], check=True)
    words = train_command(tmp_path, seed=0)
    config = words.index("train") + 1
    run = MeshRun(load_settings(Path(words[config]), overrides_from(words[config + 1 :])), tmp_path)
    try:
        run.start()
        await run.until(lambda: run.exit_code is not None, RUN_S, "the end of the run")
        calls = {name: each.count("inbound.downstream_rq_total") for name, each in run.sidecars.items()}
    finally:
        run.end()
    assert run.num_restarts == 0
    accuracies = [row[EVALUATION] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if EVALUATION in row]
    logger.info("held-out accuracy %s; calls that came in through each sidecar: %s", accuracies, calls)
    assert accuracies[-1] >= 0.95
    assert all(calls[name] > 0 for name in ("controller", "actor", "reward", "rollout-0"))
