"""What vLLM says of a request, and of an engine before it starts: translated, so that nobody asks the same again."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoConfig, PretrainedConfig

from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings
from rolecall.settings.rollout import PROBE_ROOM
from rolecall.v1 import trajectory_pb2
from services.rollout.config import configure
from services.rollout.engine import sampling_params
from services.rollout.sampling import SampleRequest
from services.rollout.vllm.arguments import engine_args, engine_config
from services.rollout.vllm.image_prompts import NUM_OPENED, ImagePrompts
from tests.pictures import picture
from tests.smallest import smallest_tree
from tests.tiny_models import write_qwen3
from tests.tiny_tokenizer import EOS_TOKEN_ID
from tests.waiting import until

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


def test_a_request_that_vllm_refuses_is_one_bad_request() -> None:
    sampling = trajectory_pb2.SamplingParams(temperature=2.5, top_p=1.0, max_tokens=4)
    with pytest.raises(InvalidInputError, match=r"7/0: .*temperature must be in \[0, 2\], got 2.5"):
        sampling_params(SampleRequest("7/0", [1, 2], sampling, 1), (0,))


def made(folder: Path, *, config: PretrainedConfig | None = None, **rollout: Any) -> Any:
    """What vLLM makes of the smallest run, of a model that says of itself what `config` does."""
    model = write_qwen3(folder / "model", heads=2, kv_heads=1)
    if config is not None:
        config.save_pretrained(model)
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


@pytest.mark.parametrize(
    ("kind", "more", "name", "expected"),
    [
        ("cohere2", {"sliding_window": 8}, "sliding_window", 7),
        (
            "ministral3",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling",
            {"beta": 0.1, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_vllm_is_told_what_it_would_compute_otherwise_than_transformers_late_in_a_sequence(
    tmp_path: Path, kind: str, more: dict[str, Any], name: str, expected: object
) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=512, eos_token_id=EOS_TOKEN_ID, **more)
    assert vars(made(tmp_path, config=config).model_config.hf_config)[name] == expected


class SlowRenderer:
    """Stands for vLLM's: it says how many prompts have their images open, and holds each until it is told."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.may_go_on = asyncio.Event()

    async def process_for_engine_async(self, prompt: Any, arrival_time: float) -> dict[str, Any]:
        self.opened.append(prompt)
        await self.may_go_on.wait()
        return {"prompt_token_ids": prompt["prompt_token_ids"], "arrival_time": arrival_time}


async def test_the_images_of_few_prompts_are_open_at_a_time_however_many_are_asked_for() -> None:
    renderer, sampling = SlowRenderer(), trajectory_pb2.SamplingParams()
    prompts = ImagePrompts(cast(Any, renderer), token_id=9)
    asked = [SampleRequest(f"{i}/0", [i, 9], sampling, 1, images=[picture(8, 8, i)]) for i in range(2 * NUM_OPENED)]
    making = [asyncio.ensure_future(prompts.of(request)) for request in asked]
    await until(lambda: len(renderer.opened) == NUM_OPENED)
    await asyncio.sleep(0.1)  # in which the others would be opened, too
    assert len(renderer.opened) == NUM_OPENED
    renderer.may_go_on.set()
    made = await asyncio.wait_for(asyncio.gather(*making), 30)
    assert [prompt["prompt_token_ids"] for prompt in made] == [request.prompt_token_ids for request in asked]
