"""`rolecall check`: what a configuration means on this machine, a line per derived value, without starting anything.

Reads the model's JSON and safetensors headers, the tokenizer and the datasets, and looks around
(`preflight.py`, `capacity.py`, `footprint.py`, `explain.py`); imports no torch and no service. What is wrong is
collected, so that one run of the command shows everything; `rolecall train` refuses to start anything while there is
something. Estimates say that they are.
"""

import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rolecall.algorithms.advantages.custom import load as load_advantage
from rolecall.commands.capacity import check_cache, check_capacity, in_bytes
from rolecall.commands.explain import explain
from rolecall.commands.footprint import memory_and_disk, store
from rolecall.commands.preflight import NOTE, preflight
from rolecall.data.adapters import check_start, with_modules
from rolecall.data.dataset import RawPrompt, load_prompts
from rolecall.data.engine_limits import check_engine
from rolecall.data.image_limits import check_images
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.megatron_limits import check_megatron, require_installed
from rolecall.data.mixture import read_mixture
from rolecall.data.model_files import (
    ModelFacts,
    check_parallel,
    check_routers,
    check_tokenizer,
    check_trainable,
    eos_token_ids,
    has_recurrent_layers,
    max_model_tokens,
    read_model,
    text_config,
    vocab_size,
)
from rolecall.data.tokenizer import ChatTokenizer, read_ids_digest
from rolecall.environment.checks import explain_environment
from rolecall.errors import ConfigError, InvalidInputError, RoleCallError
from rolecall.identity import adapters_to_begin_with, newest_checkpoint
from rolecall.launcher.plan import holds_a_run, require_folders
from rolecall.settings import (
    ALL_LINEAR,
    CriticSection,
    CustomAdvantage,
    ExternalScorer,
    LoraSection,
    PassAtKAdvantage,
    ReferenceSection,
    RunSettings,
    TrainerSection,
    require_visible,
)
from rolecall.trackers import require as require_trackers

MAX_MEASURED_PROMPTS = 2000
"""Prompts of a file that are rendered and counted; the controller looks at every one when its turn comes."""


def check(settings: RunSettings, out: TextIO) -> int:
    """Writes a line per finding to `out`; 0 when everything fits, 2 when something does not."""
    problems = find_problems(settings, out)
    for problem in problems:
        out.write(f"PROBLEM  {problem}\n")
    out.write(
        "ok: nothing was started\n"
        if not problems
        else f"{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started\n"
    )
    return 2 if problems else 0


def require(settings: RunSettings, out: TextIO) -> None:
    """Makes the checks of `rolecall train` before it starts anything. ConfigError lists everything that is wrong; what
    else is worth telling goes to `out`.
    """
    found = io.StringIO()
    problems = find_problems(settings, found)
    out.writelines(line for line in found.getvalue().splitlines(keepends=True) if line.startswith(NOTE))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problems; nothing was started:", *problems]))


def find_problems(settings: RunSettings, out: TextIO) -> list[str]:
    """Everything that is wrong, a sentence each; what is well is written to `out`."""
    problems: list[str] = []
    found: dict[str, Any] = {}
    model = settings.model
    for name, read in (("facts", lambda: read_model(model.path)), ("tokenizer", lambda: ChatTokenizer.of(model))):
        try:
            found[name] = read()
        except RoleCallError as error:
            problems.append(error.message)
    facts: ModelFacts | None = found.get("facts")
    tokenizer: ChatTokenizer | None = found.get("tokenizer")
    sections = [
        _run(settings),
        *_data(settings, tokenizer),
        _batches(settings),
        _functions(settings),
        _judges(settings),
    ]
    if facts is not None:
        sections += [_model(settings, facts), memory_and_disk(settings, facts), check_capacity(settings, facts)]
        sections += [_fit(settings, tokenizer)] if tokenizer is not None else []
    if tokenizer is not None:
        sections.append(explain_environment(settings, tokenizer))
    for section in [*sections, _placement(settings), _deadlines(settings), *preflight(settings)]:
        _collect(section, out, problems)
    return list(dict.fromkeys(problems))


def _collect(lines: Iterator[str], out: TextIO, problems: list[str]) -> None:
    try:
        for line in lines:
            out.write(line + "\n")
    except RoleCallError as error:
        problems.append(error.message)


def _run(settings: RunSettings) -> Iterator[str]:
    require_folders(settings.run)
    directory = settings.run.dir
    used = directory.is_dir() and any(directory.iterdir())
    state = (
        "is new"
        if not used
        else "holds a run: train needs --resume or another run.dir"
        if holds_a_run(directory)
        else "holds nothing that was trained"
    )
    yield (
        f"run {settings.run.name}: {settings.run.total_steps} steps, seed {settings.run.seed}, directory "
        f"{directory} ({state})"
    )
    if settings.run.checkpoint_url is not None:
        newest = newest_checkpoint(settings)
        held = f"those of a run to step {newest.step}: train needs --resume or another place" if newest else "none yet"
        yield f"checkpoints: run.checkpoint_url {settings.run.checkpoint_url} holds {held}"
    if settings.run.deterministic:
        how = "by batch-invariant kernels" if settings.rollout.devices else "one at a time, some ten times slower"
        yield f"deterministic: rollouts compute responses {how}; the same machine gives the same weights again"


def _data(settings: RunSettings, tokenizer: ChatTokenizer | None) -> Iterator[Iterator[str]]:
    train: list[RawPrompt] = []
    yield _prompts(settings, tokenizer, "data.train", settings.data.train, "", train)
    yield _epochs(settings, train)
    yield store(settings, train)
    yield _unused_evaluation(settings)
    for name, section in settings.evaluation.sets.items():
        times = ["at step 0"] if settings.evaluation.at_start else []
        times += [f"every {settings.evaluation.every_steps} steps"] if settings.evaluation.every_steps else []
        when = " and ".join(filter(None, (", ".join(times), "at the end")))
        about = f", {section.num_responses} response(s) at temperature {section.temperature}, {when}"
        if settings.evaluation.beside:
            about += ", beside the next step, whose publish waits"
        yield _prompts(settings, tokenizer, f"evaluation.sets.{name}.path", section.path, about, [])


def _unused_evaluation(settings: RunSettings) -> Iterator[str]:
    section = settings.evaluation
    asked = {"every_steps": section.every_steps > 0, "beside": section.beside, "at_start": not section.at_start}
    named = ", ".join(f"evaluation.{name}" for name, is_set in asked.items() if is_set)
    if named and not section.sets:
        yield f"{NOTE} {named}: there are no evaluation.sets, so that nothing is evaluated; add one"


def _prompts(
    settings: RunSettings,
    tokenizer: ChatTokenizer | None,
    setting: str,
    files: Path | tuple[Path, ...],
    about: str,
    read: list[RawPrompt],
) -> Iterator[str]:
    """Every row is read, into `read`; the first ones are measured, and more only while none fits."""
    prompts = load_prompts(
        files, settings.data, settings.reward, settings.algorithm.distillation if files == settings.data.train else None
    )
    read += prompts
    names = str(files) if isinstance(files, Path) else ", ".join(map(str, files))
    own = settings.data.preprocess
    through = "" if own is None else f" through data.preprocess.function {own.name}"
    yield f"{setting}: {names}, {len(prompts)} prompts{through}{about}"
    if tokenizer is None:
        return
    encoder = PromptEncoder.of(settings, tokenizer)
    first: RawPrompt | None = None
    bound, lengths, shown, unshown = settings.data.max_prompt_tokens, list[int](), list[int](), list[str]()
    for prompt in prompts:
        if len(lengths) + len(unshown) >= MAX_MEASURED_PROMPTS and min(lengths, default=bound + 1) <= bound:
            break
        try:
            ids, _ = encoder.encode(prompt)
        except InvalidInputError as error:
            unshown.append(error.message)
            continue
        first = first or prompt
        lengths.append(len(ids))
        shown += [ids.count(encoder.visual_tokens.token_id)] if encoder.visual_tokens is not None else []
    if unshown:
        yield (
            f"{NOTE} {setting}: of the first {len(lengths) + len(unshown)} prompts {len(unshown)} cannot be shown and "
            f"will be left out; the first: {unshown[0]}"
        )
    if first is None:
        raise ConfigError(f"{setting}: none of the {len(unshown)} prompts of {names} can be shown; {unshown[0]}")
    too_long = sum(length > bound for length in lengths)
    yield f"  the first is {lengths[0]} tokens as rendered: {tokenizer.render(first.chat)!r}"
    yield (
        f"  of the first {len(lengths)}, the longest has {max(lengths)} tokens; {too_long} exceed "
        f"data.max_prompt_tokens {bound} and will be left out"
    )
    if shown:
        num_images = sum(len(prompt.images) for prompt in prompts[: len(lengths) + len(unshown)])
        most = max(prompt.image_bytes for prompt in prompts)
        yield (
            f"  they show {num_images} images (data.images_field), those of one prompt up to {max(shown)} of its "
            f"tokens and {in_bytes(most)}"
        )
    if too_long == len(lengths):
        raise ConfigError(
            f"{setting}: all {too_long} prompts of {names} have more tokens than data.max_prompt_tokens {bound}, the "
            f"shortest {min(lengths)}; "
            "raise it or shorten the prompts"
        )


def _epochs(settings: RunSettings, prompts: list[RawPrompt]) -> Iterator[str]:
    """How often the run goes through the training prompts; nothing where they could not be read."""
    steps, groups = settings.run.total_steps, settings.algorithm.groups_per_batch
    if prompts and steps:
        yield (
            f"  {steps} steps of {groups} groups are {steps * groups / len(prompts):.4g} epochs of these prompts, more "
            "where groups are dropped or prompts are left out"
        )


def _model(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    path = settings.model.path
    yield f"model: {path}, {facts.architecture}, {facts.num_parameters / 1e6:,.2f}M parameters, {settings.model.dtype}"
    also = settings.sampling.stop_token_ids
    check_trainable(path)
    _check_layout(settings, settings.actor, path, "model.path")
    yield from check_images(settings, facts)
    if has_recurrent_layers(text_config(path)):
        yield (
            "recurrent layers: each sequence goes through them by itself, a prompt once for each response, and the "
            "sampler keeps no prefixes; on GPUs transformers takes flash-linear-attention where it is installed"
        )
    yield from _adapters(settings, settings.actor.lora, path, "actor.lora")
    if settings.actor.moe is not None:
        check_routers(path)
        moe = settings.actor.moe
        yield (
            f"routers: balance_coef {moe.balance_coef:g}, z_coef {moe.z_coef:g}, over all tokens of a mini-batch, "
            "prompts included"
        )
    if settings.actor.router_replay != "off":
        yield _router_replay(settings)
    yield f"EOS ids: {', '.join(map(str, eos_token_ids(path)))}" + (
        f"; also stops at {', '.join(map(str, also))}" if also else ""
    )
    prompt, bound = settings.data.max_prompt_tokens, max_model_tokens(path)
    yield (
        f"max model length: {bound} tokens; prompt up to {prompt} + response up to {settings.sampling.max_tokens} = "
        f"{prompt + settings.sampling.max_tokens}"
    )
    if prompt + settings.sampling.max_tokens > bound:
        raise ConfigError(
            f"data.max_prompt_tokens + sampling.max_tokens = {prompt + settings.sampling.max_tokens} exceed the "
            f"model's {bound}; lower one of them"
        )
    for name, section in settings.evaluation.sets.items():
        longest = prompt + (section.max_tokens or 0)
        if longest > bound:
            yield (
                f"{NOTE} data.max_prompt_tokens + evaluation.sets.{name}.max_tokens = {longest} exceed the model's "
                f"{bound}: a response ends there at the latest"
            )
    if settings.rollout.num_replicas:
        check_engine(settings)
        check_cache(settings)


def _adapters(settings: RunSettings, given: LoraSection | None, path: Path, setting: str) -> Iterator[str]:
    """Lines on where the adapters that `setting` names are, and what they are at first, beside the model at `path`;
    none where the file says the one, and they begin with no folder.
    """
    if given is not None and given.target_modules == ALL_LINEAR:
        named = ", ".join(with_modules(given, path, setting).target_modules)
        yield f"adapters: {setting}.target_modules {ALL_LINEAR} are {named}"
    if given is None or given.start is None:
        return
    lora = adapters_to_begin_with(settings, given)
    if lora is None or lora.start is None:
        yield f"adapters: {setting}.start {given.start} is gone; those of the newest checkpoint go on"
        return
    check_start(lora, path, setting)
    yield f"adapters: {setting} begins as those in {lora.start}"


def _check_layout(settings: RunSettings, section: TrainerSection, path: Path, setting: str) -> None:
    """ConfigError when the back end does not compute the model at `path`, or not in this trainer's layout."""
    check_parallel(path, section.parallel, setting)
    if settings.actor.backend == "megatron":
        if section.address is None:
            require_installed()
        check_megatron(path, section.parallel, settings.actor.megatron, section.num_ranks, setting)


def _router_replay(settings: RunSettings) -> str:
    """The line on where the actor's tokens are sent, and what it costs."""
    actor, algorithm, mixture = settings.actor, settings.algorithm, read_mixture(settings.model.path)
    whose = "that sampled them, in every pass of the actor" if actor.router_replay == "r3" else "of the old policy"
    alone = algorithm.num_minibatches * algorithm.num_epochs == 1 and actor.router_replay == "r2"
    return (
        f"router replay {actor.router_replay}: tokens go to the experts {whose}; {mixture.num_layers} layers x "
        f"{mixture.num_chosen} of {mixture.num_experts} experts, {mixture.width} bytes a token in the store"
        + ("; one update per batch is its own old policy, so that nothing is replayed" if alone else "")
        + ("; the critic chooses for itself" if settings.critic is not None else "")
    )


def _fit(settings: RunSettings, tokenizer: ChatTokenizer) -> Iterator[str]:
    """The tokenizer fits every model that reads its ids."""
    sections: dict[str, ReferenceSection | CriticSection] = {
        f"references.{name}.path": section for name, section in settings.references.items()
    }
    if settings.critic is not None:
        sections["critic.path"] = settings.critic
    check_tokenizer(settings.model.path, tokenizer.num_ids)
    for setting, section in sections.items():
        _check_layout(settings, section, section.path or settings.model.path, setting)
        if section.path is not None:
            read_model(section.path, setting)
            check_trainable(section.path, setting)
            check_tokenizer(section.path, tokenizer.num_ids, setting)
            if read_ids_digest(section.path) not in ("", tokenizer.ids_digest):
                raise ConfigError(
                    f"{setting} {section.path} has the tokenizer of another family, and reads the policy's token ids; "
                    "name a model of the policy's family, or, where its embeddings are of the policy's ids, copy "
                    f"tokenizer.json from {settings.model.path}"
                )
    if settings.critic is not None:
        yield from _adapters(settings, settings.critic.lora, settings.critic.path or settings.model.path, "critic.lora")
    known = vocab_size(settings.model.path)
    yield f"tokenizer: ids up to {tokenizer.num_ids - 1}, the model knows {known}"
    if settings.model.chat_template is not None:
        place = "in place of the tokenizer's own" if tokenizer.replaces_template else "the tokenizer has none"
        yield f"chat template: model.chat_template {settings.model.chat_template}, {place}; checkpoints hold it"
    distillation = settings.algorithm.distillation
    if distillation is not None and distillation.top_k is not None and distillation.top_k >= known:
        raise ConfigError(
            f"algorithm.distillation.top_k {distillation.top_k} is not less than the {known} ids of the model; lower it"
        )
    ends = {
        "sampling.stop_token_ids": settings.sampling.stop_token_ids,
        f"model.path {settings.model.path}: eos_token_id": eos_token_ids(settings.model.path),
    }
    for setting, tokens in ends.items():
        unknown = [token for token in tokens if token < 0 or token >= known > 0]
        if unknown:
            raise ConfigError(
                f"{setting} {unknown} are not ids of the model, which knows 0 to {known - 1}; correct them"
            )


def _batches(settings: RunSettings) -> Iterator[str]:
    algorithm, sampling = settings.algorithm, settings.sampling
    rows = algorithm.groups_per_batch * sampling.num_responses
    yield (
        f"batch: {algorithm.groups_per_batch} groups x {sampling.num_responses} responses = {rows} trajectories; "
        f"{algorithm.num_epochs} pass(es) in "
        f"{algorithm.num_minibatches} mini-batches of about {math.ceil(rows / algorithm.num_minibatches)}; "
        f"{settings.run.total_steps * algorithm.num_epochs * algorithm.num_minibatches} optimizer steps in the run"
    )
    for role, optimizer, num_updates in settings.trained_by:
        if optimizer.warmup_steps >= num_updates > 0:
            yield (
                f"{NOTE} {role}.optimizer.warmup_steps {optimizer.warmup_steps} takes all of its {num_updates} "
                f"optimizer steps: the rate never reaches learning_rate {optimizer.learning_rate:g}; shorten it, or "
                "raise run.num_steps"
            )
    yield (
        f"staleness: at most {algorithm.max_staleness} steps; at most "
        f"{(1 + algorithm.max_staleness) * algorithm.groups_per_batch} groups in flight"
    )
    if algorithm.max_staleness and not settings.takes_shifts:
        yield _kept(settings)
    window, letters, failed = (
        settings.controller.failure_window,
        settings.controller.max_dead_letters,
        settings.reward.max_failed_groups,
    )
    yield (
        f"failures: of any {window} groups {failed} may be without a score and {letters} without a rollout that "
        "survives them; one more ends the run"
    )
    yield from _calls(settings)
    yield from explain(settings)
    advantage, solved_at = settings.algorithm.advantage, settings.reward.solved_at
    if isinstance(advantage, PassAtKAdvantage) and solved_at != advantage.solved_at:
        yield (
            f"{NOTE} reward.solved_at {solved_at:g}: accuracy, filters and the curriculum go by it, and "
            f"algorithm.advantage pass_at_k takes a response for right from {advantage.solved_at:g} on"
        )


def _calls(settings: RunSettings) -> Iterator[str]:
    for name, component in settings.reward.components.items():
        server = component.server
        if server is not None:
            yield (
                f"reward.components.{name}: at most {server.max_calls} calls at a time of {server.address}, of at most "
                f"{component.timeout_s:g} s (scorer.num_calls, timeout_s)"
            )


def _kept(settings: RunSettings) -> str:
    """Returns what a publish does with responses in flight, and at most how much is computed again for it."""
    rollout, algorithm = settings.rollout, settings.algorithm
    most = algorithm.max_staleness * algorithm.groups_per_batch * settings.responses_per_group
    if rollout.num_replicas:
        most = min(most, rollout.num_replicas * rollout.max_num_seqs)
    match rollout.pause_mode:
        case "keep":
            does = (
                f"keep their tokens, up to {most * settings.max_row_tokens:,}, whose keys and values are computed again"
            )
        case "keep_cache":
            does = "keep their tokens, with the keys and values of the weights before"
        case "wait":
            does = "end first"
        case "abort":
            does = "begin again"
    return f"at a publish: responses in flight, up to {most}, {does} (rollout.pause_mode {rollout.pause_mode})"


def _functions(settings: RunSettings) -> Iterator[str]:
    """A policy loss of the user's is not looked at: it imports torch, and the actor loads it first of all."""
    if isinstance(settings.algorithm.advantage, CustomAdvantage):
        load_advantage(settings.algorithm.advantage)
        yield f"algorithm.advantage.function: {settings.algorithm.advantage.name} is found and takes its options"
    yield from require_trackers(settings.trackers)


def _judges(settings: RunSettings) -> Iterator[str]:
    """Notes on judges that compare responses in one conversation where each episode may have its own: whether one has
    several turns is seen only when it is played.
    """
    if settings.environment is None or settings.environment.max_turns == 1:
        return
    for name, component in settings.reward.components.items():
        scorer = component.scorer
        if not isinstance(scorer, ExternalScorer) or scorer.rubric is None or scorer.asked.scope == "item":
            continue
        if shown := sorted(scorer.asked.variables & {"prompt", "messages"}):
            yield (
                f"{NOTE} reward.components.{name}.scorer.rubric: scope group shows {', '.join(shown)} of one "
                "conversation, and a group whose episodes' conversations differ, as after several turns, fails with "
                "INVALID_INPUT; use scope item, or a function of scope group, or set environment.max_turns to 1 where "
                "no episode has more"
            )


def _placement(settings: RunSettings) -> Iterator[str]:
    trainers: dict[str, TrainerSection] = {"actor": settings.actor}
    trainers |= {"critic": settings.critic} if settings.critic else {}
    trainers |= {f"references.{name}": section for name, section in settings.references.items()}
    placed = [
        (name, section.devices, section.num_ranks) for name, section in trainers.items() if section.address is None
    ]
    placed += [
        (f"rollout-{i}", devices, settings.rollout.workers_per_replica)
        for i, devices in enumerate(settings.rollout.local_devices)
    ]
    for name, section in trainers.items():
        if section.address is not None and section.devices and section.num_ranks % len(section.devices):
            raise ConfigError(
                f"{name} has {len(section.devices)} GPUs on each of its machines for {section.num_ranks} ranks; "
                "give one each"
            )
    if not any(devices for _, devices, _ in placed):
        yield f"placement: all on CPUs, {len(os.sched_getaffinity(0))} cores"
        return
    yield "placement: " + ", ".join(
        f"{name} on {'GPU ' + ' '.join(map(str, devices)) if devices else 'CPU'}" for name, devices, _ in placed
    )
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for name, devices, num_ranks in placed:
        if devices and len(devices) != num_ranks:
            raise ConfigError(f"{name} has {len(devices)} GPUs for {num_ranks} ranks; give one each")
        require_visible(devices, name)
        if any(device >= present for device in devices):
            raise ConfigError(f"{name} names GPU {max(devices)}; this machine has {present}")


def _deadlines(settings: RunSettings) -> Iterator[str]:
    """The lines on the deadlines that the file leaves out."""
    for deadline in settings.derived_deadlines:
        yield f"{deadline.setting}: {deadline.seconds:g} s, derived: {deadline.why}"
