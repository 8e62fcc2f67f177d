"""Tools of real MCP servers, as their own package serves them."""

import base64
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.environment import Action, Image, ImageMessage, Message, Task, ToolCall
from rolecall.environment.tools import ToolEpisode
from rolecall.environment.tools.mcp import McpEpisode, McpServer
from rolecall.errors import EpisodeLostError

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_counter.py"))]


@pytest.fixture
def episode() -> Iterator[McpEpisode]:
    made = McpEpisode(COMMAND, lambda task, answer: float(answer == task.ground_truth))
    yield made
    made.close()


def called(episode: ToolEpisode, name: str, **arguments: object) -> list[Message | ImageMessage]:
    messages = episode.step(Action("", tool_calls=(ToolCall(name, arguments),))).messages
    assert isinstance(messages, list)
    return messages


def test_an_episode_has_a_server_of_its_own(episode: McpEpisode) -> None:
    opening = episode.reset(Task("t", ground_truth="5"), 0)
    assert [tool.name for tool in opening.tools] == ["add", "refuse", "look", "die"]
    assert opening.tools[0].input_schema["required"] == ["amount"]
    assert called(episode, "add", amount=2) == [Message("tool", "2")]
    assert called(episode, "add", amount=3) == [Message("tool", "5")]
    other = McpEpisode(COMMAND, lambda task, answer: 0.0)
    other.reset(Task("u"), 0)
    assert called(other, "add", amount=1) == [Message("tool", "1")]
    other.close()
    (refused,) = called(episode, "refuse")
    assert isinstance(refused, Message)
    assert "error: " in refused.content
    assert episode.step(Action("5")).reward == 1.0


def test_a_server_that_dies_loses_the_episode_and_never_answers_for_it(episode: McpEpisode) -> None:
    episode.reset(Task("t"), 0)
    with pytest.raises(EpisodeLostError, match="did not answer a call of die"):
        called(episode, "die")
    with pytest.raises(EpisodeLostError):
        called(episode, "add", amount=1)


def test_a_server_that_does_not_start_is_said_in_words() -> None:
    with pytest.raises(EpisodeLostError, match="did not start"):
        McpServer([sys.executable, "-c", "pass"])


def test_a_server_that_says_nothing_is_ended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(EpisodeLostError, match="did not start: TimeoutError"):
        McpServer(["sh", "-c", f"echo $$ > '{pid}'; exec sleep 600"], start_s=3.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "mcp"]
    assert not Path("/proc", pid.read_text().strip()).exists()


def test_a_server_that_only_reads_may_be_shared_and_leaves_nothing_behind() -> None:
    server = McpServer(COMMAND)
    one, other = (ToolEpisode(server.tools, lambda task, answer: 0.0) for _ in range(2))
    for episode in (one, other):
        episode.reset(Task("t"), 0)
    assert called(one, "add", amount=1) == [Message("tool", "1")]
    assert called(other, "add", amount=1) == [Message("tool", "2")]
    server.close()
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mcp"]


SEEN = base64.b64encode(b"seen").decode()


def test_images_are_shown_where_the_run_shows_some(episode: McpEpisode) -> None:
    episode.shows_images = True
    episode.reset(Task("t"), 0)
    seen: list[str | Image] = ["before", "\n", Image(b"seen", "image/jpeg"), "\n", "after"]
    assert called(episode, "look", data=SEEN) == [ImageMessage("tool", seen)]
    assert called(episode, "look", data=SEEN, fails=True) == [ImageMessage("tool", ["error: ", *seen])]
    assert called(episode, "add", amount=2) == [Message("tool", "2")]
    with pytest.raises(EpisodeLostError, match="did not answer a call of look: Error"):
        called(episode, "look", data="no base64")


def test_images_are_named_where_the_run_shows_none(episode: McpEpisode) -> None:
    episode.reset(Task("t"), 0)
    assert called(episode, "look", data=SEEN) == [Message("tool", "before\n[image]\nafter")]


def test_a_shared_server_shows_images_where_it_is_told_to() -> None:
    server = McpServer(COMMAND, shows_images=True)
    episode = ToolEpisode(server.tools, lambda task, answer: 0.0)
    episode.reset(Task("t"), 0)
    (seen,) = called(episode, "look", data=SEEN)
    assert isinstance(seen, ImageMessage)
    server.close()
