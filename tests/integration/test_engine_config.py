"""What vLLM says of a request, and of an engine before it starts: translated, so that nobody asks the same again."""

import pytest

from rolecall.errors import InvalidInputError
from rolecall.v1 import trajectory_pb2
from services.rollout.engine import sampling_params
from services.rollout.sampling import SampleRequest


def test_a_request_that_vllm_refuses_is_one_bad_request() -> None:
    sampling = trajectory_pb2.SamplingParams(temperature=2.5, top_p=1.0, max_tokens=4)
    with pytest.raises(InvalidInputError, match=r"7/0: .*temperature must be in \[0, 2\], got 2.5"):
        sampling_params(SampleRequest("7/0", [1, 2], sampling, 1), (0,))
