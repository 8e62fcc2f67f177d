"""The rules for Prometheus: they name numbers that are shown. By its own tool, where that is installed, they parse, and
say what they should of made-up minutes.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RULES = ROOT / "deploy" / "kubernetes" / "components" / "prometheus" / "rules.yaml"
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; it comes with the package prometheus")
def test_the_rules_parse_and_say_what_they_should(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text())["spec"]))
    shutil.copy(HERE / "rules_test.yaml", tmp_path)
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([str(PROMTOOL), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_number_that_the_rules_name_is_one_that_a_role_shows_and_the_documents_explain() -> None:
    named = set(re.findall(r'name="([a-z_/]+)"', RULES.read_text()))
    assert {"store/reachable", "checkpoint/saved"} <= named
    told = (ROOT / "docs" / "metrics.md").read_text()
    sources = "".join(file.read_text() for folder in ("services", "rolecall") for file in (ROOT / folder).rglob("*.py"))
    assert {name for name in named if f'"{name}"' not in sources or f"`{name}`" not in told} == set()
