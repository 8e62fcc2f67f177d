"""The tokens of one episode as they come: turns that were sampled, and what the environment said between them.

Owns the exactness of an episode: each turn's prompt is the ids of its segment so far, what was sampled stands where it
was sampled, and spans cover exactly that, each token once. Knows no engine and no environment.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rolecall.data.images.files import spelled_in
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.rollout.replica import Response
from services.rollout.sampling import Sample, VersionSpan


class Transcript:
    """The tokens, turns and messages of one episode so far."""

    def __init__(self, prompt_token_ids: Sequence[int], opening: Sequence[trajectory_pb2.Message]) -> None:
        """`opening`: what the environment said first, which is in the prompt's ids."""
        self._num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        """Every id so far, of all segments."""
        self._starts: list[int] = []
        self.episode = trajectory_pb2.Episode(messages=opening)
        self._logprobs: list[Array] = []
        self._spans: list[VersionSpan] = []
        self._digests: dict[int, str] = {}
        self._routing: list[Array] = []
        """The routing of each segment."""
        self._last_text = ""

    def sampled(self, response: Response, text: str, reward: float | None) -> None:
        """The policy took a turn, whose prompt was `token_ids`: `text`, as people read it, which earned `reward`; None:
        nothing was said of that.
        """
        sample, start = response.sample, len(self.token_ids)
        self._last_text = text
        self.token_ids += sample.token_ids
        self.episode.turns.add(start=start, end=len(self.token_ids), reward=reward)
        self._logprobs.append(sample.logprobs)
        offset = start - self._num_prompt_tokens
        for span in sample.spans:
            self._spans.append(replace(span, start=span.start + offset, end=span.end + offset))
        self._digests |= response.digests
        self._routed(response)

    def recalled(self, response: Response, text: str) -> None:
        """A turn that an earlier segment holds stands in this one, too, as something that was said."""
        self._last_text = text
        self.token_ids += response.sample.token_ids
        self._logprobs.append(np.zeros(len(response.sample.token_ids), np.float32))
        self._routed(response)

    def turned(self, prompt_token_ids: Sequence[int], opening: Sequence[trajectory_pb2.Message]) -> None:
        """Another segment begins, whose first prompt is `prompt_token_ids`; `opening` as at the start."""
        self._starts.append(len(self.token_ids))
        self.token_ids += prompt_token_ids
        self._logprobs.append(np.zeros(len(prompt_token_ids), np.float32))
        del self.episode.messages[:]
        self.episode.messages.extend(opening)

    def malformed(self) -> None:
        """The last turn's calls of tools could not be read."""
        self.episode.num_malformed += 1

    def called(self, num_calls: int) -> None:
        """The last turn called so many tools."""
        self.episode.num_tool_calls += num_calls

    def heard(self, token_ids: Sequence[int], messages: Sequence[trajectory_pb2.Message]) -> None:
        """The environment said `messages`, rendered as `token_ids`, and the policy has another turn."""
        said = self._last_text
        self.episode.messages.add(role="assistant", content=said, spelled=spelled_in(said))
        self.episode.messages.extend(messages)
        self.token_ids += token_ids
        self._logprobs.append(np.zeros(len(token_ids), np.float32))

    def ended(
        self, ended_by: str, reward: trajectory_pb2.EpisodeReward | None, *, turn_rewards: bool, generation_s: float
    ) -> Response:
        """The whole of it, which ends with the last turn. Whatever ended it but its own end truncates it."""
        self.episode.ended_by, self.episode.turn_rewards = ended_by, turn_rewards
        if reward is not None:
            self.episode.reward.CopyFrom(reward)
        stopped = ended_by == "terminated"
        sample = Sample(
            tuple(self.token_ids[self._num_prompt_tokens :]),
            np.concatenate(self._logprobs),
            tuple(self._spans),
            trajectory_pb2.FINISH_REASON_STOP if stopped else trajectory_pb2.FINISH_REASON_LENGTH,
            np.concatenate(self._routing) if self._routing else None,
        )
        return Response(sample, self._digests, generation_s, self.episode, tuple(self._starts))

    def _routed(self, response: Response) -> None:
        """Keeps where the turn's prompt and its tokens were sent, if the engine says so."""
        routing = response.sample.routing
        if routing is None:
            return
        if len(self._routing) == len(self._starts):
            self._routing.append(routing)
            return
        # what was sampled last, nobody had routed; the turn after it did, with what stands behind it
        known = self._routing[-1][:-1]
        self._routing[-1] = np.concatenate([known, routing[len(known) :]])
