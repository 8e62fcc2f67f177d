"""Checks of a run's surroundings before it starts.

Credentials, the store, users' functions, the services at addresses, free ports.

Part of `rolecall check`, and so of `rolecall train`: each check takes seconds at most, and what fails here would have
failed in a role minutes later. Each is an iterator of lines for people that ends in a ConfigError when something is
wrong; a line that begins with NOTE is also told by `rolecall train`.
"""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from rolecall.address import is_unix
from rolecall.commands.check.scorers import scorer_fits
from rolecall.environment.checks import environment_fits
from rolecall.environment.client import environment_channel
from rolecall.environment.server import SERVICE_NAME as ENVIRONMENT
from rolecall.errors import ConfigError, RoleCallError, UnauthenticatedError
from rolecall.launcher.plan import metrics_binds, role_environment
from rolecall.plugins import MAY_BE_ASYNC
from rolecall.rpc import tls as tls_files
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.rpc.listening import require_ports, require_tls, why_not
from rolecall.rpc.presence import LOOK_S, Ask, health_of, look
from rolecall.scoring.client import algorithm_problem, open_client, open_external, taken_problem
from rolecall.scoring.description import spec_problem
from rolecall.settings import (
    AddressSection,
    AlgorithmSection,
    CustomLoss,
    ExternalScorer,
    FunctionScorer,
    RunSettings,
    ScorerServer,
    ServiceSection,
    child_environment,
    scorer_environment,
    shadows_of,
)
from rolecall.store.embedded import find_binary
from rolecall.store.probe import find_store
from rolecall.v1 import controller_pb2, controller_pb2_grpc, reward_pb2

NOTE = "NOTE"
"""Begins a line that whoever starts the run is told as well."""
IMPORT_TIMEOUT_S = 20.0
"""Deadline of importing the modules of a user's function; one that takes longer is left to its role."""


def preflight(settings: RunSettings) -> Iterator[Iterator[str]]:
    """All checks of this file."""
    yield _credentials(settings)
    settings = acting_as(settings, Caller.OPERATOR, make=False)
    yield _store(settings)
    yield from _functions(settings)
    yield from _places(settings)
    if settings.reward.address is None:
        for name, component in settings.reward.placed_components.items():
            server = component.server
            if server is not None and server.address and component.scorer.kind != "external":
                yield _http_scorer(name, server, settings)
    yield from _ports(settings)
    if settings.actor.address is None or settings.rollout.num_replicas:
        yield _weight_ports(settings)


def _credentials(settings: RunSettings) -> Iterator[str]:
    if settings.rpc.tls is None:
        return
    roles = {
        Caller.OPERATOR: True,
        Caller.CONTROLLER: settings.controller.address is None,
        Caller.ACTOR: settings.actor.address is None,
        Caller.CRITIC: settings.critic is not None and settings.critic.address is None,
        Caller.REFERENCE: any(section.address is None for section in settings.references.values()),
        Caller.REWARD: settings.reward.address is None,
        Caller.ROLLOUT: settings.rollout.num_replicas > 0,
    }
    for tls in {acting_as(settings, role).rpc.tls: role for role, is_local in roles.items() if is_local}:
        assert tls is not None
        tls_files.mutual_credentials(tls)
        yield f"rpc.tls: {tls.certificate_file}, its key and the roots can be read"


def _store(settings: RunSettings) -> Iterator[str]:
    if settings.store.url is None:
        yield f"store: embedded, by {find_binary(settings.store.binary)}"
    else:
        where, unseen = find_store(settings.store)
        yield f"store: {where} answers and keeps what it acknowledges{', as far as it says' if unseen else ''}"
        for what in unseen:
            yield f"{NOTE} store.durability vouched: {where} does not let be seen {what}; your word is taken for it"


# --- users' functions -----------------------------------------------------------------------------


def _functions(settings: RunSettings) -> Iterator[Iterator[str]]:
    """Checks the functions that a local role will import, in processes of their own, as the role does it.

    What they do there is not done to this process.
    """
    if settings.reward.address is None:
        for name, component in settings.reward.components.items():
            scorer, setting = component.scorer, f"reward.components.{name}.scorer"
            if isinstance(scorer, FunctionScorer) and scorer.target is not None:
                section = settings.reward
                environment = scorer_environment(section.environment, role_environment(section))
                call = [f"{setting}.target", scorer.target, scorer.takes, *scorer.options]
                yield _function(call, section.search_path, environment, MAY_BE_ASYNC)
            if scorer.kind == "math":
                yield _math(setting)
    loss = settings.algorithm.policy_loss
    if isinstance(loss, CustomLoss) and settings.actor.address is None:
        # its GPUs, too: a module of kernels may ask for one
        environment = child_environment(role_environment(settings.actor))
        call = ["algorithm.policy_loss.function", loss.name, "a batch", *loss.options]
        yield _function(call, loss.folder, environment)


def _function(call: Sequence[str], folder: Path, environment: Mapping[str, str], *flags: str) -> Iterator[str]:
    """`call`: the setting, what it names, what that is called with, and its options, as `rolecall.plugins` takes it
    after the `flags`.
    """
    setting, target = call[:2]
    if not folder.is_dir():
        raise ConfigError(f"{setting} {target!r}: its folder {folder} is none; correct it")
    command = [sys.executable, "-P", "-m", "rolecall.plugins", *flags, *call]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield (
            f"{NOTE} {setting}: importing {target!r} takes more than {IMPORT_TIMEOUT_S:g} s, so whether it is "
            "there was not seen"
        )
        return
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"its import ended the process with code {done.returncode}"]
        raise ConfigError(
            said[-1]
            if said[-1].startswith(setting)
            else f"{setting} {target!r} cannot be imported: {said[-1]}; correct the module"
        )
    yield f"{setting}: {target} is found"


def _math(setting: str) -> Iterator[str]:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"{setting}: kind math needs math-verify, which is not installed; pip install 'rolecall[reward]'"
        )
    yield f"{setting}: math-verify is installed"


# --- whoever is at an address ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A role or a scorer that is not ours to start."""

    setting: str
    address: str
    wanted: str
    """The service that should answer there."""
    ask: Ask
    open: Callable[[], grpc.aio.Channel]
    notes: list[str] = field(default_factory=list)
    """The ends of sentences that begin with the address, of one that answered."""


def _places(settings: RunSettings) -> Iterator[Iterator[str]]:
    places = list(_named(settings))
    found = asyncio.run(_look_at_all(places, settings.rpc.behind_mesh))
    for place, answer in zip(places, found, strict=True):
        yield _told(place, answer, settings.controller.start_timeout_s)


async def _look_at_all(places: list[_Place], through_mesh: bool) -> list[str | ConfigError]:
    async def one(place: _Place) -> str | ConfigError:
        try:
            channel = place.open()
        except ConfigError as error:  # a file that it names, or no TLS
            return ConfigError(f"{place.setting.removesuffix('.address')}: {error.message}")
        async with channel:  # bounded: closing it waits for no call and no peer
            try:
                return await look(place.address, channel, place.ask, wanted=place.wanted, through_mesh=through_mesh)
            except ConfigError as error:
                return ConfigError(f"{place.setting} {place.address} {error.message}")

    return list(await asyncio.gather(*(one(place) for place in places)))


def _told(place: _Place, answer: str | ConfigError, start_timeout_s: float) -> Iterator[str]:
    if isinstance(answer, ConfigError):
        raise answer
    where = f"{place.setting} {place.address}"
    waits = f"the run waits for it, up to controller.start_timeout_s = {start_timeout_s:g} s"
    if place.wanted == ENVIRONMENT:
        waits = "its prompts wait for it, others go on"
    yield f"{NOTE} {where}: {answer}; {waits}" if answer else f"{where} answers"
    yield from (f"{NOTE} {where} {note}" for note in place.notes)


def _named(settings: RunSettings) -> Iterator[_Place]:
    roles: dict[str, ServiceSection | None] = {"actor": settings.actor, "critic": settings.critic}
    services = {name: f"rolecall.v1.{name.capitalize()}Service" for name in roles}
    roles |= {f"references.{name}": section for name, section in settings.references.items()}
    services |= {f"references.{name}": "rolecall.v1.ReferenceService" for name in settings.references}
    rpc = settings.rpc
    if settings.controller.address is not None:
        address = settings.controller.address
        yield _Place(
            "controller.address",
            address,
            "rolecall.v1.ControllerService",
            _ask_run(settings.run.name),
            lambda: open_channel(address, rpc),
        )
    for name, section in roles.items():
        if section is not None and section.address is not None:
            yield _Place(
                f"{name}.address",
                section.address,
                services[name],
                health_of(services[name]),
                _opener(section.address, settings),
            )
    for name, environment in settings.environments.items():
        yield _Place(
            f"environments.{name}.address",
            environment.address,
            ENVIRONMENT,
            environment_fits(settings, name),
            partial(environment_channel, environment, rpc),
        )
    reward = "rolecall.v1.RewardService"
    if settings.reward.address is not None:
        address_of_reward, notes = settings.reward.address, list[str]()
        yield _Place(
            "reward.address",
            address_of_reward,
            reward,
            scorer_fits(notes, partial(_unfit, settings.algorithm)),
            lambda: open_client(settings.reward, address_of_reward, rpc)[1],
            notes if not settings.reward.components else [],
        )
        return
    shadows = shadows_of(settings.reward.components)
    for name, component in settings.reward.placed_components.items():
        scorer = component.scorer
        if isinstance(scorer, ExternalScorer) and scorer.kind == "external" and scorer.address:
            notes = []
            yield _Place(
                f"reward.components.{name}.scorer.address",
                scorer.address,
                reward,
                scorer_fits(notes, is_shadow=name in shadows),
                _opener_of_scorer(name, scorer, settings),
                notes if scorer.server is None else [],
            )


def _opener(address: str, settings: RunSettings) -> Callable[[], grpc.aio.Channel]:
    return lambda: open_channel(address, settings.rpc)


def _opener_of_scorer(name: str, scorer: ExternalScorer, settings: RunSettings) -> Callable[[], grpc.aio.Channel]:
    return lambda: open_external(name, scorer, settings.rpc, timeout_s=LOOK_S, max_attempts=1)[1]


def _ask_run(name: str) -> Callable[[grpc.aio.Channel], Awaitable[None]]:
    async def ask(channel: grpc.aio.Channel) -> None:
        status = (
            await controller_pb2_grpc.ControllerServiceStub(channel).GetRun(
                controller_pb2.GetRunRequest(), timeout=LOOK_S
            )
        ).status
        if status.run != name:
            raise ConfigError(
                f"is the controller of the run {status.run!r}, not of {name!r}; correct the address or run.name"
            )

    return ask


def _unfit(algorithm: AlgorithmSection, spec: reward_pb2.DescribeResponse) -> str | None:
    return spec_problem(spec) or taken_problem(spec) or algorithm_problem(algorithm, spec)


def _http_scorer(name: str, scorer: ScorerServer, settings: RunSettings) -> Iterator[str]:
    setting = f"reward.components.{name}.scorer"
    where = f"{setting}.address {scorer.address}"
    try:
        asyncio.run(_look_over_http(name, scorer, settings))
        yield f"{where} answers"
    except ConfigError as error:  # a file that it names, or no TLS
        raise ConfigError(f"{setting}: {error.message}") from error
    except UnauthenticatedError as error:
        raise ConfigError(f"{where} refuses our token: {error.message}; correct bearer_token_file") from error
    except RoleCallError as error:
        wait_s = settings.controller.start_timeout_s
        yield (
            f"{NOTE} {where}: {error.message}; the run waits for it, up to controller.start_timeout_s = {wait_s:g} s"
        )


async def _look_over_http(name: str, scorer: ScorerServer, settings: RunSettings) -> None:
    from rolecall.scoring.json_server import JsonServer  # httpx2: a quarter of a second, for who needs it

    server = JsonServer(name, scorer, settings.rpc, timeout_s=LOOK_S)
    try:
        await server.look()
    finally:
        await server.close()


# --- ports ----------------------------------------------------------------------------------------


def _ports(settings: RunSettings) -> Iterator[Iterator[str]]:
    """The addresses that local roles are told to listen on; those that `rolecall train` chooses are free."""
    local: dict[str, AddressSection | None] = {
        "controller": settings.controller,
        "actor": settings.actor,
        "critic": settings.critic,
        "reward": settings.reward,
    }
    local |= {f"references.{name}": section for name, section in settings.references.items()}
    binds = {
        f"{name}.bind": section.bind
        for name, section in local.items()
        if section is not None and section.bind and section.address is None
    }
    binds |= {"rollout.bind": settings.rollout.bind} if settings.rollout.num_replicas else {}
    taken: dict[str, str] = {}
    for setting, bind in binds.items():
        yield _port(setting, bind, taken, settings, settings.rollout.num_replicas if setting == "rollout.bind" else 1)
    yield _metrics_ports(taken, settings)


def _metrics_ports(taken: dict[str, str], settings: RunSettings) -> Iterator[str]:
    for name, bind in metrics_binds(settings).items():
        yield from _port(f"telemetry.metrics_bind of {name}", bind, taken, settings, 1)


def _port(setting: str, bind: str, taken: dict[str, str], settings: RunSettings, num_replicas: int) -> Iterator[str]:
    require_tls(bind, settings.rpc, setting)
    if not is_unix(bind) and bind.endswith(":0"):
        return
    if bind in taken or num_replicas > 1:
        raise ConfigError(
            f"{setting} {bind} is {taken.get(bind, 'the address of every replica')}'s, too; give each its own port, "
            "or 0 for a free one"
        )
    taken[bind] = setting
    problem = why_not(bind)
    if problem:
        raise ConfigError(f"{setting} {bind} {problem}")
    yield f"{setting}: {bind} is free"


def _weight_ports(settings: RunSettings) -> Iterator[str]:
    host = settings.weights.host
    problem = why_not(f"[{host}]:0" if ":" in host else f"{host}:0") if settings.actor.address is None else ""
    if problem:
        raise ConfigError(f"weights.host {host} {problem}")
    require_ports(settings.weights)
    if settings.weights.ports is not None:
        yield f"weights.ports: the kernel hands out no others than {settings.weights.ports}"
