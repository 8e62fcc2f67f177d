"""`rolecall check`: what a configuration means on this machine, a line per derived value, without starting anything.

Reads the model's JSON and safetensors headers, the tokenizer and the first prompt; imports no torch and no service. What is wrong is collected, so
that one run of the command shows everything; estimates say that they are.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rolecall.errors import ConfigError, RoleCallError
from rolecall.settings import GaeAdvantage, RunSettings
from rolecall.store.budget import StoreBudget
from rolecall.tokenizer import ChatTokenizer

OPTIMIZER_BYTES_PER_PARAMETER = 16
"""float32 master weight, gradient and two moments."""
CPU_KV_CACHE_BYTES = 2**30
MAX_HEADER_BYTES = 100 * 2**20
"""Bound of a safetensors header, as the format has it."""


@dataclass(frozen=True)
class ModelFacts:
    """What the model's files say."""

    architecture: str
    num_parameters: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int


def check(settings: RunSettings, out: TextIO) -> int:
    """Writes a line per finding to `out`; 0 when everything fits, 2 when something does not."""
    problems: list[str] = []
    facts: ModelFacts | None = None
    try:
        facts = read_model(settings.model.path)
    except RoleCallError as error:
        problems.append(error.message)
    for section in (_run, _data, _batches):
        _collect(section(settings), out, problems)
    if facts is not None:
        for with_model in (_model, _memory):
            _collect(with_model(settings, facts), out, problems)
    _collect(_placement(settings), out, problems)
    for problem in problems:
        out.write(f"PROBLEM  {problem}\n")
    out.write("ok: nothing was started\n" if not problems else f"{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started\n")
    return 2 if problems else 0


def _collect(lines: Iterator[str], out: TextIO, problems: list[str]) -> None:
    try:
        for line in lines:
            out.write(line + "\n")
    except RoleCallError as error:
        problems.append(error.message)


def _run(settings: RunSettings) -> Iterator[str]:
    directory = settings.run.dir
    state = "exists: train needs --resume or another run.dir" if directory.is_dir() and any(directory.iterdir()) else "is new"
    yield f"run {settings.run.name}: {settings.run.num_steps} steps, seed {settings.run.seed}, directory {directory} ({state})"
    parent = next(folder for folder in [directory, *directory.parents] if folder.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"run.dir {directory} cannot be made: {parent} is not writable")


def _data(settings: RunSettings) -> Iterator[str]:
    tokenizer = ChatTokenizer(settings.model.path)
    prompt = first_prompt(settings.data.train, settings)
    rendered = tokenizer.render(prompt)
    tokens = len(tokenizer.encode(rendered))
    yield f"data: {settings.data.train}; its first prompt is {tokens} tokens as rendered: {rendered!r}"
    if tokens > settings.data.max_prompt_tokens:
        raise ConfigError(f"the first prompt has {tokens} tokens, more than data.max_prompt_tokens {settings.data.max_prompt_tokens}: it would be refused")
    for name, section in settings.evaluation.sets.items():
        first_prompt(section.path, settings)
        yield f"evaluation {name}: {section.path}, {section.num_responses} response(s) at temperature {section.temperature}, at step 0, " + (
            f"every {settings.evaluation.every_steps} steps and at the end" if settings.evaluation.every_steps else "and at the end"
        )


def _model(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    path = settings.model.path
    yield f"model: {path}, {facts.architecture}, {facts.num_parameters / 1e6:,.2f}M parameters, {settings.model.dtype}"
    also = settings.sampling.stop_token_ids
    yield f"EOS ids: {', '.join(map(str, facts.eos_token_ids))}" + (f"; also stops at {', '.join(map(str, also))}" if also else "")
    longest = settings.data.max_prompt_tokens + settings.sampling.max_tokens
    bound = min(facts.max_tokens, settings.model.max_model_tokens or facts.max_tokens)
    yield f"max model length: {bound} tokens; prompt up to {settings.data.max_prompt_tokens} + response up to {settings.sampling.max_tokens} = {longest}"
    if longest > bound:
        raise ConfigError(f"data.max_prompt_tokens + sampling.max_tokens = {longest} exceed the model's {bound}; lower one of them")
    known = ChatTokenizer(path).vocab_size
    if known > facts.vocab_size:
        raise ConfigError(f"model.path {path}: the tokenizer has {known} ids, the model's vocabulary {facts.vocab_size}")


def _batches(settings: RunSettings) -> Iterator[str]:
    algorithm, sampling = settings.algorithm, settings.sampling
    rows = algorithm.groups_per_batch * sampling.num_responses
    yield (
        f"batch: {algorithm.groups_per_batch} groups x {sampling.num_responses} responses = {rows} trajectories; {algorithm.num_epochs} pass(es) in "
        f"{algorithm.num_minibatches} mini-batches of about {math.ceil(rows / algorithm.num_minibatches)}; "
        f"{settings.run.num_steps * algorithm.num_epochs * algorithm.num_minibatches} optimizer steps in the run"
    )
    yield f"staleness: at most {algorithm.max_staleness} steps; at most {(1 + algorithm.max_staleness) * algorithm.groups_per_batch} groups in flight"
    values = "the critic's values" if isinstance(algorithm.advantage, GaeAdvantage) else "no critic"
    kl = f"KL to {algorithm.kl.reference} ({algorithm.kl.kl_coef})" if algorithm.kl else "no KL"
    yield f"algorithm: {algorithm.advantage.kind}, {values}, {kl}"


def _memory(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    size = 4 if settings.model.dtype == "float32" else 2
    weights = facts.num_parameters * size
    trained = facts.num_parameters * (OPTIMIZER_BYTES_PER_PARAMETER + size)
    yield f"memory (estimates without activations): actor {_size(trained / settings.actor.num_ranks)} per rank x {settings.actor.num_ranks}"
    if settings.critic is not None:
        yield f"  critic {_size(trained / settings.critic.num_ranks)} per rank x {settings.critic.num_ranks}"
    for name, section in settings.references.items():
        yield f"  reference {name} {_size(weights / section.num_ranks)} per rank x {section.num_ranks}"
    rollout = settings.rollout
    cache = rollout.kv_cache_bytes or (None if rollout.devices else CPU_KV_CACHE_BYTES)
    kept = _size(cache) if cache else f"vLLM's own: {rollout.gpu_memory_utilization:.0%} of each GPU, weights included"
    yield f"  rollout {_size(weights / rollout.tensor_parallel_size)} weights + KV cache {kept}, x {rollout.num_replicas} replicas"
    yield from _store(settings)


def _store(settings: RunSettings) -> Iterator[str]:
    budget = StoreBudget.of(settings)
    where = "external" if settings.store.url else "embedded"
    batches = f"{budget.num_batches} batches {_size(budget.num_batches * budget.batch_bytes)} of {_size(budget.max_bytes)} for rows"
    yield f"store ({where}): a batch at its longest {_size(budget.batch_bytes)}; {batches}"


def _placement(settings: RunSettings) -> Iterator[str]:
    placed = [("actor", settings.actor.devices, settings.actor.num_ranks)]
    placed += [("critic", settings.critic.devices, settings.critic.num_ranks)] if settings.critic else []
    placed += [(f"references.{name}", section.devices, section.num_ranks) for name, section in settings.references.items()]
    placed += [(f"rollout-{i}", devices, settings.rollout.tensor_parallel_size) for i, devices in enumerate(settings.rollout.devices)]
    if not any(devices for _, devices, _ in placed):
        yield f"placement: all on CPUs, {len(os.sched_getaffinity(0))} cores"
        return
    yield "placement: " + ", ".join(f"{name} on {'GPU ' + ' '.join(map(str, devices)) if devices else 'CPU'}" for name, devices, _ in placed)
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for name, devices, num_ranks in placed:
        if devices and len(devices) != num_ranks:
            raise ConfigError(f"{name} has {len(devices)} GPUs for {num_ranks} ranks; give one each")
        if any(device >= present for device in devices):
            raise ConfigError(f"{name} names GPU {max(devices)}; this machine has {present}")


def first_prompt(path: Path, settings: RunSettings) -> list[dict[str, str]]:
    """The messages of the dataset's first row. ConfigError names the file and what is wrong with it."""
    if not path.is_file():
        raise ConfigError(f"the dataset {path} does not exist")
    row = _first_parquet_row(path) if path.suffix == ".parquet" else _first_json_row(path)
    field = settings.data.prompt_field
    if field not in row:
        raise ConfigError(f"{path}: the first row has no field {field!r} (it has {sorted(row)}); set data.prompt_field")
    prompt = row[field]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in messages):
        raise ConfigError(f"{path}: field {field!r} of the first row is neither text nor a list of {{role, content}}")
    truth = row.get(settings.data.ground_truth_field)
    if truth is not None and not isinstance(truth, str):
        raise ConfigError(f"{path}: field {settings.data.ground_truth_field!r} of the first row is a {type(truth).__name__}, not text")
    if settings.data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": settings.data.system_prompt}, *messages]
    return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in messages]


def _first_json_row(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as lines:
        line = next((line for line in lines if line.strip()), None)
    if line is None:
        raise ConfigError(f"the dataset {path} is empty")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: the first line is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: the first line is a {type(row).__name__}, not an object with fields")
    return row


def _first_parquet_row(path: Path) -> dict[str, Any]:
    from pyarrow import ArrowInvalid, parquet

    try:
        batch = next(parquet.ParquetFile(path).iter_batches(batch_size=1), None)
    except ArrowInvalid as error:
        raise ConfigError(f"{path} is not parquet: {error}") from error
    if batch is None or batch.num_rows == 0:
        raise ConfigError(f"the dataset {path} is empty")
    return dict(batch.to_pylist()[0])


def read_model(path: Path) -> ModelFacts:
    """Facts of a Hugging Face model directory. ConfigError names what it lacks."""
    config = _json(path / "config.json")
    text = config.get("text_config") or config
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    found = [value for tree in (generation, config, text) for value in _as_list(tree.get("eos_token_id"))]
    if not found:
        raise ConfigError(f"model.path {path} names no eos_token_id in generation_config.json or config.json; without one no response would stop")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path {path} has no *.safetensors; convert the weights with save_pretrained")
    return ModelFacts(
        architecture=", ".join(config.get("architectures") or ["an unnamed architecture"]),
        num_parameters=sum(_num_elements(file) for file in files),
        max_tokens=int(text.get("max_position_embeddings", 0)) or 2**31,
        eos_token_ids=tuple(sorted(set(found))),
        vocab_size=int(text.get("vocab_size", 0)),
    )


def _as_list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; model.path must be a Hugging Face model directory") from error
    return dict(tree)


def _num_elements(path: Path) -> int:
    """Elements in a safetensors file, from its header: 8 bytes of little-endian length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise ConfigError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
