"""Roles without models for controller_scale.py, in processes of their own, so that the controller's CPU is its own.

    python benchmarks/fake_roles.py trainer CONFIG          the actor and an instant scorer
    python benchmarks/fake_roles.py rollouts CONFIG ...   the pull loop, gate and service around an engine that waits

Everything that touches the store and the controller is the real thing; what is made up are the tokens, the weights and
the training.
"""

import argparse
import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.reward import SERVICE_NAME as REWARD_SERVICE
from rolecall.reward import Scorer, description, one_by_one
from rolecall.rpc.callers import Caller
from rolecall.rpc.identity import acting_as
from rolecall.rpc.membership import Membership
from rolecall.scoring.scores import Item
from rolecall.settings import RunSettings, load_settings
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.v1 import actor_pb2_grpc, controller_pb2, reward_pb2_grpc, trajectory_pb2
from services.rollout.sampling import Sample, SampleRequest, VersionSpan
from services.rollout.scripted import ScriptedEngine
from tests.fixtures_store import StoreUnderTest
from tests.twins.rollout import RolloutTwin
from tests.twins.run import ServedActor, served


class WaitingEngine(ScriptedEngine):
    """Samples the same tokens again and again, each response after a wait drawn from its seed."""

    def __init__(self, num_tokens: int, latency_s: float) -> None:
        """Responses of `num_tokens` tokens take between half of `latency_s` and one and a half."""
        super().__init__(vocab_size=200, max_model_tokens=2**20)
        self._latency_s = latency_s
        self._tokens = tuple(np.random.default_rng(0).integers(3, 200, num_tokens).tolist())
        self._logprobs = np.full(num_tokens, -1.0, np.float32)

    async def sample(self, request: SampleRequest) -> Sample:
        """Samples as SamplingEngine.sample does."""
        await asyncio.sleep(self._latency_s * (0.5 + random.Random(request.seed).random()))
        await self._may_run.wait()
        spans = (VersionSpan(self._version, 0, len(self._tokens)),)
        return Sample(self._tokens, self._logprobs, spans, trajectory_pb2.FINISH_REASON_LENGTH)


class PremadeText(ChatTokenizer):
    """Decodes once: what detokenizing costs a rollout is not measured here."""

    def __init__(self, path: Path, num_tokens: int) -> None:
        super().__init__(path)
        self._text = "word " * (num_tokens * 4 // 5)

    def decode(self, token_ids: object) -> str:
        """About four bytes a token."""
        return self._text


async def serve_trainer(settings: RunSettings) -> None:
    """Actor and scorer, until the process is ended."""
    connection = connect(settings.store)
    rows = Rows(connection, settings.run.name, settings.store.num_shards)
    store = StoreUnderTest(settings.store, settings.run.name, connection, Ledger(connection, settings.run.name), rows)
    spec = description("parity", (0, 1), ("response_text",), {}, False, max_items=0)
    async with AsyncExitStack() as stack:
        actor = ServedActor(store, stack, settings.run.checkpoints)
        scorer = Scorer(spec, one_by_one(parity, spec), None)
        await served(
            stack,
            actor_pb2_grpc.add_ActorServiceServicer_to_server,
            actor,
            "rolecall.v1.ActorService",
            str(settings.actor.address),
            settings.rpc,
        )
        if not settings.reward.components:  # else the real service scores
            await served(
                stack,
                reward_pb2_grpc.add_RewardServiceServicer_to_server,
                scorer,
                REWARD_SERVICE,
                str(settings.reward.address),
            )
        await asyncio.Event().wait()


def parity(item: Item) -> float:
    """Differs within a group."""
    return float(int(item.id.rpartition("/")[2]) % 2)


async def serve_rollouts(settings: RunSettings, first: int, number: int, latency_s: float) -> None:
    """Replicas `first` to `first + number - 1`, until the process is ended."""
    tasks = [
        asyncio.create_task(serve_rollout(settings, f"rollout-{index}", latency_s))
        for index in range(first, first + number)
    ]
    await asyncio.gather(*tasks)


async def serve_rollout(settings: RunSettings, worker: str, latency_s: float) -> None:
    """Serves one replica until the process is ended."""
    incarnation = os.urandom(4).hex()
    twin = RolloutTwin.of_run(
        settings,
        f"{worker}.{incarnation}",
        WaitingEngine(settings.sampling.max_tokens, latency_s),
        PremadeText(settings.model.path, settings.sampling.max_tokens),
        connect(settings.store),
    )
    membership = Membership(
        settings, controller_pb2.ROLE_ROLLOUT, worker, incarnation, await twin.start(), num_weight_ranks=1
    )
    membership.start()
    await twin.pulling


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["trainer", "rollouts"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--first", type=int, default=0, help="number of the first replica")
    parser.add_argument("--number", type=int, default=1, help="replicas of this process")
    parser.add_argument("--latency", type=float, default=0.1, metavar="SECONDS", help="of a response, in the mean")
    arguments = parser.parse_args()
    is_trainer = arguments.role == "trainer"
    settings = acting_as(load_settings(arguments.config, []), Caller.ACTOR if is_trainer else Caller.ROLLOUT)
    if is_trainer:
        asyncio.run(serve_trainer(settings))
    else:
        asyncio.run(serve_rollouts(settings, arguments.first, arguments.number, arguments.latency))


if __name__ == "__main__":
    main()
