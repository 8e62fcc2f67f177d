"""Rules of an answer by itself: one result for each item, each of the form that was declared."""

import re

from rolecall.conformance.check import Contract, Verdict, passed, skipped, unless
from rolecall.conformance.reward.contract import ANSWERS, CONTRACT
from rolecall.conformance.reward.session import Items, RewardSession
from rolecall.scoring.description import components_problem, token_rewards_problem, value_problem
from rolecall.scoring.scores import MAX_CODE_CHARS
from rolecall.v1 import reward_pb2

_CODE = re.compile(rf"[A-Z][A-Z0-9_]{{0,{MAX_CODE_CHARS - 1}}}")


def problems(items: Items, response: reward_pb2.ScoreResponse, spec: reward_pb2.DescribeResponse) -> dict[str, str]:
    """The rules of this file that an answer breaks, each with the first thing that breaks it."""
    found: dict[str, str] = {}
    ids = [result.id for result in response.results]
    wanted = {item.id: item for item in items}
    missing, foreign = sorted(wanted.keys() - set(ids)), sorted(set(ids) - wanted.keys())
    if missing or foreign or len(ids) != len(wanted):
        found["results.complete"] = (
            f"{len(ids)} results to {len(wanted)} items: {len(missing)} missing {missing[:2]}, {len(foreign)} that "
            f"nobody asked for {foreign[:2]}, {len(ids) - len(set(ids))} twice"
        )
    for result in response.results:
        if result.id in wanted:
            for rule, problem in _result_problems(result, spec, wanted[result.id].num_response_tokens):
                if problem:
                    found.setdefault(rule, f"item {result.id}: {problem}")
    return found


def blame(session: RewardSession, items: Items, response: reward_pb2.ScoreResponse) -> str | None:
    """Returns what is wrong with an answer and was not found wrong before; None when nothing is."""
    found = problems(items, response, session.spec)
    return next((f"{problem} [{rule}]" for rule, problem in found.items() if rule not in session.failed), None)


@CONTRACT.rule(
    "results.complete", "ScoreResponse.results", "Exactly one per item, with its id.", needs=("describe.usable",)
)
async def complete(session: RewardSession) -> Verdict:
    """Looks for results that are missing, doubled or nobody's."""
    return await _kept("results.complete", session, f"{len(session.pool.items)} items")


@CONTRACT.rule(
    "result.outcome",
    "ScoreResult.outcome",
    "A score or the reason for none; a result with neither is refused by the caller.",
    needs=ANSWERS,
)
async def outcome(session: RewardSession) -> Verdict:
    """Looks for results that hold nothing."""
    return await _kept("result.outcome", session)


@CONTRACT.rule(
    "reward.value",
    "Reward.value",
    "The scalar reward; finite as a float32, within DescribeResponse's range.",
    needs=ANSWERS,
)
async def value(session: RewardSession) -> Verdict:
    """Looks for rewards that are no numbers or out of range; without any score there is nothing to look at."""
    rewards = await _rewards(session)
    if not rewards:
        return skipped("no item got a score; give items of your own with --items")
    values = [reward.value for reward in rewards]
    return await _kept("reward.value", session, f"{len(values)} rewards in [{min(values):g}, {max(values):g}]")


@CONTRACT.rule(
    "reward.components",
    "Reward.components",
    "Named parts of it, finite, each within its range; names as in DescribeResponse.components, without those that may "
    "be absent and do not apply to the item.",
    needs=ANSWERS,
)
async def components(session: RewardSession) -> Verdict:
    """Looks for components that were not declared, are missing or out of range."""
    return await _kept("reward.components", session, f"{len(session.spec.components)} declared")


@CONTRACT.rule(
    "reward.token_rewards",
    "Reward.token_rewards",
    "float32 [response tokens], finite: rewards per response token, when DescribeResponse.token_rewards; absent "
    "otherwise.",
    needs=ANSWERS,
)
async def token_rewards(session: RewardSession) -> Verdict:
    """Looks for token rewards of another form than the contract's, or than the description says."""
    return await _kept(
        "reward.token_rewards", session, "declared" if session.spec.token_rewards else "none, as declared"
    )


@CONTRACT.rule(
    "error.code",
    "ScoreError.code",
    'Short, stable, upper-case: "TIMEOUT", "BAD_GROUND_TRUTH"...; cut after 64 characters.',
    needs=ANSWERS,
)
async def error_code(session: RewardSession) -> Verdict:
    """Looks at the codes of items without a score; the kit's own items may all have one."""
    results = (await session.first_results()).values()
    codes = {result.error.code for result in results if result.WhichOneof("outcome") == "error"}
    if not codes:
        return passed("no item failed")
    return await _kept("error.code", session, f"codes {', '.join(sorted(codes))}")


@Contract[RewardSession]("the file of --items").rule(
    "items.expected", "expect_reward, expect_error", "What a line says of its score holds.", needs=ANSWERS
)
async def expected(session: RewardSession) -> Verdict:
    """Compares scores with those that the items file expects."""
    if not session.pool.expected:
        return skipped("no --items with expect_reward or expect_error")
    results = await session.first_results()
    for item_id, line in session.pool.expected.items():
        result, where = results[item_id], f"line {session.pool.lines[item_id]}"
        got = result.reward.value if result.WhichOneof("outcome") == "reward" else result.error.code
        if line.expect_error is not None:
            is_right = isinstance(got, str) and line.expect_error in ("", got)
            wanted: object = f"error {line.expect_error or 'of any code'}"
        else:
            wanted = line.expect_reward or 0.0
            allowed = session.options.tolerance * max(1.0, abs(wanted))
            is_right = not isinstance(got, str) and abs(got - wanted) <= allowed
        if not is_right:
            return unless(f"{where}: expected {wanted}, got {got}")
    return passed(f"{len(session.pool.expected)} as expected")


async def _rewards(session: RewardSession) -> list[reward_pb2.Reward]:
    results = (await session.first_results()).values()
    return [result.reward for result in results if result.WhichOneof("outcome") == "reward"]


async def _kept(rule: str, session: RewardSession, seen: str = "") -> Verdict:
    for items, response in await session.first():
        problem = problems(items, response, session.spec).get(rule)
        if problem:
            return unless(problem)
    return passed(seen)


def _result_problems(
    result: reward_pb2.ScoreResult, spec: reward_pb2.DescribeResponse, num_response_tokens: int
) -> list[tuple[str, str | None]]:
    match result.WhichOneof("outcome"):
        case "reward":
            return [
                ("reward.value", value_problem(result.reward, spec)),
                ("reward.components", components_problem(result.reward, spec)),
                ("reward.token_rewards", token_rewards_problem(result.reward, spec, num_response_tokens)),
            ]
        case "error":
            code = result.error.code
            return [("error.code", None if _CODE.fullmatch(code) else f"the code {code[:80]!r}")]
        case None:
            return [("result.outcome", "neither a reward nor an error")]
