"""Who is named when sampler and trainer are apart: the one rollout or rank that is far where all others are near."""

import json

import pytest
import torch

from rolecall.v1.trajectory_pb2 import RowRef
from services.actor.drift import MIN_TOKENS, Outlier, by_rollout, encoded, outlier

MANY = 10 * MIN_TOKENS


def told(**distances: tuple[float, float]) -> bytes:
    return encoded({name.replace("_", "."): each for name, each in distances.items()})


def test_distances_are_summed_by_the_rollout_that_a_row_was_claimed_by_and_tokens_by_how_unsure_they_are() -> None:
    refs = [RowRef(token=token) for token in ("pod-1.ab-1", "pod-2.cd-3", "pod-1.ab-12")]
    old_N = torch.tensor([0.5, 0.25, 1.0, 1.0]).log()
    found = by_rollout(old_N, old_N + torch.tensor([0.5, -0.25, 1.0, -2.0]), torch.tensor([0, 0, 1, 2]), refs)
    assert found == {"pod-1.ab": pytest.approx((2.75, 1.25)), "pod-2.cd": pytest.approx((1.0, 0.0))}
    nothing = torch.zeros(0)
    assert by_rollout(nothing, nothing, nothing.long(), refs[:1]) == {"pod-1.ab": (0.0, 0.0)}


@pytest.mark.parametrize("num_hot", [1000, 4000])
def test_a_rollout_whose_prompts_are_hard_is_not_far_where_sampler_and_actor_round_apart(num_hot: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(64_000, 50, generator=generator)
    logits_NV[num_hot:, 0] += 9.0  # the others know nearly every token
    seen = [(logits_NV + 0.02 * torch.randn(logits_NV.shape, generator=generator)).log_softmax(-1) for _ in range(2)]
    sampled_N1 = seen[1].exp().multinomial(1, generator=generator)
    old_N, rollout_N = (logprobs_NV.gather(1, sampled_N1).squeeze(1) for logprobs_NV in seen)
    trajectory_N = (torch.arange(64_000) >= num_hot).long()
    found = by_rollout(old_N, rollout_N, trajectory_N, [RowRef(token="hard.0-1"), RowRef(token="easy.0-1")])
    assert min(number for _, number in found.values()) > MIN_TOKENS
    assert outlier([encoded(found)]) is None
    broken_N = torch.where(trajectory_N == 0, rollout_N - 1.0, rollout_N)
    named = outlier([encoded(by_rollout(old_N, broken_N, trajectory_N, [RowRef(token="a-1"), RowRef(token="b-1")]))])
    assert named is not None
    assert named.name == "a"


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
