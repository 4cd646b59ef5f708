"""Who may look into this frontend and manage it, which is not everybody who may use it.

With admin keys whoever shows one. Without, whoever comes from this host, and neither through a
proxy, behind which everybody seems to come from here, nor from a page in a browser.
"""

import ipaddress
import re
from http import HTTPStatus

from starlette.datastructures import Headers

from frontend.asgi import App, Receive, Scope, Send, error_answer, has_body, route_path
from frontend.http.access.api_keys import ApiKeyGuard, Keys
from frontend.http.operator.vllm_routes import MANAGEMENT
from frontend.request_context import EVERYBODY, note_tenant

# With "$", since routes are found so: a line feed after their name (%0A) is as good as nothing.
_ADMINS = re.compile(rf"/+(mmrouter|{'|'.join(map(re.escape, sorted(MANAGEMENT)))})(/|$)")
_OWN_SITE = (None, "none", "same-origin")
_FORWARDED = re.compile(
    r"forwarded|via|x-real-ip|x-forwarded(-.*)?|x-original-.*|x-envoy-.*|.*client-ip|.*connecting-ip"
)


def is_for_admins(path: str) -> bool:
    """Whether a path, without a proxy's prefix, is one that this file guards."""
    return _ADMINS.match(path) is not None


class AdminGuard:
    """ASGI middleware before API keys: admin paths for admins, everything else for users."""

    def __init__(
        self,
        app: App,
        api_keys: Keys | None,
        admin_keys: Keys | None,
        *,
        root_path: str = "",
        unix_socket: bool = False,
        isolate: bool = False,
    ) -> None:
        """
        Args:
            api_keys: of users, None to let everybody in.
            admin_keys: None to go by where a request comes from.
            root_path: prefix under which a proxy serves the app.
            unix_socket: there is no other way in, so everybody is on this host.
            isolate: whether no two API keys share anything that is kept.
        """

        def for_users(inside: App) -> App:
            if api_keys is None:
                return inside
            return ApiKeyGuard(inside, api_keys, root_path, isolate=isolate)

        self._app = app
        self._users = for_users(app)
        self._refused = for_users(self._forbid)
        self._keys = admin_keys
        self._root_path = root_path
        self._unix_socket = unix_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or answer 401 or 403."""
        if scope["type"] != "http" or not is_for_admins(route_path(scope, self._root_path)):
            await self._users(scope, receive, send)
        elif self._keys is None:
            # With an API key as well, where users need one.
            inside = self._users if self._is_local(scope) else self._refused
            await inside(scope, receive, send)
        elif self._keys.shown_by(scope) is not None:
            note_tenant(EVERYBODY)
            await self._app(scope, receive, send)
        else:
            await self._refused(scope, receive, send)

    def _is_local(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        if any(_FORWARDED.fullmatch(name) for name in headers):
            return False
        # A page in a local browser: from another site, or by a name that leads here by trickery.
        if "origin" in headers or headers.get("sec-fetch-site") not in _OWN_SITE:
            return False
        if self._unix_socket:
            return True
        # The frontend's own address is nobody else's.
        here = (scope.get("server") or ("",))[0]
        client = (scope.get("client") or ("",))[0]
        names = headers.getlist("host")
        return _is_here(client, here) and all(_names_here(name, here) for name in names)

    async def _forbid(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = "this path is for admins: show a key of --admin-key-file"
        if self._keys is None:
            message = (
                "this path is for admins, and without --admin-key-file for clients that reach "
                "this frontend from its own host, by its address or localhost, without a proxy"
            )
        answer = error_answer(message, HTTPStatus.FORBIDDEN)
        if has_body(scope):
            answer.headers["connection"] = "close"  # it isn't read
        await answer(scope, receive, send)


def _names_here(host: str, here: str) -> bool:
    """Whether a ``Host`` is a name of this host that no name server has a say in."""
    name = re.sub(r":\d*\Z", "", host).removeprefix("[").removesuffix("]").lower()
    return name == "localhost" or name.endswith(".localhost") or _is_here(name, here)


def _is_here(address: str, here: str) -> bool:
    try:
        parsed = _address(address)
        return parsed.is_loopback or parsed == _address(here)
    except ValueError:  # one of them is none
        return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(text)
    return getattr(parsed, "ipv4_mapped", None) or parsed
