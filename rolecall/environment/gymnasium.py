"""Gymnasium's environments as one of ours, by two functions of yours: what an observation reads like, and what action a
text means. ADR 66 says why nothing is imported here.
"""

import io
from collections.abc import Callable
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar

import numpy as np
from numpy.typing import NDArray

from rolecall.environment.env import Action, Answer, Env, Image, Messages, Task

UNREADABLE = "That is no action."
ObsT = TypeVar("ObsT")
ObsT_co = TypeVar("ObsT_co", covariant=True)
ActT = TypeVar("ActT")
ActT_contra = TypeVar("ActT_contra", contravariant=True)


def image_of(pixels: NDArray[np.uint8]) -> Image:
    """An image of pixels [height, width, 3], for `render_text`: an observation of that kind, or what `env.render()`
    returns with `render_mode="rgb_array"`.
    """
    from PIL import Image as Pillow  # for those alone who show one

    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return Image(file.getvalue())


class GymnasiumEnv(Protocol[ObsT_co, ActT_contra]):
    """The part of `gymnasium.Env` that is used here."""

    def reset(self, *, seed: int | None = None) -> tuple[ObsT_co, dict[str, Any]]:
        """Begins an episode: (observation, info)."""
        ...

    def step(self, action: ActT_contra) -> tuple[ObsT_co, SupportsFloat, bool, bool, dict[str, Any]]:
        """Takes an action: (observation, reward, terminated, truncated, info)."""
        ...

    def close(self) -> Any:
        """Frees what it holds."""
        ...


class Gymnasium(Env, Generic[ObsT, ActT]):
    """An episode in an environment of Gymnasium's. Serve it with `turn_rewards=True`: every step's reward is
    its turn's, the last one's the episode's. A text that means no action steps nothing, earns nothing and is told so.
    """

    def __init__(
        self,
        env: GymnasiumEnv[ObsT, ActT],
        render_text: Callable[[ObsT], Messages],
        parse_action: Callable[[str], ActT | None],
    ) -> None:
        """`env` is this episode's own. `render_text` says what an observation reads like, `parse_action` what action a
        text means; None: none.
        """
        self._env = env
        self._render = render_text
        self._parse = parse_action

    def reset(self, task: Task, seed: int) -> Messages:
        """Begins the episode by its seed."""
        observation, _ = self._env.reset(seed=seed)
        return self._render(observation)

    def step(self, action: Action) -> str | Answer:
        """Takes one step, terminated and truncated as the environment says; one that is both is terminated."""
        meant = self._parse(action.text)
        if meant is None:
            return UNREADABLE
        observation, reward, terminated, truncated, _ = self._env.step(meant)
        return Answer(
            self._render(observation),
            float(reward),
            is_over=bool(terminated),
            is_truncated=bool(truncated) and not terminated,
        )

    def grade(self) -> float:
        """Nothing on top of what the turns earned."""
        return 0.0

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()
