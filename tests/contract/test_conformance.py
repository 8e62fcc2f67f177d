"""The conformance kits: an honest service passes, each liar is found by the check of the rule that it breaks, and by
no other; what stands in the contract is what the kit quotes.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.conformance.report import Report
from tests.contract.kits import ENDS, KITS, ROOT, Kit, broken, examined, skipped
from tests.contract.reward_liars import Honest

WAITED_FOR = ("older.closed", "session.lease", "step.kept", "session.reaped", "run.lease", *ENDS)
"""Rules whose breaking shows after seconds."""
TRIES = 3
"""Times that a service is looked at: where this machine stalls for longer than a lease, the kit sees no rule of it."""


def comments(file: str) -> str:
    """The comments of a proto file, as running text."""
    lines = re.findall(r"^\s*//(.*)$", (ROOT / file).read_text(), re.M)
    return " ".join(" ".join(line.strip().removeprefix("- ") for line in lines).split())


async def report_of(kit: Kit, make: Callable[[], Any], rule: str, folder: Path, seen: set[str]) -> Report:
    """The kit's first report that left none of the rules `seen` out, or its last one."""
    for _ in range(TRIES):
        report: Report = await kit.examined(make(), rule, folder)
        if not seen & skipped(report):
            break
    return report


async def find_nothing(kit: Kit, folder: Path) -> None:
    """Fails where the kit blames an honest service, or leaves more out than it must."""
    seen = {check.rule.name for check in kit.checks} - kit.not_seen
    report = await report_of(kit, kit.honest, "", folder, seen)
    assert broken(report) == [], report.text()
    assert skipped(report) == kit.not_seen


async def find(of: str, name: str, folder: Path) -> None:
    """Fails where a kit does not blame a liar by its rule, or blames it by another."""
    rule, make = KITS[of].liars[name]
    report = await report_of(KITS[of], make, rule, folder, {rule})
    assert broken(report) == [rule], report.text()
    assert any(contract in report.text() for contract in KITS[of].contracts)


async def test_an_honest_scorer_keeps_every_rule(tmp_path: Path) -> None:
    await find_nothing(KITS["reward"], tmp_path)


async def test_a_scorer_is_timed_under_load() -> None:
    assert [load.num_calls for load in (await examined(Honest())).load] == [1, 8, 64]


@pytest.mark.parametrize(
    ("of", "name"),
    [(of, name) for of, kit in KITS.items() for name, (rule, _) in kit.liars.items() if rule not in WAITED_FOR],
)
async def test_a_liar_is_found_by_the_check_of_its_rule_alone(of: str, name: str, tmp_path: Path) -> None:
    await find(of, name, tmp_path)


async def test_an_honest_environment_keeps_every_rule_and_liars_of_seconds_are_found_beside_it(tmp_path: Path) -> None:
    """Side by side, as each waits for leases and deadlines."""
    async with asyncio.TaskGroup() as group:
        for of in ("environment", "agent"):
            group.create_task(find_nothing(KITS[of], tmp_path))
            for name, (rule, _) in KITS[of].liars.items():
                if rule in WAITED_FOR:
                    group.create_task(find(of, name, tmp_path))


@pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
def test_every_rule_has_a_liar(kit: Kit) -> None:
    rules = {check.rule.name for check in kit.checks}
    assert rules - {rule for rule, _ in kit.liars.values()} == kit.elsewhere & rules
    assert len(kit.liars) >= 15


@pytest.mark.parametrize("file", sorted(set.union(*(kit.contracts for kit in KITS.values()))))
def test_each_rule_stands_in_the_contract_and_each_of_the_contract_is_checked(file: str) -> None:
    text = comments(file)
    checks = [check for kit in KITS.values() for check in kit.checks if check.rule.file == file]
    rules = {check.rule.name: check.rule for check in checks}
    for rule in rules.values():
        assert f"{rule.quote} [{rule.name}]" in text, rule.name
        message, _, member = rule.element.partition(".")
        assert re.search(rf"^(service|message|enum) {message} {{", (ROOT / file).read_text(), re.M), rule.element
        assert re.search(rf"\b{member}\b", (ROOT / file).read_text()), rule.element
    assert sorted(re.findall(r"\[([a-z_]+\.[a-z_]+)\]", text)) == sorted(rules)
