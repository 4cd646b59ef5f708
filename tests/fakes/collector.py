"""A collector of OpenTelemetry: reads OTLP by HTTP or gRPC with its own message classes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """What it was sent.

    Attributes:
        endpoint: for ``--otlp-traces-endpoint``.
        answers: clear it to be silent from now on; set it to answer, late.
        status: of answers by HTTP.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.status = 200
        self.requests: list[messages.ExportTraceServiceRequest] = []

    def take(self, request: messages.ExportTraceServiceRequest) -> None:
        self.asked.set()
        self.answers.wait()
        if self.status == 200:
            self.requests.append(request)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> dict[str, set[str]]:
        """Names of spans by the service that they are of."""
        found: dict[str, set[str]] = {}
        for request in list(self.requests):
            for resource in request.resource_spans:
                said = {one.key: one.value.string_value for one in resource.resource.attributes}
                names = {span.name for scope in resource.scope_spans for span in scope.spans}
                found.setdefault(said["service.name"], set()).update(names)
        return found

    def text(self) -> str:
        """All that it was told, to be searched."""
        return "".join(str(request) for request in list(self.requests))


def attributes(span: Span) -> dict[str, Any]:
    """What a span says of itself."""
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


@contextmanager
def http_collector() -> Iterator[Collector]:
    """One that speaks OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """One that speaks OTLP over gRPC."""
    collector = Collector()

    class Servicer(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> messages.ExportTraceServiceResponse:
            collector.take(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    add: Any = service.add_TraceServiceServicer_to_server  # which has no types
    add(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.stop(None).wait()
