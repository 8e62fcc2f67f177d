"""Rules of what a service says of itself."""

import asyncio

from rolecall.conformance.check import Verdict, failed, passed, unless
from rolecall.conformance.reward.contract import CONTRACT
from rolecall.conformance.reward.sameness import NEEDS, difference
from rolecall.conformance.reward.session import RewardSession
from rolecall.scoring.description import spec_problem
from rolecall.scoring.scores import ALL_FIELDS
from rolecall.v1 import reward_pb2, reward_pb2_grpc

NUM_ASKED = 8
"""Times that Describe is asked at once, on each of two connections."""


@CONTRACT.rule(
    "describe.usable",
    "DescribeResponse",
    "It has a name, known fields alone, components with names of their own, least values that do not exceed the "
    "greatest ones, and no negative max_items.",
)
async def usable(session: RewardSession) -> Verdict:
    """Looks for a description that contradicts itself."""
    if not session.spec.name:
        return failed("it has no name")
    return unless(spec_problem(session.spec), f"{session.spec.name!r}")


@CONTRACT.rule("describe.stable", "RewardService.Describe", "The answer stays the same.")
async def stable(session: RewardSession) -> Verdict:
    """Asks again after everything else, many times at once and on another connection, too."""
    question, timeout_s = reward_pb2.DescribeRequest(), session.options.timeout_s
    async with session.peer.open() as other:
        stubs = [session.stub, reward_pb2_grpc.RewardServiceStub(other)]
        answers = await asyncio.gather(
            *(stub.Describe(question, timeout=timeout_s) for stub in stubs for _ in range(NUM_ASKED))
        )
    for answer in answers:
        if answer != session.spec:
            return failed(f"first {_line(session.spec)}; later {_line(answer)}")
    return passed(f"{len(answers)} answers on two connections")


@CONTRACT.rule("describe.reads", "DescribeResponse.reads", "A field that it does not name changes no score.", NEEDS)
async def reads(session: RewardSession) -> Verdict:
    """Sends every field, and compares with the scores of items that had the named ones alone."""
    unnamed = [reward_pb2.ScoreField.Name(field) for field in ALL_FIELDS if field not in session.spec.reads]
    if not unnamed:
        return passed("it names every field")
    whole = {item.id: item for item in session.pool.items}
    results = await session.results(
        [[whole[item.id] for item in chunk] for chunk in session.chunks(session.pool.items)]
    )
    problem = difference(await session.first_results(), results, session.options.tolerance)
    names = ", ".join(name.removeprefix("SCORE_FIELD_") for name in unnamed)
    return unless(problem and f"with {names}: {problem}", f"the same with {names}")


def _line(spec: reward_pb2.DescribeResponse) -> str:
    return " ".join(str(spec).split())
