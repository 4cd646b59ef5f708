"""Answers of many engine calls: merged as vLLM merges them, each looked at once."""

import asyncio
import gc
import importlib
import sys
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from frontend.http.streaming.merging import merge, merge_in_linear_time

closed: list[str] = []


async def saying(*items: str, fails: Exception | None = None) -> AsyncGenerator[str]:
    try:
        for each in items:
            await asyncio.sleep(0)
            yield each
        if fails is not None:
            raise fails
    finally:
        closed.append("".join(items))


async def test_each_item_comes_with_its_number() -> None:
    got = [each async for each in merge(saying("a", "b"), saying(), saying("c"))]
    assert sorted(got) == [(0, "a"), (0, "b"), (2, "c")]
    assert [said for number, said in got if not number] == ["a", "b"]
    assert [each async for each in merge(saying())] == []


async def test_an_error_ends_all() -> None:
    closed.clear()
    with pytest.raises(KeyError, match="gone"):
        async for _ in merge(saying("a", fails=KeyError("gone")), saying(*"bcdefgh")):
            pass
    assert sorted(closed) == ["a", "bcdefgh"]


async def test_who_leaves_early_closes_all() -> None:
    closed.clear()
    async with aclosing(merge(saying("a", "b"), saying("c", "d"))) as merged:
        await anext(merged)
    assert sorted(closed) == ["ab", "cd"]


class Pooled(list[float]):
    """An output that can be referred to weakly."""


async def test_outputs_are_free_as_soon_as_all_are_merged() -> None:
    outputs = list[weakref.ref[Pooled]]()

    async def pooling() -> AsyncGenerator[Pooled]:
        outputs.append(weakref.ref(output := Pooled()))
        yield output

    gc.disable()
    try:
        async for _, output in merge(pooling(), pooling()):
            del output
        assert [each() for each in outputs] == [None, None]
    finally:
        gc.enable()


def calls_of(count: int) -> int:
    """How many functions are called to merge that many iterators."""
    calls = 0

    def count_it(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async def run() -> None:
        async for _ in merge(*(saying(f"{n}") for n in range(count))):
            pass

    loop = asyncio.new_event_loop()
    sys.setprofile(count_it)
    try:
        loop.run_until_complete(run())
    finally:
        sys.setprofile(None)
        loop.close()
    return calls


def test_the_cost_grows_as_the_answers_do() -> None:
    assert calls_of(400) < 5 * calls_of(100)


@pytest.mark.parametrize(
    "name",
    [
        "generate.label_reads",
        "openai.chat_completion.batch_serving",
        "openai.completion.serving",
        "pooling.base.serving",
        "speech_to_text.base.serving",
    ],
)
def test_vllms_routes_merge_so(name: str) -> None:
    module: Any = importlib.import_module(f"vllm.entrypoints.{name}")
    merge_in_linear_time()
    assert module.merge_async_iterators is merge
