"""The memory of GPUs at the height of their work, in lines of `rolecall check`: a trainer's state with the activations
of a microbatch, a rollout's keys and values, on CPUs, too, and what a publish takes beside them.

Estimates, so that they are notes where GPUs have less; refused is only what no engine could do.
"""

from collections.abc import Iterable, Iterator, Mapping

from rolecall.commands.check.preflight import NOTE
from rolecall.commands.check.trainers import Trainer
from rolecall.data.model.cache_sizes import CacheSizes, cache_sizes
from rolecall.data.model.engine_limits import engine_tokens
from rolecall.data.model.files import ModelFacts, text_config, vocab_size
from rolecall.data.model.trainable import check_parallel
from rolecall.data.shift_plan import BUCKETS, gpu_memory_bytes, plan_shifts, received_bytes
from rolecall.errors import ConfigError
from rolecall.settings import ActorSection, RunSettings, SftSettings
from rolecall.settings.sizes.activations import Activations, activations, tower_activations
from rolecall.terminal import in_bytes

SUM_BYTES = 4
"""Bytes of a number of a layer's gradient while it is summed over ranks."""
ENGINE_BYTES = 4 * 2**30
"""What vLLM takes of a GPU besides weights and cache: CUDA, a step's activations and logits, captured graphs."""


def passes(settings: RunSettings | SftSettings, facts: ModelFacts, trainer: Trainer) -> Iterator[str]:
    """Yields the line on a training pass of `trainer`, and a note where a GPU of this machine has less. Most machines
    of a run have the same, so that it is told of a trainer that runs on another, too. Yields nothing of models whose
    layers are not reckoned.
    """
    actor, section, path, size = trainer.actor, trainer.section, trainer.path, trainer.size
    layout = section.parallel
    shares_tokens = actor.backend == "megatron" and actor.megatron.sequence_parallel
    found = activations(path, size, 1 if shares_tokens else layout.tensor)
    if found is None:
        return
    passed = _kept(actor, found) * section.token_budget / layout.sequence / (layout.tensor if shares_tokens else 1)
    share = settings.trained_image_share if trainer.lora is None else 0.0
    tower = tower_activations(path, size) if share else None
    seen = share * section.token_budget * _kept(actor, tower) if tower is not None else 0.0
    gathered = 0.0
    if actor.backend == "fsdp" and (section.num_ranks > 1 or (size == 2 and trainer.lora is None)):
        # else nothing is cast
        # two layers and all embeddings, and where they are trained one's gradients
        summed = size + SUM_BYTES if trainer.lora is None else 0
        num_ends = (1 if text_config(path).get("tie_word_embeddings") else 2) + (trainer.lora is None)
        ends = vocab_size(path) * found.layer_input * num_ends
        gathered = (facts.largest_layer * (2 * size + summed) + ends) / layout.tensor
    how = "with" if actor.gradient_checkpointing else "without"
    whole = f", and {in_bytes(gathered)} of layers and embeddings while they are whole" if gathered else ""
    yield (
        f"    a pass of {section.token_budget} tokens (estimate): {in_bytes(passed)} of activations a rank, {how} "
        f"gradient_checkpointing{whole}"
        + (f", and up to {in_bytes(seen)} of the vision tower's, where prompts are images" if seen else "")
    )
    gpus = gpu_memory_bytes()
    if not section.devices or not gpus:
        return
    beside = 0.0
    if isinstance(settings, RunSettings) and settings.takes_shifts and actor.devices:
        plan = plan_shifts(settings, facts, gpus)
        beside = plan.training - plan.trained
    total = trainer.state_bytes - trainer.away_bytes + passed + seen + gathered + beside
    gpu = _smallest(gpus, section.devices)
    if total > gpu:
        whose = "a GPU" if section.address is None else "a GPU, if its machine has those of this one,"
        what = "responses" if isinstance(settings, RunSettings) else "examples (data.max_tokens)"
        yield (
            f"{NOTE} {trainer.role}: at the height of a pass a rank takes about {in_bytes(total)}, and {whose} has "
            f"{in_bytes(gpu)}; {_lighter(trainer, passed, total - gpu)}or shorten {what}"
        )


def _kept(actor: ActorSection, found: Activations) -> float:
    """Bytes of each token on the device at the height of a pass."""
    if actor.activation_offload:  # those of one layer stay, and of the next
        return found.ends + found.layer * (1 if actor.gradient_checkpointing else 2)
    return found.per_token(recomputed=actor.gradient_checkpointing)


def _lighter(trainer: Trainer, passed: float, missing: float) -> str:
    """Names the settings by which a rank takes less, with a comma after each. It lacks `missing` bytes, and
    `passed` are those of its activations.
    """
    layout, num_ranks = trainer.section.parallel, trainer.section.num_ranks
    shared = [count for count in range(layout.sequence + 1, num_ranks + 1) if _may_share(trainer, count)]
    enough = next((count for count in shared if passed * (1 - layout.sequence / count) >= missing), None)
    by_sequence = f" or parallel.sequence{f' ({enough} would do)' if enough else ''}" if shared else ""
    offloads = [] if trainer.actor.activation_offload else ["actor.activation_offload"]
    if trainer.lora is None and not trainer.optimizer.offload:
        offloads.append(f"{trainer.role}.optimizer.offload")
    return f"raise num_ranks{by_sequence}, " + (f"set {' or '.join(offloads)}, " if offloads else "")


def _may_share(trainer: Trainer, count: int) -> bool:
    """Whether `count` ranks may share the tokens of each sequence."""
    layout = trainer.section.parallel
    if trainer.section.num_ranks % (layout.replicate * count * layout.tensor * layout.pipeline):
        return False
    try:
        check_parallel(trainer.path, layout.model_copy(update={"sequence": count}))
    except ConfigError:
        return False
    return True


def cache(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields the line on a rollout's keys and values. ConfigError where on GPUs they could not be one response's."""
    rollout, longest = settings.rollout, engine_tokens(settings)
    sizes = cache_sizes(settings.model.path, rollout, 4 if settings.model.dtype == "float32" else 2)
    if sizes is None:
        return
    a_response = sizes.response_bytes(longest)
    per_token = sizes.per_token / 2**10
    line = f"keys and values (estimate): {per_token:,.{0 if per_token >= 10 else 1}f} KiB a token on each worker"
    if not sizes.is_plain:
        beside = a_response - sizes.per_token * longest
        line += f" and {in_bytes(beside)} a response, of layers that keep a window or a state"
    gpus = gpu_memory_bytes() if rollout.num_replicas else {}
    room = float(rollout.cache_bytes or 0)
    if gpus and not room:
        used = [device for replica in rollout.devices for device in replica]
        share = plan_shifts(settings, facts, gpus).share if settings.takes_shifts else None
        weights = facts.num_parameters * (4 if settings.model.dtype == "float32" else 2) / rollout.workers_per_replica
        most = (share or rollout.gpu_memory_utilization) * _smallest(gpus, used) - weights
        _require_a_response(settings, sizes, most)
        room = most - ENGINE_BYTES
    if room <= 0:
        yield line
        return
    together = int(room / a_response)
    tokens = f"{room / sizes.per_token:,.0f} tokens, " if sizes.is_plain else ""
    yield f"{line}; {in_bytes(room)} hold {tokens}{together} responses at their longest" + (
        f", of up to {rollout.max_num_seqs} at a time (rollout.max_num_seqs): where more grow long, vLLM puts some off "
        "and computes theirs again"
        if 0 < together < rollout.max_num_seqs
        else ""
    )
    if not together and rollout.cache_bytes is None:  # else refused, by check_cache
        yield (
            f"{NOTE} rollout: its cache has about {in_bytes(room)}, and vLLM starts only where it holds a prompt and a "
            f"response of {longest:,} tokens, {in_bytes(a_response)}; raise rollout.tensor_parallel_size with more "
            "devices, or shorten responses"
        )


def publish(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields the lines on what a publish takes of the GPUs of rollouts, beside what vLLM was given."""
    rollout = settings.rollout
    if not rollout.devices or settings.published_adapters is not None or settings.takes_shifts:
        return
    needed = received_bytes(settings, facts) + BUCKETS * settings.weights.bucket_bytes
    left = ""
    if rollout.kv_cache_bytes is None:
        left = f" in the {1 - rollout.gpu_memory_utilization:.0%} of a GPU that rollout.gpu_memory_utilization leaves"
    yield (
        f"    a publish takes {in_bytes(received_bytes(settings, facts))} of each GPU for the largest layer, as it "
        f"arrives and in place, beside three buckets{left}"
    )
    gpus = gpu_memory_bytes() if rollout.num_replicas else {}
    if not gpus or rollout.kv_cache_bytes is not None:
        return
    gpu = _smallest(gpus, [device for replica in rollout.devices for device in replica])
    if needed > (1 - rollout.gpu_memory_utilization) * gpu:
        yield (
            f"{NOTE} rollout.gpu_memory_utilization {rollout.gpu_memory_utilization:g} leaves "
            f"{in_bytes((1 - rollout.gpu_memory_utilization) * gpu)} of a GPU, and a publish takes {in_bytes(needed)}: "
            f"set it to {int((1 - needed / gpu) * 100) / 100:g} or less"
        )


def _smallest(gpus: Mapping[int, int], used: Iterable[int]) -> int:
    """Bytes of the smallest of the GPUs that are `used`; of one that nvidia-smi does not name, the largest's."""
    return min(gpus.get(device, max(gpus.values())) for device in used)


def _require_a_response(settings: RunSettings, sizes: CacheSizes, room: float) -> None:
    longest = engine_tokens(settings)
    needed = sizes.response_bytes(longest)
    if room < needed:
        raise ConfigError(
            f"a rollout's GPUs have at most {in_bytes(max(0, room))} for keys and values beside the weights, and those "
            f"of a prompt and a response of up to {longest:,} tokens take {in_bytes(needed)}; raise "
            "rollout.tensor_parallel_size with more devices, or lower data.max_prompt_tokens or max_tokens"
        )
