"""Scorers that ask for images: where each stands in the conversation, who is sent the files, and who is not."""

import asyncio
import base64
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rolecall.columns import IMAGES
from rolecall.commands.conformance import examine_scorer
from rolecall.conformance.check import Status
from rolecall.conformance.peer import Peer
from rolecall.conformance.reward.pool import own_pool
from rolecall.conformance.reward.session import Options
from rolecall.data.images.files import spelled_in
from rolecall.errors import ScorerError, ScorerUnavailableError, UnavailableError
from rolecall.reward import SERVICE_NAME, Scorer, description, new_server, one_by_one
from rolecall.rpc.server import Server
from rolecall.scoring.http import HttpCarrier
from rolecall.scoring.items import images_of, score_item
from rolecall.scoring.scores import Item, Score
from rolecall.settings import ExternalScorer, RpcSection, RunSettings
from rolecall.settings.data import IMAGE_MARK
from rolecall.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from services.controller.groups import group_scorer
from services.controller.groups.group_scorer import GroupScorer
from services.controller.threads import StoreThreads
from tests.contract.environment_peers import environment
from tests.contract.reward_peers import Liar, client_of, reward_service, serving
from tests.contract.test_judge import component, items_of, values
from tests.contract.test_rollout_episodes import TURNS, Eyes, rollout_in
from tests.contract.test_rollout_shown_images import OWN, SHOWN, TOKENS, Gallery, admit, committed
from tests.fixtures_store import StoreUnderTest
from tests.pictures import picture
from tests.tiny_tokenizer import VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tests.twins.http_scorer import Asked, HttpTwin, judge_twin

FIRST, SECOND, JPEG = picture(8, 8, 1), picture(8, 8, 2), picture(8, 8, 3, "JPEG")
MODULE = """
from rolecall.rpc.server import Server
from rolecall.scoring.scores import Item, Score

def size(item: Item) -> Score:
    return Score(float(sum(map(len, item.images))))
"""


def said(role: str, content: str, *spelled: int) -> trajectory_pb2.Message:
    return trajectory_pb2.Message(role=role, content=content, spelled=spelled)


def conversation(item: reward_pb2.ScoreItem) -> list[Any]:
    return [list(parts) for _, parts in Item.from_proto(item).conversation]


def item_for(prompt: str, *episode: trajectory_pb2.Message, images: Sequence[bytes], num_shown: int) -> Any:
    meta = trajectory_pb2.TrajectoryMeta(id="7/0", num_prompt_tokens=1)
    meta.prompt.messages.append(said("user", prompt))
    if episode:
        meta.episode.messages.extend(episode)
        meta.episode.turns.add(start=1, end=2)
        meta.episode.num_images = num_shown
    return score_item(meta, np.array([5, 6], np.int32), images)


def test_each_image_stands_where_the_text_says_so() -> None:
    assert conversation(item_for("a<image>b<image>", images=[FIRST, SECOND], num_shown=0)) == [
        ["a", FIRST, "b", SECOND]
    ]
    assert conversation(item_for("no <image>", images=[], num_shown=0)) == [["no <image>"]]
    later = (said("assistant", "I see an <image>", 0), said("user", "<image> is it <image>", 1))
    assert conversation(item_for("<image>", *later, images=[FIRST, SECOND], num_shown=1)) == [
        [FIRST], ["I see an <image>"], [SECOND, " is it <image>"]
    ]  # fmt: skip
    assert conversation(item_for("what is <image>?", *later, images=[SECOND], num_shown=1)) == [
        ["what is <image>?"], ["I see an <image>"], [SECOND, " is it <image>"]
    ]  # fmt: skip


def test_an_item_shows_its_prompts_images_and_those_of_the_last_segments_messages() -> None:
    meta = trajectory_pb2.TrajectoryMeta()
    meta.episode.num_images = 2
    column = trajectory_pb2.Images(files=[FIRST, SECOND, JPEG])
    later = said("user", "<image> and <image>", 0)

    def shown(*segments: Sequence[int]) -> list[bytes]:
        del column.segments[:]
        column.segments.extend(trajectory_pb2.SegmentImages(files=each) for each in segments)
        return images_of(meta, column)

    assert shown() == [FIRST], "its messages show none"
    meta.episode.messages.extend([said("user", "<image>"), later])
    assert shown() == [FIRST, SECOND, JPEG]
    assert shown([0, 1, 2], [0, 2, 2]) == [FIRST, JPEG, JPEG], "the last segment goes on from the prompt"
    meta.episode.messages.insert(0, said("user", "<image>"))
    assert shown([0, 1, 2], [0, 2, 1]) == [FIRST, FIRST, JPEG, SECOND], "the last segment begins anew"


def test_what_is_spelled_is_no_image() -> None:
    image = {"type": "image"}
    assert spelled_in("<image> <image>") == [0, 1]
    assert spelled_in([image, {"type": "text", "text": "<image>"}, image, {"type": "text", "text": "x"}]) == [1]
    assert spelled_in([{"type": "text", "text": "<im"}, {"type": "text", "text": "age>"}, image]) == [0]


# --- judges


SEEING: dict[str, Any] = {
    "model": "judge",
    "template": "{% for each in messages %}{{ each.role }}: {{ each.content | tojson }}\n{% endfor %}: {{ response }}",
    "verdicts": {"good": 1.0, "bad": 0.0},
    "images": True,
}


def judge() -> HttpTwin:
    return judge_twin(lambda content: "good")


def seen(item: reward_pb2.ScoreItem, content: str, *images: bytes, spelled: Sequence[int] = ()) -> reward_pb2.ScoreItem:
    del item.messages[:]
    item.messages.append(said("user", content, *spelled))
    item.images[:] = images
    return item


def uri(kind: str, file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(file).decode()}"}}


async def test_a_judge_is_shown_each_image_in_its_place() -> None:
    twin = judge()
    (item,) = items_of("red <image>")
    async with component(twin, SEEING) as one:
        assert set((await one.describe()).reads) == {
            reward_pb2.SCORE_FIELD_MESSAGES, reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_IMAGES
        }  # fmt: skip
        assert values(await one.score([seen(item, "a<image><image>b <image>", FIRST, JPEG, spelled=[2])])) == [1.0]
    (request,) = twin.requests
    assert request.body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": 'user: "a'},
                uri("png", FIRST),
                uri("jpeg", JPEG),
                {"type": "text", "text": 'b \\u003cimage\\u003e"\n: red <image>'},
            ],
        }
    ]


async def test_a_judge_that_asks_for_none_is_shown_none() -> None:
    twin = judge()
    (item,) = items_of("red")
    async with component(twin, {**SEEING, "images": False}) as one:
        assert values(await one.score([seen(item, "<image>b", FIRST)])) == [1.0]
    assert "data:" not in str(twin.requests[0].body)
    assert isinstance(twin.requests[0].body["messages"][0]["content"], str)


async def test_a_question_about_another_image_is_another_question() -> None:
    twin = judge()
    (item,) = items_of("red")
    async with component(twin, SEEING) as one:
        for images in ([FIRST], [SECOND], [FIRST], []):
            assert values(await one.score([seen(item, "<image>b", *images)])) == [1.0]
    assert len(twin.requests) == 3


async def test_an_image_that_is_none_is_the_item_s_fault() -> None:
    (item,) = items_of("red")
    async with component(judge(), SEEING) as one:
        assert values(await one.score([seen(item, "<image>b", b"no image")])) == ["INVALID_INPUT"]


@pytest.mark.parametrize(
    ("shown", "around"),
    [
        ("{{ prompt | upper | replace('LOOK', 'SEE') }}", ["WHAT IS IT? SEE: ", " WELL"]),
        ("{{ prompt | title }}", ["What Is It? Look: ", " Well"]),
        ("{{ prompt | wordwrap(9) }}", ["what is\nit? look:\n", " well"]),
        ("{{ prompt | truncate(20, True, '', 0) }}", ["what is it? look: ", " "]),
        ("{{ prompt[:19] }}", ["what is it? look: "]),
        ("{{ prompt[18:] }}", [" well"]),
        ("{{ (prompt | tojson)[:20] }}", ['"what is it? look: ']),
        ("{{ prompt[:18] }}", None),
        ("{{ prompt | truncate(12) }}", None),
    ],
)
async def test_filters_leave_an_image_whole_or_leave_it_out(shown: str, around: list[str] | None) -> None:
    twin = judge()
    (item,) = items_of("")
    async with component(twin, {**SEEING, "template": shown + "{{ response }}"}) as one:
        assert values(await one.score([seen(item, "what is it? look: <image> well", FIRST)])) == [1.0]
    content = twin.requests[0].body["messages"][0]["content"]
    if around is None:
        assert isinstance(content, str)
        assert "what is" in content
        assert content.isascii()
    else:
        assert [part["text"] for part in content if part["type"] == "text"] == around
        assert [part for part in content if part["type"] != "text"] == [uri("png", FIRST)]


@pytest.mark.parametrize("how", ["prompt | urlencode", "prompt | pprint", "prompt | tojson | pprint"])
async def test_a_filter_that_breaks_an_image_is_told(how: str) -> None:
    twin = judge()
    (item,) = items_of("")
    async with component(twin, {**SEEING, "template": f"{{{{ {how} }}}} {{{{ response }}}}"}) as one:
        (outcome,) = await one.score([seen(item, "look: <image> well", FIRST)])
        assert values([outcome]) == ["INVALID_INPUT"]
        assert "template changes what stands for the images" in str(outcome)
        assert values(await one.score([seen(item, "no image")])) == [1.0], "there is nothing to break"


async def test_nobody_spells_what_stands_for_an_image() -> None:
    twin = judge()
    spelled = "\ue000\uf000\\ue001 \u00e9\U0001f600"
    (item,) = items_of(spelled)
    async with component(twin, {**SEEING, "template": "{{ prompt }}{{ response }}{{ response | tojson }}"}) as one:
        assert values(await one.score([seen(item, "\ue001<image>\uf001", FIRST)])) == [1.0]
    assert twin.requests[0].body["messages"][0]["content"] == [
        {"type": "text", "text": "\ue001"},
        uri("png", FIRST),
        {"type": "text", "text": f'\uf001{spelled}"\ue000\uf000\\\\ue001 \\u00e9\\ud83d\\ude00"'},
    ]


async def test_a_question_with_an_image_is_encoded_once_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()
    encoded = HttpCarrier.encoded

    def noted(carrier: HttpCarrier, body: Any) -> bytes:
        threads.append(threading.current_thread())
        return encoded(carrier, body)

    def slow(request: Asked) -> Any:
        time.sleep(0.5)
        return answer(request)

    monkeypatch.setattr(HttpCarrier, "encoded", noted)
    twin = judge()
    answer, twin.answer = twin.answer, slow
    one, other = items_of("a", "b")
    async with component(twin, SEEING, hedge_after_s=0.1) as asks:
        assert values(await asks.score([seen(one, "<image>", FIRST), seen(other, "no image")])) == [1.0, 1.0]
    assert len(twin.requests) == 4, "each was sent twice"
    assert len(threads) == 2
    assert threads.count(threading.main_thread()) == 1, "text is not worth a thread"


async def test_responses_to_different_images_are_not_compared() -> None:
    rubric = {"model": "judge", "scope": "group", "images": True, "template": "{{ prompt }} {{ first }} {{ second }}"}
    one, other = items_of("a", "b")
    async with component(judge(), rubric) as compares:
        found = await compares.score([seen(one, "<image>", FIRST), seen(other, "<image>", SECOND)])
    assert values(found) == ["INVALID_INPUT"] * 2


def test_a_template_that_shows_no_conversation_shows_no_images() -> None:
    rubric = {**SEEING, "template": "{{ response }}"}
    with pytest.raises(ValidationError, match="images: the template shows neither prompt nor messages"):
        ExternalScorer(kind="judge", address="http://127.0.0.1:1/v1", rubric=rubric)


# --- functions and services


@pytest.mark.parametrize(("images", "sees"), [(True, len(FIRST) + len(SECOND)), (False, 0)])
async def test_a_function_that_asks_for_images_has_their_files(tmp_path: Path, images: bool, sees: int) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    part = {"scorer": {"kind": "function", "target": "mine:size", "images": images}}
    (item,) = items_of("a")
    async with reward_service(tmp_path, mine=part) as address, client_of(address, timeout_s=60.0) as client:
        (outcome,) = await client.score([seen(item, "<image><image>", FIRST, SECOND)])
    assert outcome == Score(float(sees), {"mine": float(sees)})


async def test_a_function_beside_one_that_sees_images_is_handed_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    parts = {
        name: {"scorer": {"kind": "function", "target": "mine:size", "images": name == "sees"}}
        for name in ("sees", "reads")
    }
    (item,) = items_of("a")
    async with reward_service(tmp_path, **parts) as address, client_of(address, timeout_s=60.0) as client:
        (outcome,) = await client.score([seen(item, "<image>", FIRST)])
    assert outcome == Score(float(len(FIRST)), {"sees": float(len(FIRST)), "reads": 0.0})


async def test_a_scorer_elsewhere_gets_images_where_it_names_them_and_large_ones_alone(tmp_path: Path) -> None:
    for reads in (("messages", "images"), ("messages",)):
        spec = description("sees", (0, 1e9), reads, {}, token_rewards=False, max_items=0)
        server = new_server(
            Scorer(spec, one_by_one(lambda item: float(sum(map(len, item.images))), spec)), "127.0.0.1:0", RpcSection()
        )
        there = await server.start()
        part = {"scorer": {"kind": "external", "address": there}, "timeout_s": 60.0, "max_attempts": 1}
        one, other = items_of("a", "b")
        large = FIRST + bytes(10 * 2**20)
        items = [seen(one, "<image>", large), seen(other, "<image>", SECOND)]
        async with reward_service(tmp_path, there=part) as address, client_of(address, timeout_s=60.0) as client:
            found = values(await client.score(items))
        assert found == ([float(len(large)), float(len(SECOND))] if "images" in reads else [0.0, 0.0])
        await server.drain(0.0)


async def test_a_scorer_of_images_passes_the_kit_and_one_of_small_requests_does_not() -> None:
    spec = description("sees", (0, 1e9), ("messages", "images"), {}, token_rewards=False, max_items=0)

    def score(item: Item) -> float:
        return float(sum(len(part) for _, parts in item.conversation for part in parts if isinstance(part, bytes)))

    scorer = Scorer(spec, one_by_one(score, spec))
    small = Server(RpcSection(), "127.0.0.1:0", client_certificates=False, max_message_bytes=2**22)
    small.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, scorer, SERVICE_NAME)
    for server, failed in ((new_server(scorer, "127.0.0.1:0", RpcSection()), set[str]()), (small, {"calls.bytes"})):
        address = await server.start()
        await server.set_serving(True)
        report = await examine_scorer(Peer(address), own_pool(), Options(load_s=0.0, abandoned_work_s=0.5))
        await server.drain(0.0)
        assert {each.rule.name for each in report.results if each.verdict.status is Status.FAILED} == failed


@pytest.mark.parametrize("reads_images", [True, False])
async def test_the_kit_shows_images_to_a_scorer_that_reads_them_and_large_groups_to_one_of_whole_ones(
    reads_images: bool,
) -> None:
    liar = Liar()
    liar.spec.whole_groups = True
    if not reads_images:
        liar.spec.reads.remove(reward_pb2.SCORE_FIELD_IMAGES)
    async with serving(liar) as address:
        await examine_scorer(Peer(address), own_pool(), Options(load_s=0.0, abandoned_work_s=0.5))
    items = [item for request in liar.requests for item in request.items]
    assert any(IMAGE_MARK in message.content for item in items for message in item.messages) == reads_images
    assert (max(len(image) for item in items for image in item.images or [b""]) > 15 * 2**20) == reads_images
    groups = [request.items for request in liar.requests if request.items[:1] and request.items[0].group == "large"]
    assert max(sum(len(item.response_text) for item in group) for group in groups) > 15 * 2**20


# --- a run


class Silent(Liar):
    """A scorer that does not describe itself."""

    async def Describe(self, request: reward_pb2.DescribeRequest, context: Any) -> reward_pb2.DescribeResponse:
        raise UnavailableError("not now")


@pytest.mark.parametrize("reads_images", [True, False])
async def test_a_run_sends_what_its_rows_show_to_a_scorer_that_reads_images(
    store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings], reads_images: bool
) -> None:
    write_tokenizer(tmp_path, VISION_TEMPLATE, VISION_TOKENS)
    settings = make_settings(data={"train": "train.jsonl", "images_field": "images"})
    liar, threads = Liar(), StoreThreads()
    if not reads_images:
        liar.spec.reads.remove(reward_pb2.SCORE_FIELD_IMAGES)
    async with (
        environment(Gallery, **TURNS) as (address, _),
        rollout_in(
            store, tmp_path, address, engine=Eyes, visual_tokens=TOKENS, max_prompt_tokens=128, max_image_bytes=10**5
        ) as rollout,
        serving(liar) as scorer,
        client_of(scorer, timeout_s=30.0) as client,
    ):
        admit(store, tmp_path, (OWN,))
        await rollout.publish(1)
        (group,) = await committed(rollout)
        await GroupScorer(settings, store.rows, threads, client, {}, ctl=1).score(group)
    threads.close()
    items = [item for request in liar.requests for item in request.items]
    assert len(items) == 4
    for item in items:
        shown = conversation(item)
        if not reads_images:
            assert not item.images
            continue
        assert list(item.images) == [OWN, *SHOWN[:4]]
        assert shown[0] == [OWN, "what?"]
        assert shown[1] == ["look ", SHOWN[0], " well"]
        assert shown[5:7] == [["<image> is no image"], [SHOWN[1], SHOWN[2], "<|image_pad|>"]]
        assert shown[10] == [SHOWN[3]]


async def test_a_prompt_s_images_are_read_once_for_all_of_its_responses(
    store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    settings = make_settings(data={"train": "train.jsonl", "images_field": "images"})
    liar, threads = Liar(), StoreThreads()
    (group,) = store.committed(1)
    files = trajectory_pb2.Images(files=[FIRST, SECOND]).SerializeToString()
    store.rows.put(group.rows[:1], [{IMAGES: np.frombuffer(files, np.uint8)}])
    async with serving(liar) as scorer, client_of(scorer, timeout_s=30.0) as client:
        await GroupScorer(settings, store.rows, threads, client, {}, ctl=1).score(group)
    threads.close()
    items = [item for request in liar.requests for item in request.items]
    assert [list(item.images) for item in items] == [[FIRST, SECOND]] * len(group.rows)


@pytest.mark.parametrize(("max_bytes", "at_once"), [(10**6, 2), (1, 1)])
async def test_groups_are_scored_at_a_time_as_their_images_have_room(
    store: StoreUnderTest,
    tmp_path: Path,
    make_settings: Callable[..., RunSettings],
    monkeypatch: pytest.MonkeyPatch,
    max_bytes: int,
    at_once: int,
) -> None:
    monkeypatch.setattr(group_scorer, "MAX_IMAGE_BYTES", max_bytes)
    settings = make_settings(data={"train": "train.jsonl", "images_field": "images"})
    liar, threads = Liar(), StoreThreads()
    liar.fail = lambda: asyncio.sleep(0.3)
    groups = store.committed(2)
    files = trajectory_pb2.Images(files=[FIRST]).SerializeToString()
    for group in groups:
        store.rows.put(group.rows[:1], [{IMAGES: np.frombuffer(files, np.uint8)}])
    async with serving(liar) as scorer, client_of(scorer, timeout_s=30.0) as client:
        scores = GroupScorer(settings, store.rows, threads, client, {}, ctl=1)
        await asyncio.gather(*map(scores.score, groups))
    threads.close()
    assert liar.most_at_once == at_once


@pytest.mark.parametrize(
    ("reads", "error", "words"),
    [([99], ScorerError, "does not know"), (None, ScorerUnavailableError, "SCORER_UNAVAILABLE|UNAVAILABLE")],
)
async def test_a_scorer_that_does_not_say_what_it_reads_is_sent_nothing(
    store: StoreUnderTest,
    make_settings: Callable[..., RunSettings],
    reads: Any,
    error: type[Exception],
    words: str,
) -> None:
    away = {"reward": {"components": {"it": {"scorer": {"kind": "exact_match"}}}, "away_timeout_s": 0.001}}
    settings = make_settings(data={"train": "train.jsonl", "images_field": "images"}, **away)
    liar, threads = (Silent() if reads is None else Liar()), StoreThreads()
    liar.spec.reads.extend(reads or [])
    (group,) = store.committed(1)
    async with serving(liar) as scorer, client_of(scorer, timeout_s=2.0) as client:
        with pytest.raises(error, match=words):
            await GroupScorer(settings, store.rows, threads, client, {}, ctl=1).score(group)
    threads.close()
    assert not liar.requests


def test_held_out_episodes_are_not_scored_without_what_they_showed(
    make_settings: Callable[..., RunSettings], tmp_path: Path
) -> None:
    part = {"scorer": {"kind": "function", "target": "mine:size", "images": True}}
    sections: dict[str, Any] = {
        "environments": {"game": {"address": "127.0.0.1:1", "max_image_bytes": 1000}},
        "evaluation": {"sets": {"held": {"path": "held.jsonl"}}},
        "reward": {"components": {"mine": part}},
    }
    with pytest.raises(ValidationError, match=r"reward.components.mine reads images, and of held-out episodes"):
        make_settings(**sections)
    make_settings(**{**sections, "evaluation": {}})
