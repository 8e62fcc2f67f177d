"""What vLLM's own outputs say of experts, as a sample has it. No engine is started: vLLM returns it on GPUs only."""

from typing import Any

import numpy as np
import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from rolecall.data.model.mixture import Mixture
from rolecall.errors import GenerationError, InvalidInputError
from services.rollout.engine import _routing

MIXTURE = Mixture(num_layers=2, num_experts=8, num_chosen=2)


def output_of(routed: Any, num_prompt: int = 3, num_sampled: int = 2) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=list(range(num_sampled)),
        cumulative_logprob=None,
        logprobs=None,
        routed_experts=routed,
    )
    return RequestOutput("r", None, list(range(num_prompt)), None, [completion], finished=True)


def test_every_token_but_the_last_has_its_own_experts() -> None:
    routed = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.uint8) % 8
    record_TW = _routing(output_of(routed), MIXTURE)
    assert record_TW.dtype == np.uint8
    assert np.array_equal(record_TW[:4], routed.reshape(4, 4))
    assert np.array_equal(record_TW[4], record_TW[3])


@pytest.mark.parametrize("num_told", [0, 3, 5])
def test_an_output_that_leaves_tokens_out_is_an_error(num_told: int) -> None:
    routed = np.zeros((num_told, 2, 2), np.uint8) if num_told else None
    with pytest.raises(GenerationError, match=f"says of {num_told} tokens of request r .* of 4 that it computed"):
        _routing(output_of(routed), MIXTURE)


def test_experts_that_the_model_does_not_have_are_an_error() -> None:
    with pytest.raises(InvalidInputError, match="2 layers that choose 2 of 8"):
        _routing(output_of(np.full((4, 2, 2), 8, np.uint16)), MIXTURE)
