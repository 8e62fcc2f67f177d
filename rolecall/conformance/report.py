"""The findings of a kit, as a table for people, as JSON and as JUnit's XML for machines."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from rolecall.conformance.check import Result, Status

WIDTH = 120
NAME_WIDTH = 22
"""Columns of a rule's name, as many as the longest has."""
Tell = Callable[[str], object]
"""Takes whole lines of a report, as soon as they are known."""
_MARKS = {Status.PASSED: "ok", Status.FAILED: "FAILS", Status.SKIPPED: "skipped"}


@dataclass(frozen=True)
class Load:
    """The speed of a service under some calls at once."""

    num_calls: int
    """Calls under way at any time."""
    items_per_s: float
    p50_ms: float
    """Half of the calls took at most this long."""
    p99_ms: float
    num_refused: int
    """Calls that were answered RESOURCE_EXHAUSTED or UNAVAILABLE."""


@dataclass(frozen=True)
class Report:
    """The findings of one kit about one service."""

    kit: str
    address: str
    described: Mapping[str, Any]
    """What the service says it is."""
    results: list[Result] = field(default_factory=list)
    notes: Sequence[str] = ()
    """What breaks no rule and was perhaps not meant so."""
    unseen: list[str] = field(default_factory=list)
    """What nothing was seen of, though no rule is broken, and the remedy."""
    load: Sequence[Load] = ()

    @property
    def has_passed(self) -> bool:
        """Whether no rule was found broken."""
        return self._count(Status.FAILED) == 0

    def _count(self, status: Status) -> int:
        return sum(result.verdict.status is status for result in self.results)

    def text(self) -> str:
        """A table: a line for each rule, and below one that is broken what the contract asks and where."""
        return self.head() + "".join(map(line, self.results)) + self.tail()

    def head(self) -> str:
        """The lines above the rules, known before any is looked at."""
        described = ", ".join(f"{key} {value}" for key, value in self.described.items())
        lines = [f"{self.kit} at {self.address}", *textwrap.wrap(described, WIDTH), ""]
        return _text([*lines, *(f"note: {note}" for note in self.notes)])

    def tail(self) -> str:
        """The lines below the rules: figures under load, how many were kept, and what nothing was seen of."""
        lines = []
        if self.load:
            lines += ["", f"  {'calls at once':>13} {'items/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'refused':>8}"]
            lines += [
                f"  {load.num_calls:13} {load.items_per_s:9.0f} {load.p50_ms:8.1f} {load.p99_ms:8.1f} "
                f"{load.num_refused:8}"
                for load in self.load
            ]
        counts = [self._count(status) for status in (Status.PASSED, Status.FAILED, Status.SKIPPED)]
        lines += ["", "{} rules: {} kept, {} broken, {} not looked at".format(len(self.results), *counts)]
        for note in self.unseen:
            lines += ["", *textwrap.wrap(f"note: {note}", WIDTH)]
        return _text(lines)

    def json(self) -> dict[str, Any]:
        """One object: kit, address, passed, described, notes, rules (each with name, status, seen, quote, element,
        file, seconds) and load.
        """
        rules = [
            {
                "name": result.rule.name,
                "status": result.verdict.status,
                "seen": result.verdict.seen,
                "quote": result.rule.quote,
                "element": result.rule.element,
                "file": result.rule.file,
                "seconds": round(result.seconds, 3),
            }
            for result in self.results
        ]
        return {
            "kit": self.kit,
            "address": self.address,
            "passed": self.has_passed,
            "described": dict(self.described),
            "notes": [*self.notes, *self.unseen],
            "rules": rules,
            "load": [vars(load) for load in self.load],
        }

    def suite(self) -> ElementTree.Element:
        """A test suite of JUnit's XML with a test case for each rule."""
        suite = ElementTree.Element(
            "testsuite",
            name=f"rolecall.conformance.{self.kit}",
            tests=str(len(self.results)),
            failures=str(self._count(Status.FAILED)),
            skipped=str(self._count(Status.SKIPPED)),
            errors="0",
            time=f"{sum(result.seconds for result in self.results):.3f}",
        )
        for result in self.results:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.kit, name=result.rule.name, time=f"{result.seconds:.3f}"
            )
            seen = _printable(result.verdict.seen)
            if result.verdict.status is Status.FAILED:
                failure = ElementTree.SubElement(case, "failure", message=seen)
                failure.text = f'{result.rule.file}, {result.rule.element}: "{result.rule.quote}"'
            elif result.verdict.status is Status.SKIPPED:
                ElementTree.SubElement(case, "skipped", message=seen)
        return suite


def line(result: Result) -> str:
    """A rule and what was found of it, on a line or several."""
    head = f"  {result.rule.name:{NAME_WIDTH}}  {_MARKS[result.verdict.status]:7}  "
    lines = _wrapped(result.verdict.seen, head)
    if result.verdict.status is Status.FAILED:
        asked = f'asked: "{result.rule.quote}" ({result.rule.element} in {result.rule.file})'
        lines += _wrapped(asked, " " * len(head))
    return _text(lines)


def junit(reports: Sequence[Report]) -> str:
    """JUnit's XML: the suite of one report, or those of several under one root."""
    root = reports[0].suite()
    if len(reports) > 1:
        root = ElementTree.Element("testsuites")
        root.extend(report.suite() for report in reports)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
