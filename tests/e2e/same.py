"""Compare whole answers, and what the events of streams add up to, with those of a plain vLLM."""

import json
from typing import Any, Final

import httpx
import pytest

from tests.e2e.conftest import Endpoint

_DRAWN: Final = {
    "cache_creation_input_tokens", "cache_read_input_tokens", "cached_tokens", "call_id",
    "completed_at", "created", "created_at", "created_cache_tokens", "id", "item_id", "request_id",
    "sequence_number", "system_fingerprint",
}  # fmt: skip
"""Fields that each server draws, reads from its clock, or counts in its cache: of two workers one
may get a prompt that the other has, if its KV events are late."""
_PIECES: Final = {
    "arguments", "content", "delta", "partial_json", "reasoning", "text", "thinking",
}  # fmt: skip
"""Fields of events that clients join."""
_COUNTS: Final = {"completion_tokens", "output_tokens", "total_tokens"}
"""Fields of which clients take the last."""

Said = dict[str, Any]
"""Place in an answer -> what is said there, in order and without repetitions."""


def compare(router: Endpoint, plain: Endpoint, path: str, body: dict[str, Any]) -> httpx.Response:
    """Return our answer once its status, its kind and all that it says are those of a plain vLLM.

    A stream that plain vLLM begins with 200 and ends with an error may have the error at once.
    """
    ours, theirs = (each.http.post(path, json=body) for each in (router, plain))
    if ours.status_code >= 400 and theirs.status_code == 200:
        first = json.loads(theirs.text.removeprefix("data: ").split("\n\n")[0])
        assert ours.json()["error"]["message"] == first["error"]["message"]
        return ours
    assert ours.status_code == theirs.status_code, ours.text
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    one, other = said(ours), said(theirs)
    assert one.keys() == other.keys()
    for place, value in other.items():
        numbers = isinstance(value, list) and any(isinstance(each, float) for each in value)
        assert one[place] == (pytest.approx(value, abs=1e-3) if numbers else value), place
    return ours


def said(reply: httpx.Response) -> Said:
    found: Said = {}
    if not reply.headers["content-type"].startswith("text/event-stream"):
        _collect(reply.json(), "", found)
        return found
    for event in reply.text.replace("\r\n", "\n").strip().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        _collect(data if data == "[DONE]" else json.loads(data), name.strip(), found)
    # Only the last event has some fields: none has them empty if all tokens come together.
    filled = {place for place, values in found.items() if values != []}
    return {
        place: values
        for place, values in found.items()
        if place in filled
        or not any(each.startswith((f"{place}[", f"{place}.")) for each in filled)
    }


def _collect(value: Any, place: str, found: Said, key: str = "") -> None:
    """Add what a value says. Choices, calls and blocks go by their ``index``; others in a row."""
    if isinstance(value, dict):
        for name, each in value.items():
            _collect(each, f"{place}.{name}", found, name)
    elif isinstance(value, list) and value:
        for each in value:
            index = each.get("index", "") if isinstance(each, dict) else ""
            _collect(each, f"{place}[{index}]", found, key)
    elif key in _COUNTS or (key in _DRAWN and value is not None):
        found[place] = value if key in _COUNTS else type(value)
    elif key in _PIECES and isinstance(value, str):
        found[f"{place} joined"] = found.get(f"{place} joined", "") + value
    else:
        values = found.setdefault(place, [])
        # Of tokens that come together a stream has one event, the last: none has no reason to end.
        if value is not None and ("[]" in place or values[-1:] != [value]):
            values.append(value)
