"""The texts of tokens are made as the answer is sent, and are vLLM's."""

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest, TokenizeResponse

from frontend.asgi import Door, Receive, Scope, Send
from frontend.http.server.serving_threads import write_tokens_aside
from frontend.http.streaming.whole_answers import send_deferred_parts

TOKENS = [*range(10_000)]


class Tokenizer:
    """Notes in which threads it works."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        self.threads.add(threading.current_thread())
        return [f'"{each}"é' for each in ids]


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:1], []])
@pytest.mark.parametrize("asked_for", [True, False])
async def test_they_are_written_in_a_thread(tokens: list[int], asked_for: bool) -> None:
    tokenizer, served = Tokenizer(), FastAPI()

    async def create(asked: Any, _: Any) -> TokenizeResponse:
        texts = tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        return TokenizeResponse(tokens=tokens, token_strs=texts, count=len(tokens), max_model_len=1)

    serving = SimpleNamespace(
        create_tokenize=create, renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer)
    )
    served.state.serving_tokenization = serving
    asked = TokenizeCompletionRequest(prompt="", return_token_strs=asked_for)
    expected = (await create(asked, None)).model_dump()
    tokenizer.threads.clear()
    written: list[int] = []
    write_tokens_aside(served)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await serving.create_tokenize(asked, None)
        written.append(len(answer.tokens))
        await JSONResponse(answer.model_dump())(scope, receive, send)

    transport = httpx.ASGITransport(Door(app, [send_deferred_parts]))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        answer = (await http.get("/")).json()
    assert answer == expected
    assert threading.current_thread() not in tokenizer.threads
    assert written[0] <= 1
