"""Families whose layers keep the plan of a pack from their attention are trained like transformers, on one rank and on
many.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.integration.exact_bench import VOCAB, Bench, Layout, assert_same, assert_same_answer, make_rows
from tests.integration.exact_ranks import Ranks, living_ranks
from tests.integration.test_training_exact import SHAPE, oracle_loss
from tests.tiny_models import write_nemotron, write_stablelm

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("models")
    models = {
        "stablelm": write_stablelm(root / "stablelm", vocab=VOCAB),
        "nemotron": write_nemotron(root / "nemotron", vocab=VOCAB),
    }
    return Bench(models, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with living_ranks(2, tmp_path_factory.mktemp("ranks") / "two") as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_gradients_are_those_of_hugging_face_one_sequence_at_a_time_and_the_same_on_two_ranks(
    bench: Bench, two: Ranks, kind: str
) -> None:
    rows, temperatures = make_rows(bench, kind, (SHAPE, 5))
    job = bench.job(kind, rows, temperatures, token_budget=40)
    answer, gradients = bench.alone(job)
    model = bench.oracle(kind)
    loss = oracle_loss(model, rows, temperatures, "token_mean")
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert answer.losses == pytest.approx([float(loss.detach())], rel=1e-5)
    assert_same(
        gradients, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    )
    again = replace(job, token_budget=25, seed=5, options={"gradient_checkpointing": True})
    cuts = [bench.alone(again)]
    layouts = [Layout(2, {}), Layout(2, {"sequence": 2})]
    for layout in layouts:
        cuts.append(bench.spread(two, replace(again, parallel=layout.parallel)))
    for cut, theirs in cuts:
        assert_same_answer(cut, answer)
        assert_same(theirs, gradients)
