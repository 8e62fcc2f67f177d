"""A small real service for the RPC tests, certificates made on the spot, and servers that always end."""

import asyncio
import datetime
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rolecall.errors import RoleCallError, UnknownWorkerError
from rolecall.rpc import deadlines
from rolecall.rpc.server import Server
from rolecall.settings import RpcSection, TlsSection
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.twins.callers import party

SERVICE = "rolecall.v1.ControllerService"


class Peer(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that does as it is told: `fails` is raised by GetRun and, after `num_sent` messages, by WatchRun."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.num_fails = 1_000_000
        self.num_sent = 2
        self.delay_s = 0.0
        self.calls: list[str] = []
        self.metadata: dict[str, str] = {}
        self.time_remaining_s: float | None = None
        self.cancelled = asyncio.Event()
        self.known: set[str] = set()
        self.joins: list[controller_pb2.JoinRequest] = []
        self.refusal: RoleCallError | None = None
        self.beats: list[controller_pb2.HeartbeatRequest] = []
        self.peers: set[str] = set()
        self.given_up: RoleCallError | None = None
        """What the next heartbeats are answered with."""
        self.over = False
        self.on_get_run: Callable[[], Any] | None = None

    async def Join(self, request: controller_pb2.JoinRequest, context: Any) -> controller_pb2.JoinResponse:
        self.joins.append(request)
        self.peers.add(context.peer())
        if self.refusal:
            raise self.refusal
        self.known.add(request.worker)
        return controller_pb2.JoinResponse(ctl=7, heartbeat_s=0.02, lease_s=1.0)

    async def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: Any
    ) -> controller_pb2.HeartbeatResponse:
        self.beats.append(request)
        if self.given_up:
            raise self.given_up
        if request.worker not in self.known:
            raise UnknownWorkerError(f"{request.worker} has not joined")
        return controller_pb2.HeartbeatResponse(ctl=8, over=self.over)

    async def GetRun(self, request: controller_pb2.GetRunRequest, context: Any) -> controller_pb2.GetRunResponse:
        self.calls.append("GetRun")
        self.peers.add(context.peer())
        self.metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        self.time_remaining_s = deadlines.remaining_s()
        try:
            await asyncio.sleep(self.delay_s)
            if self.on_get_run:
                await self.on_get_run()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.fails and len(self.calls) <= self.num_fails:
            raise self.fails
        return controller_pb2.GetRunResponse()

    async def WatchRun(
        self, request: controller_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[controller_pb2.WatchRunResponse]:
        self.time_remaining_s = deadlines.remaining_s()
        try:
            for step in range(self.num_sent):
                yield controller_pb2.WatchRunResponse(status=controller_pb2.RunStatus(step=step))
            await asyncio.sleep(self.delay_s)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        if self.fails:
            raise self.fails

    async def PauseRun(self, request: controller_pb2.PauseRunRequest, context: Any) -> controller_pb2.PauseRunResponse:
        return controller_pb2.PauseRunResponse()

    async def ResumeRun(
        self, request: controller_pb2.ResumeRunRequest, context: Any
    ) -> controller_pb2.ResumeRunResponse:
        return controller_pb2.ResumeRunResponse()

    async def StopRun(self, request: controller_pb2.StopRunRequest, context: Any) -> controller_pb2.StopRunResponse:
        return controller_pb2.StopRunResponse()

    async def SaveCheckpoint(
        self, request: controller_pb2.SaveCheckpointRequest, context: Any
    ) -> controller_pb2.SaveCheckpointResponse:
        return controller_pb2.SaveCheckpointResponse(path="x" * int(request.ByteSize() or 0))

    async def ProfileWorker(
        self, request: controller_pb2.ProfileWorkerRequest, context: Any
    ) -> AsyncIterator[controller_pb2.ProfileWorkerResponse]:
        yield controller_pb2.ProfileWorkerResponse()


@asynccontextmanager
async def serving(
    peer: Peer, rpc: RpcSection | None = None, bind: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[Server, str]]:
    """A started server with `peer` behind it, and its address."""
    server = Server(rpc or party(), bind)
    server.add(controller_pb2_grpc.add_ControllerServiceServicer_to_server, peer, SERVICE)
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.drain(0.1)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *uris: str) -> TlsSection:
        """Writes (or replaces) a certificate and key for localhost under `name`: a role of the run `test`, unless
        `uris` say who else it is.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names = [x509.UniformResourceIdentifier(uri) for uri in uris or [f"spiffe://rolecall/rolecall/test/{name}"]]
        certificate = (
            self._builder(subject, key)
            .add_extension(x509.SubjectAlternativeName([*hosts, *names]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        certificate_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return TlsSection(certificate_file=certificate_file, key_file=key_file, ca_file=self.ca_file)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(hours=1)
        )
