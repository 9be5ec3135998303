"""The body of a request as OpenTelemetry's message, and the answers to it, in protobuf or JSON.

Messages are decoded by the classes of opentelemetry-proto, whose C code takes a hundredth of the time that
storing the points takes. Everything is bounded before it is decoded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.http import HttpRequest, HttpResponse
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from fp8scope_dashboard.edge.backpressure import gate
from fp8scope_dashboard.wire.errors import MalformedError, RefusalError, TooLargeError
from fp8scope_dashboard.wire.limits import MIB, UNAVAILABLE_SECONDS

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
MAX_BYTES: Final = {PROTOBUF: 16 * MIB, JSON: 4 * MIB}
"""Of a body, decompressed. Decoding JSON takes ten times the time."""
SMALL: Final = 256 * 1024
"""So much is decompressed before it is known whether the server has room for more."""
MEMORY: Final = 8
"""Memory of a decoded message, in sizes of its body."""
_GZIP_OR_ZLIB: Final = 47
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 413: 3, 415: 3, 429: 8, 500: 13, 503: 14}
"""The codes of gRPC by status of HTTP."""


class UnsupportedTypeError(RefusalError):
    status, code = 415, "unsupported_type"


def kind_of(request: HttpRequest) -> str:
    """The content type. Raises UnsupportedTypeError if it is none that OTLP has."""
    kind = (request.content_type or "").lower()
    if kind not in MAX_BYTES:
        raise UnsupportedTypeError(
            f"The body is of type {kind[:100]!r}.", f"Send {PROTOBUF} (http/protobuf) or {JSON} (http/json)."
        )
    return kind


@contextmanager
def read_message(request: HttpRequest, kind: str, project: int) -> Iterator[ExportMetricsServiceRequest]:
    """The message of a request, for which memory is reserved within the context.

    Raises:
        MalformedError, TooLargeError, SlowDownError: see the message.
    """
    body, encoding = request.body, request.headers.get("Content-Encoding", "identity").strip().lower()
    limit = MAX_BYTES[kind]
    if encoding in ("identity", "none", ""):
        if len(body) > limit:
            raise _too_large(limit)
        with gate.admit(MEMORY * len(body), project):
            yield _decode(body, kind)
    elif encoding in ("gzip", "deflate"):
        unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
        raw = _unpack(unpacking, body, SMALL)
        with gate.admit(MEMORY * (len(raw) if unpacking.eof else limit), project):
            if not unpacking.eof:
                raw += _unpack(unpacking, unpacking.unconsumed_tail, limit - SMALL + 1)
            if len(raw) > limit:
                raise _too_large(limit)
            if not unpacking.eof or unpacking.unused_data:
                raise MalformedError("The compressed body is not complete, or has more than one part.")
            yield _decode(raw, kind)
    else:
        raise MalformedError(
            f"Content-Encoding {encoding[:40]!r} is not supported.",
            "Set OTEL_EXPORTER_OTLP_COMPRESSION=gzip.",
        )


def _unpack(unpacking: zlib._Decompress, data: bytes, most: int) -> bytes:
    try:
        return unpacking.decompress(data, most)
    except zlib.error as error:
        raise MalformedError("The body is not compressed as Content-Encoding says.") from error


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(
        f"The body has more than {limit // MIB} MiB.", "Export more often, or fewer metrics."
    )


def _decode(raw: bytes, kind: str) -> ExportMetricsServiceRequest:
    message = ExportMetricsServiceRequest()
    try:
        if kind == JSON:
            json_format.Parse(raw, message, ignore_unknown_fields=True)
        else:
            message.ParseFromString(raw)
    except (
        DecodeError,
        json_format.ParseError,
        ValueError,
        RecursionError,
        TypeError,
        AttributeError,
    ) as error:
        raise MalformedError(
            "The body is no ExportMetricsServiceRequest.", f"Its content type says {kind}."
        ) from error
    return message


def success(kind: str, rejected: int, message: str) -> HttpResponse:
    """The answer to a request that was stored, all but the rejected points. A message alone is a warning."""
    answer = ExportMetricsServiceResponse()
    if rejected or message:
        answer.partial_success.rejected_data_points = rejected
        answer.partial_success.error_message = message
    if kind == JSON:
        return HttpResponse(json_format.MessageToJson(answer, indent=None), content_type=JSON)
    return HttpResponse(answer.SerializeToString(), content_type=PROTOBUF)


def refused(kind: str, refusal: RefusalError) -> HttpResponse:
    """The answer to a refused request: a google.rpc.Status."""
    status, headers = refusal.status, refusal.headers()
    if status in (408, 409, 507):
        # Exporters send again after 429, 502, 503 and 504 only.
        status, headers = 503, headers or {"Retry-After": str(UNAVAILABLE_SECONDS)}
    elif status == 422:
        status = 400
    message = f"{refusal.message} {refusal.hint}".strip()
    code = _CODES.get(status, 2)
    if kind == JSON:
        document = json.dumps({"code": code, "message": message})
        answer = HttpResponse(document, status=status, content_type=JSON)
    else:
        # Fields 1 and 2 of a Status are those of a PartialSuccess: an integer and a text.
        same = ExportMetricsPartialSuccess(rejected_data_points=code, error_message=message)
        answer = HttpResponse(same.SerializeToString(), status=status, content_type=PROTOBUF)
    for name, value in headers.items():
        answer[name] = value
    return answer
