"""Asking for something odd: what plain vLLM answers, or a 4xx with a reason."""

from typing import Any

import httpx

from tests.e2e.conftest import Endpoint


def compare(
    router: Endpoint, plain: Endpoint, *parts: dict[str, Any], **options: Any
) -> httpx.Response:
    """Our reply: the same answer as plain vLLM's, or a 4xx with a reason where it has none."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "max_tokens": 4,
        "temperature": 0,
    } | options
    ours = router.http.post("/v1/chat/completions", json=body)
    # After a 500, vLLM's server drops the connection, at some moment of the next request.
    close = {"Connection": "close"}
    theirs = plain.http.post("/v1/chat/completions", json=body, headers=close)
    if theirs.status_code == 200:
        assert ours.status_code == 200, ours.text
        assert ours.json()["choices"] == theirs.json()["choices"]
    else:
        assert 400 <= ours.status_code < 500, ours.text
        assert ours.json()["error"]["message"]
    return ours
