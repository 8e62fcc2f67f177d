"""The ground that checks stand on: the device, models of real shapes with random weights, rows, clocks and norms.

A model directory of a real shape is a sparse file of zeros, which costs no disk; `fill_random` then draws its weights
on the device, the same in every engine.
"""

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import Microbatch
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import local_part
from rolecall.training.model.lora import checkpoint_name, is_adapter
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, pack
from rolecall.training.ranks.device import RankSpec, free_cached_memory, start_rank, wait_for
from rolecall.training.serving.hooks import nothing
from tools.gpu_acceptance.findings import Findings

Size = Literal["0.6B", "1.7B", "4B", "8B", "32B"]

_VOCAB = 151_936
_SIZES: dict[Size, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}
"""The sizes of Qwen3; all with 8 key heads of 128."""
_DRY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
STD = 0.02
"""The deviation of random weights: logits of a hidden size of 2560 then have a standard deviation of 1."""
STILL = OptimizerSection(learning_rate=1e-30, max_grad_norm=1e30)
"""An optimizer that takes its steps and changes no weight."""


@dataclass(frozen=True)
class Stage:
    """The device and folder where a check runs."""

    found: Findings
    folder: Path
    """A folder for what it needs on a disk; gone afterwards."""
    device: torch.device

    @classmethod
    def of(cls, found: Findings, folder: Path) -> "Stage":
        """The first GPU, or with a dry run CPUs; as a group of one rank."""
        devices = () if found.dry else (0,)
        return cls(found, folder, start_rank(RankSpec(0, 1, 0, devices, None, 1 if found.dry else None, 60.0)))

    def pick(self, real: Any, dry: Any) -> Any:
        """The one or the other."""
        return dry if self.found.dry else real

    def config(self, size: Size, **changes: Any) -> Qwen3Config:
        """A model of this shape, whatever the size on CPUs a tiny one."""
        shape = self.pick(
            {**_SIZES[size], "num_key_value_heads": 8, "head_dim": 128, "vocab_size": _VOCAB}, _dry_shape()
        )
        return Qwen3Config(
            **{
                **shape,
                "max_position_embeddings": 40960,
                "bos_token_id": None,
                "eos_token_id": 0,
                "dtype": "bfloat16",
                **changes,
            }
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes, the device's part of it included."""
        wait_for(self.device)
        started = time.perf_counter()
        work()
        wait_for(self.device)
        return time.perf_counter() - started

    def hold(self, seconds: float) -> None:
        """Keeps the current stream busy for about so long, without waiting; nothing on CPUs, which have no streams."""
        if self.device.type == "cuda":
            cycles = int(seconds * 1.5e9)  # of clocks between 1 and 2 GHz
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _dry_shape() -> dict[str, Any]:
    return {**_DRY, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 331}


def weight_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a checkpoint of this model holds; a tied tensor once."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def write_zeros(path: Path, config: Qwen3Config) -> Path:
    """A model directory whose bfloat16 weights are zeros in a sparse file. Returns `path`."""
    path.mkdir()
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path)
    header: dict[str, object] = {}
    end = 0
    for name, shape in weight_shapes(config).items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return path


def make_engine(
    stage: Stage,
    model: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    optimizer: OptimizerSection | None = STILL,
    head: Literal["policy", "value"] = "policy",
    lora: LoraSection | None = None,
    progressed: Callable[[], None] = nothing,
    memory: PhaseMemory | None = None,
    gradient_checkpointing: bool = False,
    activation_offload: bool = False,
    torch_compile: bool = False,
) -> FsdpEngine:
    """An engine of one rank over `model`, filled with random weights that depend on their names alone."""
    options = EngineOptions(
        path=model,
        head=head,
        dtype=dtype,
        optimizer=optimizer,
        lora=lora,
        total_steps=1000,
        gradient_checkpointing=gradient_checkpointing,
        activation_offload=activation_offload,
        torch_compile=torch_compile,
    )
    engine = FsdpEngine(options, device=stage.device, memory=memory, progressed=progressed)
    fill_random(engine)
    free_cached_memory(
        stage.device
    )  # else the workspace of products settles in what the largest draw left, and keeps it
    return engine


@torch.no_grad()
def fill_random(engine: FsdpEngine) -> None:
    """Draws the weights of an engine of one rank; adapters stay as they are."""
    for name, parameter in local_parameters(engine).items():
        if is_adapter(name):
            continue
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(engine.device).manual_seed(zlib.crc32(checkpoint_name(name).encode()))
        # drawn in float32 whatever the parameter is: a bfloat16 engine's weights are a float32 engine's, rounded
        parameter.copy_(
            torch.empty(parameter.shape, dtype=torch.float32, device=engine.device).normal_(
                0.0, STD, generator=generator
            )
        )


def local_parameters(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """This rank's parts by name: the engine's own memory."""
    engine.onload("parameters")
    return {name: local_part(parameter.detach()) for name, parameter in engine._model.hf.named_parameters()}


def local_gradients(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """This rank's parts of the gradients, between forward_backward and step."""
    return {
        name: local_part(parameter.grad)
        for name, parameter in engine._model.hf.named_parameters()
        if parameter.grad is not None
    }


def local_moments(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """This rank's parts of what the optimizer keeps, by "<kind>/<parameter>"."""
    assert engine._optimizer is not None
    return {name: local_part(tensor) for name, tensor in engine._optimizer.tensors().items()}


def make_row(rng: np.random.Generator, length: int, vocab: int, prompt: np.ndarray[Any, Any] | None = None) -> Row:
    """Random tokens, of which the last three quarters are trained; with `prompt` (int32 [P]) all after it."""
    start = max(1, length // 4) if prompt is None else len(prompt)
    ids = rng.integers(0, vocab, length, dtype=np.int32)
    if prompt is not None:
        ids[:start] = prompt
    mask = (np.arange(length) >= start).astype(np.uint8)
    return {"token_ids": ids, "response_mask": mask, "loss_mask": mask}


def make_rows(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[Row]:
    """Rows of these lengths."""
    rng = np.random.default_rng(seed)
    return [make_row(rng, length, vocab) for length in lengths]


def packed(rows: Sequence[Row], device: torch.device) -> Microbatch:
    """One microbatch of them."""
    return pack(rows, ["loss_mask"], temperature=1.0, device=device)


def relative(ours: torch.Tensor, exact: torch.Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of `exact`, or over that of a tensor of `floor` everywhere where this is
    more; inf for what is not finite."""
    ours, exact = ours.detach().double(), exact.detach().double()
    least = floor * max(exact.numel(), 1) ** 0.5
    gap = float((ours - exact).norm() / exact.norm().clamp(min=max(least, 1e-300)))
    return gap if np.isfinite(gap) else float("inf")
