"""Our scheduler of vLLM's requests, without a model, in both kinds: on GPUs engines schedule a step ahead, on CPUs
not.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from services.rollout.scheduler import PRIORITY, PROBE_PRIORITY, UseLog, logprobs_of, scheduler
from tests.tiny_models import write_qwen3

BLOCK = 16
MOST = 2
"""Requests that run at a time."""


@pytest.fixture(autouse=True)
def _hashes_begin() -> None:
    init_none_hash(sha256)


def make(folder: Path, *, a_step_ahead: bool, num_blocks: int = 64, **more: Any) -> Any:
    arguments = AsyncEngineArgs(
        model=str(write_qwen3(folder / "model")),
        skip_tokenizer_init=True,
        scheduling_policy="priority",
        max_num_seqs=MOST,
        distributed_executor_backend="uni",
        **more,
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = a_step_ahead
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    made = scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    assert isinstance(made, AsyncScheduler) == a_step_ahead
    return made


both_kinds = pytest.mark.parametrize("a_step_ahead", [False, True], ids=["in step", "a step ahead"])


@pytest.fixture(params=[False, True], ids=["in step", "a step ahead"])
def scheduling(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(tmp_path, a_step_ahead=request.param, enable_prefix_caching=False)


def add(
    scheduling: Any,
    name: str,
    priority: int,
    num_tokens: int = 20,
    max_tokens: int = 8,
    *,
    token: int = 1,
    arrival_time: float | None = None,
    logprobs: int | None = None,
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompt = [token] * num_tokens
    scheduling.add_request(
        Request(name, prompt, sampling, None, arrival_time=arrival_time, priority=priority, block_hasher=hasher)
    )


def step(scheduling: Any) -> dict[str, int]:
    """The tokens that each request is given in a step, whose outputs have come when it returns."""
    planned: SchedulerOutput = scheduling.schedule()
    end(scheduling, planned)
    return dict(planned.num_scheduled_tokens)


def end(scheduling: Any, planned: SchedulerOutput, logprobs: LogprobsLists | None = None) -> Any:
    """The outputs of a step come."""
    names = list(planned.num_scheduled_tokens)
    requests = [scheduling.requests.get(name) for name in names]
    return scheduling.update_from_output(
        planned,
        ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [] if each and each.num_computed_tokens < each.num_prompt_tokens else [7] for each in requests
            ],
            logprobs=logprobs,
        ),
    )


def test_while_all_others_are_held_a_probe_is_computed_alone(scheduling: Any) -> None:
    for name in ("a", "b", "c"):
        add(scheduling, name, PRIORITY)
    assert step(scheduling) == {"a": 20, "b": 20}
    scheduling.set_pause_state(PauseState.PAUSED_ALL)
    scheduling.reset_prefix_cache(reset_running_requests=True)
    scheduling.set_pause_state(PauseState.PAUSED_NEW)
    assert not scheduling.has_unfinished_requests()
    assert step(scheduling) == {}
    add(scheduling, "probe", PROBE_PRIORITY)
    assert scheduling.has_unfinished_requests()
    first = scheduling.schedule()
    assert dict(first.num_scheduled_tokens) == {"probe": 20}
    ahead = scheduling.schedule()
    assert dict(ahead.num_scheduled_tokens) == ({"probe": 1} if isinstance(scheduling, AsyncScheduler) else {})
    end(scheduling, first)
    end(scheduling, ahead)
    add(scheduling, "d", PRIORITY)
    last = scheduling.schedule()
    assert dict(last.num_scheduled_tokens) == {"probe": 1}
    scheduling.finish_requests("probe", RequestStatus.FINISHED_ABORTED)
    end(scheduling, last)
    assert not scheduling.has_unfinished_requests()
    assert step(scheduling) == {}
    scheduling.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduling) == {"a": 21, "b": 21}, "with what was sampled, and as many as before"


def test_a_probe_waits_in_a_pause_that_holds_everything_and_goes_first_after_it(scheduling: Any) -> None:
    scheduling.set_pause_state(PauseState.PAUSED_ALL)
    for name, priority in (("a", PRIORITY), ("b", PRIORITY), ("probe", PROBE_PRIORITY)):
        add(scheduling, name, priority)
    assert not scheduling.has_unfinished_requests()
    assert step(scheduling) == {}
    scheduling.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduling) == {"probe": 20, "a": 20}


def test_requests_that_give_way_in_a_full_cache_are_counted_and_those_of_a_pause_are_not(scheduling: Any) -> None:
    log = UseLog(None)

    def go_on(num_steps: int) -> None:
        for _ in range(num_steps):
            for outputs in end(scheduling, scheduling.schedule()).values():
                seen = IterationStats()
                for event in (event for output in outputs.outputs for event in output.events or ()):
                    seen.num_preempted_reqs += event.type is EngineCoreEventType.PREEMPTED
                log.record(outputs.scheduler_stats, seen)

    for name in ("a", "b"):
        add(scheduling, name, PRIORITY, num_tokens=25 * BLOCK, max_tokens=112)
    go_on(3)
    assert log.use.kv_cache_usage == pytest.approx(52 / 63), "of 64 blocks one is vLLM's own"
    scheduling.set_pause_state(PauseState.PAUSED_ALL)
    scheduling.reset_prefix_cache(reset_running_requests=True)
    scheduling.set_pause_state(PauseState.UNPAUSED)
    go_on(5)
    assert (log.use.num_running, log.use.num_preemptions) == (2, 0)
    go_on(95)
    assert (log.use.num_running, log.use.num_waiting, log.use.num_preemptions) == (1, 1, 0), "told once it is back"
    go_on(60)
    assert (log.use.num_running, log.use.num_waiting, log.use.num_preemptions) == (0, 0, 1)
    assert log.use.kv_cache_usage >= 62 / 63
    log.begin_load()
    assert log.use.kv_cache_usage >= 62 / 63
    log.begin_load()
    assert log.use.kv_cache_usage == 0.0, "by now it is long ago"
    assert log.use.num_preemptions == 1


@both_kinds
def test_blocks_that_were_planned_and_not_computed_are_given_to_nobody(tmp_path: Path, a_step_ahead: bool) -> None:
    """A request gives way in the step in which it was given a part of its prompt, as one does that came later than
    another and runs before it.
    """
    scheduling = make(
        tmp_path,
        a_step_ahead=a_step_ahead,
        num_blocks=1 + 9,  # one is vLLM's own
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=4 * BLOCK,
        long_prefill_token_threshold=2 * BLOCK,  # of a request beside others
    )
    add(scheduling, "late", PRIORITY, num_tokens=9 * BLOCK, token=2, arrival_time=2.0)
    assert step(scheduling) == {"late": 4 * BLOCK}
    add(scheduling, "early", PRIORITY, num_tokens=BLOCK, max_tokens=2, arrival_time=1.0)
    assert step(scheduling) == {"late": 2 * BLOCK, "early": BLOCK}
    assert step(scheduling) == {"early": 1}, "which needs a block, when the other has just got the last two"
    assert step(scheduling) == {"late": 3 * BLOCK}, "all that was not computed"


def test_logprobs_come_with_the_last_output_of_those_that_asked_for_them(scheduling: Any) -> None:
    lengths = {"a": 3, "ended": 8, "greedy": 4, "b": 5}
    for name, max_tokens in lengths.items():
        add(scheduling, name, PRIORITY, max_tokens=max_tokens, logprobs=None if name == "greedy" else 0)
    drawn: dict[str, list[float]] = {name: [] for name in lengths}
    last: dict[str, EngineCoreOutput] = {}
    while scheduling.has_unfinished_requests():
        planned = scheduling.schedule()
        rows = np.random.default_rng(len(drawn["a"]) + len(drawn["b"])).random((MOST, 1)).astype(np.float32)
        told = end(scheduling, planned, LogprobsLists(np.full((MOST, 1), 7), -rows, np.ones(MOST)))
        for output in told[0].outputs:
            assert output.new_logprobs is None
            row = list(planned.num_scheduled_tokens).index(output.request_id)
            drawn[output.request_id].append(-float(rows[row, 0]))
            if output.finished:
                last[output.request_id] = output
            else:
                assert output.kv_transfer_params is None
        if len(drawn["ended"]) == 2:
            scheduling.finish_requests("ended", RequestStatus.FINISHED_ABORTED)
    assert {name: len(drawn[name]) for name in last} == {"a": 3, "greedy": 4, "b": 5}
    for name in ("a", "b"):
        assert logprobs_of(last[name]).tolist() == drawn[name]
    assert last["greedy"].kv_transfer_params is None
    step(scheduling)  # which says what has ended
    assert not scheduling._gathered


def test_a_request_that_fails_has_no_logprobs(scheduling: Any) -> None:
    add(scheduling, "a", PRIORITY, logprobs=0)
    add(scheduling, "b", PRIORITY, max_tokens=1, logprobs=0)
    scheduling.grammar_compile_error_reqs.add("a")
    told = end(scheduling, scheduling.schedule(), LogprobsLists(np.full((2, 1), 7), np.zeros((2, 1)), np.ones(2)))
    _, whole, failed = told[0].outputs
    assert failed.finish_reason == FinishReason.ERROR
    assert failed.kv_transfer_params is None
    assert logprobs_of(whole).tolist() == [0.0]
