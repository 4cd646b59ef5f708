"""An etcd cluster over gRPC: one member at a time, the next one when that fails.

Calls use gRPC and aetcd's stubs, generated from etcd's definitions. aetcd's own client supports
neither TLS nor several members.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from aetcd import rpc

from common.aio.supervised import is_cancelled
from common.errors import DiscoveryError

_Answer = TypeVar("_Answer")

CALL_S: Final = 3.0  # how long one member may take to answer
PAGE: Final = 512  # keys to list at once, without their values, unless they are large

MAX_ANSWER: Final = 32 << 20  # bytes of one answer; 16 values of etcd's default limit have 24 MiB

MAX_DETAIL_LEN: Final = 300  # characters of a server's message in our log

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_ANSWER),
    ("grpc.enable_http_proxy", 0),  # the proxy for users' media is not for cards
)

_BROKEN: Final = (OSError, TimeoutError, asyncio.InvalidStateError, grpc.aio.BaseError)
"""Local failures of a call, beside gRPC's status codes."""

_ANSWERS: Final = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Status codes that any member of the cluster would return."""

_OLD_TOKEN: Final = "etcdserver: revision of auth store is old"
"""Users or roles have changed. A new token is accepted, so the call is retried."""

_TOO_LARGE: Final = "Received message larger than max"


class EtcdRefusedError(DiscoveryError):
    """etcd refused a valid request: the object is missing (an expired lease), or exists."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"etcd refuses: {_said(error)}")
        self.not_found = error.code() is grpc.StatusCode.NOT_FOUND
        self.exists = "already exists" in str(error.details())


class EtcdTooLargeError(DiscoveryError):
    """An answer of etcd is larger than :data:`MAX_ANSWER`."""


class Stored(NamedTuple):
    """A key, the revision of its last put, and its value."""

    key: bytes
    revision: int
    value: bytes


@dataclass(frozen=True)
class EtcdAccess:
    """Members of a cluster as ``HOST:PORT``, and the credentials.

    Attributes:
        ca: certificates of authorities that signed the members'; None for no TLS.
        certificate, key: our own, for members that ask for one.
        user, password_file: for a cluster with authentication.
    """

    endpoints: tuple[str, ...]
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str | None = None
    password_file: Path | None = None


class _Member:
    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self.channel = channel
        self.metadata: tuple[tuple[str, str], ...] = () if token is None else (("token", token),)
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)


class EtcdClient:
    """For one event loop; connects on first use. All methods may raise DiscoveryError."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._at = 0
        self._member: _Member | None = None
        self._old: list[grpc.aio.Channel] = []
        self._connecting = asyncio.Lock()

    async def revisions(self, prefix: bytes) -> AsyncGenerator[list[tuple[bytes, int]], None]:
        """Yield pages of all keys with a prefix, each with the revision of its last put."""
        start, limit = prefix, PAGE
        end = prefix[:-1] + bytes([prefix[-1] + 1])  # no prefix of ours ends with 255
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=limit, keys_only=True)
            try:
                answer = await self._call(lambda member: member.kv.Range, request)
            except EtcdTooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            # Of a server that is no etcd: 300,000 keys at once took the event loop 1.4 s.
            if len(answer.kvs) > limit or (answer.more and not answer.kvs):
                raise DiscoveryError(f"etcd lists {len(answer.kvs)} keys where {limit} were asked")
            yield [(each.key, each.mod_revision) for each in answer.kvs]
            if not answer.more:
                return
            start = answer.kvs[-1].key + b"\0"

    async def read(self, keys: Sequence[bytes]) -> list[Stored]:
        """Return the keys that exist, with their values. Raises EtcdTooLargeError."""
        reads = [rpc.RequestOp(request_range=rpc.RangeRequest(key=key)) for key in keys]
        request = rpc.TxnRequest(success=reads)
        answer = await self._call(lambda member: member.kv.Txn, request)
        return [
            Stored(each.key, each.mod_revision, each.value)
            for one in answer.responses
            for each in one.response_range.kvs
        ]

    async def grant(self, lease: int, ttl_s: int) -> None:
        """Create a lease of ``ttl_s`` seconds at least, under an id that the caller can revoke."""
        request = rpc.LeaseGrantRequest(ID=lease, TTL=ttl_s)
        try:
            await self._call(lambda member: member.lease.LeaseGrant, request)
        except EtcdRefusedError as error:
            if not error.exists:  # an earlier try of this call has made it
                raise

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; return False if it has expired."""

        async def call(member: _Member) -> bool:
            stream = member.lease.LeaseKeepAlive(timeout=CALL_S, metadata=member.metadata)
            try:
                await stream.write(rpc.LeaseKeepAliveRequest(ID=lease))
                answer = await stream.read()
            finally:
                stream.cancel()
            if answer is grpc.aio.EOF:
                raise DiscoveryError("etcd ended the renewal of a lease")
            return bool(answer.TTL > 0)

        return await self._ask(call)

    async def revoke(self, lease: int) -> None:
        try:
            await self._call(
                lambda member: member.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease)
            )
        except EtcdRefusedError as error:
            if not error.not_found:
                raise

    async def check_put(self, key: bytes) -> None:
        """Raise DiscoveryError if we must not put a key. Puts nothing."""
        # etcd checks the permission first, and no key has a version below 0.
        never = rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.LESS, version=0)
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key))
        request = rpc.TxnRequest(compare=[never], success=[put])
        await self._call(lambda member: member.kv.Txn, request)

    async def put(self, key: bytes, value: bytes, lease: int, unless: int) -> int:
        """Put a value under a lease, unless the key is still at revision ``unless``, our last put;
        return the key's revision. Raises EtcdRefusedError: the lease has expired, for example."""
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))
        request = rpc.TxnRequest(success=[put])
        if unless:
            unchanged = rpc.Compare(
                key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=unless
            )
            request = rpc.TxnRequest(compare=[unchanged], failure=[put])
        answer = await self._call(lambda member: member.kv.Txn, request)
        return unless if answer.succeeded and unless else int(answer.header.revision)

    async def close(self) -> None:
        """Close the connection. The next call reconnects."""
        async with self._connecting:
            self._next_member()
            await self._close_old()

    async def _call(self, method: Callable[[_Member], Any], request: object) -> Any:
        return await self._ask(
            lambda member: method(member)(request, timeout=CALL_S, metadata=member.metadata)
        )

    async def _ask(self, call: Callable[[_Member], Awaitable[_Answer]]) -> _Answer:
        """Try each member once and the first one twice: it may have refused an expired token."""
        failed: DiscoveryError | None = None
        for _ in range(len(self._access.endpoints) + 1):
            try:
                async with asyncio.timeout(2 * CALL_S):
                    return await call(await self._connected())
            except grpc.aio.AioRpcError as error:
                if error.code() in _ANSWERS and error.details() != _OLD_TOKEN:
                    raise EtcdRefusedError(error) from error
                if _TOO_LARGE in str(error.details()):
                    raise EtcdTooLargeError(
                        f"an answer of etcd has over {MAX_ANSWER} bytes"
                    ) from error
                failed = self._failed(error)
            except _BROKEN as error:
                failed = self._failed(error)
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                # gRPC cancels the calls of a closed connection.
                raise DiscoveryError("the connection to etcd was closed") from error
        assert failed is not None
        raise failed

    def _failed(self, error: Exception) -> DiscoveryError:
        endpoint = self._access.endpoints[self._at]
        self._next_member()
        said = str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            said = "" if late else _said(error)
            if self._access.ca is None and "Socket closed" in said:
                said += "; if its members use TLS, add ?ca=FILE"
        return DiscoveryError(f"etcd at {endpoint} can't be used: {said or 'no answer in time'}")

    def _next_member(self) -> None:
        member, self._member = self._member, None
        self._at = (self._at + 1) % len(self._access.endpoints)
        if member is not None:
            self._old.append(member.channel)

    async def _close_old(self) -> None:
        while self._old:
            await self._old.pop().close()

    async def _connected(self) -> _Member:
        async with self._connecting:
            await self._close_old()
            if self._member is None:
                self._member = await self._connect(self._access.endpoints[self._at])
            return self._member

    async def _connect(self, endpoint: str) -> _Member:
        # Read at each connect, so that certificates and passwords can be replaced.
        secrets = await asyncio.to_thread(_Secrets.read, self._access)
        if self._access.ca is None:
            channel = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(secrets.ca, secrets.key, secrets.certificate)
            channel = grpc.aio.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)
        if self._access.user is None:
            return _Member(channel, None)
        request = rpc.AuthenticateRequest(name=self._access.user, password=secrets.password)
        try:
            answer = await rpc.AuthStub(channel).Authenticate(request, timeout=CALL_S)
        except BaseException:
            self._old.append(channel)
            raise
        return _Member(channel, answer.token)


class _Secrets(NamedTuple):
    """Contents of the files that an access names."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    password: str

    @classmethod
    def read(cls, access: EtcdAccess) -> "_Secrets":
        """Read the files. Raises OSError, or DiscoveryError: a file has the wrong content."""
        paths = (access.ca, access.certificate, access.key)
        # Read before the check: OpenSSL doesn't say which file is missing.
        ca, certificate, key = (None if path is None else path.read_bytes() for path in paths)
        _check_certificates(access)
        password = b"" if access.password_file is None else access.password_file.read_bytes()
        try:
            text = password.decode().rstrip("\r\n")
        except UnicodeDecodeError:  # which would quote a part of it
            raise DiscoveryError(f"{access.password_file} is not UTF-8") from None
        return cls(ca, certificate, key, text)


def _check_certificates(access: EtcdAccess) -> None:
    """Check certificates here: gRPC would log its errors repeatedly and report only a failure.
    Raises DiscoveryError or OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if access.ca is not None:
            context.load_verify_locations(access.ca)
    except ssl.SSLError:
        raise DiscoveryError(f"{access.ca} holds no certificates") from None
    try:
        if access.certificate is not None:
            # Fails for an encrypted key instead of prompting for its password.
            context.load_cert_chain(access.certificate, access.key, password="")
    except ssl.SSLError:
        raise DiscoveryError(
            f"{access.certificate} and {access.key} are no certificate and its plain key"
        ) from None


def _said(error: grpc.aio.AioRpcError) -> str:
    """Return what a server, or a proxy before it, says: on one line, shortened."""
    return " ".join(str(error.details()).split())[:MAX_DETAIL_LEN]
