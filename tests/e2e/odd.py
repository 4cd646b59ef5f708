"""Asking for something odd: what plain vLLM answers, or a 4xx with a reason."""

from collections.abc import Mapping
from typing import Any

import httpx

from tests.e2e.conftest import Endpoint


def ask(
    endpoint: Endpoint,
    *parts: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    """The reply to a question about some media; options are fields of the body."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "max_tokens": 4,
        "temperature": 0,
    } | options
    return endpoint.http.post("/v1/chat/completions", json=body, headers=headers)


def compare(
    router: Endpoint, plain: Endpoint, *parts: dict[str, Any], **options: Any
) -> httpx.Response:
    """Our reply: the same answer as plain vLLM's, or a 4xx with a reason where it has none."""
    ours = ask(router, *parts, **options)
    # After a 500, vLLM's server drops the connection, at some moment of the next request.
    theirs = ask(plain, *parts, headers={"Connection": "close"}, **options)
    if theirs.status_code == 200:
        assert ours.status_code == 200, ours.text
        assert ours.json()["choices"] == theirs.json()["choices"]
    else:
        assert 400 <= ours.status_code < 500, ours.text
        assert ours.json()["error"]["message"]
    return ours
