"""An environment in a process of its own whose agent talks with OpenAI's client: `harness_agent.py ADDRESS LOG`. It
writes a line to LOG for each episode that it begins, and for why one was left.
"""

import sys
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

from rolecall.environment import Agent, Policy, serve

LOG = Path(sys.argv[2])


def note(line: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{line}\n")


class Talker(Agent):
    """Talks for three calls, streamed in turns; in the task "endless", for ever; in the task "forking", then goes back
    to its first answer and asks aside.
    """

    def run(self, policy: Policy) -> float:
        note("begun")
        said: list[Any] = [{"role": "user", "content": "talk"}]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            try:
                for turn in range(10**9 if self.task.ground_truth == "endless" else 3):
                    said.append({"role": "assistant", "content": self.asked(client, said, streams=turn % 2 == 1)})
                    said.append({"role": "user", "content": f"go on {turn}"})
                if self.task.ground_truth == "forking":
                    self.asked(client, [*said[:2], {"role": "user", "content": "or so"}], streams=False)
                    self.asked(client, [{"role": "user", "content": "in short"}], streams=True)
            except OpenAIError as error:
                note(f"left {type(error).__name__}")
                raise
        return 0.5

    def asked(self, client: OpenAI, said: list[Any], *, streams: bool) -> str:
        if self.task.ground_truth == "endless":
            said = said[:1]
        if not streams:
            answer = client.chat.completions.create(model="policy", messages=said, max_tokens=8)
            return answer.choices[0].message.content or ""
        with client.chat.completions.create(model="policy", messages=said, max_tokens=8, stream=True) as events:
            return "".join(event.choices[0].delta.content or "" for event in events)


if __name__ == "__main__":
    sys.exit(serve(Talker, sys.argv[1], name="talker", range=(0, 1), runs_episodes=True))
