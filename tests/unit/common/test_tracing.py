"""Stages as spans and ranges: whose child each is, whatever runs beside it; and what strangers may
say of their trace."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import nvtx
import pytest
from hypothesis import given
from hypothesis import strategies as any_
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from common.errors import ConfigurationError
from common.observability import telemetry
from common.observability.telemetry import stage
from common.observability.tracing import (
    MAX_STATE_LEN,
    TraceHeaders,
    clean,
    current,
    headers_onwards,
    link_to,
    of_http,
    span_of_request,
)
from setup.tests_map import PACKAGES, ROOT
from tests.fakes.spans import recorded_spans

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"

HOSTILE = [
    "",
    "00",
    "hello",
    PARENT + "\n",
    PARENT + "-extra" + "x" * 10_000,
    "ff" + PARENT[2:],
    PARENT.upper(),
    f"00-{'0' * 32}-{'b' * 16}-01",
    f"00-{'a' * 32}-{'0' * 16}-01",
    f"00-{'a' * 31}-{'b' * 16}-01",
    f"00-{'a' * 32}-{'b' * 16}-0g",
    "00-" + "\u0661" * 32 + f"-{'b' * 16}-01",
    "\0" * 55,
    "-" * 100_000,
]


def test_nothing_is_traced_unless_somebody_asked() -> None:
    with span_of_request("request", {"traceparent": PARENT}) as span, stage("a") as inner:
        assert span is None and inner is None and current() is None
        assert headers_onwards({"traceparent": PARENT}) == {"traceparent": PARENT}
    with recorded_spans() as recorded:
        with stage("warm-up, which is no request's"):
            pass
        assert recorded.spans == []


def test_stages_are_children_of_each_other_and_errors_have_a_type_only() -> None:
    with recorded_spans() as recorded:
        with span_of_request("request", {"traceparent": PARENT}):
            with stage("outer"), pytest.raises(ValueError), stage("inner"):
                raise ValueError("what the user wrote")
            with stage("later"):
                pass
        assert current() is None
    assert recorded.names == ["inner", "outer", "later", "request"]
    inner, outer, later, request = recorded.spans
    assert [recorded.parent(one) for one in (inner, outer, later)] == [
        "outer",
        "request",
        "request",
    ]
    assert request.parent is not None and f"{request.parent.span_id:016x}" == "b" * 16
    assert {f"{trace:032x}" for trace in recorded.traces()} == {"a" * 32}
    assert inner.attributes == {"error.type": "ValueError"} and not inner.status.is_ok
    assert inner.events == () and inner.status.description is None
    assert outer.status.is_unset


def test_a_function_may_be_a_stage_again_and_again_and_within_itself() -> None:
    @stage("step")
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)

    with recorded_spans() as recorded, span_of_request("request", {}):
        down(2)
        down(0)
    assert [recorded.parent(one) for one in recorded.named("step")] == [
        "step",
        "step",
        "request",
        "request",
    ]


async def test_requests_beside_each_other_keep_their_traces() -> None:
    async def request(number: int) -> None:
        with span_of_request(f"request {number}", {}):
            for _ in range(3):
                with stage(f"stage {number}"):
                    await asyncio.sleep(0)
                    await asyncio.gather(*(part(number) for _ in range(2)))
                await asyncio.to_thread(blocking, number)

    async def part(number: int) -> None:
        with stage(f"part {number}"):
            await asyncio.sleep(0)

    def blocking(number: int) -> None:
        with stage(f"thread {number}"):
            pass

    with recorded_spans() as recorded:
        await asyncio.gather(*(request(number) for number in range(8)))
    assert len(recorded.traces()) == 8
    for span in recorded.spans:
        kind, number = span.name.split()
        above = {"request": "", "stage": "request", "part": "stage", "thread": "request"}[kind]
        assert recorded.parent(span) == (f"{above} {number}" if above else "")


async def test_a_stage_that_is_cancelled_ends_and_is_nobodys_parent_afterwards() -> None:
    async def request() -> None:
        with span_of_request("request", {}), stage("stuck"):
            await asyncio.Event().wait()

    with recorded_spans() as recorded:
        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert recorded.names == ["stuck", "request"]
        assert recorded.one("stuck").attributes == {"error.type": "CancelledError"}


async def test_a_generator_that_another_task_closes_leaves_that_task_alone() -> None:
    async def steps() -> AsyncGenerator[int]:
        with stage("generate"):
            yield 1
            yield 2

    with recorded_spans() as recorded:

        async def begin(generator: AsyncGenerator[int]) -> None:
            with span_of_request("request", {}):
                assert await anext(generator) == 1

        generator = steps()
        await asyncio.create_task(begin(generator))
        with span_of_request("other", {}):
            async with aclosing(generator):
                pass
        with stage("nobody's"):
            pass
        assert sorted(recorded.names) == ["generate", "other", "request"]
        assert recorded.parent(recorded.one("generate")) == "request"


def test_what_is_not_sampled_makes_no_spans_and_is_passed_on_so() -> None:
    with recorded_spans(ParentBased(ALWAYS_OFF)) as recorded:
        for headers in ({}, {"traceparent": UNSAMPLED}):
            with span_of_request("request", headers), stage("a") as span:
                assert span is None
                told = headers_onwards(None)
                assert told is not None and not int(told["traceparent"][-2:], 16) & 1
        assert recorded.spans == []
        with span_of_request("request", {"traceparent": PARENT}), stage("a"):
            pass
        assert recorded.names == ["a", "request"]


def test_one_that_did_the_work_of_two_is_linked() -> None:
    with recorded_spans() as recorded:
        with span_of_request("first", {}) as first:
            link_to(first)  # itself
        with span_of_request("second", {}):
            link_to(None)
            link_to(first)
    link_to(first)
    (link,) = recorded.one("second").links
    assert link.context == recorded.one("first").context
    assert recorded.one("first").links == ()


@pytest.mark.parametrize("parent", HOSTILE)
def test_a_parent_that_is_none_is_passed_over(parent: str) -> None:
    assert clean({"traceparent": parent, "tracestate": "a=b"}) == {}
    pairs = [(b"traceparent", parent.encode("utf-8"))]
    assert of_http(pairs) == {}
    with recorded_spans() as recorded:
        with span_of_request("request", {"traceparent": parent}):
            pass
        assert recorded.one("request").parent is None


@pytest.mark.parametrize("state", ["x" * (MAX_STATE_LEN + 1), "a=b," * 2500, "a=\0", "a=\n", "é"])
def test_a_state_that_is_too_long_or_no_text_is_left_out(state: str) -> None:
    assert clean({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


@pytest.mark.parametrize("state", ["", "a=b", "a=b,c=d", "=", ",,,", "a=b" * 100, "=" * 512])
def test_a_state_of_any_kind_does_no_harm(state: str) -> None:
    with recorded_spans() as recorded:
        with span_of_request("request", {"traceparent": PARENT, "tracestate": state}):
            told = headers_onwards(None)
        assert told is not None and told["traceparent"].startswith(f"00-{'a' * 32}-")
        assert recorded.one("request").parent is not None


@given(any_.text(), any_.text())
def test_any_text_at_all(parent: str, state: str) -> None:
    assert clean({"traceparent": parent, "tracestate": state}) == {}
    kept = clean({"traceparent": PARENT, "tracestate": state})
    assert msgspec.convert(kept, TraceHeaders) == kept and kept["traceparent"] == PARENT


@given(any_.lists(any_.tuples(any_.sampled_from([b"traceparent", b"tracestate"]), any_.binary())))
def test_any_headers_at_all(headers: list[tuple[bytes, bytes]]) -> None:
    assert of_http(headers) == {}
    kept = of_http([*headers, (b"traceparent", PARENT.encode())])
    assert kept.get("traceparent") in (None, PARENT)


def test_headers_of_http_that_come_more_than_once() -> None:
    parent = (b"traceparent", PARENT.encode())
    assert of_http([parent, (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]) == {
        "traceparent": PARENT,
        "tracestate": "a=1,b=2",
    }
    assert of_http([parent, parent, (b"tracestate", b"a=1")]) == {}
    assert of_http([parent, *[(b"tracestate", b"a=1")] * 1000]) == {"traceparent": PARENT}


@pytest.mark.parametrize(
    "headers",
    [{"traceparent": "x" * 10_000}, {"baggage-of-mine": "x"}, {"a": "", "b": "", "c": ""}],
)
def test_a_message_has_no_room_for_more(headers: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(headers, TraceHeaders)


class Ranges:
    """NVTX, as far as stages use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[int] = []
        self.seen: list[tuple[str, str]] = []
        monkeypatch.setattr(nvtx, "start_range", self._start)
        monkeypatch.setattr(nvtx, "end_range", self.open.remove)
        monkeypatch.setattr(telemetry, "_nvtx", nvtx)

    def _start(self, message: str, *, domain: str) -> int:
        self.seen.append((message, domain))
        self.open.append(len(self.seen))
        return len(self.seen)


async def test_ranges_overlap_in_a_domain_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges(monkeypatch)
    first_may_end = asyncio.Event()

    async def first() -> None:
        with stage("fetch"):
            await first_may_end.wait()

    async def second() -> None:
        with pytest.raises(KeyError), stage("process"):
            first_may_end.set()
            await asyncio.sleep(0)
            raise KeyError

    await asyncio.gather(first(), second())
    assert ranges.seen == [("fetch", "mmrouter"), ("process", "mmrouter")]
    assert ranges.open == []


def test_the_real_nvtx_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_nvtx", nvtx)
    with stage("a"), stage("b"):
        pass


def test_nvtx_without_its_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ConfigurationError, match=r"--nvtx needs a package .*: pip install nvtx"):
        telemetry.enable_nvtx()
    with stage("a"):
        pass


def test_every_stage_of_the_code_is_on_the_page_of_metrics() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = {
        name for path in files for name in re.findall(r'stage\("([a-z_]+)"\)', path.read_text())
    }
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert {"fetch", "process", "hash", "match", "select", "send", "receive", "inject"} <= names
    assert not {name for name in names if f"`{name}`" not in page}
