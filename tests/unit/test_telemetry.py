"""Metrics combine as they say, traces survive storage, and logs say who speaks."""

import contextvars
import io
import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from rolecall import telemetry
from rolecall.errors import InvalidInputError
from rolecall.settings import TelemetrySection
from rolecall.telemetry import Metrics, collector
from rolecall.v1 import trajectory_pb2

VALUES = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.5, 1e3)), min_size=1, max_size=20)


def reduced(pairs: list[tuple[float, float]]) -> Metrics:
    metrics = Metrics()
    for value, weight in pairs:
        metrics.mean("a/mean", value, weight)
        metrics.sum("a/sum", value)
        metrics.max("a/max", value)
        metrics.min("a/min", value)
    return metrics


@given(VALUES, st.integers(0, 20))
def test_parts_merge_to_what_the_whole_would_have_been(pairs: list[tuple[float, float]], cut: int) -> None:
    parts = reduced(pairs[:cut])
    parts.merge(Metrics.from_proto(reduced(pairs[cut:]).to_proto()))
    values, weights = zip(*pairs, strict=True)
    expected = {
        "a/max": max(values),
        "a/mean": sum(value * weight for value, weight in pairs) / sum(weights),
        "a/min": min(values),
        "a/sum": sum(values),
    }
    assert parts.values() == pytest.approx(expected, rel=1e-9, abs=1e-3)


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_what_is_not_a_number_is_never_hidden(values: tuple[float, ...]) -> None:
    assert all(map(math.isnan, reduced([(value, 1.0) for value in values]).values().values()))


def test_a_mean_over_nothing_is_absent() -> None:
    metrics = Metrics()
    metrics.mean("accuracy", 0.0, weight=0)
    assert metrics.values() == {}


def test_a_mean_over_nothing_that_somebody_sent_is_absent_too() -> None:
    nothing = trajectory_pb2.Metric(name="x", value=float("nan"), reduction=trajectory_pb2.REDUCTION_MEAN, weight=0.0)
    assert Metrics.from_proto([nothing, nothing]).values() == {}


def test_a_name_has_one_reduction() -> None:
    metrics = Metrics()
    metrics.sum("tokens", 3)
    with pytest.raises(InvalidInputError, match="'tokens' has two reductions"):
        metrics.max("tokens", 4)


def test_a_metric_without_a_reduction_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="names no reduction"):
        Metrics.from_proto([trajectory_pb2.Metric(name="x", value=1.0)])


def test_values_and_messages_are_sorted_by_name() -> None:
    metrics = Metrics()
    metrics.sum("b", 1)
    metrics.sum("a", 2)
    assert list(metrics.values()) == [metric.name for metric in metrics.to_proto()] == ["a", "b"]


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers = handlers
    logging.captureWarnings(False)


def logged(section: TelemetrySection) -> str:
    stream = io.StringIO()
    with redirect_stderr(stream):
        telemetry.configure(section, "rollout", "rollout-0")
        telemetry.configure(section, "rollout", "rollout-0")
        with telemetry.tracer().start_as_current_span("generate"):
            logging.getLogger("services.rollout").info("claimed %d groups", 3)
            logging.getLogger("grpc").info("chatter")
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("services.rollout").exception("lost")
    return stream.getvalue()


@pytest.mark.usefixtures("restored_logging")
def test_lines_for_people_are_short_and_come_once() -> None:
    first, second, *traceback = logged(TelemetrySection()).splitlines()
    assert first.endswith(" rollout-0 claimed 3 groups")
    assert second.endswith(" rollout-0 ERROR lost")
    assert traceback[-1] == "ValueError: no"


@pytest.mark.usefixtures("restored_logging")
def test_a_stream_whose_caller_is_gone_is_no_error_of_the_tracing() -> None:
    """Nobody reads on, so that its generator is closed outside the context in which its span began."""

    def stream() -> Generator[int, None, None]:
        with telemetry.tracer().start_as_current_span("Train"):
            yield 1

    said = io.StringIO()
    with redirect_stderr(said):
        telemetry.configure(TelemetrySection(), "actor", "actor")
        answers = stream()
        assert contextvars.copy_context().run(next, answers) == 1
        answers.close()
    assert said.getvalue() == ""


@pytest.mark.usefixtures("restored_logging")
def test_lines_for_collectors_are_json_with_the_trace_id() -> None:
    claimed, lost = (json.loads(line) for line in logged(TelemetrySection(log_format="json")).splitlines())
    assert claimed["role"] == "rollout"
    assert claimed["worker"] == "rollout-0"
    assert claimed["message"] == "claimed 3 groups"
    assert len(claimed["trace_id"]) == 32
    assert "trace_id" not in lost
    assert lost["exception"].endswith("ValueError: no")


@pytest.mark.usefixtures("restored_logging")
def test_a_trace_goes_on_after_it_was_stored() -> None:
    telemetry.configure(TelemetrySection(), "controller", "controller")
    assert telemetry.current_traceparent() == ""
    with telemetry.tracer().start_as_current_span("admit") as admit:
        stored = telemetry.current_traceparent()
    with telemetry.attached(stored), telemetry.tracer().start_as_current_span("claim") as claim:
        assert claim.get_span_context().trace_id == admit.get_span_context().trace_id
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.usefixtures("restored_logging")
def test_a_span_that_nobody_is_shown_has_ids_and_records_nothing() -> None:
    telemetry.configure(TelemetrySection(), "controller", "controller")
    with telemetry.tracer().start_as_current_span("score") as span:
        assert span.get_span_context().is_valid
        assert not span.is_recording()
        assert not span.get_span_context().trace_flags.sampled, "whoever is called need not record it either"


def test_numbers_that_nobody_reads_leave_nothing_behind() -> None:
    code = (
        "import tracemalloc; from rolecall import telemetry; from rolecall.settings import TelemetrySection\n"
        "telemetry.configure(TelemetrySection(), 'controller', 'controller')\n"
        "metrics = telemetry.Metrics(); metrics.sum('tokens', 5); telemetry.export(metrics); tracemalloc.start()\n"
        "for _ in range(1000): telemetry.export(metrics)\n"
        "print(tracemalloc.get_traced_memory()[0])\n"
    )
    kept = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout
    assert int(kept) < 100_000, "bytes; each export left 600"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-00"])
def test_an_absent_or_broken_traceparent_begins_a_trace_of_its_own(traceparent: str) -> None:
    with telemetry.attached(traceparent):
        assert telemetry.current_traceparent() == ""


def test_a_collector_that_is_away_does_not_hold_up_the_end(unused_tcp_port: int) -> None:
    code = (
        "from rolecall import telemetry; from rolecall.settings import TelemetrySection\n"
        f"telemetry.configure(TelemetrySection(otlp_endpoint='http://127.0.0.1:{unused_tcp_port}'), 'actor', 'actor')\n"
        "metrics = telemetry.Metrics(); metrics.sum('tokens', 5); telemetry.export(metrics)\n"
        "with telemetry.tracer().start_as_current_span('train') as span: assert span.is_recording()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that takes every trace."""

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_collector_that_is_away_is_told_once_and_once_when_it_is_back(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "TIMEOUT_S", 0.5)
    tracing, address = TracerProvider(), f"127.0.0.1:{unused_tcp_port}"
    tracing.add_span_processor(SimpleSpanProcessor(collector.Spans(f"http://{address}")))

    def export() -> None:
        tracing.get_tracer("test").start_span("train").end()

    for _ in range(3):
        export()
    (told,) = caplog.messages
    assert told.startswith(
        "the collector gets no traces, which are lost; the role goes on: Failed to export traces to "
    )
    assert address in told
    with monkeypatch.context() as later:
        later.setattr(collector, "TELL_AGAIN_S", 0.0)
        export()
    assert len(caplog.messages) == 2, "and again, when it has not been told for long"
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    server.start()
    try:
        deadline = time.monotonic() + 60
        while len(caplog.messages) < 3 and time.monotonic() < deadline:
            export()
        export()
        assert caplog.messages[2:] == ["the collector gets traces again"]
    finally:
        tracing.shutdown()
        server.stop(0).wait(10)


def test_a_collector_of_this_machine_is_found_beside_a_proxy(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{unused_tcp_port}")
    server.start()
    for endpoint in (f"http://127.0.0.1:{unused_tcp_port}", f"localhost:{unused_tcp_port}"):
        tracing = TracerProvider()
        tracing.add_span_processor(SimpleSpanProcessor(collector.Spans(endpoint)))
        tracing.get_tracer("test").start_span("train").end()
        tracing.shutdown()
    server.stop(0).wait(10)
    assert caplog.messages == []


def test_each_exporter_says_why_it_failed_and_other_words_of_the_library_stay(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "TIMEOUT_S", 0.5)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    spans, numbers = collector.Spans(url), collector.Numbers(url)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(spans.export, []).result(30)
        pool.submit(numbers.export, MetricsData([])).result(30)
    numbers.export(MetricsData([]))
    traces, metrics = caplog.messages
    assert "Failed to export traces to" in traces
    assert "Failed to export metrics to" in metrics
    for exporter in (spans, numbers, numbers):
        exporter.shutdown()
    assert caplog.messages[2:] == ["Exporter already shutdown, ignoring call"]
