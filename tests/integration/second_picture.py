"""An environment that shows an image at the start and another after the first turn, as a process of its own."""

import sys

from rolecall.environment import Action, Answer, Env, Image, ImageMessage, Task, serve
from tests.pictures import picture

FIRST, SECOND = picture(36, 20, 0), picture(32, 32, 1)


class SecondPicture(Env):
    """Two turns."""

    is_shown = False

    def reset(self, task: Task, seed: int) -> ImageMessage:
        """Shows the first image."""
        return ImageMessage("user", ("a", Image(FIRST)))

    def step(self, action: Action) -> Answer:
        """Shows the second image, then ends."""
        if self.is_shown:
            return Answer(reward=1.0, is_over=True)
        self.is_shown = True
        return Answer(ImageMessage("user", (Image(SECOND), "or b?")))

    def grade(self) -> float:
        """Nothing."""
        return 0.0


if __name__ == "__main__":
    sys.exit(serve(SecondPicture, sys.argv[1], name="second-picture", range=(0, 1)))
