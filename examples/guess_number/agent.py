"""The game played by an agent that owns its loop, with OpenAI's own client: nothing in it knows of training.

python examples/guess_number/agent.py           # serves it on 127.0.0.1:50080 until Ctrl-C
"""

import sys
from typing import Any

from game import ADDRESS, MAX_GUESSES, hint  # type: ignore[import-not-found]  # beside this file
from openai import DefaultHttpxClient, OpenAI, PermissionDeniedError

from rolecall.environment import Agent, Answer, Policy, serve

HTTP = DefaultHttpxClient()
"""One pool of connections for all games: a client of its own would read the machine's certificates for each."""


class Player(Agent):
    """One game."""

    def run(self, policy: Policy) -> Answer:
        """Plays it, and says whether it was won."""
        rules = self.task.chat_messages()
        client = OpenAI(base_url=policy.base_url, api_key=policy.api_key, http_client=HTTP)
        try:
            return Answer(reward=float(play(client, policy.model, rules, self.task.ground_truth)))
        except PermissionDeniedError:  # a budget of the run is spent: a game that the run ends is lost
            return Answer(reward=0.0, is_truncated=True)


def play(client: OpenAI, model: str, rules: list[Any], secret: str) -> bool:
    """Whether the policy guesses `secret`."""
    said = [*rules, {"role": "user", "content": "guess"}]
    for _ in range(MAX_GUESSES):
        answer = client.chat.completions.create(model=model, messages=said)
        guess = (answer.choices[0].message.content or "").strip()
        if guess == secret:
            return True
        said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        said.append({"role": "user", "content": hint(guess, int(secret))})
    return False


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    sys.exit(serve(Player, address, name="guess-agent", range=(0, 1), max_sessions=512, runs_episodes=True))
