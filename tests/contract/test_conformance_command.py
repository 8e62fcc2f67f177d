"""`rolecall conformance`: what it writes, for people and for machines, and the usage and the items that it refuses."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest

from rolecall.commands.cli import main
from rolecall.commands.conformance import examine_environment
from rolecall.conformance.environment.rows import read_file
from rolecall.conformance.peer import Peer
from rolecall.conformance.report import junit
from rolecall.conformance.reward.pool import read_pool
from rolecall.errors import ConfigError
from rolecall.v1 import reward_pb2
from tests.contract import environment_honest, reward_peers
from tests.contract.kits import CONTRACTS, KITS, ROOT, broken, examined, written
from tests.contract.reward_liars import LIARS, Honest
from tests.ports import free_port


async def test_an_items_file_says_what_is_right(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    lines: list[dict[str, object]] = [
        {"response_text": "a", "expect_error": "BAD_GROUND_TRUTH"},
        {"response_text": "a", "ground_truth": "a", "expect_reward": 0.194},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert broken(await examined(Honest(), pool=read_pool(file))) == []
    lines[1]["expect_reward"] = 0.5
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = await examined(Honest(), pool=read_pool(file))
    assert broken(report) == ["items.expected"]
    assert "line 2: expected 0.5, got 0.194" in report.text()


@pytest.mark.parametrize("items", [None, "environment", "external_reward"])
def test_nobody_at_the_address_is_said_in_seconds(items: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is to be asked: while nobody answers, nothing can be said of its form."""
    words = [] if items is None else ["--items", str(ROOT / "examples" / items / "items.jsonl")]
    assert main(["conformance", f"127.0.0.1:{free_port()}", *words]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "is not an address"),
        (["127.0.0.1:1", "--items", "/none.jsonl"], "--items: cannot read"),
        (["127.0.0.1:1", "--bearer-token-file", "/none"], "bearer_token_file"),
        (["127.0.0.1:1", "--ca-file", "/none"], "ca_file: cannot read"),
        (["127.0.0.1:1", "--junit", "/none/kit.xml"], "/none is no folder; make it"),
        (["127.0.0.1:1", "--timeout", "0"], "--timeout must be more than 0"),
        (["127.0.0.1:1", "--fast"], "unexpected argument"),
    ],
)
def test_bad_usage_is_answered_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "line 1: response_text: Field required$"),
        (
            '{"response_text": "a"}\n{"response_text": "a", "response": 1}',
            "line 2: response: Extra inputs .* permitted$",
        ),
        ("[]", "line 1: Input should be a valid dictionary"),
        ("{", "line 1: not JSON: "),
        ("", "holds no item"),
    ],
)
def test_a_line_that_is_no_item_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_pool(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ('{}\n{"actions": "go"}', "line 2: actions: Input should be a valid list$"),
        ('{"ground_truth": 4}', "line 1: not a task"),
        ('{"prompt": []}', "neither text nor a list of messages"),
        ('{"fails": true}', "holds no episode"),
    ],
)
def test_a_line_that_is_no_row_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_file(file)


@pytest.mark.parametrize(
    ("example", "kit"),
    [
        ("external_reward/scorer.py", "reward"),
        ("environment/game.py", "environment"),
        ("guess_number/game.py", "environment"),
        ("guess_number/agent.py", "agent"),
    ],
)
def test_the_command_writes_for_people_and_for_machines(
    example: str, kit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    server = subprocess.Popen([sys.executable, f"examples/{example}", address], cwd=ROOT)
    try:
        grpc.channel_ready_future(grpc.insecure_channel(address)).result(timeout=60)
        words = [sys.executable, "-X", "importtime", "-m", "rolecall", "conformance", address]
        words += ["--load-seconds", "0.05", "--timeout", "60"]
        text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert text.returncode == 0, text.stdout + text.stderr
        assert re.search(rf"{len(KITS[kit].checks)} rules: \d+ kept, 0 broken", text.stdout)
        assert not re.search(r"\| +(torch|transformers|vllm)$", text.stderr, re.M)
        file = tmp_path / "junit.xml"
        assert main(["conformance", *words[words.index(address) :], "--json", "--junit", str(file)]) == 0
        whole = json.loads(capsys.readouterr().out)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)
    assert whole["passed"]
    assert len(whole["rules"]) == len(KITS[kit].checks)
    suite = ElementTree.parse(file).getroot()
    assert (suite.get("tests"), suite.get("failures")) == (str(len(KITS[kit].checks)), "0")


async def test_the_file_is_written_though_the_reader_of_the_table_leaves(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    async with reward_peers.serving(Honest()) as address:
        words = f"{sys.executable} -m rolecall conformance {address} --load-seconds 0 --timeout 60 --junit {file}"
        command = await asyncio.create_subprocess_exec("bash", "-o", "pipefail", "-c", f"{words} | head -n 1", cwd=ROOT)
        assert await asyncio.wait_for(command.wait(), 120) == 0
    assert ElementTree.parse(file).getroot().get("tests") == str(len(KITS["reward"].checks))


async def test_a_scorer_that_answers_every_item_by_an_error_is_told_that_nothing_was_seen() -> None:
    class Strict(Honest):
        """Scores nothing that the kit makes up."""

        def result(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
            error = reward_pb2.ScoreError(code="BAD_METADATA", message="metadata has no field tests")
            return reward_pb2.ScoreResult(id=item.id, error=error)

    report = await examined(Strict())
    assert broken(report) == []
    said = "every item was answered by an error, so nothing of its scores was seen; give --items FILE"
    *_, first, last = report.text().splitlines()
    assert f"{first} {last}".startswith(f"note: {said}"), "below all else"
    assert any(note.startswith(said) for note in report.json()["notes"])
    assert not any(note.startswith(said) for note in (await examined(Honest())).json()["notes"])


async def test_an_environment_whose_episodes_never_end_is_told_that_no_end_was_seen(tmp_path: Path) -> None:
    rows = read_file(written(tmp_path, {"actions": ["hello"]}))
    async with environment_honest.serving(environment_honest.Honest()) as address:
        report = await examine_environment(Peer(address), rows)
    assert broken(report) == []
    said = "no episode came to its end, so nothing of that and of its reward was seen; give --items FILE"
    assert said in " ".join(report.tail().split())
    assert any(note.startswith(said) for note in report.json()["notes"])


async def test_junit_tells_a_failure_with_its_rule() -> None:
    _, make = LIARS.named["some_rewards_are_nan"]
    suite = ElementTree.fromstring(junit([await examined(make())]))
    (failure,) = suite.iter("failure")
    assert "nan" in failure.attrib["message"]
    assert f"{CONTRACTS}/reward.proto" in (failure.text or "")
