"""An API server of Kubernetes, for Lease objects alone: real HTTP, TLS, certificates and tokens.

It runs in a thread, so that tests may block and it may hang.
"""

import asyncio
import copy
import json
import ssl
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web

from tests.certificates import Authority, Certified
from tests.fakes.lease_store import GROUP, LeaseStore, Object, RefusalError
from tests.ports import free_port

_Made = TypeVar("_Made")

LEASES: Final = f"/apis/{GROUP}/v1/namespaces/{{namespace}}/leases"

NAMESPACE: Final = "/api/v1/namespaces/{namespace}"

TOKEN: Final = "the-fleet"
"""Of the user ``fleet``, who may do everything with Leases."""

VERBS: Final = frozenset({"get", "list", "create", "patch", "delete"})


class ApiServer:
    """One server.

    Attributes:
        store: what it has; look at it only through :meth:`do`.
        tokens: users by bearer token ("Authenticating": a token that is not known is a 401).
        sees_namespaces: users who may ask whether a namespace is there.
        allowed: verbs by user ("Using RBAC Authorization": what is not granted is a 403).
        requests: ``VERB`` of each request that came.
    """

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.authority = Authority(directory / "authority")
        self.store = LeaseStore("default", "fleet", "other")
        self.tokens = {TOKEN: "fleet"}
        self.allowed: dict[str, frozenset[str]] = {"fleet": VERBS}
        self.sees_namespaces: set[str] = set()
        self.requests: list[str] = []
        self._served = self.authority.certify(host)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._going: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    # For tests

    def start(self) -> None:
        """Start it, or start it again with what it had."""
        self._call(self._start())

    def stop(self) -> None:
        """End it, and all connections. Its data stay."""
        self._call(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def pause(self) -> None:
        """Hang: connections are made and kept, and nothing is answered."""
        self._loop.call_soon_threadsafe(self._going.clear)
        self._call(asyncio.sleep(0))

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._going.set)

    def do(self, what: Callable[[LeaseStore], _Made]) -> _Made:
        """Something behind everybody's back."""

        async def done() -> _Made:
            return what(self.store)

        return self._call(done())

    def kubeconfig(
        self, *, token: str | None = TOKEN, certified: Certified | None = None, **cluster: object
    ) -> Path:
        """A new file that leads here."""
        user: Object = {}
        if token is not None:
            user["token"] = token
        if certified is not None:
            user["client-certificate"] = str(certified.certificate)
            user["client-key"] = str(certified.key)
        seen = {"server": self.url, "certificate-authority": str(self.authority.certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": seen | cluster}],
            "users": [{"name": "me", "user": user}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        path = self.directory / f"kubeconfig-{len(list(self.directory.iterdir()))}"
        path.write_text(json.dumps(content))
        return path

    # The server

    def _call(self, work: Coroutine[Any, Any, _Made]) -> _Made:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self._going = asyncio.Event()
        self._going.set()
        app = web.Application(middlewares=[self._answered], client_max_size=3 << 20)
        app.router.add_get(NAMESPACE, self._namespace)
        app.router.add_get(LEASES, self._list)
        app.router.add_post(LEASES, self._create)
        app.router.add_patch(LEASES + "/{name}", self._patch)
        app.router.add_delete(LEASES + "/{name}", self._delete)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self._served.certificate, self._served.key)
        tls.load_verify_locations(self.authority.certificate)
        tls.verify_mode = ssl.CERT_OPTIONAL
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def _stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for transport in self._transports:
                transport.abort()
            await runner.cleanup()

    @web.middleware
    async def _answered(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if request.transport is not None:
            self._transports.add(request.transport)
        try:
            await self._going.wait()
            self._authorize(request)
            answer = await handler(request)
            await self._going.wait()
            return answer
        except RefusalError as error:
            return web.json_response(error.status, status=error.code)

    def _authorize(self, request: web.Request) -> None:
        user = self._user(request)
        namespace = request.match_info.get("namespace", "")
        if "/leases" not in request.path:
            if user not in self.sees_namespaces:
                raise RefusalError(
                    403,
                    "Forbidden",
                    f'namespaces "{namespace}" is forbidden: User "{user}" cannot get resource '
                    f'"namespaces" in API group "" in the namespace "{namespace}"',
                )
            return
        verb = _verb(request)
        self.requests.append(verb)
        if verb not in self.allowed.get(user, frozenset()):
            raise RefusalError(
                403,
                "Forbidden",
                f'leases.{GROUP} is forbidden: User "{user}" cannot {verb} resource "leases" '
                f'in API group "{GROUP}" in the namespace "{namespace}"',
            )

    def _user(self, request: web.Request) -> str:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme:
            if scheme.lower() != "bearer" or token not in self.tokens:
                raise RefusalError(401, "Unauthorized", "Unauthorized")
            return self.tokens[token]
        assert request.transport is not None
        certificate = request.transport.get_extra_info("peercert")
        if not certificate:  # "Anonymous requests"
            return "system:anonymous"
        # "X509 client certificates": the common name is the user's.
        return dict(part for each in certificate["subject"] for part in each)["commonName"]

    async def _namespace(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["namespace"]
        if name not in self.store.namespaces:
            raise RefusalError(404, "NotFound", f'namespaces "{name}" not found')
        return web.json_response({"kind": "Namespace", "metadata": {"name": name}, "status": {}})

    async def _create(self, request: web.Request) -> web.StreamResponse:
        # "Dry-run": all stages are run, and nothing is stored.
        store = copy.deepcopy(self.store) if request.query.get("dryRun") == "All" else self.store
        made = store.create(request.match_info["namespace"], await request.json())
        return web.json_response(made, status=201)

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/merge-patch+json":
            raise RefusalError(415, "UnsupportedMediaType", "the body of the request was unknown")
        where = request.match_info["namespace"], request.match_info["name"]
        made = self.store.patch(*where, await request.json())
        return web.json_response(made)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        options = await request.json() if request.can_read_body else {}
        where = request.match_info["namespace"], request.match_info["name"]
        said = self.store.delete(*where, options.get("preconditions"))
        return web.json_response(said)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        namespace, query = request.match_info["namespace"], request.query
        selector = query.get("labelSelector", "")
        limit, token = int(query.get("limit", 0)), query.get("continue", "")
        return web.json_response(self.store.page(namespace, selector, limit, token))


def _verb(request: web.Request) -> str:
    """ "API verbs"."""
    return {"GET": "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[request.method]


@contextmanager
def api_server(directory: Path) -> Iterator[ApiServer]:
    """A server that runs."""
    server = ApiServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.close()
