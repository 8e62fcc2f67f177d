"""The tasks that an environment lists: pages of them, the file that `rolecall tasks` makes, and what is refused."""

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import pytest

from rolecall.commands.cli import main
from rolecall.data.dataset import load_prompts
from rolecall.environment import Message, Task
from rolecall.environment.answers import task_of
from rolecall.environment.tasks import PAGE_TASKS
from rolecall.rpc.listening import rpc_section
from rolecall.settings import DataSection, RewardSection
from tests.contract.environment_honest import Honest, serving
from tests.contract.environment_peers import environment
from tests.contract.peer import Authority
from tests.contract.test_environment import reset

NUM_TASKS = 2 * PAGE_TASKS + 3


def numbered(i: int) -> Task:
    answers = ("", ()) if i == 0 else (f"{i} π", ("so",) * (i % 3))
    told = (Message("system", "Be brief."), Message("user", f"Say {i}."))
    return Task(f"t{i}", told, *answers, metadata={"level": i, "tags": ["a", {"b": None}], "hard": i % 2 == 0})


class Lazy(Sequence[Task]):
    """Tasks that are made as they are read."""

    def __len__(self) -> int:
        return NUM_TASKS

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        return numbered(index) if isinstance(index, int) else [numbered(i) for i in range(NUM_TASKS)[index]]


async def test_tasks_are_listed_in_utf_8_whatever_the_terminal_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told, written = Task("t", (Message("user", "答"),)), io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    async with environment(tasks={"train": [told]}) as (address, _):
        assert await asyncio.to_thread(main, ["tasks", address]) == 0
    assert "答" in written.getvalue().decode()


async def test_what_an_environment_lists_is_a_data_set_whose_rows_begin_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.jsonl"
    async with environment(tasks={"train": Lazy(), "test": [], "few": [numbered(1)]}) as (address, sessions):
        for split, num in (("test", 0), ("few", 1), ("train", NUM_TASKS)):
            assert await asyncio.to_thread(main, ["tasks", address, "--split", split]) == 0
            file.write_text(capsys.readouterr().out)
            assert len(file.read_text().splitlines()) == num
        prompts = load_prompts(file, DataSection(train=file), RewardSection(address="h:1"))
        assert [prompt.uid for prompt in prompts] == [f"t{i}" for i in range(NUM_TASKS)]
        for prompt in prompts[:4]:
            request = reset(f"run/{prompt.uid}/0/a-1", group=f"run/{prompt.uid}", **prompt.metadata)
            request.task.uid, request.task.ground_truth = prompt.uid, prompt.ground_truth
            request.task.other_ground_truths.extend(prompt.other_ground_truths)
            for role, content in prompt.messages:
                request.task.messages.add(role=role, content=content)
            await sessions.reset(request)
            assert task_of(request.task) == numbered(int(prompt.uid[1:]))


async def test_large_tasks_are_listed_in_pages_that_a_message_holds(capsys: pytest.CaptureFixture[str]) -> None:
    large = [Task(f"t{i}", (Message("user", "x" * 300_000),)) for i in range(70)]
    async with environment(tasks={"train": large}) as (address, _):
        assert await asyncio.to_thread(main, ["tasks", address]) == 0
    assert [json.loads(line)["uid"] for line in capsys.readouterr().out.splitlines()] == [task.uid for task in large]


async def test_a_split_is_named_where_there_are_several_and_none_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    for tasks, words, told in (
        ({"train": [numbered(1)], "test": []}, [], "has the splits train, test; name one by --split"),
        ({"train": [numbered(1)]}, ["--split", "dev"], "has the splits train; name one by --split"),
        ({}, [], "lists no tasks"),
        ({"a": [Task("x", (Message("user", "go"),), metadata={"prompt": 1})]}, [], "has a further field 'prompt'"),
        ({"a": [numbered(1), numbered(1)]}, [], "the uid 't1' twice; each task needs one of its own"),
        ({"a": [Task("x", (Message("user", " "),))]}, [], "task 'x' has no message that says something"),
    ):
        async with environment(tasks=tasks) as (address, _):
            assert await asyncio.to_thread(main, ["tasks", address, *words]) > 0
            said = capsys.readouterr()
            assert told in said.err
            assert said.out == ""


class Circling(Honest):
    """Its pages never end."""

    async def ListTasks(self, request: Any, context: Any) -> Any:
        page = await super().ListTasks(request, context)
        page.next_page_token = "0"
        return page


async def test_pages_that_never_end_are_told_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for split, told in (("train", "the uid '0' twice"), ("test", "a page without tasks")):
        async with serving(Circling()) as address:
            assert await asyncio.to_thread(main, ["tasks", address, "--split", split]) == 1
        said = capsys.readouterr()
        assert told in said.err
        assert said.out == ""


async def test_tasks_are_listed_over_tls_to_whoever_has_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "tls")
    tls = authority.issue("environment")
    rpc = rpc_section(tls.certificate_file, tls.key_file, behind_mesh=False)
    async with environment(tasks={"train": [numbered(2)]}, rpc=rpc, token="s3cret") as (address, _):
        for token, code in (("s3cret", 0), ("wrong", 1)):
            (tmp_path / "token").write_text(token)
            words = ["tasks", address, "--ca-file", str(authority.ca_file)]
            words += ["--bearer-token-file", str(tmp_path / "token")]
            assert await asyncio.to_thread(main, words) == code
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["uid"], row["ground_truth"]) == ("t2", ["2 π", "so", "so"])
