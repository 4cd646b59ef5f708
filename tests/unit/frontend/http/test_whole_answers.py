"""Large parts of answers are made while these are sent, in threads, and are vLLM's."""

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from frontend.asgi import Door, Receive, Scope, Send
from frontend.http.streaming.stream_errors import Responses
from frontend.http.streaming.token_streams import Batches, Chats, Completions, Tokens
from frontend.http.streaming.whole_answers import (
    MANY,
    SLICE,
    DeferredParts,
    begin_whole_answer,
    columns,
    defer_prompt_logprobs,
    entries,
    send_deferred_parts,
)
from frontend.request_context import current_context
from tests.unit.frontend.http.asking import asking

CANDIDATES = 5
TOKENS = [*range(MANY // CANDIDATES + 2)]
LOGPROBS = [
    {
        token + n: Logprob(-0.5 * n, n, f'"{token + n}"é' if token != 3 else "")
        for n in range(CANDIDATES)
    }
    for token in TOKENS
]
ASKED: dict[str, Any] = {"token_ids": TOKENS, "tokenizer": None}


def of_chats(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        return serving(kind)._create_chat_logprobs(
            top_logprobs=LOGPROBS, num_output_top_logprobs=3, **ASKED
        )

    return make


def of_completions(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        return serving(kind)._create_completion_logprobs(
            top_logprobs=LOGPROBS, num_output_top_logprobs=3, initial_text_offset=7, **ASKED
        )

    return make


def of_responses(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        return serving(kind)._create_response_logprobs(logprobs=LOGPROBS, top_logprobs=3, **ASKED)

    return make


def of_tokens(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        return serving(kind)._create_tokens_logprobs(token_ids=TOKENS, top_logprobs=LOGPROBS)

    return make


def of_texts(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        return serving(kind)._create_text_logprobs(top_logprobs=LOGPROBS, **ASKED)

    return make


def serving(kind: type) -> Any:
    made: Any = object.__new__(kind)
    made.return_tokens_as_token_ids = False
    return made


def dumped(value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    return [each.model_dump(mode="json") for each in values]


async def answer_of(make: Callable[[], Any], *, whole: bool = True) -> httpx.Response:
    """What a client gets of an app that answers with what is made."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if whole:
            begin_whole_answer()
        answer = JSONResponse({"before": "é", "made": dumped(make()), "after": 1})
        await answer(scope, receive, send)

    transport = httpx.ASGITransport(Door(app, [send_deferred_parts]))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        return await http.get("/")


@pytest.mark.parametrize(
    ("ours", "vllms"),
    [
        (of_chats(Chats), of_chats(OpenAIServingChat)),
        (of_chats(Batches), of_chats(OpenAIServingChatBatch)),
        (of_completions(Completions), of_completions(OpenAIServingCompletion)),
        (of_responses(Responses), of_responses(OpenAIServingResponses)),
        (of_tokens(Tokens), of_tokens(ServingTokens)),
        (of_texts(Tokens), of_texts(ServingTokens)),
    ],
    ids=["chats", "batches", "completions", "responses", "tokens", "texts"],
)
async def test_log_probabilities_are_vllms(
    ours: Callable[[], Any], vllms: Callable[[], Any]
) -> None:
    expected = await answer_of(vllms, whole=False)
    assert "content-length" in expected.headers
    deferred = await answer_of(ours)
    assert deferred.content == expected.content
    assert "content-length" not in deferred.headers
    in_a_stream = await answer_of(ours, whole=False)
    assert in_a_stream.headers == expected.headers


def some_choices(count: int) -> Callable[[], Any]:
    flat = FlatLogprobs()
    flat.extend(LOGPROBS[:20])

    def make() -> list[Any]:
        asked = {**ASKED, "token_ids": TOKENS[:20], "num_output_top_logprobs": 3}
        chats = serving(Chats)
        return [chats._create_chat_logprobs(top_logprobs=flat, **asked) for _ in range(count)]

    return make


async def test_those_of_many_choices_count_together() -> None:
    assert "content-length" in (await answer_of(some_choices(5))).headers
    deferred = await answer_of(some_choices(7))
    assert "content-length" not in deferred.headers
    whole = await answer_of(some_choices(7), whole=False)
    assert deferred.content == whole.content


async def test_those_of_prompts_are_vllms() -> None:
    def make() -> Any:
        answer = GenerateTokensResponse(
            request_id="r", choices=[], prompt_logprobs=[None, *LOGPROBS, None]
        )
        defer_prompt_logprobs(answer, GenerateTokensResponse(request_id="r", choices=[]))
        return SimpleNamespace(model_dump=lambda **_: answer.model_dump())

    whole, deferred = await answer_of(make, whole=False), await answer_of(make)
    assert deferred.content == whole.content
    assert "content-length" not in deferred.headers and "content-length" in whole.headers


async def test_a_stored_response_has_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may ask for it again, in another request."""

    async def original(self: Any, *_: Any) -> Any:
        return self._create_response_logprobs(logprobs=LOGPROBS, top_logprobs=3, **ASKED)

    monkeypatch.setattr(OpenAIServingResponses, "responses_full_generator", original)
    responses = serving(Responses)
    responses.enable_store = True
    parts = DeferredParts()
    with asking():
        current_context().put(parts)
        stored = await responses.responses_full_generator(
            SimpleNamespace(store=True), None, None, None
        )
        assert len(stored) == len(TOKENS) and not parts
        sent = await responses.responses_full_generator(
            SimpleNamespace(store=False), None, None, None
        )
        assert len(sent) == 1 and parts


async def test_pieces_are_few_and_made_in_threads() -> None:
    made_in: list[threading.Thread] = []
    sizes: list[int] = []

    def some(part: slice) -> list[Any]:
        made_in.append(threading.current_thread())
        sizes.append(len(range(300)[part]))
        return [*range(300)[part]]

    def make() -> Any:
        parts = current_context().find(DeferredParts)
        assert parts is not None
        parts.add("instead", entries(300, some))
        return [SimpleNamespace(model_dump=lambda **_: "instead")]

    assert (await answer_of(make)).json()["made"] == [*range(300)]
    assert threading.main_thread() not in made_in
    assert sum(sizes) == 300 and max(sizes) <= SLICE


@pytest.mark.parametrize("count", [1, SLICE, SLICE + 1, 3 * SLICE])
def test_lists_and_columns_are_as_in_one_piece(count: int) -> None:
    values = [{"é": each} for each in range(count)]
    assert json.loads(b"[" + b"".join(entries(count, lambda part: values[part])) + b"]") == values
    made = columns(count, lambda part: {"a": values[part], "b": [*range(count)][part]})
    assert json.loads(b"".join(made)) == {"a": values, "b": [*range(count)]}


def test_an_error_in_the_place_of_an_answer_is_sent_as_it_is() -> None:
    parts = DeferredParts()
    parts.add("instead", iter([b"never"]))
    assert b"".join(parts.spliced(b'{"error":1}')) == b'{"error":1}'
    assert not parts


def test_parts_are_added_in_any_order() -> None:
    """Those of all choices come before those of prompts, which an answer may have first."""
    parts = DeferredParts()
    for place, piece in (("second", b"2"), ("never", b"3"), ("first", b"1")):
        parts.add(place, iter([piece]))
    assert b"".join(parts.spliced(b'{"a":"first","b":"second"}')) == b'{"a":1,"b":2}'


async def events_of(kind: type) -> tuple[list[Any], Any]:
    """What a client gets of a stream of vLLM's Responses route, and what vLLM kept of it."""
    request = ResponsesRequest(
        model="m", input="x", include=["message.output_text.logprobs"], top_logprobs=3, store=False
    )
    context, responses = SimpleContext(), serving(kind)
    vars(responses).update(use_harmony=False, enable_store=False, parser=None)
    vars(responses).update(enable_log_outputs=False, enable_per_request_metrics=False)
    kept: list[Any] = []

    async def outputs() -> Any:
        for token, logprobs in zip(TOKENS, LOGPROBS, strict=True):
            one = CompletionOutput(0, "x", [token], None, [logprobs], finish_reason="stop")
            context.append_output(RequestOutput("r", "x", [1], None, [one], finished=True))
            yield context

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        params = SamplingParams()
        async for event in responses.responses_stream_generator(
            request, params, outputs(), context, "m", None, None
        ):
            body = event.model_dump_json().encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        kept.extend(context.streamed_output_items or ())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    transport = httpx.ASGITransport(Door(app, [send_deferred_parts]))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        lines = (await http.get("/")).text.splitlines()
    return [json.loads(line) for line in lines], (kept, context)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        named = ("id", "item_id", "created_at")
        return {name: without_ids(each) for name, each in value.items() if name not in named}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def test_a_stream_of_a_response_keeps_its_log_probabilities_as_json() -> None:
    expected, _ = await events_of(OpenAIServingResponses)
    got, (kept, context) = await events_of(Responses)
    assert without_ids(got) == without_ids(expected)
    text = got[-1]["response"]["output"][0]["content"][0]
    assert len(text["logprobs"]) == len(TOKENS) and len(text["logprobs"][0]["top_logprobs"]) == 3
    assert (
        len(kept[0].content[0].logprobs) == 1 and not context.final_output.outputs[0].logprobs[1:]
    )


async def test_what_is_held_is_let_go_at_the_end_of_the_request() -> None:
    let_go: list[bool] = []

    def some(part: slice) -> list[Any]:
        assert not let_go
        return [0][part]

    def make() -> Any:
        parts = current_context().find(DeferredParts)
        assert parts is not None
        parts.held.callback(let_go.append, True)
        parts.add("instead", entries(1, some))
        return [SimpleNamespace(model_dump=lambda **_: "instead")]

    assert (await answer_of(make)).json()["made"] == [0]
    assert let_go == [True]
