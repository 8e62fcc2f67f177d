"""The preparation of a batch: from the rows of its groups to what is sealed and written to them.

Shaped rewards, advantages, loss masks, coefficients and the digest of it all. Pure: whoever prepares a batch again gets
the same bits. assembly.py says which groups a batch has; the numbers are those of rolecall/algorithms.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice

import numpy as np

from rolecall.algorithms import control
from rolecall.algorithms.advantages import ScoredBatch, estimate
from rolecall.algorithms.distillation import distil
from rolecall.algorithms.shaping import (
    Moments,
    clip_rewards,
    kl_estimate,
    penalise_kl,
    place_rewards,
    shape_rewards,
    trained_mask,
)
from rolecall.columns import TEACHER, reference_column
from rolecall.errors import BatchMismatchError
from rolecall.settings import AlgorithmSection, DistillationSection, RunSettings
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.controller.groups.assembly import ScoredGroup
from services.controller.step.adaptive import AdaptiveState


def policy_column(algorithm: AlgorithmSection) -> str:
    """The policy's logprobs that the KL in the reward and distillation as an advantage compare with a reference's.

    The old policy's, from the kernels that the reference has, too: where both hold the same weights the KL is 0, which
    the sampler's would miss by what engines differ in. Where nothing is compared, and where the sampler stands for the
    old policy: the sampler's, which cost no pass.
    """
    kl, distillation = algorithm.kl, algorithm.distillation
    compared = (kl is not None and kl.placement == "reward") or (
        distillation is not None and distillation.placement == "advantage"
    )
    return "old_logprobs" if compared and not algorithm.sampler_is_old else "rollout_logprobs"


def columns_computed(algorithm: AlgorithmSection) -> tuple[str, ...]:
    """Columns that a trainer computes before `prepare`, or a scorer gave, where something reads them."""
    compared = policy_column(algorithm)
    return tuple(dict.fromkeys([*algorithm.advantage.needs, *([compared] if compared == "old_logprobs" else [])]))


def columns_read(settings: RunSettings) -> tuple[str, ...]:
    """Columns that `prepare` reads of every row of a batch."""
    columns = list(columns_reported(settings))
    columns += [name for name in columns_computed(settings.algorithm) if name not in (*columns, *OPTIONAL_COLUMNS)]
    if settings.algorithm.kl is not None and settings.algorithm.kl.placement == "reward":
        columns.append(reference_column(settings.algorithm.kl.reference))
    return tuple(columns)


def columns_reported(settings: RunSettings) -> tuple[str, ...]:
    """The columns among them that measures.of_batch reads, too."""
    sampled = ("token_ids", "response_mask", "rollout_logprobs")
    return sampled if settings.algorithm.distillation is None else (*sampled, reference_column(TEACHER))


GREEDY_COLUMNS = ("response_mask",)
"""Columns that `prepare` reads of greedy responses."""

OPTIONAL_COLUMNS = ("token_rewards",)
"""Columns that `prepare` uses where a scorer gave them."""


def prepare(
    settings: RunSettings,
    step: int,
    groups: Sequence[ScoredGroup],
    rows: Sequence[Mapping[str, Array]],
    greedy_rows: Sequence[Mapping[str, Array]] = (),
    state: AdaptiveState | None = None,
) -> tuple[trajectory_pb2.TrainBatch, list[dict[str, Array]]]:
    """The batch to seal, and for each row the columns to write: loss_mask, advantages and, for a critic, returns.

    `rows` are the groups' rows in order, with `columns_read`; `greedy_rows` those of their greedy responses, with
    GREEDY_COLUMNS, where the estimator wants them; `state` what earlier steps left (absent: nothing). A pure function
    of these and the settings: whoever prepares the batch again gets the same bits. The order: raw reward, clipped,
    normalised, less the overlong punishment (shaping.py), on the last sampled token, with the scorer's token rewards,
    less the KL where that is in the reward; then advantages. loss_mask: response_mask, without truncated responses
    where those are masked.
    """
    algorithm, state = settings.algorithm, state or AdaptiveState.start(settings.algorithm)
    truncated = [bool(flag) for group in groups for flag in group.truncated_G]
    masks = [row["response_mask"] for row in rows]
    loss_masks = [trained_mask(algorithm.shaping, mask, cut) for mask, cut in zip(masks, truncated, strict=True)]
    raw_B = np.concatenate([group.rewards_G for group in groups])
    moments, statistics = _moments(settings, raw_B, state)
    rewards = _less_kl(settings, rows, _placed_rewards(settings, raw_B, rows, moments), state, statistics)
    batch = ScoredBatch.of_rows(
        gids=[group.gid for group in groups for _ in group.rows],
        rewards=rewards,
        response_masks=masks,
        loss_masks=loss_masks,
        columns=_columns_needed(settings, rows, truncated),
        components=_components(groups),
        component_weights={name: component.weight for name, component in settings.reward.components.items()},
        greedy_rewards=_greedy_rewards(settings, groups, greedy_rows, moments)
        if algorithm.wants_greedy_response
        else None,
    )
    result = estimate(algorithm.advantage, replace(batch, rewards_N=batch.rewards_N.astype(np.float32)))
    advantages = batch.rows(result.advantages_N)
    if algorithm.distillation is not None:
        advantages = _distilled(algorithm.distillation, policy_column(algorithm), advantages, rows, loss_masks)
    columns = [
        {"loss_mask": mask, "advantages": advantage} for mask, advantage in zip(loss_masks, advantages, strict=True)
    ]
    if result.returns_N is not None and settings.critic is not None:
        for column, returns in zip(columns, batch.rows(result.returns_N), strict=True):
            column["returns"] = returns
    train_batch = _train_batch(settings, step, groups, rows, state, statistics)
    train_batch.tokens.extend(_tokens(groups, masks, loss_masks))
    train_batch.digest = _digest(train_batch, rows, raw_B, columns)
    return train_batch, columns


def _train_batch(
    settings: RunSettings,
    step: int,
    groups: Sequence[ScoredGroup],
    rows: Sequence[Mapping[str, Array]],
    state: AdaptiveState,
    statistics: trajectory_pb2.BatchStatistics,
) -> trajectory_pb2.TrainBatch:
    """The batch by its rows, and how it is trained on; without its counts of tokens and its digest."""
    return trajectory_pb2.TrainBatch(
        step=step,
        rows=[ref for group in groups for ref in group.rows],
        gids=[group.gid for group in groups],
        coefficients=control.coefficients(settings.algorithm, state.control),
        statistics=statistics,
        critic_only=settings.critic is not None and step < settings.critic.warmup_steps,
        columns=[
            column.name
            for column in settings.columns
            if column.name not in OPTIONAL_COLUMNS or all(column.name in row for row in rows)
        ],
        greedy_rows=[group.greedy.row for group in groups if group.greedy is not None],
    )


def _tokens(
    groups: Sequence[ScoredGroup], masks: Sequence[Array], loss_masks: Sequence[Array]
) -> Iterator[trajectory_pb2.GroupTokens]:
    """The tokens that the rows of each group bring to training."""
    pairs = zip(masks, loss_masks, strict=True)
    for group in groups:
        own = [(np.count_nonzero(mask), np.count_nonzero(trained)) for mask, trained in islice(pairs, len(group.rows))]
        sampled, trained = np.sum(own, axis=0).tolist()
        yield trajectory_pb2.GroupTokens(num_sampled=sampled, num_trained=trained)


def _moments(
    settings: RunSettings, raw_B: Array, state: AdaptiveState
) -> tuple[Moments, trajectory_pb2.BatchStatistics]:
    """The moments that rewards are normalised by, and the batch's own share of them where they are carried on."""
    shaping = settings.algorithm.shaping
    moments, statistics = Moments.of(clip_rewards(shaping, raw_B.astype(np.float64))), trajectory_pb2.BatchStatistics()
    if shaping.normalize == "running":
        statistics.rewards.CopyFrom(trajectory_pb2.Moments(**asdict(moments)))
        moments = state.rewards.merged(moments)
    return moments, statistics


def _less_kl(
    settings: RunSettings,
    rows: Sequence[Mapping[str, Array]],
    rewards: list[Array],
    state: AdaptiveState,
    statistics: trajectory_pb2.BatchStatistics,
) -> list[Array]:
    """`rewards` less the KL where that is in the reward; `statistics` gets its mean."""
    kl = settings.algorithm.kl
    if kl is None or kl.placement != "reward":
        return rewards
    policy = policy_column(settings.algorithm)
    columns = [(row[policy], row[reference_column(kl.reference)], row["response_mask"]) for row in rows]
    statistics.kl = float(
        np.concatenate(
            [kl_estimate(old, reference, kl.estimator)[mask != 0] for old, reference, mask in columns]
        ).mean()
    )
    return [
        penalise_kl(reward, *column, state.control.kl_coef, kl.estimator)
        for reward, column in zip(rewards, columns, strict=True)
    ]


def _columns_needed(
    settings: RunSettings, rows: Sequence[Mapping[str, Array]], truncated: Sequence[bool]
) -> dict[str, list[Array]]:
    """The columns that the estimator reads beside rewards and masks, where every row has them; a response that stopped
    bootstraps from 0.
    """
    columns = {
        name: [row[name] for row in rows]
        for name in settings.algorithm.advantage.needs
        if all(name in row for row in rows)
    }
    if "bootstrap_value" in columns:
        columns["bootstrap_value"] = [
            value * cut for value, cut in zip(columns["bootstrap_value"], truncated, strict=True)
        ]
    return columns


def _distilled(
    section: DistillationSection,
    policy: str,
    advantages: list[Array],
    rows: Sequence[Mapping[str, Array]],
    loss_masks: Sequence[Array],
) -> list[Array]:
    coef = section.coef if section.placement == "advantage" else 0.0
    known, taught = [row[policy] for row in rows], [row[reference_column(TEACHER)] for row in rows]
    return distil(
        advantages,
        known,
        taught,
        loss_masks,
        coef=coef,
        task_coef=section.task_coef,
        max_log_ratio=section.max_log_ratio,
    )


def _placed_rewards(
    settings: RunSettings, raw_B: Array, rows: Sequence[Mapping[str, Array]], moments: Moments
) -> list[Array]:
    """B arrays float64 [T]: shaped, on their tokens."""
    num_tokens_B = np.array([int(row["response_mask"].sum()) for row in rows])
    shaped_B = shape_rewards(
        settings.algorithm.shaping, raw_B.astype(np.float64), num_tokens_B, moments, settings.sampling.max_tokens
    )
    return [
        place_rewards(float(reward), row["response_mask"], row.get("token_rewards"))
        for reward, row in zip(shaped_B, rows, strict=True)
    ]


def _components(groups: Sequence[ScoredGroup]) -> dict[str, Array]:
    """float32 [B] by name, NaN where a component does not apply."""
    names = sorted(set().union(*(group.components for group in groups)))
    absent = [np.full(len(group.rows), np.nan, np.float32) for group in groups]
    return {
        name: np.concatenate([group.components.get(name, gap) for group, gap in zip(groups, absent, strict=True)])
        for name in names
    }


def _greedy_rewards(
    settings: RunSettings, groups: Sequence[ScoredGroup], greedy_rows: Sequence[Mapping[str, Array]], moments: Moments
) -> Array:
    """float32 [B]: for each trajectory, all that the greedy response to its prompt earned, shaped as the others'.
    BatchMismatchError when a group has none, which a batch that is not sealed never has.
    """
    raw_B = np.array([group.greedy.reward for group in groups if group.greedy is not None], np.float32)
    if len(raw_B) < len(groups):
        raise BatchMismatchError("groups of the batch were sampled for another estimator, without a greedy response")
    totals = [rewards_T.sum() for rewards_T in _placed_rewards(settings, raw_B, greedy_rows, moments)]
    return np.repeat(np.array(totals, np.float32), [len(group.rows) for group in groups])


def _digest(
    batch: trajectory_pb2.TrainBatch,
    rows: Sequence[Mapping[str, Array]],
    raw_B: Array,
    columns: Sequence[Mapping[str, Array]],
) -> str:
    """The digest over ids, attempts, order, coefficients, who learns of it and the bits of what the controller read and
    computed. What only a trainer reads of a row is not in it: the attempt's token stands for that.
    """
    state = hashlib.blake2b(digest_size=16)
    state.update(
        f"{batch.coefficients.kl_coef!r} {batch.coefficients.entropy_coef!r}{' critic' * batch.critic_only}".encode()
    )
    for index, (ref, row, column) in enumerate(zip(batch.rows, rows, columns, strict=True)):
        state.update(f"{ref.id}:{ref.token}".encode())
        read = {**row, "reward": raw_B[index : index + 1]}
        for name, array in [*sorted(read.items()), *sorted(column.items())]:
            state.update(name.encode())
            state.update(array.tobytes())
    return state.hexdigest()
