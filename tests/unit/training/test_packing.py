"""Planning and packing: everything exactly once, within budget, balanced, aligned."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.errors import InvalidInputError
from rolecall.training.account.flops import AttentionCost, CostModel
from rolecall.training.packing.pack import Row, cut_microbatches, local_counts, pack, plan_batch, unpack

CPU = torch.device("cpu")
COST = CostModel(1.0, (AttentionCost(0.02),))


def row(length: int, prompt: int, seed: int = 0) -> Row:
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) >= prompt).astype(np.uint8)
    return {
        "token_ids": rng.integers(0, 99, length, dtype=np.int32),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": rng.normal(size=length).astype(np.float32),
        "policy_versions": np.where(mask != 0, 3, -1).astype(np.int32),
    }


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(20, 80),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_a_plan_trains_every_row_once_within_budget_and_keeps_ranks_in_step(
    lengths: list[int], num_minibatches: int, token_budget: int, world_size: int, seed: int
) -> None:
    plans = plan_batch(
        lengths, num_minibatches=num_minibatches, token_budget=token_budget, world_size=world_size, cost=COST, seed=seed
    )
    assert Counter(row for plan in plans for row in plan.rows) == Counter(range(len(lengths)))
    for index in range(num_minibatches):
        assert len({len(plan.minibatches[index]) for plan in plans}) == 1
        sizes = [sum(map(len, plan.minibatches[index])) for plan in plans]
        assert abs(sum(sizes) - len(lengths) / num_minibatches) < 1
    for plan in plans:
        for indices in plan.microbatches:
            assert len(indices) <= 1 or sum(lengths[i] for i in indices) <= token_budget


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert cut_microbatches([[0, 1, 2]], [5, 50, 5], COST.costs([5, 50, 5]), 10) == [((1,), (0, 2))]


def test_the_microbatches_of_all_ranks_cost_nearly_the_same_and_are_hardly_more_than_they_must_be() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 2000).astype(int).clip(10, 4096).tolist()
    plans = plan_batch(lengths, num_minibatches=1, token_budget=8192, world_size=4, cost=COST, seed=0)
    costs = np.array(
        [[sum(COST.costs([lengths[i] for i in members])) for members in plan.microbatches] for plan in plans]
    )
    fewest = -(-sum(lengths) // (4 * 8192))
    assert fewest <= costs.shape[1] <= fewest + 2
    assert costs.max() <= max(1.1 * costs.mean(), COST.costs([max(lengths)])[0])


def test_the_same_seed_gives_the_same_plan() -> None:
    arguments = {"num_minibatches": 3, "token_budget": 50, "world_size": 2, "cost": COST}
    lengths = list(range(1, 30))
    assert plan_batch(lengths, seed=1, **arguments) == plan_batch(lengths, seed=1, **arguments)  # type: ignore[arg-type]
    assert plan_batch(lengths, seed=1, **arguments) != plan_batch(lengths, seed=2, **arguments)  # type: ignore[arg-type]


def test_packing_aligns_positions_boundaries_and_columns() -> None:
    rows = [row(4, 2), row(3, 1, seed=1)]
    packed = pack(rows, ["advantages", "loss_mask", "policy_versions"], temperature=[0.5, 2.0], device=CPU)
    assert packed.token_ids_N.tolist() == [*rows[0]["token_ids"], *rows[1]["token_ids"]]
    assert packed.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 4, 7]
    assert packed.lengths == (4, 3)
    assert packed.temperature_N.tolist() == [0.5] * 4 + [2.0] * 3
    assert packed.score_mask_N.tolist() == [False, False, True, True, False, True, True]
    assert packed.columns["loss_mask"].dtype == torch.bool
    assert packed.columns["policy_versions"].tolist() == [-1, -1, 3, 3, -1, 3, 3]
    np.testing.assert_array_equal(
        packed.columns["advantages"], np.concatenate([rows[0]["advantages"], rows[1]["advantages"]])
    )


def test_a_first_token_is_never_scored() -> None:
    assert pack([row(3, 0)], [], temperature=1.0, device=CPU).score_mask_N.tolist() == [False, True, True]


def test_unpacking_gives_the_rows_back() -> None:
    rows = [row(4, 2), row(3, 1, seed=1)]
    packed = pack(rows, ["advantages"], temperature=1.0, device=CPU)
    for original, back in zip(rows, unpack(packed.columns["advantages"], packed.lengths), strict=True):
        np.testing.assert_array_equal(original["advantages"], back)


def test_no_rows_make_an_empty_microbatch() -> None:
    packed = pack([], ["advantages"], temperature=1.0, device=CPU)
    assert (packed.lengths, packed.token_ids_N.shape, packed.cu_seqlens.tolist()) == ((), (0,), [0])
    assert unpack(packed.columns["advantages"], packed.lengths) == []


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="reward"):
        pack([{**row(4, 2), "reward": np.zeros(1, np.float32)}], ["reward"], temperature=1.0, device=CPU)


def test_counts_leave_out_first_tokens_and_untrained_sequences() -> None:
    untrained = {**row(5, 2), "loss_mask": np.zeros(5, np.uint8)}
    counts = local_counts([row(4, 0), row(3, 1), untrained])
    assert (counts.num_tokens, counts.num_sequences) == (5, 2)
