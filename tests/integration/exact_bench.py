"""What holds layouts to one rank: a bench that runs a job on either, the rows drawn for it, and what is the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolecall.settings import Aggregation
from rolecall.training.packing.pack import Row
from tests.integration.exact_ranks import Answer, Job, Objective, Rank, Ranks, combine, write_rows

TOLERANCE = 1e-5
"""Largest relative difference of losses and gradients."""
Shape = tuple[int, int, bool, bool]
"""Length, prompt length, whether the row is trained on, whether it begins as the one before it."""
Drawn = tuple[list[Shape], int]
"""Of a mini-batch's rows, and the seed of what is in them."""
VOCAB = 150
MODELS = ["dense", "tied", "moe"]
"""Those that take every layout."""
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
OBJECTIVES: list[tuple[Objective, Aggregation]] = [("policy", kind) for kind in AGGREGATIONS] + [
    ("value", "token_mean"),
    ("sft", "token_mean"),
]


@dataclass(frozen=True)
class Layout:
    """A way to spread the model and its rows over ranks."""

    world_size: int
    parallel: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([str(self.world_size), *(f"{name}{size}" for name, size in self.parallel.items())])


LAYOUTS = [
    Layout(2, {}),
    Layout(4, {}),
    Layout(2, {"replicate": 2}),
    Layout(4, {"replicate": 2}),
    Layout(2, {"sequence": 2}),
    Layout(4, {"sequence": 2}),
    Layout(4, {"sequence": 4}),
    Layout(4, {"replicate": 2, "sequence": 2}),
    Layout(2, {"tensor": 2}),
    Layout(4, {"tensor": 2}),
    Layout(4, {"tensor": 2, "sequence": 2}),
    Layout(4, {"replicate": 2, "accumulate": "unsharded"}),
]
ONE_ROW: Drawn = ([(12, 4, True, False)], 1)
"""All ranks but one have nothing to do."""
NOTHING_TRAINED: Drawn = ([(9, 3, False, False), (5, 5, True, False), (1, 0, True, False)], 2)


class Bench:
    """The group of one, and a folder for what passes between it and the others."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self.models = models
        self.folder = folder
        self._rank = Rank()
        self._oracles: dict[str, PreTrainedModel] = {}

    def job(self, kind: str, rows: Sequence[Row], temperatures: list[float], **more: Any) -> Job:
        """A job of `rows` on the model `kind`."""
        write_rows(self.folder / "rows.npz", rows, temperatures)
        return Job(str(self.models[kind]), str(self.folder / "rows.npz"), str(self.folder), **more)

    def alone(self, job: Job) -> tuple[Answer, dict[str, torch.Tensor]]:
        """The job on one rank, and the gradients or weights it left."""
        answer = combine([self._rank.answer(job)])
        return answer, self._tensors(job)

    def spread(self, ranks: Ranks, job: Job) -> tuple[Answer, dict[str, torch.Tensor]]:
        """The job on `ranks`."""
        answer = ranks.ask(job)
        return answer, self._tensors(job)

    def oracle(self, kind: str) -> PreTrainedModel:
        """Plain transformers on the model `kind`."""
        if kind not in self._oracles:
            self._oracles[kind] = AutoModelForCausalLM.from_pretrained(
                self.models[kind], attn_implementation="eager", dtype=torch.float32
            ).eval()
        return self._oracles[kind]

    @staticmethod
    def _tensors(job: Job) -> dict[str, torch.Tensor]:
        return load_file(Path(job.out) / ("gradients.safetensors" if job.optimizer is None else "weights.safetensors"))


def shapes() -> st.SearchStrategy[Drawn]:
    """Short rows, all prompt, not trained on, a single token, and groups that share a prompt included."""
    row = st.integers(1, 24).flatmap(
        lambda length: st.tuples(
            st.just(length), st.integers(0, length), st.sampled_from([True, True, True, False]), st.booleans()
        )
    )
    return st.tuples(st.lists(row, min_size=1, max_size=9), st.integers(0, 2**16))


def make_rows(bench: Bench, kind: str, drawn: Drawn) -> tuple[list[Row], list[float]]:
    """Rows around the model's own outputs, so that ratios and values stand clear of the points where a clip begins and
    a last bit would decide.
    """
    shape, seed = drawn
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for length, prompt, trained, alike in shape:
        ids, mask = rng.integers(0, VOCAB, length, dtype=np.int32), (np.arange(length) >= prompt).astype(np.uint8)
        if alike and rows:
            shared = rows[-1]["token_ids"][: max(prompt, 1)][:length]
            ids[: len(shared)] = shared
        rows.append({"token_ids": ids, "response_mask": mask, "loss_mask": mask * np.uint8(trained)})
    temperatures = [float(t) for t in rng.choice([0.7, 1.0, 1.3], len(rows))]
    blank = [
        {
            **row,
            "values": np.zeros(len(row["token_ids"]), np.float32),
            "returns": np.zeros(len(row["token_ids"]), np.float32),
        }
        for row in rows
    ]
    logprobs = bench.alone(bench.job(kind, blank, temperatures, objective="sft"))[0].outputs
    values = bench.alone(bench.job(kind, blank, temperatures, objective="value"))[0].outputs
    for index, row in enumerate(rows):
        length = len(row["token_ids"])

        def choose(*options: float, length: int = length) -> Any:
            return rng.choice(np.array(options, np.float32), length)

        row["advantages"] = rng.normal(size=length).astype(np.float32)
        row["old_logprobs"] = logprobs[index][0] - np.log(choose(0.5, 0.9, 1.1, 1.6, 4.0))
        row["rollout_logprobs"] = row["old_logprobs"] - np.log(choose(0.7, 1.0, 1.5, 5.0))
        row["ref/logprobs"] = logprobs[index][0] + choose(-0.5, 0.1, 0.4)
        row["values"] = values[index][0] + choose(-0.5, -0.1, 0.1, 0.5)
        row["returns"] = values[index][0] + choose(-1.0, -0.6, 0.7, 1.1)
    return list(rows), temperatures


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(expected.abs().max()) for expected in theirs.values())
    for name, expected in theirs.items():
        # A gradient that is 0 but for rounding, of keys where every query sees one alone, is measured by the others.
        scale = max(float(expected.abs().max()), 0.1 * largest)
        difference = float((ours[name] - expected).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference:g} beside {scale:g}"


def assert_same_answer(ours: Answer, theirs: Answer) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE, abs=1e-7)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=TOLERANCE)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
    assert ours.outputs.keys() == theirs.outputs.keys()
    for index, columns in theirs.outputs.items():
        np.testing.assert_allclose(ours.outputs[index], columns, rtol=1e-5, atol=1e-5)
