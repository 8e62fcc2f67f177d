"""A vLLM engine that takes publishes, good and planted-bad ones, and prints what came of each as one JSON document.

    python -m tests.integration.weights_engine_process SCENARIO DIRECTORY

Owns nothing but the scenarios: the tests say what should come of them. One start of the engine (some 10 s) serves them
all. It runs in this process; that of the last five in processes of its own, and waits to be killed at the end. Every
outcome holds: `agreed` (digest equal to the sender's), `greedy` (tokens equal to Hugging Face's), `gap` (largest
logprob difference over the shared tokens), `versions` (spans of the tokens), `different` (names whose fingerprints are
not those of the true weights), `wire_share` (bytes that travelled by bytes of the weights) or `error` ([class,
message]), and of the workers `state`, the first's, and `unread`, each one's.
"""

import os

from rolecall.lifeline import die_with_parent

if __name__ == "__mp_main__":  # a process that vLLM spawned
    die_with_parent(os.getppid())
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="PASSIVE",
    VLLM_LOGGING_LEVEL="ERROR",
)  # before vLLM is imported

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from rolecall.errors import RoleCallError
from rolecall.settings import WeightBackend
from rolecall.weights.engine_calls import join_epoch, receive_version
from rolecall.weights.fingerprint import fingerprint
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.weights.transferred import Transferred
from tests.tiny_gemma import write_gemma2, write_gemma4
from tests.tiny_models import (
    write_glm4_moe,
    write_gpt_oss,
    write_granite,
    write_nemotron,
    write_phi3,
    write_qwen3,
    write_qwen3_moe,
    write_stablelm,
)

PROMPT = [5, 9, 23, 77, 4]
NUM_TOKENS = 12
MAX_MODEL_LEN = 128
TIMEOUT_S = 60.0
ABANDONED_S = 1.0
"""Time in which a call has reached the workers."""
VOCAB = 150
"""Not a multiple of vLLM's padding."""
ALMOST = 2
"""The model that is model 0 but for an element in fifty."""
Weights = list[tuple[str, torch.Tensor]]


class InProcess:
    """AsyncLLM's calls on an in-process LLM, which starts in a fraction of the time."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def called(*arguments: Any, **options: Any) -> Any:
            return getattr(self._llm, name)(*arguments, **options)

        return called

    async def pause_generation(self, mode: str) -> None:
        """Does nothing: nothing runs."""

    async def resume_generation(self) -> None:
        """Does nothing: nothing waits."""

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        """AsyncLLM.generate."""
        for output in self._llm.generate([prompt], params, use_tqdm=False):
            yield output


class Bench:
    """One engine, one publisher, and the outcomes so far."""

    def __init__(self, kind: str, directory: Path, bucket_bytes: int, layout: dict[str, int]) -> None:
        paths = [write_model(kind, directory / str(seed), seed) for seed in (0, 1)]
        paths.append(write_almost(paths[0], directory / "almost"))
        eager = {"dtype": torch.float32, "attn_implementation": "eager"}  # its SDPA leaves out a cap of scores
        self.models: list[PreTrainedModel] = [
            AutoModelForCausalLM.from_pretrained(path, **eager).eval() for path in paths
        ]
        self.weights: list[Weights] = [sorted(load_file(path / "model.safetensors").items()) for path in paths]
        """As they would be published: tied tensors once, experts one by one."""
        self.bucket_bytes, self.world_size = bucket_bytes, 1 + math.prod(layout.values())
        arguments: dict[str, Any] = {
            "model": str(paths[0]),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 * 2**20,
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": MAX_MODEL_LEN,
            "weight_transfer_config": WeightTransferConfig(backend="rolecall"),
            "worker_extension_cls": "tests.integration.dropping_worker.DroppingWorker",
        }
        self.engine: Any
        if layout:
            cores = sorted(os.sched_getaffinity(0))
            of_workers = [str(cores[rank % len(cores)]) for rank in range(self.world_size - 1)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(of_workers)
            self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **layout))
        else:
            self.engine = InProcess(LLM(**arguments))
        self.root = Publisher(torch.device("cpu"))
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.epoch = self.version = self.num_ranks = 0

    async def vllm_model(self) -> torch.nn.Module:
        """The model inside the engine."""
        found: list[torch.nn.Module] = []
        await self.engine.apply_model(found.append)
        return found[0]

    async def open(self) -> None:
        """A new epoch with this engine as its one receiver; they take turns through shared memory and over Gloo."""
        self.epoch += 1
        backend: WeightBackend = "shared" if self.epoch % 2 else "gloo"
        address = self.root.open(self.epoch, self.world_size, "127.0.0.1", backend, TIMEOUT_S)
        self.num_ranks = await join_epoch(
            self.engine,
            epoch=self.epoch,
            address=address,
            rank=1,
            world_size=self.world_size,
            timeout_s=TIMEOUT_S,
            backend=backend,
        )

    async def publish(
        self,
        name: str,
        truth: int,
        sent: Weights | None = None,
        *,
        after: Callable[[], None] | None = None,
        received_version: int | None = None,
    ) -> None:
        """Publishes `sent` (absent: the true weights of model `truth`), lets `after` plant its fault, and records how
        the engine compares with the truth.
        """
        self.version += 1
        version, named = self.version, self.weights[truth] if sent is None else sent
        sending = asyncio.get_running_loop().run_in_executor(None, self._send, named, version)
        outcome: dict[str, Any] = {}
        try:
            await self.engine.pause_generation(mode="keep")
            report = await receive_version(
                self.engine, epoch=self.epoch, policy_version=received_version or version, bucket_timeout_s=TIMEOUT_S
            )
            await self.engine.resume_generation()
            digest = await sending
            if after is not None:
                after()
            outcome = {
                "agreed": report.digest == digest,
                "different": self._different(report, truth),
                "wire_share": report.wire_bytes / report.num_bytes,
                **await self._compare(truth),
            }
        except RoleCallError as error:
            outcome = {"error": [type(error).__name__, error.message]}
            self.root.abort("the test's receiver failed")
            await sending
        await self._record(name, outcome)

    async def receive_nothing(self, name: str) -> None:
        """Receives in an epoch over which the actor sends nothing in time."""
        outcome: dict[str, Any] = {}
        try:
            await receive_version(self.engine, epoch=self.epoch, policy_version=self.version + 1, bucket_timeout_s=0.2)
        except RoleCallError as error:
            outcome = {"error": [type(error).__name__, error.message]}
        await self._record(name, outcome)

    async def abandon(self) -> None:
        """Begins to receive in an epoch over which nothing comes, and is cancelled."""
        receiving = receive_version(
            self.engine, epoch=self.epoch, policy_version=self.version + 1, bucket_timeout_s=5 * ABANDONED_S
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(receiving, ABANDONED_S)

    async def _record(self, name: str, outcome: dict[str, Any]) -> None:
        reports = await self.engine.collective_rpc("weights_report")
        unread = [report["unread"] for report in reports]
        self.outcomes[name] = {**outcome, "state": reports[0]["state"], "unread": unread}

    def _send(self, named: Weights, version: int) -> str:
        try:
            manifest = build_manifest(named, self.bucket_bytes, deltas=True)
            return self.root.publish(
                iter(named), manifest, epoch=self.epoch, policy_version=version, bucket_timeout_s=TIMEOUT_S
            ).digest
        except RoleCallError as error:
            sys.stderr.write(f"publisher: {error.message}\n")
            return ""

    def _different(self, arrived: Transferred, truth: int) -> list[str]:
        prints = arrived.fingerprints
        return [name for name, tensor in self.weights[truth] if prints.get(name) != fingerprint(tensor)]

    async def _compare(self, truth: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        prompt = tokens_input(prompt_token_ids=PROMPT)
        async for output in self.engine.generate(prompt, params, request_id=str(self.version)):
            completion = output.outputs[0]
        tokens, logprobs = greedy(self.models[truth])
        ours = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        return {
            "greedy": list(completion.token_ids) == tokens,
            "gap": max(abs(a - b) for a, b in zip(ours, logprobs, strict=True)),
            "versions": [(span.version, span.start, span.end) for span in completion.weight_versions or ()],
        }


def write_model(kind: str, path: Path, seed: int) -> Path:
    """A random model whose heads are of the smallest size that vLLM computes on CPUs."""
    if kind == "moe":
        return write_qwen3_moe(path, vocab=VOCAB, seed=seed, head_dim=32, expert_hidden=64)
    if kind == "balanced":
        return write_glm4_moe(path, vocab=VOCAB, seed=seed, head_dim=32)
    if kind == "scaled":
        return write_granite(path, tied=True, vocab=VOCAB, hidden=128, seed=seed)
    if kind in ("short_rope", "long_rope"):  # to transformers, too: a pass is as long as PROMPT at the least
        original_tokens = MAX_MODEL_LEN if kind == "short_rope" else len(PROMPT) - 1
        return write_phi3(path, original_tokens=original_tokens, vocab=VOCAB, hidden=128, seed=seed)
    if kind in ("stablelm", "nemotron"):
        write = write_stablelm if kind == "stablelm" else write_nemotron
        return write(path, vocab=VOCAB, hidden=128, seed=seed)
    if kind == "sinks":
        return write_gpt_oss(path, vocab=VOCAB, seed=seed)
    if kind in ("gemma4", "gemma4 mixture"):
        return write_gemma4(path, vocab=VOCAB, seed=seed, mixture=kind == "gemma4 mixture")
    if kind == "gemma2":
        return write_gemma2(path, vocab=VOCAB, seed=seed)
    return write_qwen3(path, tied=kind == "tied", vocab=VOCAB, hidden=128, kv_heads=4, seed=seed)


@torch.no_grad()
def write_almost(path: Path, almost: Path) -> Path:
    """The model at `path` but for an element in fifty."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.view(-1)[::50] *= 1.5
    model.save_pretrained(almost)
    return almost


@torch.no_grad()
def greedy(model: PreTrainedModel) -> tuple[list[int], list[float]]:
    """Greedy tokens after PROMPT by Hugging Face and their logprobs, recomputing the whole sequence for each."""
    ids, logprobs = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), dim=-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(PROMPT) :], logprobs


def swapped(named: Weights, first: str, second: str) -> Weights:
    """The same names with the tensors of `first` and `second` exchanged."""
    tensors = dict(named)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return [(name, tensors[name]) for name, _ in named]


async def dense(bench: Bench) -> None:
    """Every scenario of a plain dense model."""
    query, key = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    await bench.publish("swapped on the way", 0, swapped(bench.weights[0], query, key))
    await bench.publish("stale version", 0, received_version=1)
    await bench.open()
    short = [named for named in bench.weights[0] if named[0] not in (query, "model.norm.weight")]
    await bench.publish("not exported", 0, short)
    await bench.open()
    await bench.publish("healed", 0)
    await bench.open()
    bent = [(name, tensor[:-1] if name == query else tensor) for name, tensor in bench.weights[0]]
    await bench.publish("wrong shape", 0, bent)
    await bench.open()
    await bench.publish("healed again", 1)
    await bench.open()
    await bench.publish("whole", 0)
    await bench.publish("delta", ALMOST)
    await bench.publish("all changed", 1)
    await bench.open()
    await bench.receive_nothing("late actor")


async def tied(bench: Bench) -> None:
    """A tied model whose logits are scaled, and a head that computes with old weights."""
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    head = (await bench.vllm_model()).get_submodule("lm_head")
    stale = head.cpu_linear
    await bench.publish("stale head", 0, after=lambda: setattr(head, "cpu_linear", stale))
    await bench.publish("third", 1)


async def moe(bench: Bench) -> None:
    """A mixture of experts, whose layers span several buckets."""
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    await bench.open()
    await bench.publish("missing expert", 0, [named for named in bench.weights[0] if named[0] != expert])
    await bench.open()
    await bench.publish("healed", 0)


async def balanced(bench: Bench) -> None:
    """A mixture of experts that are chosen with biases, which are no parameters to transformers."""
    await bench.publish("first", 0)
    await bench.publish("second", 1)


async def whole_and_delta(bench: Bench) -> None:
    """A model whole, and then what changed."""
    await bench.publish("first", 0)
    await bench.publish("delta", ALMOST)


async def three_versions(bench: Bench) -> None:
    """Two models, and what changed since the second."""
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    await bench.open()
    await bench.publish("whole", 0)
    await bench.publish("delta", ALMOST)


async def sinks(bench: Bench) -> None:
    """A mixture of fused experts with biases, whose heads have sinks: as experts, whole and as what changed."""
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    await bench.open()
    await bench.publish("whole", 0)
    await bench.publish("delta", ALMOST)
    missing = ("model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.gate_up_proj_bias")
    await bench.open()
    await bench.publish("not exported", 0, [named for named in bench.weights[0] if named[0] not in missing])
    await bench.open()
    await bench.publish("healed", 0)


async def workers(bench: Bench) -> None:
    """An AsyncLLM with processes of its own."""
    await bench.engine.collective_rpc("unlink_shared_memory")
    await bench.publish("first", 0)
    await bench.publish("second", 1)
    await bench.open()
    await bench.publish("whole", 0)
    await bench.publish("delta", ALMOST)
    await bench.open()
    await bench.abandon()
    await bench.open()
    await bench.publish("after one that was abandoned", 1)


async def stages(bench: Bench) -> None:
    """Two stages of a tied model, the embedding in both: what `workers` plays, and a stage that drops what is its own
    or what the other has, too.
    """
    await bench.engine.collective_rpc("make_stage_buffers")
    await workers(bench)
    last, embedding = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
    for title, name, stage in (("own", last, 1), ("both", embedding, 1), ("other", last, 0)):
        await bench.engine.collective_rpc("drop", args=(name, stage))
        await bench.publish(f"dropped {title}", 0)
        await bench.engine.collective_rpc("drop", args=("", stage))
        await bench.open()
    rotary = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))
    await bench.publish("nowhere", 0, sorted([*bench.weights[0], rotary]))
    await bench.open()
    await bench.publish("healed", 1)


async def sink_stages(bench: Bench) -> None:
    """Two stages of a model with sinks."""
    await bench.engine.collective_rpc("make_stage_buffers")
    await workers(bench)


SCENARIOS: dict[str, tuple[Callable[[Bench], Awaitable[None]], str, int, dict[str, int]]] = {
    "dense": (dense, "dense", 16 * 2**20, {}),
    "tied": (tied, "scaled", 30_000, {}),
    "moe": (moe, "moe", 20_000, {}),
    "sinks": (sinks, "sinks", 20_000, {}),
    "balanced": (balanced, "balanced", 20_000, {}),
    **{kind: (whole_and_delta, kind, 20_000, {}) for kind in ("short_rope", "long_rope", "stablelm", "nemotron")},
    "gemma4": (three_versions, "gemma4", 20_000, {}),
    "gemma4 mixture": (three_versions, "gemma4 mixture", 20_000, {}),
    "gemma2": (three_versions, "gemma2", 20_000, {}),
    "worker": (workers, "dense", 30_000, {"tensor_parallel_size": 1}),
    "workers": (workers, "dense", 30_000, {"tensor_parallel_size": 2}),
    "sink_workers": (workers, "sinks", 20_000, {"tensor_parallel_size": 2}),
    "sink_stages": (sink_stages, "sinks", 20_000, {"pipeline_parallel_size": 2}),
    "stages": (stages, "tied", 30_000, {"pipeline_parallel_size": 2}),
}
"""What is played, on which kind of model, in buckets of how many bytes, and the layout of an engine of its own."""


async def main(name: str, directory: Path) -> None:
    """Runs the scenarios of that name."""
    scenario, kind, bucket_bytes, layout = SCENARIOS[name]
    bench = Bench(kind, directory, bucket_bytes, layout)
    await bench.open()
    await scenario(bench)
    children = [process.pid for process in psutil.Process().children(recursive=True)]
    shared = [list(each) for worker in await bench.engine.collective_rpc("shared_memory") for each in worker]
    found = {"num_ranks": bench.num_ranks, "children": children, "shared": shared, **bench.outcomes}
    sys.stdout.write(f"OUTCOMES {json.dumps(found)}\n")
    sys.stdout.flush()
    await asyncio.sleep(600 if layout else 0)
    bench.root.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
