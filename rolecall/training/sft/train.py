"""`rolecall sft` on one rank: examples, batches by step, updates, held-out loss, checkpoints, numbers. Every
rank does the same; rank 0 tells.

The order of examples derives from (seed, epoch) and the position from the step alone, so a checkpoint's step is its
whole cursor. Metrics are named sft/ (training) and eval/ (held out).
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from rolecall.data.sft_examples import TokenizedExamples, end_of_response, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer, read_template
from rolecall.errors import ConfigError, WorkerLostError
from rolecall.identity import adapters_to_begin_with
from rolecall.settings import SftSettings, rank_of_process
from rolecall.telemetry import Metrics
from rolecall.terminal import say
from rolecall.trackers import End
from rolecall.training.engine import Loss, Microbatch, TokenOutputs
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.objective.routing import RouterLosses, router_load
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.pieces import cut, join
from rolecall.training.serving.hooks import ProcessHooks, nothing
from rolecall.training.serving.trainer import Progress
from rolecall.training.sft.checkpoints import SftCheckpoints
from rolecall.training.sft.report import SftReport
from rolecall.training.step.optimize import MicrobatchCounter, StepCost, optimize
from rolecall.training.step.share import Minibatch, TrainShare
from rolecall.training.step.start import start_context

logger = logging.getLogger(__name__)

NUM_SAMPLES = 8
"""Examples of the first batch that are written to samples.jsonl, for people to look at."""


class Batches:
    """The examples that each step takes: epoch after epoch, each in an order of its own. An epoch's last batch is what
    is left.
    """

    def __init__(self, num_examples: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        self.num_per_epoch = -(-num_examples // batch_size)
        self._num_examples = num_examples
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def of_step(self, step: int) -> list[int]:
        """Indices of step `step`, from 0."""
        epoch, index = divmod(step, self.num_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._num_examples))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]


class SftRank:
    """One rank of an SFT run: its data, model and loop."""

    def __init__(self, settings: SftSettings, start_timeout_s: float, lost: Callable[[WorkerLostError], None]) -> None:
        """Reads the data and loads the model; a collective. ConfigError. `lost` ends the process."""
        self._settings = settings
        run, actor = settings.run, settings.actor
        _begin("tokenizing the examples")
        self._tokenizer = ChatTokenizer.of(settings.model)
        self._examples, self._heldout = _read(settings, self._tokenizer)
        batches = Batches(
            len(self._examples.rows), settings.data.batch_size, seed=run.seed, shuffle=settings.data.shuffle
        )
        self._batches = batches
        self._num_steps = run.num_steps or (run.num_epochs or 0) * batches.num_per_epoch
        changing = actor.optimizer.warmup_steps + (actor.optimizer.decay_steps or 0)
        if actor.optimizer.decay_steps and changing > self._num_steps:
            raise ConfigError(
                f"actor.optimizer.warmup_steps + decay_steps = {changing} exceed the {self._num_steps} optimizer "
                "steps; shorten them"
            )
        options = EngineOptions(
            path=settings.model.path,
            chat_template=read_template(settings.model.chat_template),
            head="policy",
            dtype=settings.model.dtype,
            float32_logits=settings.model.head_dtype == "float32",
            optimizer=actor.optimizer,
            lora=adapters_to_begin_with(settings, settings.actor.lora),
            total_steps=self._num_steps,
            parallel=actor.parallel,
            megatron=actor.megatron,
            gradient_checkpointing=actor.gradient_checkpointing,
            activation_offload=actor.activation_offload,
            torch_compile=actor.torch_compile,
            routers=actor.moe is not None,
            freeze_vision_tower=True,
            shows_images=False,  # examples are text
            seed=run.seed,
        )
        _begin("loading the model")
        self._context = start_context(options, actor, actor, run.dir, start_timeout_s, ProcessHooks("sft", lost=lost))

    def run(self, *, resume: bool) -> None:
        """Trains from the newest checkpoint, or the start, to the last step's checkpoint."""
        checkpoints = SftCheckpoints(self._settings.run, self._context, self._examples.digest)
        if resume:
            _begin("loading the newest checkpoint")
        step = checkpoints.restore() if resume else 0
        is_leader = self._context.group.is_leader
        report = SftReport(self._settings, self._num_steps, self._batches.num_per_epoch) if is_leader else None
        end = End.FAILED
        try:
            self._train(step, checkpoints, report)
            end = End.DONE
        except KeyboardInterrupt:
            end = End.STOPPED
            raise
        finally:
            if report is not None:
                report.close(end)
        self._context.group.leave()

    def _train(self, step: int, checkpoints: SftCheckpoints, report: SftReport | None) -> None:
        """Trains from `step` on to the last step's checkpoint."""
        if report is not None:
            report.begin(step, len(self._examples.rows), self._examples.num_too_long)
            report.keep_samples(step, [self._sample(index) for index in self._batches.of_step(step)[:NUM_SAMPLES]])
        if step == 0 and self._heldout is not None:
            self._tell(report, 0, self._evaluate(self._heldout))
        while step < self._num_steps:
            metrics = self._step(step)
            step += 1
            if self._heldout is not None and self._is_due(step):
                metrics.merge(self._evaluate(self._heldout))
            self._tell(report, step, metrics)
            if step % self._settings.run.checkpoint_every_steps == 0 or step == self._num_steps:
                checkpoints.save(step)
        checkpoints.wait_until_written()

    def _sample(self, index: int) -> dict[str, str]:
        """An example as the policy meets it, special tokens included."""
        row = join(self._examples.rows[index])
        trained = row["loss_mask"] != 0
        return {
            name: self._tokenizer.spell(row["token_ids"][which])
            for name, which in (("prompt", ~trained), ("response", trained))
        }

    def _is_due(self, step: int) -> bool:
        every = self._settings.evaluation.every_steps if self._settings.evaluation is not None else 0
        return step == self._num_steps or (every > 0 and step % every == 0)

    @staticmethod
    def _tell(report: SftReport | None, step: int, metrics: Metrics) -> None:
        if report is not None:
            report.log(step, metrics.values())

    def _step(self, step: int) -> Metrics:
        """One update; the metrics of all ranks."""
        cost = StepCost(self._context)
        rows = [self._examples.rows[index] for index in self._batches.of_step(step)]
        num_tokens = sum(len(segment["token_ids"]) for row in rows for segment in row)
        share = TrainShare([], [self._minibatch(rows)], num_tokens)
        counter = MicrobatchCounter(Progress(nothing), len(share.microbatches))
        metrics, _ = optimize(self._context, share, self._loss, 1, counter, "sft", entropy=False)
        cost.add_to(metrics, "sft", share.num_tokens)
        return self._context.group.merge(metrics)

    def _loss(self, minibatch: Minibatch) -> Loss:
        objective = SftObjective(minibatch.counts, self._settings.aggregation)
        moe = self._settings.actor.moe
        if moe is None:
            return objective
        load = router_load(self._context.group, self._context.engine.forward(minibatch.microbatches))
        return RouterLosses(objective, moe, load, "sft")

    def _minibatch(self, rows: Sequence[Sequence[Row]]) -> Minibatch:
        """This rank's microbatches of `rows`, by their segments, which every rank has, with the counts of all."""
        lengths = [[len(segment["token_ids"]) for segment in row] for row in rows]
        # a token's share of its row's mean depends on the whole row
        apart = self._settings.aggregation != "seq_mean_token_mean"
        pieces = cut(lengths, self._context.token_budget, between_segments=apart)
        packed, device = list[Microbatch](), self._context.device
        for indices in self._context.plan(pieces, 1, 0).microbatches:
            mine = [pieces[index] for index in indices]
            segments = [segment for piece in mine for segment in piece.segments(join(rows[piece.row]))]
            places = [piece.row for piece in mine for _ in piece.lengths]
            packed.append(pack(segments, ["loss_mask"], temperature=1.0, device=device, trajectories=places))
        every, places = [each for row in rows for each in row], [index for index, row in enumerate(rows) for _ in row]
        return Minibatch(packed, local_counts(every, trajectories=places))

    def _evaluate(self, heldout: TokenizedExamples) -> Metrics:
        """The mean negative log-likelihood of the held-out responses' tokens."""
        total, num_tokens = 0.0, 0
        for rows in _parts(heldout.rows, self._settings.data.batch_size):
            minibatch = self._minibatch(rows)
            for microbatch, outputs in zip(
                minibatch.microbatches, self._context.engine.forward(minibatch.microbatches), strict=True
            ):
                assert isinstance(outputs, TokenOutputs)
                total -= float(torch.where(microbatch.score_mask_N, outputs.logprobs_N.double(), 0.0).sum())
            num_tokens += minibatch.counts.num_tokens
        metrics = Metrics()
        metrics.mean(
            "eval/loss", float(self._context.group.sum_over_slots(np.array([total]))[0]) / num_tokens, num_tokens
        )
        return metrics


def _begin(phase: str) -> None:
    """Tells people what the start comes to, which may take minutes."""
    if rank_of_process()[0] == 0:
        say(f"starting  {phase}\n")


def _read(settings: SftSettings, tokenizer: ChatTokenizer) -> tuple[TokenizedExamples, TokenizedExamples | None]:
    """Training and held-out examples. ConfigError when none fits data.max_tokens."""
    data = settings.data
    end = end_of_response(settings.model.path, tokenizer)
    found = []
    for setting, path in (
        ("data.train", data.train),
        ("evaluation.path", settings.evaluation.path if settings.evaluation is not None else None),
    ):
        examples = (
            None if path is None else tokenize(load_examples(path, data, setting), tokenizer, end, data.max_tokens)
        )
        if examples is not None and not examples.rows:
            raise ConfigError(
                f"{setting}: no example fits data.max_tokens {data.max_tokens}; raise it or shorten the examples"
            )
        if examples is not None and examples.num_too_long:
            logger.warning(
                "%s: %d examples are longer than data.max_tokens %d and are left out",
                setting,
                examples.num_too_long,
                data.max_tokens,
            )
        found.append(examples)
    train, heldout = found
    assert train is not None
    return train, heldout


def _parts(rows: Sequence[Sequence[Row]], size: int) -> Iterator[Sequence[Sequence[Row]]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
