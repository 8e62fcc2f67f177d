"""The operators of a trace: the same as torch's own averages say, which are too slow for a step of a run."""

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from rolecall.training.account.operators import operator_times


def test_operators_take_what_torch_says_they_take() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    with profile(use_kineto=True, record_shapes=True) as taken, record_function("forward"):
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
    times = operator_times(taken, torch.device("cpu"))
    slow = {
        event.key: (event.count, event.self_cpu_time_total / 1e6)
        for event in taken.key_averages()
        if not event.is_user_annotation
    }
    assert {time.name for time in times} == slow.keys()
    for time in times:
        assert time.num_calls >= slow[time.name][0]  # torch counts an operator that only calls its namesake once
        assert time.self_s == pytest.approx(slow[time.name][1], rel=1e-3, abs=2e-6)
    assert [time.self_s for time in times] == sorted((time.self_s for time in times), reverse=True)
    assert "aten::mm" in {time.name for time in times[:20]}
