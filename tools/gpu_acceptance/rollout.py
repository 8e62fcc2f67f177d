"""Checks 23 and 24: vLLM on the GPU. An engine beside the trainer's, which sends it weights; and a whole run in which
both take turns on the device. Skipped where vLLM is not installed."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.sort_digits.quickstart import EVALUATION, HERE
from rolecall.settings import load_settings
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.packing.pack import pack, unpack
from rolecall.training.ranks.device import memory_bytes
from rolecall.v1 import trajectory_pb2
from rolecall.weights.manifest import build_manifest
from services.controller.publish.probe import NUM_DECODED
from services.rollout.config import RolloutConfig, configure, machine_cores, start_environment
from services.rollout.sampling import MeetingPlace, PauseMode, Sample, SampleRequest
from tools.gpu_acceptance.channel import BUCKET_TIMEOUT_S, Root
from tools.gpu_acceptance.findings import Findings, SkippedCheckError
from tools.gpu_acceptance.probe import by_engine, verdict
from tools.gpu_acceptance.published import BUCKET_BYTES
from tools.gpu_acceptance.receiver import MEET_S
from tools.gpu_acceptance.stage import Stage, make_engine, write_zeros

if TYPE_CHECKING:
    from services.rollout.engine import VllmEngine

NUM_STEPS = 6
KV_CACHE_BYTES = 32 * 2**30
_RUNNING_S = 60.0
"""Longest wait for requests to be under way."""
_POLL_S = 0.01
MOST_MISMATCH = 0.05
"""Nats that trainer and sampler may differ by in the mean over sampled tokens: LEAST_BOUND of the publish probe."""


def check_engine(found: Findings, folder: Path) -> None:
    """A 0.6B of random weights that come from the trainer's engine: what vLLM computes with them, how fast, and whether
    it can be paused with requests in flight, put to sleep and woken.
    """
    _require_vllm()
    stage = Stage.of(found, folder)
    path = write_zeros(folder / "model", stage.config("0.6B", head_dim=stage.pick(128, 32)))
    trainer = make_engine(stage, path, dtype=stage.pick("bfloat16", "float32"), optimizer=None)
    config = config_of(stage, path)
    os.environ.update(start_environment(config))
    asyncio.run(_check_engine(Pair(stage, trainer, config)))


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise SkippedCheckError("vLLM is not installed")


def config_of(stage: Stage, model: Path, *more: str) -> RolloutConfig:
    """As of a run whose trainer and rollout share the first GPU, by whose settings vLLM can sleep; `more` settings."""
    length = stage.pick(512, 16)
    overrides = [
        f"model.path={model}",
        f"model.dtype={stage.pick('bfloat16', 'float32')}",
        f"data.max_prompt_tokens={length}",
        f"sampling.max_tokens={length}",
        f"rollout.max_num_seqs={stage.pick(256, 4)}",
        f"rollout.kv_cache_bytes={stage.pick(KV_CACHE_BYTES, 2**26)}",
        "rollout.pause_mode=keep_cache",
        *stage.pick(("actor.devices=[0]", "rollout.devices=[[0]]"), ()),
        *more,
    ]
    config = configure(load_settings(HERE / "task.yaml", overrides), "rollout-0", machine_cores())
    return replace(config, eos_token_ids=())  # every response has all its tokens


class Pair:
    """The trainer's engine and vLLM's, with a channel from the one to the other."""

    engine: "VllmEngine"

    def __init__(self, stage: Stage, trainer: FsdpEngine, config: RolloutConfig) -> None:
        self.stage, self.trainer, self.config, self.found = stage, trainer, config, stage.found
        self.length = config.max_model_tokens // 2
        self.root = Root(stage, "shared")
        self.manifest = build_manifest(trainer.named_weights(), BUCKET_BYTES)
        self.rng = np.random.default_rng(0)
        self.vocab = trainer.config.get_text_config().vocab_size
        self._num_sampled = 0

    async def join(self) -> None:
        """Both ends meet."""
        address = self.root.open(2)
        await self.engine.join(MeetingPlace(self.root.epoch, address, 1, 2, MEET_S, "shared"))

    async def publish(self, name: str) -> None:
        """The trainer's weights to the paused engine."""
        started = time.perf_counter()
        weights, version = self.trainer.named_weights(), self.root.version + 1
        sending = asyncio.create_task(asyncio.to_thread(self.root.publish, weights, self.manifest))
        arrived = await self.engine.receive(self.root.epoch, version, BUCKET_TIMEOUT_S)
        sent = await sending  # bounded: by BUCKET_TIMEOUT_S of its last bucket
        seconds = time.perf_counter() - started
        self.found.figure(f"{name}, s and GB/s", f"{seconds:.3g}, {sent.num_bytes / seconds / 1e9:.3g}")
        self.found.require(f"{name}: what arrived is not what was sent", arrived.digest == sent.digest)

    async def probe(self, name: str) -> None:
        """The controller's verdict on what the paused engine computes, beside the trainer's two ways."""
        ids = self.rng.integers(0, self.vocab, self.length // 2, dtype=np.int32)
        ours, again = (by_engine(self.trainer, ids, self.stage, plain=plain) for plain in (False, True))
        probed = await self.engine.probe(ids.tolist(), NUM_DECODED)
        gaps = {
            "trainer-vLLM": np.abs(ours - probed.logprobs)[1:],
            "trainer-itself": np.abs(ours - again)[1:],
            "decode-prefill": np.abs(probed.decoded_logprobs - probed.prefilled_logprobs),
        }
        said = ", ".join(f"{pair} {gap.mean():.2g}/{gap.max():.2g}" for pair, gap in gaps.items())
        self.found.figure(f"{name} (mean/max)", said)
        wrong = verdict(ids, ours, again, probed, exact=self.found.dry)
        self.found.require(f"{name}: {wrong}", wrong is None)

    def sample(self, num_responses: int) -> "asyncio.Future[list[Sample]]":
        """Responses of all their tokens to prompts of random ones."""
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=self.length)
        first, self._num_sampled = self._num_sampled, self._num_sampled + num_responses
        self.prompts = self.rng.integers(0, self.vocab, (num_responses, self.length), dtype=np.int32)
        requests = [
            SampleRequest(f"sample-{first + row}", tuple(prompt.tolist()), sampling, seed=first + row)
            for row, prompt in enumerate(self.prompts)
        ]
        return asyncio.gather(*(self.engine.sample(request) for request in requests))

    def compare(self, samples: Sequence[Sample]) -> None:
        """The sampler's logprobs with the trainer's."""
        gaps = []
        for prompt, sample in zip(self.prompts, samples, strict=False):
            ids = np.array([*prompt, *sample.token_ids], np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            microbatch = pack(
                [{"token_ids": ids, "response_mask": mask}], (), temperature=1.0, device=self.stage.device
            )
            (outputs,) = self.trainer.forward([microbatch])
            assert isinstance(outputs, TokenOutputs)
            (logprobs_T,) = unpack(outputs.logprobs_N, (len(ids),))
            gaps.append(np.abs(logprobs_T[len(prompt) :] - sample.logprobs))
        gap = np.concatenate(gaps)
        self.found.figure("tokens compared with the trainer", gap.size)
        self.found.at_most("mismatch, mean", float(gap.mean()), MOST_MISMATCH)
        self.found.figure("mismatch, max", float(gap.max()))


async def _check_engine(pair: Pair) -> None:
    from services.rollout.engine import VllmEngine  # after its environment is set

    found, stage = pair.found, pair.stage
    started = time.perf_counter()
    pair.engine = engine = VllmEngine(pair.config)
    await engine.warm_up()
    found.figure("s until vLLM is warm", time.perf_counter() - started)
    try:
        await engine.pause(PauseMode.KEEP)
        await pair.join()
        await pair.publish("first weights")
        await pair.probe("probe")
        await engine.resume()
        for num_responses in stage.pick((16, 256), (2, 4)):
            started = time.perf_counter()
            samples = await pair.sample(num_responses)
            num_tokens = sum(len(sample.token_ids) for sample in samples)
            found.figure(f"tokens/s of {num_responses} responses", num_tokens / (time.perf_counter() - started))
        pair.compare(samples[:8])
        for mode in (PauseMode.KEEP, PauseMode.KEEP_CACHE):
            with found.attempt(f"weights under requests in flight, {mode.value}"):
                await _publish_in_flight(pair, mode)
        if pair.config.sleep_mode:
            await _sleep(pair)
    finally:
        await engine.close()
        pair.root.close()


async def _publish_in_flight(pair: Pair, mode: PauseMode) -> None:
    """Responses go on under new weights, and say which tokens are of which."""
    before, sampled = pair.root.version, await _under_way(pair)
    started = time.perf_counter()
    await pair.engine.pause(mode)
    pair.found.figure(f"{mode.value}, ms to come to rest", 1e3 * (time.perf_counter() - started))
    await pair.publish(f"{mode.value}, weights")
    await pair.engine.resume()
    _require_versions(pair, mode.value, await sampled, before)


async def _under_way(pair: Pair) -> "asyncio.Future[list[Sample]]":
    """Responses of which some have begun."""
    sampled = pair.sample(pair.stage.pick(64, 2))
    give_up_at = time.monotonic() + _RUNNING_S
    while pair.engine.use.num_running == 0:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"no request was under way within {_RUNNING_S:.0f} s")
        await asyncio.sleep(_POLL_S)
    return sampled


def _require_versions(pair: Pair, name: str, samples: Sequence[Sample], before: int) -> None:
    """Each of them is whole, and says which tokens are of version `before` and which of the next."""
    versions = {span.policy_version for sample in samples for span in sample.spans}
    pair.found.require(f"{name}: versions {versions}", versions == {before, before + 1})
    covered = all(sum(span.end - span.start for span in sample.spans) == pair.length for sample in samples)
    pair.found.require(f"{name}: spans do not cover the responses", covered)


async def _sleep(pair: Pair) -> None:
    """Level 2: weights are dropped, and come again over the channel; responses that are unfinished go on after it."""
    found, engine = pair.found, pair.engine
    version, sampled = pair.root.version, await _under_way(pair)
    await engine.pause(PauseMode.KEEP)
    before, started = memory_bytes(pair.stage.device)[0], time.perf_counter()
    await engine.sleep(2)
    seconds, freed = time.perf_counter() - started, before - memory_bytes(pair.stage.device)[0]
    held = sum(tensor.nbytes for _, tensor in pair.trainer.named_weights()) + (pair.config.kv_cache_bytes or 0)
    found.figure("s to fall asleep", seconds)
    found.at_least("memory that sleep freed, of weights and cache", freed / held, 0.95, on_device=True)
    started = time.perf_counter()
    await engine.wake_up()
    found.figure("s to wake for weights", time.perf_counter() - started)
    await pair.publish("weights after sleep")
    await pair.probe("probe after sleep")
    await engine.resume()
    _require_versions(pair, "sleep", await sampled, version)
    samples = await pair.sample(16)
    found.require("responses after sleep are not whole", all(len(each.token_ids) == pair.length for each in samples))


def check_run(found: Findings, folder: Path) -> None:
    """The quickstart, actor and rollout in shifts on one GPU."""
    _require_vllm()
    work = folder / "work"
    place = () if found.dry else ("--model.dtype=bfloat16", "--actor.devices=[0]", "--rollout.devices=[[0]]")
    steps = f"--run.num_steps={NUM_STEPS}", "--evaluation.every_steps=100"
    command = [sys.executable, str(HERE / "quickstart.py"), "--folder", str(work), *place, *steps]
    code = subprocess.run(command, check=False).returncode
    for log in sorted((work / "run" / "logs").glob("*.log")):
        print(f"--- {log.name}\n{log.read_text()[-3000:]}", flush=True)
    found.require(f"it ended with exit code {code}", code == 0)
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "reward/mean" in row]
    found.require(f"{len(told)} steps were reported, not {NUM_STEPS}", len(told) == NUM_STEPS)
    found.figure("s until the first weights were sampled", rows[0]["time_s"])
    for name in ("time/step_s", "time/train_s", "publish/time_s", "shift/to_training_s", "shift/to_sampling_s"):
        _figure(found, name, told)
    found.at_most("actor/mismatch_mean", max(step["actor/mismatch_mean"] for step in told), MOST_MISMATCH)
    accuracies = [row[EVALUATION] for row in rows if EVALUATION in row]
    found.figure("held-out accuracy before", accuracies[0])
    found.at_least("held-out accuracy after", accuracies[-1], 0.5)


def _figure(found: Findings, name: str, steps: Sequence[dict[str, Any]]) -> None:
    values = [step[name] for step in steps if name in step]
    if values:
        found.figure(f"{name}, median", median(values))
