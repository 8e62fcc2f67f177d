"""An agent with OpenAI's client, a real rollout process with vLLM and the endpoint between them: the rows are what
Hugging Face says of the same tokens, and a kill leaves nobody calling.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rolecall.algorithms.correction.mismatch import spread
from rolecall.training.engine import TokenOutputs
from rolecall.training.packing.pack import pack
from rolecall.training.packing.pieces import Piece
from rolecall.trajectory import SAMPLED_COLUMNS, segment_lengths
from rolecall.v1 import trajectory_pb2
from tests.contract.test_rollout_episodes import check_row
from tests.integration.fsdp_oracle import CPU, make_engine
from tests.integration.rollout_process import RolloutProcess, group, rollout_process
from tests.ports import free_port
from tests.tiny_models import write_qwen3

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough("test_an_agents_row_is_its_conversation_token_by_token")]
AGENT = Path(__file__).with_name("harness_agent.py")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the agent says of its episodes."""
    path = tmp_path_factory.mktemp("agent") / "log"
    path.touch()
    return path


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[RolloutProcess]:
    """One process for the whole file; its tests run in order."""
    directory = tmp_path_factory.mktemp("rollout")
    address = f"127.0.0.1:{free_port()}"
    environment = subprocess.Popen([sys.executable, str(AGENT), address, str(log)])
    try:
        with rollout_process(
            directory,
            write_qwen3(directory / "model", hidden=128),
            environments={"game": {"address": address, "max_turns": 1000}},
            sampling={"num_responses": 4, "max_tokens": 150},
            data={"max_prompt_tokens": 100},
        ) as running:
            yield running
    finally:
        environment.terminate()
        environment.wait(30)


def waited(is_so: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def committed(rollout: RolloutProcess, num_groups: int) -> list[trajectory_pb2.CommittedGroup]:
    """All groups once there are so many, in order."""
    found: list[trajectory_pb2.CommittedGroup] = []

    def are_committed() -> bool:
        found[:] = [one for _, one in rollout.ledger.read_committed("0", 10, 0.5)]
        return len(found) == num_groups

    waited(are_committed)
    return found


def test_an_agents_rows_are_what_hugging_face_says_of_their_tokens(rollout: RolloutProcess) -> None:
    rollout.open_epoch()
    rollout.publish()
    for gid in range(2):
        rollout.ledger.admit(group(gid, [5, 6], 4, max_tokens=150, temperature=1.0, environment="game"), b"")
    for one in committed(rollout, 2):
        rows, metas = rollout.rows.read(one.rows, SAMPLED_COLUMNS), rollout.rows.read_meta(one.rows)
        for row, meta in zip(rows, metas, strict=True):
            check_row(row, meta)
            tokens = meta.episode.tokens
            assert tokens.num_calls == len(meta.episode.turns) == 3
            assert tokens.num_sampled == tokens.num_trained == row["response_mask"].sum()
            mask = row["response_mask"].astype(bool)
            recomputed = rollout.logprobs(row["token_ids"].tolist())
            assert np.abs(row["rollout_logprobs"] - recomputed)[mask].max() < 1e-4


@pytest.mark.usefixtures("one_rank")
def test_sampler_and_trainer_agree_over_turns_and_segments(rollout: RolloutProcess, tmp_path: Path) -> None:
    """The rollout's logprobs against one packed pass of the trainer's over all segments, as the row has them."""
    for gid in (2, 3):
        forking = group(gid, [5, 6], 4, max_tokens=150, temperature=1.0, environment="game")
        forking.prompt.ground_truth = "forking"
        rollout.ledger.admit(forking, b"")
    refs = [ref for one in committed(rollout, 4) for ref in one.rows]
    rows = rollout.rows.read(refs, SAMPLED_COLUMNS)
    assert [len(ref.segment_starts) for ref in refs] == [0] * 8 + [2] * 8
    pieces = [Piece(number, 0, segment_lengths(ref)) for number, ref in enumerate(refs)]
    segments = [segment for piece, row in zip(pieces, rows, strict=True) for segment in piece.segments(row)]
    rollout.model.save_pretrained(tmp_path / "model")
    packed = pack(segments, ["rollout_logprobs"], temperature=1.0, device=CPU)
    assert packed.prefixes is not None, "what forks begin with is computed once"
    (outputs,) = make_engine(tmp_path / "model", optimizer=None).forward([packed])
    assert isinstance(outputs, TokenOutputs)
    gap = spread(packed.columns["rollout_logprobs"], outputs.logprobs_N, packed.score_mask_N)
    assert gap is not None
    assert gap.p999_abs <= 2e-5


def test_a_killed_rollout_leaves_no_agent_that_calls(rollout: RolloutProcess, log: Path) -> None:
    endless = group(4, [5, 6], 4, max_tokens=150, temperature=1.0, environment="game")
    endless.prompt.ground_truth = "endless"
    rollout.ledger.admit(endless, b"")
    waited(lambda: log.read_text().count("begun") == 20)
    os.kill(rollout.process.pid, signal.SIGKILL)
    waited(lambda: log.read_text().count("left") == 4)
    assert set(log.read_text().splitlines()) == {"begun", "left APIConnectionError"}
