"""Sizes that depend on what is run: derived here, and nowhere else, where the file leaves them out.

    sections, derived = derive_sizes(settings)     # the sections of a run; `rolecall check` prints them
    actor, derived = derive_sft_sizes(actor, model, max_tokens, share)    # the same of a fine-tuning

A section's default is right for small models and short responses, and is the least. Every role derives the same from
the same file and the model's config.json, so nothing is asked of the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rolecall.columns import OLD_ROUTED_EXPERTS, ROUTED_EXPERTS, TOPK_IDS, TOPK_LOGPROBS, row_bytes
from rolecall.settings.data import Dtype, ModelSection
from rolecall.settings.run_sections import RunSections
from rolecall.settings.section import Section
from rolecall.settings.services import STORE_SHARE
from rolecall.settings.sizes.activations import activations, tower_activations
from rolecall.settings.trainers import ActorSection, TrainerSection

_Sized = TypeVar("_Sized", bound=Section)
_Trainer = TypeVar("_Trainer", bound=TrainerSection)

KEPT_BYTES = 32 * 2**30
"""Activations of a microbatch that a GPU is taken to have room for: two fifths of one of 80 GB."""
ROOMY_STORE_BYTES = 8 * 2**30
"""Most that the store of a run on GPUs takes beyond what it must."""
PROMPT_BYTES = 2**17
"""Bytes that a prompt takes of a group besides its tokens; of larger ones `rolecall check` says what to set."""


@dataclass(frozen=True)
class DerivedSize:
    """One that the file leaves out."""

    setting: str
    """The name of the setting in the file."""
    value: int | bool
    why: str
    """How it was derived."""


def derive_sizes(settings: RunSections) -> tuple[dict[str, Any], tuple[DerivedSize, ...]]:
    """The sections of `settings` with all sizes that are not set and not the default, by name, and what these are."""
    derivation, longest = _Derivation(), settings.conversation_tokens
    rows = settings.max_row_tokens if settings.algorithm.sees_trajectories else 0
    actor = derivation.budget(settings.actor, "actor", max(longest, rows))
    sections: dict[str, Any] = {}
    if settings.critic is not None:
        sections["critic"] = derivation.budget(settings.critic, "critic", longest)
    sections["references"] = {
        name: derivation.budget(section, f"references.{name}", longest) for name, section in settings.references.items()
    }
    share = settings.trained_image_share
    trained = [_Trained(actor, settings.model.path, 0.0 if actor.lora else share)]
    if settings.critic is not None:
        critic, path = sections["critic"], settings.critic.path or settings.model.path
        trained.append(_Trained(critic, path, 0.0 if settings.critic.lora else share))
    sections["actor"] = derivation.recomputation(actor, settings.model.dtype, trained)
    sections["store"] = derivation.sized(settings.store, "store", "max_bytes", *_store_bytes(settings))
    return sections, tuple(derivation.derived)


def derive_sft_sizes(
    actor: ActorSection, model: ModelSection, max_tokens: int, image_share: float
) -> tuple[ActorSection, tuple[DerivedSize, ...]]:
    """`actor`, which fine-tunes `model` on examples of at most `max_tokens`, with all sizes that are not set and not
    the default, and what these are. `image_share`: trained_image_share.
    """
    derivation = _Derivation()
    actor = derivation.budget(actor, "actor", max_tokens, "data.max_tokens")
    trained = [_Trained(actor, model.path, 0.0 if actor.lora else image_share)]
    actor = derivation.recomputation(actor, model.dtype, trained)
    return actor, tuple(derivation.derived)


class _Derivation:
    """The sizes that are derived of a file, one after the other."""

    def __init__(self) -> None:
        self.derived: list[DerivedSize] = []

    def sized(self, section: _Sized, name: str, field: str, value: int | bool, why: str) -> _Sized:
        """`section`, of this name, with `value` where the file sets none."""
        if field in section.model_fields_set or value == getattr(section, field):
            return section
        self.derived.append(DerivedSize(f"{name}.{field}", value, why))
        return section.model_copy(update={field: value})

    def budget(self, section: _Trainer, name: str, least: int, of: str = "the longest trajectory") -> _Trainer:
        """`section` with a token_budget for `least` tokens, which are those `of` something."""
        why = f"{of}; at least {section.token_budget}"
        return self.sized(section, name, "token_budget", max(section.token_budget, least), why)

    def recomputation(self, actor: ActorSection, dtype: Dtype, trained: Sequence["_Trained"]) -> ActorSection:
        """`actor` with gradient_checkpointing where one of the `trained` models would keep too much without it."""
        kept = 0.0 if actor.activation_offload else _kept_bytes(dtype, trained)
        why = f"without it a microbatch keeps about {kept / 2**30:,.0f} GiB of activations on a rank"
        return self.sized(actor, "actor", "gradient_checkpointing", kept > KEPT_BYTES, why)


@dataclass(frozen=True)
class _Trained:
    """A model that is trained, and by which section."""

    section: TrainerSection
    path: Path
    image_share: float
    """Most of a microbatch's tokens of which a tower keeps something, as a share."""


def _kept_bytes(dtype: Dtype, trained: Sequence[_Trained]) -> float:
    """Activations of the fullest rank that trains on a GPU, were none computed again. Of a pipeline that is the first
    stage, which holds as many microbatches as there are stages.
    """
    size = 4 if dtype == "float32" else 2
    kept = [0.0]
    for each in trained:
        section, layout = each.section, each.section.parallel
        found = activations(each.path, size, layout.tensor) if section.devices else None
        if found is not None:
            tower = tower_activations(each.path, size) if each.image_share else None
            per_image = each.image_share * tower.per_token(recomputed=False) if tower is not None else 0.0
            kept.append((found.per_token(recomputed=False) + per_image) * section.token_budget / layout.sequence)
    return max(kept)


def _store_bytes(settings: RunSections) -> tuple[int, str]:
    """Bytes for the batches that must exist at the same time, and on GPUs for those until a checkpoint, with why."""
    algorithm, given = settings.algorithm, settings.store.max_bytes
    if settings.store.url is not None:
        return given, ""  # of a server that is somebody's, whose memory is what it is
    distillation = algorithm.distillation
    top_k = (distillation.top_k or 0) if distillation is not None else 0
    # routing and images may take many times what all else does: that memory is for whoever wants them to grant
    widths = {TOPK_IDS: top_k, TOPK_LOGPROBS: top_k, ROUTED_EXPERTS: 0, OLD_ROUTED_EXPERTS: 0}
    row = row_bytes(settings.max_row_tokens, settings.columns, widths)
    batch = algorithm.groups_per_batch * (settings.responses_per_group * row + PROMPT_BYTES) / STORE_SHARE
    num_batches = algorithm.max_staleness + 2
    # trained rows may take half of it before a checkpoint is made out of turn
    least, roomy = num_batches * batch, 2 * settings.run.checkpoint_every_steps * batch
    if not settings.actor.devices:
        return max(given, int(least)), f"{num_batches} batches at their longest; at least {given} bytes"
    why = f"{num_batches} batches at their longest, and up to {ROOMY_STORE_BYTES} bytes for those until a checkpoint"
    return max(given, int(least), min(int(roomy), ROOMY_STORE_BYTES)), why
