"""A vLLM engine in this process that takes publishes, good and planted-bad ones, and prints what came of each as one
JSON document.

    python -m tests.integration.weights_engine_process dense|tied|moe DIRECTORY

Owns nothing but the scenarios: the tests say what should come of them. One start of the engine (some 10 s) serves them
all. Every outcome holds: `agreed` (digest equal to the sender's), `greedy` (tokens equal to Hugging Face's), `gap`
(largest logprob difference over the shared tokens), `different` (names whose fingerprints are not those of the true
weights) or `error` ([class, message]), and `state`.
"""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="PASSIVE",
    VLLM_LOGGING_LEVEL="ERROR",
)  # before vLLM is imported

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from rolecall.errors import RoleCallError
from rolecall.weights.engine_calls import join_epoch, receive_version
from rolecall.weights.fingerprint import fingerprint
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from rolecall.weights.transferred import Transferred
from tests.integration.weights_models import greedy, make_model, named_weights

PROMPT = [5, 9, 23, 77, 4]
NUM_TOKENS = 12
TIMEOUT_S = 30.0
Weights = list[tuple[str, torch.Tensor]]


class Engine:
    """AsyncLLM's calls on an in-process LLM, which starts in a fraction of the time."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """AsyncLLM.collective_rpc."""
        return list(self.llm.collective_rpc(method, timeout, args, kwargs))

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        """AsyncLLM.init_weight_transfer_engine."""
        self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """AsyncLLM.start_weight_update."""
        self.llm.start_weight_update()

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        """AsyncLLM.update_weights."""
        self.llm.update_weights(request)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """AsyncLLM.finish_weight_update."""
        self.llm.finish_weight_update(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        """AsyncLLM.update_weight_version."""
        self.llm.update_weight_version(new_version)

    async def reset_prefix_cache(self) -> bool:
        """AsyncLLM.reset_prefix_cache."""
        return bool(self.llm.reset_prefix_cache())


class Bench:
    """One engine, one publisher, and the outcomes so far."""

    def __init__(self, kind: str, directory: Path, bucket_bytes: int) -> None:
        self.models: list[PreTrainedModel] = [make_model(kind, seed) for seed in (0, 1)]
        self.weights: list[Weights] = [named_weights(model, directory / str(i)) for i, model in enumerate(self.models)]
        self.bucket_bytes = bucket_bytes
        self.llm = LLM(
            model=str(directory / "0"),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=64 * 2**20,
            dtype="float32",
            logprobs_mode="processed_logprobs",
            max_model_len=128,
            weight_transfer_config=WeightTransferConfig(backend="rolecall"),
            worker_extension_cls="rolecall.weights.receiver.WorkerExtension",
        )
        self.engine = Engine(self.llm)
        self.root = Publisher(torch.device("cpu"))
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.epoch = self.version = 0

    def vllm_model(self) -> torch.nn.Module:
        """The model inside the engine."""
        found: list[torch.nn.Module] = []
        self.llm.apply_model(found.append)
        return found[0]

    def open(self) -> None:
        """A new epoch with this engine as its one receiver."""
        self.epoch += 1
        address = self.root.open(self.epoch, 2, "127.0.0.1", "gloo", TIMEOUT_S)
        asyncio.run(
            join_epoch(self.engine, epoch=self.epoch, address=address, rank=1, world_size=2, timeout_s=TIMEOUT_S)
        )

    def publish(
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
        named = self.weights[truth] if sent is None else sent
        self.version += 1
        version = self.version
        thread = threading.Thread(target=self._send, args=(named, version), daemon=True)
        thread.start()
        outcome: dict[str, Any] = {}
        try:
            receiving = receive_version(
                self.engine, epoch=self.epoch, policy_version=received_version or version, bucket_timeout_s=TIMEOUT_S
            )
            report = asyncio.run(receiving)
            thread.join(TIMEOUT_S)
            if after is not None:
                after()
            outcome = {
                "agreed": report.digest == self.sent,
                "different": self._different(report, truth),
                **self._compare(truth),
            }
        except RoleCallError as error:
            outcome = {"error": [type(error).__name__, error.message]}
            self.root.abort("the test's receiver failed")
        thread.join(2 * TIMEOUT_S)
        ((report_now),) = self.llm.collective_rpc("weights_report")
        self.outcomes[name] = {**outcome, "state": report_now["state"]}

    def _send(self, named: Weights, version: int) -> None:
        self.sent = ""
        try:
            manifest = build_manifest(named, self.bucket_bytes)
            self.sent = self.root.publish(
                iter(named), manifest, epoch=self.epoch, policy_version=version, bucket_timeout_s=TIMEOUT_S
            ).digest
        except RoleCallError as error:
            sys.stderr.write(f"publisher: {error.message}\n")

    def _different(self, arrived: Transferred, truth: int) -> list[str]:
        prints = arrived.fingerprints
        return [name for name, tensor in self.weights[truth] if prints.get(name) != fingerprint(tensor)]

    def _compare(self, truth: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        completion = output.outputs[0]
        tokens, logprobs = greedy(self.models[truth], PROMPT, NUM_TOKENS)
        ours = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        return {
            "greedy": list(completion.token_ids) == tokens,
            "gap": max(abs(a - b) for a, b in zip(ours, logprobs, strict=True)),
        }


def swapped(named: Weights, first: str, second: str) -> Weights:
    """The same names with the tensors of `first` and `second` exchanged."""
    tensors = dict(named)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return [(name, tensors[name]) for name, _ in named]


def dense(bench: Bench) -> None:
    """Every scenario of a plain dense model."""
    query, key = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    bench.publish("first", 0)
    bench.publish("second", 1)
    bench.publish("swapped on the way", 0, swapped(bench.weights[0], query, key))
    bench.publish("stale version", 0, received_version=1)
    bench.open()
    short = [named for named in bench.weights[0] if named[0] not in (query, "model.norm.weight")]
    bench.publish("not exported", 0, short)
    bench.open()
    bench.publish("healed", 0)
    bench.open()
    bench.publish(
        "wrong shape", 0, [(name, tensor[:-1] if name == query else tensor) for name, tensor in bench.weights[0]]
    )
    bench.open()
    bench.publish("healed again", 1)


def tied(bench: Bench) -> None:
    """A tied model, and a head that computes with old weights."""
    bench.publish("first", 0)
    bench.publish("second", 1)
    head = bench.vllm_model().get_submodule("lm_head")
    stale = head.cpu_linear
    bench.publish("stale head", 0, after=lambda: setattr(head, "cpu_linear", stale))
    bench.publish("third", 1)


def moe(bench: Bench) -> None:
    """A mixture of experts, whose layers span several buckets."""
    bench.publish("first", 0)
    bench.publish("second", 1)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    bench.open()
    bench.publish("missing expert", 0, [named for named in bench.weights[0] if named[0] != expert])
    bench.open()
    bench.publish("healed", 0)


SCENARIOS = {"dense": (dense, 16 * 2**20), "tied": (tied, 30_000), "moe": (moe, 20_000)}


def main(kind: str, directory: Path) -> None:
    """Runs the scenarios of one kind of model."""
    scenario, bucket_bytes = SCENARIOS[kind]
    bench = Bench(kind, directory, bucket_bytes)
    bench.open()
    scenario(bench)
    bench.root.close()
    sys.stdout.write("OUTCOMES " + json.dumps(bench.outcomes) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
