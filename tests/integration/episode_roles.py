"""A rollout around the scripted engine, and an environment, in processes of their own that a test kills:

    python -m tests.integration.episode_roles rollout CONFIG --name rollout-0
    python -m tests.integration.episode_roles environment ADDRESS KIND LOG CERTIFICATES

The environment writes a line to LOG for each episode that it begins and closes, and the field `task` of its row where
it has one. Its certificate is in the folder CERTIFICATES. KIND is "steps" or "agent". What the
policy reads after each of its turns says which turn that was and a digest of it, and so does the reward of the last:
an answer that came to the wrong turn, or twice, shows.
"""

import asyncio
import sys
import zlib
from pathlib import Path
from typing import Any

import httpx

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Agent, Answer, Env, Policy, Task, serve
from rolecall.rpc import role_process
from rolecall.rpc.fence import Fence
from rolecall.rpc.membership import Membership
from rolecall.store.connection import connect
from rolecall.store.sealed import read_ctl
from rolecall.v1 import controller_pb2
from services.rollout.activity import feed_heartbeat
from services.rollout.scripted import ScriptedEngine
from tests.twins.rollout import RolloutTwin, first_failure

NUM_TURNS = 3
TOKEN_S = 0.005
"""Seconds of a token: an episode takes a tenth of a second, so that kills find some under way."""


def heard(turn: int, text: str) -> str:
    """What is said after a turn."""
    return f"{turn}:{zlib.crc32(text.encode('utf-8', 'replace'))}"


def worth(text: str) -> float:
    """The reward of an episode by its last turn; never 0."""
    return 0.25 + zlib.crc32(text.encode("utf-8", "replace")) % 64 / 128


class Noting:
    """What both kinds note of their lives."""

    log: Path

    def note(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{line}\n")

    def note_begun(self, task: Task) -> None:
        self.note("begun")
        if "task" in task.metadata:
            self.note(f"task {task.metadata['task']}")


class Stepped(Noting, Env):
    """An environment that takes turns."""

    def reset(self, task: Task, seed: int) -> str:
        self.note_begun(task)
        self.turn = 0
        return "talk"

    def step(self, action: Action) -> Answer:
        self.turn += 1
        if self.turn == NUM_TURNS:
            return Answer(reward=worth(action.text), is_over=True)
        return Answer(heard(self.turn, action.text))

    def close(self) -> None:
        self.note("closed")


class Calling(Noting, Agent):
    """An agent that owns its loop, over TLS."""

    ca_file: str

    def reset(self, task: Task, seed: int) -> Any:
        self.note_begun(task)
        return super().reset(task, seed)

    def run(self, policy: Policy) -> float:
        assert policy.base_url.startswith("https://")
        said: list[Any] = [{"role": "user", "content": "talk"}]
        key, url = {"Authorization": f"Bearer {policy.api_key}"}, f"{policy.base_url}/chat/completions"
        with httpx.Client(verify=self.ca_file, trust_env=False, timeout=60, headers=key) as client:
            for turn in range(1, NUM_TURNS + 1):
                answer = client.post(url, json={"model": policy.model, "messages": said})
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"]
                said.append({"role": "assistant", "content": text})
                said.append({"role": "user", "content": heard(turn, text)})
        return worth(text)

    def close(self) -> None:
        self.note("closed")


def environment(address: str, kind: str, log: str, certificates: str) -> int:
    """Serves one of the two until it is ended."""
    folder = Path(certificates)
    Noting.log = Path(log)
    Calling.ca_file = str(folder / "ca.crt")
    return serve(
        Stepped if kind == "steps" else Calling,
        address,
        name=kind,
        range=(0, 1),
        max_sessions=16,
        lease_s=3.0,
        runs_episodes=kind == "agent",
        reset_timeout_s=5.0,
        step_timeout_s=5.0,
        close_timeout_s=5.0,
        certificate_file=folder / "tls.crt",
        key_file=folder / "tls.key",
    )


def rollout() -> int:
    """A rollout of the run until it is ended."""
    args = role_process.parse_args("rollout", sys.argv[2:])
    settings = args.settings

    async def start() -> None:
        connection = await asyncio.to_thread(connect, settings.store, verify=False)
        engine = ScriptedEngine(token_s=TOKEN_S, vocab_size=200, max_model_tokens=400)
        consumer, fence = f"{args.worker}.{args.incarnation}", Fence(lambda: read_ctl(connection, settings.run.name))
        tokenizer = ChatTokenizer(settings.model.path)
        twin = RolloutTwin.of_run(settings, consumer, engine, tokenizer, connection, fence=fence)
        address = await twin.start()
        role = controller_pb2.ROLE_ROLLOUT
        membership = Membership(settings, role, args.worker, args.incarnation, address, 1, launched=True)
        membership.start()
        beating = asyncio.create_task(feed_heartbeat(twin.replica, membership))
        parts = [membership.failed, twin.pulling, beating]
        await role_process.serve(twin.server, failed=asyncio.ensure_future(first_failure(*parts)), grace_s=1.0)

    return role_process.run(start, "rollout")


if __name__ == "__main__":
    sys.exit(rollout() if sys.argv[1] == "rollout" else environment(*sys.argv[2:]))
