"""Who holds a run, when the store was away, was emptied or set back, or holds another run of the name."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from rolecall.errors import ConfigError, RunLockedError, StoreRolledBackError
from rolecall.launcher.used_store import note_used_store, require_used_store
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.store.ledger import Ledger
from rolecall.store.probe import require_free_name
from tests.fixtures_store import StoreUnderTest


class AwayRedis(redis.Redis):
    """A client of a server that was away while it was asked who holds the run the second time; when it asks again,
    `meanwhile` has happened.
    """

    looks = 0
    away_s: float
    meanwhile: Callable[[], None]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.looks += args[0] == "HMGET"
        if args[0] == "HMGET" and self.looks == 2:
            time.sleep(self.away_s)
        if args[0] == "HMGET" and self.looks == 3:
            self.meanwhile()
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def test_an_outage_of_the_store_inside_a_look_frees_nothing(store: StoreUnderTest) -> None:
    assert store.section.url is not None
    with AwayRedis.from_url(store.section.url.get_secret_value()) as client:
        client.away_s, client.meanwhile = 0.6, store.ledger.beat
        with pytest.raises(RunLockedError, match="is alive"):
            Ledger(Connection(client), store.run).lock(0.5)


def test_a_store_that_lost_its_number_begins_above_all_that_any_role_has_heard_of(store: StoreUnderTest) -> None:
    other = f"{store.run}-lost"
    assert Ledger(store.connection, other).lock(0.1, known_ctl=7) == 1_000_007
    ledger = Ledger(store.connection, other)
    assert ledger.lock(0.1, known_ctl=7) == 1_000_008
    ledger.unlock()
    assert Ledger(store.connection, other).lock(0.1, known_ctl=1_000_008) == 1_000_009


def test_an_emptied_store_and_one_that_was_set_back_are_called_so(store: StoreUnderTest) -> None:
    store.connection.command("HSET", f"{{rl:{store.run}}}:run", "ctl", 0)
    with pytest.raises(
        StoreRolledBackError,
        match=r"the store was emptied: .*FLUSHALL.*append-only file.*--resume from the last checkpoint",
    ):
        store.ledger.beat()
    ledger = Ledger(store.connection, store.run)
    ledger.lock(0.1, known_ctl=3)
    store.connection.command("HSET", f"{{rl:{store.run}}}:run", "ctl", 2)
    with pytest.raises(
        StoreRolledBackError,
        match=r"was set back: it knows controller 2, this one is 1000003\. It was restored from an older copy",
    ):
        ledger.beat()


def test_a_ledger_keeps_its_id_under_every_controller_and_an_emptied_one_has_another(store: StoreUnderTest) -> None:
    """Fences count within it."""
    store.admit(1)
    queue = store.attested("r.0")
    (first,) = queue.claim(1)
    queue.release([first])
    ctl = store.replaced()
    (second,) = queue.claim(1)
    assert (ctl, second.delivery, second.ledger) == (2, "2", first.ledger)
    store.connection.command("DEL", *store.connection.ledger.scan_iter(f"{{rl:{store.run}}}:*"))
    store.ledger.lock(0.1)
    store.admit(1)
    (third,) = store.attested("r.0").claim(1)
    assert third.delivery == "1"
    assert third.ledger not in ("", first.ledger)


def test_the_name_of_another_run_on_a_shared_store_is_refused(
    store: StoreUnderTest, make_settings: Callable[..., RunSettings]
) -> None:
    assert store.section.url is not None
    sections = {
        "run": {"name": store.run, "dir": "other", "num_steps": 1},
        "store": {"url": store.section.url.get_secret_value()},
    }
    require_free_name(make_settings(**sections))
    store.admit(3)
    with pytest.raises(
        ConfigError, match=r"is taken: .* at step 0 with 3 groups admitted\. Give this run another run\.name"
    ):
        require_free_name(make_settings(**sections))


def test_a_run_goes_on_beside_another_store_only_where_that_holds_it(
    store: StoreUnderTest, make_settings: Callable[..., RunSettings], tmp_path: Path
) -> None:
    assert store.section.url is not None
    run = {"name": store.run, "dir": str(tmp_path), "num_steps": 1}
    embedded = make_settings(run=run)
    moved = make_settings(run=run, store={"url": store.section.url.get_secret_value()})
    require_used_store(moved)  # nobody noted a store before this release
    note_used_store(embedded)
    with pytest.raises(ConfigError, match=r"holds nothing of it.*leave store\.url and ROLECALL_STORE_URL out"):
        require_used_store(moved)
    store.admit(1)
    require_used_store(moved)
    note_used_store(moved)
    with pytest.raises(ConfigError, match="the store embedded holds nothing of it"):
        require_used_store(embedded)
