"""The items that are sent to a scorer: made of trajectories, kept together by group, cut into calls."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rolecall.settings.data import IMAGE_MARK
from rolecall.v1 import reward_pb2, trajectory_pb2
from rolecall.wire import Array, encode_tensor

CHUNK_IMAGE_BYTES = 64 * 2**20
"""Bytes of images that are read at a time for a held-out set, or for a call of whoever scores a file; or of a prompt's
responses where they have more.
"""


def num_shown_in(messages: Iterable[trajectory_pb2.Message]) -> int:
    """Images that messages show."""
    return sum(each.content.count(IMAGE_MARK) - len(each.spelled) for each in messages)


def images_of(meta: trajectory_pb2.TrajectoryMeta, column: trajectory_pb2.Images) -> list[bytes]:
    """The files that the messages of a trajectory's item show, by its row's `column`: those of the prompt, then those
    of the episode's messages, which are of the last segment and may begin anew.
    """
    of_prompt = column.files[: len(column.files) - meta.episode.num_images]
    last = [column.files[at] for at in column.segments[-1].files] if column.segments else column.files
    return [*of_prompt, *last[len(last) - num_shown_in(meta.episode.messages) :]]


def score_item(
    meta: trajectory_pb2.TrajectoryMeta, token_ids: Array, images: Sequence[bytes] = ()
) -> reward_pb2.ScoreItem:
    """The item for the trajectory of `meta`, `token_ids` (int32 [T]) and its `images_of`, with every field;
    RewardClient sends those that the scorer reads. `images` may be left out where no scorer reads them.
    """
    ids = np.ascontiguousarray(token_ids, "<i4")
    response_ids = ids[meta.num_prompt_tokens :]
    if meta.HasField("episode"):
        response_ids = ids[_sampled(meta.episode)]
    item = reward_pb2.ScoreItem(
        id=meta.id,
        messages=[*meta.prompt.messages, *meta.episode.messages],
        response_text=meta.response_text,
        prompt_token_ids=ids[: meta.num_prompt_tokens].tobytes(),
        response_token_ids=response_ids.tobytes(),
        ground_truth=meta.prompt.ground_truth,
        other_ground_truths=meta.prompt.other_ground_truths,
        finish_reason=meta.finish_reason,
        num_response_tokens=len(response_ids),
        group=meta.id.rpartition("/")[0],
        environment=meta.prompt.environment,
    )
    item.images.extend(images)
    if images and len(images) == num_shown_in(meta.episode.messages):  # none is the prompt's
        for message in item.messages[: len(meta.prompt.messages)]:
            message.spelled[:] = range(message.content.count(IMAGE_MARK))
    if meta.prompt.HasField("metadata"):
        item.metadata.CopyFrom(meta.prompt.metadata)
    if meta.HasField("episode") and meta.episode.HasField("reward"):
        item.environment_reward.CopyFrom(_environment_reward(meta.episode))
    return item


def _sampled(episode: trajectory_pb2.Episode) -> Array:
    """Places of the sampled tokens in the trajectory of an episode."""
    return np.concatenate([np.arange(turn.start, turn.end) for turn in episode.turns])


def _environment_reward(episode: trajectory_pb2.Episode) -> reward_pb2.Reward:
    """The reward that an environment gave an episode, as a scorer gives it: what turns earned on their last tokens."""
    reward = reward_pb2.Reward(value=episode.reward.value, components=episode.reward.components)
    if episode.reward.HasField("answer"):
        reward.answer = episode.reward.answer
    if episode.turn_rewards:
        sampled = _sampled(episode)
        earned = np.zeros(len(sampled), np.float32)
        for turn in episode.turns:
            earned[np.searchsorted(sampled, turn.end - 1)] = turn.reward
        reward.token_rewards.CopyFrom(encode_tensor(earned))
    return reward


def groups_of(items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
    """Places of the items of each group, in the order of their first items; one without a group is one of its own."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for place, item in enumerate(items):
        groups.setdefault((bool(item.group), item.group or item.id), []).append(place)
    return list(groups.values())


def chunked(
    items: Sequence[reward_pb2.ScoreItem],
    most: int,
    weight: Callable[[reward_pb2.ScoreItem], int] = lambda item: 1,
) -> list[list[reward_pb2.ScoreItem]]:
    """Cuts `items` into lists of at most `most` items, or of what each of them weighs; or of one group where that is
    more, for no group is cut.
    """
    chunks: list[list[reward_pb2.ScoreItem]] = []
    room = 0
    for places in groups_of(items):
        size = sum(weight(items[place]) for place in places)
        if not chunks or size > room:
            chunks.append([])
            room = most
        chunks[-1].extend(items[place] for place in places)
        room -= size
    return chunks
