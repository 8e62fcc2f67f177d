"""`rolecall ledger` on a run directory: beside a living store, after a crash, and on what is wrong."""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rolecall.commands.cli import main
from rolecall.settings import RunSettings
from rolecall.store.embedded import EmbeddedStore
from tests.fixtures_store import MakeStore, StoreUnderTest


@pytest.fixture
def run_dir(make_settings: Callable[..., RunSettings]) -> Path:
    """A run directory with its configuration, of run "test"."""
    settings = make_settings(store={"num_shards": 2})
    settings.run.dir.mkdir()
    (settings.run.dir / "config.yaml").write_text(
        yaml.safe_dump(settings.model_dump(mode="json", exclude={"store": {"url"}}))
    )
    return settings.run.dir


@pytest.fixture
def server(run_dir: Path, make_embedded_store: Callable[..., EmbeddedStore]) -> EmbeddedStore:
    return make_embedded_store(dir=run_dir / "store")


def a_life(store: StoreUnderTest) -> None:
    """Group 0 is claimed, expelled, committed by another worker and trained; 1 is dropped."""
    store.admit(2)
    store.publish(0, 0, "r.0", "r.1")
    store.worker("r.0").claim(1)
    store.ledger.expel("r.0", error="the connection was lost")
    group = store.commit(store.worker("r.1"), store.worker("r.1").claim(1)[0])
    store.ledger.note_scored([(0, 0.5)])
    store.ledger.seal(store.batch(0, [group]))
    store.ledger.commit_step(0, [])
    store.ledger.drop(1, "scorer_error", "no answer")


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["ledger", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_it_balances_beside_a_living_store_and_after_a_crash(
    run_dir: Path, server: EmbeddedStore, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    a_life(make_store(server.start(), "test"))
    code, living = ask(capsys, str(run_dir))
    assert (code, living.splitlines()[-1]) == (0, "balanced")
    assert "2 = 1 + 1 + 0" in living
    assert "sampled         4 tokens, in groups that were committed" in living
    assert "masked          2  2 truncated" in living
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        time.sleep(0.01)
    code, dead = ask(capsys, str(run_dir / "config.yaml"), "--json")
    report = json.loads(dead)
    assert (code, report["balanced"], report["admitted"], report["trained"], report["dropped"]) == (
        0,
        True,
        2,
        1,
        {"scorer_error": 1},
    )
    assert report["tokens"] == {"sampled": 4, "trained": 2, "masked": {"truncated": 2}, "dropped": {}, "live": 0}
    assert ask(capsys, str(run_dir))[0] == 0, "what it started it also stopped"


def test_it_names_what_does_not_balance_and_exits_with_1(
    run_dir: Path, server: EmbeddedStore, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(server.start(), "test")
    a_life(store)
    store.connection.command("XADD", "{rl:test}:history", "*", "gid", 0, "event", "trained", "step", 0)
    code, said = ask(capsys, str(run_dir))
    assert code == 1
    assert "trained twice: 0" in said
    assert said.splitlines()[-1] == "NOT BALANCED"


def test_an_emptied_store_is_called_so_and_what_was_in_it_is_named(
    run_dir: Path, server: EmbeddedStore, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(server.start(), "test")
    a_life(store)
    store.admit(2)
    store.ledger.drain("history", run_dir / "history.jsonl")
    for key in store.connection.ledger.scan_iter("{rl:test}*"):
        store.connection.ledger.delete(key)
    code, said = ask(capsys, str(run_dir))
    assert code == 1
    assert "lost: the store was emptied or set back" in said
    assert "lost: live in the history, gone from the ledger: 2, 3" in said
    assert "the ledger counts 0 groups trained, the history 1" in said
    assert said.splitlines()[-1] == "NOT BALANCED"
    assert "group 2: " in ask(capsys, str(run_dir), "--id", "2")[1], "its life is told from the file"


def test_a_store_that_was_set_back_to_an_older_copy_is_called_so(
    run_dir: Path, server: EmbeddedStore, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(server.start(), "test")
    a_life(store)
    live = run_dir / "store" / "appendonlydir"
    shutil.copytree(live, run_dir / "copy")
    store.admit(1)
    store.ledger.drain("history", run_dir / "history.jsonl")
    server.stop()
    shutil.rmtree(live)
    shutil.copytree(run_dir / "copy", live)
    code, said = ask(capsys, str(run_dir))
    assert code == 1
    assert "set back" in said
    assert "gone from the ledger: 2" in said


def test_it_tells_the_life_of_a_group_and_of_a_trajectory(
    run_dir: Path, server: EmbeddedStore, make_store: MakeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(server.start(), "test")
    a_life(store)
    store.ledger.drain("history", run_dir / "history.jsonl")
    code, told = ask(capsys, str(run_dir), "--id", "0")
    assert code == 0
    assert "group 0: trained; prompt prompt-0" in told
    for words in (
        "admitted   at step 0",
        "claimed    by r.0, token r.0-1",
        "expelled   from r.0-1, the delivery counts: the connection was lost",
        "committed  by r.1-2, tokens of version 0",
        "scored     reward 0.5",
        "sealed     into batch 0",
        "trained    as step 0, on from version 0",
    ):
        assert words in told
    assert "dropped    as scorer_error; no answer" in ask(capsys, str(run_dir), "--id", "1")[1]
    assert "trajectory 0/1: 2 + 0 tokens" in ask(capsys, str(run_dir), "--id", "0/1")[1]
    store.ledger.sweep(store.rows, 1)
    assert "its row is deleted" in ask(capsys, str(run_dir), "--id", "0/1")[1]
    events = [json.loads(line)["event"] for line in ask(capsys, str(run_dir), "--id", "1", "--json")[1].splitlines()]
    assert events == ["admitted", "dropped"]


@pytest.mark.parametrize("words", [["--id", "twelve"], ["--id", "1/x"]])
def test_bad_ids_are_refused(
    run_dir: Path, server: EmbeddedStore, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    server.start()
    assert ask(capsys, str(run_dir), *words)[0] == 2


def test_a_group_that_was_never_admitted_is_not_found(
    run_dir: Path, server: EmbeddedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    code, said = ask(capsys, str(run_dir), "--id", "5")
    assert (code, said.strip()) == (1, "rolecall: run test admitted no group 5")


def test_what_holds_no_run_or_no_store_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(capsys, str(tmp_path))[0] == 2
    code, said = ask(capsys, str(run_dir))
    assert code == 1
    assert "holds no store" in said


def test_a_store_that_its_launcher_is_starting_again_is_left_to_it(
    run_dir: Path, server: EmbeddedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start()
    server.stop()
    launcher = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(launcher, fcntl.LOCK_EX)
    code, said = ask(capsys, str(run_dir))
    assert code == 1
    assert "try again in a moment" in said
    server.start()
    assert ask(capsys, str(run_dir))[0] == 0
    os.close(launcher)
