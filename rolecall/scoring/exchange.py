"""The messages of one Score call: the fields that are sent, requests cut to what a scorer takes, and an answer that is
checked before it is believed.

Pure functions of messages; client.py makes the calls.
"""

from collections.abc import Sequence

from rolecall.errors import ScorerError
from rolecall.scoring.description import problem_of
from rolecall.scoring.items import groups_of
from rolecall.scoring.scores import Failure, Outcome, decode_reward
from rolecall.v1 import reward_pb2

MAX_REQUEST_BYTES = 3 * 2**20
"""Requests are cut below 4 MiB, above which servers in most languages refuse them by default; a larger item, or group
of a scorer that takes whole ones, travels alone, and needs a server that takes it.
"""


def only(item: reward_pb2.ScoreItem, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreItem:
    """Returns `item` with the fields that the scorer reads and those that are always sent."""
    reads = set(spec.reads)
    sent = reward_pb2.ScoreItem(
        id=item.id,
        finish_reason=item.finish_reason,
        num_response_tokens=item.num_response_tokens,
        group=item.group,
    )
    if reward_pb2.SCORE_FIELD_MESSAGES in reads:
        sent.messages.extend(item.messages)
    if reward_pb2.SCORE_FIELD_RESPONSE_TEXT in reads:
        sent.response_text = item.response_text
    if reward_pb2.SCORE_FIELD_TOKEN_IDS in reads:
        sent.prompt_token_ids, sent.response_token_ids = item.prompt_token_ids, item.response_token_ids
    if reward_pb2.SCORE_FIELD_GROUND_TRUTH in reads:
        sent.ground_truth = item.ground_truth
        sent.other_ground_truths.extend(item.other_ground_truths)
    if reward_pb2.SCORE_FIELD_METADATA in reads and item.HasField("metadata"):
        sent.metadata.CopyFrom(item.metadata)
    if reward_pb2.SCORE_FIELD_ENVIRONMENT_REWARD in reads:
        sent.environment = item.environment
        if item.HasField("environment_reward"):
            sent.environment_reward.CopyFrom(item.environment_reward)
    if reward_pb2.SCORE_FIELD_IMAGES in reads:
        sent.images.extend(item.images)
    return sent


def is_large(spec: reward_pb2.DescribeResponse) -> bool:
    """Whether a request to the scorer may be larger than one of text that may be cut."""
    return spec.whole_groups or reward_pb2.SCORE_FIELD_IMAGES in spec.reads


def cut(
    items: Sequence[reward_pb2.ScoreItem], spec: reward_pb2.DescribeResponse, max_bytes: int = MAX_REQUEST_BYTES
) -> list[list[reward_pb2.ScoreItem]]:
    """Cuts `items`, in order, into requests of at most spec.max_items and `max_bytes`, the token rewards of the answer
    counted in; by groups, none of them cut, for a scorer that takes whole groups.
    """
    chunks: list[list[reward_pb2.ScoreItem]] = []
    room_bytes = 0
    units = groups_of(items) if spec.whole_groups else [[place] for place in range(len(items))]
    for places in units:
        unit = [items[place] for place in places]
        size = sum(item.ByteSize() + (4 * item.num_response_tokens if spec.token_rewards else 0) for item in unit)
        if not chunks or size > room_bytes or 0 < spec.max_items < len(chunks[-1]) + len(unit):
            chunks.append([])
            room_bytes = max_bytes
        chunks[-1].extend(unit)
        room_bytes -= size
    return chunks


def drop_undeclared(response: reward_pb2.ScoreResponse, spec: reward_pb2.DescribeResponse) -> bool:
    """Takes the components that `spec` does not declare out of the rewards; whether there were any."""
    declared = {component.name for component in spec.components}
    rewards = [result.reward for result in response.results if result.HasField("reward")]
    undeclared = [(reward, name) for reward in rewards for name in reward.components if name not in declared]
    for reward, name in undeclared:
        del reward.components[name]
    return bool(undeclared)


def believed(
    response: reward_pb2.ScoreResponse,
    items: Sequence[reward_pb2.ScoreItem],
    spec: reward_pb2.DescribeResponse,
    name: str,
) -> list[Outcome]:
    """The outcomes in `response`, in the items' order. ScorerError when it does not answer exactly the items asked; one
    bad score fails its item only.
    """
    results = {result.id: result for result in response.results}
    if len(response.results) != len(items) or results.keys() != {item.id for item in items}:
        missing = sorted({item.id for item in items} - results.keys())[:3]
        raise ScorerError(
            f"it answered {len(response.results)} results with {len(results)} ids to {len(items)} items (missing "
            f"e.g. {missing}); "
            "an answer has exactly one result per item, with the item's id"
        )
    return [_outcome(results[item.id], item, spec, name) for item in items]


def _outcome(
    result: reward_pb2.ScoreResult, item: reward_pb2.ScoreItem, spec: reward_pb2.DescribeResponse, name: str
) -> Outcome:
    match result.WhichOneof("outcome"):
        case "error":
            return Failure(
                result.error.code or "UNSPECIFIED", f"scorer {name!r}: {result.error.message}", result.error.retryable
            )
        case "reward":
            problem = problem_of(result.reward, spec, item.num_response_tokens)
            return (
                Failure(ScorerError.reason, f"scorer {name!r} {problem} (item {item.id})")
                if problem
                else decode_reward(result.reward)
            )
        case None:
            return Failure(
                ScorerError.reason, f"scorer {name!r} answered neither a reward nor an error (item {item.id})"
            )
