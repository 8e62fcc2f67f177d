"""What vLLM says of a request, and of an engine before it starts: translated, so that nobody asks the same again."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings
from rolecall.settings.services import PROBE_ROOM
from rolecall.v1 import trajectory_pb2
from services.rollout.config import configure
from services.rollout.engine import engine_args, engine_config, sampling_params
from services.rollout.sampling import SampleRequest
from tests.smallest import smallest_tree
from tests.tiny_models import write_qwen3


def test_a_request_that_vllm_refuses_is_one_bad_request() -> None:
    sampling = trajectory_pb2.SamplingParams(temperature=2.5, top_p=1.0, max_tokens=4)
    with pytest.raises(InvalidInputError, match=r"7/0: .*temperature must be in \[0, 2\], got 2.5"):
        sampling_params(SampleRequest("7/0", [1, 2], sampling, 1), (0,))


def made(folder: Path, **rollout: Any) -> Any:
    model = write_qwen3(folder / "model", heads=2, kv_heads=1)
    tree = smallest_tree(folder, model={"path": str(model)}, rollout=rollout)
    return engine_config(engine_args(configure(RunSettings.model_validate(tree), "rollout-0", range(2))))


def test_what_vllm_refuses_of_an_engine_is_a_configuration_error_of_one_line(tmp_path: Path) -> None:
    asked = "vLLM refuses what rollout and rollout.engine ask of it: "
    for engine, told in (
        ({"max_num_batched_tokens": 16}, r"max_num_batched_tokens \(16\) is smaller than max_model_len"),
        ({"prefix_caching_hash_algo": "md5"}, "sha256"),
    ):
        with pytest.raises(ConfigError, match=f"{asked}.*{told}") as said:
            made(tmp_path, engine=engine)
        assert "\n" not in said.value.message


def test_more_responses_at_a_time_than_vllms_own_step_has_tokens_are_sampled(tmp_path: Path) -> None:
    scheduler = made(tmp_path, max_num_seqs=5000, pause_mode="keep").scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (5000, 5000 + PROBE_ROOM)
