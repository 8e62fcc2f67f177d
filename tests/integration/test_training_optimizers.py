"""Optimizers over sharded parameters, and state and activations that wait on the host: none of it changes a number."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rolecall.errors import CheckpointMismatchError
from rolecall.settings import OptimizerSection
from rolecall.training.engine import STATE_PARTS, StatePart, TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import local_part
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.serving.hooks import nothing
from rolecall.training.state.learning_rate import learning_rate
from tests import checkpoint_rig
from tests.integration.exact_ranks import Answer, Job, Ranks, living_ranks, write_rows
from tests.integration.fsdp_ranks import make_rows, weights_of
from tests.tiny_models import write_gpt_oss, write_qwen3, write_qwen3_moe

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
MUON: dict[str, Any] = {
    "kind": "muon",
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "schedule": "wsd",
    "warmup_steps": 1,
    "decay_steps": 4,
}
NUM_STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_qwen3(root / "dense", num_layers=4),
        "wide": write_qwen3(root / "wide", hidden=256),
        "moe": write_qwen3_moe(root / "moe"),
        "biased": write_gpt_oss(root / "biased"),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with living_ranks(2, tmp_path_factory.mktemp("ranks") / "two") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Enough tokens that what a layer saves is worth moving, on each of two ranks."""
    return make_rows(60)


def make_engine(
    path: Path, optimizer: dict[str, Any] | None = None, progressed: Callable[[], None] = nothing, **more: Any
) -> FsdpEngine:
    section = OptimizerSection.model_validate(optimizer or {"learning_rate": 1e-3, "weight_decay": 0.1})
    options = EngineOptions(path=path, head="policy", dtype="float32", optimizer=section, total_steps=8, **more)
    return FsdpEngine(options, device=CPU, progressed=progressed)


def add_gradients(engine: FsdpEngine, rows: list[Row]) -> None:
    packed = pack(rows, ["loss_mask"], temperature=1.0, device=CPU)
    engine.forward_backward([packed], SftObjective(local_counts(rows)))


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def assert_moved_alike(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Both went the same way from `start`, up to `tolerance` of its length: a last bit may tip a rounding of muon's,
    which computes in bfloat16.
    """
    for name, expected in theirs.items():
        way = (expected - start[name]).norm()
        assert way > 0
        assert float((ours[name] - expected).norm() / way) < tolerance, name


def oracle_training(path: Path, rows: list[Row]) -> dict[str, torch.Tensor]:
    """Plain transformers with torch's own Muon and AdamW, whole sequences one by one."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    section = OptimizerSection.model_validate(MUON)
    inner = {name for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
    muon = torch.optim.Muon(
        [p for name, p in model.named_parameters() if name in inner], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    outer = [p for name, p in model.named_parameters() if name not in inner]
    groups = [
        {"params": [p for p in outer if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in outer if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)
    num_tokens = sum(int((row["loss_mask"][1:] != 0).sum()) for row in rows)
    for step in range(NUM_STEPS):
        for row in rows:
            ids, mask = torch.from_numpy(row["token_ids"]).long(), torch.from_numpy(row["loss_mask"][1:] != 0)
            logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            (-(logprobs * mask).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)
        optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(section, step, 8)
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def test_muon_trains_like_torchs_own_on_hugging_face(models: dict[str, Path], rows: list[Row]) -> None:
    engine = make_engine(models["dense"], MUON)
    start = weights_of(engine)
    for _ in range(NUM_STEPS):
        add_gradients(engine, rows)
        assert engine.step().applied
    assert_moved_alike(
        weights_of(engine),
        {name: p.detach() for name, p in oracle_training(models["dense"], rows).items()},
        start,
        0.02,
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stacked_biases_of_experts_are_no_matrices(models: dict[str, Path], rows: list[Row], kind: str) -> None:
    section = OptimizerSection.model_validate({"kind": kind, "learning_rate": 1e-2, "weight_decay": 0.5})
    engine = make_engine(models["biased"], section.model_dump())
    start = weights_of(engine)
    add_gradients(engine, rows)
    gradients = {name: p.grad.clone() for name, p in engine._model.hf.named_parameters() if p.grad is not None}
    norm = engine.step().grad_norm
    moved = weights_of(engine)
    biases = [name for name in start if name.endswith("bias")]
    assert {start[name].ndim for name in biases} == {1, 2}
    for name in biases:  # AdamW's first step, by hand, without decay
        gradient = gradients[name] * min(1.0, section.max_grad_norm / norm)
        expected = start[name] - section.learning_rate * gradient / (gradient.abs() + section.eps)
        torch.testing.assert_close(moved[name], expected, rtol=0, atol=1e-6)


def test_muons_state_is_kept_and_goes_on_bit_for_bit(models: dict[str, Path], rows: list[Row], tmp_path: Path) -> None:
    straight, resumed = make_engine(models["dense"], MUON), make_engine(models["dense"], MUON)
    add_gradients(straight, rows)
    straight.step()
    checkpoint_rig.save(straight, tmp_path / "muon")
    checkpoint_rig.load(resumed, tmp_path / "muon")
    for engine in (straight, resumed):
        add_gradients(engine, rows)
        engine.step()
    assert_equal(weights_of(resumed), weights_of(straight))
    with pytest.raises(CheckpointMismatchError, match="optimizer"):
        checkpoint_rig.load(make_engine(models["dense"]), tmp_path / "muon")


def ask(
    ranks: Ranks, model: Path, rows: list[Row], folder: Path, **more: Any
) -> tuple[Answer, dict[str, torch.Tensor]]:
    """What two ranks say, and the gradients or weights that they leave."""
    write_rows(folder / "rows.npz", rows, [1.0] * len(rows))
    answer = ranks.ask(Job(str(model), str(folder / "rows.npz"), str(folder), objective="sft", **more))
    return answer, load_file(folder / ("weights.safetensors" if "optimizer" in more else "gradients.safetensors"))


@pytest.mark.thorough("test_muon_trains_like_torchs_own_on_hugging_face")
def test_muon_on_two_ranks_goes_the_way_it_goes_on_one(
    models: dict[str, Path], rows: list[Row], ranks: Ranks, tmp_path: Path
) -> None:
    engine = make_engine(models["moe"], MUON)
    start = weights_of(engine)
    for _ in range(NUM_STEPS):
        add_gradients(engine, rows)
        engine.step()
    _, weights = ask(ranks, models["moe"], rows, tmp_path, optimizer=MUON, num_steps=NUM_STEPS)
    # A router's gradient has a direction without signal, and muon brings all directions to one size: rounding decides
    # there.
    alike = {name: tensor for name, tensor in weights_of(engine).items() if not name.endswith("mlp.gate.weight")}
    assert_moved_alike(weights, alike, start, 0.05)


@pytest.mark.thorough("test_an_engine_moves_activations_and_no_weights")
@pytest.mark.parametrize(
    ("parallel", "checkpointing"), [({}, False), ({}, True), ({"sequence": 2}, True), ({"tensor": 2}, False)], ids=str
)
def test_activations_on_the_host_change_no_bit_of_a_gradient(
    models: dict[str, Path],
    rows: list[Row],
    ranks: Ranks,
    parallel: dict[str, int],
    checkpointing: bool,
    tmp_path: Path,
) -> None:
    options = {"gradient_checkpointing": checkpointing}
    plain, expected = ask(ranks, models["dense"], rows, tmp_path, parallel=parallel, options=options)
    moved, gradients = ask(
        ranks, models["dense"], rows, tmp_path, parallel=parallel, options=options | {"activation_offload": True}
    )
    assert (moved.losses, moved.grad_norms) == (plain.losses, plain.grad_norms)
    assert_equal(gradients, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_engine_moves_activations_and_no_weights(
    models: dict[str, Path], rows: list[Row], checkpointing: bool
) -> None:
    engine = make_engine(models["wide"], activation_offload=True, gradient_checkpointing=checkpointing)
    assert engine._activations is not None
    add_gradients(engine, rows[:2])
    assert engine._activations.num_bytes == 0
    add_gradients(engine, rows)
    assert engine._activations.num_bytes > 0


def local_bytes(engine: FsdpEngine, part: StatePart) -> int:
    return sum(local_part(tensor).untyped_storage().nbytes() for tensor in engine._part(part).values())


class MostMoments:
    """The most bytes of moments that an engine was seen to have on its device."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.engine: FsdpEngine | None = None

    def look(self) -> None:
        """Called whenever the engine got on."""
        if self.engine is not None:
            self.num_bytes = max(self.num_bytes, local_bytes(self.engine, "optimizer"))


@pytest.mark.parametrize("optimizer", [{"learning_rate": 1e-3, "weight_decay": 0.1}, MUON], ids=["adamw", "muon"])
def test_moments_that_live_on_the_host_are_on_the_device_a_portion_at_a_time(
    models: dict[str, Path],
    rows: list[Row],
    optimizer: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_a_time = 20_000
    monkeypatch.setattr("rolecall.training.fsdp.optimizer.UPDATED_AT_A_TIME", at_a_time)
    seen = MostMoments()
    path, offloaded = models["dense"], optimizer | {"offload": True}
    still = make_engine(path, optimizer)
    away, resumed = (make_engine(path, offloaded, progressed=seen.look) for _ in range(2))
    for step in range(3):
        for engine in (still, away):
            seen.engine = away
            add_gradients(engine, rows)
            engine.step()
        assert local_bytes(away, "optimizer") == 0
        if step == 1:
            checkpoint_rig.save(away, tmp_path / "away")
            seen.engine = resumed
            checkpoint_rig.load(resumed, tmp_path / "away")
            assert local_bytes(away, "optimizer") == local_bytes(resumed, "optimizer") == 0
    add_gradients(resumed, rows)
    resumed.step()
    assert_equal(weights_of(away), weights_of(still))
    assert_equal(weights_of(resumed), weights_of(still))
    largest = max(parameter.numel() for parameter in still._model.parameters())
    assert 0 < seen.num_bytes <= 8 * max(at_a_time, largest) < local_bytes(still, "optimizer") / 2
    checkpoint_rig.load(still, tmp_path / "away")  # which has them on its device
    add_gradients(still, rows)
    still.step()
    assert_equal(weights_of(still), weights_of(away))


@pytest.mark.thorough("test_moments_that_live_on_the_host_are_on_the_device_a_portion_at_a_time")
@pytest.mark.parametrize("optimizer", [{"learning_rate": 1e-3, "weight_decay": 0.1}, MUON], ids=["adamw", "muon"])
def test_two_ranks_take_their_moments_from_the_host_in_the_same_portions(
    models: dict[str, Path], rows: list[Row], ranks: Ranks, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    more = {"num_steps": NUM_STEPS, "at_a_time": 20_000}
    _, expected = ask(ranks, models["moe"], rows, tmp_path, optimizer=optimizer, **more)
    _, weights = ask(ranks, models["moe"], rows, tmp_path, optimizer=optimizer | {"offload": True}, **more)
    assert_equal(weights, expected)


def test_state_on_the_host_takes_no_memory_and_comes_back_bit_for_bit(models: dict[str, Path], rows: list[Row]) -> None:
    still, moved = make_engine(models["dense"]), make_engine(models["dense"])
    for step in range(2):
        for engine in (still, moved):
            add_gradients(engine, rows)
        for part in STATE_PARTS:
            held = local_bytes(moved, part)
            assert held > 0 or (part, step) == ("optimizer", 0)
            moved.offload(part)
            moved.offload(part)
            assert local_bytes(moved, part) == 0
        assert moved.step() == still.step()
    moved.offload("optimizer")
    moved.offload()
    packed = pack(rows, [], temperature=1.0, device=CPU)
    (one,), (other,) = still.forward([packed]), moved.forward([packed])
    assert isinstance(one, TokenOutputs)
    assert isinstance(other, TokenOutputs)
    assert torch.equal(one.logprobs_N, other.logprobs_N)
    assert local_bytes(moved, "parameters") > 0
    assert local_bytes(moved, "optimizer") == 0
    moved.offload("parameters")
    assert_equal(weights_of(moved), weights_of(still))
    moved.onload()
    moved.onload()
    assert local_bytes(moved, "optimizer") == local_bytes(still, "optimizer")
