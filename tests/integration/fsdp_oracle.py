"""Plain Hugging Face with AdamW, one sequence at a time, and the FSDP engine that is held to it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolecall.settings import (
    OptimizerSection,
)
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.packing.pack import Row
from tests.integration import fsdp_ranks

CPU = torch.device("cpu")
SECTION = OptimizerSection(learning_rate=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=1)


def make_engine(path: Path, *, optimizer: OptimizerSection | None = SECTION, **more: Any) -> FsdpEngine:
    return fsdp_ranks.make_engine(path, optimizer=optimizer, **more)


def oracle_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def oracle_outputs(model: PreTrainedModel, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs_T, entropy_T) of one row by itself, 0 outside the response mask."""
    ids = torch.from_numpy(row["token_ids"].astype(np.int64))
    log_p = (model(ids[None], use_cache=False).logits[0].float() / temperature).log_softmax(-1)[:-1]
    mask = torch.from_numpy(row["response_mask"][1:] != 0)
    logprobs, entropy = torch.zeros(len(ids)), torch.zeros(len(ids))
    logprobs[1:] = log_p.gather(1, ids[1:, None])[:, 0] * mask
    entropy[1:] = -(log_p.exp() * log_p).sum(-1) * mask
    return logprobs, entropy


def oracle_training(path: Path, rows: list[Row], num_steps: int) -> tuple[list[float], list[float], PreTrainedModel]:
    """Losses, gradient norms and the model after plain AdamW with the same schedule, whole sequences one by one."""
    model = oracle_model(path)
    matrices, vectors = [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": SECTION.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=SECTION.learning_rate, betas=SECTION.betas, eps=SECTION.eps)
    scale = [0.5, 1.0, 6 / 7, 5 / 7, 4 / 7]
    num_tokens = sum(int(np.count_nonzero(row["loss_mask"][1:])) for row in rows)
    losses, norms = [], []
    for step in range(num_steps):
        for group in adamw.param_groups:
            group["lr"] = SECTION.learning_rate * scale[step]
        loss = -torch.stack([oracle_outputs(model, row, 0.7)[0].sum() for row in rows]).sum() / num_tokens
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), SECTION.max_grad_norm)))
        adamw.step()
        losses.append(float(loss.detach()))
    return losses, norms, model


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        told = f"{name}: {{}}".format  # what torch says, with the name
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol, msg=told)
