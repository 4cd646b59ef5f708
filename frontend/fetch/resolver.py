"""Resolve names to addresses that the policy allows.

The HTTP client connects to the very addresses that were checked, so DNS rebinding has no effect.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

from common.aio.cleanup import undo_on_error
from frontend.client_turns import ClientTurns
from frontend.fetch.allowance import current_allowance
from frontend.media_limits import FetchPolicy, UnfetchableError

Lookup: TypeAlias = Callable[[str], Sequence[str]]
"""Blocking: the addresses of a name. Raises socket.gaierror if it has none."""

THREADS: Final = 256
"""Concurrent look-ups, in threads of their own: dead name servers block only fetches."""

MAX_CLIENT_LOOKUPS: Final = THREADS // 2
"""Concurrent look-ups of one tenant, or of one host without API keys. Abandoned ones count until
their threads return; further ones wait."""

TIMEOUT_S: Final = 10.0
"""Time-out of one look-up: enough for a system that asks a dead name server for 5 s before the
next."""


def system_lookup(host: str) -> list[str]:
    """Return the answer of this machine's own resolver, hosts file included. Raises OSError if no
    file can be opened, for which the resolver says that the name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror:
        os.close(os.open(os.devnull, os.O_RDONLY))
        raise
    return [str(address[0]) for _, _, _, _, address in found]


class CheckedResolver(AbstractResolver):
    """Resolves names for aiohttp, under a policy."""

    def __init__(self, policy: FetchPolicy, lookup: Lookup = system_lookup) -> None:
        self._policy = policy
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media-names")
        self._clients = ClientTurns(MAX_CLIENT_LOOKUPS)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of a name. Cancelling leaves only the system's look-up in
        its thread.

        Raises UnfetchableError if there are none, or none in time. It doesn't tell unknown names
        from internal ones, or names could be probed.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._find(host)
        except TimeoutError as error:
            raise UnfetchableError("its host's name was not found in time", "timeout") from error
        except (socket.gaierror, UnicodeError) as error:
            again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            raise self._no_address(transient=again) from error
        allowed = [address for address in found if self._policy.allows_address(address)]
        if not allowed:
            raise self._no_address(transient=False)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in allowed
        ]

    async def _find(self, host: str) -> Sequence[str]:
        allowance, turns = current_allowance(self._policy), self._clients.of_client()
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            allowance.return_lookup()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turns.release)

        await turns.acquire()
        if not allowance.take_lookup():
            turns.release()
            raise UnfetchableError("too many names of hosts are still looked up", "timeout")
        with undo_on_error(lambda: ended(None)):  # no thread may be to be had
            lookup = self._threads.submit(self._lookup, host)
        lookup.add_done_callback(ended)
        return await asyncio.wrap_future(lookup)

    async def close(self) -> None:
        """Stop the threads without waiting for current look-ups."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _no_address(self, *, transient: bool) -> UnfetchableError:
        kind = "address" if self._policy.allow_private else "public address"
        return UnfetchableError(
            f"no {kind} is known for its host", "unreachable", transient=transient
        )
