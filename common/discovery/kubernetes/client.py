"""Leases of one namespace, by the official asyncio client. The client makes the requests and finds
credentials. Answers are read here, up to a size limit, and only the needed fields are decoded."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api, CoreV1Api
from kubernetes_asyncio.config import ConfigException

from common.discovery.kubernetes.leases import (
    LEASE_S,
    KubernetesAccess,
    Lease,
    LeaseList,
    Status,
)
from common.discovery.watcher import Entry, Odd, Place
from common.errors import DiscoveryError

_Call: TypeAlias = Callable[..., Awaitable[aiohttp.ClientResponse]]
"""A method of ``CoordinationV1Api``."""

_Read = TypeVar("_Read")

CALL_S: Final = 4.0  # how long the API server may take to answer

PAGE: Final = 64  # leases to read at once, unless they are large

MAX_ANSWER: Final = 32 << 20
"""Bytes of one answer. The largest object has less than half."""

MAX_OBJECTS: Final = 1 << 14
"""Objects of one answer, from a server that ignores our limit: they are decoded at once."""

MAX_DETAIL_LEN: Final = 300  # characters of a server's message in our log

_MERGE: Final = "application/merge-patch+json"

_BROKEN: Final = (
    aiohttp.ClientError,
    msgspec.MsgspecError,
    ConfigException,
    OSError,
    ValueError,
    RuntimeError,
)
"""Local failures of a call. A TimeoutError is an OSError."""


class KubernetesRefusedError(DiscoveryError):
    """The API server refused a valid request, with an HTTP status."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"Kubernetes refuses: {said}")
        self.code = status

    @property
    def not_found(self) -> bool:
        return self.code == 404

    @property
    def conflicts(self) -> bool:
        """Whether the object exists already, or was changed meanwhile."""
        return self.code == 409


class _TooLargeError(Exception):
    pass


class _Connection(NamedTuple):
    """The official client, with the credentials of its creation."""

    api: ApiClient
    leases: CoordinationV1Api
    host: str


class LeaseClient:
    """For one event loop; connects on first use. Methods raise DiscoveryError without an answer."""

    def __init__(self, access: KubernetesAccess, namespace: str, selector: str) -> None:
        self._access = access
        self.namespace = namespace
        self.selector = selector
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._old: list[ApiClient] = []

    async def read(self) -> AsyncGenerator[list[Lease], None]:
        """Yield pages of all Leases that the selector finds."""
        limit, after = PAGE, ""
        while True:
            further = {"_continue": after} if after else {}
            try:
                page = await self._ask(
                    CoordinationV1Api.list_namespaced_lease,
                    LeaseList,
                    label_selector=self.selector,
                    limit=limit,
                    **further,
                )
            except _TooLargeError as error:
                if limit == 1:
                    raise DiscoveryError("the answer for one Lease is too large") from error
                limit = max(1, limit // 8)
                continue
            after = page.metadata.next_page
            yield page.items or []
            if not after:
                return

    async def check_namespace(self) -> None:
        """Raise DiscoveryError if the namespace is missing, as far as we may know that."""
        try:
            await self._ask(_read_namespace, msgspec.Raw)
        except KubernetesRefusedError as error:
            if error.not_found:
                raise

    async def create(self, body: dict[str, object], *, dry_run: bool = False) -> str:
        """Create a Lease and return its version; a dry run passes all admission checks only. Raises
        KubernetesRefusedError: it exists, or the namespace does not, for example."""
        options = {"dry_run": "All"} if dry_run else {}
        made = await self._ask(
            CoordinationV1Api.create_namespaced_lease, Lease, body=body, **options
        )
        return made.metadata.resource_version

    async def patch(self, name: str, body: dict[str, object]) -> str:
        """Patch a Lease and return its version. Raises KubernetesRefusedError."""
        patched = await self._ask(
            CoordinationV1Api.patch_namespaced_lease,
            Lease,
            name=name,
            body=body,
            _content_type=_MERGE,
        )
        return patched.metadata.resource_version

    async def delete(self, name: str, *, unless_changed: Lease | None = None) -> None:
        """Delete a Lease if it exists, and only if it is still ``unless_changed``. Raises
        KubernetesRefusedError: forbidden, or changed."""
        body: dict[str, object] = {}
        if unless_changed is not None:
            read = unless_changed.metadata
            body["preconditions"] = {"uid": read.uid, "resourceVersion": read.resource_version}
        try:
            await self._ask(CoordinationV1Api.delete_namespaced_lease, Status, name=name, body=body)
        except KubernetesRefusedError as error:
            if not error.not_found:
                raise

    async def close(self) -> None:
        """Close the connection. The next call reconnects."""
        async with self._connecting:
            self._drop()
            await self._close_old()

    async def _ask(self, call: _Call, read: type[_Read], **options: object) -> _Read:
        """Make a call, and once more with new credentials if ours are refused."""
        for last in (False, True):
            answer = None
            try:
                connection = await self._connected()
                async with asyncio.timeout(CALL_S):
                    answer = await call(
                        connection.leases,
                        namespace=self.namespace,
                        _preload_content=False,
                        **options,
                    )
                    body = await _body(answer)
                if answer.status < 300:
                    return msgspec.json.decode(body, type=read)
            except _BROKEN as error:
                raise self._failed(error) from error
            finally:
                _let_go(answer)
            refused = self._refused(answer.status, body)
            if last or answer.status != 401:
                raise refused
        raise AssertionError("it was asked twice")

    def _refused(self, status: int, body: bytes) -> DiscoveryError:
        try:
            said = msgspec.json.decode(body, type=Status).message
        except msgspec.MsgspecError:  # a proxy's, for example
            said = ""
        said = " ".join(said.split())[:MAX_DETAIL_LEN] or f"HTTP status {status}"
        if status == 401:  # the files may have new credentials by now
            self._drop()
        if status == 429 or status >= 500:
            return DiscoveryError(f"Kubernetes can't answer: {said}")
        return KubernetesRefusedError(status, said)

    def _failed(self, error: Exception) -> DiscoveryError:
        where = "" if self._connection is None else f" at {self._connection.host}"
        self._drop()
        said = " ".join(str(error).split())[:MAX_DETAIL_LEN] or type(error).__name__
        if isinstance(error, TimeoutError):
            said = "no answer in time"
        return DiscoveryError(f"Kubernetes{where} can't be used: {said}")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._old.append(connection.api)

    async def _close_old(self) -> None:
        while self._old:
            await self._old.pop().close()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            await self._close_old()
            if self._connection is None:
                # Read at each connect, so that certificates and tokens can be replaced.
                found = await asyncio.to_thread(configured, self._access)
                self._connection = _connection(found)
            return self._connection


def _connection(configuration: Configuration) -> _Connection:
    """Raise OSError: certificates can't be read, for example."""
    api = ApiClient(configuration)
    api.user_agent = "mmrouter"
    # The client's own session honours HTTPS_PROXY, and takes passwords from ~/.netrc. The proxy for
    # users' media is not for cards.
    rest = api.rest_client
    connector = rest.pool_manager.connector
    rest.pool_manager.detach()
    rest.pool_manager = aiohttp.ClientSession(connector=connector, trust_env=False)
    return _Connection(api, CoordinationV1Api(api), configuration.host)


async def _read_namespace(
    leases: CoordinationV1Api, *, namespace: str, **options: object
) -> aiohttp.ClientResponse:
    return await CoreV1Api(leases.api_client).read_namespace(name=namespace, **options)


def _let_go(answer: aiohttp.ClientResponse | None) -> None:
    """Keep the connection if the answer was read completely; else abort it. TLS would first wait
    for the peer's close, which may hang."""
    if answer is not None:
        if answer.connection is not None and answer.connection.transport is not None:
            answer.connection.transport.abort()
        answer.close()


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body. Raises _TooLargeError."""
    body = bytearray()
    while chunk := await answer.content.readany():
        body += chunk
        if len(body) > MAX_ANSWER:
            raise _TooLargeError("an answer is too large")
    if body.count(b'"metadata"') > MAX_OBJECTS:
        raise _TooLargeError("an answer has too many objects")
    return bytes(body)


POLL_S: Final = 2.0  # a list is read by the API server, for each frontend


class CardLeases(Place):
    """The Leases that a selector finds, as a place for cards."""

    def __init__(self, client: LeaseClient) -> None:
        self.poll_s, self.lease_s = POLL_S, LEASE_S
        self._client = client
        self._seen_any = False

    def __str__(self) -> str:
        return f"namespace {self._client.namespace}"

    async def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
        async with aclosing(self._client.read()) as pages:
            async for page in pages:
                self._seen_any = self._seen_any or bool(page)
                yield map(_entry, page)
        if not self._seen_any:  # as it would be in a namespace that is not there
            await self._client.check_namespace()
            self._seen_any = True

    async def close(self) -> None:
        await self._client.close()


def _entry(lease: Lease) -> Entry:
    whose = lease.whose() or Odd("name", "it is not named as that of a card")
    content = lease.card
    return Entry(lease.name, lease.metadata.resource_version, whose, len(content), content)


SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts the token of a Pod, and the certificate of its API server's authority."""

_ODD: Final = (
    config.ConfigException,
    yaml.YAMLError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)
"""Errors that the client library raises for a malformed file."""

CREDENTIALS_S: Final = 15.0
"""How long a program that a kubeconfig names may take to get credentials."""


def configured(access: KubernetesAccess) -> Configuration:
    """Read the credentials. Blocks: may run a program. Raises DiscoveryError."""
    found = Configuration()
    # Many clusters' certificates lack an extension that Python 3.13 requires. The authority and the
    # host name are checked all the same.
    found.disable_strict_ssl_verification = True
    try:
        if access.kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            source = "the service account of this Pod"
            config.load_incluster_config(
                client_configuration=found,
                token_filename=str(SERVICE_ACCOUNT / "token"),
                cert_filename=str(SERVICE_ACCOUNT / "ca.crt"),
            )
        else:
            files = _kubeconfig(access)
            source = f"kubeconfig {files}"
            asyncio.run(_load(files, access.context, found))
    except DiscoveryError:
        raise
    except _ODD as error:
        # Text behind a brace quotes the file, and may be a secret.
        said = str(error).partition("{")[0].strip() or type(error).__name__
        raise DiscoveryError(f"{source} can't be used: {' '.join(said.split())}") from None
    return found


def _kubeconfig(access: KubernetesAccess) -> str:
    """Return file names in the format of ``KUBECONFIG``, at least one of which exists."""
    if access.kubeconfig is not None:
        names = str(access.kubeconfig)
        each = [names]
    else:
        names = os.environ.get("KUBECONFIG") or "~/.kube/config"
        each = [name for name in names.split(":") if name]
    if not any(Path(name).expanduser().exists() for name in each):
        raise DiscoveryError(
            f"kubeconfig {names} is not there"
            + ("" if access.kubeconfig else ", and this is no Pod with a service account")
        )
    return names


async def _load(files: str, context: str | None, found: Configuration) -> None:
    async with asyncio.timeout(CREDENTIALS_S):
        await config.load_kube_config(
            config_file=files, context=context, client_configuration=found, persist_config=False
        )
