"""Streams whose events pass by tasks and generators have the bytes that vLLM's server writes.

Server, connection, links and workers are real; engines are scripted.
"""

import asyncio
import gc
import itertools
import json
import logging
import re
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from uvicorn.logging import TRACE_LOG_LEVEL
from vllm.entrypoints.generate.base.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.sampling_params import RequestOutputKind
from vllm.utils.async_utils import merge_async_iterators

from backend_worker.engine.vllm_engine import Items
from common.errors import EngineGoneError, OverloadedError
from common.request_plane.protocol import Output, Submit
from frontend.asgi import App, Door, Message, Receive, Scope, Send
from frontend.http.limits.connection import WRITE_NOW
from frontend.http.settings import HttpSettings
from frontend.http.streaming.stream_errors import hold_stream_heads
from frontend.http.streaming.token_streams import Chats, Completions
from frontend.media_limits.budget import Budget, Reservation
from frontend.processing.preprocessor import ProcessedPrompt
from frontend.request.direct_events import DirectEvents
from frontend.request.resume import sampling_of
from frontend.request.settings import FaultSettings
from frontend.request.state import RequestState
from frontend.workers.dispatch import Dispatch
from tests.fakes.model import tokenizer
from tests.fakes.request_lab import ANSWER, Lab, Script
from tests.unit.frontend.http.serving import Client, Serving, post, serving, with_body
from tests.waiting import until

TOKENS = 200
DATE = re.compile(rb"date: [^\r]*")


@pytest.fixture(autouse=True)
def one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event says when its stream was made."""
    for module in (chat_serving, completion_serving):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 7.0))


@pytest.fixture(params=[FaultSettings()], ids=[""])
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    lab = Lab(request.param)
    await lab.add("w0")
    await lab.add("w1")
    yield lab
    await lab.close()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each output that came: whether it went to the client without its request's task."""
    went: list[bool] = []
    put = Dispatch.put

    def watched(dispatch: Dispatch, answer: Any) -> None:
        awaited = dispatch.awaited
        put(dispatch, answer)
        if isinstance(answer, Output):
            went.append(awaited and dispatch.awaited)

    monkeypatch.setattr(Dispatch, "put", watched)
    yield went


async def gone(lab: Lab, went: list[bool], count: int) -> None:
    """Wait until one more output than a count has come and what it made has gone out."""
    async with asyncio.timeout(180):
        while len(went) <= count or not _awaited(lab):  # noqa: ASYNC110 # nobody says so
            await asyncio.sleep(0.0005)


def _awaited(lab: Lab) -> bool:
    dispatches = [each for link in lab.links.values() for each in link._dispatches.values()]
    return all(each.awaited for each in dispatches)


def paced(lab: Lab, went: list[bool], pause: int | None = None) -> Callable[[str], Script]:
    """The model's answer, each token when what the one before it made has gone out.

    Args:
        pause: tokens after which it is silent.
    """

    def speaking(name: str) -> Script:
        async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
            lab.asked.append((name, submit))
            tokens = submit.prompt_token_ids or []
            before = len(went)
            made = lab.model.outputs(tokens, sampling_of(submit))
            for count, output in enumerate(made):
                if count == pause:
                    await asyncio.Event().wait()
                yield output
                if not output.finished:
                    await gone(lab, went, before + count)

        return script

    return speaking


class NoThought(ReasoningParser):
    """Of a model that was told not to reason."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return True

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, *_: Any) -> tuple[str | None, str | None]:
        raise NotImplementedError

    def extract_reasoning_streaming(self, *_: Any) -> DeltaMessage | None:
        raise NotImplementedError


HERMES: Any = ParserManager.get_parser("hermes", None, enable_auto_tools=True)
PARSERS: dict[str, Any] = {
    "tools": HERMES,
    "reasoning": type("Reasons", (DelegatingParser,), {"reasoning_parser_cls": NoThought}),
    "both": type("Both", (HERMES,), {"reasoning_parser_cls": NoThought}),
}


def _serving(kind: Any, *, parses: str = "", comments_s: float = 0.0) -> Any:
    vllms = SimpleNamespace(
        parser_cls=PARSERS.get(parses),
        model_config=None,
        enable_auto_tools=True,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=True,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
        request_logger=None,
        response_role="assistant",
        system_fingerprint="fingerprint",
        return_tokens_as_token_ids=False,
        _extract_prompt_text=lambda _: "hi",
        _include_reasoning_tokens_details=False,
    )
    return kind.of(vllms, True, comments_s)


class Front:
    """vLLM's streams, as a frontend serves them. Bodies are requests of vLLM's API; what is under
    ``parses`` says which parsers the server has, ``logs`` whether it logs answers."""

    def __init__(
        self, lab: Lab, *, direct: bool, logs: bool = False, comments_s: float = 0.0
    ) -> None:
        self._lab = lab
        self._comments_s = comments_s
        self._direct = direct
        self._logs = logs
        routes = [Route(f"/{kind}", self._answer, methods=["POST"]) for kind in ("chat", "text")]
        self._inner: App = Door(Starlette(routes=routes), [hold_stream_heads])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._direct:
            del scope[WRITE_NOW]
        await self._inner(scope, receive, send)

    async def _answer(self, request: Request) -> StreamingResponse:
        body = await request.json()
        parses = body.pop("parses", "")
        stream = self._chat(body, parses) if request.url.path == "/chat" else self._text(body)
        return StreamingResponse(stream, media_type="text/event-stream")

    def _outputs(self, body: dict[str, Any]) -> AsyncGenerator[RequestOutput]:
        return self._lab.generate(
            "id-1",
            temperature=0.0,
            max_tokens=body.get("max_tokens", TOKENS),
            output_kind=RequestOutputKind.DELTA,
            stop=body.get("stop"),
            logprobs=1 if "logprobs" in body else None,
            presence_penalty=body.get("presence_penalty", 0.0),
        )

    def _chat(self, body: dict[str, Any], parses: str) -> AsyncGenerator[str]:
        asked = ChatCompletionRequest(
            model="demo", stream=True, messages=[{"role": "user", "content": "hi"}], **body
        )
        made = _serving(Chats, parses=parses, comments_s=self._comments_s)
        if self._logs:
            made.enable_log_outputs = True
        stream: AsyncGenerator[str] = made.chat_completion_stream_generator(
            asked,
            self._outputs(body),
            "id-1",
            '"delta":{"content":""},',
            [{"role": "assistant", "content": ANSWER[0]}],
            tokenizer(),
            RequestResponseMetadata(request_id="id-1"),
        )
        return stream

    def _text(self, body: dict[str, Any]) -> AsyncGenerator[str]:
        fields: dict[str, Any] = {"prompt": "hi", "max_tokens": TOKENS} | body
        asked = CompletionRequest(model="demo", stream=True, **fields)
        count = len(fields["prompt"]) if isinstance(fields["prompt"], list) else 1
        made = _serving(Completions)
        stream: AsyncGenerator[str] = made.completion_stream_generator(
            asked,
            [{"type": "token", "prompt_token_ids": [1, 2]}] * count,
            merge_async_iterators(*(self._outputs(body) for _ in range(count))),
            "id-1",
            7,
            '"text":"',
            num_prompts=count,
            tokenizer=tokenizer(),
            request_metadata=RequestResponseMetadata(request_id="id-1"),
        )
        return stream


async def ask(served: Serving, path: str, **body: Any) -> Client:
    client = await served.connect()
    await client.send(with_body(json.dumps(body).encode(), path=f"/{path}"))
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return client


async def pieces(client: Client) -> list[bytes]:
    """The body as it was sent: each event by itself."""
    said = []
    while size := int(await client.reader.readuntil(b"\r\n"), 16):
        said.append(await client.reader.readexactly(size))
        await client.reader.readexactly(2)
    return said


async def stream(lab: Lab, path: str, *, direct: bool, **body: Any) -> list[bytes]:
    front = Front(lab, direct=direct, logs=body.pop("logs", False))
    async with serving(front, HttpSettings()) as served:
        return await pieces(await ask(served, path, **body))


def content(events: list[bytes]) -> str:
    said = [json.loads(event[len("data: ") :]) for event in events[:-1]]
    choices = [choice for one in said for choice in one["choices"]]
    return "".join(one["delta"].get("content") or "" for one in choices)


def completion_tokens(events: list[bytes]) -> int:
    return int(json.loads(events[-2][len("data: ") :])["usage"]["completion_tokens"])


USAGE = {"stream_options": {"include_usage": True}}
ALL_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("chat", {}),
    ("chat", USAGE),
    ("chat", ALL_USAGE),
    ("chat", {"stop": ["schön"]}),
    ("chat", {"max_tokens": 9}),
    ("chat", {"parses": "tools"}),
    ("chat", {"parses": "reasoning"} | USAGE),
    ("chat", {"parses": "both"} | USAGE),
    ("chat", {"parses": "both"} | ALL_USAGE),
    ("text", {}),
    ("text", USAGE),
    ("text", ALL_USAGE),
    ("text", {"max_tokens": 9}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"logprobs": True, "top_logprobs": 1}),
    ("chat", {"return_token_ids": True}),
    ("chat", {"echo": True, "add_generation_prompt": True}),
    ("chat", {"parses": "tools", "include_reasoning": False}),
    ("chat", {"parses": "tools", "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("chat", {"logs": True}),
    ("text", {"logprobs": 1}),
    ("text", {"return_token_ids": True}),
    ("text", {"echo": True}),
]


@pytest.mark.parametrize(("path", "body"), PLAIN + OTHERS, ids=str)
async def test_a_stream_has_the_same_bytes(
    lab: Lab, direct: list[bool], path: str, body: dict[str, Any]
) -> None:
    speaking = paced(lab, direct)
    streams, went = [], []
    for name, engine in lab.engines.items():
        engine.script = speaking(name)
    for ours in (False, True):
        direct.clear()
        streams.append(await stream(lab, path, direct=ours, **body))
        went.append(direct.copy())
    theirs, mine = streams
    assert mine == theirs
    assert len(theirs) > 5 and theirs[-1] == b"data: [DONE]\n\n"
    assert not any(went[0])
    count = len(went[1])
    assert count > 5
    plain = (path, body) in PLAIN
    # vLLM's server makes the first event, from which the others are learned, and the last.
    assert went[1] == [False, *[plain] * (count - 2), False]


async def test_of_several_prompts_no_output_overtakes_another(
    lab: Lab, direct: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the second one is still processed, so that there is but one answer."""
    processing, process = itertools.count(), lab.process

    async def slowly(*args: Any) -> ProcessedPrompt:
        if next(processing):
            await until(lambda: len(direct) > 9)
        return await process(*args)

    monkeypatch.setattr(
        lab.runner, "_processor", SimpleNamespace(process=slowly, tokenizer=None, vocabulary_size=9)
    )
    for engine in lab.engines.values():
        engine.script = paced(lab, direct)("worker")
    events = await stream(lab, "text", direct=True, prompt=["hi", "ho"])
    texts = ["", ""]
    for event in events[:-1]:
        (choice,) = json.loads(event[len("data: ") :])["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [ANSWER, ANSWER]
    assert not any(direct)


@pytest.mark.parametrize("penalty", [0.0, 0.5], ids=["continued", "replayed"])
async def test_an_answer_goes_on_at_another_worker(
    lab: Lab, direct: list[bool], penalty: float
) -> None:
    """Whose outputs vLLM's server gets: their text is another than the worker's."""
    speaking = paced(lab, direct)

    def first(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        for name, engine in lab.engines.items():
            engine.script = speaking(name)
        return dying(submit, items)

    async def dying(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        lab.asked.append(("first", submit))
        for count, output in enumerate(lab.model.outputs(lab.model.prompt, sampling_of(submit), 9)):
            yield output
            await gone(lab, direct, count)
        raise EngineGoneError("the worker's engine died")

    for engine in lab.engines.values():
        engine.script = first
    events = await stream(lab, "chat", direct=True, presence_penalty=penalty, **USAGE)
    assert content(events) == ANSWER
    assert direct[1:9] == [True] * 8 and not any(direct[9:])
    assert completion_tokens(events) == len(lab.model.answer)
    assert len(lab.asked) == 2


async def test_who_leaves_stops_the_engine(lab: Lab, direct: list[bool]) -> None:
    for name, engine in lab.engines.items():
        engine.script = paced(lab, direct, pause=6)(name)
    async with serving(Front(lab, direct=True), HttpSettings()) as served:
        client = await ask(served, "chat")
        await until(lambda: len(direct) == 6 and direct[-1])
        await client.close()
        await until(lambda: not any(engine.running for engine in lab.engines.values()))
        await until(lambda: not any(link.active_requests for link in lab.links.values()))
    assert sum(engine.aborted for engine in lab.engines.values()) == 1


async def test_streams_of_one_connection_keep_apart(lab: Lab, direct: list[bool]) -> None:
    """Of requests that were sent ahead, one as old as HTTP allows."""
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 9}, USAGE]
    requests = [with_body(json.dumps(body).encode(), path="/chat") for body in bodies]
    requests[-1] = requests[-1].replace(b"HTTP/1.1", b"HTTP/1.0")
    answers = []
    for ours in (True, False):
        for engine in lab.engines.values():
            engine.script = paced(lab, direct)("worker")
        async with serving(Front(lab, direct=ours), HttpSettings()) as served:
            client = await served.connect()
            await client.send(b"".join(requests))
            answers.append(DATE.sub(b"", await client.until_closed()))
    mine, theirs = answers
    assert mine == theirs
    assert mine.count(b"[DONE]") == 3
    assert sum(direct) > 20


async def test_an_answer_is_free_as_soon_as_it_ends(
    lab: Lab, direct: list[bool], no_garbage_collection: None
) -> None:
    for engine in lab.engines.values():
        engine.script = paced(lab, direct)("worker")
    async with serving(Front(lab, direct=True), HttpSettings()) as served:
        client = await ask(served, "chat")
        await pieces(client)
        assert any(direct)
        await until(lambda: not any(prompt() for prompt in lab.prompts))
        await client.close()
        client = await ask(served, "chat")
        await until(lambda: direct.count(True) > 60)
        await client.close()
        await until(lambda: not any(prompt() for prompt in lab.prompts))
    assert len(lab.prompts) == 2


async def test_a_request_is_free_as_soon_as_the_next_one_comes(no_garbage_collection: None) -> None:
    """Also one that nobody streams an answer to."""
    seen: list[weakref.ref[Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined] # uvicorn's object
        await PlainTextResponse("fine")(scope, receive, send)

    async with serving(app, HttpSettings()) as served:
        client = await served.connect()
        for _ in range(3):
            await client.send(post())
            await client.reply()
        await until(lambda: not any(each() for each in seen[:-1]))
        assert len(seen) == 3


async def test_each_of_many_tokens_is_counted(lab: Lab, direct: list[bool]) -> None:
    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        for number in range(9):
            reason = "length" if number == 8 else None
            one = CompletionOutput(0, "abc"[: number % 4], [1, 2, 3], None, None)
            one.finish_reason = reason
            yield RequestOutput("r", None, [1], None, [one], bool(reason))
            if not reason:
                await gone(lab, direct, number)

    for engine in lab.engines.values():
        engine.script = script
    for path in ("chat", "text"):
        direct.clear()
        events = await stream(lab, path, direct=True, return_token_ids=False, **USAGE)
        assert completion_tokens(events) == 27
        assert direct == [False, *[True] * 7, False]


async def test_a_client_that_reads_slowly_gets_all_of_it(lab: Lab, direct: list[bool]) -> None:
    """What can't be written at once waits for the task, and nothing overtakes it."""
    texts = [f"{number:05}" + "x" * 100_000 for number in range(200)]
    tokens = [1] * 25  # of one text: no worker says more than a token can have

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        for number, text in enumerate(texts):
            last = number == len(texts) - 1
            reason = "stop" if last else None
            one = CompletionOutput(0, text, tokens, None, None, finish_reason=reason)
            yield RequestOutput("r", None, [1], None, [one], last)
            if number < 5:
                await gone(lab, direct, number)

    for engine in lab.engines.values():
        engine.script = script
    async with serving(Front(lab, direct=True), HttpSettings()) as served:
        client = await ask(served, "chat", max_tokens=len(tokens) * len(texts))
        await until(lambda: len(direct) == len(texts))
        assert any(direct) and not all(direct[1:-1])
        assert content(await pieces(client)) == "".join(texts)


async def test_an_output_that_cannot_be_written_ends_its_own_request_only(
    lab: Lab, direct: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = RequestState.take

    def odd(state: RequestState, output: Output) -> bool:
        if state.client_id == "odd":
            raise RuntimeError("what nobody expected")
        return take(state, output)

    monkeypatch.setattr(RequestState, "take", odd)
    for name, engine in lab.engines.items():
        engine.script = paced(lab, direct)(name)
    results = await asyncio.gather(
        lab.ask(name="odd"), lab.ask(name="even"), return_exceptions=True
    )
    assert isinstance(results[0], RuntimeError)
    assert isinstance(results[1], list) and results[1][-1].finished
    await until(lambda: not any(engine.running for engine in lab.engines.values()))
    assert await lab.ask(name="even")


@pytest.mark.parametrize("lab", [FaultSettings(output_timeout_s=60)], ids=[""], indirect=True)
async def test_outputs_whose_worker_may_be_late_are_waited_for(
    lab: Lab, direct: list[bool]
) -> None:
    for name, engine in lab.engines.items():
        engine.script = paced(lab, direct)(name)
    assert content(await stream(lab, "chat", direct=True)) == ANSWER
    assert not any(direct)


@pytest.mark.parametrize("lab", [FaultSettings(request_timeout_s=1)], ids=[""], indirect=True)
async def test_a_request_may_be_late_all_the_same(lab: Lab, direct: list[bool]) -> None:
    for name, engine in lab.engines.items():
        engine.script = paced(lab, direct, pause=6)(name)
    events = await stream(lab, "chat", direct=True)
    assert b"not done within 1 s" in events[-2] or b"time was over" in events[-2]
    assert any(direct)
    await until(lambda: not any(engine.running for engine in lab.engines.values()))


EVENT = (
    b'data: {"id":"a","object":"o","created":7,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"b"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
USAGE_SAID = (
    b'{"prompt_tokens":3,"total_tokens":7,"completion_tokens":4,"completion_tokens_details":null}'
)


def _writing(written: list[bytes]) -> Callable[[bytes], bool]:
    def write(piece: bytes) -> bool:
        written.append(piece)
        return True

    return write


def learned(event: bytes, text: str = "b", calls: int = 1) -> list[bytes]:
    """What is written of a text of "x", the fifth token, once an event of the fourth was seen."""
    written: list[bytes] = []
    events = DirectEvents(_writing(written))
    events.allow()
    for _ in range(calls):
        events.claim()
    events.gives(text, 4)
    events.saw(event)
    events.send("x", 5)
    return written


def test_events_are_written_in_the_likeness_of_one() -> None:
    assert learned(EVENT) == [EVENT.replace(b'"b"', b'"x"')]


def test_tokens_are_counted_in_the_likeness_of_one() -> None:
    event = EVENT.replace(b"}]}", b'}],"usage":' + USAGE_SAID + b"}")
    counted = event.replace(b'"b"', b'"x"').replace(b":7,", b":8,").replace(b":4,", b":5,")
    assert learned(event) == [counted.replace(b'"created":8', b'"created":7')]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"b"', b'"c"'),
        (b'"content":"b"', b'"role":"assistant","content":"b"'),
        (b'"content":"b"', b'"reasoning":"b"'),
        (b'"index":0', b'"index":1'),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b'"logprobs":null', b'"logprobs":{"content":[]}'),
        (b'"token_ids":null', b'"token_ids":[1]'),
        (b"}]}", b'}],"usage":{"prompt_tokens":1}}'),
        (b"}]}", b'}],"usage":7}'),
        *(
            (b"}]}", b'}],"usage":' + each + b"}")
            for each in (
                b'{"prompt_tokens":3,"total_tokens":8,"completion_tokens":5}',
                b'{"prompt_tokens":3,"total_tokens":8,"completion_tokens":4}',
                b'{"prompt_tokens":3.0,"total_tokens":7.0,"completion_tokens":4}',
                b'{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}',
                USAGE_SAID.replace(b"null", b'{"reasoning_tokens":0}'),
            )
        ),
        (b"}]}", b'}],"system_fingerprint":"f"}'),
        (b"}]}", b'},{"index":1}]}'),
        (b"[{", b"[null,{"),
        (b"\n\n", b"\n\ndata: {}\n\n"),
        (b"\n\n", b"\n"),
        (b"data: ", b"event: x\ndata: "),
        (b'data: {"id"', b'data: [{"id"'),
        (EVENT, b"data: [DONE]\n\n"),
        (EVENT, b'data: {"choices":7}\n\n'),
        (EVENT, b'data: {"choices":[7]}\n\n'),
        (EVENT, b"data: 7\n\n"),
        (EVENT, b""),
    ],
    ids=str,
)
def test_an_event_that_says_more_is_no_model(old: bytes, new: bytes) -> None:
    assert EVENT.count(old) == 1
    assert learned(EVENT.replace(old, new)) == []


def test_of_several_calls_none_is_written_past_vllms_server() -> None:
    assert learned(EVENT, calls=2) == []


def test_half_of_a_pair_is_left_to_vllms_server() -> None:
    written: list[bytes] = []
    events = DirectEvents(_writing(written))
    events.allow()
    events.claim()
    events.gives("b", 1)
    events.saw(EVENT)
    assert not events.send("\ud83d", 2)
    assert written == []


def test_a_name_that_looks_like_an_event_is_none() -> None:
    name = json.dumps('"delta":{"content":"b"}').encode()
    event = EVENT.replace(b'"m"', name)
    assert learned(event) == [event.replace(b'"content":"b"}', b'"content":"x"}')]


def said(text: str, tokens: list[int], reason: str | None = None, **more: Any) -> RequestOutput:
    one = CompletionOutput(0, text, tokens, None, None, finish_reason=reason, **more)
    return RequestOutput("r", None, [1], None, [one], bool(reason))


END = said("end", [2], "stop")


def say(
    lab: Lab,
    went: list[bool],
    outputs: Sequence[RequestOutput],
    once: Callable[[], object] = lambda: True,
) -> None:
    """Let all engines answer so, each output when what the one before it made has gone out.

    Args:
        once: the first one when this holds.
    """

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        await until(once)
        for number, output in enumerate(outputs):
            yield output
            if number + 1 < len(outputs):
                await gone(lab, went, number)

    for engine in lab.engines.values():
        engine.script = script


def of_index(index: int) -> RequestOutput:
    one = CompletionOutput(index, "x", [1], None, None)
    return RequestOutput("r", None, [1], None, [one], False)


ODD: dict[str, list[RequestOutput]] = {
    "a reason to stop, and it goes on": [
        said("a", [1]), said("b", [1], stop_reason="x"), said("c", [1], "stop"),
    ],
    "a text without tokens, and then nothing of either": [
        said("a", []), said("", []), said("c", [1], "stop"),
    ],
    "an end without a word": [
        said("a", [1]), said("b", [1, 2, 3]), RequestOutput("r", None, [1], None, [], True),
    ],
    "an answer that was not asked for": [
        said("a", [1]), said("b", [1, 2, 3]), of_index(-1), said("c", [1], "stop"),
    ],
    "another one": [said("a", [1]), said("b", [1]), of_index(1), said("c", [1], "stop")],
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_an_odd_workers_stream_has_the_same_bytes(
    lab: Lab, direct: list[bool], odd: list[RequestOutput]
) -> None:
    streams: list[list[bytes]] = []
    for ours in (False, True):
        direct.clear()

        say(lab, direct, odd)
        streams.append(await stream(lab, "text", direct=ours, **USAGE))
    theirs, mine = streams
    assert mine == theirs and len(mine) > 1


async def test_comments_while_a_stream_waits_leave_its_events_direct(
    lab: Lab, direct: list[bool]
) -> None:
    comment = SSE_KEEP_ALIVE_COMMENT.encode()
    comments = 0

    class Commented(Front):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def count(message: Message) -> None:
                nonlocal comments
                comments += message.get("body") == comment
                await send(message)

            await super().__call__(scope, receive, count)

    say(lab, direct, [*(said("word ", [1]) for _ in range(20)), END], once=lambda: comments > 9)
    async with serving(Commented(lab, direct=True, comments_s=0.02), HttpSettings()) as served:
        await pieces(await ask(served, "chat"))
    assert any(direct)


async def test_uvicorns_trace_has_every_piece(
    lab: Lab, direct: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    say(lab, direct, [*(said("word ", [1]) for _ in range(9)), END])
    front = Front(lab, direct=True)
    with caplog.at_level(TRACE_LOG_LEVEL, "uvicorn.asgi"):
        async with serving(front, HttpSettings(), "--uvicorn-log-level=trace") as served:
            logging.getLogger("uvicorn.asgi").addHandler(caplog.handler)
            events = await pieces(await ask(served, "chat"))
    logging.getLogger("uvicorn.asgi").removeHandler(caplog.handler)
    traced = sum("http.response.body" in each.getMessage() for each in caplog.records)
    assert traced >= len(events) > 9


async def test_a_streams_request_is_free_though_others_use_the_connection_that_it_opened(
    no_garbage_collection: None,
) -> None:
    """Who keeps a connection keeps the context in which it was opened."""
    seen: list[weakref.ref[Any]] = []

    async def picture(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("a picture")(scope, receive, send)

    async with serving(picture, HttpSettings()) as pictures, aiohttp.ClientSession() as session:

        async def stream_after_picture(scope: Scope, receive: Receive, send: Send) -> None:
            async with session.get(f"http://127.0.0.1:{pictures.port}/") as reply:
                await reply.read()

            async def events() -> AsyncGenerator[str]:
                yield "data: 1\n\n"
                yield "data: 2\n\n"

            await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)

        early = Door(stream_after_picture, [hold_stream_heads])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(weakref.ref(receive.__self__))  # type: ignore[attr-defined]
            await early(scope, receive, send)

        async with serving(app, HttpSettings()) as served:
            for _ in range(3):
                client = await served.connect()
                await client.send(post())
                await client.reader.readuntil(b"0\r\n\r\n")
                await client.close()
            await served.until_nothing_is_left()
            gc.collect()
            assert [each() for each in seen] == [None, None, None]


@pytest.mark.parametrize("kind", list(RequestOutputKind), ids=str)
async def test_who_left_holds_no_media_while_the_worker_has_yet_to_hear_of_it(
    kind: RequestOutputKind,
) -> None:
    """The answers of an aborted request are dropped where they come in, so until the last one has
    come its dispatch is there. It does not keep the prompt.
    """
    lab = Lab(FaultSettings())
    await lab.add("w0")
    heard, slow = asyncio.Event(), asyncio.Event()
    budget = Budget(10, 1, "pictures")
    process = lab.process

    async def with_media(*args: Any) -> ProcessedPrompt:
        prompt = await process(*args)
        reservation = Reservation(budget)
        reservation.grow(10)
        reservation.keep_with(prompt)
        return prompt

    lab.runner._processor = SimpleNamespace(process=with_media, tokenizer=None, vocabulary_size=9)

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        try:
            yield said("a", [1])
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.set()
            await slow.wait()
            raise

    lab.engines["w0"].script = script
    asking = asyncio.create_task(lab.ask(output_kind=kind))
    await until(lambda: lab.engines["w0"].running)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    del asking
    await heard.wait()

    def free() -> bool:
        gc.collect()
        try:
            Reservation(budget).grow(10)  # another client's
        except OverloadedError:
            return False
        return True

    try:
        await until(free)
    finally:
        slow.set()
        await until(lambda: not lab.engines["w0"].running)
        await lab.close()
