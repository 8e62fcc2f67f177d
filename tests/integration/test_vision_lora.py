"""A real rollout process with vLLM that serves adapters of a model of text and images: its logprobs of prompts that
show images are the actor's own, before and after training.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from rolecall.columns import IMAGES
from rolecall.settings import LoraSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import Row, local_counts
from rolecall.v1 import rollout_pb2, trajectory_pb2, weights_pb2
from rolecall.v1.trajectory_pb2 import Images
from rolecall.wire import Array
from tests.integration.fsdp_ranks import make_engine, weights_of
from tests.integration.rollout_process import RolloutProcess, rollout_process
from tests.integration.vision_ranks import SECTION
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import SQUARE, TALL, TEMPERATURE, make_row, make_rows, packed

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.vision, pytest.mark.timeout(300)]

LORA = LoraSection(rank=4, alpha=12.0)
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats: at most, or in half precision, in which single tokens of such rough weights are tenths off, on average."""


def gaps(rollout: RolloutProcess, actor: FsdpEngine, path: Path, row: Row) -> Array:
    """Differences of the sampler's logprobs of four responses to the prompt of `row` and the actor's."""
    prompt = row["token_ids"][row["response_mask"] == 0].tolist()
    files = list(Images.FromString(row[IMAGES].tobytes()).files)
    request = rollout_pb2.GenerateRequest(
        id=f"eval/{rollout.version}/heldout/1",
        prompt=trajectory_pb2.Prompt(uid="1", token_ids=np.array(prompt, "<i4").tobytes(), images=files),
        num_responses=4,
        sampling=trajectory_pb2.SamplingParams(temperature=TEMPERATURE, top_p=1.0, max_tokens=12),
        seed=3,
    )
    found = []
    for response in rollout.stub.Generate(request, timeout=120):
        ids = np.frombuffer(response.response_token_ids, "<i4").tolist()
        whole = {
            "token_ids": np.array([*prompt, *ids], np.int32),
            "response_mask": np.ones(len(prompt) + len(ids), "u1"),
        }
        (outputs,) = actor.forward([packed(path, [{**whole, IMAGES: row[IMAGES]}])])
        assert isinstance(outputs, TokenOutputs)
        given = np.frombuffer(response.response_logprobs, "<f4")
        found.append(np.abs(given - outputs.logprobs_N[len(prompt) :].numpy()))
    assert len(found) == 4
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2_5_vl", "float32"), ("qwen3_vl", "float32"), ("qwen3_5", "bfloat16")]
)
def test_vllm_serves_the_actors_adapters_beside_the_tower(tmp_path: Path, family: VisionFamily, dtype: str) -> None:
    path = write_vision(tmp_path / "model", family)
    actor = make_engine(path, optimizer=SECTION, lora=LORA, dtype=dtype)
    sections: dict[str, Any] = {
        "actor": {"lora": LORA.model_dump()},
        "data": {"images_field": "images"},
        "model": {"dtype": dtype},
    }
    row, text = make_row([SQUARE, TALL], [80]), make_row([], [80])
    with rollout_process(tmp_path, path, auto_class=AutoModelForImageTextToText, **sections) as rollout:
        rollout.adapter = weights_pb2.LoraAdapter(rank=LORA.rank, alpha=LORA.alpha)
        rollout.weights = list(weights_of(actor).items())
        rollout.open_epoch()
        for seed in range(2):
            rollout.publish()
            for each in (row, text):
                found = gaps(rollout, actor, path, each)
                assert float(found.max() if dtype == "float32" else found.mean()) < TOLERANCES[dtype]
            rows = make_rows()[seed:]
            actor.forward_backward([packed(path, rows, ("loss_mask",))], SftObjective(local_counts(rows)))
            actor.step()
            rollout.weights = list(weights_of(actor).items())
