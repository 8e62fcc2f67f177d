"""Agents that show images to the policy at the rollout's endpoint: in every dialect's own form, the same image again,
another in its place, and what may not be shown.
"""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import httpx
import pytest
from openai import OpenAI

from rolecall.columns import IMAGES
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Agent, Image, Policy
from rolecall.scoring.items import images_of
from rolecall.training.packing.pieces import Piece
from rolecall.trajectory import SAMPLED_COLUMNS, segment_lengths
from rolecall.v1 import trajectory_pb2
from services.rollout.sampling import SampleRequest
from tests.contract.environment_peers import environment
from tests.contract.test_rollout_episodes import CHANGED_LATER, Eyes, check_row, rollout_in
from tests.contract.test_rollout_shown_images import (
    NUMBERS,
    OWN,
    SHOWN,
    TOKENS,
    Sampling,
    admit,
    committed,
    expanded,
    files_of,
)
from tests.fixtures_store import StoreUnderTest
from tests.pictures import PAD, picture
from tests.tiny_tokenizer import VISION_TEMPLATE, VISION_TOKENS, write_tokenizer

Said: TypeAlias = tuple[str, Sequence[str | bytes]]
"""Who speaks, and the texts and images of what is said."""
PATHS = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}


def url_of(file: bytes) -> str:
    return Image(file).data_url


def of_chat(said: Sequence[Said]) -> dict[str, Any]:
    def part(part: str | bytes) -> Any:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        return {"type": "image_url", "image_url": {"url": url_of(part), "detail": "auto"}}

    def message(role: str, parts: Sequence[str | bytes]) -> Any:
        told = {"tool_call_id": "c00001x00"} if role == "tool" else {}
        return {"role": role, "content": parts[0] if role == "assistant" else [*map(part, parts)], **told}

    return {"messages": [message(*each) for each in said]}


def of_messages(said: Sequence[Said]) -> dict[str, Any]:
    def block(part: str | bytes) -> Any:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(part).decode()}
        return {"type": "image", "source": source}

    def message(role: str, parts: Sequence[str | bytes]) -> Any:
        blocks = [*map(block, parts)]
        if role == "tool":
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c00001x00", "content": blocks}]}
        return {"role": role, "content": blocks}

    return {"max_tokens": 1000, "messages": [message(*each) for each in said]}


def of_responses(said: Sequence[Said]) -> dict[str, Any]:
    def part(role: str, part: str | bytes) -> Any:
        if isinstance(part, str):
            return {"type": "output_text" if role == "assistant" else "input_text", "text": part}
        return {"type": "input_image", "image_url": url_of(part), "detail": "auto"}

    def item(role: str, parts: Sequence[str | bytes]) -> Any:
        content = [part(role, each) for each in parts]
        if role == "tool":
            return {"type": "function_call_output", "call_id": "c00001x00", "output": content}
        return {"type": "message", "role": role, "content": content}

    return {"input": [item(*each) for each in said]}


DIALECTS: dict[str, Callable[[Sequence[Said]], dict[str, Any]]] = {
    "chat": of_chat,
    "messages": of_messages,
    "responses": of_responses,
}


def post(policy: Policy, dialect: str, body: dict[str, Any]) -> httpx.Response:
    url = f"{policy.base_url}{PATHS[dialect]}"
    return httpx.post(url, json=body, headers={"x-api-key": policy.api_key}, timeout=60)


def say(policy: Policy, dialect: str, said: Sequence[Said]) -> str:
    """What the policy says to a conversation."""
    response = post(policy, dialect, DIALECTS[dialect](said))
    assert response.status_code == 200, response.text
    answer = response.json()
    if dialect == "chat":
        return str(answer["choices"][0]["message"]["content"])
    if dialect == "messages":
        return "".join(block["text"] for block in answer["content"])
    return str(answer["output"][0]["content"][0]["text"])


async def play(
    store: StoreUnderTest,
    folder: Path,
    agent: type[Agent],
    files: Sequence[bytes] = (),
    template: str = VISION_TEMPLATE,
    engine: type[Eyes] = Eyes,
    **settings: Any,
) -> tuple[list[SampleRequest], list[tuple[Any, trajectory_pb2.TrajectoryMeta, trajectory_pb2.RowRef]]]:
    """A group of four episodes that an agent runs, whose row shows `files`: what was sampled; rows, metas and refs."""
    write_tokenizer(folder, template, VISION_TOKENS)
    given: dict[str, Any] = {"visual_tokens": TOKENS, "max_prompt_tokens": 128, "max_image_bytes": 10**5, **settings}
    served = environment(agent, runs_episodes=True)
    async with served as (address, _), rollout_in(store, folder, address, engine=engine, **given) as rollout:
        admit(store, folder, files)
        await rollout.publish(1)
        (group,) = await committed(rollout)
        assert isinstance(rollout.engine, Eyes)
        rows = store.rows.read(group.rows, [*SAMPLED_COLUMNS, IMAGES])
        metas = store.rows.read_meta(group.rows)
        for row, meta, ref in zip(rows, metas, group.rows, strict=True):
            check_row(row, meta)
            others = files_of(row)[len(files) :]
            assert (meta.episode.num_images, ref.shown_image_bytes) == (len(others), sum(map(len, others)))
        return rollout.engine.shown, [*zip(rows, metas, group.rows, strict=True)]


def segments_of(row: Any, ref: trajectory_pb2.RowRef) -> list[tuple[list[int], list[bytes]]]:
    """The tokens of each segment, as a trainer has them, and the images that it shows."""
    found = Piece(0, 0, segment_lengths(ref)).segments(row)
    return [(segment["token_ids"].tolist(), files_of(segment)) for segment in found]


def were_sampled(
    asked: Sequence[SampleRequest], row: Any, meta: trajectory_pb2.TrajectoryMeta, ref: trajectory_pb2.RowRef
) -> None:
    """Each turn of a row was sampled from its segment's tokens before it, and from the first of its images: as many as
    stand there.
    """
    lengths = segment_lengths(ref)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    segments = segments_of(row, ref)
    for turn in meta.episode.turns:
        number = max(number for number, start in enumerate(starts) if start <= turn.start)
        ids, files = segments[number]
        before = ids[: turn.start - starts[number]]
        found = [request for request in asked if list(request.prompt_token_ids) == before]
        assert any(
            tuple(request.images) == tuple(files[: len(request.images)])
            and before.count(PAD) == sum(NUMBERS[file] for file in request.images)
            for request in found
        )


TALK: list[Said] = [
    ("user", ["look ", SHOWN[0], "well"]),
    ("user", ["go ", "on"]),
    ("tool", [SHOWN[1], SHOWN[2]]),
    ("user", [SHOWN[0], "again"]),
]
"""What an agent says between the policy's turns."""


class Shows(Agent):
    """An agent that says TALK, in these dialects one after the other."""

    dialects: ClassVar[Sequence[str]] = ()

    def run(self, policy: Policy) -> float:
        said: list[Said] = []
        for turn, each in enumerate(TALK):
            said.append(each)
            said.append(("assistant", [say(policy, self.dialects[turn % len(self.dialects)], said)]))
        return 0.5


@pytest.mark.parametrize("dialects", [["chat"], ["messages"], ["responses"], ["chat", "messages", "responses"]])
async def test_an_agent_shows_images_in_every_dialect(
    store: StoreUnderTest, tmp_path: Path, dialects: Sequence[str]
) -> None:
    """Against the slow oracle: the whole conversation rendered, tokenized and expanded once more."""

    class One(Shows):
        pass

    One.dialects = dialects
    asked, played = await play(store, tmp_path, One)
    tokenizer, shown = ChatTokenizer(tmp_path), [SHOWN[0], SHOWN[1], SHOWN[2], SHOWN[0]]
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert dict(meta.episode.tokens.branches) == {"first": 1}
        assert (meta.episode.ended_by, len(meta.episode.turns)) == ("terminated", 4)
        assert files_of(row) == SHOWN[:3], "each file once"
        (segment,) = segments_of(row, ref)
        assert segment[1] == shown
        said = [message.content for message in meta.episode.messages]
        assert [said[0], said[2], said[4], said[6]] == ["look <image>well", "go on", "<image><image>", "<image>again"]
        talk: list[Any] = []
        heard = [*said[1::2], meta.response_text]
        for (role, parts), answer in zip(TALK, heard, strict=True):
            content = [
                {"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts
            ]
            talk += [{"role": role, "content": content}, {"role": "assistant", "content": answer}]
        assert segment[0] == expanded(tokenizer, talk, shown, generate=False)


class Swaps(Agent):
    """An agent that shows another image in the place of one, and then the first again."""

    def run(self, policy: Policy) -> float:
        first: list[Said] = [("user", ["what? ", SHOWN[0]])]
        other: list[Said] = [("user", ["what? ", SHOWN[1]])]
        heard = say(policy, "chat", first)
        later: list[Said] = [("assistant", [heard]), ("user", ["sure?"])]
        say(policy, "messages", [*other, *later])
        say(policy, "responses", [*first, *later])
        return 0.5


async def test_another_image_in_the_place_of_one_begins_a_segment(store: StoreUnderTest, tmp_path: Path) -> None:
    """Both images have as many tokens, so that the tokens alone tell nothing."""
    asked, played = await play(store, tmp_path, Swaps)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert dict(meta.episode.tokens.branches) == {"first": 1, "history": 1}
        assert files_of(row) == [SHOWN[1], SHOWN[0]], "in the order of the segments"
        assert [files for _, files in segments_of(row, ref)] == [[SHOWN[1]], [SHOWN[0]]]
        assert meta.episode.tokens.num_trained == meta.episode.tokens.num_sampled


class Shrinks(Agent):
    """An agent that shows three images, and then the last alone: it compacts its history."""

    def run(self, policy: Policy) -> float:
        said: list[Said] = [("user", [*SHOWN[:3]])]
        said.append(("assistant", [say(policy, "chat", said)]))
        say(policy, "chat", [*said, ("user", ["go on"])])
        say(policy, "chat", [("user", ["in short", SHOWN[2]])])
        say(policy, "chat", [("user", ["without any"])])
        return 0.5


async def test_segments_show_their_own_images_and_a_piece_of_the_row_has_them(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    asked, played = await play(store, tmp_path, Shrinks)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert files_of(row) == SHOWN[:3]
        assert [files for _, files in segments_of(row, ref)] == [SHOWN[:3], [SHOWN[2]], []]
        first, *others = lengths = segment_lengths(ref)
        (behind, last) = Piece(0, first, tuple(others), 1).segments(row)
        assert (files_of(behind), files_of(last)) == ([SHOWN[2]], [])
        assert len(last["token_ids"]) == lengths[-1]


async def test_where_the_template_shows_earlier_turns_otherwise_each_segment_has_the_images_so_far(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    class One(Shows):
        dialects = ("messages",)

    asked, played = await play(store, tmp_path, One, template=CHANGED_LATER)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        shown = [SHOWN[0], SHOWN[1], SHOWN[2], SHOWN[0]]
        assert [files for _, files in segments_of(row, ref)] == [shown[:1], shown[:1], shown[:3], shown]
        assert meta.episode.tokens.branches["template"] == 3


async def test_an_image_behind_a_placeholder_that_was_sampled_begins_a_segment(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """Nobody could tell which of the two stands for it."""

    class One(Shows):
        dialects = ("chat",)

    _, played = await play(store, tmp_path, One, engine=Sampling)
    for row, meta, ref in played:
        assert dict(meta.episode.tokens.branches) == {"first": 1, "images": 2}
        shown = [SHOWN[0], SHOWN[1], SHOWN[2], SHOWN[0]]
        assert [files for _, files in segments_of(row, ref)] == [shown[:1], shown[:3], shown]


class Chains(Agent):
    """An agent that names its earlier answer in place of sending images again."""

    def run(self, policy: Policy) -> float:
        first = post(policy, "responses", of_responses([("user", [SHOWN[0]])])).json()
        said = {**of_responses([("user", [SHOWN[1], "and?"])]), "previous_response_id": first["id"]}
        second = post(policy, "responses", said).json()
        third = {"input": "and?", "previous_response_id": second["id"]}
        assert post(policy, "responses", third).status_code == 200
        return 0.5


async def test_an_answer_that_is_named_goes_on_with_its_images(store: StoreUnderTest, tmp_path: Path) -> None:
    asked, played = await play(store, tmp_path, Chains)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert dict(meta.episode.tokens.branches) == {"first": 1}
        assert files_of(row) == SHOWN[:2]


class Asks(Agent):
    """An agent that asks how many tokens a conversation has."""

    def run(self, policy: Policy) -> float:
        body = of_messages([("user", [SHOWN[0], "what?"])])
        headers = {"x-api-key": policy.api_key}
        counted = httpx.post(f"{policy.base_url}/messages/count_tokens", json=body, headers=headers, timeout=60).json()
        assert counted["input_tokens"] == post(policy, "messages", body).json()["usage"]["input_tokens"]
        return 0.5


async def test_the_tokens_of_images_are_counted(store: StoreUnderTest, tmp_path: Path) -> None:
    _, played = await play(store, tmp_path, Asks)
    assert all(files_of(row) == SHOWN[:1] for row, _, _ in played)


# --- bounds and refusals ------------------------------------------------------------------------------


class Spends(Agent):
    """An agent that shows images until it may not."""

    dialect: ClassVar[str] = ""

    def run(self, policy: Policy) -> float:
        said: list[Said] = [("user", [SHOWN[0], SHOWN[0]])]
        for more in (SHOWN[0], SHOWN[1]):
            said += [("assistant", [say(policy, self.dialect, said)]), ("user", [more])]
        refused = post(policy, self.dialect, DIALECTS[self.dialect]([*said, ("user", [SHOWN[2]])]))
        assert refused.status_code == 403
        assert "bytes of images (environments.*.max_image_bytes) are spent" in refused.text
        kind = {"messages": "permission_error"}.get(self.dialect, "invalid_request_error")
        assert refused.json()["error"]["type"] == kind
        return 0.5


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_images_beyond_the_bound_are_refused_as_any_budget_and_one_counts_once(
    store: StoreUnderTest, tmp_path: Path, dialect: str
) -> None:
    class One(Spends):
        pass

    One.dialect = dialect
    _, played = await play(store, tmp_path, One, max_image_bytes=len(SHOWN[0]) + len(SHOWN[1]))
    for row, meta, _ in played:
        assert (meta.episode.ended_by, len(meta.episode.turns)) == ("images", 2)
        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert files_of(row) == SHOWN[:1]


WRONG: dict[str, tuple[bytes, str]] = {
    "broken": (SHOWN[0][:90], "an image cannot be shown: an image cannot be read"),
    "too long": (picture(2, 402), "an image cannot be shown: an image of 2 x 402 pixels is more than 200"),
    "no image": (b"hello", "an image cannot be shown: an image cannot be read"),
    "too many tokens": (picture(64, 64), "the first prompt of a conversation has "),
    "as many, of which no pixel is opened": (picture(64, 64)[:200], "the first prompt of a conversation has "),
}
"""Images that cannot be shown, and why."""
_REMOTE = "https://example.org/a.png"
_SOURCE = {"type": "url", "url": _REMOTE}
_ODD: list[tuple[str, str, Any, str]] = [
    ("chat", "user", {"type": "image_url", "image_url": {"url": _REMOTE}}, "nothing is fetched here"),
    ("chat", "user", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched here"),
    ("chat", "user", {"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "nothing is fetched here"),
    ("chat", "user", {"type": "image_url", "image_url": {"url": "data:image/png;base64,a*"}}, "is no base64"),
    ("chat", "user", {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "has no data"),
    ("chat", "user", {"type": "image_url"}, "nothing is fetched here"),
    ("chat", "user", {"type": "input_audio", "input_audio": {}}, "is not read here"),
    ("chat", "system", {"type": "image_url", "image_url": {"url": url_of(SHOWN[0])}}, "is not read here"),
    ("chat", "assistant", {"type": "image_url", "image_url": {"url": url_of(SHOWN[0])}}, "is not read here"),
    ("messages", "user", {"type": "image", "source": _SOURCE}, "nothing is fetched here"),
    ("messages", "user", {"type": "image", "source": {"type": "base64", "data": "é"}}, "is no base64"),
    ("messages", "user", {"type": "image", "source": {"type": "base64"}}, "has no data"),
    ("messages", "user", {"type": "image"}, "nothing is fetched here"),
    ("messages", "user", {"type": "document", "source": _SOURCE}, "is not read here"),
    ("responses", "user", {"type": "input_image", "image_url": _REMOTE}, "nothing is fetched here"),
    ("responses", "user", {"type": "input_image", "file_id": "file-1"}, "no files are kept here"),
    ("responses", "user", {"type": "input_file", "file_id": "file-1"}, "is not read here"),
    ("responses", "assistant", {"type": "input_image", "image_url": url_of(SHOWN[0])}, "is not read here"),
]


class Errs(Agent):
    """An agent that shows what cannot be shown, and then speaks as it may."""

    def run(self, policy: Policy) -> float:
        bodies = [
            (dialect, write([("user", [file])]), why)
            for file, why in WRONG.values()
            for dialect, write in DIALECTS.items()
        ]
        for dialect, role, part, why in _ODD:
            name = "input" if dialect == "responses" else "messages"
            said: list[Any] = [{"role": role, "content": [part]}, {"role": "user", "content": "a"}]
            bodies.append((dialect, {"max_tokens": 9, name: said}, why))
        for dialect, body, why in bodies:
            refused = post(policy, dialect, body)
            assert refused.status_code == 400, (body, refused.text)
            error = refused.json()["error"]
            assert why in error["message"]
            assert error["type"] == "invalid_request_error"
        say(policy, "chat", [("user", ["a"])])
        return 0.5


async def test_what_cannot_be_shown_is_refused_in_words_and_takes_neither_a_call_nor_room(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    _, played = await play(store, tmp_path, Errs, max_prompt_tokens=60)
    for row, meta, _ in played:
        assert (meta.episode.tokens.num_calls, meta.episode.ended_by) == (1, "terminated")
        assert files_of(row) == []


class Tooled(Agent):
    """An agent that shows an image in a role in which the template shows none, and then in another."""

    def run(self, policy: Policy) -> float:
        said: list[Said] = [("user", [SHOWN[0], "what?"])]
        said.append(("assistant", [say(policy, "chat", said)]))
        for dialect, write in DIALECTS.items():
            refused = post(policy, dialect, write([*said, ("tool", [SHOWN[1]])]))
            assert refused.status_code == 400
            assert "the chat template must show each image once" in refused.text
        say(policy, "chat", [*said, ("tool", ["nothing"]), ("user", [SHOWN[2]])])
        return 0.5


async def test_an_image_in_a_role_in_which_the_template_shows_none_is_refused_in_words(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    template = VISION_TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and message.role == 'user'")
    template = template.replace("{{ part.text }}", "{{ part.text | default('') }}")
    asked, played = await play(store, tmp_path, Tooled, template=template)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert files_of(row) == [SHOWN[0], SHOWN[2]]
        assert dict(meta.episode.tokens.branches) == {"first": 1}


class Unasked(Agent):
    """An agent of a run that shows no images."""

    def run(self, policy: Policy) -> float:
        for dialect, write in DIALECTS.items():
            refused = post(policy, dialect, write([("user", [SHOWN[0]])]))
            assert refused.status_code == 400
            assert "set environments.*.max_image_bytes" in refused.text
        say(policy, "chat", [("user", ["a"])])
        return 0.5


async def test_a_run_that_shows_no_images_refuses_an_agent_s(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with (
        environment(Unasked, runs_episodes=True) as (address, _),
        rollout_in(store, tmp_path, address) as rollout,
    ):
        rollout.admit(1, max_tokens=600)
        await rollout.publish(1)
        (group,) = await committed(rollout)
        assert {meta.episode.tokens.num_calls for meta in store.rows.read_meta(group.rows)} == {1}


# --- the row's images ---------------------------------------------------------------------------------


class Owns(Agent):
    """An agent that shows the policy what its row shows, as OpenAI's client takes it, and no image more."""

    def run(self, policy: Policy) -> float:
        assert [image.media_type for image in self.task.images] == ["image/png", "image/jpeg"]
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            said: Any = self.task.chat_messages()
            client.chat.completions.create(model=policy.model, messages=said)
        refused = post(policy, "chat", of_chat([("user", [SHOWN[0]])]))
        assert (refused.status_code, "set environments.*.max_image_bytes" in refused.text) == (400, True)
        return 0.5


JPEG = picture(24, 16, 9, "JPEG")
NUMBERS[JPEG] = 6


async def test_a_row_s_images_reach_the_agent_who_shows_them_without_a_bound(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    asked, played = await play(store, tmp_path, Owns, [OWN, JPEG], max_image_bytes=0)
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert not meta.episode.messages, "what it said is the row's"
        assert (files_of(row), segments_of(row, ref)[0][1]) == ([OWN, JPEG], [OWN, JPEG])
        assert not trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).segments


class Crops(Agent):
    """An agent that shows another image than its row's, and then the row's."""

    def run(self, policy: Policy) -> float:
        say(policy, "chat", [("user", ["what?"])])
        said: list[Said] = [("user", [SHOWN[0], "what?"])]
        said.append(("assistant", [say(policy, "chat", said)]))
        say(policy, "messages", [*said, ("user", [self.task.images[0].data])])
        return 0.5


async def test_what_an_agent_shows_beside_its_row_s_images_stands_behind_them(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    asked, played = await play(store, tmp_path, Crops, [OWN], max_image_bytes=len(SHOWN[0]))
    for row, meta, ref in played:
        were_sampled(asked, row, meta, ref)
        assert files_of(row) == [OWN, SHOWN[0]]
        assert [files for _, files in segments_of(row, ref)] == [[], [SHOWN[0], OWN]]


class Resizes(Agent):
    """An agent that shows another image in the place of its row's, and says the row's text to it."""

    def run(self, policy: Policy) -> float:
        said: Any = self.task.chat_messages()
        (shown,) = (part for message in said for part in message["content"] if part["type"] == "image_url")
        shown["image_url"] = {"url": Image(SHOWN[0]).data_url}
        with OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            client.chat.completions.create(model=policy.model, messages=said)
        return 0.5


async def test_scorers_are_told_of_an_image_in_the_place_of_the_row_s(store: StoreUnderTest, tmp_path: Path) -> None:
    _, played = await play(store, tmp_path, Resizes, [OWN])
    for row, meta, _ in played:
        assert [message.content.count("<image>") for message in meta.episode.messages] == [1]
        images = trajectory_pb2.Images.FromString(row[IMAGES].tobytes())
        assert images_of(meta, images) == [OWN, SHOWN[0]]


async def test_a_row_whose_images_no_agent_shows_says_so(store: StoreUnderTest, tmp_path: Path) -> None:
    class Blind(Agent):
        def run(self, policy: Policy) -> float:
            say(policy, "chat", [("user", ["a"])])
            return 0.5

    _, played = await play(store, tmp_path, Blind, [OWN])
    for row, _, ref in played:
        assert files_of(row) == [OWN]
        assert [files for _, files in segments_of(row, ref)] == [[]]
