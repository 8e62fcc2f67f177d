"""A rank that trains on examples with images, as `rolecall sft` does, and its rows for plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rolecall.columns import IMAGES
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.data.sft_examples import TokenizedExamples, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, SftDataSection
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.images import ImageReader
from rolecall.training.packing.pack import Row
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from rolecall.training.sft.minibatches import Minibatches
from rolecall.training.sft.train import require_one_set
from rolecall.training.step.rank_context import RankContext
from rolecall.training.step.recorder import StepRecorder
from rolecall.v1.trajectory_pb2 import Images
from tests.integration.fsdp_ranks import make_engine, weights_of
from tests.tiny_tokenizer import EOS_TOKEN_ID

SECTION = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)
TOKEN_BUDGET = 150


def examples_of(model: Path, train: Path) -> TokenizedExamples:
    """The examples in the file `train`, for the model in `model`."""
    section = SftDataSection(train=(train,), batch_size=1, images_field="images")
    loaded = load_examples(section.train, section, "data.train")
    return tokenize(loaded, ChatTokenizer(model), EOS_TOKEN_ID, TOKEN_BUDGET, require_visual_tokens(model))


def context_of(engine: FsdpEngine) -> RankContext:
    """The context of this rank, which computes by `engine`."""
    memory = PhaseMemory(engine.device)
    group = CommandGroup.of_default()
    return RankContext(engine, engine, group, engine.device, TOKEN_BUDGET, memory, StepRecorder(memory))


def minibatches_of(
    engine: FsdpEngine, model: Path, examples: TokenizedExamples, reader: ImageReader | None = None
) -> Minibatches:
    """Minibatches of `examples` on this rank, which computes by `engine`."""
    return Minibatches(context_of(engine), examples, reader or ImageReader(model, torch.float32), between_segments=True)


def rows_of(examples: TokenizedExamples, numbers: Sequence[int]) -> list[Row]:
    """Every segment of examples as a row by itself."""
    return [
        {
            **segment,
            IMAGES: np.frombuffer(
                Images(files=[image.read() for image in examples.images[number].files]).SerializeToString(), np.uint8
            ),
        }
        for number in numbers
        for segment in examples.rows[number]
    ]


def train_on_rank(job: dict[str, Any], rank: int) -> None:
    """Runs a rank: a step for each of the job's batches, and from rank 0 the weights, the norms and what was left
    out.
    """
    start_rank(RankSpec(rank, job["world_size"], rank, (), f"file://{job['rendezvous']}", 1, 60.0))
    model = Path(job["model"])
    engine = make_engine(model, optimizer=SECTION, **job["options"])
    minibatches = minibatches_of(engine, model, examples_of(model, Path(job["train"])))
    norms, unshown, empty = [], [], 0
    for made in minibatches.of(job["batches"]):
        empty += all(each.shown is None for each in made.minibatch.microbatches)
        engine.forward(made.minibatch.microbatches)
        engine.forward_backward(made.minibatch.microbatches, SftObjective(made.minibatch.counts))
        norms.append(engine.step().grad_norm)
        unshown.append(made.num_unshown)
    weights = weights_of(engine)
    numbers = {"norms": torch.tensor(norms), "unshown": torch.tensor(unshown), "empty": torch.tensor(empty)}
    save_file({**weights, **numbers} if rank == 0 else numbers, Path(job["out"]) / f"rank-{rank}.safetensors")
    stop_rank()


def read_on_rank(job: dict[str, Any], rank: int) -> None:
    """Runs a rank that reads the job's examples after those before it, each once `late` is what it has of that for it,
    and says what comes of it.
    """
    start_rank(RankSpec(rank, job["world_size"], rank, (), f"file://{job['rendezvous']}", 1, 60.0))
    group, late = CommandGroup.of_default(), Path(job["train"]).parent / "late.png"
    for turn, file in enumerate(job["late"]):
        if rank == turn:
            late.write_bytes(file)
            examples = examples_of(Path(job["model"]), Path(job["train"]))
        group.gather(b"")
    complaint = ""
    try:
        require_one_set(group, "data.train", examples)
    except ConfigError as error:
        complaint = error.message
    (Path(job["out"]) / f"rank-{rank}").write_text(complaint)
    stop_rank()
