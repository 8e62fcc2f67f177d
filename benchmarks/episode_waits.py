"""What waiting for tools costs a rollout: one replica with vLLM, 64 episodes at a time, whose tools answer at once or
after a while, in turns. See README.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from rolecall.environment import Action, Answer, Env, Task, serve
from rolecall.v1 import rollout_pb2
from tests.integration.rollout_process import RolloutProcess, group, rollout_process
from tests.ports import free_port
from tests.tiny_models import write_qwen3

NUM_EPISODES, GROUP = 64, 8
NUM_TURNS = 6
NUM_ENDS = 10
"""Tokens that end a turn, of 288: a model without training says some thirty tokens a turn."""
ROUND_S = 300.0


class Tool(Env):
    """An episode of NUM_TURNS turns, after each of which a tool takes as many seconds as the row's answer says."""

    def reset(self, task: Task, seed: int) -> str:
        """Begins."""
        self.wait_s, self.num_turns = float(task.ground_truth), 0
        return "go"

    def step(self, action: Action) -> Answer:
        """Waits, and goes on."""
        time.sleep(self.wait_s)
        self.num_turns += 1
        return Answer("go on", 1.0 if self.num_turns == NUM_TURNS else None, is_over=self.num_turns == NUM_TURNS)

    def grade(self) -> float:
        """An episode that a budget ends counts for nothing here."""
        return 0.0


@dataclass(frozen=True)
class Round:
    """The figures of one round."""

    busy_share: float
    """Of the time, the share in which the engine had work."""
    tokens_per_s: float


class Player:
    """A rollout that plays groups of the episodes."""

    def __init__(self, rollout: RolloutProcess) -> None:
        self._rollout = rollout
        self._next_gid, self._position = 0, "0"

    def round(self, num_groups: int, wait_s: float) -> Round:
        """Plays `num_groups` groups whose tools take `wait_s`; of the time in which every place is taken."""
        for gid in range(self._next_gid, self._next_gid + num_groups):
            one = group(gid, [5, 6], GROUP, max_tokens=440, temperature=1.0)
            one.prompt.ground_truth = str(wait_s)
            self._rollout.ledger.admit(one, b"")
        self._next_gid += num_groups
        full = NUM_EPISODES // GROUP
        began = self._after(full)
        ended = self._after(num_groups - 2 * full)
        self._after(full)
        took_s = ended[0] - began[0]
        return Round((ended[1] - began[1]) / took_s, (ended[2] - began[2]) / took_s)

    def _after(self, num_groups: int) -> tuple[float, float, int]:
        """Time, seconds of work, and tokens when `num_groups` more are committed."""
        deadline = time.monotonic() + ROUND_S
        while num_groups:
            for entry, _ in self._rollout.ledger.read_committed(self._position, num_groups, 0.5):
                self._position, num_groups = entry, num_groups - 1
            assert time.monotonic() < deadline, "a round takes too long"
        info = self._rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30)
        return time.monotonic(), info.busy_s, info.num_sampled_tokens


def main() -> None:
    """Prints a line for each wait: medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--groups", type=int, default=40, help="groups of 8 a round, the first and the last 8 not counted"
    )
    parser.add_argument("--waits", type=float, nargs="+", default=[0.0, 0.2, 1.0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        sys.exit(serve(Tool, arguments.serve, name="waits", range=(0, 1), max_sessions=2 * NUM_EPISODES))
    print("\n".join(describe()))
    address = f"127.0.0.1:{free_port()}"
    environment = subprocess.Popen([sys.executable, "-m", "benchmarks.episode_waits", "--serve", address])
    with tempfile.TemporaryDirectory(prefix="waits-") as temporary:
        model = write_qwen3(Path(temporary) / "model", hidden=128)
        generation = json.loads((model / "generation_config.json").read_text())
        ends = [generation["eos_token_id"], *range(200, 200 + NUM_ENDS - 1)]
        (model / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": ends}))
        try:
            with rollout_process(
                Path(temporary),
                model,
                environments={"game": {"address": address, "max_turns": NUM_TURNS + 1}},
                sampling={"num_responses": GROUP, "max_tokens": 440},
                data={"max_prompt_tokens": 60},
                rollout={"max_num_seqs": NUM_EPISODES},
            ) as rollout:
                rollout.open_epoch()
                rollout.publish()
                compare(Player(rollout), arguments)
        finally:
            environment.terminate()
            environment.wait(30)


def compare(player: Player, arguments: argparse.Namespace) -> None:
    """The rounds, the waits taking turns."""
    rounds: dict[float, list[Round]] = {wait_s: [] for wait_s in arguments.waits}
    for _ in range(arguments.rounds):
        for wait_s, done in rounds.items():
            done.append(player.round(arguments.groups, wait_s))
    print("| a tool takes | engine busy | tokens/s |\n|---|---|---|")
    for wait_s, done in rounds.items():
        busy, rate = median(each.busy_share for each in done), median(each.tokens_per_s for each in done)
        print(f"| {wait_s:g} s | {busy:.1%} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
