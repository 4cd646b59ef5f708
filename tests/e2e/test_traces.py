"""A frontend and a worker that trace to a collector and log JSON at debug level: what the spans
say, and that neither they nor any line has what a user wrote. The worker computes nothing.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.conftest import wait_for_workers
from tests.e2e.processes import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    HttpServer,
    Process,
    discovery_flag,
    start_frontend,
)
from tests.fakes.collector import Collector, attributes, http_collector
from tests.pictures import data_uri, picture
from tests.waiting import until

CANARY = "canary7f3a"
KEY = f"{CANARY}key"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "vendor=1"}


@dataclass(frozen=True)
class Traced:
    """What runs, and a client of it."""

    collector: Collector
    frontend: HttpServer
    worker: Process
    http: httpx.Client

    def lines(self) -> list[dict[str, Any]]:
        """Of both logs; what libraries print while they are loaded is no line of a log."""
        texts = [process.log.read_text() for process in (self.frontend, self.worker)]
        lines = [line for text in texts for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def has(self, what: str) -> list[str]:
        """Whatever either process wrote in which something stands."""
        texts = [process.log.read_text() for process in (self.frontend, self.worker)]
        return [line for text in texts for line in text.splitlines() if what in line]


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    discovery, logs = tmp_path_factory.mktemp("discovery"), tmp_path_factory.mktemp("logs")
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    with http_collector() as collector:
        flags = (
            f"--otlp-traces-endpoint={collector.endpoint}",
            *("--log-format=json", "--log-level=debug"),
        )
        env = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        frontend = start_frontend(
            "frontend", discovery, logs, f"--api-key-file={keys}", *flags, env=env
        )
        command = [
            *(sys.executable, "-m", "tests.fakes.lettered_worker"),
            *(f"--model={model}", "--worker-id=w0", discovery_flag(discovery)),
            *(*ENGINE_FLAGS, SERVER_FLAGS[-1], *flags),
        ]
        worker = Process("w0", command, logs / "w0.log", **env)
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            wait_for_workers(frontend, [worker], headers)
            with httpx.Client(base_url=frontend.url, headers=headers, timeout=60) as http:
                yield Traced(collector, frontend, worker, http)
        finally:
            for process in (frontend, worker):
                process.stop()


def chat(*parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": f"{CANARY}?"}, *parts]
    said = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    return said | options


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


async def spans_of(collector: Collector, trace: str) -> dict[str, Span]:
    """Once both processes have sent theirs."""

    def found() -> dict[str, Span]:
        return {span.name: span for span in collector.spans if span.trace_id.hex() == trace}

    await until(lambda: {"answer", "POST /v1/chat/completions"} <= found().keys())
    return found()


async def test_one_request_is_one_trace_over_both_processes(
    traced: Traced, pictures_url: str
) -> None:
    reply = traced.http.post(
        "/v1/chat/completions", json=chat(image(f"{pictures_url}/{CANARY}.png")), headers=PARENT
    )
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    spans = await spans_of(traced.collector, TRACE)
    above = {span.span_id: span.name for span in spans.values()}
    root = "POST /v1/chat/completions"
    assert spans[root].parent_span_id.hex() == PARENT["traceparent"][36:52]
    assert {name: above.get(span.parent_span_id, "") for name, span in spans.items()} == {
        root: "",
        "fetch": root,
        "process_media": root,
        "process": root,
        "hash": root,
        "select": root,
        "match": "select",
        "send": root,
        "worker": root,
        "answer": "worker",
        "receive": "answer",
        "receive_shm": "receive",
        "generate": "answer",
    }
    said = attributes(spans[root])
    assert said["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 3
    assert (said["gen_ai.response.model"], said["mmrouter.worker_id"]) == ("demo", "w0")
    assert said["mmrouter.outcome"] == "ok" and said["http.response.status_code"] == 200
    assert traced.collector.services.keys() == {"mmrouter-frontend", "mmrouter-worker"}
    request = said["gen_ai.request.id"]
    about = [line for line in traced.lines() if line.get("request_id") == request]
    assert {line["process"] for line in about} == {"frontend", "w0"}
    assert {line["trace_id"] for line in about if "took" in line["message"]} == {TRACE}


GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/chat/completions", chat(stream=True, user=CANARY, cache_salt=CANARY)),
    "picture within": (
        "/v1/chat/completions",
        chat(image(data_uri(picture(CANARY)), uuid=CANARY), metadata={CANARY: CANARY}),
    ),
    "completion": (
        "/v1/completions",
        {"model": "demo", "prompt": [CANARY, CANARY], "max_tokens": 2, "user": CANARY},
    ),
    "responses": ("/v1/responses", {"model": "demo", "input": CANARY, "max_output_tokens": 2}),
    "messages": (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": CANARY}],
        },
    ),
    "tokenize": ("/tokenize", {"model": "demo", "prompt": CANARY}),
}

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    name: ("/v1/chat/completions", body)
    for name, body in {
        "missing": chat(image(f"{{pictures}}/missing-{CANARY}.png")),
        "unreachable": chat(image(f"http://127.0.0.1:9/{CANARY}.png")),
        "no such host": chat(image(f"http://{CANARY}.invalid/x.png")),
        "scheme": chat(image(f"gopher://{CANARY}/x.png")),
        "file": chat(image(f"file:///{CANARY}")),
        "password": chat(image(f"http://{CANARY}:{CANARY}@127.0.0.1:9/x.png")),
        "no base64": chat(image(f"data:image/png;base64,{CANARY}%%")),
        "cut off": chat(image(data_uri(picture(CANARY)[:2000]))),
        "no picture": chat(image("data:image/png;base64,Y2FuYXJ5N2YzYQ==")),
        "temperature": chat(temperature=-1, user=CANARY),
        "model": chat(model=CANARY),
        "role": chat(messages=[{"role": CANARY, "content": CANARY}]),
        "too long": chat({"type": "text", "text": f"{CANARY} " * 4000}),
        "regex": chat(structured_outputs={"regex": f"{CANARY}("}),
        "grammar": chat(structured_outputs={"grammar": CANARY}),
        "schema": chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": CANARY, "schema": {"type": CANARY}},
            }
        ),
        "tools": chat(tools=[{"type": "function", "function": {"name": CANARY, "parameters": 1}}]),
        "template": chat(chat_template="{{ " + CANARY),
        "kwargs": chat(mm_processor_kwargs={CANARY: CANARY}),
        "logit bias": chat(logit_bias={CANARY: 1}),
    }.items()
}


async def test_nothing_that_a_user_wrote_is_in_a_line_or_a_span(
    traced: Traced, pictures_url: str
) -> None:
    for name, (path, body) in GOOD.items():
        reply = traced.http.post(path, json=body)
        assert reply.status_code == 200, f"{name}: {reply.text}"
    for name, (path, body) in BAD.items():
        text = json.dumps(body).replace("{pictures}", pictures_url)
        for stream in (False, True):
            reply = traced.http.post(
                path, content=json.dumps(json.loads(text) | {"stream": stream})
            )
            assert 400 <= reply.status_code < 500, f"{name}: {reply.status_code} {reply.text}"
    assert traced.http.post("/v1/chat/completions", content=f'{{"{CANARY}').status_code == 400
    wrong = {"authorization": f"Bearer {CANARY}wrong"}
    assert traced.http.post("/v1/chat/completions", json={}, headers=wrong).status_code == 401
    last = "ab" * 16
    headers = {"traceparent": f"00-{last}-00f067aa0ba902b7-01", "tracestate": f"{CANARY}=1"}
    traced.http.post("/v1/completions", json={"model": "demo", "prompt": "x"}, headers=headers)
    await until(lambda: any(one.trace_id.hex() == last for one in traced.collector.spans))
    await until(lambda: any(one.name == "answer" for one in traced.collector.spans))
    assert len(traced.lines()) > 100
    assert traced.has(CANARY) == []
    said = [span for span in traced.collector.spans if CANARY in str(span.attributes)]
    said += [span for span in traced.collector.spans if CANARY in span.name + str(span.events)]
    assert said == []
