"""Parsing of large request bodies, at a quarter of the time that the event loop stands still.

A document of 30 pages comes as 11 MB of JSON. Starlette parses it with Python's own parser,
which takes 13 ms for that and holds the interpreter's lock, so no other thread could help.
"""

import asyncio
import json
from typing import Any, Final

import msgspec
from starlette.requests import Request

from frontend.http import responses_input

LARGE: Final = 256 << 10
"""Bodies from so many bytes on are worth another parser."""


def install() -> None:
    """Let all apps of this process parse their requests so."""
    Request.json = _json  # type: ignore[assignment, method-assign] # FastAPI makes its requests itself


def parse(body: bytes) -> Any:
    """JSON to Python's types.

    Raises:
        json.JSONDecodeError: it isn't JSON; Python's error, whatever the size.
    """
    if len(body) >= LARGE:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            pass  # Python's parser takes NaN, and says what is wrong as users know it
    return json.loads(body)


async def _json(self: Request) -> Any:
    if not hasattr(self, "_json"):
        body = parse(await self.body())
        if self.scope["path"].endswith(responses_input.PATH) and responses_input.is_long(body):
            body = await asyncio.to_thread(responses_input.cut_behind_wrong, body)
        self._json = body
    return self._json
