"""Rules of the server around the calls: who may call, how much it reads, what it tells probes."""

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.contract import CONTRACT, TURNS
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.conformance.reward.limits import REQUEST_BYTES, SPARE_BYTES
from rolecall.conformance.server import refuses, tells_probes
from rolecall.v1 import environment_pb2, environment_pb2_grpc


@CONTRACT.rule(
    "calls.token",
    "EnvironmentService",
    "A server that wants a bearer token refuses calls without it with UNAUTHENTICATED.",
)
async def token(session: EnvironmentSession) -> Verdict:
    """Calls every method on a connection without the token."""
    if session.peer.token is None:
        return skipped("it was called without a bearer token")
    name, timeout_s = "conformance/0/0/kit-1", session.step_s
    async with session.peer.open(with_token=False) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        reset = environment_pb2.ResetRequest(session=name, group="conformance/0", fence=1)
        older = environment_pb2.CloseOlderRequest(group="conformance/0")
        listing = stub.ListTasks(environment_pb2.ListTasksRequest(page_size=1), timeout=timeout_s)
        return await refuses(
            {
                **({"ListTasks": listing} if session.spec.splits else {}),
                "Describe": stub.Describe(environment_pb2.DescribeEnvironmentRequest(), timeout=timeout_s),
                "Reset": stub.Reset(reset, timeout=timeout_s),
                "Step": stub.Step(environment_pb2.StepRequest(session=name, turn=1), timeout=timeout_s),
                "Close": stub.Close(environment_pb2.CloseRequest(session=name), timeout=timeout_s),
                "CloseOlder": stub.CloseOlder(older, timeout=timeout_s),
            }
        )


@CONTRACT.rule(
    "calls.health",
    "EnvironmentService",
    "Where it serves grpc.health.v1.Health, it is SERVING while it takes sessions.",
    TURNS,
)
async def health(session: EnvironmentSession) -> Verdict:
    """Asks for the health of the whole server."""
    return await tells_probes(session.channel, session.step_s)


@CONTRACT.rule(
    "calls.bytes",
    "EnvironmentService",
    "Requests of up to 4 MiB, gRPC's own limit, are read.",
    (*TURNS, "action.text"),
)
async def large_request(session: EnvironmentSession) -> Verdict:
    """Says something of almost 4 MiB. A turn that is not done in time was read all the same."""
    text = "word " * ((REQUEST_BYTES - SPARE_BYTES) // 5)
    async with session.episode(session.rows.played[0]) as episode:
        await episode.reset()
        num_bytes = episode.turn(1, text).ByteSize()
        call = episode.step(1, text)
        code = await call.status()
        if code not in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED):
            details = await call.message()
            return failed(f"{num_bytes:,} bytes: {code.name}: {details}")
    return passed(f"{num_bytes:,} bytes")
