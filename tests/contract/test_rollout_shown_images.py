"""Episodes whose environment shows images: in its first messages, between the policy's turns, and where it may not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rolecall.columns import IMAGES
from rolecall.data.images.files import parts
from rolecall.data.images.tokens import VisualTokens
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.environment import Action, Agent, Answer, Env, Image, ImageMessage, Message, Task
from rolecall.environment.env import Messages, Policy
from rolecall.training.packing.pieces import Piece
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import trajectory_pb2
from services.controller.durable.in_flight import prompts_in_flight
from services.controller.groups.prompts import digests
from services.rollout.sampling import SampleRequest
from tests.contract.environment_peers import environment
from tests.contract.rollout_replica import ReplicaUnderTest
from tests.contract.test_rollout_episodes import CHANGED_LATER, TURNS, Eyes, check_row, rollout_in
from tests.fixtures_store import StoreUnderTest
from tests.pictures import PAD, picture
from tests.tiny_tokenizer import EOS_TOKEN_ID, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tests.waiting import until

TOKENS = VisualTokens(PAD, 4, 2, 64, 4096)
OWN = picture(16, 8)
SHOWN = [picture(24, 16, seed) for seed in range(1, 6)]
NUMBERS = {OWN: 2, **dict.fromkeys(SHOWN, 6)}


class Gallery(Env):
    """Five turns. It shows an image at the start, two after the second turn, one after the fourth."""

    opening: ClassVar[Messages] = ImageMessage("user", ["look ", Image(SHOWN[0]), " well"])
    second: ClassVar[Messages] = [
        Message("user", "<image> is no image"),
        ImageMessage("user", [Image(SHOWN[1]), Image(SHOWN[2]), "<|image_pad|>"]),
    ]

    def reset(self, task: Task, seed: int) -> Messages:
        self.turns = 0
        return type(self).opening

    def step(self, action: Action) -> str | Answer:
        self.turns += 1
        said = {2: type(self).second, 4: ImageMessage("user", (Image(SHOWN[3]),))}.get(self.turns, "go on")
        return Answer(reward=0.5, is_over=True) if self.turns == 5 else Answer(said)

    def grade(self) -> float:
        return 0.875


class Sampling(Eyes):
    """An engine that samples a placeholder of an image at the start of a turn."""

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        token, logprob = super()._next(request, position)
        return (PAD, logprob) if position == 0 and token != EOS_TOKEN_ID else (token, logprob)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, VISION_TEMPLATE, VISION_TOKENS)
    return tmp_path


def expanded(tokenizer: ChatTokenizer, conversation: Sequence[Any], files: Sequence[bytes], **how: Any) -> list[int]:
    ids = tokenizer.encode(tokenizer.render(conversation, **how).removesuffix("\n"))
    return TOKENS.expanded(ids, [NUMBERS[file] for file in files])


async def play(
    store: StoreUnderTest,
    folder: Path,
    env: type[Env],
    files: Sequence[bytes] = (OWN,),
    template: str = VISION_TEMPLATE,
    engine: type[Eyes] = Eyes,
    **settings: Any,
) -> tuple[list[SampleRequest], list[Any], list[trajectory_pb2.TrajectoryMeta], list[int]]:
    """A group of four episodes whose row shows `files`: what was sampled, rows, metas, numbers of segments."""
    write_tokenizer(folder, template, VISION_TOKENS)
    async with (
        environment(env, **TURNS) as (address, _),
        rollout_in(
            store, folder, address, engine=engine,
            **{"visual_tokens": TOKENS, "max_prompt_tokens": 128, "max_image_bytes": 10**5, **settings},
        ) as rollout,
    ):  # fmt: skip
        admit(store, folder, files)
        await rollout.publish(1)
        (group,) = await committed(rollout)
        assert isinstance(rollout.engine, Eyes)
        rows = store.rows.read(
            group.rows, [*SAMPLED_COLUMNS, *([IMAGES] if settings.get("visual_tokens", True) else [])]
        )
        metas = store.rows.read_meta(group.rows)
        for row, ref, meta in zip(rows, group.rows, metas, strict=True):
            others = files_of(row)[len(files) :] if IMAGES in row else []
            assert (len(others), sum(map(len, others))) == (meta.episode.num_images, ref.shown_image_bytes)
        return rollout.engine.shown, rows, metas, [1 + len(ref.segment_starts) for ref in group.rows]


def admit(store: StoreUnderTest, folder: Path, files: Sequence[bytes]) -> None:
    text = "".join("<image>" for _ in files) + "what?"
    ids = expanded(ChatTokenizer(folder), [{"role": "user", "content": parts(text)}], files, generate=True)
    said = [trajectory_pb2.Message(role="user", content=text)]
    prompt = trajectory_pb2.Prompt(
        uid="u", token_ids=np.array(ids, "<i4").tobytes(), images=files, messages=said, environment="game"
    )
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=1200)
    group = trajectory_pb2.PromptGroup(gid=0, prompt=prompt, num_responses=4, sampling=sampling, run_seed=11)
    assert store.ledger.admit(group, b"")


async def committed(rollout: ReplicaUnderTest) -> Any:
    return await asyncio.wait_for(rollout.committed(1), 60)


def files_of(row: Any) -> list[bytes]:
    return list(trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files)


@pytest.mark.parametrize("files", [(OWN,), ()], ids=["behind the row's", "alone"])
async def test_what_an_environment_shows_reaches_engine_row_and_nobody_s_text(
    store: StoreUnderTest, tmp_path: Path, files: Sequence[bytes]
) -> None:
    """Against the slow oracle: the whole conversation rendered, tokenized and expanded once more."""
    asked, rows, metas, num_segments = await play(store, tmp_path, Gallery, files)
    tokenizer, shown = ChatTokenizer(tmp_path), [*files, *SHOWN[:4]]
    assert {tuple(request.images) for request in asked} == {tuple(shown[: len(files) + num]) for num in (1, 3, 4)}
    for request in asked:
        assert request.prompt_token_ids.count(PAD) == sum(NUMBERS[file] for file in request.images)
    assert num_segments == [1] * 4
    (in_flight,) = prompts_in_flight(store.ledger, store.rows, 1)
    assert list(in_flight.images) == digests(files), "a checkpoint notes those that the data has"
    for row, meta in zip(rows, metas, strict=True):
        check_row(row, meta)
        assert files_of(row) == shown
        assert meta.episode.num_images == 4
        assert len(meta.SerializeToString()) < 3000, "no image in it"
        own = "".join("<image>" for _ in files) + "what?"
        said = [message.content for message in meta.episode.messages]
        assert (said[0], said[4:6], said[9]) == (
            "look <image> well", ["<image> is no image", "<image><image><|image_pad|>"], "<image>"
        )  # fmt: skip
        image = {"type": "image"}
        talk: list[Any] = [{"role": message.role, "content": message.content} for message in meta.episode.messages]
        talk[0]["content"], talk[9]["content"] = parts(said[0]), [image]
        talk[5]["content"] = [image, image, {"type": "text", "text": "xyz"}]
        talk = [{"role": "user", "content": parts(own)}, *talk, {"role": "assistant", "content": meta.response_text}]
        ids = expanded(tokenizer, talk, shown, generate=False)
        spelled, plain = tokenizer.encode_plain("xyz"), tokenizer.encode_plain("<|image_pad|>")
        place = next(i for i in range(len(ids)) if ids[i : i + 3] == spelled)
        assert row["token_ids"].tolist() == [*ids[:place], *plain, *ids[place + 3 :]]


async def test_a_file_that_is_shown_twice_stands_once_in_the_row(store: StoreUnderTest, folder: Path) -> None:
    class Again(Gallery):
        second: ClassVar[Messages] = ImageMessage("user", [Image(SHOWN[0]), "and", Image(OWN)])

    asked, rows, metas, num_segments = await play(store, folder, Again)
    assert num_segments == [1] * 4
    assert {len(request.images) for request in asked} == {2, 4, 5}
    for row, meta in zip(rows, metas, strict=True):
        check_row(row, meta)
        assert (files_of(row), meta.episode.num_images) == ([OWN, SHOWN[0], SHOWN[3]], 2)
        (segment,) = Piece(0, 0, (len(row["token_ids"]),)).segments(row)
        assert files_of(segment) == [OWN, SHOWN[0], SHOWN[0], OWN, SHOWN[3]]


async def test_a_segment_that_begins_anew_shows_all_images_so_far(store: StoreUnderTest, tmp_path: Path) -> None:
    asked, rows, metas, num_segments = await play(store, tmp_path, Gallery, template=CHANGED_LATER)
    assert {len(request.images) for request in asked} == {2, 4, 5}
    for request in asked:
        assert request.prompt_token_ids.count(PAD) == sum(NUMBERS[file] for file in request.images)
    assert num_segments == [5] * 4
    for row, meta in zip(rows, metas, strict=True):
        check_row(row, meta)
        assert files_of(row) == [OWN, *SHOWN[:4]]
        assert row["token_ids"].tolist().count(PAD) == sum(2 + 6 * num for num in (1, 1, 3, 3, 4))


async def test_an_episode_ends_graded_where_its_images_would_have_too_many_bytes(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    room = sum(map(len, SHOWN[:3]))
    asked, rows, metas, _ = await play(store, tmp_path, Gallery, max_image_bytes=room)
    assert {len(request.images) for request in asked} == {2, 4}
    for row, meta in zip(rows, metas, strict=True):
        assert (meta.episode.ended_by, len(meta.episode.turns), meta.episode.reward.value) == ("images", 4, 0.875)
        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert (files_of(row), meta.episode.num_images) == ([OWN, *SHOWN[:3]], 3)


async def test_behind_a_placeholder_that_was_sampled_an_episode_is_shown_no_image(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    """Nobody could tell which of the two stands for it."""
    asked, rows, metas, _ = await play(store, tmp_path, Gallery, engine=Sampling)
    assert {len(request.images) for request in asked} == {2}
    for row, meta in zip(rows, metas, strict=True):
        check_row(row, meta)
        assert (meta.episode.ended_by, len(meta.episode.turns)) == ("images", 2)
        assert files_of(row) == [OWN, SHOWN[0]]


@pytest.mark.parametrize(
    ("opening", "settings", "why"),
    [
        (SHOWN[0], {"max_image_bytes": 0}, "answered an image, and this run shows none of it: set environments"),
        (SHOWN[0], {"visual_tokens": None}, "answered an image, and this run shows none of it: set environments"),
        (SHOWN[0][:90], {}, "answered an image that cannot be shown: an image cannot be read"),
        (picture(2, 402), {}, "answered an image that cannot be shown: an image of 2 x 402 pixels is more than 200"),
    ],
    ids=["not asked for", "a model of text", "broken", "too long"],
)
async def test_an_image_that_cannot_be_shown_loses_its_episode_in_words(
    store: StoreUnderTest, tmp_path: Path, caplog: pytest.LogCaptureFixture, opening: bytes, settings: Any, why: str
) -> None:
    class Wrong(Gallery):
        def reset(self, task: Task, seed: int) -> Messages:
            return ImageMessage("user", [Image(opening)])

    write_tokenizer(tmp_path, VISION_TEMPLATE, VISION_TOKENS)
    given: dict[str, Any] = {"visual_tokens": TOKENS, "max_prompt_tokens": 128, "max_image_bytes": 10**5, **settings}
    async with environment(Wrong, **TURNS) as (address, _), rollout_in(store, tmp_path, address, **given) as one:
        admit(store, tmp_path, ())
        await one.publish(1)
        await until(lambda: "was lost" in caplog.text)
    assert why in caplog.text
    assert store.balance()[1] == 0


class Final(Gallery):
    """An image that nobody is shown stands beside the end."""

    def reset(self, task: Task, seed: int) -> Messages:
        return "look"

    def step(self, action: Action) -> str | Answer:
        return Answer(ImageMessage("user", [Image(SHOWN[0])]), reward=0.5, is_over=True)


class Drawing(Agent):
    """An agent with an image in its first messages."""

    def reset(self, task: Task, seed: int) -> Messages:
        return ImageMessage("user", [Image(SHOWN[0])])

    def run(self, policy: Policy) -> float:
        return 0.5


@pytest.mark.parametrize(("env", "described"), [(Final, TURNS), (Drawing, {"runs_episodes": True})])
async def test_an_image_that_nobody_would_be_shown_is_lost_as_well_in_a_run_of_text(
    store: StoreUnderTest, folder: Path, caplog: pytest.LogCaptureFixture, env: type[Env], described: Any
) -> None:
    async with environment(env, **described) as (address, _), rollout_in(store, folder, address) as one:
        admit(store, folder, ())
        await one.publish(1)
        await until(lambda: "was lost" in caplog.text)
    assert "answered an image, and this run shows none of it" in caplog.text


class Careful(Env):
    """One turn. It says whether it was told that images are shown."""

    def reset(self, task: Task, seed: int) -> Messages:
        return str(self.shows_images)

    def step(self, action: Action) -> str | Answer:
        return Answer(reward=0.5, is_over=True)


@pytest.mark.parametrize(("told", "settings"), [("True", {}), ("False", {"visual_tokens": None, "max_image_bytes": 0})])
async def test_an_environment_is_told_whether_images_are_shown(
    store: StoreUnderTest, tmp_path: Path, told: str, settings: Any
) -> None:
    _, _, metas, _ = await play(store, tmp_path, Careful, (), **settings)
    assert {meta.episode.messages[0].content for meta in metas} == {told}


class Torn(Gallery):
    """What it shows after the second turn is no image."""

    second: ClassVar[Messages] = ImageMessage("user", [Image(SHOWN[1][:90])])


@pytest.mark.parametrize(
    ("settings", "ended_by"),
    [({"max_turns": 2}, "turns"), ({"max_image_bytes": len(SHOWN[0])}, "images")],
)
async def test_a_broken_image_that_nobody_would_be_shown_loses_nothing(
    store: StoreUnderTest, folder: Path, settings: Any, ended_by: str
) -> None:
    _, _, metas, _ = await play(store, folder, Torn, **settings)
    assert {(meta.episode.ended_by, len(meta.episode.turns)) for meta in metas} == {(ended_by, 2)}


async def test_a_broken_image_at_the_end_of_the_time_loses_nothing(store: StoreUnderTest, folder: Path) -> None:
    class Slow(Torn):
        def reset(self, task: Task, seed: int) -> Messages:
            self.turns = 1
            return "look"

    _, _, metas, _ = await play(store, folder, Slow, budget_s=0.0)
    assert {(meta.episode.ended_by, len(meta.episode.turns)) for meta in metas} == {("time", 1)}


async def test_images_in_a_role_in_which_the_template_shows_none_lose_their_episode_in_words(
    store: StoreUnderTest, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tooled(Gallery):
        second: ClassVar[Messages] = ImageMessage("tool", [Image(SHOWN[1])])

    template = VISION_TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and message.role == 'user'")
    write_tokenizer(folder, template.replace("{{ part.text }}", "{{ part.text | default('') }}"), VISION_TOKENS)
    given: dict[str, Any] = {"visual_tokens": TOKENS, "max_prompt_tokens": 128, "max_image_bytes": 10**5}
    served = environment(Tooled, **TURNS, roles=("user", "tool"))
    async with served as (address, _), rollout_in(store, folder, address, **given) as one:
        admit(store, folder, ())
        await one.publish(1)
        await until(lambda: "was lost" in caplog.text)
    assert "the chat template does not show the images of the environment's messages of the role tool" in caplog.text


async def test_first_messages_with_images_beyond_the_bound_are_the_task_s_fault(
    store: StoreUnderTest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path, VISION_TEMPLATE, VISION_TOKENS)
    given: dict[str, Any] = {"visual_tokens": TOKENS, "max_prompt_tokens": 128, "max_image_bytes": 10}
    async with environment(Gallery, **TURNS) as (address, _), rollout_in(store, tmp_path, address, **given) as one:
        admit(store, tmp_path, ())
        await one.publish(1)
        await until(lambda: "show images of more than environments.*.max_image_bytes 10" in caplog.text)
