"""The figures that training.py measures, each in a process of its own: `python training_measures.py NAME {"its":
"arguments"}` prints one JSON object. See README.md.
"""

import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rolecall.algorithms.aggregation import Counts
from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import open_storage
from rolecall.settings import OptimizerSection
from rolecall.training.engine import Microbatch
from rolecall.training.export.export import export
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.logits.logprobs import logprobs_and_entropy
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.balance import partition
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank
from rolecall.training.serving.background import in_background

Result = dict[str, Any]


def packing(
    folder: str, shape: dict[str, int], num_rows: int, max_tokens: int, token_budget: int, rounds: int
) -> Result:
    """Forward and backward over the same skewed sequences: packed by our engine; right-padded through transformers as
    they come, and sorted by length.
    """
    engine = make_engine(Path(folder), shape)
    padded_model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    rng = np.random.default_rng(0)
    rows = [
        make_row(rng, int(n), shape["vocab_size"])
        for n in rng.lognormal(np.log(max_tokens) - 2.5, 1.0, num_rows).clip(8, max_tokens)
    ]
    lengths = [len(row["token_ids"]) for row in rows]
    counts = local_counts(rows)
    plan = plan_batch(
        lengths, num_minibatches=1, token_budget=token_budget, world_size=1, cost=engine.flops.forward, seed=0
    )[0]
    packed = [
        pack([rows[i] for i in members], ["loss_mask"], temperature=1.0, device=engine.device)
        for members in plan.microbatches
    ]
    arrived = padded_batches(rows, token_budget)
    by_length = padded_batches(sorted(rows, key=lambda row: -len(row["token_ids"])), token_budget)
    work: dict[str, Callable[[], float]] = {
        "packed": lambda: packed_pass(engine, packed, counts),
        "padded": lambda: padded_pass(padded_model, arrived, counts),
        "padded, sorted": lambda: padded_pass(padded_model, by_length, counts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    losses = {}
    for number in range(rounds + 1):
        for name, once in work.items():
            started = time.perf_counter()
            losses[name] = once()
            if number:
                seconds[name].append(time.perf_counter() - started)
        engine.step()
        padded_model.zero_grad()
    return {"num_tokens": sum(lengths), "longest": max(lengths), "seconds": seconds, "losses": losses}


def packed_pass(engine: FsdpEngine, microbatches: Sequence[Microbatch], counts: Counts) -> float:
    """The loss; gradients stay in the engine."""
    return engine.forward_backward(microbatches, SftObjective(counts)).values()["sft/loss"]


def padded_batches(rows: Sequence[Row], token_budget: int) -> list[list[Row]]:
    """Rows in order, as many to a batch as keep rows times longest within the budget."""
    batches: list[list[Row]] = [[]]
    for row in rows:
        longest = max(len(each["token_ids"]) for each in [*batches[-1], row])
        if batches[-1] and longest * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def padded_pass(model: PreTrainedModel, batches: Sequence[Sequence[Row]], counts: Counts) -> float:
    """The same loss over right-padded batches; scored positions alone go through the head, as in ours, so that the
    padding is all that differs.
    """
    total = 0.0
    for rows in batches:
        lengths = torch.tensor([len(row["token_ids"]) for row in rows])
        ids_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row["token_ids"].astype(np.int64)) for row in rows], batch_first=True
        )
        mask_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row["loss_mask"] != 0) for row in rows], batch_first=True
        )
        real_BT = torch.arange(ids_BT.shape[1]) < lengths[:, None]
        hidden_BTH = model.base_model(
            input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False
        ).last_hidden_state
        scored_BT = mask_BT[:, 1:]
        targets_M = ids_BT[:, 1:][scored_BT]
        head = model.get_output_embeddings().weight
        logprobs_M, _ = logprobs_and_entropy(
            hidden_BTH[:, :-1][scored_BT], head, targets_M, torch.ones(len(targets_M)), entropy=False
        )
        loss = -logprobs_M.sum() / counts.num_tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def logprobs(way: str, dtype: str, entropy: bool, num_tokens: int, hidden: int, vocab: int) -> Result:
    """One forward and backward pass, blocked or through whole logits. Memory: what the peak adds to the inputs and
    their gradients.
    """
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    torch.manual_seed(0)
    hidden_MH = torch.randn(num_tokens, hidden).to(kind).requires_grad_()
    weight_VH = torch.empty(vocab, hidden).normal_(0, 0.02).to(kind).requires_grad_()
    targets_M, temperature_M = torch.randint(vocab, (num_tokens,)), torch.full((num_tokens,), 0.7)
    before = memory("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    if way == "blocked":
        logprobs_M, entropy_M = logprobs_and_entropy(hidden_MH, weight_VH, targets_M, temperature_M, entropy=entropy)
    else:
        log_p_MV = ((hidden_MH @ weight_VH.T).float() / temperature_M[:, None]).log_softmax(-1)
        logprobs_M = log_p_MV.gather(1, targets_M[:, None])[:, 0]
        entropy_M = -(log_p_MV.exp() * log_p_MV).sum(-1) if entropy else torch.zeros(num_tokens)
    torch.autograd.backward(0.5 * logprobs_M.sum() + 0.3 * entropy_M.sum())
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    extra = memory("VmHWM") - before - hidden_MH.nbytes - weight_VH.nbytes
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "extra_bytes": extra,
        "sum": float((logprobs_M + entropy_M).detach().sum()),
    }


def balance(num_rows: int, num_parts: int, rounds: int) -> Result:
    """Heaviest part over the mean, less 1, and milliseconds of CPU, for skewed lengths: ours, Karmarkar-Karp item by
    item, and a plain heap.
    """
    lengths = np.random.default_rng(0).lognormal(6, 1, num_rows).clip(20, 8192).round()
    costs = (lengths + lengths**2 / 6000).tolist()
    ways: dict[str, Callable[[Sequence[float], int], list[list[int]]]] = {
        "ours": partition,
        "Karmarkar-Karp": karmarkar_karp,
        "heap": longest_first,
    }
    result: Result = {}
    for name, way in ways.items():
        times = []
        for _ in range(rounds):
            started = time.process_time()
            parts = way(costs, num_parts)
            times.append(1e3 * (time.process_time() - started))
        worst = max(sum(costs[i] for i in part) for part in parts) / (sum(costs) / num_parts) - 1
        result[name] = {"excess": worst, "ms": sorted(times)[len(times) // 2]}
    return result


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """The largest differencing method for many parts, in plain Python, as trainers commonly have it."""
    nothing: list[tuple[float, list[int]]] = [(0.0, [])] * (num_parts - 1)
    heap = [(-cost, i, [(cost, [i]), *nothing]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joint = sorted(
            ((a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)), key=lambda slot: -slot[0]
        )
        number += 1
        heapq.heappush(heap, (joint[-1][0] - joint[0][0], number, joint))
    return [items for _, items in heap[0][2]]


def longest_first(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Each item, the largest first, to the lightest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(i)
        heapq.heapreplace(heap, (load + costs[i], part))
    return parts


def checkpoint(folder: str, out: str, shape: dict[str, int], num_rows: int, max_tokens: int, rounds: int) -> Result:
    """Seconds of a save that the training loop waits for, and what it waits for when the writing goes on beside the
    next step. Leaves one in `out`.
    """
    engine = make_engine(Path(folder), shape)
    rng = np.random.default_rng(0)
    rows = [make_row(rng, max_tokens, shape["vocab_size"]) for _ in range(num_rows)]
    counts = local_counts(rows)
    microbatches = [pack([row], ["loss_mask"], temperature=1.0, device=engine.device) for row in rows]
    group, storage = CommandGroup.of_default(), open_storage(out)
    packed_pass(engine, microbatches, counts)
    engine.step()
    result: Result = {"save_s": [], "blocked_s": [], "step_s": [], "step_beside_s": []}
    snapshot = engine.snapshot()
    for _ in range(rounds):
        del snapshot  # to free the copies of the last one takes time, which is not this save's
        started = time.perf_counter()
        files = engine.snapshot().write(storage, group, {})
        result["save_s"].append(time.perf_counter() - started)
        result["step_s"].append(seconds_of(lambda: (packed_pass(engine, microbatches, counts), engine.step())))
        started = time.perf_counter()
        snapshot = engine.snapshot()
        written = in_background(partial(snapshot.write, storage, group, {}), "checkpoint")
        blocked_s = time.perf_counter() - started
        passed_s = seconds_of(lambda: packed_pass(engine, microbatches, counts))
        settled_s = seconds_of(snapshot.settle)
        stepped_s = seconds_of(engine.step)
        files = written.result()
        result["blocked_s"].append(blocked_s + settled_s)
        result["step_beside_s"].append(blocked_s + passed_s + settled_s + stepped_s)
    Path(out, "files.json").write_text(json.dumps([[file.name, file.num_bytes, file.checksum] for file in files]))
    return {**result, "num_bytes": sum(file.num_bytes for file in files)}


def seconds_of(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def export_stream(checkpoint: str, out: str) -> Result:
    """Peak memory of an export beyond what the process had when it began."""
    files = [StoredFile(*each) for each in json.loads(Path(checkpoint, "files.json").read_text())]
    before = memory("VmRSS")
    started = time.perf_counter()
    num_bytes = export(open_storage(checkpoint), files, Path(out))
    return {"seconds": time.perf_counter() - started, "num_bytes": num_bytes, "peak_bytes": memory("VmHWM") - before}


def make_engine(folder: Path, shape: dict[str, int]) -> FsdpEngine:
    """A training engine of one rank over a random Qwen3 that is written to `folder`."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=8192, tie_word_embeddings=True)).save_pretrained(
        folder
    )
    device = (
        torch.device("cpu")
        if dist.is_initialized()
        else start_rank(RankSpec(0, 1, 0, (), None, len(os.sched_getaffinity(0)), 600.0))
    )
    # too small to change a weight: every round does the same work
    options = EngineOptions(
        path=folder, head="policy", dtype="float32", optimizer=OptimizerSection(learning_rate=1e-30), total_steps=1000
    )
    return FsdpEngine(options, device=device)


def make_row(rng: np.random.Generator, length: int, vocab: int) -> Row:
    """Random tokens of which the last three quarters are trained."""
    mask = (np.arange(length) >= max(1, length // 4)).astype(np.uint8)
    return {"token_ids": rng.integers(0, vocab, length, dtype=np.int32), "response_mask": mask, "loss_mask": mask}


def memory(field: str) -> int:
    """Bytes resident now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


MEASURES: dict[str, Callable[..., Result]] = {
    "packing": packing,
    "logprobs": logprobs,
    "balance": balance,
    "checkpoint": checkpoint,
    "export": export_stream,
}

if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]](**json.loads(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads, ended by the interpreter's teardown, now and then abort the process after all is done
