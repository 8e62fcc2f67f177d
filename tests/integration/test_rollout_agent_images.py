"""An agent with OpenAI's client that shows images to a real rollout process with vLLM: what vLLM says of the tokens
that it samples is what a trainer says, in every segment of the row.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rolecall.columns import IMAGES
from rolecall.training.engine import TokenOutputs
from rolecall.training.packing.pack import Row, pack, unpack
from rolecall.training.packing.pieces import Piece
from rolecall.trajectory import SAMPLED_COLUMNS, rows_of, segment_lengths
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.rollout.trajectories import images_column
from tests.integration.agent_pictures import FIRST, OTHER, SECOND, pictures
from tests.integration.fsdp_ranks import make_engine
from tests.integration.rollout_process import group, rollout_process
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import CPU, gap_size, most_gap, read_images, sampled_dtype, sampled_weights

pytestmark = [pytest.mark.vision, pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]


def files_of(row: Row) -> list[bytes]:
    return list(trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files)


def gaps(path: Path, segments: Sequence[Row]) -> list[Array]:
    """Differences of the sampler's logprobs from a trainer's, of each segment that has some."""
    microbatch = pack(segments, (), temperature=1.0, device=CPU, images=read_images(path, [*segments]))
    with torch.no_grad():
        (outputs,) = make_engine(path).forward([microbatch])
    assert isinstance(outputs, TokenOutputs)
    ours: list[Array] = unpack(outputs.logprobs_N, microbatch.lengths)
    sampled = [segment["response_mask"] == 1 for segment in segments]
    assert all(mask.any() for mask in sampled)
    return [
        (segment["rollout_logprobs"] - own)[mask] for segment, own, mask in zip(segments, ours, sampled, strict=True)
    ]


@pytest.mark.parametrize("family", get_args(VisionFamily))
def test_the_sampler_and_a_trainer_say_the_same_of_what_an_agent_shows(tmp_path: Path, family: VisionFamily) -> None:
    path = write_vision(tmp_path / "model", family)
    room = len(FIRST) + len(SECOND) + len(OTHER)
    with pictures() as address:
        sections: dict[str, dict[str, Any]] = {
            "environments": {
                "game": {"address": address, "max_turns": 4, "max_image_bytes": room, "max_row_tokens": 900}
            },
            "data": {"max_prompt_tokens": 100},
            "sampling": {"num_responses": 4, "max_tokens": 200},
            "model": {"dtype": sampled_dtype(family)},
        }
        with rollout_process(tmp_path, path, auto_class=AutoModelForImageTextToText, **sections) as rollout:
            rollout.weights = sampled_weights(path, family)
            rollout.open_epoch()
            rollout.publish()
            for gid in range(2):
                rollout.ledger.admit(group(gid, [1], 4, max_tokens=200, temperature=1.0, environment="game"), b"")
            committed: list[trajectory_pb2.CommittedGroup] = []
            deadline = time.monotonic() + 120
            while len(committed) < 2 and time.monotonic() < deadline:
                committed = [one for _, one in rollout.ledger.read_committed("0", 10, 0.5)]
            refs = [ref for one in committed for ref in rows_of(one)]
            rows = rollout.rows.read(refs, [*SAMPLED_COLUMNS, IMAGES])
            metas = rollout.rows.read_meta(refs)
    assert len(rows) == 8
    segments, swapped = list[Row](), list[Row]()
    for row, meta, ref in zip(rows, metas, refs, strict=True):
        assert sorted(files_of(row)) == sorted([FIRST, SECOND, OTHER])
        assert len(meta.episode.turns) == 4
        own = list(Piece(0, 0, segment_lengths(ref)).segments(row))
        segments += own
        # the last is the other image; before it those of the first, parted where a placeholder was sampled
        assert (files_of(own[-2]), files_of(own[-1])) == ([FIRST, SECOND], [OTHER])
        assert all(files_of(segment) == [FIRST] for segment in own[:-2])
        swapped.append({**own[-1], IMAGES: images_column([FIRST])})
    same = gap_size(np.concatenate(gaps(path, segments)), family)
    assert same < most_gap(family)
    others = [gap_size(each, family) for each in gaps(path, swapped)]
    assert min(others) > 1.5 * same, "and by other pixels it would be seen"
