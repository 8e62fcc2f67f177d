"""EnvironmentService in gRPC: decode, one call of the sessions, encode; and `serve`, the server around it."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from rolecall import telemetry
from rolecall.environment.answers import ROLES, spec_problem
from rolecall.environment.env import Env, Task
from rolecall.environment.sessions import Sessions
from rolecall.environment.tasks import page_of
from rolecall.errors import ConfigError
from rolecall.rpc import role_process
from rolecall.rpc.identity import Admission
from rolecall.rpc.listening import rpc_section
from rolecall.rpc.server import Server
from rolecall.rpc.tls import read_token
from rolecall.scoring.description import component_spec
from rolecall.settings import RpcSection, TelemetrySection
from rolecall.v1 import environment_pb2, environment_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "rolecall.v1.EnvironmentService"
MAX_SESSIONS = 64
LEASE_S = 600.0
"""Longer than any turn is sampled; what callers that died left open is closed by whoever takes their place."""
Range: TypeAlias = tuple[float | None, float | None]
"""Least and greatest value; None where there is none."""
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def serve(
    make: Callable[[], Env],
    address: str = "127.0.0.1:50080",
    *,
    name: str,
    range: Range | None = None,
    components: Mapping[str, Range] | None = None,
    turn_rewards: bool = False,
    max_sessions: int = MAX_SESSIONS,
    lease_s: float = LEASE_S,
    roles: Sequence[str] = ROLES,
    deterministic: bool = False,
    runs_episodes: bool = False,
    reset_timeout_s: float = 0.0,
    step_timeout_s: float = 0.0,
    close_timeout_s: float = 0.0,
    tasks: Mapping[str, Sequence[Task]] | None = None,
    bearer_token_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    behind_mesh: bool = False,
) -> int:
    """Serves the environment that `make` makes, one object for each episode, on `address` until SIGTERM or Ctrl-C;
    returns the exit code.

    range, components: where the reward and the named parts of a Score lie; no range: it gives no rewards. turn_rewards:
    turns before the last may earn something, too. max_sessions: episodes at a time, each with a thread. lease_s: a
    session that nobody calls for longer is closed. roles: those of its messages; text alone has the first.
    deterministic: whether task, seed and actions determine every answer. runs_episodes: `make` makes an Agent, which
    calls the policy by itself. The three deadlines: 0 stands for 60, 30 and 10 s. tasks: the data set that comes with
    the environment, by split, which `rolecall tasks` makes a file of; slices of it are read in threads.
    bearer_token_file: refuse callers without this token. certificate_file, key_file: serve TLS; needed beyond loopback,
    unless behind_mesh.
    """
    tasks = tasks or {}
    spec = description(
        name,
        range,
        components or {},
        turn_rewards=turn_rewards,
        max_sessions=max_sessions,
        lease_s=lease_s,
        roles=roles,
        deterministic=deterministic,
        runs_episodes=runs_episodes,
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
        close_timeout_s=close_timeout_s,
        splits=tuple(tasks),
    )
    rpc, token = rpc_section(certificate_file, key_file, behind_mesh), read_token(bearer_token_file)

    async def main() -> None:
        sessions = Sessions(make, spec)
        server = new_server(sessions, address, rpc, token, tasks)
        bound = await server.start()
        await server.set_serving(True)
        logger.info("environment %s serves on %s", name, bound)
        reaping = asyncio.create_task(sessions.run())
        try:
            await role_process.serve(server)
        finally:
            reaping.cancel()
            await sessions.close()

    telemetry.configure(TelemetrySection(), "environment", name)
    return role_process.run(main, f"environment {name}")


def description(
    name: str,
    reward_range: Range | None = None,
    components: Mapping[str, Range] | None = None,
    *,
    turn_rewards: bool = False,
    max_sessions: int = MAX_SESSIONS,
    lease_s: float = LEASE_S,
    roles: Sequence[str] = ROLES,
    deterministic: bool = False,
    runs_episodes: bool = False,
    reset_timeout_s: float = 0.0,
    step_timeout_s: float = 0.0,
    close_timeout_s: float = 0.0,
    splits: Sequence[str] = (),
) -> environment_pb2.DescribeEnvironmentResponse:
    """The answer to Describe. ConfigError when no caller would accept it."""
    spec = environment_pb2.DescribeEnvironmentResponse(
        name=name,
        reward=None if reward_range is None else component_spec("", *reward_range),
        components=[component_spec(part, *bounds) for part, bounds in (components or {}).items()],
        turn_rewards=turn_rewards,
        max_sessions=max_sessions,
        lease_s=lease_s,
        roles=roles,
        deterministic=deterministic,
        runs_episodes=runs_episodes,
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
        close_timeout_s=close_timeout_s,
        splits=splits,
    )
    problem = spec_problem(spec)
    if problem:
        raise ConfigError(f"environment {name!r} {problem}")
    if max_sessions < 1:
        raise ConfigError(f"environment {name!r} has max_sessions {max_sessions}; each takes a thread: give it some")
    return spec


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """The servicer of EnvironmentService: one call of the sessions per method, and pages of tasks."""

    def __init__(
        self, sessions: Sessions, bearer_token: str | None = None, tasks: Mapping[str, Sequence[Task]] | None = None
    ) -> None:
        self._sessions = sessions
        self._tasks = tasks or {}
        self._admission = Admission(bearer_token, f"environment {sessions.spec.name!r}")

    async def Describe(
        self, request: environment_pb2.DescribeEnvironmentRequest, context: Context
    ) -> environment_pb2.DescribeEnvironmentResponse:
        self._admission.check(context)
        return self._sessions.spec

    async def ListTasks(
        self, request: environment_pb2.ListTasksRequest, context: Context
    ) -> environment_pb2.ListTasksResponse:
        self._admission.check(context)
        return await asyncio.to_thread(page_of, self._tasks, request)

    async def Reset(self, request: environment_pb2.ResetRequest, context: Context) -> environment_pb2.ResetResponse:
        self._admission.check(context)
        return await self._sessions.reset(request)

    async def Step(self, request: environment_pb2.StepRequest, context: Context) -> environment_pb2.StepResponse:
        self._admission.check(context)
        return await self._sessions.step(request)

    async def RunEpisode(
        self, request: environment_pb2.RunEpisodeRequest, context: Context
    ) -> environment_pb2.RunEpisodeResponse:
        self._admission.check(context)
        return await self._sessions.run_episode(request)

    async def Close(self, request: environment_pb2.CloseRequest, context: Context) -> environment_pb2.CloseResponse:
        self._admission.check(context)
        return await self._sessions.end(request)

    async def CloseOlder(
        self, request: environment_pb2.CloseOlderRequest, context: Context
    ) -> environment_pb2.CloseOlderResponse:
        self._admission.check(context)
        return environment_pb2.CloseOlderResponse(num_closed=self._sessions.close_older(request))


def new_server(
    sessions: Sessions,
    address: str,
    rpc: RpcSection,
    bearer_token: str | None = None,
    tasks: Mapping[str, Sequence[Task]] | None = None,
) -> Server:
    """A server of `sessions` and `tasks`, not started: for a process that serves them beside other things."""
    server = Server(rpc, address, setting="address", client_certificates=False)
    servicer = EnvironmentServicer(sessions, bearer_token, tasks)
    server.add(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, servicer, SERVICE_NAME)
    return server
