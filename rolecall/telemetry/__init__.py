"""Logs, traces and metrics of a process: what a role says about itself.

Owns the logging set-up, the OpenTelemetry providers and `Metrics`, the one type by which numbers travel between roles
with the way they combine. It is not a tracker (the controller writes JSONL, TensorBoard and the rest) and it knows
nothing of what the numbers mean.

Trace context passes through gRPC by itself (rolecall.rpc); through stream entries it travels as a W3C traceparent
string, with `current_traceparent` on the writing side and `attached` on the reading side. Without
`telemetry.otlp_endpoint` spans exist only to give logs their trace ids: they record nothing and are passed on as not
sampled. Where nobody reads a process's numbers, it counts none for them.

Every number names its run, role and worker in labels of its own: they are the same whether it is pushed to a collector
or scraped.
"""

import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TextIO

from opentelemetry import context as otel_context
from opentelemetry import metrics as otel_metrics
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, Observation, _Gauge
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rolecall.errors import InvalidInputError, UnavailableError
from rolecall.settings import RpcSection, TelemetrySection, rank_of_process
from rolecall.telemetry.states import StateClock
from rolecall.v1 import trajectory_pb2

logger = logging.getLogger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()
_CHATTY_LOGGERS = (
    "grpc",
    "opentelemetry",
    "httpx",
    "httpcore",
    "urllib3",
    "filelock",
    "asyncio",
    "transformers",
    "huggingface_hub",
    "numexpr",
    "vllm",
)
INSTRUMENTATION = "rolecall"
METRIC = "rolecall.metric"
"""Gauge of all numbers of steps."""
MAX_SERIES = 100_000
"""Most series of `rolecall.metric` in a process: 500 held-out sets of 64 sources. What comes after them is one series
without a name, as it would be past the library's own 2,000.
"""
_LABELS: dict[str, str] = {}
"""The labels of this process's numbers: run, role and worker. Prometheus keeps `instance` and `job` for itself."""
_REDUCTIONS = (
    trajectory_pb2.REDUCTION_MEAN,
    trajectory_pb2.REDUCTION_SUM,
    trajectory_pb2.REDUCTION_MAX,
    trajectory_pb2.REDUCTION_MIN,
)


def configure(
    section: TelemetrySection, role: str, worker: str, *, run: str = "", rpc: RpcSection = RpcSection()
) -> None:
    """Sets up logging to stderr and the OpenTelemetry providers of this process; call it once, first thing after
    reading the settings.

    A later call replaces the log format and level; OpenTelemetry's providers are set once per process and stay. `rpc`
    says how the page of metrics is guarded. ConfigError when telemetry.metrics_bind would show it in the clear; one
    that is in use is an error in the log alone, for `rolecall train` has looked before it started anything.
    """
    _configure_logs(section, role, worker)
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        _LABELS.update(run=run, role=role, worker=worker)
        # of several ranks the first speaks for all, as it does to everybody else
        metrics_bind = section.metrics_bind if rank_of_process()[0] == 0 else None
        _configure_providers(section.otlp_endpoint, metrics_bind is not None, role, worker)
        if metrics_bind is not None:
            from rolecall.telemetry.scrape import serve_metrics  # a run without Prometheus does not pay for it

            try:
                logger.info("metrics at %s", serve_metrics(metrics_bind, rpc))
            except UnavailableError as error:  # a role that is started again must not end the run for its numbers
                logger.error("%s", error.message)


def labels() -> dict[str, str]:
    """The labels of every number of this process: run, role and worker."""
    return dict(_LABELS)


@cache
def tracer() -> trace.Tracer:
    """The tracer for spans of our own; gRPC calls are traced without it."""
    return trace.get_tracer(INSTRUMENTATION)


def current_traceparent() -> str:
    """W3C traceparent of the current span, to be stored with an entry; empty outside any span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


@contextmanager
def attached(traceparent: str) -> Iterator[None]:
    """Spans opened inside are children of the stored `traceparent`; an empty or malformed one changes nothing."""
    token = otel_context.attach(_PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}))
    try:
        yield
    finally:
        otel_context.detach(token)


@contextmanager
def span_for_all(name: str, callers: Sequence[trace.Span]) -> Iterator[None]:
    """A span of work that is done for all of `callers` at once. It has one parent, the current span; links lead from it
    to each of them and back, so that it is found from every trace.
    """
    links = [trace.Link(caller.get_span_context()) for caller in callers]
    with tracer().start_as_current_span(name, links=links) as span:
        for caller in callers:
            caller.add_link(span.get_span_context())
        yield


def export(metrics: "Metrics") -> None:
    """Shows the numbers to the OpenTelemetry collector as gauge `rolecall.metric` with attributes `name` and
    `reduction`.
    """
    for metric in metrics.to_proto():
        reduction = trajectory_pb2.Reduction.Name(metric.reduction).removeprefix("REDUCTION_").lower()
        _gauge().set(metric.value, {**_LABELS, "name": metric.name, "reduction": reduction})


@cache
def _gauge() -> _Gauge:
    """The instrument of `export`, made once: where nobody reads, OpenTelemetry keeps all that were ever made."""
    return otel_metrics.get_meter(INSTRUMENTATION).create_gauge(
        METRIC, description="A step's number, reduced as the attribute says."
    )


def show_states(clock: StateClock) -> None:
    """Shows the seconds of every state of `clock` as counter `rolecall.state`, in seconds, with the attribute `state`:
    `rolecall_state_seconds_total` for Prometheus. The rates of all states of a worker sum to 1.

    Once per process: it has one role.
    """

    def observe(options: CallbackOptions) -> list[Observation]:
        return [Observation(seconds, {**_LABELS, "state": state}) for state, seconds in clock.seconds().items()]

    otel_metrics.get_meter(INSTRUMENTATION).create_observable_counter(
        "rolecall.state", [observe], unit="s", description="Seconds for which the worker was in the state."
    )


@dataclass
class _Entry:
    reduction: trajectory_pb2.Reduction.ValueType
    value: float
    weight: float


class Metrics:
    """Named numbers, each with how it combines over microbatches, ranks and steps. Not thread-safe: one owner at a
    time.

    A name keeps the reduction it was first given; another one is an InvalidInputError.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Weighted mean; `weight` is what `value` was averaged over, e.g. tokens. Weight 0 adds nothing: a mean over
        nothing is absent.
        """
        if weight > 0:
            self._add(name, trajectory_pb2.REDUCTION_MEAN, float(value), float(weight))

    def sum(self, name: str, value: float) -> None:
        """Adds up."""
        self._add(name, trajectory_pb2.REDUCTION_SUM, float(value), 1.0)

    def max(self, name: str, value: float) -> None:
        """Keeps the largest, or NaN where one is."""
        self._add(name, trajectory_pb2.REDUCTION_MAX, float(value), 1.0)

    def min(self, name: str, value: float) -> None:
        """Keeps the smallest, or NaN where one is."""
        self._add(name, trajectory_pb2.REDUCTION_MIN, float(value), 1.0)

    def merge(self, other: "Metrics") -> None:
        """Takes in `other`, as if everything it was given had been given here."""
        for name, entry in other._entries.items():
            self._add(name, entry.reduction, entry.value, entry.weight)

    def extremes(self) -> "Metrics":
        """Returns the metrics that keep the largest or smallest.

        A process may tell these although others count its numbers already.
        """
        kept = (trajectory_pb2.REDUCTION_MAX, trajectory_pb2.REDUCTION_MIN)
        return Metrics.from_proto(metric for metric in self.to_proto() if metric.reduction in kept)

    def values(self) -> dict[str, float]:
        """Reduced value by name, sorted by name."""
        return {name: self._entries[name].value for name in sorted(self._entries)}

    def to_proto(self) -> list[trajectory_pb2.Metric]:
        """Encodes the metrics for the wire, sorted by name."""
        return [
            trajectory_pb2.Metric(name=name, value=entry.value, reduction=entry.reduction, weight=entry.weight)
            for name, entry in sorted(self._entries.items())
        ]

    @classmethod
    def from_proto(cls, metrics: Iterable[trajectory_pb2.Metric]) -> "Metrics":
        """Decodes metrics from the wire; the same name twice combines. InvalidInputError for a metric without a
        reduction.
        """
        result = cls()
        for metric in metrics:
            if metric.reduction != trajectory_pb2.REDUCTION_MEAN or metric.weight > 0:
                result._add(metric.name, metric.reduction, metric.value, metric.weight)
        return result

    def _add(self, name: str, reduction: trajectory_pb2.Reduction.ValueType, value: float, weight: float) -> None:
        entry = self._entries.get(name)
        if entry is None:
            if reduction not in _REDUCTIONS:
                raise InvalidInputError(f"metric {name!r} names no reduction that is known here", metric=name)
            self._entries[name] = _Entry(reduction, value, weight)
            return
        if entry.reduction != reduction:
            raise InvalidInputError(f"metric {name!r} has two reductions; give each its own name", metric=name)
        match reduction:
            case trajectory_pb2.REDUCTION_MEAN:
                entry.weight += weight
                entry.value += (value - entry.value) * (weight / entry.weight)
            case trajectory_pb2.REDUCTION_SUM:
                entry.value += value
            case trajectory_pb2.REDUCTION_MAX:
                entry.value = value if math.isnan(value) else max(entry.value, value)
            case trajectory_pb2.REDUCTION_MIN:
                entry.value = value if math.isnan(value) else min(entry.value, value)


class _StderrLog(logging.StreamHandler[TextIO]):
    """A log handler of our own, so that a second `configure` replaces it and nothing else."""


class _HumanFormatter(logging.Formatter):
    """`12:34:56 worker message`; level and logger only where they say something."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {self._worker} {level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, role, worker, logger, message, and trace_id, span_id, exception where
    there are any.
    """

    def __init__(self, role: str, worker: str) -> None:
        super().__init__()
        self._role, self._worker = role, worker

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "role": self._role,
            "worker": self._worker,
            "logger": record.name,
            "message": record.getMessage(),
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line |= {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _configure_logs(section: TelemetrySection, role: str, worker: str) -> None:
    handler = _StderrLog(sys.stderr)
    handler.setFormatter(_JsonFormatter(role, worker) if section.log_format == "json" else _HumanFormatter(worker))
    root = logging.getLogger()
    root.handlers = [kept for kept in root.handlers if not isinstance(kept, _StderrLog)]
    root.addHandler(handler)
    root.setLevel(section.log_level)
    chatty_level = logging.DEBUG if section.log_level == "DEBUG" else logging.WARNING
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(chatty_level)
    # a stream whose caller is gone is closed outside the context in which its span began: nothing is lost by it
    logging.getLogger("opentelemetry.context").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)


def _configure_providers(otlp_endpoint: str | None, scraped: bool, role: str, worker: str) -> None:
    resource = Resource.create({"service.namespace": "rolecall", "service.name": role, "service.instance.id": worker})
    # a span that nobody is shown has ids and records nothing; None: as OTEL_TRACES_SAMPLER says
    tracing = TracerProvider(ALWAYS_OFF if otlp_endpoint is None else None, resource)
    readers: list[MetricReader] = []
    if otlp_endpoint is not None:
        # Imported here: a run without a collector should not pay for it at start.
        from rolecall.telemetry.collector import Numbers, Spans

        tracing.add_span_processor(BatchSpanProcessor(Spans(otlp_endpoint)))
        readers.append(PeriodicExportingMetricReader(Numbers(otlp_endpoint)))
    if scraped:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    trace.set_tracer_provider(tracing)
    if readers:
        views = [View(instrument_name=METRIC, aggregation_cardinality_limit=MAX_SERIES)]
        otel_metrics.set_meter_provider(MeterProvider(metric_readers=readers, resource=resource, views=views))
