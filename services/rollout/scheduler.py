"""vLLM's scheduler, with one thing more: while a pause holds all other requests, a probe is computed.

Were the scheduler to go on for it, whatever a publish has paused would go on, too: keys and values of all of it, as
many as a step takes at each of the probe's steps, under weights that nobody has attested, and to be dropped again.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

PRIORITY, PROBE_PRIORITY = 0, -1
"""Priorities of requests; lower goes first."""


class _Probing:
    """A Scheduler that begins a probe in PAUSED_NEW, where vLLM begins nothing of what waits."""

    running: list[Any]
    waiting: Any
    max_num_active_reqs: int
    max_num_running_reqs: int
    _pause_state: PauseState

    def get_num_unfinished_requests(self) -> int:
        """Requests that the engine is to make steps for."""
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return unfinished + self._may_probe()

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """A step of what vLLM lets run, and of the probe."""
        if not self._may_probe():
            return super().schedule(*args, **options)  # type: ignore[misc]
        most = self.max_num_active_reqs
        room = min(len(self.running) + 1, self.max_num_running_reqs)
        self._pause_state, self.max_num_active_reqs = PauseState.UNPAUSED, room
        try:
            return super().schedule(*args, **options)  # type: ignore[misc]
        finally:
            self._pause_state, self.max_num_active_reqs = PauseState.PAUSED_NEW, most

    def _may_probe(self) -> bool:
        first = self.waiting.peek_request() if self.waiting else None
        return self._pause_state is PauseState.PAUSED_NEW and first is not None and first.priority == PROBE_PRIORITY


class _ProbingScheduler(_Probing, Scheduler):  # type: ignore[misc]
    pass


class _AsyncProbingScheduler(_Probing, AsyncScheduler):  # type: ignore[misc]
    pass


def scheduler(*, vllm_config: Any, **others: Any) -> Scheduler:
    """Returns what `scheduler_cls` names: of the kind that the engine is started with."""
    kind = _AsyncProbingScheduler if vllm_config.scheduler_config.async_scheduling else _ProbingScheduler
    return kind(vllm_config=vllm_config, **others)
