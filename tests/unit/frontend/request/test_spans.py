"""What the trace of a request says: one span of it, one for each worker that had it, the worker's
own beneath, over real sockets and whatever happens."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import SpanAttributes

from backend_worker.plane.request import WorkerRequest
from common.errors import EngineFailedError, EngineGoneError, NoWorkerError
from common.identity import RequestId, WorkerId
from common.observability.log_lines import current_request
from common.observability.tracing import span_of_request
from common.request_plane.protocol import Submit
from frontend.request import spans as names
from frontend.request.settings import FaultSettings
from frontend.request.spans import new_request_id
from frontend.request_context import Tenant, begin
from tests.fakes.engine import never
from tests.fakes.model import ScriptedModel
from tests.fakes.plane import collect
from tests.fakes.request_lab import ANSWER, Lab
from tests.fakes.spans import Recorded, recorded_spans
from tests.waiting import until

GONE = EngineGoneError("canary: the worker's engine died")
CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"
WHOLE = RequestOutputKind.FINAL_ONLY


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    lab = Lab(FaultSettings())
    await lab.add("w0")
    await lab.add("w1")
    yield lab
    await lab.close()


async def asked(lab: Lab, **params: Any) -> None:
    with span_of_request("request", {"traceparent": CLIENT}):
        await lab.ask(**params)


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def ended(recorded: Recorded, lab: Lab) -> None:
    """Workers say the end of a request before they have put it away."""
    await until(lambda: not any(one.active_requests for one in lab.services.values()))
    await until(lambda: recorded.named("answer"))


def test_names_are_vllms() -> None:
    ours = [value for name, value in vars(names).items() if name.isupper() and name != "PARAMETERS"]
    vllms = {value for name, value in vars(SpanAttributes).items() if name.isupper()}
    assert len(ours) == 6 and {*ours, *names.PARAMETERS} <= vllms


async def test_each_request_is_a_line_of_the_log(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.model = ScriptedModel(ANSWER)
    caplog.set_level("INFO", "frontend.request.spans")
    begin().tenant = Tenant("0123456789abcdef")
    await lab.ask(output_kind=WHOLE)
    (line,) = (one for one in caplog.messages if " in all " in one)
    told = re.fullmatch(
        r"ok at w[01]: (\d+) prompt tokens, 0 cached, \d+ media; (\d+) output tokens; "
        r"first output after \d\.\d{3} s, in all \d\.\d{3} s; tenant 01234567",
        line,
    )
    assert told and int(told[1]) > 0 and int(told[2]) >= len(ANSWER)


async def test_a_request_of_many_calls_is_one_line(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """Of prompts, or of inputs to pool, a client may send thousands."""
    caplog.set_level("INFO", "frontend.request.spans")
    begin()
    for number in range(3):
        await lab.ask(name=f"r{number}", output_kind=WHOLE)
    assert len([one for one in caplog.messages if " in all " in one]) == 1


async def test_a_request_that_no_worker_has_had_is_a_line_too(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "frontend.request.spans")
    lab.fleet.check = nobody
    with pytest.raises(GracefulHTTPError):
        await lab.ask()
    (line,) = (one for one in caplog.messages if " in all " in one)
    assert line.startswith("NoWorkerError at no worker: ") and "tenant" not in line


def nobody() -> None:
    raise NoWorkerError("no worker is available")


async def test_one_request(lab: Lab) -> None:
    lab.model = ScriptedModel(ANSWER)
    with recorded_spans() as recorded:
        await asked(lab, temperature=0.0, output_kind=WHOLE)
        await ended(recorded, lab)
    assert {f"{trace:032x}" for trace in recorded.traces()} == {"a" * 32}
    above = {one.name: recorded.parent(one) for one in recorded.spans}
    assert above == {
        "request": "",
        "process": "request",
        "hash": "request",
        "select": "request",
        "match": "select",
        "send": "request",
        "worker": "request",
        "answer": "worker",
        "receive": "answer",
        "generate": "answer",
    }
    root, attempt = said(recorded.one("request")), said(recorded.one("worker"))
    ((name, submit),) = lab.asked
    assert root["gen_ai.usage.prompt_tokens"] == len(lab.model.prompt)
    assert root["gen_ai.usage.completion_tokens"] == len(lab.model.answer)
    assert root["gen_ai.request.id"] == submit.request_id
    assert (root["gen_ai.request.max_tokens"], root["gen_ai.request.n"]) == (200, 1)
    assert 0 < root["gen_ai.latency.time_to_first_token"] < root["gen_ai.latency.e2e"]
    assert (root["mmrouter.outcome"], root["mmrouter.workers"]) == ("ok", (name,))
    for span in (root, attempt):
        assert span["mmrouter.worker_id"] == name and span["mmrouter.attempt"] == 1
        assert span["mmrouter.predicted_cached_tokens"] == 0
        assert span["mmrouter.realised_cached_tokens"] == 0
        assert span["mmrouter.reason"] and span["mmrouter.index"]
    assert all(span.status.is_unset for span in recorded.spans)
    assert ANSWER[:5] not in str([span.to_json() for span in recorded.spans])


async def test_vllms_span_is_the_workers_child(lab: Lab) -> None:
    with recorded_spans() as recorded:
        await asked(lab)
        await ended(recorded, lab)
    ((_, submit),) = lab.asked
    worker = recorded.one("worker").context
    assert worker is not None and submit.trace_headers is not None
    assert submit.trace_headers["traceparent"] == f"00-{'a' * 32}-{worker.span_id:016x}-01"


@pytest.mark.parametrize(("steps", "event", "how"), [(0, "retry", "retry"), (5, "migration", "")])
async def test_one_that_moved_says_both_workers(lab: Lab, steps: int, event: str, how: str) -> None:
    lab.disturb(steps, GONE)
    with recorded_spans() as recorded:
        await asked(lab)
        await until(lambda: len(recorded.named("answer")) == 2)
    (first, _), (second, _) = lab.asked
    one, other = (said(span) for span in recorded.named("worker"))
    assert (one["mmrouter.worker_id"], one["mmrouter.attempt"]) == (first, 1)
    assert (other["mmrouter.worker_id"], other["mmrouter.attempt"]) == (second, 2)
    assert one["error.type"] and "error.type" not in other
    root = recorded.one("request")
    assert said(root)["mmrouter.workers"] == (first, second)
    assert said(root)["mmrouter.worker_id"] == second
    (happened,) = root.events
    assert happened.name == event and happened.attributes is not None
    assert happened.attributes["mmrouter.worker_id"] == first
    assert happened.attributes["mmrouter.how"] == how or not how
    assert said(root)["gen_ai.usage.completion_tokens"] == len(lab.model.answer)
    assert [recorded.parent(span) for span in recorded.named("answer")] == ["worker"] * 2
    failed = [span for span in recorded.named("answer") if "error.type" in said(span)]
    assert [said(span)["error.type"] for span in failed] == ["engine_dead"]
    assert "canary" not in str([span.to_json() for span in recorded.spans])


async def test_one_that_failed_says_of_what_kind(lab: Lab) -> None:
    for name, engine in lab.engines.items():
        engine.script = lab.speaking(name, 3, EngineFailedError("canary"))
    with recorded_spans() as recorded:
        with pytest.raises(Exception, match="canary"):
            await asked(lab, temperature=0.8, presence_penalty=0.5)
        await ended(recorded, lab)
    root = said(recorded.one("request"))
    assert root["mmrouter.outcome"] == said(recorded.one("worker"))["error.type"]
    assert root["gen_ai.usage.completion_tokens"] == 3
    assert "canary" not in str([span.to_json() for span in recorded.spans])


@pytest.mark.parametrize("steps", [0, 6])
async def test_whoever_leaves_ends_all_spans(lab: Lab, steps: int) -> None:
    lab.disturb(steps)
    with recorded_spans() as recorded:
        asking = asyncio.create_task(asked(lab))
        await until(lambda: any(engine.running for engine in lab.engines.values()))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await ended(recorded, lab)
    assert said(recorded.one("request"))["mmrouter.outcome"] == "aborted"
    assert said(recorded.one("worker"))["error.type"] in ("CancelledError", "aborted")
    assert said(recorded.one("answer"))["error.type"] == "aborted"
    assert recorded.parent(recorded.one("generate")) == "answer"


async def test_requests_beside_each_other_have_traces_of_their_own(lab: Lab) -> None:
    async def one(number: int) -> None:
        with span_of_request(f"request {number}", {}):
            await lab.ask(name=f"r{number}")

    with recorded_spans() as recorded:
        await asyncio.gather(*(one(number) for number in range(12)))
        await until(lambda: len(recorded.named("answer")) == 12)
    assert len(recorded.traces()) == 12
    for trace in recorded.traces():
        mine = [span.name for span in recorded.spans if span.context.trace_id == trace]
        assert len(mine) == 10 and len(set(mine)) == 10


async def test_two_calls_of_one_request_are_added_up(lab: Lab) -> None:
    with recorded_spans() as recorded:
        with span_of_request("request", {}):
            await asyncio.gather(lab.ask(name="a"), lab.ask(name="b"))
        await until(lambda: len(recorded.named("answer")) == 2)
    root = said(recorded.one("request"))
    assert root["gen_ai.usage.prompt_tokens"] == 2 * len(lab.model.prompt)
    assert root["gen_ai.usage.completion_tokens"] == 2 * len(lab.model.answer)


async def test_without_a_trace_the_clients_is_passed_on_if_it_is_one(lab: Lab) -> None:
    await lab.ask()
    assert lab.asked[0][1].trace_headers is None
    spans = names.CallSpans(new_request_id(), {"traceparent": CLIENT, "tracestate": "x" * 10_000})
    assert spans.headers() == {"traceparent": CLIENT}
    assert names.CallSpans(new_request_id(), {"traceparent": "x" * 10_000}).headers() is None


async def test_a_late_request(lab: Lab) -> None:
    lab.runner._faults = FaultSettings(request_timeout_s=0.5)
    lab.disturb(2)
    with recorded_spans() as recorded:
        with pytest.raises(GracefulHTTPError):
            await asked(lab)
        await ended(recorded, lab)
    assert said(recorded.one("answer"))["error.type"] in ("late", "aborted")
    assert said(recorded.one("request"))["error.type"] == "GracefulHTTPError"


async def test_a_late_request_is_late_also_if_it_is_aborted_before_it_ends(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides look at the clock, and the worker's look comes first."""
    late, go_on = asyncio.Event(), asyncio.Event()
    acknowledge = WorkerRequest._ack

    async def ack(request: WorkerRequest) -> None:
        late.set()
        await go_on.wait()
        await acknowledge(request)

    monkeypatch.setattr(WorkerRequest, "_ack", ack)
    lab.engines["w0"].script = never
    headers = {"traceparent": CLIENT}
    submit = Submit(
        RequestId("r"), [1], SamplingParams(), [], [], timeout_s=0.01, trace_headers=headers
    )
    with recorded_spans() as recorded:
        asking = asyncio.create_task(collect(lab.links[WorkerId("w0")].dispatch(submit, [])))
        await late.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: recorded.named("answer"))
        go_on.set()
        await ended(recorded, lab)
    assert said(recorded.one("answer"))["error.type"] == "late"


def test_ids_of_one_http_request_begin_alike() -> None:
    alone = {new_request_id() for _ in range(10)}
    assert len(alone) == 10 and {len(one) for one in alone} == {32}
    assert current_request.get() == ""
