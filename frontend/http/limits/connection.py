"""Limits of a client's connection: size and time of heads, pipelining, slow reading.

The only file that touches the inside of uvicorn, which has none of these limits.
"""

import asyncio
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from starlette.datastructures import Headers
from uvicorn.logging import TRACE_LOG_LEVEL
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from common.observability.telemetry import CONNECTIONS_CUT
from frontend.asgi import RETRY_AFTER_S, error_answer, has_body
from frontend.http.settings import HttpSettings

logger = logging.getLogger(__name__)

HEAD_S: Final = 10.0
"""Seconds that the head of a request, or a TLS handshake, may take to arrive. Honest ones take
milliseconds, or seconds if one packet is lost repeatedly."""

MAX_PIPELINED: Final = 16
"""Parsed requests that may wait for earlier answers on one connection. 128 of 90 headers each, sent
by eight connections again and again, kept others waiting for 5 s."""

SMALL_CHUNKS: Final = 4096
"""Chunks of a body that may have any size."""

MIN_CHUNK: Final = 16
"""Bytes that the chunks of a longer body have on average. Each takes a microsecond of the event
loop: eight connections with chunks of a byte kept others waiting for 7 s."""

MAX_AHEAD: Final = 64 << 10
"""Bytes that are read behind a running request, to notice whether its client leaves."""

LINGER_S: Final = 1.0
"""Seconds that a connection stays open for a client that still sends rejected input. An immediate
close would be a reset, and the client might lose the answer that tells why."""

WRITE_NOW: Final = "mmrouter.write_now"
"""Key in a request's scope of a function that sends a piece of a begun answer, from anywhere on the
event loop and without waiting. Returns whether the piece was sent; if not, nothing was."""

UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
"""What offers another protocol, which a server may ignore. Java's client offers HTTP/2 with each
request, and the parser would take the body for that protocol's."""

LEAST_TAKEN: Final = 256 << 10
"""Bytes that a client must read within ``--send-timeout``, if so many are pending."""

RefusalHeaders: TypeAlias = Callable[[str | None], Mapping[str, str]]
"""Headers of an answer that bypasses the app, by the page's origin if that is known."""


class HeadLimits(NamedTuple):
    """Limits of a head, trailers included. ``most_bytes`` also holds between body pieces."""

    most_bytes: int = 64 << 10
    most_headers: int = 256

    @property
    def refusal(self) -> tuple[HTTPStatus, str]:
        """Status and message for a larger head."""
        size = f"{self.most_bytes >> 10} KiB" if self.most_bytes >= 1024 else f"{self.most_bytes} B"
        return (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the head is larger than {size} or has more than {self.most_headers} headers",
        )


def _wrong_framing(headers: Iterable[tuple[bytes, bytes]], version: str) -> str:
    """Return how a proxy may read the framing differently (RFC 9112); empty if all is well."""
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return "the request needs one Host"
    if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
        return "the only Transfer-Encoding is chunked, once, in HTTP/1.1"
    return "" if version in ("1.0", "1.1") else "this server speaks HTTP/1.1"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a time-out on every wait for the client."""

    def __init__(
        self,
        *args: Any,
        settings: HttpSettings,
        limits: HeadLimits,
        refusal_headers: RefusalHeaders,
        idle: "Idle",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._settings = settings
        self._limits = limits
        self._refusal_headers = refusal_headers
        self._running: RequestResponseCycle | None = None
        self._in_head = False  # a part of a head has arrived
        self._in_body = False
        self._ahead = bytearray()  # input behind the running request
        self._aimless = 0  # bytes since the parser last made progress
        self._pieces: list[bytes] = []  # of a body, since input last came
        self._chunks = self._chunk_bytes = 0
        self._headers = self._header_bytes = 0
        self._refusal = HTTPStatus.BAD_REQUEST, "this is no HTTP request"
        self._lingering = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unsent = self._taken = 0

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start, unless there are too many connections."""
        super().connection_made(transport)
        # Pause writing as soon as a client is behind, not some 64 KiB later. TLS pauses at the
        # limit, plain TCP beyond it.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0, low=0)
        full = len(self.connections) > self._settings.max_connections
        if full and not self._close_an_idle_one():
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, "this frontend has too many connections", "too many"
            )
        else:
            self._expect_head()
            self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything, even a request with others pipelined behind it."""
        self._idle.pop(self, None)
        super().connection_lost(exc)
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        # Break cycles: the last request's body would stay until the collector looks at old objects.
        gone: Any = None
        self._running = self.cycle = self.scope = gone
        self.pipeline.clear()
        self._ahead.clear()
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._send_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the connection only lingers."""
        if self._lingering or self.transport.is_closing():
            return
        if self._busy() and self._running is not None and not self._running.more_body:
            self._ahead += data
            if len(self._ahead) > MAX_AHEAD:
                self.flow.pause_reading()
            return
        self._aimless += len(data)
        if not self._in_body:
            self._expect_head()  # also for an empty line before it
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        super().data_received(data)
        self._hand_over()
        if self.pipeline:
            self.flow.resume_reading()  # or a leaving client would go unnoticed
        if self._in_head:
            self._expect_head()
        if self._aimless > self._limits.most_bytes:
            self._refuse(*self._limits.refusal, "head")

    def pause_writing(self) -> None:
        """Watch a client that reads too slowly."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        if self._send_timer is None:
            self._taken = 0
            self._watch_reader()

    def resume_writing(self) -> None:
        """Note what the client has read; it is watched to the end of its time."""
        super().resume_writing()
        self._taken += self._unsent

    # Called by the parser.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once"
            raise ValueError("pipelined")
        self._in_head = True
        self._headers = self._header_bytes = self._chunks = self._chunk_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer after the body, which uvicorn would take for a header."""
        self._headers += 1
        self._count(name + value)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._aimless = False, True, 0
        self._idle.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if wrong := _wrong_framing(self.headers, self.parser.get_http_version()):
            self._refusal = HTTPStatus.BAD_REQUEST, wrong
            raise ValueError("framing")
        if self.parser.should_upgrade() and has_body({"headers": self.headers}):
            # Its head came in pieces, or behind another request.
            self._refusal = HTTPStatus.BAD_REQUEST, "a request with Upgrade can't have a body"
            raise ValueError("upgrade")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a piece: uvicorn copies all that it has of a body for each."""
        self._aimless = 0
        self._chunks += 1
        self._chunk_bytes += len(body)
        if self._chunks > SMALL_CHUNKS and self._chunk_bytes < self._chunks * MIN_CHUNK:
            words = f"the body comes in chunks of less than {MIN_CHUNK} bytes: send larger ones"
            self._refusal = HTTPStatus.BAD_REQUEST, words
            raise ValueError("chunks")
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._hand_over()
        self._in_body, self._aimless = False, 0
        super().on_message_complete()

    # Called by a request.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = SimpleNamespace(  # type: ignore[assignment] # all that it uses
            write=self.transport.write,
            is_closing=lambda: self._lingering or self.transport.is_closing(),
            close=self._close,
        )
        if self.logger.getEffectiveLevel() > TRACE_LOG_LEVEL:  # or uvicorn logs every piece
            write_now = partial(self._write_now, weakref.ref(cycle))  # which has the scope
            cycle.scope[WRITE_NOW] = write_now  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next request, if this one was read to its end."""
        if self._running is not None and self._running.more_body:
            self._close()
        if self._lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._in_head:
            self._expect_head()
        if self._ahead:
            data, self._ahead = self._ahead, bytearray()
            self.data_received(bytes(data))
        elif self.timeout_keep_alive_task is not None:
            self._idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Answer malformed input in vLLM's shape."""
        self._refuse(*self._refusal, "parser")

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: clients may try, and uvicorn would complain of missing packages."""

    # Internal.

    def _hand_over(self) -> None:
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            super().on_body(body)

    def _write_now(self, running: weakref.ref[RequestResponseCycle], piece: bytes) -> bool:
        cycle = running()
        if (
            cycle is None
            or self.flow.write_paused
            or not cycle.chunked_encoding
            or cycle.response_complete
            or cycle.disconnected
            or cycle.transport.is_closing()
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _close_an_idle_one(self) -> bool:
        """Abort the longest idle connection, if any. At once: closing connections would add up."""
        longest = next(iter(self._idle), None)
        if longest is None:
            return False
        del self._idle[longest]
        CONNECTIONS_CUT.labels("idle").inc()
        longest.transport.abort()
        return True

    def _count(self, some: bytes) -> None:
        self._header_bytes += len(some)
        limits = self._limits
        if self._header_bytes > limits.most_bytes or self._headers > limits.most_headers:
            self._refusal = limits.refusal
            raise ValueError("head")

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing() and not self._lingering:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self._busy():
            return  # checked again once the request has ended
        if self._in_head:
            message = f"the head did not arrive within {HEAD_S:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message, "head timeout")
        else:
            self.transport.close()  # nothing was begun

    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _refuse(self, status: HTTPStatus, message: str, reason: str) -> None:
        """Answer without the app, and close."""
        if self.transport.is_closing() or self._lingering:
            return
        CONNECTIONS_CUT.labels(reason).inc()
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.abort()  # a begun answer can't be replaced
                return
            cycle.disconnected = True
            cycle.message_event.set()
        answer = error_answer(message, status)
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            answer.headers["retry-after"] = str(RETRY_AFTER_S)
        answer.headers["connection"] = "close"
        origin = Headers(raw=self.headers or []).get("origin")
        answer.headers.update(self._refusal_headers(origin))
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        self.transport.write(STATUS_LINE[status] + head + b"\r\n" + answer.body)
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            self.transport.close()  # at once: there are too many
        else:
            self._linger()

    def _close(self) -> None:
        """Close after pending output; linger first if the client is still sending."""
        if self._running is not None and self._running.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Send EOF, and discard input until the client is done."""
        if self._lingering or self.transport.is_closing():
            return
        self._lingering = True
        self.pipeline.clear()
        self._ahead.clear()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _watch_reader(self) -> None:
        self._send_timer = self.loop.call_later(self._settings.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        self._send_timer = None
        if not self.flow.write_paused:
            return
        left = self.transport.get_write_buffer_size()
        if self._taken + self._unsent - left >= LEAST_TAKEN:
            self._unsent, self._taken = left, 0
            self._watch_reader()
            return
        CONNECTIONS_CUT.labels("slow reader").inc()
        logger.info("closed the connection of a client that does not read its answer")
        self.transport.abort()


Idle: TypeAlias = dict[Connection, None]
"""Connections that wait for the head of a request, the longest idle first. Honest clients send
theirs within milliseconds, even while attackers open thousands."""


def connections(
    settings: HttpSettings, limits: HeadLimits, refusal_headers: RefusalHeaders
) -> Callable[..., asyncio.Protocol]:
    """Return a server's protocol factory, for ``uvicorn.Config(http=...)``."""
    idle: Idle = {}

    def make(*args: Any, **kwargs: Any) -> asyncio.Protocol:
        return Connection(
            *args,
            settings=settings,
            limits=limits,
            refusal_headers=refusal_headers,
            idle=idle,
            **kwargs,
        )

    return make
