"""What every test may use: where GPU tests are skipped, the table of where time went, and the smallest valid run."""

import heapq
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rolecall.rpc.callers import Caller
from rolecall.settings import RunSettings
from tests.smallest import smallest_tree
from tests.twins.callers import playing

pytest_plugins = ["tests.fixtures_rank", "tests.fixtures_store", "tests.fixtures_servers"]

# Read when torch is loaded, here and in children that do not say otherwise: a worker has one core at the most, on which
# idle threads would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MakeSettings = Callable[..., RunSettings]

TABLE_FROM_S = 60.0
"""A run whose tests took less together needs no table of where the time went."""


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on more examples where `thorough` tests run, too. No example has a deadline: it would fail
    on a busy machine, and every test has a timeout of its own.
    """
    is_brief = "not thorough" in config.option.markexpr
    hypothesis.settings.register_profile("rolecall", deadline=None, max_examples=40 if is_brief else 100)
    hypothesis.settings.load_profile("rolecall")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints where the time of a long run went: by folder, the longest files, the longest tests. A test's seconds are
    those of its setup, call and teardown, so the first test of a file carries what its fixtures took.
    """
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    seconds, folders, files = (defaultdict[str, float](float) for _ in range(3))
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    if (total := sum(seconds.values())) < TABLE_FROM_S:
        return
    for test, duration in seconds.items():
        file = test.partition("::")[0]
        folders["/".join(file.split("/")[:2])] += duration
        files[file] += duration
    terminalreporter.section(f"where {total:.0f} s went, all workers together")
    for title, table, num in (("folders", folders, 9), ("longest files", files, 15), ("longest tests", seconds, 25)):
        terminalreporter.line(f"{title}:")
        for name in heapq.nlargest(num, table, key=table.__getitem__):
            terminalreporter.line(f"{table[name]:8.1f} s  {name}")


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings of the smallest GRPO run in a temporary folder, as its controller has them; keywords replace whole
    sections, e.g. make_settings(controller={"lease_s": 1.0}).
    """
    return smallest_settings(tmp_path)


def smallest_settings(folder: Path) -> MakeSettings:
    """What the fixture `make_settings` gives, in `folder`."""

    def make(**sections: Any) -> RunSettings:
        settings = RunSettings.model_validate(smallest_tree(folder, **sections), context={"base": folder})
        return playing(settings, Caller.CONTROLLER)

    return make
