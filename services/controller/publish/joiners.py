"""Rollouts that join between two publishes, and when they get the weights that the others serve.

While the actor holds the published weights, which is from a publish until the next step is to train, it sends them to
whoever came since. Nobody waits for it: a step that is to train ends the attempt, and the publish after it brings the
next weights to everyone. Owns no way of weights: that is publisher.py's `catch_up`.
"""

import asyncio
import logging

from rolecall.errors import RoleCallError
from rolecall.telemetry import Metrics
from services.controller.publish.publisher import PolicyPublisher
from services.controller.publish.receivers import AttemptFailed

logger = logging.getLogger(__name__)


class Joiners:
    """The rollouts that join between two publishes of one life of the loop."""

    def __init__(self, publisher: PolicyPublisher, look_s: float, *, in_shifts: bool = False) -> None:
        """`look_s`: seconds between two looks at who has joined. `in_shifts`: the actor is off the devices while
        rollouts sample, so that nobody is served.
        """
        self._publisher = publisher
        self._in_shifts = in_shifts
        self._look_s = look_s
        self._serving: asyncio.Task[None] | None = None
        self._metrics = Metrics()

    def serve(self) -> None:
        """The actor holds the published weights: whoever joins gets them, until `stop`."""
        if self._in_shifts:
            return
        self._serving = asyncio.create_task(self._serve(), name="joiners")

    async def stop(self) -> None:
        """Ends that: the actor is about to train, or to publish. Returns once nothing is sent any more."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            # bounded: it was cancelled, and its calls end with that
            (ended,) = await asyncio.gather(serving, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended

    def take_metrics(self) -> Metrics:
        """Returns what is to be told since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            joiners = self._publisher.joiners()
            if not joiners:
                continue
            names = ", ".join(rollout.consumer for rollout in joiners)
            try:
                self._metrics.merge(await self._publisher.catch_up(joiners))
            except (AttemptFailed, RoleCallError) as error:
                logger.warning("%s: no weights yet: %s", names, error)
            else:
                logger.info("version %d: joined by %s", self._publisher.policy_version, names)
