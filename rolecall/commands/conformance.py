"""`rolecall conformance`: holds a service that anybody wrote to its contract, over the wire. No torch."""

import argparse
import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import grpc

from rolecall.address import check_address
from rolecall.conformance import environment, reward
from rolecall.conformance.check import Check, Result, SessionT, run
from rolecall.conformance.environment.rows import Rows, own_rows, read_file
from rolecall.conformance.environment.session import RUN_S, EnvironmentSession
from rolecall.conformance.peer import CONNECT_S, Peer, peer, told
from rolecall.conformance.report import Report, Tell, junit, line
from rolecall.conformance.reward.pool import Pool, own_pool, read_pool
from rolecall.conformance.reward.session import Options, RewardSession
from rolecall.disk import writing
from rolecall.errors import ConfigError, UnavailableError, VersionMismatchError
from rolecall.rpc.presence import is_taken
from rolecall.rpc.tls import read_token
from rolecall.scoring.description import spec_gaps
from rolecall.terminal import say
from rolecall.v1 import environment_pb2, environment_pb2_grpc, reward_pb2, reward_pb2_grpc


def conformance(arguments: argparse.Namespace, out: TextIO) -> int:
    """Looks at the service at `arguments.address` and writes what is found to `out`, for people rule by rule, and to
    the file of --junit; 0 when it breaks no rule, else 1. ConfigError for a bad command line, UnavailableError when
    nobody answers.
    """
    check_address(arguments.address)
    token = read_token(arguments.bearer_token_file)
    service = peer(arguments.address, ca_file=arguments.ca_file, folder=arguments.tls, token=token)
    if arguments.timeout <= 0 or arguments.load_seconds < 0 or arguments.tolerance < 0:
        raise ConfigError("--timeout must be more than 0, --load-seconds and --tolerance no less than 0")
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)  # of answers that are no messages the report tells
    options = Options(
        timeout_s=arguments.timeout,
        tolerance=arguments.tolerance,
        load_s=arguments.load_seconds,
        drain_pid=arguments.drain,
    )
    if arguments.items and not arguments.items.is_file():
        raise ConfigError(f"--items: cannot read {arguments.items}: it is no file")
    if arguments.junit and not arguments.junit.parent.is_dir():
        raise ConfigError(f"--junit: cannot write {arguments.junit}: {arguments.junit.parent} is no folder; make it")

    def tell(text: str) -> None:
        out.write(text)
        out.flush()

    telling = say if arguments.junit else tell  # the file is written though nobody reads the table
    reports = asyncio.run(examine(service, arguments.items, options, _nothing if arguments.json else telling))
    if arguments.junit:
        write(arguments.junit, junit(reports))
    if arguments.json:
        objects = [report.json() for report in reports]
        out.write(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2) + "\n")
    return 0 if all(report.has_passed for report in reports) else 1


def _nothing(text: str) -> None:
    """Tells nobody."""


async def examine(service: Peer, items: Path | None, options: Options, tell: Tell = _nothing) -> list[Report]:
    """Returns what the kit of each contract finds that the service says it serves, and tells it as it is found.
    `items`: what it is asked, in the form of that contract's. UnavailableError, before they are read, when nobody
    answers; VersionMismatchError when it serves none.
    """
    async with service.open() as channel:
        calls: list[grpc.aio.UnaryUnaryCall[Any, Any]] = [
            reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=CONNECT_S),
            environment_pb2_grpc.EnvironmentServiceStub(channel).Describe(
                environment_pb2.DescribeEnvironmentRequest(), timeout=CONNECT_S
            ),
        ]
        codes = [await call.code() for call in calls]  # bounded: by the calls' deadlines
        if not {grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED} & set(codes):
            await _unanswered(calls[0], service, channel)  # raises: nobody says in whose form the items are
    # Of two contracts that are served, a Describe that fails is its kit's to tell.
    scores, plays = (code is not grpc.StatusCode.UNIMPLEMENTED for code in codes)
    reports = []
    if scores:
        reports.append(await examine_scorer(service, read_pool(items) if items else own_pool(), options, tell))
    if scores and plays:
        tell("\n")
    if plays:
        rows = read_file(items) if items else own_rows()
        reports.append(await examine_environment(service, rows, options.timeout_s, tell))
    if not reports:
        raise VersionMismatchError(
            f"{service.address} serves neither rolecall.v1.RewardService nor rolecall.v1.EnvironmentService; name the "
            "address of a service that does"
        )
    return reports


async def _unanswered(call: Awaitable[object], service: Peer, channel: grpc.aio.Channel) -> None:
    """Raises what the call ended with; where somebody listens and there is no connection, also how it was called."""
    try:
        await told(call, service.address, "Describe")
    except UnavailableError as error:
        is_connected = channel.get_state() in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)
        if is_connected or not await asyncio.to_thread(is_taken, service.address):
            raise
        raise UnavailableError(f"{error.message}; {service.way}") from error


async def examine_scorer(service: Peer, pool: Pool, options: Options, tell: Tell = _nothing) -> Report:
    """Returns what the reward kit finds of a service, and tells it as it is found. UnavailableError when nobody
    answers, or what else Describe raises.
    """
    session = RewardSession(service, pool, options)
    try:
        await session.open()
        notes = [f"it {gap}" for gap in spec_gaps(session.spec)]
        report = Report("RewardService", service.address, described(session.spec), notes=notes, load=session.load)
        return await _filled(report, reward.CHECKS, session, session.unseen, tell)
    finally:
        await session.close()


async def examine_environment(service: Peer, rows: Rows, run_s: float = RUN_S, tell: Tell = _nothing) -> Report:
    """Returns what the environment kit finds of a service, and tells it as it is found. An agent that the service runs
    has `run_s` seconds for an episode. UnavailableError when nobody answers, or what else Describe raises; ConfigError
    for a row that the environment cannot begin.
    """
    session = EnvironmentSession(service, rows, run_s)
    try:
        await session.open()
        checks = environment.AGENT_CHECKS if session.spec.runs_episodes else environment.CHECKS
        report = Report("EnvironmentService", service.address, described_environment(session.spec))
        return await _filled(report, checks, session, session.unseen, tell)
    finally:
        await session.close()


async def _filled(
    report: Report, checks: Sequence[Check[SessionT]], session: SessionT, unseen: Callable[[], str], tell: Tell
) -> Report:
    """The report with what the checks find, and with what of the service they have not seen."""

    def note(result: Result) -> None:
        report.results.append(result)
        tell(line(result))

    tell(report.head())
    await run(checks, session, note)
    report.unseen.extend(filter(None, [unseen()]))
    tell(report.tail())
    return report


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
        "components": _ranges(spec.components),
        "token_rewards": spec.token_rewards,
        "max_items": spec.max_items,
    }


def described_environment(spec: environment_pb2.DescribeEnvironmentResponse) -> dict[str, object]:
    """Returns what an environment says it is, for a report."""
    return {
        "name": spec.name,
        "version": spec.version,
        "reward": _range(spec.reward) if spec.HasField("reward") else None,
        "components": _ranges(spec.components),
        "turn_rewards": spec.turn_rewards,
        "max_sessions": spec.max_sessions,
        "lease_s": spec.lease_s,
        "roles": list(spec.roles),
        "deterministic": spec.deterministic,
        "runs_episodes": spec.runs_episodes,
    }


def write(path: Path, text: str) -> None:
    """Writes a file; ConfigError when it cannot be."""
    with writing("write", path):
        path.write_text(text)


def _ranges(specs: Sequence[reward_pb2.ComponentSpec]) -> dict[str, list[float | None]]:
    return {spec.name: _range(spec) for spec in specs}


def _range(spec: reward_pb2.ComponentSpec) -> list[float | None]:
    return [spec.min if spec.HasField("min") else None, spec.max if spec.HasField("max") else None]
