"""uvicorn's server: signals, sockets that several processes share, TLS files, open files."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import ssl
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from socket import socket
from typing import Final

import uvicorn
from cryptography.x509 import load_pem_x509_certificates
from uvicorn.config import create_ssl_context

from common.aio.supervised import supervise
from common.observability.telemetry import CONNECTIONS_CUT
from frontend.http.access.api_keys import FollowedFiles
from frontend.http.limits.connection import HEAD_S
from frontend.processes import Siblings

logger = logging.getLogger(__name__)

ENOUGH: Final = 65_536
"""Files. More are not requested: some libraries do work for every possible descriptor."""

OTHERS: Final = 1024
"""Files needed beside clients' connections: workers, fetches, shared memory, libraries."""

MAX_HANDSHAKES: Final = 1024
"""Concurrent TLS handshakes. One more aborts the oldest: an honest one takes milliseconds. Each
takes a file handle and 60 kB, and --max-connections counts it only once it has ended."""

MAX_ACCEPTED: Final = 64
"""Connections that are accepted before the event loop gets a turn."""

DEFERENCE_S: Final = 0.003
"""Seconds that a process leaves the next connection to a sibling with fewer."""


def _warn_if_expired(config: uvicorn.Config) -> None:
    """Warn of a certificate that clients refuse, now or when it expires: without their requests
    nothing else tells."""
    if config.ssl_certfile is None:
        return
    pem = Path(config.ssl_certfile).read_bytes()
    try:
        ends = load_pem_x509_certificates(pem)[0].not_valid_after_utc
    except ValueError:
        return  # OpenSSL reads more than this library
    if (left := (ends - datetime.now(UTC)).total_seconds()) > 0:
        asyncio.get_running_loop().call_later(left, _warn_if_expired, config)
        return
    logger.warning(
        "the certificate of --ssl-certfile=%s expired at %s, so clients refuse it: put a new one "
        "there, and its key at --ssl-keyfile",
        config.ssl_certfile,
        ends,
    )


class TlsRefresh(FollowedFiles):
    """Give new connections the certificate that is in the files by then."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._config = config
        names = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        super().__init__(Path(name) for name in names if name is not None)

    async def changed(self) -> None:
        """Replace the context: one in use would still trust an authority that was taken out."""
        config = self._config
        try:
            context = await asyncio.to_thread(self._context)
        except OSError as error:  # TLS errors too
            logger.warning("the TLS files have changed and can't be used as yet: %s", error)
            return
        config.ssl = context
        logger.info("the TLS files have changed: new connections get what is in them")
        _warn_if_expired(config)

    def _context(self) -> ssl.SSLContext | None:
        config = self._config
        if config.ssl_certfile is None:
            return None
        context = create_ssl_context(
            certfile=config.ssl_certfile,
            keyfile=config.ssl_keyfile,
            password=config.ssl_keyfile_password,
            ssl_version=config.ssl_version,
            cert_reqs=config.ssl_cert_reqs,
            ca_certs=config.ssl_ca_certs,
            ciphers=config.ssl_ciphers,
        )
        if config.uds is not None and config.ssl is not None:  # uvicorn's listener keeps its own
            config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        return context


def attainable_files() -> int:
    """Return the highest soft limit on open files that this process can set for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH:
        return soft
    return ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)


def files_needed(connections: int) -> int:
    return connections + OTHERS


def raise_file_limit(connections: int) -> None:
    """Raise the soft limit as far as possible, and warn if it is still too low."""
    soft = attainable_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < files_needed(connections):
        logger.warning(
            "only %d files may be open (ulimit -n), too few for --max-connections=%d: lower one "
            "or raise the other",
            soft,
            connections,
        )


class Server(uvicorn.Server):
    """uvicorn's server without signal handling, which would re-raise them before our cleanup."""

    def __init__(
        self,
        config: uvicorn.Config,
        siblings: Siblings | None = None,
        *,
        refresh_tls: bool = False,
    ) -> None:
        """Accept from the sockets of ``siblings``, in fairness to them, or listen as configured."""
        super().__init__(config)
        self._refresh_tls = refresh_tls
        self._refreshing: asyncio.Task[None] | None = None
        self._siblings = siblings
        self._shared: list[SharedListener] = []
        self._accepts = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; the process has its own handlers."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, or start to accept."""
        _warn_if_expired(self.config)
        if self._refresh_tls:
            work = TlsRefresh(self.config).follow
            self._refreshing = asyncio.create_task(supervise("TLS files", work), name="TLS files")
        siblings = self._siblings
        if siblings is None:
            await super().startup(sockets)
            if self.config.uds is None:
                self._accept_instead()
            return
        await super().startup(sockets=[])
        self._share(siblings.listeners, siblings.another_has_fewer)
        if siblings.alone:  # otherwise once a model is served
            self.accept()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await super().shutdown(sockets)

    def accept(self) -> None:
        """Take connections from now on. Later calls do nothing."""
        if not self.should_exit:
            self._accepts = True
            for each in self._shared:
                each.start()

    async def on_tick(self, counter: int) -> bool:
        """Tell siblings the number of connections; uvicorn calls it ten times a second."""
        ending = await super().on_tick(counter)
        if self._accepts:
            self._count(ending=ending)
        return ending

    def _count(self, *, ending: bool = False) -> None:
        """Tell siblings the number of connections; None if it takes no more."""
        if self._siblings is not None:
            opening = sum(each.opening for each in self._shared)
            count = len(self.server_state.connections) + opening
            self._siblings.has(None if ending else count)

    def _accept_instead(self) -> None:
        """Accept by ourselves: asyncio has no limit on handshakes, and uvloop takes one connection
        a turn of the event loop, so that a GET waited for seconds behind 200 new chats."""
        listeners = [
            socket(fileno=os.dup(each.fileno()))
            for server in self.servers
            for each in server.sockets
        ]
        for server in self.servers:
            server.close()  # its handles; pending connections stay in the queue
        self.servers.clear()
        self._share(listeners, lambda: False)
        self.accept()

    def _share(self, listeners: Sequence[socket], defers: Callable[[], bool]) -> None:
        self._shared = [
            SharedListener(each, self._connection, self._tls, HEAD_S, defers, self._count)
            for each in listeners
        ]
        self.servers.extend(self._shared)  # type: ignore[arg-type] # closed and waited for only

    def _tls(self) -> ssl.SSLContext | None:
        return self.config.ssl

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class SharedListener:
    """Accept from a socket that other processes accept from too.

    Takes a few connections for each turn of the event loop, and none while a sibling has fewer, so
    that busy processes leave the next one to idle ones.
    """

    def __init__(
        self,
        listener: socket,
        make: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        handshake_s: float,
        defers: Callable[[], bool],
        count: Callable[[], None],
    ) -> None:
        """Own ``listener``. ``tls`` returns the context of the next connection; ``defers`` tells
        whether a sibling should take it; ``count`` is called after each."""
        self._defers = defers
        self._count = count
        self._listener = listener
        self._make = make
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}
        self._started = False

    @property
    def sockets(self) -> list[socket]:
        return [self._listener]

    @property
    def opening(self) -> int:
        """Number of connections that are accepted and have no protocol yet."""
        return len(self._opening)

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def is_serving(self) -> bool:
        return self._listener.fileno() >= 0

    def close(self) -> None:
        if self.is_serving():
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def wait_closed(self) -> None:
        """Cancel the handshakes that are under way."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            if self._defers():
                self._pause(DEFERENCE_S)
                return
            if not self._take():
                return

    def _take(self) -> bool:
        """Accept a connection; return whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has gone
        except OSError as error:
            if error.errno == errno.EINVAL:  # the parent has shut it down for all processes
                self._loop.remove_reader(self._listener.fileno())
                return False
            # E.g. no descriptors are left: siblings may have some, and connections wait.
            logger.error("a connection can't be accepted: %s", error)
            self._pause(1.0)
            return False
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection))
        self._opening[task] = None
        task.add_done_callback(self._opened)
        if self._tls() and len(self._opening) > MAX_HANDSHAKES:
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            oldest.cancel()
            CONNECTIONS_CUT.labels("handshake").inc()
        self._count()
        return True

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        """Accept again, and take a connection that siblings have left, without deferring."""
        if self.is_serving():
            self._loop.add_reader(self._listener.fileno(), self._accept)
            self._take()

    async def _open(self, connection: socket) -> None:
        tls = self._tls()
        try:
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=tls,
                ssl_handshake_timeout=self._handshake_s if tls else None,
            )
        except OSError as error:  # a handshake failed, or the client has gone
            logger.debug("a connection came to nothing: %s", error)
            connection.close()
