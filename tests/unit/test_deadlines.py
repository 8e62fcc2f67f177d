"""Every wait has a deadline: a listing of all awaits and blocking calls that fails on one that has none, and the page
that names them.
"""

import ast
import re

import pytest

from rolecall.settings import RunSettings
from tools.check_deadlines import ROOT, findings, read_sources

MAX_ON_PURPOSE = 9
"""Waits that end only with their role: its main loop, its queue, its controller."""


def test_every_wait_of_the_code_base_has_a_deadline_or_says_what_bounds_it() -> None:
    unbounded = findings(read_sources())
    assert not unbounded, "\n" + "\n".join(map(str, unbounded))


def test_only_the_main_loops_of_roles_wait_without_end() -> None:
    on_purpose = [
        path
        for path, source in read_sources().items()
        for _ in re.findall(r"# bounded: by nothing, on purpose", source)
    ]
    assert len(on_purpose) <= MAX_ON_PURPOSE, on_purpose


PLANTED = [
    "await event.wait()",
    "await queue.get()",
    "await asyncio.wait(tasks)",
    "await asyncio.wait(tasks, timeout=None)",
    "await asyncio.gather(*tasks)",
    "await asyncio.shield(future)",
    "await future",
    "await asyncio.to_thread(somebody.read)",
    "await llm.pause_generation()",
    "async with lock: await own()",
    "async for item in queue: pass",
    "thread.join()",
    "process.wait()",
    "event.wait()",
    "executor_future.result()",
    "queue.get()",
    "lock.acquire()",
    "connection.recv(4)",
    "subprocess.run(command)",
    "redis.Redis.from_url(url)",
    "dist.new_group(ranks)",
    "TCPStore(host, port)",
    "grpc.aio.insecure_channel(address)",
    "fcntl.flock(file, fcntl.LOCK_EX)",
    "with self._lock: time.sleep(1)",
    "await event.wait()  # bounded:",
    "await event.wait()  # bounded: surely",
    "x = 1  # bounded: by nothing that waits here",
]


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_wait_without_a_deadline_is_found(line: str) -> None:
    keyword = "async def" if "await" in line or "async " in line else "def"
    found = findings({"planted.py": f"async def own():\n    pass\n\n{keyword} planted(self):\n    {line}\n"})
    assert [finding.line for finding in found] == [5], found


BOUNDED = [
    "await own()",
    "await asyncio.gather(own(), *(own() for _ in ()))",
    "await asyncio.sleep(3)",
    "await asyncio.wait(tasks, timeout=3)",
    "await asyncio.wait_for(event.wait(), 3)",
    "await stub.GetInfo(request)",
    "await asyncio.to_thread(own_blocking)",
    "await event.wait()  # bounded: by whoever sets it",
    "async with lock: x = 1",
    "async with condition: await condition.wait_for(ready)  # bounded: by whoever notifies it",
    "thread.join(3)",
    "queue.get(timeout=3)",
    "subprocess.run(command, timeout=3)",
    "with self._lock: x = 1",
    "', '.join(words)",
    "table.get(key)",
]


@pytest.mark.parametrize("line", BOUNDED)
def test_a_wait_with_a_deadline_is_not_found(line: str) -> None:
    keyword = "async def" if "await" in line or "async " in line else "def"
    source = f"async def own():\n    pass\n\ndef own_blocking():\n    pass\n\n{keyword} planted(self):\n    {line}\n"
    assert not findings({"planted.py": source})


def test_a_timeout_around_a_wait_is_its_deadline_and_not_that_of_a_function_inside() -> None:
    source = (
        "async def planted():\n    async with asyncio.timeout(3):\n        await event.wait()\n        async "
        "def inner():\n            await event.wait()\n"
    )
    assert [finding.line for finding in findings({"planted.py": source})] == [5]


# --- docs/operations.md ---------------------------------------------------------------------------


def deadline_settings() -> set[str]:
    """Names of all settings in seconds, as `<section>.<field>` of any section that has one."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "rolecall" / "settings").glob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [
        item.target.id
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not ast.unparse(item.annotation).startswith("ClassVar")  # a constant, which no file sets
    ]
    return {name for name in fields if name.endswith("_s") and "_per_" not in name}


def deadlines_page() -> str:
    text = (ROOT / "docs" / "operations.md").read_text()
    return text[text.index("## Deadlines") : text.index("\n## ", text.index("## Deadlines") + 1)]


def test_operations_names_every_setting_that_is_a_deadline() -> None:
    page = deadlines_page()
    assert "lease_s" in deadline_settings()
    missing = sorted(name for name in deadline_settings() if name not in page)
    assert not missing, f"docs/operations.md, Deadlines: {missing}"
    assert RunSettings.model_fields.keys() >= {
        section.split(".")[0] for section in re.findall(r"`([a-z]+\.[a-z_.]+_s)`", page)
    }


def test_operations_names_every_constant_that_is_a_deadline_with_its_file_and_value() -> None:
    page, missing = deadlines_page(), []
    for path, source in read_sources().items():
        for name, value in re.findall(
            r"^(_?[A-Z][A-Z_]*TIMEOUT_S|RETRY_S)(?:: \w+)? = ([0-9.]+)$", source, re.MULTILINE
        ):
            rows = [row for row in page.splitlines() if path in row and re.search(rf"\b{float(value):g}\b", row)]
            if not rows:
                missing.append(f"{path}: {name} = {value}")
    assert not missing, "docs/operations.md, Deadlines: " + "; ".join(missing)
