"""Who is named when sampler and trainer are apart: the one rollout or rank that is far where all others are near."""

import json

import pytest
import torch

from rolecall.v1.trajectory_pb2 import RowRef
from services.actor.drift import MIN_TOKENS, Outlier, by_rollout, encoded, outlier

MANY = 10 * MIN_TOKENS


def told(**distances: tuple[float, int]) -> bytes:
    return encoded({name.replace("_", "."): each for name, each in distances.items()})


def test_distances_are_summed_by_the_rollout_that_a_row_was_claimed_by() -> None:
    refs = [RowRef(token=token) for token in ("pod-1.ab-1", "pod-2.cd-3", "pod-1.ab-12")]
    found = by_rollout(torch.tensor([0.5, -0.25, 1.0, -2.0]), torch.tensor([0, 0, 1, 2]), refs)
    assert found == {"pod-1.ab": (2.75, 3), "pod-2.cd": (1.0, 1)}
    assert by_rollout(torch.zeros(0), torch.zeros(0, dtype=torch.int64), refs[:1]) == {"pod-1.ab": (0.0, 0)}


def test_a_rollout_that_is_far_where_the_others_are_near_is_named_whichever_rank_trains_on_it() -> None:
    near, far = 0.01 * MANY, 0.5 * MANY
    ranks = [told(r_0=(near, MANY), r_1=(far, MANY)), told(r_0=(near, MANY), r_2=(near, MANY))]
    found = outlier(ranks)
    assert found is not None
    assert found.name == "r.1"
    assert (found.distance, found.others) == pytest.approx((0.5, 0.01))


def test_a_rank_that_is_far_on_the_tokens_of_every_rollout_is_named() -> None:
    near, far = (0.01 * MANY, MANY), (0.5 * MANY, MANY)
    found = outlier([told(r_0=near, r_1=near), told(), told(r_0=far, r_1=far), told(r_0=near, r_1=near)])
    assert found is not None
    assert found.name == "rank 2 of the actor"


@pytest.mark.parametrize(
    "ranks",
    [
        [told()],
        [told(r_0=(MANY, MANY))],
        [told(r_0=(0.5 * MANY, MANY), r_1=(0.4 * MANY, MANY))],
        [told(r_0=(1e-4 * MANY, MANY), r_1=(1e-7 * MANY, MANY))],
        [told(r_0=(MIN_TOKENS - 1.0, MIN_TOKENS - 1), r_1=(0.0, MANY))],
        [told(r_0=(0.5 * MANY, MANY), r_1=(0.0, MIN_TOKENS - 1))],
    ],
    ids=["nothing", "one alone", "both far", "both in rounding", "few tokens", "few others"],
)
def test_nobody_is_named_where_nobody_stands_out(ranks: list[bytes]) -> None:
    assert outlier(ranks) is None


def test_what_a_rank_tells_survives_its_way() -> None:
    assert json.loads(told(r_0=(0.5, 3))) == {"r.0": [0.5, 3]}
    assert outlier([told(r_0=(0.0, MANY)), told(r_1=(float(MANY), MANY))]) == Outlier("r.1", 1.0, 0.0)
