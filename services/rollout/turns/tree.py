"""The policy's turns in one episode as a tree, with the engine's own ids, and the row that they become.

Owns what a turn goes on from: it extends the ids of the one before it, and nothing that was sampled is rendered again.
Where the chat template shows earlier turns otherwise once a message follows, the conversation begins a branch, rendered
anew and counted. At the end every branch is a segment of the trajectory, each turn trained in the first that has it;
what is not trained is counted by reason. Episodes that the rollout steps and those that an agent runs are such trees,
of one conversation and of any. Knows no engine and no environment. Bound: whoever adds turns, by the budget of turns.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from rolecall.data.continuation import ChatMessage, Continuation, Tools
from rolecall.data.images.files import spelled_in, text_of
from rolecall.errors import EpisodeLostError
from rolecall.trajectory import turn_seed
from rolecall.v1 import trajectory_pb2
from services.rollout.replica import Response
from services.rollout.sampling import SampleRequest
from services.rollout.turns.shown import ShownImage
from services.rollout.turns.transcript import Transcript


@dataclass(frozen=True)
class TurnPrompt:
    """A prompt of the policy for one turn."""

    parent: "Turn | None"
    """The turn whose ids it extends; None: it begins a branch."""
    messages: tuple[ChatMessage, ...]
    """The whole conversation before it."""
    token_ids: Sequence[int]
    """The whole prompt, with all that was sampled before."""
    longest: int
    """Most tokens of the conversation as it is shown, the turn included."""
    branch: str
    """Why it begins a branch; empty: it does not."""
    images: tuple[ShownImage, ...] = ()
    """The images that the conversation shows."""

    @property
    def room(self) -> int:
        """Most tokens that the turn may have."""
        return self.longest - len(self.token_ids)


@dataclass(eq=False)
class Turn:
    """A turn of the policy that was sampled."""

    number: int
    """Number within the episode, by when the turn was asked for, from 1 on."""
    prompt: TurnPrompt
    response: Response
    text: str
    """What was said, as people read it."""
    calls_told: ChatMessage | None = None
    """The turn as chat templates are given it, where special tokens mark its calls, which `text` has not."""
    reward: float | None = None
    """What it earned by itself; None: nothing was said of it."""
    num_tool_calls: int = 0
    is_malformed: bool = False
    """Whether its calls of tools cannot be read."""
    is_seen: bool = False
    """Whether somebody got it."""
    num_children: int = 0

    @property
    def parent(self) -> "Turn | None":
        """The turn whose ids it extends."""
        return self.prompt.parent

    @property
    def token_ids(self) -> list[int]:
        """Every id up to the end of what was sampled."""
        return [*self.prompt.token_ids, *self.response.sample.token_ids]

    @property
    def told(self) -> ChatMessage:
        """The turn as chat templates are given it when it is shown again."""
        return self.calls_told or {"role": "assistant", "content": self.text}

    @property
    def heard(self) -> Sequence[ChatMessage]:
        """The messages before it that no earlier turn of its branch had."""
        return self.prompt.messages[len(self.parent.prompt.messages) + 1 if self.parent is not None else 0 :]

    @property
    def is_cut(self) -> bool:
        """Whether it ended for want of room."""
        return self.response.sample.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH

    def path(self) -> "list[Turn]":
        """The turns of its branch, from the first on."""
        above = [self]
        while above[-1].parent is not None:
            above.append(above[-1].parent)
        return above[::-1]


class Tree:
    """The turns of one episode. Used from one event loop."""

    def __init__(
        self,
        first: SampleRequest,
        continuation: Continuation,
        max_row_tokens: int,
        num_own_messages: int = 0,
    ) -> None:
        """`first` is the request for a single response; its prompt is not used. `max_row_tokens`: most tokens of all
        segments together, at least those of one. The first `num_own_messages` of a conversation are the run's own.
        """
        self._first = first
        self._continuation = continuation
        self._max_row_tokens = max_row_tokens
        self._num_own_messages = num_own_messages
        self._turns: list[Turn] = []
        self._branches: Counter[str] = Counter()
        self.num_begun = 0
        """Turns that were asked for."""
        self.num_cut_observation_tokens = 0
        """Tokens that were left out of what the environment answered."""

    def rendered(self, messages: Sequence[ChatMessage], tools: Tools, images: Sequence[ShownImage] = ()) -> list[int]:
        """The prompt of a conversation that shows `images`, rendered anew. InvalidInputError when the template cannot
        render it.
        """
        return self._continuation.opening(messages, tools, self._num_own_messages, _num_tokens(images))

    def after(
        self,
        turn: Turn,
        messages: Sequence[ChatMessage],
        tools: Tools,
        shown: Sequence[ChatMessage] | None = None,
        images: Sequence[ShownImage] = (),
    ) -> TurnPrompt:
        """The prompt of the turn after `turn`. `messages`: the whole conversation, which begins with those of
        `turn` and, as it was told, the turn itself; `shown`: the same as the template is given it, where its turns are
        not text alone; `images`: those that its new messages show. InvalidInputError when the template cannot render
        it.
        """
        heard = messages[len(turn.prompt.messages) + 1 :]
        said = [message for each in turn.path() for message in (*each.heard, each.told)]
        conversation, all_images = shown or [*said, *heard], (*turn.prompt.images, *images)
        is_hidden = bool(images) and self.is_hidden_behind(turn.path())
        counted = _num_tokens(all_images)
        added = None if is_hidden else self._continuation.ids(turn.token_ids, conversation, len(heard), tools, counted)
        if added is None:
            ids, cause = self.rendered(shown or messages, tools, all_images), "images" if is_hidden else "template"
            return TurnPrompt(None, tuple(messages), ids, turn.prompt.longest, cause, all_images)
        branch = "fork" if turn.num_children else ""
        return TurnPrompt(turn, tuple(messages), [*turn.token_ids, *added], turn.prompt.longest, branch, all_images)

    def is_hidden_behind(self, turns: Iterable[Turn] | None = None) -> bool:
        """Whether nobody could tell an image behind these turns, absent all, from a placeholder that was sampled in one
        of them.
        """
        tokens = self._continuation.visual_tokens
        told = self._turns if turns is None else turns
        return tokens is not None and any(tokens.token_id in turn.response.sample.token_ids for turn in told)

    def request(self, prompt: TurnPrompt, max_tokens: int) -> tuple[int, SampleRequest]:
        """The number of the turn sampled from `prompt`, and the request for it."""
        if prompt.branch:
            self._branches[prompt.branch] += 1
        if prompt.parent is not None:
            prompt.parent.num_children += 1
        self.num_begun += 1
        number, first = self.num_begun, self._first
        sampling = trajectory_pb2.SamplingParams()
        sampling.CopyFrom(first.sampling)
        sampling.max_tokens = max_tokens
        seed = turn_seed(first.seed, number)
        name = f"{first.request_id}.{number}"
        images = tuple(image.file for image in prompt.images)
        return number, SampleRequest(name, tuple(prompt.token_ids), sampling, seed, images)

    def sampled(self, number: int, prompt: TurnPrompt, response: Response, text: str) -> Turn:
        """The turn that was asked for as `number` is there."""
        turn = Turn(number, prompt, response, text)
        self._turns.append(turn)
        return turn

    def seen(self, number: int) -> None:
        """Somebody got the whole turn."""
        for turn in self._turns:
            turn.is_seen |= turn.number == number

    def ended(
        self,
        ended_by: str,
        reward: trajectory_pb2.EpisodeReward | None,
        *,
        turn_rewards: bool,
        row_messages: Sequence[trajectory_pb2.Message],
        generation_s: float,
    ) -> tuple[SampleRequest, Response]:
        """Returns what the trajectory began with, and the whole of it: its segments in the order in which their last
        turns came. `row_messages` are left out where a segment begins with them. EpisodeLostError
        when nobody got a turn.
        """
        seen = self._seen()
        if not seen:
            raise EpisodeLostError("the environment's agent ended without an answer of the policy")
        paths = self._segments(seen)
        earned = self._earned({turn for path in paths for turn in path})
        own = self._first.images
        opening = _opening(paths[0], row_messages, own)
        transcript, kept = Transcript(paths[0][0].prompt.token_ids, opening), set[Turn]()
        for number, path in enumerate(paths):
            if number:
                transcript.turned(path[0].prompt.token_ids, _opening(path, row_messages, own))
            for turn in path:
                if turn.parent is not None:
                    transcript.heard(turn.prompt.token_ids[len(turn.parent.token_ids) :], _plain(turn.heard))
                if turn in kept:
                    transcript.recalled(turn.response, turn.text)
                    continue
                transcript.sampled(turn.response, turn.text, earned.get(turn))
                transcript.called(turn.num_tool_calls)
                if turn.is_malformed:
                    transcript.malformed()
            kept |= set(path)
        response = transcript.ended(ended_by, reward, turn_rewards=turn_rewards, generation_s=generation_s)
        assert response.episode is not None
        response.episode.tokens.CopyFrom(self._ledger(kept, seen))
        response.episode.num_cut_observation_tokens = self.num_cut_observation_tokens
        segments = [[image.file for image in path[-1].prompt.images] for path in paths]
        others = [file for file in dict.fromkeys(file for files in segments for file in files) if file not in own]
        response.episode.num_images = len(others)
        request = replace(self._first, prompt_token_ids=tuple(paths[0][0].prompt.token_ids))
        return request, replace(response, images=tuple(others), shown=_shown([*own, *others], segments))

    def _seen(self) -> set[Turn]:
        """The turns that somebody got: it says so, or went on from them."""
        found = set[Turn]()
        for leaf in self._turns:
            turn = leaf if leaf.is_seen else None
            while turn is not None and turn not in found:
                found.add(turn)
                turn = turn.parent
        return found

    def _segments(self, seen: Set[Turn]) -> list[list[Turn]]:
        """The branches of the turns `seen` that the row has room for: the one in which most was sampled, which always
        has, the one that ended last, then again those in which most was sampled.
        """
        paths = [turn.path() for turn in seen - {turn.parent for turn in seen}]
        most, *others = sorted(paths, key=lambda path: (-_num_sampled(path), -path[-1].number))
        last = max(paths, key=lambda path: path[-1].number)
        room, kept = self._max_row_tokens, list[list[Turn]]()
        for path in [most, *sorted(others, key=lambda path: path is not last)]:
            num_tokens = len(path[-1].token_ids)
            if num_tokens <= room:
                kept.append(path)
                room -= num_tokens
        return sorted(kept, key=lambda path: path[-1].number)

    def _earned(self, kept: Set[Turn]) -> dict[Turn, float]:
        """The rewards of the turns `kept`. What one without room earned is the latest one's before it, or where there
        is none the first one's: the sum stays, and time does where it can.
        """
        earned = dict[Turn, float]()
        for turn in self._turns:
            if turn.reward is not None:
                before = [each for each in kept if each.number <= turn.number]
                heir = max(before, key=lambda each: each.number) if before else min(kept, key=lambda each: each.number)
                earned[heir] = earned.get(heir, 0.0) + turn.reward
        return earned

    def _ledger(self, kept: Set[Turn], seen: Set[Turn]) -> trajectory_pb2.EpisodeTokens:
        masked: Counter[str] = Counter()
        for turn in self._turns:
            if turn not in kept:
                masked["row_full" if turn in seen else "unseen"] += len(turn.response.sample.token_ids)
        return trajectory_pb2.EpisodeTokens(
            num_calls=len(self._turns),
            num_sampled=_num_sampled(self._turns),
            num_trained=_num_sampled(kept),
            masked=masked,
            branches=self._branches,
        )


def _opening(
    path: Sequence[Turn], row_messages: Sequence[trajectory_pb2.Message], row_images: Sequence[bytes]
) -> Sequence[trajectory_pb2.Message]:
    """The messages before the first turn of a branch, without those of the row where it begins with them."""
    opening, own = _plain(path[0].heard), len(row_messages)
    said = [(each.role, each.content) for each in opening[:own]]  # the row's messages mark nothing that is spelled
    shown = [image.file for image in path[0].prompt.images[: len(row_images)]]
    begins = said == [(each.role, each.content) for each in row_messages] and shown == list(row_images)
    return opening[own:] if begins else opening


def _shown(files: Sequence[bytes], segments: Sequence[Sequence[bytes]]) -> tuple[tuple[int, ...], ...]:
    """The index of each file that a segment shows; none where all segments show all `files` in their order."""
    if all(list(shown) == list(files) for shown in segments):
        return ()
    index_of = {file: index for index, file in reversed([*enumerate(files)])}
    return tuple(tuple(index_of[file] for file in shown) for shown in segments)


def _num_tokens(images: Iterable[ShownImage]) -> list[int]:
    return [image.num_tokens for image in images]


def _num_sampled(turns: Iterable[Turn]) -> int:
    return sum(len(turn.response.sample.token_ids) for turn in turns)


def _plain(messages: Sequence[ChatMessage]) -> list[trajectory_pb2.Message]:
    return [
        trajectory_pb2.Message(role=each["role"], content=text_of(each["content"]), spelled=spelled_in(each["content"]))
        for each in messages
    ]
