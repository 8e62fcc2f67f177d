"""The parts of a run, built from its settings: store and roles connected, then data read.

Owns the connections until `close`. Nothing is called here: a role that is not up yet is noticed by run.py.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from rolecall.algorithms.advantages.custom import load as load_advantage
from rolecall.checkpoint.storage import open_storage
from rolecall.data.dataset import load_training_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import UnavailableError
from rolecall.identity import run_id
from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import open_client
from rolecall.settings import CustomAdvantage, RunSettings
from rolecall.store.budget import PromptBytes
from rolecall.store.connection import Connection, connect
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trackers import End, Trackers
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.critic_pb2_grpc import CriticServiceStub
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.config import admission_policy
from services.controller.durable.commits import Commits
from services.controller.durable.run_point import Checkpoints
from services.controller.evaluation.evaluation import Evaluation
from services.controller.evaluation.sets import load_sets
from services.controller.fleet.members import Fleet
from services.controller.groups.prompts import PromptRenderer, PromptSequence
from services.controller.parts import Connections, Data
from services.controller.publish.probe import make_probe
from services.controller.step.shifts import DeviceShifts
from services.controller.step.trainers import ActorTrainer, CriticTrainer
from services.controller.threads import StoreThreads


@dataclass(frozen=True)
class Wiring:
    """The connections of one run, and what is beneath them."""

    connections: Connections
    encoder: PromptEncoder
    channels: tuple[grpc.aio.Channel, ...]
    store: Connection

    async def close(self, end: End) -> None:
        """Lets go of everything; trackers show `end`."""
        connections = self.connections
        await asyncio.to_thread(connections.trackers.flush, end)
        await connections.fleet.close()
        for channel in self.channels:
            await channel.close()
        await connections.threads.settle()
        connections.threads.close()
        connections.shifts.close()
        self.store.close()


def wire(settings: RunSettings) -> Wiring:
    """Looks at the GPUs of the file, reads the user's estimator and the tokenizer and connects to the store;
    ConfigError and StoreUnavailableError come from here.
    """
    settings.require_same_gpus()
    if isinstance(settings.algorithm.advantage, CustomAdvantage):
        # what is wrong with it is said now, not when the first batch is sampled
        load_advantage(settings.algorithm.advantage)
    threads, store = StoreThreads(), connect(settings.store)
    ledger = Ledger(store, settings.run.name)
    tokenizer = ChatTokenizer.of(settings.model)
    fleet = Fleet(settings, ledger, threads, tokenizer=tokenizer.digest, token_ids=tokenizer.ids_digest)
    encoder = PromptEncoder.of(settings, tokenizer)
    reward, reward_channel = open_client(settings.reward, _address("reward", settings.reward.address), settings.rpc)
    references, channels = _references(settings)
    actor, actor_channel = _actor(settings)
    critic, critic_channels = _critic(settings)
    board = RunBoard()
    run = settings.run
    checkpoints = Checkpoints(open_storage(run.checkpoints), run.keep_checkpoints, run_id(run.dir))
    connections = Connections(
        settings=settings,
        renderer=PromptRenderer(encoder, settings.data.max_prompt_tokens),
        ledger=ledger,
        rows=Rows(store, settings.run.name, settings.store.num_shards),
        threads=threads,
        checkpoints=checkpoints,
        commits=Commits(checkpoints, threads, settings.actor.train_timeout_s),
        trackers=Trackers(settings),
        reward=reward,
        references=references,
        actor=actor,
        critic=critic,
        fleet=fleet,
        board=board,
        shifts=DeviceShifts(settings, fleet, board, actor, critic, references),
    )
    return Wiring(connections, encoder, (reward_channel, *channels, actor_channel, *critic_channels), store)


def read_data(wiring: Wiring, tell: Callable[[str], None]) -> Data:
    """Reads the prompts, which takes minutes where there are millions: for a thread. `tell` is called with what is read
    by then. ConfigError as of load_prompts, and where the store cannot hold their batches; StorageUnavailableError for
    an image that cannot be read now.
    """
    connections = wiring.connections
    settings, renderer = connections.settings, connections.renderer
    raw_prompts = load_training_prompts(settings, tell)
    prompt_bytes = PromptBytes.largest(raw_prompts, settings.algorithm.groups_per_batch)
    probed = PromptSequence(raw_prompts, renderer, seed=settings.run.seed, shuffle=True)
    sets = load_sets(settings, renderer, tell)
    return Data(
        raw_prompts,
        prompt_bytes,
        make_probe(settings, probed, wiring.encoder.visual_tokens),
        admission_policy(settings, prompt_bytes),
        Evaluation(settings, connections.fleet, connections.reward, connections.board, sets),
    )


def _references(settings: RunSettings) -> tuple[dict[str, ReferenceServiceStub], list[grpc.aio.Channel]]:
    channels = {
        name: _open(settings, f"references.{name}", section.address, "rolecall.v1.ReferenceService/ComputeLogprobs")
        for name, section in settings.references.items()
    }
    return {name: ReferenceServiceStub(channel) for name, channel in channels.items()}, list(channels.values())


def _actor(settings: RunSettings) -> tuple[ActorTrainer, grpc.aio.Channel]:
    channel = _open(settings, "actor", settings.actor.address, "rolecall.v1.ActorService/ComputeLogprobs")
    return ActorTrainer("actor", ActorServiceStub(channel), settings.actor), channel


def _critic(settings: RunSettings) -> tuple[CriticTrainer | None, list[grpc.aio.Channel]]:
    section = settings.critic
    if section is None:
        return None, []
    channel = _open(settings, "critic", section.address, "rolecall.v1.CriticService/ComputeValues")
    return CriticTrainer("critic", CriticServiceStub(channel), settings.actor), [channel]


def _open(settings: RunSettings, section: str, address: str | None, *idempotent: str) -> grpc.aio.Channel:
    return open_channel(_address(section, address), settings.rpc, idempotent=idempotent)


def _address(section: str, address: str | None) -> str:
    if address is None:
        raise UnavailableError(
            f"{section}.address is not set: `rolecall train` sets it for roles it starts, else give it in the "
            "configuration"
        )
    return address
