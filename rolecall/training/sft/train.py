"""`rolecall sft` on one rank: examples, batches by step, updates, held-out loss, checkpoints, numbers. Every
rank does the same; rank 0 tells.

The order of examples derives from (seed, epoch) and the position from the step alone, so a checkpoint's step is its
whole cursor. Metrics are named sft/ (training) and eval/ (held out).
"""

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from rolecall.data.images.spool import Spool, spool_of
from rolecall.data.images.tokens import VisualTokens, collapsed, require_visual_tokens
from rolecall.data.sft_examples import TokenizedExamples, end_of_response, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer, read_template
from rolecall.errors import ConfigError, WorkerLostError
from rolecall.identity import adapters_to_begin_with
from rolecall.settings import SftSettings, rank_of_process
from rolecall.telemetry import Metrics
from rolecall.terminal import say
from rolecall.trackers import End
from rolecall.training.engine import Loss, TokenOutputs
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.objective.routing import RouterLosses, router_load
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.packing.images import ImageReader
from rolecall.training.packing.pieces import join
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.hooks import ProcessHooks, nothing
from rolecall.training.serving.trainer import Progress
from rolecall.training.sft.checkpoints import SftCheckpoints
from rolecall.training.sft.minibatches import ExampleMinibatch, Minibatches
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
        self._visual_tokens = require_visual_tokens(settings.model.path) if settings.shows_images else None
        self._examples, heldout = _read(settings, self._tokenizer, self._visual_tokens)
        batches = Batches(
            len(self._examples.rows), settings.data.batch_size, seed=run.seed, shuffle=settings.data.shuffle
        )
        self._batches = batches
        self._num_steps = run.num_steps or (run.num_epochs or 0) * batches.num_per_epoch
        try:
            settings.check_schedule(self._num_steps)
        except ValueError as error:
            raise ConfigError(str(error)) from error
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
            freeze_vision_tower=settings.freezes_vision_tower,
            freeze_routers=settings.model.freeze_routers,
            max_sequence_tokens=settings.data.max_tokens,
            shows_images=settings.shows_images,
            seed=run.seed,
        )
        _begin("loading the model")
        self._context = start_context(options, actor, actor, run.dir, start_timeout_s, ProcessHooks("sft", lost=lost))
        require_one_set(self._context.group, "data.train", self._examples)
        if heldout is not None:
            require_one_set(self._context.group, "evaluation.path", heldout)
        reader = ImageReader(options.path, DTYPES[options.dtype]) if settings.shows_images else None
        # a token's share of its row's mean depends on the whole row
        apart = settings.aggregation != "seq_mean_token_mean"
        self._minibatches = Minibatches(self._context, self._examples, reader, between_segments=apart)
        self._heldout = None if heldout is None else Minibatches(self._context, heldout, reader, between_segments=apart)

    def run(self, *, resume: bool) -> None:
        """Trains from the newest checkpoint, or the start, to the last step's checkpoint."""
        checkpoints = SftCheckpoints(self._settings.run, self._context, self._examples)
        if resume:
            _begin("loading the newest checkpoint")
        step = checkpoints.restore() if resume else 0
        is_leader = self._context.group.is_leader
        report = SftReport(self._settings, self._num_steps, self._batches.num_per_epoch) if is_leader else None
        end = End.FAILED
        try:
            with self._context.group.watched():
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
            report.begin(step, self._examples)
            report.keep_samples(step, [self._sample(index) for index in self._batches.of_step(step)[:NUM_SAMPLES]])
        if step == 0 and self._heldout is not None:
            self._tell(report, 0, self._evaluate(self._heldout))
        minibatches = self._minibatches.of(map(self._batches.of_step, range(step, self._num_steps)))
        while step < self._num_steps:
            metrics = self._step(step, minibatches)
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
        prompt, response = (row["token_ids"][which].tolist() for which in (~trained, trained))
        if self._visual_tokens is not None:
            prompt = collapsed(prompt, self._visual_tokens.token_id, len(prompt))
        return {"prompt": self._tokenizer.spell(prompt), "response": self._tokenizer.spell(response)}

    def _is_due(self, step: int) -> bool:
        every = self._settings.evaluation.every_steps if self._settings.evaluation is not None else 0
        return step == self._num_steps or (every > 0 and step % every == 0)

    @staticmethod
    def _tell(report: SftReport | None, step: int, metrics: Metrics) -> None:
        if report is not None:
            report.log(step, metrics.values())

    def _step(self, step: int, minibatches: Iterator[ExampleMinibatch]) -> Metrics:
        """The update number `step`, by the next of `minibatches`; the metrics of all ranks."""
        cost = StepCost(self._context)
        made = next(minibatches)
        share = TrainShare([], [made.minibatch], made.num_tokens)
        counter = MicrobatchCounter(Progress(nothing), len(share.microbatches))
        metrics, _ = optimize(self._context, share, self._loss, 1, counter, "sft", place=step, entropy=False)
        cost.add_to(metrics, "sft", share.num_tokens)
        if self._visual_tokens is not None and self._context.group.is_leader:
            metrics.sum("sft/unshown", made.num_unshown)
        return self._context.group.merge(metrics)

    def _loss(self, minibatch: Minibatch) -> Loss:
        objective = SftObjective(minibatch.counts, self._settings.aggregation)
        moe = self._settings.actor.moe
        if moe is None:
            return objective
        load = router_load(self._context.group, self._context.engine.forward(minibatch.microbatches))
        return RouterLosses(objective, moe, load, "sft")

    def _evaluate(self, heldout: Minibatches) -> Metrics:
        """The mean negative log-likelihood of the held-out responses' tokens. ConfigError when no image of any can be
        shown.
        """
        total, num_tokens, num_unshown = 0.0, 0, len(heldout.examples.unshown)
        # mapped: a loop's own name would keep a minibatch until the next has been made
        for loss, num_trained, num_left_out in map(self._measured, heldout.in_order(self._settings.data.batch_size)):
            total, num_tokens, num_unshown = total + loss, num_tokens + num_trained, num_unshown + num_left_out
        if not num_tokens:
            raise ConfigError("evaluation.path: no example has images that can be shown; mend them, or leave it out")
        metrics = Metrics()
        metrics.mean(
            "eval/loss", float(self._context.group.sum_over_slots(np.array([total]))[0]) / num_tokens, num_tokens
        )
        if self._visual_tokens is not None:
            metrics.sum("eval/unshown", num_unshown)
        return metrics

    def _measured(self, made: ExampleMinibatch) -> tuple[float, int, int]:
        """The negative log-likelihood of the tokens that this rank has of a minibatch; of all ranks how many there are,
        and how many examples are left out.
        """
        total, microbatches = 0.0, made.minibatch.microbatches
        for microbatch, outputs in zip(microbatches, self._context.engine.forward(microbatches), strict=True):
            assert isinstance(outputs, TokenOutputs)
            total -= float(torch.where(microbatch.score_mask_N, outputs.logprobs_N.double(), 0.0).sum())
        return total, made.minibatch.counts.num_tokens, made.num_unshown


def _begin(phase: str) -> None:
    """Tells people what the start comes to, which may take minutes."""
    if rank_of_process()[0] == 0:
        say(f"starting  {phase}\n")


def _read(
    settings: SftSettings, tokenizer: ChatTokenizer, visual_tokens: VisualTokens | None
) -> tuple[TokenizedExamples, TokenizedExamples | None]:
    """Training and held-out examples. ConfigError when none fits data.max_tokens and can be shown."""
    found = [_tokenized(settings, "data.train", settings.data.train, tokenizer, visual_tokens)]
    if settings.evaluation is not None:
        heldout = (settings.evaluation.path,)
        found.append(_tokenized(settings, "evaluation.path", heldout, tokenizer, visual_tokens))
    return found[0], found[1] if found[1:] else None


def _tokenized(
    settings: SftSettings,
    setting: str,
    paths: tuple[Path, ...],
    tokenizer: ChatTokenizer,
    visual_tokens: VisualTokens | None,
) -> TokenizedExamples:
    """The examples in the files that `setting` names."""
    data, is_leader = settings.data, rank_of_process()[0] == 0
    end = end_of_response(settings.model.path, tokenizer)
    with ExitStack() as opened:
        spool = None
        if visual_tokens is not None:
            spool = opened.enter_context(Spool(spool_of(settings.run.dir, setting), writes=is_leader))
        loaded = load_examples(paths, data, setting, lambda what: _begin(f"tokenizing {what}"))
        examples = tokenize(loaded, tokenizer, end, data.max_tokens, visual_tokens, spool)
    if not examples.rows:
        raise ConfigError(
            f"{setting}: no example fits data.max_tokens {data.max_tokens}; raise it or shorten the examples"
            if not examples.unshown
            else f"{setting}: no example fits data.max_tokens {data.max_tokens} and has images to show; "
            f"{examples.unshown[0]}"
        )
    for why in examples.unshown if is_leader else ():
        logger.warning("%s; it is left out", why)
    if examples.num_too_long:
        logger.warning(
            "%s: %d examples are longer than data.max_tokens %d and are left out",
            setting,
            examples.num_too_long,
            data.max_tokens,
        )
    return examples


def require_one_set(group: CommandGroup, setting: str, examples: TokenizedExamples) -> None:
    """A collective. ConfigError where ranks found different `examples` in the files that `setting` names, as when one
    read an image that was still being written: their batches would be of different rows.
    """
    if len(set(group.gather(examples.digest.encode()))) == 1:
        return
    sizes = [f"the image {image.path} has {image.num_bytes} bytes" for image in examples.image_files]
    found = [json.loads(each) for each in group.gather(json.dumps([*examples.unshown, *sizes]).encode())]
    common = set(found[0]).intersection(*found[1:])
    odd = [f"to rank {rank} {why}" for rank, each in enumerate(found) for why in each if why not in common]
    raise ConfigError(
        f"{setting}: ranks read other examples{f' ({odd[0]})' if odd else ''}; give all the same files, whole and "
        "at rest, and start again"
    )
