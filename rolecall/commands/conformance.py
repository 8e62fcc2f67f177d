"""`rolecall conformance`: holds a service that anybody wrote to its contract, over the wire. No torch."""

import argparse
import asyncio
from pathlib import Path
from typing import TextIO

from rolecall.address import check_address
from rolecall.conformance.check import run
from rolecall.conformance.peer import Peer, peer
from rolecall.conformance.report import Report
from rolecall.conformance.reward import CHECKS
from rolecall.conformance.reward.pool import Pool, own_pool, read_pool
from rolecall.conformance.reward.session import Options, RewardSession
from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.scoring.client import read_token
from rolecall.scoring.scores import spec_gaps
from rolecall.v1 import reward_pb2


def conformance(arguments: argparse.Namespace, out: TextIO) -> int:
    """Looks at the service at `arguments.address` and writes what was found to `out`, and to the file of --junit; 0
    when it breaks no rule, else 1. ConfigError for a bad command line, UnavailableError when nobody answers.
    """
    check_address(arguments.address)
    token = read_token(arguments.bearer_token_file)
    service = peer(arguments.address, ca_file=arguments.ca_file, folder=arguments.tls, token=token)
    if arguments.timeout <= 0 or arguments.load_seconds < 0 or arguments.tolerance < 0:
        raise ConfigError("--timeout must be more than 0, --load-seconds and --tolerance no less than 0")
    options = Options(
        timeout_s=arguments.timeout,
        tolerance=arguments.tolerance,
        load_s=arguments.load_seconds,
        drain_pid=arguments.drain,
    )
    pool = read_pool(arguments.items) if arguments.items else own_pool()
    report = asyncio.run(examine(service, pool, options))
    if arguments.junit:
        write(arguments.junit, report.junit())
    out.write(report.json() if arguments.json else report.text())
    return 0 if report.has_passed else 1


async def examine(service: Peer, pool: Pool, options: Options) -> Report:
    """Returns what the reward kit finds of a service. UnavailableError when nobody answers, or what else Describe
    raises.
    """
    session = RewardSession(service, pool, options)
    try:
        await session.open()
        results = await run(CHECKS, session)
    finally:
        await session.close()
    notes = [f"it {gap}" for gap in spec_gaps(session.spec)]
    return Report("RewardService", service.address, described(session.spec), results, notes, tuple(session.load))


def described(spec: reward_pb2.DescribeResponse) -> dict[str, object]:
    """Returns what a scorer says it is, for a report."""
    return {
        "name": spec.name,
        "reads": [
            reward_pb2.ScoreField.Name(field).removeprefix("SCORE_FIELD_").lower()
            for field in spec.reads
            if field in reward_pb2.ScoreField.values()
        ],
        "reward": _range(spec.reward),
        "components": {component.name: _range(component) for component in spec.components},
        "token_rewards": spec.token_rewards,
        "max_items": spec.max_items,
    }


def write(path: Path, text: str) -> None:
    """Writes a file; ConfigError when it cannot be."""
    with writing("write", path):
        path.write_text(text)


def _range(spec: reward_pb2.ComponentSpec) -> list[float | None]:
    return [spec.min if spec.HasField("min") else None, spec.max if spec.HasField("max") else None]
