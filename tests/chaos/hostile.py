"""Strangers who speak HTTP badly: bodies that never end, lie about their length, drip or are
garbage."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress

READ_MOST = 1 << 16

Speech = list[bytes]
"""What one of them sends, in pieces with pauses between them."""


def _request(body_begins: bytes, *headers: str) -> bytes:
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: it", "Content-Type: application/json"]
    return "\r\n".join((*head, *headers)).encode() + b"\r\n\r\n" + body_begins


def _unfinished_head(random_: random.Random) -> Speech:
    return [b"POST /v1/chat/completions HTTP/1.1\r\nHost: it\r\nX-Never: "]


def _unfinished_body(random_: random.Random) -> Speech:
    return [_request(b'{"model": "demo", "messages": [', f"Content-Length: {1 << 16}")]


def _huge_length(random_: random.Random) -> Speech:
    return [_request(b'{"model": "', f"Content-Length: {1 << 50}"), *(30 * [(1 << 18) * b"x"])]


def _endless_chunks(random_: random.Random) -> Speech:
    chunk = b"10000\r\n" + (1 << 16) * b" " + b"\r\n"
    return [_request(b"", "Transfer-Encoding: chunked"), *(200 * [chunk])]


def _dripping(random_: random.Random) -> Speech:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": 200 * "x"}]})
    return [
        _request(b"", f"Content-Length: {len(body)}"),
        *(bytes([each]) for each in body.encode()),
    ]


def _garbage(random_: random.Random) -> Speech:
    body = random_.randbytes(random_.randint(1, 4096))
    return [_request(body, f"Content-Length: {len(body)}")]


def _deep(random_: random.Random) -> Speech:
    body = 50_000 * b"["
    return [_request(body, f"Content-Length: {len(body)}")]


def _not_http(random_: random.Random) -> Speech:
    return [random_.randbytes(2048) + b"\r\n\r\n"]


def _two_lengths(random_: random.Random) -> Speech:
    return [_request(b"{}", "Content-Length: 2", "Content-Length: 30000")]


def _bad_picture(random_: random.Random) -> Speech:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = {"model": "demo", "messages": [{"role": "user", "content": [picture]}]}
    body = json.dumps(content).encode()
    return [_request(body, f"Content-Length: {len(body)}")]


KINDS: tuple[Callable[[random.Random], Speech], ...] = (
    _unfinished_head,
    _unfinished_body,
    _huge_length,
    _endless_chunks,
    _dripping,
    _garbage,
    _deep,
    _not_http,
    _two_lengths,
    _bad_picture,
)


async def visit(
    port: int, kind: Callable[[random.Random], Speech], stay_s: float, random_: random.Random
) -> int | None:
    """Say it, stay, and go without a word.

    Returns:
        The status of an answer, if there was one.
    """
    heard = b""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(stay_s):
                listening = asyncio.create_task(reader.read(READ_MOST))
                try:
                    for piece in kind(random_):
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0.05)
                    heard = await listening
                    await asyncio.sleep(stay_s)
                finally:
                    if listening.done() and not listening.cancelled():
                        with suppress(OSError):
                            heard = listening.result()
                    listening.cancel()
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
    status = re.match(rb"HTTP/1\.1 (\d{3})", heard)
    return int(status[1]) if status else None


def is_wrong(kind: Callable[[random.Random], Speech], status: int | None) -> bool:
    """Whether an answer is one that a client's mistake must not have."""
    if status is None or status in (429, 503):
        return False
    return status >= 500 or (status < 300 and kind is not _dripping)
