"""The memory, disk and store that a run takes, in lines of `rolecall check`. All but the store's are estimates.

Says what a run takes; whether this machine has as much memory is asked in capacity.py.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolecall.checkpoint.storage import DiskStorage, open_storage
from rolecall.commands.check import gpus
from rolecall.commands.check.capacity import host_memory_bytes
from rolecall.commands.check.preflight import NOTE
from rolecall.commands.check.trainers import LEAST_MOMENT_BYTES, MOMENT_BYTES_PER_PARAMETER, Trainer, trainers
from rolecall.data.dataset import RawPrompt
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.data.model.adapters import expert_parameters
from rolecall.data.model.files import ModelFacts, sees_images
from rolecall.data.model.parameter_counts import reference_held
from rolecall.data.shift_plan import ShiftPlan, gpu_memory_bytes, plan_shifts, shares_gpus_here
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection, RunSettings, SftSettings
from rolecall.store.budget import PromptBytes, StoreBudget
from rolecall.terminal import in_bytes

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""float32 master weight and two moments."""
CHANNELS_OF_FRAMES = 6
"""Numbers of an image's pixel: three colours, in each of the two frames that a vision tower sees of it."""
CHARS_PER_TOKEN = 4
"""About as many as a token of English or of code has."""


def memory_and_disk(settings: RunSettings | SftSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields a line per role on its memory, then what checkpoints take. ConfigError where a disk has no room."""
    actor, *others = every = trainers(settings, facts)
    weights = facts.num_parameters * actor.size
    yield f"memory (estimates): actor {in_bytes(actor.state_bytes)} of state per rank x {actor.section.num_ranks}"
    yield from _in_a_step(settings, facts, actor)
    yield from _gathered(actor, weights)
    if actor.lora is not None:
        yield f"  adapters: {actor.counts.trained / 1e6:,.2f}M parameters are {_kept(settings)}"
        yield from _merged_experts(actor, actor.lora)
    if isinstance(settings, RunSettings):
        yield from _critic(settings, facts, others)
        if settings.shows_images and sees_images(settings.model.path):
            yield _pixels(settings, actor.size)
        for name, section in settings.references.items():
            held = reference_held(settings, name, facts)
            yield f"  reference {name} {in_bytes(held * actor.size)} per rank x {section.num_ranks}"
        yield from _rollouts(settings, facts, weights)
        yield from _samples(settings)
    if settings.run.num_steps != 0:  # else no checkpoint is made
        yield from _checkpoints(settings, every)


def _in_a_step(settings: RunSettings | SftSettings, facts: ModelFacts, trainer: Trainer) -> Iterator[str]:
    """Yields lines on where a trainer's state is in a step, and on a pass."""
    if trainer.optimizer.offload:
        there = "host memory but for the step"
        if trainer.actor.backend == "fsdp":
            at_a_time = trainer.counts.at_a_time * MOMENT_BYTES_PER_PARAMETER / trainer.section.num_shards
            there = f"host memory, and a step has at most {in_bytes(at_a_time)} of them here at a time"
        yield f"    of which at most {in_bytes(trainer.away_bytes)}, moments, are in {there}"
    if settings.run.num_steps != 0:
        yield from gpus.passes(settings, facts, trainer)


def _kept(settings: RunSettings | SftSettings) -> str:
    """Says what becomes of the actor's adapters."""
    if isinstance(settings, SftSettings):
        return "trained and kept; the base stays as it is"
    if settings.published_adapters is not None:
        return "trained, published and kept; the base stays as it is"
    return "trained and kept; the base stays as it is, and published with them (weights.merge_adapters)"


def _critic(settings: RunSettings, facts: ModelFacts, others: Sequence[Trainer]) -> Iterator[str]:
    for critic in others:
        yield f"  critic {in_bytes(critic.state_bytes)} per rank x {critic.section.num_ranks}"
        yield from _in_a_step(settings, facts, critic)
        if critic.lora is not None:
            yield (
                f"    its adapters: {critic.counts.trained / 1e6:,.2f}M parameters and the value head are trained and "
                "kept; the base stays as it is"
            )
            yield from _merged_experts(critic, critic.lora)


def _merged_experts(trainer: Trainer, lora: LoraSection) -> Iterator[str]:
    """Yields a line on what experts with their adapters added take in an update, and one layer's gradients of them."""
    if lora.experts:
        layers = expert_parameters(trainer.path, f"{trainer.role}.lora")
        summed_again = trainer.actor.gradient_checkpointing or trainer.actor.backend == "megatron"
        held, of = (max(layers), "one layer") if summed_again else (sum(layers), "all layers")
        remedy = "" if summed_again else "; actor.gradient_checkpointing makes it one layer's"
        taken = in_bytes((held + max(layers)) * trainer.size / trainer.section.parallel.expert)
        yield f"    experts with adapters: {taken} more per rank in an update, for their sums of {of}{remedy}"


def _rollouts(settings: RunSettings, facts: ModelFacts, weights: float) -> Iterator[str]:
    """Yields lines on what a rollout of a model of `weights` bytes takes, at a publish, too."""
    rollout, num_workers = settings.rollout, settings.rollout.workers_per_replica
    cache = rollout.cache_bytes
    kept = (
        in_bytes(cache) if cache else f"vLLM's own: {rollout.gpu_memory_utilization:.0%} of each GPU, weights included"
    )
    yield (
        f"  rollout {in_bytes(weights / num_workers)} weights + KV cache {kept}, x "
        f"{rollout.num_replicas} replicas" + (f" of {num_workers} workers" if num_workers > 1 else "")
    )
    if settings.weights.deltas:
        yield (
            f"  weights.deltas: over gloo, one copy more of the model in host memory, {in_bytes(weights)} "
            f"at the actor's first rank and as much at each of {num_workers} workers of a rollout"
        )
    if settings.takes_shifts and rollout.devices:
        here = gpu_memory_bytes() if shares_gpus_here(settings) else {}
        yield from _shifts(plan_shifts(settings, facts, here))
    yield from gpus.publish(settings, facts)


def _pixels(settings: RunSettings, size: int) -> str:
    """The line on what waits of images until they are computed: each once at every rank that has a response to it."""
    tokens = require_visual_tokens(settings.model.path)
    per_token = CHANNELS_OF_FRAMES * (tokens.patch_size * tokens.merge_size) ** 2 * size
    num_ranks, num_groups = settings.actor.num_ranks, settings.algorithm.groups_per_batch
    most_prompts = num_groups * min(settings.sampling.num_responses, num_ranks) / num_ranks
    most = most_prompts * settings.data.max_prompt_tokens * per_token
    if settings.max_environment_image_bytes:  # each response may show others
        num_responses = num_groups * settings.sampling.num_responses / num_ranks
        most = num_responses * settings.longest_trajectory * per_token
    return (
        f"  pixels of a batch's images: up to {in_bytes(most)} of host memory at each rank of the actor, {per_token:,} "
        "bytes for each token of an image"
    )


def _gathered(trainer: Trainer, weights: float) -> Iterator[str]:
    """Yields a line on the whole parameters of the actor, where any are gathered or cast. One rank casts no base of
    adapters.
    """
    actor = trainer.actor
    nothing_cast = trainer.size == 4 or trainer.lora is not None
    if actor.backend != "fsdp" or (actor.num_ranks == 1 and nothing_cast):
        return
    how = {
        None: "kept from pass to pass where an eighth of the device is left beside them, as measured",
        True: "kept from pass to pass",
        False: "given back after each pass",
    }[actor.parallel.keep_gathered]
    yield (
        f"  actor's gathered parameters, up to {in_bytes(weights / actor.parallel.tensor)} per rank: {how} "
        "(actor.parallel.keep_gathered)"
    )


def _shifts(plan: ShiftPlan) -> Iterator[str]:
    yield "  shared GPUs, each (estimates without activations), in every shift of a step:"
    if plan.scored:
        yield (
            f"    scoring: {in_bytes(plan.scoring)}, of which the references are {in_bytes(plan.scored)}, rollouts "
            "asleep and all state of the trainers in host memory"
        )
    yield f"    training: {in_bytes(plan.training)}, rollouts asleep"
    share = "" if plan.share is None else f", and rollouts take {plan.share:.0%} of the GPU"
    yield (
        f"    publishing: {in_bytes(plan.beside_rollouts)}, of which the actor's parameters are "
        f"{in_bytes(plan.parameters)} and weights on their way {in_bytes(plan.passing)}, beside a rollout of at least "
        f"{in_bytes(plan.rollout)}{share}"
    )
    away = " and references" if plan.scored else ""
    yield f"    sampling: {in_bytes(plan.resident)} beside the rollouts, all state of the trainers{away} in host memory"


def _samples(settings: RunSettings) -> Iterator[str]:
    if settings.trackers.num_samples_kept is None:
        batch = settings.algorithm.groups_per_batch * settings.sampling.num_responses
        most = batch * settings.longest_trajectory * CHARS_PER_TOKEN
        yield f"disk (estimate): samples.jsonl grows by up to {in_bytes(most)} a step, whose responses are all kept"


def _checkpoints(settings: RunSettings | SftSettings, trained: Sequence[Trainer]) -> Iterator[str]:
    """Yields lines on what checkpoints of these trainers take. ConfigError where their disk has no room for one."""
    storage = open_storage(settings.run.checkpoints)
    needed = sum(
        each.counts.trained * CHECKPOINT_BYTES_PER_PARAMETER + (each.frozen_bytes if each.lora is None else 0)
        for each in trained
    )
    if not isinstance(storage, DiskStorage):
        yield f"checkpoints (estimate): {in_bytes(needed)} each in {storage.url}"
        return
    folder = Path(storage.url)
    parent = next(folder for folder in [folder, *folder.parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConfigError(
            f"{folder}: a checkpoint takes about {in_bytes(needed)} and {parent} has {in_bytes(free)} free; make room"
        )
    num_kept = settings.run.keep_checkpoints
    yield (
        f"disk (estimate): a checkpoint {in_bytes(needed)}, {num_kept} kept and one being written "
        f"{in_bytes((num_kept + 1) * needed)}; {in_bytes(free)} free"
    )
    if (num_kept + 1) * needed > free and not folder.exists():
        yield (
            f"{NOTE} run.keep_checkpoints {num_kept}: with one being written they take about "
            f"{in_bytes((num_kept + 1) * needed)}, and {parent} has {in_bytes(free)} free, so that checkpoint "
            f"{int(free // needed) + 1} fails; make room, or lower it"
        )


def host_memory(settings: RunSettings | SftSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields the line on what trainers on GPUs of this machine have in its own memory, and a note where it has less;
    of trainers that take shifts elsewhere, on each of their machines. ConfigError where this one could not hold what
    waits there from step to step.
    """
    takes_shifts = isinstance(settings, RunSettings) and settings.takes_shifts
    told = [
        each
        for each in trainers(settings, facts)
        if each.section.devices and (each.section.address is None or takes_shifts)
    ]
    if not told or settings.run.num_steps == 0:
        return
    copied, waiting = 0.0, 0.0
    for each in told:
        section, num_trained = each.section, each.counts.trained
        moments = LEAST_MOMENT_BYTES[each.optimizer.kind]
        copies = section.parallel.replicate * len(section.devices) / section.num_ranks  # on one machine
        copied += min(copies, 1) * num_trained * (4 + moments)
        if takes_shifts:
            waiting += copies * (num_trained * (4 + moments) + each.frozen_bytes)
        elif each.optimizer.offload:
            waiting += copies * num_trained * moments
    beside = f", beside {in_bytes(waiting)} of moments (optimizer.offload)" if waiting else ""
    if isinstance(settings, RunSettings) and takes_shifts:
        for name in settings.references_in_shifts:
            reference = settings.references[name]
            num_ranks = len(reference.devices) or reference.num_ranks
            waiting += reference_held(settings, name, facts) * num_ranks * told[0].size
        beside = f", beside {in_bytes(waiting)} of state that waits for its shift"
    is_here = all(each.section.address is None for each in told)
    of_each = "" if is_here else ", on each of the trainers' machines"
    yield f"host memory (estimate): {in_bytes(copied)} while a checkpoint is copied and written{beside}{of_each}"
    host = host_memory_bytes()
    spread = ", spread them over more machines," if isinstance(settings, RunSettings) else ""
    remedy = f"give it more{spread} or train adapters (actor.lora)"
    if waiting > host and is_here:
        raise ConfigError(
            f"the trainers keep at least {in_bytes(waiting)} in this machine's memory, which has {in_bytes(host)}; "
            f"{remedy}"
        )
    has_store = isinstance(settings, RunSettings) and settings.store.url is None and is_here
    stored = settings.store.max_bytes if isinstance(settings, RunSettings) and has_store else 0
    if copied + waiting + stored > host:
        store = f", and the store up to {in_bytes(stored)}" if stored else ""
        where = (
            f"this machine's memory{store}, which has"
            if is_here
            else "the memory of each of their machines; this one has"
        )
        yield f"{NOTE} the trainers put up to {in_bytes(copied + waiting)} into {where} {in_bytes(host)}; {remedy}"


def store(settings: RunSettings, prompts: list[RawPrompt]) -> Iterator[str]:
    """Yields what a batch takes in the store, where `prompts` are those of data.train. ConfigError where it cannot hold
    the batches that must exist at the same time.
    """
    largest = PromptBytes.largest(prompts, settings.algorithm.groups_per_batch)
    budget = StoreBudget.of(settings, largest)
    where = "external" if settings.store.url else "embedded"
    needed, host = budget.num_batches * budget.batch_bytes, host_memory_bytes()
    if settings.store.url is None and needed > host:
        raise ConfigError(
            f"store: the {budget.num_batches} batches that must exist at the same time take {in_bytes(needed)}, and "
            f"this machine has {in_bytes(host)} of memory; lower algorithm.groups_per_batch, max_staleness or "
            "sampling.max_tokens, or set store.url"
        )
    early = budget.max_bytes // 2 // budget.batch_bytes + 1
    batches = (
        f"{budget.num_batches} batches {in_bytes(budget.num_batches * budget.batch_bytes)} of "
        f"{in_bytes(budget.max_bytes)} for rows"
    )
    yield (
        f"store ({where}): a batch at its longest {in_bytes(budget.batch_bytes)}, the largest prompt "
        f"{in_bytes(largest.text)}, kept once a group"
        + (f", images {in_bytes(largest.images)} in each of its rows, in the mean" if largest.images else "")
        + f"; {batches}"
        + (
            f"; a checkpoint is made out of turn after {early} trained batches at their longest"
            if early < settings.run.checkpoint_every_steps
            else ""
        )
    )
