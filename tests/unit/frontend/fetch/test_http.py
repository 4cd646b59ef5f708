"""Fetching from servers that are slow, huge, broken or hostile."""

import asyncio
import gzip
import random
import ssl
import threading
import traceback
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from frontend.fetch import RequestAllowance, http
from frontend.fetch.allowance import HeldBytes
from frontend.fetch.http import MAX_HEADS, PIECE, Fetched, Unchanged
from frontend.media_limits import Budget, FetchPolicy
from frontend.media_limits.policy import RefusedError, TooLargeError, UnfetchableError
from frontend.request_context import begin
from tests.unit.frontend.fetch.conftest import MakeFetcher, Names
from tests.unit.frontend.fetch.sites import (
    OTHER_PUBLIC,
    PRIVATE,
    PUBLIC,
    Handler,
    Request,
    Site,
    answer,
    drip,
    endless,
    gated,
    hang_up,
    in_turn,
    redirect,
    serving,
    silence,
)
from tests.waiting import until

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.0)


async def body(
    fetching: MakeFetcher, url: str, max_bytes: int = MEGABYTE, **limits: object
) -> bytes:
    got = await fetching(**limits).fetch(url, max_bytes)
    assert isinstance(got, Fetched)
    return b"".join(got.chunks)


async def test_a_body_arrives(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(b"picture")
    assert await body(make_fetcher, site.url(host="site.example")) == b"picture"
    (request,) = site.requests
    assert request.headers["Host"] == f"site.example:{site.port}"
    assert "Cookie" not in request.headers and "Referer" not in request.headers


async def test_signed_addresses_go_out_as_they_are(make_fetcher: MakeFetcher, site: Site) -> None:
    """And so do those that a redirect leads to."""
    signed = "/http%3A%2F%2Forigin%2Fcat%7E1.png"
    query = "?Credential=AK%2F2026%2Feu&Date=00%3A00%3A00Z&sig=x%2By%3D"
    site.routes["/a"] = redirect(signed + query)
    site.routes[signed] = answer(b"body")
    for path in (signed + query, "/a"):
        fetched = await make_fetcher().fetch(site.url(path, host="site.example"), 100)
        assert isinstance(fetched, Fetched)
    assert [request.path for request in site.requests] == [signed + query, "/a", signed + query]


async def test_connections_are_used_again(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(b"picture")
    fetcher = make_fetcher()
    for _ in range(3):
        await fetcher.fetch(site.url(), 100)
    assert site.connections == 1


# Addresses


async def test_private_addresses_are_not_connected_to(
    make_fetcher: MakeFetcher, internal: Site
) -> None:
    with pytest.raises(RefusedError, match="not public"):
        await make_fetcher().fetch(internal.url(), 100)
    with pytest.raises(UnfetchableError, match="no public address is known"):
        await make_fetcher().fetch(internal.url(host="internal.example"), 100)


async def test_names_can_not_be_probed(make_fetcher: MakeFetcher, internal: Site) -> None:
    sentences = set()
    for host in ("internal.example", "nowhere.example"):
        with pytest.raises(UnfetchableError) as caught:
            await make_fetcher().fetch(f"http://{host}:{internal.port}/", 100)
        sentences.add(str(caught.value))
    assert len(sentences) == 1


async def test_private_addresses_can_be_allowed(make_fetcher: MakeFetcher) -> None:
    async with serving(Site(PRIVATE)) as lab:
        lab.routes["/x.png"] = answer(b"picture")
        for host in (None, "internal.example"):
            fetched = await body(make_fetcher, lab.url(host=host), allow_private=True)
            assert fetched == b"picture"


@pytest.mark.parametrize(
    "spelling",
    ["0.0.0.0", "[::]", "[::1]", "127.0.0.1.", "127.1", "0x7f000001", "0177.0.0.1", "2130706433"],
)
async def test_no_spelling_gets_through(
    make_fetcher: MakeFetcher, internal: Site, spelling: str
) -> None:
    with pytest.raises(RefusedError):
        await make_fetcher().fetch(internal.url(host=spelling), 100)


async def test_a_name_that_changes_its_mind(
    make_fetcher: MakeFetcher, names: Names, site: Site, internal: Site
) -> None:
    """What was checked is what is connected to; the next look-up is checked again."""
    names["rebinding.example"] = [[PUBLIC], [PRIVATE]]
    site.routes["/x.png"] = answer(b"picture", Connection="close")
    fetcher = make_fetcher()
    url = site.url(host="rebinding.example")
    assert isinstance(await fetcher.fetch(url, 100), Fetched)
    assert names.asked == ["rebinding.example"]
    await site.closed()
    with pytest.raises(UnfetchableError, match="no public address"):
        await fetcher.fetch(url, 100)
    assert names.asked == ["rebinding.example"] * 2


async def test_a_name_that_changes_its_mind_between_redirects(
    make_fetcher: MakeFetcher, names: Names, site: Site, internal: Site
) -> None:
    names["rebinding.example"] = [[PUBLIC], [PRIVATE]]
    site.routes["/x.png"] = answer(
        status=302, Location=site.url("/y.png", host="rebinding.example"), Connection="close"
    )
    with pytest.raises(UnfetchableError):
        await make_fetcher().fetch(site.url(host="rebinding.example"), 100)


@pytest.mark.parametrize("order", [[PRIVATE, PUBLIC], [PUBLIC, PRIVATE]])
async def test_of_several_addresses_only_public_ones_are_tried(
    make_fetcher: MakeFetcher, names: Names, site: Site, internal: Site, order: list[str]
) -> None:
    names["both.example"] = [order]
    site.routes["/x.png"] = answer(b"picture")
    assert await body(make_fetcher, site.url(host="both.example")) == b"picture"


async def test_the_last_word_is_at_the_socket(
    make_fetcher: MakeFetcher, internal: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a URL got past every check before."""
    fetcher = make_fetcher()
    monkeypatch.setattr(type(fetcher._policy), "check_url", lambda *_: None)
    with pytest.raises(UnfetchableError, match="can't be reached"):
        await fetcher.fetch(internal.url(), 100)


async def test_proxies_of_the_environment_are_not_used(
    make_fetcher: MakeFetcher, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{OTHER_PUBLIC}:1")
    site.routes["/x.png"] = answer(b"picture")
    assert await body(make_fetcher, site.url()) == b"picture"


async def test_domains(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes |= {
        "/x.png": answer(b"picture"),
        "/away.png": redirect(site.url(host="other.example")),
    }
    domains = ("site.example",)
    url = site.url(host="site.example")
    assert await body(make_fetcher, url, allowed_domains=domains) == b"picture"
    with pytest.raises(RefusedError, match="allowed domains"):
        await body(make_fetcher, site.url(host="other.example"), allowed_domains=domains)
    with pytest.raises(UnfetchableError, match="allowed domains"):
        await body(
            make_fetcher, site.url("/away.png", host="site.example"), allowed_domains=domains
        )


# Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(make_fetcher: MakeFetcher, site: Site, status: int) -> None:
    async with serving(Site(OTHER_PUBLIC)) as other:
        site.routes["/x.png"] = redirect(other.url("/y.png", host="other.example"), status)
        other.routes["/y.png"] = answer(b"picture")
        assert await body(make_fetcher, site.url()) == b"picture"


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_redirects_are_counted(
    make_fetcher: MakeFetcher, site: Site, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_REDIRECTS", limit)
    for n in range(5):
        site.routes[f"/{n}"] = redirect(f"/{n + 1}")
    site.routes["/5"] = answer(b"picture")
    enough = site.url(f"/{5 - limit}")
    assert await body(make_fetcher, enough) == b"picture"
    with pytest.raises(UnfetchableError, match=f"more than {limit} times"):
        await body(make_fetcher, site.url(f"/{4 - limit}"))


async def test_a_circle_ends(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = redirect("/x.png")
    with pytest.raises(UnfetchableError, match="more than 3 times"):
        await make_fetcher().fetch(site.url(), 100)
    assert len(site.requests) == 4


@pytest.mark.parametrize(
    "target",
    [
        f"http://{PRIVATE}:PORT/secret",
        "http://internal.example:PORT/secret",
        "//127.1:PORT/secret",
        "http://[::ffff:127.0.0.1]:PORT/secret",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "gopher://internal.example:PORT/",
        "http://user:password@internal.example:PORT/",
        "http://[",
        "http://internal.example:PORT\\@site.example/",
    ],
)
async def test_redirects_into_the_dark(
    make_fetcher: MakeFetcher, site: Site, internal: Site, target: str
) -> None:
    site.routes["/x.png"] = redirect(target.replace("PORT", str(internal.port)))
    with pytest.raises(UnfetchableError) as caught:
        await make_fetcher().fetch(site.url(), 100)
    for secret in ("internal", "127", "secret", "passw", str(internal.port)):
        assert secret not in caught.value.reason


async def test_credentials_stay_where_they_belong(make_fetcher: MakeFetcher, site: Site) -> None:
    async with serving(Site(OTHER_PUBLIC)) as other:
        site.routes["/x.png"] = redirect(other.url("/y.png"))
        other.routes["/y.png"] = answer(b"picture")
        await make_fetcher().fetch(f"http://user:secret@{site.host}:{site.port}/x.png", 100)
        assert site.requests[0].headers["Authorization"].startswith("Basic ")
        assert "Authorization" not in other.requests[0].headers


async def test_cookies_are_not_kept(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(b"picture", Set_Cookie="a=b")
    fetcher = make_fetcher()
    for _ in range(2):
        await fetcher.fetch(site.url(), 100)
    assert "Cookie" not in site.requests[1].headers


# Size


async def test_an_announced_size_is_believed(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(b"", length=101)
    with pytest.raises(TooLargeError):
        await make_fetcher().fetch(site.url(), 100)


async def test_an_endless_body_is_cut(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = endless(b"x" * 1000)
    with pytest.raises(TooLargeError, match=r"larger than 0\.25 MiB"):
        await make_fetcher().fetch(site.url(), MEGABYTE // 4)
    await site.closed()


async def test_the_limit_itself_is_fine(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(b"x" * 100)
    assert len(await body(make_fetcher, site.url(), 100)) == 100
    with pytest.raises(TooLargeError):
        await body(make_fetcher, site.url(), 99)


def bomb(encoding: str) -> bytes:
    """100 MB in 100 kB."""
    zeros = bytes(100 * MEGABYTE)
    return gzip.compress(zeros) if encoding == "gzip" else zlib.compress(zeros)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_counts_unpacked(make_fetcher: MakeFetcher, site: Site, encoding: str) -> None:
    site.routes["/x.png"] = answer(bomb(encoding), Content_Encoding=encoding)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError):
            await make_fetcher().fetch(site.url(), MEGABYTE)
        assert tracemalloc.get_traced_memory()[1] < 8 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert site.requests[0].headers["Accept-Encoding"] == "identity"


async def test_compression_that_was_not_asked_for(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes["/x.png"] = answer(gzip.compress(b"picture"), Content_Encoding="gzip")
    assert await body(make_fetcher, site.url()) == b"picture"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_compression_that_is_none(
    make_fetcher: MakeFetcher, site: Site, encoding: str
) -> None:
    site.routes["/x.png"] = answer(b"picture", Content_Encoding=encoding)
    with pytest.raises(UnfetchableError):
        await make_fetcher().fetch(site.url(), 100)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_heads_without_end_are_no_answer(
    make_fetcher: MakeFetcher, site: Site, head: bytes
) -> None:
    """Each costs the event loop more than the server."""
    sent = 0

    async def heads(_: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while not writer.is_closing():
            writer.write(head * 100)
            sent += 100
            await writer.drain()

    site.routes["/x.png"] = in_turn(answer(status=404), heads)
    fetcher = make_fetcher()
    for _ in range(2):  # the second request goes over the connection of the first
        with pytest.raises(UnfetchableError, match=r"answered 404|makes no sense|answered 200"):
            await fetcher.fetch(site.url(), MEGABYTE)
    await site.closed()
    assert len(site.requests) == 2


async def test_a_few_interim_answers_are_passed_over(make_fetcher: MakeFetcher, site: Site) -> None:
    async def hints(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3)
        await answer(b"picture")(request, writer)

    site.routes["/x.png"] = hints
    assert await body(make_fetcher, site.url()) == b"picture"


@pytest.mark.parametrize("count", [3, MAX_HEADS + 1])
async def test_interim_answers_that_come_one_by_one(
    make_fetcher: MakeFetcher, site: Site, count: int
) -> None:
    async def hints(request: Request, writer: asyncio.StreamWriter) -> None:
        for _ in range(count):
            writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
            for _ in range(20):  # turns of the event loop, which the fetcher shares
                await asyncio.sleep(0)
        await answer(b"picture")(request, writer)

    site.routes["/x.png"] = hints
    if count > MAX_HEADS:
        with pytest.raises(UnfetchableError, match="makes no sense"):
            await body(make_fetcher, site.url())
    else:
        assert await body(make_fetcher, site.url()) == b"picture"


@pytest.mark.parametrize("size", [1, 16])
async def test_chunks_of_a_few_bytes_are_refused(
    make_fetcher: MakeFetcher, site: Site, size: int
) -> None:
    """A body of such chunks costs the event loop a microsecond for each."""

    async def chunks(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (size, b"x" * size) * 1000)
            await writer.drain()

    site.routes["/x.png"] = chunks
    with pytest.raises(UnfetchableError, match="makes no sense"):
        await make_fetcher().fetch(site.url(), 16 * MEGABYTE)
    await site.closed()
    assert len(site.requests) == 1


async def test_chunks_of_a_few_bytes_are_refused_at_their_first_piece(
    make_fetcher: MakeFetcher, site: Site
) -> None:
    """Eight such answers of 512 KiB at a time kept others' fetches waiting for 2.3 seconds."""
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40_000

    async def chunks(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(sent + b"0\r\n\r\n")
        await writer.drain()

    site.routes["/x.png"] = chunks
    with pytest.raises(UnfetchableError, match="makes no sense"):
        await make_fetcher().fetch(site.url(), MEGABYTE)


async def test_chunks_of_a_usual_size_arrive(make_fetcher: MakeFetcher, site: Site) -> None:
    async def chunks(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write((b"80\r\n" + b"x" * 128 + b"\r\n") * 8192 + b"0\r\n\r\n")
        await writer.drain()

    site.routes["/x.png"] = chunks
    assert await body(make_fetcher, site.url()) == b"x" * MEGABYTE


async def test_what_is_packed_well_or_badly_arrives(make_fetcher: MakeFetcher, site: Site) -> None:
    """Also where unpacking is slower than the server."""
    for content in (bytes(4 * MEGABYTE), random.Random(1).randbytes(4 * MEGABYTE)):
        site.routes["/x.png"] = answer(gzip.compress(content), Content_Encoding="gzip")
        assert await body(make_fetcher, site.url(), 5 * MEGABYTE) == content


async def test_others_have_turns_while_a_body_is_unpacked(
    make_fetcher: MakeFetcher, site: Site
) -> None:
    site.routes["/x.png"] = answer(bomb("gzip"), Content_Encoding="gzip")
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(take_turns())
    fetched = await make_fetcher().fetch(site.url(), 128 * MEGABYTE)
    others.cancel()
    assert isinstance(fetched, Fetched) and len(fetched.chunks) >= 400
    assert turns > len(fetched.chunks)


# Time


@pytest.mark.parametrize(
    "handler",
    [
        silence,
        drip(b"x" * 1000, 0.02),
        drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000, 0.02, head=b""),
        drip(
            b"400\r\n" + b"x" * 900,
            0.02,
            head=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
        drip(b"", 0.0),
    ],
    ids=["silent", "slow body", "slow head", "slow chunk", "stops"],
)
async def test_slow_servers(make_fetcher: MakeFetcher, site: Site, handler: Handler) -> None:
    async def slow(request, writer):  # type: ignore[no-untyped-def]
        await handler(request, writer)
        await asyncio.Event().wait()

    site.routes["/x.png"] = slow
    # What drips takes 20 s, so a limit on the time between two bytes would not end it here.
    async with asyncio.timeout(10):
        with pytest.raises(UnfetchableError, match="in time"):
            await make_fetcher(timeout_s=0.3).fetch(site.url(), MEGABYTE)
    await site.closed()


async def test_time_spans_redirects(
    make_fetcher: MakeFetcher, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_REDIRECTS", 100)

    async def late(request, writer):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.05)
        await redirect("/x.png")(request, writer)

    site.routes["/x.png"] = late
    # A limit on each of them would let the hundred pass, and refuse the next.
    with pytest.raises(UnfetchableError, match="in time"):
        await make_fetcher(timeout_s=0.5).fetch(site.url(), 100)


async def test_a_name_server_that_never_answers(
    make_fetcher: MakeFetcher, site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def stuck(host: str) -> list[str]:
        answered.wait(5)
        return [PUBLIC]

    monkeypatch.setattr(names, "lookup", stuck)
    with pytest.raises(UnfetchableError, match="in time"):
        await make_fetcher(timeout_s=0.2).fetch(site.url(host="site.example"), 100)
    answered.set()
    assert site.connections == 0


# What goes wrong


async def test_nobody_there(make_fetcher: MakeFetcher, site: Site) -> None:
    async with serving(Site(OTHER_PUBLIC)) as gone:
        pass
    with pytest.raises(UnfetchableError, match="can't be reached"):
        await make_fetcher().fetch(gone.url(), 100)


@pytest.mark.parametrize("status", [204, 300, 302, 304, 400, 401, 403, 404, 410, 429])
async def test_no_body_to_be_had(make_fetcher: MakeFetcher, site: Site, status: int) -> None:
    site.routes["/x.png"] = answer(status=status)
    if status == 204:
        assert await body(make_fetcher, site.url()) == b""
        return
    with pytest.raises(UnfetchableError, match=f"answered {status}"):
        await make_fetcher().fetch(site.url(), 100)
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "bad",
    [hang_up, answer(status=503), answer(b"cut", length=10)],
    ids=["hangs up", "503", "cut off"],
)
async def test_what_may_pass_is_tried_again(
    make_fetcher: MakeFetcher, site: Site, bad: Handler
) -> None:
    site.routes["/x.png"] = in_turn(bad, answer(b"picture"))
    assert await body(make_fetcher, site.url()) == b"picture"
    site.routes["/x.png"] = bad
    with pytest.raises(UnfetchableError):
        await make_fetcher().fetch(site.url(), 100)


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 10_000 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe/\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
        b"<html>",
    ],
)
async def test_what_is_no_http(make_fetcher: MakeFetcher, site: Site, head: bytes) -> None:
    async def handle(_, writer):  # type: ignore[no-untyped-def]
        writer.write(head)
        writer.close()

    site.routes["/x.png"] = handle
    with pytest.raises(UnfetchableError):
        await make_fetcher().fetch(site.url(), MEGABYTE)


# Entity tags


async def test_a_known_body_is_not_sent_again(make_fetcher: MakeFetcher, site: Site) -> None:
    site.routes |= {"/x.png": answer(status=304), "/first": redirect("/x.png")}
    got = await make_fetcher().fetch(
        site.url("/first"), 100, lambda url: '"a"' if url.path == "/x.png" else None
    )
    assert isinstance(got, Unchanged) and got.url.path == "/x.png"
    assert "If-None-Match" not in site.requests[0].headers
    assert site.requests[1].headers["If-None-Match"] == '"a"'


@pytest.mark.parametrize(
    ("etag", "kept"),
    [('"a"', '"a"'), ('""', '""'), ('W/"a"', None), ("a", None), ('"' + "a" * 300 + '"', None)],
)
async def test_only_strong_tags_count(
    make_fetcher: MakeFetcher, site: Site, etag: str, kept: str | None
) -> None:
    site.routes["/x.png"] = answer(b"picture", ETag=etag)
    got = await make_fetcher().fetch(site.url(), 100)
    assert isinstance(got, Fetched) and got.etag == kept


# Cancellation


@pytest.mark.parametrize("handler", [silence, drip(b"x" * 1000, 0.01)])
async def test_cancelling_closes_the_connection(
    make_fetcher: MakeFetcher, site: Site, handler: Handler
) -> None:
    reached = asyncio.Event()

    async def handle(request, writer):  # type: ignore[no-untyped-def]
        reached.set()
        await handler(request, writer)

    site.routes["/x.png"] = handle
    fetcher = make_fetcher()
    fetch = asyncio.create_task(fetcher.fetch(site.url(), 1 << 40))
    await reached.wait()
    await asyncio.sleep(0.02)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await site.closed()
    assert not fetcher._connector._acquired


async def test_no_more_than_so_many_connections_per_host(
    make_fetcher: MakeFetcher, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than half of them for one client."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS_PER_HOST", 4)
    gate = asyncio.Event()
    site.routes["/x.png"] = gated(gate, answer(b"picture"))
    fetcher = make_fetcher()
    fetches = []

    def reached(most: int) -> bool:
        return site.open == most

    for peer, most in (("127.0.0.2", 2), ("127.0.0.3", 4), ("127.0.0.4", 4)):
        begin().peer = peer
        fetches += [asyncio.create_task(fetcher.fetch(site.url(), 100)) for _ in range(5)]
        await until(partial(reached, most))
        await asyncio.sleep(0.1)  # one more would come now
        assert site.open == most
    gate.set()
    assert len(await asyncio.gather(*fetches)) == 15


async def test_an_error_keeps_no_bytes(make_fetcher: MakeFetcher, site: Site) -> None:
    """Eight requests kept 3 GB until it was collected as garbage."""
    site.routes["/x.png"] = answer(bytes(PIECE * 3))
    held = HeldBytes(RequestAllowance(FetchPolicy()), Budget(PIECE * 2, 1, "bytes"))
    with pytest.raises(RefusedError) as refused:
        await make_fetcher().fetch(site.url(), 1 << 30, held=held)
    lists = [
        value
        for frame, _ in traceback.walk_tb(refused.tb)
        for value in frame.f_locals.values()
        if isinstance(value, list)
    ]
    assert lists == [[]]


# TLS


def certificate(name: str, directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server with a certificate of its own, and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain = directory / "chain.pem"
    chain.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain)
    client = ssl.create_default_context(cafile=str(chain))
    return server, client


async def test_the_name_is_kept_for_tls(make_fetcher: MakeFetcher, tmp_path: Path) -> None:
    server, client = certificate("site.example", tmp_path)
    asked: list[str | None] = []
    server.sni_callback = lambda _, name, __: asked.append(name)
    async with serving(Site(PUBLIC), server) as secure:
        secure.routes |= {
            "/x.png": answer(b"picture"),
            "/down.png": redirect(secure.url(host="site.example")),
        }
        url = secure.url(host="site.example", scheme="https")
        assert await body(make_fetcher, url, tls=client) == b"picture"
        assert asked == ["site.example"]
        assert secure.requests[0].headers["Host"] == f"site.example:{secure.port}"
        with pytest.raises(UnfetchableError, match="drops encryption"):
            await make_fetcher(tls=client).fetch(
                secure.url("/down.png", host="site.example", scheme="https"), 100
            )


async def test_certificates_are_checked(
    make_fetcher: MakeFetcher, names: Names, tmp_path: Path
) -> None:
    server, client = certificate("site.example", tmp_path)
    names["impostor.example"] = [[PUBLIC]]
    async with serving(Site(PUBLIC), server) as secure:
        for host, tls in (("impostor.example", client), ("site.example", None)):
            with pytest.raises(UnfetchableError, match="no secure connection"):
                await make_fetcher(tls=tls).fetch(secure.url(host=host, scheme="https"), 100)
    assert secure.requests == []
