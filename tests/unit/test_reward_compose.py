"""The weighted sum of components: its range, its fields, its errors, and what a caller may not believe."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolecall.errors import ScorerError
from rolecall.scoring.client import algorithm_problem
from rolecall.scoring.description import change_of, component_spec, problem_of, spec_problem
from rolecall.scoring.exchange import believed, cut, only
from rolecall.scoring.items import chunked, score_item
from rolecall.scoring.results import call_scorer
from rolecall.scoring.scores import Failure, Item, Outcome, Score, decode_reward
from rolecall.settings import AlgorithmSection
from rolecall.v1 import reward_pb2, trajectory_pb2
from rolecall.wire import Array, decode_tensor, encode_tensor
from services.reward.compose import compose, compose_spec

TEXT, TRUTH = reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_GROUND_TRUTH
ITEM = reward_pb2.ScoreItem(id="7/0", num_response_tokens=2)


def spec(
    low: float | None = None, high: float | None = None, *, reads: tuple[int, ...] = (), token_rewards: bool = False
) -> reward_pb2.DescribeResponse:
    return reward_pb2.DescribeResponse(
        name="x",
        reads=reads,  # type: ignore[arg-type]
        reward=component_spec("", low, high),
        token_rewards=token_rewards,
    )


def test_the_reward_is_the_weighted_sum_and_its_parts_are_reported_unweighted() -> None:
    result = compose(ITEM, {"a": Score(1.0), "b": Score(-0.5, {"inner": 3.0})}, {"a": 2.0, "b": 0.1})
    assert result.reward.value == 2.0 * 1.0 + 0.1 * -0.5
    assert dict(result.reward.components) == {"a": 1.0, "b": -0.5, "b/inner": 3.0}
    assert not result.reward.HasField("token_rewards")


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1,) * 10])
def test_shares_of_one_add_up_to_one(weights: tuple[float, ...]) -> None:
    named = {str(index): weight for index, weight in enumerate(weights)}
    assert compose(ITEM, dict.fromkeys(named, Score(1.0)), named).reward.value == 1.0
    assert compose_spec("reward", dict.fromkeys(named, spec(0, 1)), named).reward.max == 1.0


def test_a_component_that_does_not_apply_is_absent_from_sum_parts_and_range() -> None:
    specs = {"a": spec(0.25, 1.0), "b": spec(-1.0, 0.0)}
    joined = compose_spec("both", specs, {"a": 2.0, "b": 1.0}, routed=("a",))
    assert (joined.reward.min, joined.reward.max) == (-1.0, 2.0), "without a: [-1, 0]; with it: [-0.5, 2]"
    assert [part.may_be_absent for part in joined.components] == [True, False]
    assert reward_pb2.SCORE_FIELD_METADATA in joined.reads
    alone = compose(ITEM, {"b": Score(-0.5)}, {"a": 2.0, "b": 1.0})
    assert (alone.reward.value, dict(alone.reward.components)) == (-0.5, {"b": -0.5})
    assert problem_of(alone.reward, joined, 2) is None
    lacking = compose(ITEM, {"a": Score(1.0)}, {"a": 2.0, "b": 1.0})
    assert problem_of(lacking.reward, joined, 2) == "returned the components ['a'], it declares ['a', 'b']"
    assert compose(ITEM, {}, {}).error.code == "NOT_APPLICABLE"


def test_a_group_is_never_cut_for_a_scorer_that_compares() -> None:
    groups = [("a", 2), ("b", 3), ("", 1), ("c", 5)]
    items = [reward_pb2.ScoreItem(id=f"{group}/{i}", group=group) for group, size in groups for i in range(size)]
    compares = reward_pb2.DescribeResponse(name="x", max_items=4, whole_groups=True)
    assert [[item.id for item in chunk] for chunk in cut(items, compares)] == [
        ["a/0", "a/1"],
        ["b/0", "b/1", "b/2", "/0"],
        ["c/0", "c/1", "c/2", "c/3", "c/4"],
    ]
    assert [len(chunk) for chunk in chunked(items, 4)] == [2, 4, 5]
    assert [len(chunk) for chunk in chunked(items, 11, lambda item: 2)] == [5, 1, 5]
    assert [len(chunk) for chunk in cut(items, reward_pb2.DescribeResponse(name="x", max_items=4))] == [4, 4, 3]
    joined = compose_spec("both", {"a": spec(0, 1), "b": compares}, {"a": 1.0, "b": 1.0})
    assert joined.whole_groups


def test_token_rewards_are_zeros_where_no_component_that_applies_gives_any() -> None:
    result = compose(ITEM, {"b": Score(1.0)}, {"b": 1.0}, token_rewards=True)
    np.testing.assert_array_equal(decode_tensor(result.reward.token_rewards, "token_rewards"), np.zeros(2, np.float32))


def test_token_rewards_are_summed_with_the_weights() -> None:
    a, b = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    result = compose(
        ITEM, {"a": Score(0.0, {}, a), "b": Score(0.0, {}, b), "c": Score(5.0)}, {"a": 2.0, "b": 0.5, "c": 1.0}
    )
    tokens = decode_tensor(result.reward.token_rewards, "token_rewards")
    assert tokens.dtype == np.float32
    assert tokens.tolist() == [7.0, 14.0]


def test_the_answer_is_that_of_the_first_component_that_reads_one() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    result = compose(ITEM, {"a": Score(0.0), "b": Score(1.0, answer="7"), "c": Score(1.0, answer="seven")}, weights)
    assert result.reward.answer == "7"
    assert decode_reward(result.reward) == Score(2.0, {"a": 0.0, "b": 1.0, "c": 1.0}, answer="7")
    assert not compose(ITEM, {"a": Score(0.0)}, weights).reward.HasField("answer")


def test_an_answer_is_text_and_the_empty_text_is_one() -> None:
    assert call_scorer(lambda item: Score(1.0, answer=""), ITEM, spec()).reward.HasField("answer")
    assert not call_scorer(lambda item: 1.0, ITEM, spec()).reward.HasField("answer")
    refused = call_scorer(lambda item: Score(1.0, answer=7), ITEM, spec())  # type: ignore[arg-type]
    assert "an answer that is int; it must be a str" in refused.error.message


def test_a_failed_component_fails_the_item_and_is_named() -> None:
    result = compose(ITEM, {"a": Score(1.0), "b": Failure("TIMEOUT", "took too long")}, {"a": 1.0, "b": 0.0})
    assert result.WhichOneof("outcome") == "error"
    assert (result.error.code, result.error.retryable) == ("TIMEOUT", False)
    assert "component 'b': took too long" in result.error.message


def test_asking_again_is_advised_only_when_every_failure_may_pass() -> None:
    passing, lasting = Failure("SCORER_UNAVAILABLE", "away", True), Failure("BAD_GROUND_TRUTH", "empty")
    both = compose(ITEM, {"a": passing, "b": lasting}, {"a": 1.0, "b": 1.0})
    assert (both.error.code, both.error.retryable) == ("BAD_GROUND_TRUTH", False)
    assert "also failed: a" in both.error.message
    assert compose(ITEM, {"a": passing, "b": Score(1.0)}, {"a": 1.0, "b": 1.0}).error.retryable


def test_the_description_joins_fields_and_adds_up_ranges() -> None:
    joined = compose_spec(
        "reward", {"a": spec(0, 1, reads=(TEXT, TRUTH)), "b": spec(-1, 0, reads=(TEXT,))}, {"a": 1.0, "b": -2.0}
    )
    assert list(joined.reads) == [TEXT, TRUTH]
    assert (joined.reward.min, joined.reward.max) == (0.0, 3.0)
    assert [component.name for component in joined.components] == ["a", "b"]
    assert (joined.components[1].min, joined.components[1].max) == (-1.0, 0.0)


def test_an_unbounded_component_unbounds_the_sum_unless_its_weight_is_zero() -> None:
    specs = {"a": spec(0, 1), "b": spec(0, None)}
    counted = compose_spec("reward", specs, {"a": 1.0, "b": 1.0}).reward
    assert counted.HasField("min")
    assert not counted.HasField("max")
    reported = compose_spec("reward", specs, {"a": 1.0, "b": 0.0}).reward
    assert (reported.min, reported.max) == (0.0, 1.0)


def against(advantage: dict[str, object], described: reward_pb2.DescribeResponse, **shaping: float) -> str:
    section = {"groups_per_batch": 1, "advantage": advantage, "shaping": shaping}
    return algorithm_problem(AlgorithmSection.model_validate(section), described) or ""


def test_gdpo_takes_no_scorer_whose_token_rewards_it_would_not_see() -> None:
    gdpo: dict[str, object] = {"kind": "gdpo", "weights": {"a": 1}}
    assert not against(gdpo, spec())
    assert "gdpo reads the reward's components" in against(gdpo, spec(token_rewards=True))
    assert not against({"kind": "rloo"}, spec(token_rewards=True))


def test_an_estimator_of_right_and_wrong_takes_no_scorer_whose_range_it_cannot_read() -> None:
    assert "maxrl divides by the group's mean reward, which may be -0.5" in against({"kind": "maxrl"}, spec(-0.5, 1))
    assert not against({"kind": "maxrl"}, spec(-0.5, 1), clip_min=0.0)
    assert not against({"kind": "maxrl"}, spec(0, 1))
    assert not against({"kind": "maxrl"}, spec())
    pass_at_2: dict[str, object] = {"kind": "pass_at_k", "k": 2}
    assert "right from 1 on, and the scorer says 0.8 at most" in against(pass_at_2, spec(0, 0.8))
    assert not against(pass_at_2, spec(0, 1))
    assert not against(pass_at_2, spec(0, math.fsum([0.01, 0.29, 0.7])))  # 1 in float32, as rewards are
    assert not against(pass_at_2, spec(0, 0.8, token_rewards=True))


def test_what_may_change_of_a_shadow_is_no_part_of_the_description() -> None:
    trial = spec(0, 5, token_rewards=True)
    trial.components.add(name="style", min=0, max=1)
    both, weights = {"a": spec(0, 1), "trial": trial}, {"a": 1.0, "trial": 0.0}
    joined = compose_spec("reward", both, weights, shadows=("trial",))
    assert not joined.token_rewards
    assert list(joined.components[1:]) == [
        reward_pb2.ComponentSpec(name=name, may_be_absent=True) for name in ("trial", "trial/style")
    ]
    without = compose_spec("reward", {"a": spec(0, 1)}, weights, shadows=("trial",))
    assert change_of(joined, without) is change_of(without, joined) is None
    routed = compose_spec("reward", {"a": spec(0, 1), "b": spec(0, 1)}, {"a": 1.0, "b": 1.0}, routed=("b",))
    assert "the range of its reward" in (change_of(without, routed) or "")
    counted = compose_spec("reward", {"a": spec(0, 1), "trial": spec(0, 5)}, weights)
    assert "its components" in (change_of(without, counted) or "")


finite = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(finite, finite, st.floats(0, 1), finite), min_size=1, max_size=6))
def test_a_sum_of_scores_in_range_is_in_the_range_of_the_sum(parts: list[tuple[float, float, float, float]]) -> None:
    specs, outcomes, weights = {}, dict[str, Outcome](), {}
    for number, (first, second, where, weight) in enumerate(parts):
        low, high = min(first, second), max(first, second)
        name = f"c{number}"
        specs[name], weights[name] = spec(low, high), weight
        outcomes[name] = Score(min(high, max(low, low + where * (high - low))))
    joined = compose_spec("reward", specs, weights)
    assert problem_of(compose(ITEM, outcomes, weights).reward, joined, 2) is None


def reward(value: float = 0.5, tokens: Array | None = None, **components: float) -> reward_pb2.Reward:
    made = reward_pb2.Reward(value=value, components=components)
    if tokens is not None:
        made.token_rewards.CopyFrom(encode_tensor(tokens))
    return made


@pytest.mark.parametrize(
    ("given_reward", "problem"),
    [
        (reward(math.nan), "not finite"),
        (reward(math.inf), "not finite"),
        (reward(1.5), "outside its declared range"),
        (reward(-0.1), "outside its declared range"),
        (reward(0.5, part=1.0), "it declares"),
        (reward(0.5, np.zeros(2, np.float32)), "does not declare"),
    ],
)
def test_a_reward_that_breaks_the_description_is_not_believed(given_reward: reward_pb2.Reward, problem: str) -> None:
    assert problem in (problem_of(given_reward, spec(0, 1), 2) or "")


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (None, "returned none"),
        (np.zeros(3, np.float32), "must be float32 [2]"),
        (np.zeros(2, np.float64), "must be float32 [2]"),
        (np.zeros((2, 1), np.float32), "must be float32 [2]"),
        (np.array([0, math.nan], np.float32), "not all finite"),
    ],
)
def test_token_rewards_must_be_one_finite_float32_per_response_token(tokens: Array | None, problem: str) -> None:
    declared = spec(0, 1, token_rewards=True)
    assert problem in (problem_of(reward(0.5, tokens), declared, 2) or "")
    assert problem_of(reward(0.5, np.zeros(2, np.float32)), declared, 2) is None


def test_token_rewards_whose_bytes_do_not_fit_their_shape_are_not_believed() -> None:
    broken = reward(0.5, np.zeros(2, np.float32))
    broken.token_rewards.shape[0] = 2**40
    assert "unreadable" in (problem_of(broken, spec(0, 1, token_rewards=True), 2) or "")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (reward_pb2.DescribeResponse(reads=[99]), "does not know"),  # type: ignore[list-item]
        (reward_pb2.DescribeResponse(components=[component_spec("a", 0, 1), component_spec("a", 0, 1)]), "unique"),
        (reward_pb2.DescribeResponse(components=[component_spec("", 0, 1)]), "not empty"),
        (spec(1, 0), "min must not exceed max"),
        (spec(math.nan, 0), "min must not exceed max"),
        (reward_pb2.DescribeResponse(max_items=-1), "max_items"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(broken: reward_pb2.DescribeResponse, problem: str) -> None:
    assert problem in (spec_problem(broken) or "")


def test_only_the_fields_that_are_read_are_sent() -> None:
    full = reward_pb2.ScoreItem(id="7/0", response_text="a", ground_truth="b", num_response_tokens=1)
    full.prompt_token_ids = full.response_token_ids = b"\0\0\0\0"
    full.messages.add(role="user", content="c")
    full.metadata["k"] = "v"
    full.finish_reason = trajectory_pb2.FINISH_REASON_LENGTH
    sent = only(full, spec(reads=(TEXT,)))
    assert sent == reward_pb2.ScoreItem(
        id="7/0", response_text="a", num_response_tokens=1, finish_reason=trajectory_pb2.FINISH_REASON_LENGTH
    )
    everything = [field for field in reward_pb2.ScoreField.values() if field]
    assert only(full, spec(reads=tuple(everything))) == full


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30), st.integers(0, 7), st.booleans())
def test_requests_keep_order_and_stay_within_every_bound(
    sizes: list[tuple[int, int]], max_items: int, token_rewards: bool
) -> None:
    items = [
        reward_pb2.ScoreItem(id=str(i), response_text="x" * text, num_response_tokens=tokens)
        for i, (text, tokens) in enumerate(sizes)
    ]
    chunks = cut(items, reward_pb2.DescribeResponse(max_items=max_items, token_rewards=token_rewards), max_bytes=60)
    assert [item.id for chunk in chunks for item in chunk] == [item.id for item in items]
    for chunk in chunks:
        assert chunk
        assert max_items == 0 or len(chunk) <= max_items
        assert len(chunk) == 1 or sum(item.ByteSize() for item in chunk) <= 60
        assert len(chunk) == 1 or not token_rewards or sum(4 * item.num_response_tokens for item in chunk) <= 60


def test_an_answer_in_another_order_is_put_back_into_ours() -> None:
    items = [reward_pb2.ScoreItem(id=str(i)) for i in range(3)]
    results = [reward_pb2.ScoreResult(id=str(i), reward=reward_pb2.Reward(value=i)) for i in (2, 0, 1)]
    assert believed(reward_pb2.ScoreResponse(results=results), items, spec(), "x") == [
        Score(0.0),
        Score(1.0),
        Score(2.0),
    ]


@pytest.mark.parametrize("ids", [["0"], ["0", "1", "1"], ["0", "0"], ["0", "2"], ["0", "1", "2"], []])
def test_an_answer_that_is_not_one_result_per_item_is_refused_whole(ids: list[str]) -> None:
    items = [reward_pb2.ScoreItem(id="0"), reward_pb2.ScoreItem(id="1")]
    results = [reward_pb2.ScoreResult(id=i, reward=reward_pb2.Reward(value=0)) for i in ids]
    with pytest.raises(ScorerError, match="exactly one result per item"):
        believed(reward_pb2.ScoreResponse(results=results), items, spec(), "x")


def test_a_result_with_neither_reward_nor_error_is_a_failure() -> None:
    outcomes = believed(reward_pb2.ScoreResponse(results=[reward_pb2.ScoreResult(id="7/0")]), [ITEM], spec(), "x")
    assert isinstance(outcomes[0], Failure)
    assert "neither" in outcomes[0].message


@pytest.mark.parametrize("answer", [None, "1.0", [1.0], math.nan, 2.0])
def test_what_is_not_a_score_becomes_an_error(answer: object) -> None:
    result = call_scorer(lambda item: answer, ITEM, spec(0, 1))  # type: ignore[arg-type, return-value]
    assert (result.WhichOneof("outcome"), result.error.code) == ("error", ScorerError.reason)


@pytest.mark.parametrize("answer", [1, True, np.float32(0.5), Score(0.25)])
def test_numbers_of_any_kind_and_scores_are_scores(answer: float) -> None:
    assert call_scorer(lambda item: answer, ITEM, spec(0, 1)).WhichOneof("outcome") == "reward"


def test_an_item_is_made_of_a_trajectory_and_read_back_whole() -> None:
    meta = trajectory_pb2.TrajectoryMeta(
        id="7/1", num_prompt_tokens=2, response_text="hi", finish_reason=trajectory_pb2.FINISH_REASON_LENGTH
    )
    meta.prompt.ground_truth = "hello"
    meta.prompt.messages.add(role="user", content="greet")
    meta.prompt.metadata.update({"level": 3, "tags": ["a"], "nested": {"x": None}})
    item = Item.from_proto(score_item(meta, np.array([5, 6, 7, 8, 9], np.int32)))
    assert (item.id, item.response_text, item.ground_truth, item.finish_reason, item.num_response_tokens) == (
        "7/1",
        "hi",
        "hello",
        "length",
        3,
    )
    assert item.prompt_token_ids.tolist() == [5, 6]
    assert item.response_token_ids.tolist() == [7, 8, 9]
    assert item.messages[0].content == "greet"
    assert repr(item.metadata["level"]) == "3", "as it was in the data set, though a Struct holds a float64"
    assert item.metadata == {"level": 3, "tags": ["a"], "nested": {"x": None}}
