"""Tokens of generative scoring are counted before the prompts of its items are made."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringRequest,
    ServingGenerativeScoring,
)
from vllm.exceptions import VLLMError

from common.errors import RequestRejectedError
from frontend.http.server.serving_threads import tokenize_scores_aside

MOST = 1000


class Letters:
    """A tokenizer with a token for each letter, and a first one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * add_special_tokens + [*map(ord, text)]


def check(tokens: int) -> None:
    if tokens > MOST:
        raise RequestRejectedError("too many tokens")


async def prompts(query: Any, items: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the prompts, or what was made of them when they were too many."""
    made: list[list[int]] = []
    build = ServingGenerativeScoring._build_prompts

    async def noting(*args: Any) -> Any:
        inputs, counts = await build(*args)
        made.extend(each["prompt_token_ids"] for each in inputs)
        return inputs, counts

    monkeypatch.setattr(ServingGenerativeScoring, "_build_prompts", noting)
    app = FastAPI()
    app.state.serving_generative_scoring = object.__new__(ServingGenerativeScoring)
    aside: Any = SimpleNamespace(aside=asyncio.to_thread, check_length=lambda *_: None)
    tokenize_scores_aside(app, aside, check)
    asked = GenerativeScoringRequest(query=query, items=items, label_token_ids=[1])
    try:
        await app.state.serving_generative_scoring._build_prompts(asked, Letters(), 400)
    except VLLMError:
        made.append([])
    return made


async def test_prompts_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await prompts("ab", ["c", "d"], monkeypatch) == [[0, 97, 98, 99], [0, 97, 98, 100]]


@pytest.mark.parametrize("query", ["a" * 300, [5] * 300])
async def test_too_many_are_refused_before_they_are_made(
    query: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await prompts(query, ["c"] * 4, monkeypatch) == [[]]
