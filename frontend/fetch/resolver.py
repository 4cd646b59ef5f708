"""Names become addresses here, and only addresses that the policy allows come out.

The very addresses that were checked are what the HTTP client connects to, so a name
that answers differently the next time changes nothing.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

from frontend.media_limits import FetchPolicy, UnfetchableError

Lookup: TypeAlias = Callable[[str], Sequence[str]]
"""Blocking: the addresses of a name. Raises socket.gaierror if it has none."""

THREADS = 16
"""Of our own, so that name servers which never answer hold up nothing but fetches."""


def system_lookup(host: str) -> list[str]:
    """What this machine's own resolver says, hosts file included."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(address[0]) for _, _, _, _, address in found]


class CheckedResolver(AbstractResolver):
    """Resolves names for aiohttp, under a policy."""

    def __init__(self, policy: FetchPolicy, lookup: Lookup = system_lookup) -> None:
        self._policy = policy
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a name that may be connected to.

        Cancelling leaves nothing but the system's look-up, in its thread.

        Raises:
            UnfetchableError: there are none. It doesn't tell a name that doesn't exist
                from one that is internal, or names could be probed.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._lookup, host)
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

    async def close(self) -> None:
        """Stop the threads without waiting for look-ups under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _no_address(self, *, transient: bool) -> UnfetchableError:
        kind = "address" if self._policy.allow_private else "public address"
        return UnfetchableError(
            f"no {kind} is known for its host", "unreachable", transient=transient
        )
