"""LongRoPE is trained by the factors that the sampler takes, whatever is packed together: those of transformers where
every sequence is as long as its choice needs, on one rank and on many.

tests/integration/test_weights_vllm.py holds vLLM to the same.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.integration.exact_bench import VOCAB, Bench, Layout, Shape, assert_same, assert_same_answer, make_rows
from tests.integration.exact_ranks import Ranks, living_ranks
from tests.integration.test_training_exact import oracle_loss
from tests.tiny_models import write_phi3

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]

ORIGINAL_TOKENS = 16
LONG: list[Shape] = [(24, 8, True, False), (20, 8, True, True), (33, 0, True, False), (40, 12, True, False)]
"""Rows that transformers turns by the long factors, a pass each."""
SHORT: list[Shape] = [(12, 4, True, False), (9, 4, True, True), (16, 0, True, False), (2, 1, True, False)]
"""Rows that it turns by the short ones."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = write_phi3(tmp_path_factory.mktemp("model"), original_tokens=ORIGINAL_TOKENS, vocab=VOCAB)
    return Bench({"phi3": path}, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with living_ranks(2, tmp_path_factory.mktemp("ranks") / "two") as ranks:
        yield ranks


@pytest.mark.parametrize(("rows", "longest"), [(SHORT, ORIGINAL_TOKENS), (LONG, ORIGINAL_TOKENS + 1)])
def test_gradients_are_those_of_hugging_face_by_the_factors_of_the_longest_sequence(
    bench: Bench, rows: list[Shape], longest: int
) -> None:
    drawn, temperatures = make_rows(bench, "phi3", (rows, 5))
    job = bench.job("phi3", drawn, temperatures, token_budget=40, options={"max_sequence_tokens": longest})
    answer, gradients = bench.alone(job)
    model = bench.oracle("phi3")
    loss = oracle_loss(model, drawn, temperatures, "token_mean")
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert answer.losses == pytest.approx([float(loss.detach())], rel=1e-5)
    assert_same(
        gradients, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    )


@pytest.mark.parametrize("longest", [ORIGINAL_TOKENS, None], ids=["short", "long"])
def test_ranks_and_cuts_take_the_same_factors_for_short_and_long_rows(
    bench: Bench, two: Ranks, longest: int | None
) -> None:
    """One microbatch of all rows, against rows of either kind by themselves, runs of tokens on two ranks, and layers
    that are computed anew.
    """
    drawn = make_rows(bench, "phi3", ([*SHORT, *LONG], 7))
    options = {"max_sequence_tokens": longest}
    job = bench.job("phi3", *drawn, options=options)
    whole, expected = bench.alone(job)
    again = {**options, "gradient_checkpointing": True}
    cuts = [bench.alone(replace(job, token_budget=budget, seed=3, options=again)) for budget in (20, 45)]
    layouts = [Layout(2, {}), Layout(2, {"sequence": 2}), Layout(2, {"tensor": 2})]
    for layout in layouts:
        cuts.append(bench.spread(two, replace(job, parallel=layout.parallel, token_budget=45, seed=5)))
    for answer, gradients in cuts:
        assert_same_answer(answer, whole)
        assert_same(gradients, expected)


def test_the_other_factors_are_another_model(bench: Bench) -> None:
    job = bench.job("phi3", *make_rows(bench, "phi3", (LONG, 9)))
    losses = [
        bench.alone(replace(job, options={"max_sequence_tokens": longest}))[0].losses[0]
        for longest in (ORIGINAL_TOKENS, ORIGINAL_TOKENS + 1)
    ]
    assert abs(losses[0] - losses[1]) > 1e-2
