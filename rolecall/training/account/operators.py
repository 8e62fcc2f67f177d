"""The operators of a trace, by the time that each takes itself. torch's own averages of events say the same, for 90
microseconds an event, which a large model has hundreds of thousands of.
"""

from collections import Counter

import torch
from torch.autograd.profiler import profile

from rolecall.v1.training_pb2 import OperatorTime


def operator_times(taken: profile, device: torch.device) -> list[OperatorTime]:
    """Every operator that was called, the one that took the longest by itself first: on a GPU by its kernels, else by
    the CPU's time without the operators that it called. What a trace marks for people, as its phases, is none.
    """
    assert taken.kineto_results is not None
    events = [event for event in taken.kineto_results.events() if not event.is_user_annotation()]
    on_host = [event for event in events if event.device_type().name == "CPU" and not event.is_async()]
    num_calls = Counter(event.name() for event in on_host)
    own_ns: Counter[str] = Counter()
    if device.type == "cpu":
        callers: list[tuple[int, int, str]] = []  # (thread, end, name), each within the one before
        for event in sorted(on_host, key=lambda event: (event.start_thread_id(), event.start_ns(), -event.end_ns())):
            thread, name = event.start_thread_id(), event.name()
            while callers and (callers[-1][0] != thread or callers[-1][1] <= event.start_ns()):
                callers.pop()
            own_ns[name] += event.duration_ns()
            if callers:
                own_ns[callers[-1][2]] -= event.duration_ns()
            callers.append((thread, event.end_ns(), name))
    else:
        launched = {event.correlation_id(): event.name() for event in on_host}
        for event in events:
            if event.device_type().name != "CPU" and event.linked_correlation_id() in launched:
                own_ns[launched[event.linked_correlation_id()]] += event.duration_ns()
    return [
        OperatorTime(name=name, num_calls=num_calls[name], self_s=own_ns[name] / 1e9)
        for name in sorted(num_calls, key=lambda name: -own_ns[name])
    ]
