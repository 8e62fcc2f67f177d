"""What the tests of the conformance kits share: both kits, what each is tried on, and how a service is examined."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolecall.commands.conformance import examine_environment, examine_scorer
from rolecall.conformance import environment, reward
from rolecall.conformance.check import Check, Status
from rolecall.conformance.environment.rows import read_file
from rolecall.conformance.environment.session import RUN_S
from rolecall.conformance.peer import Peer
from rolecall.conformance.report import Report
from rolecall.conformance.reward.pool import Pool, own_pool
from rolecall.conformance.reward.session import Options
from tests.contract import (
    agent_honest,
    agent_liars,
    environment_honest,
    environment_liars_answers,
    environment_liars_sessions,
    reward_liars,
    reward_peers,
)

ROOT = Path(__file__).parents[2]
CONTRACTS = "proto/rolecall/v1"
QUICK = Options(timeout_s=120.0, load_s=0.01, abandoned_work_s=0.01, slack_s=30.0)
"""With deadlines for machines that are busy."""
ABANDONED = replace(QUICK, slack_s=0.1)
ROWS: tuple[Mapping[str, object], ...] = ({}, {"uid": "b", "prompt": "Go."}, {"fails": True, "actions": ["a", "fail"]})
UNLISTED = {check.rule.name for check in environment.CHECKS if check.rule.name.startswith("tasks.")}
"""Rules of which nothing shows where an environment lists no tasks."""
ENDS = ("run.budget", "run.revoked")
"""Rules whose liars are waited for as long as a run may take."""
NEVER = {"cannot_begin": True, "ground_truth": "never"}


def broken(report: Report) -> list[str]:
    return [result.rule.name for result in report.results if result.verdict.status is Status.FAILED]


def skipped(report: Report) -> set[str]:
    return {result.rule.name for result in report.results if result.verdict.status is Status.SKIPPED}


async def examined(servicer: reward_liars.Honest, options: Options = QUICK, pool: Pool | None = None) -> Report:
    async with reward_peers.serving(servicer) as address:
        return await examine_scorer(Peer(address), pool or own_pool(), options)


async def played(servicer: environment_honest.Honest, folder: Path, run_s: float = RUN_S) -> Report:
    """What the kit finds of an environment, with rows that show failures."""
    rows = read_file(written(folder, *ROWS, NEVER))
    async with environment_honest.serving(servicer) as address:
        return await examine_environment(Peer(address), rows, run_s)


def written(folder: Path, *rows: Mapping[str, object]) -> Path:
    """An items file."""
    file = folder / "items.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@dataclass(frozen=True)
class Kit:
    """A kit, and what it is tried on."""

    checks: Sequence[Check[Any]]
    liars: Mapping[str, tuple[str, Callable[[], Any]]]
    examined: Callable[[Any, str, Path], Awaitable[Report]]
    """Examines a service; with the rule that it is said to break, and a folder to write to."""
    honest: Callable[[], Any]
    not_seen: set[str]
    """Rules that an honest service by itself does not show."""
    elsewhere: set[str]
    """Rules whose liars are servers, or files, of their own kind."""
    contracts: set[str]


KITS = {
    "reward": Kit(
        reward.CHECKS,
        reward_liars.LIARS.named,
        lambda servicer, rule, _: examined(servicer, ABANDONED if rule == "calls.abandoned" else QUICK),
        reward_liars.Honest,
        {"items.expected", "calls.token", "calls.drain"},
        {"items.expected", "calls.bytes", "calls.health", "calls.token", "calls.drain"},
        {f"{CONTRACTS}/reward.proto"},
    ),
    "environment": Kit(
        environment.CHECKS,
        environment_liars_answers.LIARS.named | environment_liars_sessions.LIARS.named,
        lambda servicer, _, folder: played(servicer, folder),
        lambda: environment_honest.Honest(environment_honest.LEASE_S, environment_honest.WORK_S),
        {"calls.token"},
        {"calls.bytes", "calls.health", "calls.token", "run.instead"},
        {f"{CONTRACTS}/environment.proto", f"{CONTRACTS}/trajectory.proto"},
    ),
    "agent": Kit(
        environment.AGENT_CHECKS,
        agent_liars.LIARS.named,
        lambda servicer, rule, folder: played(servicer, folder, 5.0 if rule in ENDS else RUN_S),
        lambda: agent_honest.HonestAgent(environment_honest.LEASE_S),
        {"calls.token"},
        {check.rule.name for check in environment.CHECKS} - {"run.instead", "reward.value", "reward.components"},
        {f"{CONTRACTS}/environment.proto", f"{CONTRACTS}/trajectory.proto"},
    ),
}
