"""Rows of several segments on their way to microbatches: each token once, a trajectory in one place where that matters,
and its numbers those of the whole.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.columns import IMAGES
from rolecall.settings import (
    Aggregation,
    AlgorithmSection,
    ClippedLoss,
    CorrectionSection,
    ImportanceWeight,
    Rejection,
)
from rolecall.training.account.flops import AttentionCost, CostModel
from rolecall.training.engine import TokenOutputs
from rolecall.training.objective.objectives import PolicyObjective, policy_columns
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.pieces import Piece, cut, join, whole
from rolecall.training.packing.plan import plan_batch, plan_pieces
from rolecall.v1.trajectory_pb2 import Coefficients, Images, SegmentImages

CPU = torch.device("cpu")
COST = CostModel(1.0, (AttentionCost(0.02),))
SEGMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=20)


def row_of(lengths: list[int], seed: int) -> Row:
    """A row whose segments begin with a prompt of one token and a half of which is trained."""
    rng = np.random.default_rng(seed)
    num = sum(lengths)
    mask = (rng.random(num) < 0.5).astype(np.uint8)
    mask[np.cumsum([0, *lengths[:-1]])] = 0
    numbers = {name: rng.normal(size=num).astype(np.float32) for name in ("advantages", "old_logprobs")}
    return {
        "token_ids": rng.integers(0, 99, num, dtype=np.int32),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_logprobs": numbers["old_logprobs"] - 0.3 * rng.normal(size=num).astype(np.float32),
        **numbers,
    }


@given(SEGMENTS, st.integers(1, 3), st.integers(20, 60), st.integers(1, 4), st.booleans())
def test_a_plan_has_every_segment_once_and_a_row_on_one_rank_in_one_minibatch(
    segments: list[list[int]], num_minibatches: int, token_budget: int, world_size: int, between: bool
) -> None:
    pieces = cut(segments, token_budget, between_segments=between)
    for number, lengths in enumerate(segments):
        own = [piece for piece in pieces if piece.row == number]
        assert [length for piece in own for length in piece.lengths] == lengths
        assert [piece.start for piece in own] == np.cumsum([0, *(piece.num_tokens for piece in own[:-1])]).tolist()
        assert len(own) == 1 or (between and sum(lengths) > token_budget)
        assert not between or all(len(p.lengths) == 1 or p.num_tokens <= token_budget for p in own)
    plans = plan_pieces(
        pieces, num_minibatches=num_minibatches, token_budget=token_budget, world_size=world_size, cost=COST, seed=1
    )
    assert Counter(i for plan in plans for i in plan.rows) == Counter(range(len(pieces)))
    homes: dict[int, set[tuple[int, int]]] = {}
    for rank, plan in enumerate(plans):
        for number, microbatches in enumerate(plan.minibatches):
            for indices in microbatches:
                assert len(indices) == 1 or sum(pieces[i].num_tokens for i in indices) <= token_budget
                for i in indices:
                    homes.setdefault(pieces[i].row, set()).add((rank, number))
    assert all(len(home) == 1 for home in homes.values())


def test_rows_of_one_segment_are_planned_as_ever() -> None:
    lengths = list(range(1, 40))
    arguments = {"num_minibatches": 3, "token_budget": 50, "world_size": 2, "cost": COST, "seed": 5}
    assert cut([[n] for n in lengths], 50, between_segments=True) == whole(lengths)
    assert plan_pieces(whole(lengths), **arguments) == plan_batch(lengths, **arguments)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_segments_joined_are_the_row(lengths: list[int]) -> None:
    row = row_of(lengths, 0)
    segments = list(Piece(0, 0, tuple(lengths)).segments(row))
    assert [len(each["token_ids"]) for each in segments] == lengths
    for name, array in join(segments).items():
        np.testing.assert_array_equal(array, row[name])
    ends = [{"bootstrap_value": np.array([value], np.float32)} for value in range(len(lengths))]
    assert join(ends)["bootstrap_value"].tolist() == [len(lengths) - 1], "the value after the row's last token"


def test_a_segments_first_token_is_not_trained_and_a_trajectory_counts_once() -> None:
    ones = np.ones(3, np.uint8)
    segment: Row = {"token_ids": np.arange(3, dtype=np.int32), "response_mask": ones, "loss_mask": ones}
    untrained = {**segment, "loss_mask": 0 * ones}
    counts = local_counts([segment, segment, segment, untrained], trajectories=[0, 0, 1, 2])
    assert (counts.num_tokens, counts.num_sequences) == (6, 2)
    packed = pack([segment, segment], [], temperature=1.0, device=CPU, trajectories=[4, 4])
    assert packed.position_ids_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.score_mask_N.tolist() == [False, True, True] * 2
    assert packed.trajectory_N().tolist() == [0] * 6


def test_what_the_forks_of_a_row_begin_with_is_computed_once() -> None:
    common = list(range(40))
    ids = np.array([*common, 50, 51, *common, 60, 61, *common, 60, 70], np.int32)
    row: Row = {"token_ids": ids, "response_mask": np.ones_like(ids, np.uint8)}
    (piece,) = cut([[42, 42, 42]], 128, between_segments=True)
    packed = pack(list(piece.segments(row)), [], temperature=1.0, device=CPU, trajectories=[0, 0, 0])
    assert packed.prefixes is not None
    assert packed.prefixes.num_saved == 40 + 41


@pytest.mark.parametrize("token_budget", [7, 12, 100])
def test_each_segment_has_its_own_images_in_whatever_piece_it_stands(token_budget: int) -> None:
    shown = [[1], [], [0, 1, 0], [2, 1]]
    images = Images(files=[b"a", b"b", b"c"], segments=[SegmentImages(files=each) for each in shown])
    row = {**row_of([5, 2, 6, 4], 0), IMAGES: np.frombuffer(images.SerializeToString(), np.uint8)}
    pieces = cut([[5, 2, 6, 4]], token_budget, between_segments=True)
    segments = [segment for piece in pieces for segment in piece.segments(row)]
    own = [Images.FromString(segment[IMAGES].tobytes()) for segment in segments]
    assert [list(each.files) for each in own] == [[b"b"], [], [b"a", b"b", b"a"], [b"c", b"b"]]
    assert not any(each.segments for each in own)
    assert [len(segment["token_ids"]) for segment in segments] == [5, 2, 6, 4]


SEQUENCE_LEVEL = [
    AlgorithmSection(groups_per_batch=1, policy_loss=ClippedLoss(kind="gspo")),
    AlgorithmSection(groups_per_batch=1, policy_loss=ClippedLoss(kind="gmpo")),
    AlgorithmSection(groups_per_batch=1, correction=CorrectionSection(weight=ImportanceWeight(kind="sequence"))),
    AlgorithmSection(
        groups_per_batch=1,
        correction=CorrectionSection(reject=(Rejection(kind="k3", over="sequence_sum", high=0.35),)),
    ),
    AlgorithmSection(groups_per_batch=1, aggregation="seq_mean_token_mean"),
]
TOKEN_LEVEL: list[Aggregation] = ["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def loss_of(algorithm: AlgorithmSection, rows: list[Row], lengths: list[list[int]], cuts: list[list[int]]) -> float:
    """The loss of microbatches that have the segments `cuts`, numbered through all rows; where `lengths` are those of
    whole rows, of the rows.
    """
    segments, trajectories = list[Row](), list[int]()
    for number, (row, own) in enumerate(zip(rows, lengths, strict=True)):
        segments += Piece(number, 0, tuple(own)).segments(row)
        trajectories += [number] * len(own)
    counts = local_counts(segments, trajectories=trajectories)
    total = 0.0
    for indices in cuts:
        chosen = [segments[i] for i in indices]
        packed = pack(
            chosen,
            policy_columns(algorithm),
            temperature=1.0,
            device=CPU,
            trajectories=[trajectories[i] for i in indices],
        )
        logprobs = torch.from_numpy(np.concatenate([0.9 * row["old_logprobs"] - 0.1 for row in chosen]))
        outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
        total += float(PolicyObjective(algorithm, counts, Coefficients(), 8)(packed, outputs)[0])
    return total


@pytest.mark.parametrize("algorithm", SEQUENCE_LEVEL)
def test_what_is_asked_of_a_trajectory_is_asked_of_all_its_segments(algorithm: AlgorithmSection) -> None:
    lengths = [[9, 4, 12], [7], [5, 5]]
    rows = [row_of(own, seed) for seed, own in enumerate(lengths)]
    assert algorithm.sees_trajectories
    expected = loss_of(algorithm, rows, [[sum(own)] for own in lengths], [[0, 1, 2]])
    assert loss_of(algorithm, rows, lengths, [[0, 1, 2, 3, 4, 5]]) == pytest.approx(expected, rel=1e-6)
    assert loss_of(algorithm, rows, lengths, [[3], [4, 5], [0, 1, 2]]) == pytest.approx(expected, rel=1e-6)
    assert loss_of(algorithm, rows, lengths, [[0], [1, 2], [3, 4, 5]]) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("aggregation", TOKEN_LEVEL)
def test_where_nothing_is_asked_of_a_trajectory_its_segments_may_be_apart(aggregation: Aggregation) -> None:
    algorithm = AlgorithmSection(groups_per_batch=1, aggregation=aggregation)
    lengths = [[9, 4, 12], [7], [5, 5]]
    rows = [row_of(own, seed) for seed, own in enumerate(lengths)]
    assert not algorithm.sees_trajectories
    expected = loss_of(algorithm, rows, [[sum(own)] for own in lengths], [[0, 1, 2]])
    for cuts in (
        [[0, 1, 2, 3, 4, 5]],
        [[0], [1, 2], [3, 4], [5]],
        [list(range(6))[pair[0] : pair[1]] for pair in pairwise([0, 2, 5, 6])],
    ):
        assert loss_of(algorithm, rows, lengths, cuts) == pytest.approx(expected, rel=1e-6)
