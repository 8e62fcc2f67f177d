"""Planning and packing: everything exactly once, within budget, balanced, aligned."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.errors import InvalidInputError
from rolecall.training.account.flops import AttentionCost, CostModel
from rolecall.training.packing.pack import Row, local_counts, pack, unpack
from rolecall.training.packing.pieces import whole
from rolecall.training.packing.plan import SLOWER, RankPlan, cut_microbatches, plan_batch, plan_pieces

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
    assert cut_microbatches([[(0,), (1,), (2,)]], [5, 50, 5], COST.costs([5, 50, 5]), 10) == [((1,), (0, 2))]


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


groups = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8)
"""Responses to each prompt, tokens of the prompt, most tokens of a response."""


def sampled(drawn: list[tuple[int, int, int]]) -> tuple[list[int], list[str]]:
    """Lengths of the rows, and the prompt of each."""
    rng = np.random.default_rng(0)
    rows = [
        (prompt + int(rng.integers(1, most + 1)), str(gid))
        for gid, (count, prompt, most) in enumerate(drawn)
        for _ in range(count)
    ]
    return [length for length, _ in rows], [gid for _, gid in rows]


@given(groups, st.integers(1, 4), st.integers(20, 120), st.integers(1, 5), st.integers(0, 99))
def test_rows_of_a_prompt_stay_together_and_a_mini_batch_does_not_depend_on_ranks_or_budget(
    drawn: list[tuple[int, int, int]], num_minibatches: int, token_budget: int, world_size: int, seed: int
) -> None:
    lengths, prompts = sampled(drawn)

    def planned(token_budget: int, world_size: int) -> list[RankPlan]:
        return plan_pieces(
            whole(lengths),
            num_minibatches=num_minibatches,
            token_budget=token_budget,
            world_size=world_size,
            cost=COST,
            seed=seed,
            prompts=prompts,
        )

    plans, (alone,) = planned(token_budget, world_size), planned(10**6, 1)
    assert Counter(row for plan in plans for row in plan.rows) == Counter(range(len(lengths)))
    for index, of_one in enumerate(alone.minibatches):
        assert len({len(plan.minibatches[index]) for plan in plans}) == 1
        rows = {row for plan in plans for indices in plan.minibatches[index] for row in indices}
        assert rows == {row for indices in of_one for row in indices}
        assert abs(len(rows) - len(lengths) / num_minibatches) < 1
        # a mini-batch that ends within a prompt leaves the rest of it to the next: one prompt at each of its two ends
        held = Counter(prompts[row] for row in rows)
        assert sum(count < prompts.count(gid) for gid, count in held.items()) <= 2
    for plan in plans:
        for indices in plan.microbatches:
            assert len(indices) <= 1 or sum(lengths[i] for i in indices) <= token_budget


def test_whole_groups_share_a_microbatch_where_ranks_and_budget_allow_and_balance_comes_first() -> None:
    lengths, prompts = [110] * 256, [str(row // 8) for row in range(256)]
    even = plan_pieces(
        whole(lengths), num_minibatches=2, token_budget=4096, world_size=4, cost=COST, seed=0, prompts=prompts
    )
    for plan in even:
        for indices in plan.microbatches:
            assert set(Counter(prompts[row] for row in indices).values()) == {8}
    # one prompt for four ranks: each gets a quarter of it
    shared = plan_pieces(
        whole([100] * 8), num_minibatches=1, token_budget=4096, world_size=4, cost=COST, seed=0, prompts=["one"] * 8
    )
    assert [len(plan.rows) for plan in shared] == [2, 2, 2, 2]


@pytest.mark.parametrize("world_size", [1, 4])
def test_prompts_are_computed_few_times_where_no_whole_number_of_them_fills_a_microbatch(world_size: int) -> None:
    rng = np.random.default_rng(0)
    lengths, prompts = [], [str(row // 16) for row in range(1024)]
    for _ in range(64):
        lengths += (rng.integers(300, 420) + rng.integers(100, 300, 16)).tolist()
    plans = plan_pieces(
        whole(lengths), num_minibatches=2, token_budget=12000, world_size=world_size, cost=COST, seed=0, prompts=prompts
    )
    fewest = -(-sum(lengths) // (world_size * 12000))
    assert len(plans[0].microbatches) <= fewest + 2
    num_computed = sum(len({prompts[row] for row in rows}) for plan in plans for rows in plan.microbatches)
    assert num_computed < 1.7 * 64


def test_keeping_prompts_together_costs_the_ranks_next_to_nothing() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 512).astype(int).clip(10, 8192).tolist()
    prompts = [str(row // 8) for row in range(512)]
    together = plan_pieces(
        whole(lengths), num_minibatches=2, token_budget=16384, world_size=8, cost=COST, seed=0, prompts=prompts
    )
    for index in range(2):
        rows = [row for plan in together for indices in plan.minibatches[index] for row in indices]
        of_rows = [lengths[row] for row in rows]
        free = plan_batch(of_rows, num_minibatches=1, token_budget=16384, world_size=8, cost=COST, seed=0)
        assert len(together[0].minibatches[index]) <= len(free[0].minibatches[0])
        assert waited(together, index, lengths) <= (1 + SLOWER) * waited(free, 0, of_rows) * 1.001


def waited(plans: list[RankPlan], minibatch: int, lengths: list[int]) -> float:
    """The cost of a mini-batch: of the costliest rank in every microbatch."""
    costs = [
        [float(COST.costs([lengths[i] for i in indices]).sum()) for indices in plan.minibatches[minibatch]]
        for plan in plans
    ]
    return float(sum(max(at_once) for at_once in zip(*costs, strict=True)))


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
