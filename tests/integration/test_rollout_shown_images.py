"""Episodes of a real rollout process with vLLM in which the environment shows a second image: what vLLM says of the
tokens that it samples is what a trainer says.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rolecall.columns import IMAGES
from rolecall.data.images.tokens import read_visual_tokens
from rolecall.training.engine import TokenOutputs
from rolecall.training.packing.pack import pack, unpack
from rolecall.trajectory import SAMPLED_COLUMNS, rows_of
from rolecall.v1 import trajectory_pb2
from tests.integration.fsdp_ranks import make_engine
from tests.integration.rollout_process import group, rollout_process
from tests.integration.second_picture import FIRST, SECOND
from tests.ports import free_port
from tests.tiny_models import VisionFamily, write_vision
from tests.tiny_tokenizer import EOS_TOKEN_ID
from tests.vision_rig import CPU, gap_size, most_gap, read_images, sampled_dtype, sampled_weights

pytestmark = [pytest.mark.vision, pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]


@contextmanager
def second_picture() -> Iterator[str]:
    """The environment in a process; gives its address."""
    address = f"127.0.0.1:{free_port()}"
    variables = {**os.environ, "ROLECALL_DIE_WITH_PARENT": "1"}
    serving = subprocess.Popen([sys.executable, "-m", "tests.integration.second_picture", address], env=variables)
    try:
        yield address
    finally:
        serving.kill()
        serving.wait(5)


@pytest.mark.parametrize("family", get_args(VisionFamily))
def test_the_sampler_and_a_trainer_say_the_same_of_turns_behind_a_second_image(
    tmp_path: Path, family: VisionFamily
) -> None:
    path = write_vision(tmp_path / "model", family)
    tokens = read_visual_tokens(path)
    assert tokens is not None
    with second_picture() as address:
        sections: dict[str, dict[str, Any]] = {
            "environments": {"game": {"address": address, "max_turns": 4, "max_image_bytes": len(FIRST) + len(SECOND)}},
            "data": {"max_prompt_tokens": 100},
            "sampling": {"num_responses": 4, "max_tokens": 200},
            "model": {"dtype": sampled_dtype(family)},
        }
        with rollout_process(tmp_path, path, auto_class=AutoModelForImageTextToText, **sections) as rollout:
            rollout.weights = sampled_weights(path, family)
            rollout.open_epoch()
            rollout.publish()
            for gid in range(2):
                asked = group(gid, [1], 4, max_tokens=200, temperature=1.0, environment="game")
                asked.prompt.messages.add(role="user", content=f"which {gid}?")
                # a random model seldom ends a turn by itself
                asked.sampling.stop_token_ids.extend(range(EOS_TOKEN_ID + 100, 288))
                rollout.ledger.admit(asked, b"")
            committed: list[trajectory_pb2.CommittedGroup] = []
            deadline = time.monotonic() + 120
            while len(committed) < 2 and time.monotonic() < deadline:
                committed = [one for _, one in rollout.ledger.read_committed("0", 10, 0.5)]
            refs = [ref for one in committed for ref in rows_of(one)]
            rows = rollout.rows.read(refs, [*SAMPLED_COLUMNS, IMAGES])
            metas = rollout.rows.read_meta(refs)
    assert len(rows) == 8
    engine, num_seen = make_engine(path), 0
    microbatch = pack(rows, (), temperature=1.0, device=CPU, images=read_images(path, [*rows]))
    with torch.no_grad():
        (outputs,) = engine.forward([microbatch])
    assert isinstance(outputs, TokenOutputs)
    for row, meta, ours in zip(rows, metas, unpack(outputs.logprobs_N, microbatch.lengths), strict=True):
        sampled = row["response_mask"] == 1
        assert gap_size((row["rollout_logprobs"] - ours)[sampled], family) < most_gap(family)
        is_seen = len(meta.episode.turns) == 2
        # one that sampled a placeholder in its first turn is shown no second image
        assert is_seen or meta.episode.ended_by == "images"
        assert list(trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files) == [FIRST, SECOND][: 1 + is_seen]
        assert not meta.prompt.images
        num_seen += is_seen
    assert num_seen > 0
