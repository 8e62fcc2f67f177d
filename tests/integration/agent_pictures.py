"""An environment in a process of its own whose agent shows images in its first and third call, by OpenAI's client, and
then another image in the place of the first, which is the row's where that has one: `agent_pictures.py ADDRESS`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from rolecall.environment import Agent, Image, Policy, serve
from tests.pictures import picture
from tests.ports import free_port

FIRST, SECOND, OTHER = (picture(32, 24, seed) for seed in range(3))
"""All of as many tokens, so that the tokens alone tell nothing."""


class Pictures(Agent):
    """Four calls."""

    def run(self, policy: Policy) -> float:
        """Shows the first image, asks on, shows the second, and goes back to the beginning with the other."""
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            said: list[Any] = self.task.chat_messages() if self.task.images else [shown(FIRST)]
            for more in ([{"role": "user", "content": "b?"}], [shown(SECOND)], []):
                answer = client.chat.completions.create(model=policy.model, messages=said, max_tokens=8)
                said += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, *more]
            said = [shown(OTHER), *said[1:3]]
            client.chat.completions.create(model=policy.model, messages=said, max_tokens=8)
        return 0.5


def shown(file: bytes) -> dict[str, Any]:
    """A message that shows an image."""
    image = {"type": "image_url", "image_url": {"url": Image(file).data_url}}
    return {"role": "user", "content": [image, {"type": "text", "text": "a"}]}


@contextmanager
def pictures() -> Iterator[str]:
    """The environment in a process; gives its address."""
    address = f"127.0.0.1:{free_port()}"
    variables = {**os.environ, "ROLECALL_DIE_WITH_PARENT": "1"}
    serving = subprocess.Popen([sys.executable, "-m", "tests.integration.agent_pictures", address], env=variables)
    try:
        yield address
    finally:
        serving.kill()
        serving.wait(5)


if __name__ == "__main__":
    sys.exit(serve(Pictures, sys.argv[1], name="pictures", range=(0, 1), runs_episodes=True))
