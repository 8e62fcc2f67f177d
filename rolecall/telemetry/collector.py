"""The exporters to an OpenTelemetry collector, which may be away for days: that is told, and not at each export.

Owns what a role's log says of it. What an export misses is gone; nothing here keeps it, or tries longer than TIMEOUT_S.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc import exporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from rolecall.address import is_loopback_host

logger = logging.getLogger(__name__)
TIMEOUT_S = 2
"""Bound on one export, so that a collector that is away cannot hold up a stopping process."""
TELL_AGAIN_S = 600.0
"""Failures are told when they begin, and then not before this time has passed."""


class Spans(OTLPSpanExporter):
    """The way of traces to the collector."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint=endpoint, timeout=TIMEOUT_S, **_way_to(endpoint))
        self._teller = _Teller("traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends `spans`, once."""
        with _heard:
            result = super().export(spans)
        self._teller.tell(has_arrived=result is SpanExportResult.SUCCESS)
        return result


class Numbers(OTLPMetricExporter):
    """The way of metrics to the collector."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint=endpoint, timeout=TIMEOUT_S, **_way_to(endpoint))
        self._teller = _Teller("metrics")

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Sends `metrics_data`, once."""
        with _heard:
            result = super().export(metrics_data, timeout_millis, **kwargs)
        self._teller.tell(has_arrived=result is MetricExportResult.SUCCESS)
        return result


class _Teller:
    """A log of one exporter's failures: a line as they begin, one each TELL_AGAIN_S, one when an export arrives again.
    A collector that comes and goes has one of each in that time.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._told_at = float("-inf")
        self._is_failing = False
        """Whether the last that was told is that exports fail."""

    def tell(self, *, has_arrived: bool) -> None:
        """Says what is new after an export that this thread made."""
        if has_arrived:
            if self._is_failing:
                logger.warning("the collector gets %s again", self._what)
            self._is_failing = False
        elif time.monotonic() - self._told_at > TELL_AGAIN_S:
            self._is_failing, self._told_at = True, time.monotonic()
            logger.warning("the collector gets no %s, which are lost; the role goes on: %s", self._what, _heard.words)


class _Heard(threading.local):
    """The words of the library's last complaint in this thread's last export. It is entered for each export."""

    words = ""
    is_exporting = False

    def __enter__(self) -> None:
        self.words, self.is_exporting = "", True

    def __exit__(self, *_: object) -> None:
        self.is_exporting = False


_heard = _Heard()


def _keep_words(record: logging.LogRecord) -> bool:
    """Keeps what the library says of each failed try for `_Teller`, and out of the log."""
    if _heard.is_exporting:
        _heard.words = record.getMessage()
    return not _heard.is_exporting


# before the library's own filter, which takes the words of another thread in the same 20 s for a repetition
logging.getLogger(exporter.__name__).filters.insert(0, _keep_words)


def _way_to(endpoint: str) -> dict[str, Any]:
    """Returns an exporter's options for the channel to `endpoint`. A collector of this machine is not asked for at a
    proxy, which would look for it on its own.
    """
    host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname
    direct = (("grpc.enable_http_proxy", 0),) if is_loopback_host(host or "") else None
    return {"insecure": not endpoint.startswith("https://"), "channel_options": direct}
