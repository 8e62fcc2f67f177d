"""vLLM as a RolloutEngine: tokens in, tokens out. The services import vLLM here, in vllm/, in scheduler.py, and for
its parsers of tool calls.

Owns how our requests become vLLM's and back, and which vLLM calls make up a pause, a load and a probe. How vLLM is
started is in vllm/arguments.py. It decides nothing about serving: the replica does.

Sampling is softmax(logits / temperature), its logprobs those of the tokens sampled ("processed" logprobs). `min_tokens`
is never set: it masks the end token and changes the distribution. Stop tokens are token ids, kept as the response's
last token. vLLM itself names the weights version of every token.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rolecall.data.model.mixture import Mixture
from rolecall.errors import ConfigError, GenerationError, InvalidInputError, UnavailableError, WorkerLostError
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.v1.training_pb2 import RankTrace
from rolecall.weights.adapter import POLICY
from rolecall.weights.engine_calls import join_epoch, receive_version
from rolecall.weights.transferred import Transferred
from rolecall.wire import Array
from services.rollout.config import RolloutConfig
from services.rollout.sampling import (
    EngineInfo,
    MeetingPlace,
    PauseMode,
    Probed,
    Sample,
    SampleRequest,
    VersionSpan,
)
from services.rollout.scheduler import PRIORITY, PROBE_PRIORITY, UseLog, logprobs_of
from services.rollout.vllm.arguments import engine_args, engine_config, know_the_model
from services.rollout.vllm.core_process import fork_core
from services.rollout.vllm.image_prompts import ImagePrompts, under_load
from services.rollout.vllm.sleeper import Sleeper

_FINISH_REASONS = {"stop": trajectory_pb2.FINISH_REASON_STOP, "length": trajectory_pb2.FINISH_REASON_LENGTH}
ENGINE_DIED = "the vLLM engine died of the error that it wrote to this replica's log; the replica ends"
WARM_UP_TOKENS = (0, 1, 2, 3)
"""Ids that every vocabulary has."""
WATCH_S = 1.0
"""Seconds between two looks at whether the engine lives."""
TRACE_POLL_S = 0.5
"""Seconds between two looks at whether the workers have written their traces."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds the engine's processes get to end by themselves; they hold nothing that is worth a longer wait."""


class VllmEngine:
    """One AsyncLLM. Starts with dummy weights: the first real ones, too, come over the weight channel.

    Where the actor trains adapters the base is read from the model directory, the adapter alone comes over the channel,
    and every request names it.
    """

    def __init__(self, config: RolloutConfig, *, forks: bool = False) -> None:
        """Starts the engine's processes; takes tens of seconds. Call it inside the event loop that will use it.

        forks: whether vLLM's scheduler may be a fork of this process, on CPUs: one that has no threads to miss in it.
        """
        if config.in_one_process and not config.devices:
            know_the_model(config.model_path)
        arguments = engine_args(config)
        vllm_config = engine_config(arguments)
        if forks:
            fork_core()
        self._llm = AsyncLLM.from_vllm_config(
            vllm_config,
            stat_loggers=[UseLog],
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
        )
        self._use_log: UseLog = self._llm.logger_manager.stat_loggers[0]
        self._image_prompts = None
        if config.image_token_id is not None:
            self._image_prompts = ImagePrompts(self._llm.renderer, config.image_token_id)
        if config.float32_head and self._llm.model_config.head_dtype != torch.float32:
            raise ConfigError(
                "model.head_dtype float32: vLLM does not compute logits in float32 on this device; leave it at model"
            )
        self._num_probes = 0
        self._num_moves = 0
        self._is_split_on_cpus = config.num_workers > 1 and not config.devices
        self._makes_stage_buffers = config.pipeline_parallel_size > 1 and not config.devices
        self._num_loads = 0
        """Loads that have begun: prefixes are shared between requests that began under the same weights."""
        self._keeps_cache = config.keeps_cache
        self._is_cleared = True
        """Whether the last pause dropped all keys and values."""
        # Kept requests run on while the probe does, and none of them makes way: a place is left for it.
        self._places = asyncio.Semaphore(config.max_num_seqs) if config.keeps_cache else contextlib.nullcontext()
        self._mixture = config.mixture
        self._takes_adapters = config.lora is not None
        self._adapter: LoRARequest | None = None
        """What every request names, once it is installed."""
        self._sleeper = Sleeper(self._llm, self._alive)
        self._info = EngineInfo(
            max_model_tokens=config.max_model_tokens,
            num_weight_ranks=config.num_workers,
            eos_token_ids=config.eos_token_ids,
            # The base of an adapter comes from model.path and not over the weight channel: level 2 would lose it.
            sleep_levels=() if not config.sleep_mode else (1, 2) if config.lora is None else (1,),
        )

    @property
    def info(self) -> EngineInfo:
        """The facts that are fixed while the engine lives."""
        return self._info

    @property
    def num_moves(self) -> int:
        """Implements SamplingEngine.num_moves: outputs, and answers of the core, which gives them between two steps of
        its scheduler.
        """
        return self._num_moves

    @property
    def use(self) -> rollout_pb2.EngineUse:
        """Implements SamplingEngine.use, by what vLLM's scheduler says after each of its steps."""
        return self._use_log.use

    async def shared_memory(self) -> set[tuple[str, int]]:
        """Returns names and inodes of the memory that the engine's processes share."""
        of_workers = await self._alive(self._llm.collective_rpc("shared_memory"))
        return {(name, inode) for of_worker in of_workers for name, inode in of_worker}

    async def warm_up(self) -> None:
        """Does once what is slow only the first time, on the dummy weights: call it before the replica joins, while
        nobody's deadline runs. For the probe's logprobs torch compiles kernels, which takes tens of seconds where they
        are in no cache yet.
        """
        if self._is_split_on_cpus:
            await self._alive(self._llm.collective_rpc("unlink_shared_memory"))
        if self._makes_stage_buffers:
            await self._alive(self._llm.collective_rpc("make_stage_buffers"))
        await self.pause(PauseMode.KEEP)
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=2)
        await self.probe(WARM_UP_TOKENS, num_decoded=2)
        await self.resume()
        request = SampleRequest("warm-up", WARM_UP_TOKENS, sampling, seed=0)
        params = sampling_params(request, self._info.eos_token_ids)
        await self._final(tokens_input(list(WARM_UP_TOKENS)), params, request.request_id, PRIORITY)

    # --- sampling ---------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sample:
        """Implements SamplingEngine.sample."""
        params = sampling_params(request, self._info.eos_token_ids)
        async with self._places:  # bounded: by generation_timeout_s of whoever asks, as what is inside
            prompt = await self._prompt(request)
            output = await self._final(prompt, params, request.request_id, PRIORITY)
        sample = _sample(output, request)
        return sample if self._mixture is None else replace(sample, routing=_routing(output, self._mixture))

    async def _prompt(self, request: SampleRequest) -> Any:
        if not request.images:
            return tokens_input(list(request.prompt_token_ids), cache_salt=str(self._num_loads))
        if self._image_prompts is None:
            raise InvalidInputError(f"request {request.request_id} has images, and the engine's model sees none")
        prompt = await self._image_prompts.of(request)
        return under_load(prompt, self._num_loads)  # which may have grown meanwhile

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        """Implements SamplingEngine.probe. In vLLM's pause "wait" our scheduler begins a probe and nothing else; what
        holds keys and values goes on, and until it is paused again that pause does not end.
        """
        if await self._sleeper.wake_whole():
            await self.pause(PauseMode.KEEP)
        waiting = self._llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=False)
        begun = asyncio.create_task(self._alive(waiting))
        try:
            return await self._probed(token_ids, num_decoded)
        finally:
            await self.pause(PauseMode.KEEP if self._is_cleared else PauseMode.KEEP_CACHE)
            await begun  # bounded: by the pause, with which it ends

    async def _probed(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        logprobs, decoded = await self._probe(token_ids, max(num_decoded, 1))
        sampled = list(decoded.outputs[0].token_ids)[:num_decoded]
        if not sampled:
            return Probed(logprobs, np.zeros(0, np.float32), np.zeros(0, np.float32))
        prefilled, _ = await self._probe([*token_ids, *sampled], 1)
        return Probed(logprobs, logprobs_of(decoded)[:num_decoded], prefilled[len(token_ids) :])

    async def _probe(self, token_ids: Sequence[int], num_tokens: int) -> tuple[Array, RequestOutput]:
        """The logprobs of `token_ids`, float32 [T], and the `num_tokens` tokens that are sampled after them."""
        self._num_probes += 1
        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=1.0,
            seed=0,
            logprobs=0,
            flat_logprobs=True,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._final(tokens_input(list(token_ids)), params, f"probe/{self._num_probes}", PROBE_PRIORITY)
        given = output.prompt_logprobs
        if given is None or len(given) != len(token_ids):
            raise GenerationError("the engine returned no prompt logprobs for the probe")
        prompt = [0.0, *(entry[token].logprob for entry, token in zip(given[1:], token_ids[1:], strict=True))]
        return np.array(prompt, dtype=np.float32), output

    async def _final(self, prompt: Any, params: SamplingParams, request_id: str, priority: int) -> RequestOutput:
        final: RequestOutput | None = None
        try:
            # bounded: by generation_timeout_s of whoever asks, and by rollout.hang_s, past which a hung engine is ended
            async for output in self._llm.generate(
                prompt, params, request_id, lora_request=self._adapter, priority=priority
            ):
                final = output
                self._num_moves += 1
        except EngineDeadError as error:
            raise WorkerLostError(ENGINE_DIED) from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise GenerationError(f"vLLM failed on request {request_id}: {error}") from error
        if final is None:
            raise GenerationError(f"vLLM ended request {request_id} without an output")
        return final

    async def record(self, num_passes: int, path: str) -> list[RankTrace]:
        """Implements SamplingEngine.record. Workers answer between two steps, and write beside them."""
        await self._alive(self._llm.collective_rpc("begin_trace", args=(num_passes, path)))
        try:
            while not all(traces := await self._alive(self._llm.collective_rpc("trace"))):
                await asyncio.sleep(TRACE_POLL_S)
        finally:
            await self._alive(self._llm.collective_rpc("end_trace"))
        return [RankTrace.FromString(trace) for trace in traces]

    # --- pausing ----------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Implements SamplingEngine.pause. Clearing the cache makes kept requests compute their keys and values again,
        under the weights they go on with. Left as it is, it gives nothing to requests that come after the next load.

        Asked of the engine's core: pause_generation does no more for text, and then sleeps 20 ms for callers who want
        all outputs before its answer. Ours come to a gate that is shut (gate.py), whenever they come, and a publish
        pauses twice.
        """
        fate = PauseMode.KEEP if mode is PauseMode.KEEP_CACHE else mode
        self._is_cleared = mode is not PauseMode.KEEP_CACHE or not self._keeps_cache
        pausing = self._llm.engine_core.pause_scheduler_async(mode=fate.value, clear_cache=self._is_cleared)
        await self._alive(pausing)

    async def resume(self) -> None:
        """Implements SamplingEngine.resume."""
        await self._sleeper.wake_whole()
        await self._alive(self._llm.resume_generation())

    # --- weights ----------------------------------------------------------------------------------

    async def join(self, place: MeetingPlace) -> None:
        """Implements EngineWeights.join."""
        joining = join_epoch(
            self._llm,
            epoch=place.epoch,
            address=place.address,
            rank=place.rank,
            world_size=place.world_size,
            timeout_s=place.timeout_s,
            backend=place.backend,
            on_answer=self._moved,
        )
        await self._alive(joining)

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        """Implements EngineWeights.receive."""
        self._num_loads += 1
        self._use_log.begin_load()
        receiving = receive_version(
            self._llm,
            epoch=epoch,
            policy_version=policy_version,
            bucket_timeout_s=bucket_timeout_s,
        )
        arrived: Transferred = await self._alive(receiving)
        self._adapter = POLICY if self._takes_adapters else None
        return arrived

    async def sleep(self, level: int) -> None:
        """Implements EngineWeights.sleep."""
        await self._sleeper.sleep(level)

    async def wake_up(self) -> None:
        """Implements EngineWeights.wake_up."""
        await self._sleeper.wake_up()

    async def watch(self) -> None:
        """Runs while the engine lives, and asks it every WATCH_S for a sign. WorkerLostError when it died, also when
        nobody asks anything of it.

        One question is open at a time, without a deadline: the controller, who sees `num_moves`, decides how long the
        answer may take.
        """
        question = asyncio.create_task(self._alive(self._llm.is_paused()))
        try:
            while not self._llm.errored:
                await asyncio.sleep(WATCH_S)
                if question.done():
                    question.result()
                    self._moved()
                    question = asyncio.create_task(self._alive(self._llm.is_paused()))
        finally:
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)  # bounded: it is cancelled, or has failed
        raise WorkerLostError(ENGINE_DIED)

    def _moved(self) -> None:
        self._num_moves += 1

    async def close(self) -> None:
        """Implements EngineWeights.close. vLLM reports the end of its own process as an error; there is none left to
        report.
        """
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        await asyncio.to_thread(self._llm.shutdown, CLOSE_TIMEOUT_S)

    async def _alive(self, call: Any) -> Any:
        try:
            return (
                await call
            )  # bounded: by the caller's deadline; an engine that hangs is ended by the controller's hang_s
        except EngineDeadError as error:
            raise WorkerLostError(ENGINE_DIED) from error


def sampling_params(request: SampleRequest, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Returns how vLLM samples one response. InvalidInputError when it cannot."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=None if greedy else request.seed,
            logprobs=None if greedy else 0,
            flat_logprobs=True,
            stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidInputError(f"vLLM takes no request like {request.request_id}: {error}") from error


def _sample(output: RequestOutput, request: SampleRequest) -> Sample:
    (completion,) = output.outputs
    if completion.finish_reason == "abort":
        raise UnavailableError(f"request {request.request_id} was aborted by a pause; ask again")
    token_ids = tuple(completion.token_ids)
    spans = tuple(VersionSpan(int(span.version), span.start, span.end) for span in completion.weight_versions or ())
    if completion.finish_reason not in _FINISH_REASONS or not token_ids or not spans or spans[-1].end != len(token_ids):
        raise GenerationError(
            f"vLLM ended request {request.request_id} with {completion.finish_reason!r}, {len(token_ids)} tokens and "
            f"versions {completion.weight_versions}"
        )
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    if request.sampling.temperature != 0:
        logprobs = logprobs_of(output)
        if len(logprobs) != len(token_ids):
            raise GenerationError(
                f"vLLM gave {len(logprobs)} logprobs of {len(token_ids)} tokens of request {request.request_id}"
            )
        if not np.isfinite(logprobs).all():
            raise GenerationError(
                f"vLLM gave a logprob that is not finite for request {request.request_id}; look at the weights"
            )
    return Sample(token_ids, logprobs, spans, _FINISH_REASONS[completion.finish_reason])


def _routing(output: RequestOutput, mixture: Mixture) -> Array:
    """uint8 [T, W] of prompt and response. What vLLM sampled last it has sent nowhere."""
    (completion,) = output.outputs
    num_tokens = len(output.prompt_token_ids or ()) + len(completion.token_ids)
    routed = completion.routed_experts
    if routed is None or len(routed) != num_tokens - 1:
        raise GenerationError(
            f"vLLM says of {0 if routed is None else len(routed)} tokens of request {output.request_id} which experts "
            f"they were sent to, of {num_tokens - 1} that it computed"
        )
    encoded = mixture.encode(routed)
    return np.concatenate([encoded, encoded[-1:]])
