"""The calls that Open WebUI makes, as its server makes them: with aiohttp, its headers and bodies.

Read in ``backend/open_webui/routers/openai.py`` and ``tasks.py``: the list of models when a
connection is added and for each page, chats as streams with their usage, then the title, the tags
and the follow-ups as answers of one piece. What it keeps to itself (``metadata``) is not sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, in_turn

case = Cases()

USER = {
    "X-OpenWebUI-User-Name": "J%C3%B6rg M.",
    "X-OpenWebUI-User-Id": "6f1c0c1e-4b5a-4f0a-8d5e-2f6b8f6f0a11",
    "X-OpenWebUI-User-Email": "joerg@example.org",
    "X-OpenWebUI-User-Role": "user",
}
CHAT = {"X-OpenWebUI-Chat-Id": "0d7a4a52-8a6e-4b53-9f5e-6a1d5d3f7c22"}


@asynccontextmanager
async def session_of(at: Endpoint, *, chat: bool = False) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {at.key}", **USER}
    if chat:
        headers |= CHAT | {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        trust_env=True, headers=headers, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        yield session


async def ask(at: Endpoint, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, kind and text of an answer; the body is written by ``json.dumps``, as there."""
    async with (
        session_of(at, chat=True) as session,
        session.post(f"{at.url}/v1/chat/completions", data=json.dumps(body)) as reply,
    ):
        return reply.status, reply.content_type, await reply.text()


def chat(at: Endpoint, content: Any = "Tell me about the river.", **options: Any) -> dict[str, Any]:
    """The body of a chat."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return {
        "stream": True,
        "model": at.model,
        "messages": messages,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 6,
    } | options


def events(text: str) -> object:
    """What its page makes of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    usages = [chunk["usage"]["total_tokens"] for chunk in chunks if chunk.get("usage")]
    order = in_turn("choices" if chunk.get("choices") else "usage" for chunk in chunks)
    return [said, usages, order, lines[-1]]


@case
async def models(at: Endpoint) -> object:
    async with session_of(at) as session, session.get(f"{at.url}/v1/models") as reply:
        return [reply.status, [model["id"] for model in (await reply.json())["data"]]]


@case
async def a_chat(at: Endpoint) -> object:
    status, kind, text = await ask(at, chat(at))
    return [status, kind, events(text)]


@case
async def a_chat_about_a_picture(at: Endpoint) -> object:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": at.picture}},
    ]
    status, kind, text = await ask(at, chat(at, content))
    return [status, kind, events(text)]


@case
async def title_tags_and_follow_ups(at: Endpoint) -> object:
    """All are asked for at once when a chat ends, without a stream."""
    common = {"model": at.model, "stream": False, "temperature": 0}
    tasks = ["Title this.", "Tag this.", "What could be asked next?"]
    answers = await asyncio.gather(
        *(
            ask(
                at,
                common
                | {"messages": [{"role": "user", "content": task}]}
                | {"max_completion_tokens": 6},
            )
            for task in tasks
        )
    )
    return [
        (status, kind, json.loads(text)["choices"][0]["message"]["content"])
        for status, kind, text in answers
    ]


@case
async def an_unknown_model(at: Endpoint) -> object:
    status, kind, text = await ask(at, chat(at, model="nobody"))
    return [status, kind, json.loads(text)]


@case
async def a_broken_picture(at: Endpoint) -> object:
    url = "data:image/png;base64,bm9uZQ=="
    status, kind, text = await ask(at, chat(at, [{"type": "image_url", "image_url": {"url": url}}]))
    return [status, kind, json.loads(text)]


@asynccontextmanager
async def begun(at: Endpoint) -> AsyncIterator[Callable[[], None]]:
    """A chat with its first words. Yields how a user stops it: the answer is closed."""
    body = chat(at, max_tokens=3000, ignore_eos=True)
    async with session_of(at, chat=True) as session:
        reply = await session.post(f"{at.url}/v1/chat/completions", data=json.dumps(body))
        await reply.content.readline()
        yield reply.close
