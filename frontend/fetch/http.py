"""Fetch one URL over HTTP, under the policy: every hop checked, every byte counted."""

import asyncio
import errno
import logging
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from common.aio.cleanup import undo_on_error
from frontend.client_turns import ClientTurns
from frontend.fetch.allowance import HeldBytes
from frontend.fetch.resolver import CheckedResolver, Lookup, system_lookup
from frontend.media_limits import (
    FetchPolicy,
    RefusedError,
    TooLargeError,
    UnfetchableError,
    parse_url,
)

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts per fetch; later ones follow a lost connection or a 5xx."""
BACKOFF_S = 0.1
"""Backoff before the second attempt; four times as much before the third."""
MAX_REDIRECTS: Final = 3  # honest sites need: to https, to www, to object storage
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_PER_HOST = 32
"""Of them one client has half: answers that took their time kept others waiting for 27 s."""

MAX_HEADS: Final = 16
"""Heads of one answer, interim ones (1xx) included. aiohttp takes some 100 µs of the event loop for
each, and follows interim ones without end."""

PIECE: Final = 256 << 10
"""Bytes of a body read at a time, decompressed."""

FRAMING: Final = 8
"""Allowed overhead of chunked framing: one byte in so many."""

FREE_FRAMING: Final = 64 << 10
"""Bytes of heads and framing allowed in any answer, and of data parsed between two checks. Chunks
of one byte take a microsecond each, and one client fetches eight such answers at a time."""

MAX_UNPARSED: Final = 256 << 10
"""Bytes that a parser keeps while reading is paused."""

_HEADERS = {
    "User-Agent": "mmrouter",
    # Media are compressed already. A server that compresses anyway is understood.
    "Accept-Encoding": "identity",
}
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]{0,200}"')
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True)
class Fetched:
    """An answer with status 2xx, in pieces, from its final URL; ``etag`` only if strong."""

    chunks: list[bytes]
    url: URL
    etag: str | None


@dataclass(frozen=True)
class Unchanged:
    """The server confirms the content known under this URL and tag."""

    url: URL
    etag: str


class HttpFetcher:
    """HTTP client for URLs from users. Belongs to the event loop that it is made on."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        lookup: Lookup = system_lookup,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls`` replaces the system's root certificates."""
        self._policy = policy
        self._resolver = CheckedResolver(policy, lookup)
        self._turns = ClientTurns(MAX_CONNECTIONS_PER_HOST // 2)
        self._connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            use_dns_cache=False,
            socket_factory=self._socket,
            ssl=True if tls is None else tls,
            limit=MAX_CONNECTIONS,
            limit_per_host=MAX_CONNECTIONS_PER_HOST,
        )
        answers: Any = partial(_Answers, loop=asyncio.get_running_loop())
        self._connector._factory = answers  # the only way; a test detects when it has no effect
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Our own total time-out spans redirects and retries.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=policy.connect_timeout_s),
            trust_env=False,  # a proxy would resolve names unchecked
        )

    async def fetch(
        self,
        url: str,
        max_bytes: int,
        known_etag: Callable[[URL], str | None] = lambda _: None,
        held: HeldBytes | None = None,
    ) -> Fetched | Unchanged:
        """Fetch a URL. Cancelling closes the connection.

        Args:
            max_bytes: largest body, decompressed.
            known_etag: returns the tag of a URL's cached body.
            held: counts the body's bytes as they arrive.

        Raises:
            RefusedError: the policy forbids the URL, or so many bytes.
            OverloadedError: no room for the bytes now.
            UnfetchableError: it is unavailable, or not in time.
        """
        start = parse_url(url)
        self._policy.check_url(start)
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                for attempt in range(ATTEMPTS):
                    try:
                        return await self._follow(start, max_bytes, known_etag, held)
                    except UnfetchableError as error:
                        if not error.transient or attempt + 1 == ATTEMPTS:
                            raise
                        logger.debug("fetching again: %s", error)
                    await asyncio.sleep(BACKOFF_S * 4**attempt)
                raise AssertionError("unreachable")
        except TimeoutError as error:
            raise UnfetchableError("the server did not answer in time", "timeout") from error

    async def close(self) -> None:
        await self._session.close()
        await self._resolver.close()

    async def _follow(
        self,
        url: URL,
        max_bytes: int,
        known_etag: Callable[[URL], str | None],
        held: HeldBytes | None,
    ) -> Fetched | Unchanged:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._hop(url, max_bytes, known_etag(url), held)
            if not isinstance(answer, str):
                return answer
            try:
                url = self._policy.redirect(url, answer)
            except RefusedError as error:
                raise UnfetchableError(
                    f"it redirects to where nothing is fetched from: {error.reason}", "redirect"
                ) from error
        raise UnfetchableError(f"it redirects more than {MAX_REDIRECTS} times", "redirect")

    async def _hop(
        self, url: URL, max_bytes: int, etag: str | None, held: HeldBytes | None
    ) -> Fetched | Unchanged | str:
        """Send one request; return the target of a redirect as a string."""
        headers = {} if etag is None else {"If-None-Match": etag}
        try:
            async with (
                self._turns.of_client(url.host or ""),
                self._session.get(url, headers=headers, allow_redirects=False) as response,
            ):
                if etag is not None and response.status == 304:
                    return Unchanged(url, etag)
                if response.status in _REDIRECTS and "Location" in response.headers:
                    return response.headers["Location"]
                if not 200 <= response.status < 300:
                    raise UnfetchableError(
                        f"the server answered {response.status}",
                        "status",
                        transient=response.status >= 500,
                    )
                chunks = await _read(response, max_bytes, held)
                return Fetched(chunks, url, _strong_etag(response))
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            raise UnfetchableError("no secure connection is possible", "unreachable") from error
        except (aiohttp.InvalidURL, aiohttp.ClientResponseError, _SenselessError) as error:
            # Not HTTP, or a header out of bounds. Not chained: these repeat the URL.
            logger.debug("no usable answer: %s", type(error).__name__)
            raise UnfetchableError("the server's answer makes no sense", "status") from None
        except aiohttp.ClientPayloadError as error:
            raise UnfetchableError(
                "the server's answer is cut off or damaged", "unreachable", transient=True
            ) from error
        except aiohttp.ServerTimeoutError:
            raise _unreachable() from None  # the error repeats the URL
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable() from error

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Check the address of every connection last, however it was found."""
        family, kind, protocol, _, address = info
        if not self._policy.allows_address(str(address[0])):
            raise PermissionError(errno.EACCES, "the policy forbids this address")
        return socket.socket(family, kind, protocol)


class _SenselessError(aiohttp.ClientPayloadError):
    """An answer that costs more work than its body is worth."""


class _Answers(ResponseHandler):
    """aiohttp's end of a connection, with a limit on parsing besides the body."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._heads = self._received = 0

    def set_response_params(self, **params: Any) -> None:
        """Reset the counts for a new request."""
        self._heads = self._received = 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """Parse some of an answer, unless it has only heads."""
        if data.count(b"\nHTTP/1.") > MAX_HEADS:  # never in a medium
            self._refuse()
            return
        while True:
            # While reading is paused, the parser keeps the rest.
            end = len(data) if self._reading_paused else FREE_FRAMING
            piece, data = data[:end], data[end:]
            self._received += len(piece)
            super().data_received(piece)
            if self._heads > MAX_HEADS or self._has_too_much_framing():
                self._refuse()
                return
            if not data or self.transport is None or self.transport.is_closing():
                return

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Count a head."""
        self._heads += 1
        super().feed_data(data, size)

    def _has_too_much_framing(self) -> bool:
        # An interim answer has aiohttp's empty payload, which lacks some of the attributes.
        payload = self._payload
        body = 0
        if payload is not None and payload is not aiohttp.EMPTY_PAYLOAD:
            body = payload.total_raw_bytes
        unparsed = MAX_UNPARSED if self._reading_paused else 0
        return self._received > body + body // FRAMING + FREE_FRAMING + unparsed

    def _refuse(self) -> None:
        error = _SenselessError()
        if self._payload is not None:
            self._payload.set_exception(error)
            self._payload = None  # or aiohttp also reports it as cut off
        self.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


async def _read(
    response: aiohttp.ClientResponse, max_bytes: int, held: HeldBytes | None
) -> list[bytes]:
    if (response.content_length or 0) > max_bytes:
        raise TooLargeError(max_bytes)
    chunks: list[bytes] = []
    size = 0
    # An error keeps this frame until it is collected as garbage.
    with undo_on_error(chunks.clear), nullcontext() if held is None else undo_on_error(held.drop):
        async for chunk in response.content.iter_chunked(PIECE):
            await asyncio.sleep(0)  # unpacking 256 MiB at once would block the event loop
            size += len(chunk)
            if size > max_bytes:
                raise TooLargeError(max_bytes)
            if held is not None:
                held.grow(len(chunk))
            chunks.append(chunk)
    return chunks


def _strong_etag(response: aiohttp.ClientResponse) -> str | None:
    # A weak tag stands for equivalent bodies, which may differ in their bytes.
    etag = response.headers.get("ETag", "")
    return etag if _STRONG_ETAG.fullmatch(etag) else None


def _unreachable() -> UnfetchableError:
    return UnfetchableError("the server can't be reached", "unreachable", transient=True)
