"""A group of ranks that stays up and answers jobs, one of JSON each: what test_training_exact.py spreads its
mini-batches over.

`living_ranks` starts them and hands jobs out; `answer` does a job on one rank, also in the test's own process, which is
the group of one that the others are held to. Gradients are read where the optimizer would read them.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rolecall.algorithms.aggregation import Counts
from rolecall.algorithms.selection import token_keys
from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.model.parameter_counts import UPDATED_AT_A_TIME
from rolecall.errors import RoleCallError
from rolecall.settings import (
    Aggregation,
    AlgorithmSection,
    CorrectionSection,
    CovarianceLoss,
    KlSection,
    LoraSection,
    MegatronSection,
    MoeSection,
    OptimizerSection,
    ParallelSection,
    TrainingBackend,
)
from rolecall.telemetry import Metrics
from rolecall.training.engine import Loss, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.fsdp import optimizer as fsdp_optimizer
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import whole
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.objective.objectives import (
    VALUE_COLUMNS,
    PolicyObjective,
    SftObjective,
    ValueObjective,
    policy_columns,
)
from rolecall.training.objective.routing import RouterLosses, router_load
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, local_counts, pack, unpack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank
from rolecall.training.step.mean_weight import mean_weight
from rolecall.training.step.share import Minibatch
from rolecall.training.step.token_selection import KEYS, select
from rolecall.v1.training_pb2 import TrainResult
from rolecall.v1.trajectory_pb2 import Coefficients
from tests import checkpoint_rig
from tests.forks import FORKS, ending, forked

if TYPE_CHECKING:
    from rolecall.training.megatron.engine import MegatronEngine

Objective = Literal["policy", "sft", "value"]
Engine: TypeAlias = "FsdpEngine | MegatronEngine"

STILL = OptimizerSection(learning_rate=1e-30)
"""A step with it clears the gradients and changes no weight."""


LENGTH = 16
"""The constant of seq_mean_token_sum_norm."""


@dataclass(frozen=True)
class Job:
    """One mini-batch: its gradients, or with `optimizer` several steps of training on it."""

    model: str
    rows: str
    """File of write_rows."""
    out: str
    """Folder where rank 0 writes gradients.safetensors or weights.safetensors."""
    objective: Objective = "policy"
    policy_loss: dict[str, Any] = field(default_factory=lambda: {"kind": "ppo", "dual_clip": 3.0})
    aggregation: Aggregation = "token_mean"
    distillation: dict[str, Any] | None = None
    """A teacher's part in the policy's objective."""
    correction: dict[str, Any] = field(default_factory=dict)
    """Of the policy's objective for the sampler."""
    top_k: int = 0
    """Outputs are those that a teacher writes, with a ranking of so many ids."""
    token_budget: int = 1_000_000
    seed: int = 0
    """Of the plan: who computes which row, in which order."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """How the ranks share the model; empty: sharded over all of them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine."""
    backend: TrainingBackend = "fsdp"
    megatron: dict[str, Any] = field(default_factory=dict)
    """The back end's own section, where it is Megatron."""
    lora: dict[str, Any] | None = None
    """Adapters to train instead of the model."""
    base: bool = False
    """Whether outputs are those without them."""
    moe: dict[str, Any] | None = None
    """Losses of the routers of experts to add; the options must say that routers are recorded."""
    replay: bool = False
    """Whether the rows' routing is replayed; the options must say that it can be."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: dict[str, Any] | None = None
    """Of training; absent: gradients are computed and nothing is changed."""
    at_a_time: int = UPDATED_AT_A_TIME
    """Parameters whose moments are on the device at a time, where they live on the host."""
    num_steps: int = 1
    start: str | None = None
    """Folder of a checkpoint to go on from."""
    save: str | None = None
    """Folder for a checkpoint at the end."""


@dataclass(frozen=True)
class Answer:
    """What all ranks together say of a job."""

    metrics: dict[str, float]
    grad_norms: list[float]
    losses: list[float]
    outputs: dict[int, Any]
    """float32 [2, T] by row: logprobs and entropy, or values and bootstrap value; with top_k [2 + 2 k, T]; with routing
    that is replayed the share of layers that would route otherwise, with one that is told its bytes.
    """


def write_rows(path: Path, rows: Sequence[Row], temperatures: list[float]) -> None:
    """Rows with their temperatures, as a file of plain arrays."""
    columns: dict[str, Any] = {
        f"{index}|{name}": column for index, row in enumerate(rows) for name, column in row.items()
    }
    np.savez(path, temperatures=np.array(temperatures), **columns)


def read_rows(path: Path) -> tuple[list[Row], list[float]]:
    """What write_rows wrote."""
    with np.load(path) as file:
        temperatures = file["temperatures"].tolist()
        rows: list[dict[str, Any]] = [{} for _ in temperatures]
        for key in file.files:
            index, _, name = key.partition("|")
            if name:
                rows[int(index)][name] = file[key]
    return list(rows), temperatures


def policy_algorithm(job: Job) -> AlgorithmSection:
    """Every piece of the policy's objective at once."""
    pieces = {
        "kl": KlSection(reference="ref", kl_coef=0.1),
        "correction": CorrectionSection.model_validate(job.correction),
        "distillation": job.distillation,
    }
    return AlgorithmSection.model_validate(
        {"groups_per_batch": 1, "policy_loss": job.policy_loss, "aggregation": job.aggregation, **pieces}
    )


def make_loss(job: Job, counts: Counts) -> tuple[Loss, tuple[str, ...]]:
    """The objective of `job` and the columns it reads."""
    match job.objective:
        case "policy":
            algorithm = policy_algorithm(job)
            return PolicyObjective(
                algorithm, counts, Coefficients(kl_coef=0.1, entropy_coef=0.01), LENGTH
            ), policy_columns(algorithm)
        case "sft":
            return SftObjective(counts, job.aggregation), ("loss_mask",)
        case "value":
            return ValueObjective(0.2, counts), VALUE_COLUMNS


def make_engine(job: Job) -> Engine:
    """The engine that `job` wants, over the default group."""
    options = EngineOptions(
        path=Path(job.model),
        head="value" if job.objective == "value" else "policy",
        dtype=job.dtype,
        optimizer=STILL if job.optimizer is None else OptimizerSection(**job.optimizer),
        total_steps=8,
        parallel=ParallelSection(**job.parallel),
        lora=None if job.lora is None else LoraSection(**job.lora),
        megatron=MegatronSection(**job.megatron),
        **job.options,
    )
    if job.backend == "megatron":
        from rolecall.training.megatron.engine import MegatronEngine  # takes seconds, and few tests want it

        return MegatronEngine(options, device=torch.device("cpu"))
    return FsdpEngine(options, device=torch.device("cpu"))


class Counted:
    """A loss that counts its calls: on every rank, for roles look at what it is called with."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self.num_calls = loss, 0

    def __call__(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
        self.num_calls += 1
        return self._loss(microbatch, outputs)


class Rank:
    """Does jobs on one rank; engines that only compute gradients are kept."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def answer(self, job: Job) -> dict[str, Any]:
        """This rank's part of an Answer. A collective."""
        engine = self._engine(job)
        fsdp_optimizer.UPDATED_AT_A_TIME = job.at_a_time  # type: ignore[attr-defined]
        if job.start is not None:
            checkpoint_rig.load(engine, Path(job.start))
        rows, temperatures = read_rows(Path(job.rows))
        lengths = [len(row["token_ids"]) for row in rows]
        layout = engine.layout
        losses, norms, outputs, metrics = [], [], dict[int, Any](), Metrics()
        for step in range(job.num_steps):
            plans = plan_batch(
                lengths,
                num_minibatches=1,
                token_budget=job.token_budget,
                world_size=layout.data_size,
                cost=engine.flops.forward,
                seed=job.seed + step,
            )
            plan = plans[layout.data_rank]
            loss, columns = make_loss(job, local_counts(rows))
            columns = (*columns, ROUTED_EXPERTS) if job.replay else columns
            packed = _packed(engine, rows, temperatures, columns, plan.microbatches)
            seen = engine.forward(
                packed,
                entropy=True,
                base=job.base,
                wanted=Wanted(top_k=job.top_k, squares=True) if job.top_k else None,
            )
            if job.moe is not None:
                load = router_load(CommandGroup.of_default(parallel=ParallelSection(**job.parallel)), seen)
                loss = RouterLosses(loss, MoeSection(**job.moe), load, job.objective)
            if not step:  # with the weights that every layout starts from
                for indices, microbatch, output in zip(plan.microbatches, packed, seen, strict=True):
                    outputs.update(zip(indices, _columns(output, microbatch.lengths), strict=True))
            if isinstance(loss, PolicyObjective) and (weight := CorrectionSection(**job.correction).weight):
                group = CommandGroup.of_default(parallel=ParallelSection(**job.parallel))
                mean = mean_weight(group, packed, weight) if weight.normalize else 1.0
                loss = replace(loss, mean_weight=mean)
            covariance = policy_algorithm(job).policy_loss
            if isinstance(covariance, CovarianceLoss):
                packed = _with_selected(job, engine, packed, covariance, plan.microbatches)
            counted = Counted(loss)
            metrics = engine.forward_backward(packed, counted, entropy=True)
            assert counted.num_calls == sum(bool(each.lengths) for each in packed), "a rank does not see its outputs"
            losses.append(_summed_loss(metrics))
            if job.optimizer is None and isinstance(engine, FsdpEngine):
                self._write(engine, Path(job.out) / "gradients.safetensors", _gradients(engine))
            norms.append(engine.step().grad_norm)
        if job.save is not None:
            checkpoint_rig.save(engine, Path(job.save))
        if job.optimizer is not None:
            self._write(
                engine,
                Path(job.out) / "weights.safetensors",
                {name: tensor.clone() for name, tensor in engine.named_weights()},
            )
        told = TrainResult(metrics=metrics.to_proto()).SerializeToString().hex()
        return {
            "speaks": layout.is_slot_leader,
            "metrics": told,
            "grad_norms": norms,
            "losses": losses,
            "outputs": {str(index): column.tolist() for index, column in outputs.items()},
        }

    def _engine(self, job: Job) -> Engine:
        if job.optimizer is not None or job.backend == "megatron":  # of which a process has one at a time
            return make_engine(job)
        key = json.dumps([job.model, job.objective == "value", job.parallel, job.options], sort_keys=True)
        if key not in self._engines:
            self._engines[key] = make_engine(job)
        return self._engines[key]

    @staticmethod
    def _write(engine: Engine, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() == 0:
            save_file(tensors, path)


def combine(parts: list[dict[str, Any]]) -> Answer:
    """The ranks' parts as one. Ranks that share a slot say the same; the first speaks for all."""
    norms = parts[0]["grad_norms"]
    assert all(part["grad_norms"] == norms for part in parts), "ranks disagree about the gradient's norm"
    parts = [part for part in parts if part["speaks"]]
    protos = [TrainResult.FromString(bytes.fromhex(part["metrics"])) for part in parts]
    metrics = Metrics.from_proto(metric for proto in protos for metric in proto.metrics)
    losses = [sum(per_rank) for per_rank in zip(*(part["losses"] for part in parts), strict=True)]
    outputs = {
        int(index): np.asarray(columns, np.float32) for part in parts for index, columns in part["outputs"].items()
    }
    return Answer(metrics.values(), norms, losses, outputs)


class Ranks:
    """Living ranks; `ask` them one job after another."""

    def __init__(self, ranks: list[Connection], processes: list[ForkServerProcess], logs: list[Path]) -> None:
        self._ranks = ranks
        self._processes = processes
        self._logs = logs

    def ask(self, job: Job) -> Answer:
        """All ranks' answer. RoleCallError with the message of the ranks that refused it."""
        Path(job.out).mkdir(exist_ok=True)
        for rank in self._ranks:
            rank.send_bytes(json.dumps(asdict(job)).encode())
        parts = [self._read(index) for index in range(len(self._ranks))]
        refused = [part["refused"] for part in parts if "refused" in part]
        if refused:
            raise RoleCallError(refused[0])
        return combine(parts)

    def _read(self, index: int) -> dict[str, Any]:
        try:
            part: dict[str, Any] = json.loads(self._ranks[index].recv_bytes())
        except EOFError:
            raise AssertionError(f"rank {index}: {ending(self._processes[index], self._logs[index])}") from None
        return part


@contextmanager
def living_ranks(world_size: int, folder: Path) -> Iterator[Ranks]:
    """`world_size` ranks in processes of their own, over Gloo."""
    folder.mkdir()
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    pipes = [FORKS.Pipe() for _ in logs]
    processes = []
    for rank, (log, (_, theirs)) in enumerate(zip(logs, pipes, strict=True)):
        processes.append(forked(log, main, str(folder), world_size, rank, theirs))
        theirs.close()
    try:
        yield Ranks([ours for ours, _ in pipes], processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _packed(
    engine: Engine,
    rows: Sequence[Row],
    temperatures: Sequence[float],
    columns: Sequence[str],
    microbatches: Sequence[Sequence[int]],
) -> list[Microbatch]:
    """The rows of each microbatch, packed on the engine's device."""
    return [
        pack([rows[i] for i in indices], columns, temperature=[temperatures[i] for i in indices], device=engine.device)
        for indices in microbatches
    ]


def _with_selected(
    job: Job,
    engine: Engine,
    packed: list[Microbatch],
    loss: CovarianceLoss,
    microbatches: Sequence[Sequence[int]],
) -> list[Microbatch]:
    """`packed` with the tokens that `loss` singles out; a collective."""
    minibatch = Minibatch(packed, Counts(0, 0))
    keys = [
        [token_keys(str(i), length) for i, length in zip(rows, each.lengths, strict=True)]
        for rows, each in zip(microbatches, packed, strict=True)
    ]
    minibatch.add_column(KEYS, [torch.from_numpy(np.concatenate(each)) for each in keys if each])
    select(CommandGroup.of_default(parallel=ParallelSection(**job.parallel)), minibatch, loss, engine.forward(packed))
    return minibatch.microbatches


def _columns(output: Any, lengths: tuple[int, ...]) -> list[Any]:
    if isinstance(output, TokenOutputs) and output.sum_squared_probs_N is not None:
        tensors = [output.logprobs_N, output.sum_squared_probs_N, output.top_logprobs_Nk, output.top_ids_Nk]
        parts = zip(*(unpack(tensor, lengths) for tensor in tensors if tensor is not None), strict=True)
        return [np.concatenate([part.reshape(len(part), -1).T for part in row]) for row in parts]
    if isinstance(output, TokenOutputs):
        told = [output.logprobs_N, output.entropy_N, output.routed_experts_NW, output.rerouted_N]
        parts = zip(*(unpack(tensor, lengths) for tensor in told if tensor is not None), strict=True)
        rows = [np.concatenate([part.reshape(len(part), -1).T for part in row]) for row in parts]
        for row in rows if output.rerouted_N is not None else ():
            row[-1, 0] = 0.0  # what stands there is of whatever was packed before
        return rows
    values, bootstrap = unpack(output.values_N, lengths), output.bootstrap_values_S.tolist()
    return [np.stack([value, np.full_like(value, last)]) for value, last in zip(values, bootstrap, strict=True)]


def _summed_loss(metrics: Metrics) -> float:
    return sum(value for name, value in metrics.values().items() if name in ("actor/loss", "critic/loss", "sft/loss"))


def _gradients(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Of all that is trained, by the parameters' names; a collective."""
    gradients = {}
    for name, parameter in engine._model.hf.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = whole(parameter.grad)
    return gradients


def _share_groups() -> None:
    """Gives all engines of this process the same group of the same ranks: each has a thread that looks for messages a
    hundred times a second, and the groups of hundreds of jobs would keep the cores busy.
    """
    new_group, groups = dist.new_group, dict[tuple[int, ...], Any]()

    def shared(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if key not in groups:
            groups[key] = new_group(ranks, *args, **options)
        return groups[key]

    dist.new_group = shared


def main(folder: str, world_size: int, rank: int, asked: Connection) -> None:
    """Answers jobs until nobody is there to ask."""
    start_rank(RankSpec(rank, world_size, rank, (), f"file://{folder}/rendezvous", 1, 100.0))
    _share_groups()
    worker = Rank()
    while True:
        try:
            reply = worker.answer(Job(**json.loads(asked.recv_bytes())))
        except RoleCallError as error:
            reply = {"refused": error.message}
        asked.send_bytes(json.dumps(reply).encode())
