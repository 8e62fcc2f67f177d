"""`rolecall check`: what a configuration means on this machine, a line per derived value, without starting anything.

Reads the model's JSON and safetensors headers, the tokenizer and the datasets, and looks around, by the files beside
this one; imports no torch and no service. What is wrong is collected, so that one run of the command shows everything;
`rolecall train` and `rolecall sft` refuse to start anything while there is something. Estimates say that they are.
"""

import io
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from rolecall.algorithms.advantages.custom import load as load_advantage
from rolecall.commands.check.capacity import check_capacity, require_gpus
from rolecall.commands.check.explain import explain
from rolecall.commands.check.fine_tuning import examples, trained_model
from rolecall.commands.check.footprint import host_memory, memory_and_disk
from rolecall.commands.check.gpus import cache
from rolecall.commands.check.models import policy_model, tokenizer_and_models
from rolecall.commands.check.preflight import NOTE, preflight
from rolecall.commands.check.prompts import all_prompts
from rolecall.commands.check.servers import model_servers
from rolecall.data.model.files import ModelFacts, read_model
from rolecall.data.shift_plan import gpu_memory_bytes
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment.checks import explain_environments
from rolecall.errors import ConfigError, RoleCallError
from rolecall.identity import newest_checkpoint
from rolecall.launcher.run_dir import holds_a_run, require_folders
from rolecall.settings import (
    CustomAdvantage,
    ExternalScorer,
    PassAtKAdvantage,
    RunSettings,
    SftSettings,
    TrainerSection,
    may_meet,
)
from rolecall.shifts import file_system_of
from rolecall.trackers import require as require_trackers


def check(settings: RunSettings | SftSettings, out: TextIO) -> int:
    """Writes a line per finding to `out`; 0 when everything fits, 2 when something does not."""
    problems = find_problems(settings, out, partial(_tell, out))
    for problem in problems:
        out.write(f"PROBLEM  {problem}\n")
    out.write(
        "ok: nothing was started\n"
        if not problems
        else f"{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started\n"
    )
    return 2 if problems else 0


def require(settings: RunSettings | SftSettings, out: TextIO) -> None:
    """Makes the checks of `rolecall train`, or of `rolecall sft`, before it starts anything. ConfigError lists
    everything that is wrong; what else is worth telling goes to `out`.
    """
    found = io.StringIO()
    problems = find_problems(settings, found, partial(_tell, out))
    out.writelines(line for line in found.getvalue().splitlines(keepends=True) if line.startswith(NOTE))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problems; nothing was started:", *problems]))


def find_problems(
    settings: RunSettings | SftSettings, out: TextIO, tell: Callable[[str], None] = lambda what: None
) -> list[str]:
    """Everything that is wrong, a sentence each; what is well is written to `out`. `tell` is called with what is read
    by then where there is much. Examples of a fine-tuning are read where nothing else is wrong: it may take minutes.
    """
    problems: list[str] = []
    found: dict[str, Any] = {}
    model = settings.model
    for name, read in (("facts", lambda: read_model(model.path)), ("tokenizer", lambda: ChatTokenizer.of(model))):
        try:
            found[name] = read()
        except RoleCallError as error:
            problems.append(error.message)
        if not model.path.is_dir():
            break  # said once
    facts: ModelFacts | None = found.get("facts")
    tokenizer: ChatTokenizer | None = found.get("tokenizer")
    if isinstance(settings, RunSettings):
        sections = _sections_of_run(settings, facts, tokenizer, tell)
    else:
        sections = _sections_of_sft(settings, facts, tokenizer)
    for section in sections:
        _collect(section, out, problems)
    if isinstance(settings, SftSettings) and tokenizer is not None and not problems:
        _collect(examples(settings, tokenizer, tell), out, problems)
    return list(dict.fromkeys(problems))


def _sections_of_run(
    settings: RunSettings, facts: ModelFacts | None, tokenizer: ChatTokenizer | None, tell: Callable[[str], None]
) -> list[Iterator[str]]:
    sections = [
        _run(settings),
        *all_prompts(settings, tokenizer, tell),
        _batches(settings),
        _functions(settings),
        _judges(settings),
    ]
    if facts is not None:
        sections += [policy_model(settings, facts), memory_and_disk(settings, facts), host_memory(settings, facts)]
        sections.append(cache(settings, facts))
        sections.append(check_capacity(settings, facts))
        sections += [tokenizer_and_models(settings, tokenizer)] if tokenizer is not None else []
    if tokenizer is not None:
        sections.append(explain_environments(settings, tokenizer))
    return [
        *sections,
        *model_servers(settings),
        _placement(settings),
        _shifts(settings),
        _derived(settings),
        *preflight(settings),
    ]


def _sections_of_sft(
    settings: SftSettings, facts: ModelFacts | None, tokenizer: ChatTokenizer | None
) -> list[Iterator[str]]:
    sections = [_run(settings), require_trackers(settings.trackers)]
    if facts is not None:
        sections += [trained_model(settings, facts, tokenizer)] if tokenizer is not None else []
        sections += [memory_and_disk(settings, facts), host_memory(settings, facts), check_capacity(settings, facts)]
    return [*sections, _placement(settings), _derived(settings)]


def _tell(out: TextIO, what: str) -> None:
    out.write(f"reading {what}\n")
    out.flush()  # it takes minutes


def _collect(lines: Iterator[str], out: TextIO, problems: list[str]) -> None:
    try:
        for line in lines:
            out.write(line + "\n")
    except RoleCallError as error:
        problems.append(error.message)


def _run(settings: RunSettings | SftSettings) -> Iterator[str]:
    require_folders(settings.run)
    command = "train" if isinstance(settings, RunSettings) else "sft"
    directory = settings.run.dir
    used = directory.is_dir() and any(directory.iterdir())
    state = (
        "is new"
        if not used
        else f"holds a run: {command} needs --resume or another run.dir"
        if holds_a_run(directory)
        else "holds nothing that was trained"
    )
    run = settings.run
    length = f"{run.num_steps} steps" if run.num_steps is not None else f"{run.num_epochs} epoch(s)"
    yield f"run {run.name}: {length}, seed {run.seed}, directory {directory} ({state})"
    if settings.run.checkpoint_url is not None:
        newest = newest_checkpoint(settings)
        held = (
            f"those of a run to step {newest.step}: {command} needs --resume or another place" if newest else "none yet"
        )
        yield f"checkpoints: run.checkpoint_url {settings.run.checkpoint_url} holds {held}"
    if isinstance(settings, RunSettings) and settings.run.deterministic:
        how = "by batch-invariant kernels" if settings.rollout.devices else "one at a time, some ten times slower"
        yield f"deterministic: rollouts compute responses {how}; the same machine gives the same weights again"


def _batches(settings: RunSettings) -> Iterator[str]:
    algorithm, sampling = settings.algorithm, settings.sampling
    rows = algorithm.groups_per_batch * sampling.num_responses
    yield (
        f"batch: {algorithm.groups_per_batch} groups x {sampling.num_responses} responses = {rows} trajectories; "
        f"{algorithm.num_epochs} pass(es) in "
        f"{algorithm.num_minibatches} mini-batches of about {math.ceil(rows / algorithm.num_minibatches)}; "
        f"{settings.num_policy_updates} optimizer steps of the policy in the run"
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
    if algorithm.max_staleness:
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
    for name, component in settings.reward.placed_components.items():
        server = component.server
        if server is not None and server.address:  # servers of the run have lines of their own
            yield (
                f"reward.components.{name}: at most {server.max_calls} calls at a time of {server.address}, of at most "
                f"{component.timeout_s:g} s (scorer.num_calls, timeout_s)"
            )


def _kept(settings: RunSettings) -> str:
    """Returns what a publish, or a shift, does with responses in flight, and how much is computed again at most."""
    rollout, algorithm = settings.rollout, settings.algorithm
    most = algorithm.max_staleness * algorithm.groups_per_batch * settings.responses_per_group
    if rollout.num_replicas:
        most = min(most, rollout.num_replicas * rollout.max_num_seqs)
    if settings.takes_shifts and not settings.keeps_over_shifts:
        return "between shifts: nothing is in flight; all that was begun ends before the rollouts sleep"
    match "keep" if settings.takes_shifts else rollout.pause_mode:
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
    when = "between shifts" if settings.takes_shifts else "at a publish"
    return f"{when}: responses in flight, up to {most}, {does} (rollout.pause_mode {rollout.pause_mode})"


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
    environments = {name: section for name, section in settings.environments.items() if section.max_turns > 1}
    for name, component in settings.reward.components.items():
        scorer = component.scorer
        if not isinstance(scorer, ExternalScorer) or scorer.rubric is None or scorer.asked.scope == "item":
            continue
        judged = [name for name, section in environments.items() if may_meet(section.when, component.when)]
        if not judged:
            continue
        if shown := sorted(scorer.asked.variables & {"prompt", "messages"}):
            yield (
                f"{NOTE} reward.components.{name}.scorer.rubric: scope group shows {', '.join(shown)} of one "
                "conversation, and a group whose episodes' conversations differ, as after several turns, fails with "
                "INVALID_INPUT; use scope item, or a function of scope group, or set max_turns to 1 where no episode "
                f"has more (environments {', '.join(judged)})"
            )


def _shifts(settings: RunSettings) -> Iterator[str]:
    """The line on what roles that take shifts on several machines share. ConfigError where they do not."""
    settings.require_same_gpus()
    if settings.takes_shifts_apart:
        yield (
            "shifts: actor and rollouts take turns on the GPUs of their machines by locks in run.dir, which all of "
            "them must have mounted from one file system with locks that hold between them; here it is on "
            f"{file_system_of(settings.run.dir)}"
        )


def _placement(settings: RunSettings | SftSettings) -> Iterator[str]:
    trainers: dict[str, TrainerSection] = {"actor": settings.actor}
    others: list[tuple[str, tuple[int, ...], int]] = []
    if isinstance(settings, RunSettings):
        trainers |= {"critic": settings.critic} if settings.critic else {}
        trainers |= {f"references.{name}": section for name, section in settings.references.items()}
        others += [
            (f"rollout-{i}", devices, settings.rollout.workers_per_replica)
            for i, devices in enumerate(settings.rollout.local_devices)
        ]
        others += [
            (f"reward.servers.{name}", section.gpus, section.num_workers)
            for name, section in settings.reward.servers.items()
            if section.address is None
        ]
    placed = [
        (name, section.devices, section.num_ranks) for name, section in trainers.items() if section.address is None
    ]
    placed += others
    for name, section in trainers.items():
        if section.address is not None and section.devices and section.num_ranks % len(section.devices):
            raise ConfigError(
                f"{name} has {len(section.devices)} GPUs on each of its machines for {section.num_ranks} ranks; "
                "give one each"
            )
    if not any(devices for _, devices, _ in placed):
        yield f"placement: all on CPUs, {len(os.sched_getaffinity(0))} cores"
        if placed and (num_gpus := len(gpu_memory_bytes())):
            yield (
                f"{NOTE} no role here has devices, so that none computes on the GPUs of this machine, which has "
                f"{num_gpus}; give actor.devices, and in a run rollout.devices, the numbers of some"
            )
        return
    yield "placement: " + ", ".join(
        f"{name} on {'GPU ' + ' '.join(map(str, devices)) if devices else 'CPU'}" for name, devices, _ in placed
    )
    idle = [name for name, devices, _ in placed if not devices]
    if isinstance(settings, RunSettings) and settings.rollout.num_replicas and not settings.rollout.devices:
        idle.append("rollout")
    if idle:
        yield (
            f"{NOTE} {', '.join(idle)} on CPUs, and those on GPUs wait for what they compute; give "
            f"{', '.join(f'{name}.devices' for name in idle)}"
        )
    for name, devices, num_ranks in placed:
        require_gpus(name, devices, num_ranks)


def _derived(settings: RunSettings | SftSettings) -> Iterator[str]:
    """The lines on the sizes and the deadlines that the file leaves out."""
    for size in settings.derived_sizes:
        yield f"{size.setting}: {str(size.value).lower()}, derived: {size.why}"
    for deadline in settings.derived_deadlines if isinstance(settings, RunSettings) else ():
        yield f"{deadline.setting}: {deadline.seconds:g} s, derived: {deadline.why}"
