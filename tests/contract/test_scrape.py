"""Prometheus reads /metrics: with names by its rules, from whom the run trusts, and never at the role's cost."""

import os
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolecall.errors import ConfigError, UnavailableError
from rolecall.settings import RpcSection, TlsSection
from rolecall.telemetry.scrape import serve_metrics
from tests.contract.peer import Authority

TIMEOUT_S = 20.0
A_ROLE = """
import urllib.request
from rolecall import telemetry
from rolecall.settings import RpcSection, TelemetrySection
from rolecall.telemetry import Metrics
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.telemetry.scrape import serve_metrics
from rolecall.telemetry.states import StateClock

telemetry.configure(TelemetrySection(metrics_bind="127.0.0.1:0"), "actor", "actor", run="sort")
telemetry.show_states(StateClock(("waiting", "training")))
metrics = Metrics()
metrics.mean("reward/mean", 0.5)
for i in range(3000):
    metrics.mean(f"eval/set/source/{i}/accuracy", 0.5)
telemetry.export(metrics)
meter = ScorerMeter("judge")
with meter.call(2):
    meter.retried(1)
meter.count("scored", 2)
print(urllib.request.urlopen(serve_metrics("127.0.0.1:0", RpcSection()), timeout=20.0).read().decode())
"""
A_CALLER = """
import asyncio
import urllib.request
from rolecall import telemetry
from rolecall.errors import BadGroundTruthError, ScorerUnavailableError
from rolecall.reward import Scorer, description, one_by_one
from rolecall.scoring.client import open_external
from rolecall.settings import ExternalScorer, RpcSection, TelemetrySection
from rolecall.telemetry.scrape import serve_metrics
from rolecall.v1 import reward_pb2
from tests.contract.reward_peers import serving

telemetry.configure(TelemetrySection(metrics_bind="127.0.0.1:0"), "reward", "reward", run="sort")
asked = set()

def score(item):
    if item.response_text == "bad":
        raise BadGroundTruthError("nothing to compare with")
    if item.response_text == "away" or item.response_text == "late" and "late" not in asked:
        asked.add(item.response_text)
        raise ScorerUnavailableError("not yet")
    return 1.0

async def main():
    spec = description("judge", (0, 1), ("response_text",), {}, False, max_items=0)
    async with serving(Scorer(spec, one_by_one(score, spec))) as address:
        scorer = ExternalScorer(address=address)
        client, channel = open_external("judge", scorer, RpcSection(), timeout_s=30.0, max_attempts=2)
        texts = ["good", "late", "bad", "away"]
        await client.score([reward_pb2.ScoreItem(id=text, response_text=text) for text in texts])
        await channel.close()

asyncio.run(main())
print(urllib.request.urlopen(serve_metrics("127.0.0.1:0", RpcSection()), timeout=20.0).read().decode())
"""
BASE_UNITS = ("seconds", "bytes", "ratio")


def get(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:
        return str(answer.read().decode())


def trusting(tls: TlsSection, own: TlsSection | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if own is not None:
        context.load_cert_chain(own.certificate_file, own.key_file)
    return context


def test_names_units_and_labels_follow_the_rules_of_prometheus() -> None:
    done = subprocess.run([sys.executable, "-c", A_ROLE], capture_output=True, text=True, timeout=60.0, check=True)
    families = {family.name: family for family in text_string_to_metric_families(done.stdout)}
    ours = {name: family for name, family in families.items() if name.startswith("rolecall_")}
    scorer = {f"rolecall_scorer_{name}" for name in ("time_seconds", "items", "retries", "under_way")}
    assert {"rolecall_state_seconds", "rolecall_metric"} | scorer == ours.keys()
    for name, family in ours.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        assert family.type == "gauge" or name.rpartition("_")[2] in (*BASE_UNITS, "items", "retries")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert sample.labels.keys() >= {"run", "role", "worker"}
            assert not sample.labels.keys() & {"job", "instance", "quantile"}
            assert ("le" in sample.labels) == sample.name.endswith("_bucket")
            assert (sample.labels["run"], sample.labels["role"]) == ("sort", "actor")
    assert {sample.labels["state"] for sample in ours["rolecall_state_seconds"].samples} == {"waiting", "training"}
    (items,) = ours["rolecall_scorer_items"].samples
    assert (items.labels["scorer"], items.labels["outcome"], items.value) == ("judge", "scored", 2)
    names = {sample.labels["name"] for sample in ours["rolecall_metric"].samples}
    assert names == {"reward/mean", *(f"eval/set/source/{i}/accuracy" for i in range(3000))}


def test_what_became_of_a_scorers_items_is_counted() -> None:
    done = subprocess.run([sys.executable, "-c", A_CALLER], capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
        if sample.labels.get("scorer") == "judge" and "le" not in sample.labels
    }
    assert found.pop(("rolecall_scorer_time_seconds_sum", None)) > 0.0, "with the pause before the second attempt"
    assert found == {
        ("rolecall_scorer_time_seconds_count", None): 1,
        ("rolecall_scorer_items_total", "scored"): 2,
        ("rolecall_scorer_items_total", "failed"): 1,
        ("rolecall_scorer_items_total", "away"): 1,
        ("rolecall_scorer_retries_total", None): 2,
        ("rolecall_scorer_under_way", None): 0,
    }


def test_beyond_loopback_it_takes_tls_or_a_mesh() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0 \(telemetry\.metrics_bind\) without TLS"):
        serve_metrics("0.0.0.0:0", RpcSection())
    assert serve_metrics("0.0.0.0:0", RpcSection(behind_mesh=True)).startswith("http://")


@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]"])
def test_everywhere_is_everywhere_of_ipv4_and_of_ipv6(bind: str) -> None:
    url = serve_metrics(f"{bind}:0", RpcSection(behind_mesh=True))
    assert url.startswith(f"http://{bind}:")
    for host in ("127.0.0.1", "[::1]"):
        if host == "127.0.0.1" or has_ipv6():
            assert "process_cpu_seconds_total" in get(url.replace(bind, host))


def has_ipv6() -> bool:
    """Whether this machine has IPv6's loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_machine_without_ipv6_shows_its_numbers_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    url = serve_metrics("0.0.0.0:0", RpcSection(behind_mesh=True))
    assert "process_cpu_seconds_total" in get(url.replace("0.0.0.0", "127.0.0.1"))


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"{bind} \(telemetry\.metrics_bind\): it is in use"):
            serve_metrics(bind, RpcSection())


def test_a_role_whose_port_is_taken_says_so_and_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = A_ROLE.replace("127.0.0.1:0", f"127.0.0.1:{other.getsockname()[1]}", 1)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=True)
    assert "(telemetry.metrics_bind): it is in use" in done.stderr
    assert "rolecall_state_seconds_total" in done.stdout


def test_with_tls_it_answers_whom_the_run_trusts_alone_also_after_a_rotation(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    served, viewer = ours.issue("actor"), ours.issue("viewer")
    url = serve_metrics("127.0.0.1:0", RpcSection(tls=served))
    assert "process_cpu_seconds_total" in get(url, trusting(served, viewer))
    for stranger in (None, theirs.issue("viewer")):
        with pytest.raises(OSError):
            get(url, trusting(served, stranger))
    replacement = theirs.issue("actor")
    served.key_file.unlink()  # half a rotation
    assert "process_cpu_seconds_total" in get(url, trusting(served, viewer))
    for old, new in zip(_files(served), _files(replacement), strict=True):
        os.replace(new, old)
    assert "process_cpu_seconds_total" in get(url, trusting(served, theirs.issue("viewer")))
    with pytest.raises(OSError):
        get(url, trusting(served, viewer))


def test_whoever_connects_and_says_nothing_does_not_end_the_scrapes() -> None:
    url = serve_metrics("127.0.0.1:0", RpcSection())
    host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S):
        assert "process_cpu_seconds_total" in get(url)


def _files(tls: TlsSection) -> list[Path]:
    return [tls.certificate_file, tls.key_file, tls.ca_file]
