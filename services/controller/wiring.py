"""The parts of a run, built from its settings: data read, store and roles connected.

Owns the connections until `close`. Nothing is called here: a role that is not up yet is noticed by run.py.
"""

import asyncio
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
from services.controller.evaluation import Evaluation, load_sets
from services.controller.fleet.members import Fleet
from services.controller.groups.prompts import PromptRenderer, PromptSequence
from services.controller.parts import Parts
from services.controller.publish.probe import make_probe
from services.controller.step.shifts import DeviceShifts
from services.controller.step.trainers import ActorTrainer, CriticTrainer
from services.controller.threads import StoreThreads


@dataclass(frozen=True)
class Wiring:
    """The parts of one run and the connections behind them."""

    parts: Parts
    channels: tuple[grpc.aio.Channel, ...]
    connection: Connection

    async def close(self, end: End) -> None:
        """Lets go of everything; trackers show `end`."""
        await asyncio.to_thread(self.parts.trackers.flush, end)
        await self.parts.fleet.close()
        for channel in self.channels:
            await channel.close()
        await self.parts.threads.settle()
        self.parts.threads.close()
        self.parts.shifts.close()
        self.connection.close()


def wire(settings: RunSettings) -> Wiring:
    """Reads the data and the user's estimator and connects to the store; ConfigError and StoreUnavailableError come
    from here.
    """
    raw_prompts = load_training_prompts(settings)
    prompt_bytes = PromptBytes.largest(raw_prompts, settings.algorithm.groups_per_batch)
    policy = admission_policy(settings, prompt_bytes)
    if isinstance(settings.algorithm.advantage, CustomAdvantage):
        # what is wrong with it is said now, not when the first batch is sampled
        load_advantage(settings.algorithm.advantage)
    threads, connection = StoreThreads(), connect(settings.store)
    ledger = Ledger(connection, settings.run.name)
    tokenizer = ChatTokenizer.of(settings.model)
    fleet = Fleet(settings, ledger, threads, tokenizer=tokenizer.digest, token_ids=tokenizer.ids_digest)
    encoder = PromptEncoder.of(settings, tokenizer)
    renderer = PromptRenderer(encoder, settings.data.max_prompt_tokens)
    probed = PromptSequence(raw_prompts, renderer, seed=settings.run.seed, shuffle=True)
    reward, reward_channel = open_client(settings.reward, _address("reward", settings.reward.address), settings.rpc)
    references, channels = _references(settings)
    actor, actor_channel = _actor(settings)
    critic, critic_channels = _critic(settings)
    board = RunBoard()
    run = settings.run
    checkpoints = Checkpoints(open_storage(run.checkpoints), run.keep_checkpoints, run_id(run.dir))
    parts = Parts(
        settings=settings,
        raw_prompts=raw_prompts,
        prompt_bytes=prompt_bytes,
        renderer=renderer,
        probe=make_probe(settings, probed, encoder.visual_tokens),
        policy=policy,
        ledger=ledger,
        rows=Rows(connection, settings.run.name, settings.store.num_shards),
        threads=threads,
        checkpoints=checkpoints,
        commits=Commits(checkpoints, threads, settings.actor.train_timeout_s),
        trackers=Trackers(settings),
        reward=reward,
        references=references,
        actor=actor,
        critic=critic,
        evaluation=Evaluation(settings, fleet, reward, board, load_sets(settings, renderer)),
        fleet=fleet,
        board=board,
        shifts=DeviceShifts(settings, fleet, board, actor, critic, references),
    )
    return Wiring(parts, (reward_channel, *channels, actor_channel, *critic_channels), connection)


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
