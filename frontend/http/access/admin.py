"""Admin access: to view and manage this frontend takes more than an API key.

With admin keys, a request has to show one. Without, it has to come from this host: neither through
a proxy, behind which every client seems local, nor from a page in a browser.
"""

import ipaddress
import re
from http import HTTPStatus

from frontend.asgi import App, Arrival, error_answer
from frontend.http.access.api_keys import ApiKeyGuard, Keys
from frontend.http.operator.vllm_routes import MANAGEMENT

# "$" as in routes, which ignore a line feed after their name (%0A).
_ADMINS = re.compile(rf"/+(mmrouter|{'|'.join(map(re.escape, sorted(MANAGEMENT)))})(/|$)")
_OWN_SITE = (None, "none", "same-origin")
_FORWARDED = re.compile(
    r"forwarded|via|x-real-ip|x-forwarded(-.*)?|x-original-.*|x-envoy-.*|.*client-ip|.*connecting-ip"
)


def is_for_admins(path: str) -> bool:
    """Return whether a path, without a proxy's prefix, is for admins only."""
    return _ADMINS.match(path) is not None


class AdminGuard:
    """Admit admins to admin paths, and users everywhere else."""

    def __init__(
        self,
        api_keys: Keys | None,
        admin_keys: Keys | None,
        *,
        unix_socket: bool = False,
        isolate: bool = False,
    ) -> None:
        """Without ``api_keys`` admit everyone, without ``admin_keys`` local clients as admins."""
        self._users = None if api_keys is None else ApiKeyGuard(api_keys, isolate=isolate)
        self._keys = admin_keys
        self._unix_socket = unix_socket

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 401 or a 403 for a rejected request."""
        if arrival.scope["type"] == "http" and is_for_admins(arrival.path):
            if self._keys is not None and self._keys.shown_by(arrival.headers) is not None:
                return None
            admitted = self._keys is None and self._is_local(arrival)
        else:
            admitted = True
        # Local admins need an API key as well, where users need one.
        refusal = None if self._users is None else await self._users(arrival)
        return refusal if refusal is not None or admitted else self._forbidden(arrival)

    def _is_local(self, arrival: Arrival) -> bool:
        scope, headers = arrival.scope, arrival.headers
        if any(_FORWARDED.fullmatch(name) for name in headers):
            return False
        # A page in a local browser: from another site, or by DNS rebinding.
        if "origin" in headers or headers.get("sec-fetch-site") not in _OWN_SITE:
            return False
        if self._unix_socket:
            return True  # there is no other way in, so every client is on this host
        # Only this host has the frontend's own address.
        here = (scope.get("server") or ("",))[0]
        client = (scope.get("client") or ("",))[0]
        names = headers.getlist("host")
        return _is_here(client, here) and all(_names_here(name, here) for name in names)

    def _forbidden(self, arrival: Arrival) -> App:
        message = "this path is for admins: show a key of --admin-key-file"
        if self._keys is None:
            message = (
                "this path is for admins, and without --admin-key-file for clients that reach "
                "this frontend from its own host, by its address or localhost, without a proxy"
            )
        answer = error_answer(message, HTTPStatus.FORBIDDEN)
        if self._keys is not None:
            answer.headers["www-authenticate"] = "Bearer"  # a key would help
        if arrival.has_body:
            answer.headers["connection"] = "close"  # it isn't read
        return answer


def _names_here(host: str, here: str) -> bool:
    """Return whether a ``Host`` means this host independently of any name server."""
    name = re.sub(r":\d*\Z", "", host).removeprefix("[").removesuffix("]").lower()
    return name == "localhost" or name.endswith(".localhost") or _is_here(name, here)


def _is_here(address: str, here: str) -> bool:
    try:
        parsed = _address(address)
        return parsed.is_loopback or parsed == _address(here)
    except ValueError:  # not an address
        return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(text)
    return getattr(parsed, "ipv4_mapped", None) or parsed
