"""An AsyncLLM with processes of its own: takes two publishes, says how far it is from Hugging Face and which processes
it has, and waits to be killed.

python -m tests.integration.weights_async_engine_process DIRECTORY TENSOR_PARALLEL_SIZE
"""

import os

from rolecall.lifeline import die_with_parent

if __name__ == "__mp_main__":  # a process that vLLM spawned
    die_with_parent(os.getppid())
os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="PASSIVE",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
)  # before vLLM is imported

import asyncio
import json
import sys
from pathlib import Path

import psutil
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from rolecall.weights.engine_calls import join_epoch, receive_version
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from tests.integration.weights_models import greedy, make_model, named_weights

PROMPT = [5, 9, 23, 77, 4]
NUM_TOKENS = 8
TIMEOUT_S = 60.0


async def main(directory: Path, tensor_parallel_size: int) -> None:
    """Publishes two models in turn and reports."""
    models = [make_model("dense", seed) for seed in (0, 1)]
    weights = [named_weights(model, directory / str(i)) for i, model in enumerate(models)]
    cores = sorted(os.sched_getaffinity(0))
    # one core a worker
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        str(cores[rank % len(cores)]) for rank in range(tensor_parallel_size)
    )
    arguments = AsyncEngineArgs(
        model=str(directory / "0"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 * 2**20,
        dtype="float32",
        logprobs_mode="processed_logprobs",
        max_model_len=128,
        tensor_parallel_size=tensor_parallel_size,
        weight_transfer_config=WeightTransferConfig(backend="rolecall"),
        worker_extension_cls="rolecall.weights.receiver.WorkerExtension",
    )
    llm = AsyncLLM.from_engine_args(arguments)
    root = Publisher(torch.device("cpu"))
    world_size = 1 + tensor_parallel_size
    address = root.open(1, world_size, "127.0.0.1", "gloo", TIMEOUT_S)
    num_ranks = await join_epoch(llm, epoch=1, address=address, rank=1, world_size=world_size, timeout_s=TIMEOUT_S)
    gaps = []
    for version, (model, named) in enumerate(zip(models, weights, strict=True), start=1):
        await llm.pause_generation(mode="keep")
        manifest = build_manifest(named, 30_000)
        publishing = asyncio.to_thread(
            root.publish, iter(named), manifest, epoch=1, policy_version=version, bucket_timeout_s=TIMEOUT_S
        )
        sent, report = await asyncio.gather(
            publishing, receive_version(llm, epoch=1, policy_version=version, bucket_timeout_s=TIMEOUT_S)
        )
        assert (sent.fingerprints, sent.digest) == (report.fingerprints, report.digest)
        await llm.resume_generation()
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        async for output in llm.generate(tokens_input(prompt_token_ids=PROMPT), params, request_id=str(version)):
            completion = output.outputs[0]
        tokens, logprobs = greedy(model, PROMPT, NUM_TOKENS)
        assert list(completion.token_ids) == tokens
        assert [(span.version, span.start, span.end) for span in completion.weight_versions] == [
            (str(version), 0, NUM_TOKENS)
        ]
        gaps.append(
            max(
                abs(entry[token].logprob - b)
                for token, entry, b in zip(completion.token_ids, completion.logprobs, logprobs, strict=True)
            )
        )
    children = [process.pid for process in psutil.Process().children(recursive=True)]
    sys.stdout.write("DONE " + json.dumps({"num_ranks": num_ranks, "gaps": gaps, "children": children}) + "\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
