"""Traces of requests and jobs for OpenTelemetry, where its environment variables name a receiver.

The packages are the extra `fp8scope[tracing]`. Without a receiver nothing of them is imported.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from contextvars import Token
from typing import Any, Final

logger = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACER: Final = "fp8scope"


class ServerTracer:
    """Begins spans. Until `configure` has found a receiver, it does nothing."""

    def __init__(self) -> None:
        self._api: Any = None
        self._propagate: Any = None

    def configure(self, service: str) -> bool:
        """Send spans from now on if a receiver is configured; returns whether it is.

        Args:
            service: the name of this kind of process, unless OTEL_SERVICE_NAME has one.
        """
        if (
            not any(os.environ.get(name) for name in ENDPOINTS)
            or os.environ.get("OTEL_SDK_DISABLED") == "true"
        ):
            return False
        try:
            api = importlib.import_module("opentelemetry.trace")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            self._propagate = importlib.import_module("opentelemetry.propagate")
            resources = importlib.import_module("opentelemetry.sdk.resources")
        except ImportError as error:
            logger.warning("Traces are not sent: %s. pip install 'fp8scope[tracing]'", error)
            return False
        name = os.environ.get("OTEL_SERVICE_NAME") or service
        provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": name}))
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        api.set_tracer_provider(provider)
        self._api = api
        return True

    @contextmanager
    def _request(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, str]) -> Iterator[Any]:
        context = self._propagate.extract(carrier)
        tracer = self._api.get_tracer(TRACER)
        with tracer.start_as_current_span(
            name, context=context, kind=self._api.SpanKind.SERVER, attributes=dict(attributes)
        ) as span:
            yield span

    def request(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, str]) -> Any:
        """A context with the span of a request; None where nothing is traced.

        Args:
            carrier: the request's headers `traceparent` and `tracestate`.
        """
        return nullcontext() if self._api is None else self._request(name, carrier, attributes)

    def inject(self, headers: MutableMapping[str, Any]) -> None:
        """Add the present span to the headers of a task."""
        if self._api is not None:
            self._propagate.inject(headers)

    def begin_job(
        self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, str]
    ) -> JobSpan | None:
        """Begin the span of a job; None where nothing is traced."""
        if self._api is None:
            return None
        context = self._propagate.extract(carrier)
        span = self._api.get_tracer(TRACER).start_span(
            name, context=context, kind=self._api.SpanKind.CONSUMER, attributes=dict(attributes)
        )
        attach = importlib.import_module("opentelemetry.context")
        return JobSpan(self._api, span, attach, attach.attach(self._api.set_span_in_context(span)))


class JobSpan:
    """The span of a job that is running."""

    def __init__(self, api: Any, span: Any, context: Any, token: Token[Any]) -> None:
        self._api, self._span, self._context, self._token = api, span, context, token

    def end(self, state: str) -> None:
        """End it, as an error unless the job has succeeded."""
        if state != "success":
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, state))
        self._context.detach(self._token)
        self._span.end()


tracer = ServerTracer()
