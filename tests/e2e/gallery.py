"""An environment that shows an image before each of three turns, as a process of its own: others in every episode."""

import random
import sys

from rolecall.environment import Action, Answer, Env, Image, ImageMessage, Task, serve
from tests.pictures import picture


class Gallery(Env):
    """Three turns, of which each earns a third whose text has an even length."""

    def reset(self, task: Task, seed: int) -> ImageMessage:
        """Shows the first image."""
        self.draw, self.num_turns, self.won = random.Random(seed), 0, 0.0
        return ImageMessage("user", ("first", self._image()))

    def step(self, action: Action) -> Answer:
        """Shows another one, or ends."""
        self.num_turns += 1
        self.won += (len(action.text) % 2 == 0) / 3
        if self.num_turns == 3:
            return Answer(reward=self.won, is_over=True)
        return Answer(ImageMessage("user", (self._image(), "then?")))

    def grade(self) -> float:
        """Returns what was won so far."""
        return self.won

    def _image(self) -> Image:
        width, height = self.draw.randint(8, 40), self.draw.randint(8, 40)
        return Image(picture(width, height, self.draw.randrange(8)))


if __name__ == "__main__":
    sys.exit(serve(Gallery, sys.argv[1], name="gallery", range=(0, 1)))
