"""Deadlines that depend on what is run: derived here, and nowhere else, for every one that the file leaves out.

    derived = derive(settings)               # the sections of a run; `rolecall check` prints them
    filled_in(settings, derived)             # its sections with them

A deadline ends work that will never end; it must not end work that is slow. What it bounds is estimated from the
model's files, the lengths and the devices at rates that a healthy machine exceeds many times over, and a section's
default, right for small models on CPUs, is the least. Work that hangs is found long before by `hang_s`, the time
without any progress.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.settings.run_sections import RunSections
from rolecall.settings.section import Section
from rolecall.settings.sizes.activations import activations
from rolecall.settings.sizes.loading import CPU_START_S, DISK_BYTES_PER_S, GPU_START_S, loading_s, model_bytes
from rolecall.settings.trainers import TrainerSection

TOKENS_PER_S = 2.0
"""Rate of one response: a twentieth of a GPU's rate under load.

So it is where the KV cache holds a twentieth of what is sampled at a time.
"""
TURN_S = 30.0
"""Answer of an environment to a turn: the deadline of one that names none (rolecall/environment/client.py)."""
WIRE_BYTES_PER_S = 100e6
"""Rate of a publish: half of Gloo's over a wire of 10 Gbit/s, of which the root sends six copies."""
FLOPS_PER_S = {"CPUs": 2e10, "GPUs": 2e13}
"""Rate of one rank of a trainer: an old core's; a fiftieth of an H100's bfloat16 peak."""
FILE_BYTES_PER_PARAMETER = 2
"""Bytes per parameter in a model directory. A float32 one is taken for twice the parameters."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Master weight and two moments."""
PREFILL_TOKENS = 8192
"""Prompt tokens of one step of the sampler, at the least: an engine that is given more keeps its bound."""
PROBED_TOKENS = 2 * 256
"""Tokens of a publish's probe, which each side computes twice (services/controller/publish/probe.py)."""
GPU_HANG_S = 300.0
"""First calls of kernels and communicators, pinning of host memory, and compiling layers, on CPUs too: nothing of it
counts as progress.
"""
GPU_ROLLOUT_HANG_S = 60.0
"""Kernels that are compiled at the first request of their shape."""
NCCL_OPEN_S = 60.0
"""Bootstrap, search of the topology and set-up of connections of tens of ranks."""


@dataclass(frozen=True)
class Deadline:
    """One that the file leaves out."""

    section: str
    """Name of its section."""
    field: str
    seconds: float
    why: str
    """How it was derived."""

    @property
    def setting(self) -> str:
        """The name of the setting in the file."""
        return f"{self.section}.{self.field}"


def derive(settings: RunSections) -> tuple[Deadline, ...]:
    """All that are not set. Looks at the sizes of the model files."""
    derivation = _Derivation(settings)
    derivation.derive()
    return tuple(derivation.derived)


def filled_in(settings: RunSections, derived: Iterable[Deadline]) -> dict[str, Any]:
    """The sections of `settings` with these deadlines, by name."""
    values: dict[str, dict[str, float]] = {}
    for deadline in derived:
        values.setdefault(deadline.section, {})[deadline.field] = deadline.seconds
    sections: dict[str, Any] = {}
    for top, update in values.items():
        section: Section = getattr(settings, top)
        sections[top] = section.model_copy(update=update)
    return sections


def reading_s(settings: RunSections) -> float:
    """The time in which the largest model of a role is read from its disk, by the sizes of the files."""
    return max(_Derivation(settings).sizes.values()) / DISK_BYTES_PER_S


class _Derivation:
    def __init__(self, settings: RunSections) -> None:
        self._settings = settings
        self.derived: list[Deadline] = []
        self._trained: list[tuple[TrainerSection, Path]] = [(settings.actor, settings.model.path)]
        if settings.critic is not None:
            self._trained.append((settings.critic, settings.critic.path or settings.model.path))
        self._trainers = self._trained + [
            (section, section.path or settings.model.path) for section in settings.references.values()
        ]
        self.sizes = {path: model_bytes(path) for _, path in self._trainers}
        """Bytes of the models of the trainers and references, by path."""

    def derive(self) -> None:
        """Derives the deadlines, in an order in which each is known before another is made of it."""
        settings = self._settings
        longest = max(
            [settings.sampling.max_tokens, *(part.max_tokens or 0 for part in settings.evaluation.sets.values())]
        )
        generating_s = longest / TOKENS_PER_S
        turns = max((section.max_turns for section in settings.environments.values()), default=0)
        self._say(
            settings.rollout,
            "rollout",
            "generation_timeout_s",
            600 + generating_s + turns * TURN_S,
            f"600 s and {longest} tokens at {TOKENS_PER_S:g}/s"
            + (f", and {turns} turns of {TURN_S:g} s in an environment" if turns else ""),
        )
        publish_s = self._weights(generating_s)
        self._controller(publish_s)
        self._calls()
        on, base_s = ("GPUs", GPU_ROLLOUT_HANG_S) if self._uses_gpus else ("CPUs", 0.0)
        step_tokens = max(PREFILL_TOKENS, settings.rollout.step_tokens(settings.longest_trajectory))
        prefill_s = 2 * self.sizes[settings.model.path] / FILE_BYTES_PER_PARAMETER * step_tokens / FLOPS_PER_S[on]
        self._say(
            settings.rollout,
            "rollout",
            "hang_s",
            max(base_s, prefill_s),
            f"{on}, {step_tokens} prompt tokens of this model in one step",
        )

    def _weights(self, generating_s: float) -> float:
        weights, rollout = self._settings.weights, self._settings.rollout
        # Rollouts join later: the slower back end to open is assumed of them.
        is_nccl = self._settings.weight_backend(receivers_on_gpus=True) == "nccl"
        num_bytes, on = self.sizes[self._settings.model.path], "GPUs" if self._uses_gpus else "CPUs"
        probe_s = 2 * num_bytes / FILE_BYTES_PER_PARAMETER * PROBED_TOKENS / FLOPS_PER_S[on]
        first = (
            f"ranks that meet{' over NCCL' if is_nccl else ''}, a bucket with its first connections, and "
            f"{PROBED_TOKENS} tokens of the probe on {on}"
        )
        self._say(weights, "weights", "bucket_timeout_s", (NCCL_OPEN_S if is_nccl else 0.0) + probe_s, first)
        waited_s, waiting = (
            (generating_s, ", and responses in flight, which pause_mode wait lets end")
            if rollout.pause_mode == "wait"
            else (0.0, "")
        )
        sent = f"600 s and {_size(num_bytes)} at {WIRE_BYTES_PER_S / 1e6:g} MB/s{waiting}"
        return self._say(weights, "weights", "publish_timeout_s", 600 + num_bytes / WIRE_BYTES_PER_S + waited_s, sent)

    def _controller(self, publish_s: float) -> None:
        settings, servers = self._settings, self._settings.reward.servers.values()
        together = sum((self.sizes | {section.path: model_bytes(section.path) for section in servers}).values())
        on_gpus = self._uses_gpus or any(section.gpus for section in servers)
        base_s, on = (GPU_START_S, "GPUs") if on_gpus else (CPU_START_S, "CPUs")
        read = f"{on}, {base_s:g} s and {_size(together)} of models at {DISK_BYTES_PER_S / 1e6:g} MB/s"
        read_s = loading_s(together, on_gpus=on_gpus)
        if settings.actor.torch_compile and not on_gpus:  # of GPUs it is part of GPU_START_S
            read, read_s = f"{read}, and {GPU_HANG_S:g} s to compile layers", read_s + GPU_HANG_S
        start_s = self._say(settings.controller, "controller", "start_timeout_s", read_s, read)
        longest_s = max(start_s, publish_s)
        self._say(
            settings.controller,
            "controller",
            "stall_timeout_s",
            longest_s,
            "a role that starts again, or one publish, whichever may take longer",
        )

    def _calls(self) -> None:
        """The bounds of every trainer's calls: the longest that any of them may take."""
        actor, settings = self._settings.actor, self._settings
        rows = settings.algorithm.groups_per_batch * settings.responses_per_group
        tokens = rows * settings.max_row_tokens
        passes = [self._pass_s(section, path, tokens / section.num_ranks) for section, path in self._trainers]
        trained = [
            self._pass_s(section, path, tokens / section.num_ranks) * (1 + 3 * settings.algorithm.num_epochs)
            for section, path in self._trained
        ]
        kept = sum(self.sizes[path] for _, path in self._trained) / FILE_BYTES_PER_PARAMETER
        saved_s = CHECKPOINT_BYTES_PER_PARAMETER * kept / DISK_BYTES_PER_S
        microbatches = [
            max(
                GPU_HANG_S if section.devices or actor.torch_compile else 0.0,
                self._pass_s(section, path, section.token_budget / section.parallel.slot_size),
            )
            for section, path in self._trainers
        ]
        among = "" if len(self._trainers) == 1 else ", on the slowest trainer"
        largest = max(self.sizes.values()) / FILE_BYTES_PER_PARAMETER
        rate = f"{largest / 1e9:,.1f}B parameters on {'GPUs' if self._uses_gpus else 'CPUs'}{among}"
        about = f"a batch of {tokens} tokens, {rate}, or a checkpoint"
        self._say(actor, "actor", "train_timeout_s", max(*trained, saved_s), about)
        self._say(actor, "actor", "compute_timeout_s", max(passes), f"a pass over {tokens} tokens, {rate}")
        compiled = ", the first of which compiles layers" if actor.torch_compile else ""
        self._say(actor, "actor", "hang_s", max(microbatches), f"a pass over token_budget, {rate}{compiled}")

    def _pass_s(self, section: TrainerSection, model: Path, tokens_per_rank: float) -> float:
        layers = activations(model, FILE_BYTES_PER_PARAMETER)
        attended = layers.attended * self._settings.max_row_tokens / 2 if layers is not None else 0.0
        flops = (2 * self.sizes[model] / FILE_BYTES_PER_PARAMETER + attended) * tokens_per_rank
        return flops / FLOPS_PER_S["GPUs" if section.devices else "CPUs"]

    @property
    def _uses_gpus(self) -> bool:
        return bool(self._settings.rollout.devices) or any(section.devices for section, _ in self._trainers)

    def _say(self, section: Section, name: str, field: str, seconds: float, why: str) -> float:
        """Returns what the file says; else `seconds`, in whole ones, and at least the section's default."""
        given: float = getattr(section, field)
        if field in section.model_fields_set:
            return given
        deadline = Deadline(name, field, max(given, float(round(seconds))), f"{why}; at least {given:g} s")
        self.derived.append(deadline)
        return deadline.seconds


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
