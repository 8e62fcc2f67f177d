"""vLLM's scheduler, with three things more: while a pause holds all other requests, a probe is computed; a block that
was planned and never computed is given to nobody; and logprobs leave the engine's process once a response, not once a
token. And the log of what it says of itself.

Were the scheduler to go on for it, whatever a publish has paused would go on, too: keys and values of all of it, as
many as a step takes at each of the probe's steps, under weights that nobody has attested, and to be dropped again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from rolecall.v1 import rollout_pb2
from rolecall.wire import Array

PRIORITY, PROBE_PRIORITY = 0, -1
"""Priorities of requests; lower goes first."""
_LOGPROBS = "logprobs"


class _Probing:
    """A Scheduler that begins a probe in PAUSED_NEW, where vLLM begins nothing of what waits. It forgets what a request
    that gives way has not computed.
    """

    running: list[Any]
    waiting: Any
    max_num_active_reqs: int
    max_num_running_reqs: int
    log_stats: bool
    kv_cache_config: Any
    kv_cache_manager: Any
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

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        """Takes a request's keys and values. A pause does so, too, and drops what is under way: no sign of a full
        cache, and is not counted.

        By priority vLLM may take those of a request that it has given tokens in this very step. Their blocks are under
        their prefix already, and will not be computed: whoever came with that prefix would be given what lies there.
        """
        ids_of_groups = self.kv_cache_manager.get_block_ids(request.request_id)
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, ids_of_groups, strict=True):
            num_whole = request.num_computed_tokens // group.kv_cache_spec.block_size
            self.kv_cache_manager.evict_blocks(set(ids[num_whole:]))
        super()._preempt_request(request, timestamp, drop_stale_output)  # type: ignore[misc]
        if drop_stale_output and self.log_stats:
            request.events.pop()

    def _may_probe(self) -> bool:
        first = self.waiting.peek_request() if self.waiting else None
        return self._pause_state is PauseState.PAUSED_NEW and first is not None and first.priority == PROBE_PRIORITY


class _Gathering:
    """A Scheduler that keeps the logprobs of sampled tokens until their response ends, and sends them with its last
    output, as `logprobs_of` reads them.

    vLLM slices, encodes, decodes and files three arrays for every token of every request: of 256 requests at a time
    that takes as long as all else it does on a host.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gathered: dict[str, list[float]] = {}
        """The logprobs so far of every request that asked for them."""

    def add_request(self, request: Any) -> None:
        """Takes a request in."""
        super().add_request(request)  # type: ignore[misc]
        if request.sampling_params.logprobs is not None:
            self._gathered[request.request_id] = []

    def update_from_output(self, scheduler_output: SchedulerOutput, sampled: ModelRunnerOutput) -> dict[int, Any]:
        """Tells those who asked, by their index, what a step sampled."""
        logprobs, sampled.logprobs = sampled.logprobs, None
        told: dict[int, Any] = super().update_from_output(scheduler_output, sampled)  # type: ignore[misc]
        if logprobs is not None:
            self._gather(logprobs, sampled.req_id_to_index, [each for one in told.values() for each in one.outputs])
        for request_id in scheduler_output.finished_req_ids:  # also those that ended without a last output
            self._gathered.pop(request_id, None)
        return told

    def _gather(self, logprobs: LogprobsLists, rows: Mapping[str, int], outputs: Sequence[EngineCoreOutput]) -> None:
        values = logprobs.logprobs[:, 0].tolist()  # the sampled token's comes first
        starts = logprobs.cu_num_generated_tokens
        for output in outputs:
            gathered = self._gathered.get(output.request_id)
            if gathered is None or not output.new_token_ids:
                continue
            row = rows[output.request_id]
            start = row if starts is None else starts[row]
            gathered += values[start : start + len(output.new_token_ids)]
            if output.finished:
                # Of all that vLLM hands through, the one field that may hold anything.
                output.kv_transfer_params = {_LOGPROBS: np.array(gathered, np.float32).tobytes()}


def logprobs_of(output: RequestOutput) -> Array:
    """float32 [n] of the tokens of a response that asked for logprobs."""
    return np.frombuffer((output.kv_transfer_params or {})[_LOGPROBS], np.float32)


class _RolloutScheduler(_Probing, _Gathering, Scheduler):  # type: ignore[misc]
    pass


class _AsyncRolloutScheduler(_Probing, _Gathering, AsyncScheduler):  # type: ignore[misc]
    pass


def scheduler(*, vllm_config: Any, **others: Any) -> Scheduler:
    """Returns what `scheduler_cls` names: of the kind that the engine is started with."""
    kind = _AsyncRolloutScheduler if vllm_config.scheduler_config.async_scheduling else _RolloutScheduler
    return kind(vllm_config=vllm_config, **others)


@dataclass
class _Lately:
    """The part of an engine's use that is told of the time between two loads."""

    kv_cache_usage: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class UseLog(PrometheusStatLogger):  # type: ignore[misc]
    """The log of what requests take of an engine: vLLM makes one, in the process of AsyncLLM, and calls it after every
    step of its scheduler.

    It is one of Prometheus by name only: vLLM adds its own wherever it is given none, which is dearer and whose numbers
    name no run and no worker.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self._last = SchedulerStats()
        self._num_preemptions = 0
        self._lately = deque([_Lately()], maxlen=2)

    def begin_load(self) -> None:
        """New weights are about to arrive: what was before those that are held is forgotten."""
        self._lately.append(_Lately())

    @property
    def use(self) -> rollout_pb2.EngineUse:
        """The use that requests make of the engine."""
        return rollout_pb2.EngineUse(
            num_running=self._last.num_running_reqs,
            num_waiting=self._last.num_waiting_reqs + self._last.num_skipped_waiting_reqs,
            kv_cache_usage=max(each.kv_cache_usage for each in self._lately),
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=sum(each.num_prompt_tokens for each in self._lately),
            num_cached_tokens=sum(each.num_cached_tokens for each in self._lately),
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Takes in what one step says."""
        if scheduler_stats is not None:
            self._last, now = scheduler_stats, self._lately[-1]
            now.kv_cache_usage = max(now.kv_cache_usage, scheduler_stats.kv_cache_usage)
            now.num_prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            now.num_cached_tokens += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Says nothing."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Says nothing: the replica knows."""
