"""Data URLs: what they carry, and what they may not."""

import base64
from urllib.parse import quote

import pytest

from frontend.fetch.content import Content
from frontend.fetch.data_url import has_scheme, is_data_url, read_data_url
from frontend.media_limits.policy import RefusedError, TooLargeError

PAYLOAD = base64.b64encode(b"picture").decode()


@pytest.mark.parametrize(
    "head", ["data:image/png;base64,", "data:;base64,", "DATA:a;charset=x;base64,"]
)
def test_what_they_carry(head: str) -> None:
    url = head + PAYLOAD
    assert is_data_url(url)
    assert read_data_url(url, 7, jpeg_frames=False).data == b"picture"


@pytest.mark.parametrize(
    "url",
    ["data:", "data:image/png;base64", "data:,x", "data:image/png,x", "data:base64,x", "data:;a,x"],
)
def test_what_they_may_not(url: str) -> None:
    with pytest.raises(RefusedError):
        read_data_url(url, 100, jpeg_frames=False)


BINARY = bytes(range(256))
CODED = base64.b64encode(BINARY).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;BASE64,{CODED}",
        f"data:image/png; base64 ,{CODED}",
        "data:image/png;base64," + base64.encodebytes(BINARY).decode(),
        "data:image/png;base64," + base64.encodebytes(BINARY).decode().replace("\n", "\r\n\t "),
        "data:image/png;base64," + quote(CODED, safe=""),
        "data:image/png;base64," + CODED.replace("+", "%2b").replace("/", "%2f"),
        "data:image/png;base64," + CODED.rstrip("="),
    ],
)
def test_forms_that_browsers_take(url: str) -> None:
    assert read_data_url(url, 256, jpeg_frames=False).data == BINARY
    assert read_data_url(url, 256, jpeg_frames=False).digest == Content.of(BINARY).digest
    with pytest.raises(TooLargeError):
        read_data_url(url, 255, jpeg_frames=False)


@pytest.mark.parametrize("payload", ["%%%", "A", "💥", "A=A=", "A-_A", "%41AAA", "===="])
def test_what_is_no_base64_is_said(payload: str) -> None:
    with pytest.raises(RefusedError, match="its data is no base64"):
        read_data_url("data:;base64," + payload, 100, jpeg_frames=False)


def test_escapes_have_a_limit_before_they_are_undone() -> None:
    with pytest.raises(TooLargeError):
        read_data_url("data:;base64," + "%2B" * 10_000, 100, jpeg_frames=False)


@pytest.mark.parametrize("before", range(4))
def test_escapes_are_undone_across_pieces(before: int) -> None:
    text = "A" * before + "%2B%2f" * (1 << 17) + "A" * (4 - before)
    plain = text.replace("%2B", "+").replace("%2f", "/")
    read = read_data_url("data:;base64," + text, 1 << 20, jpeg_frames=False)
    assert read.data == base64.b64decode(plain)


def test_text_before_the_data_has_a_limit() -> None:
    for parameter in ("ab;", ";", "a"):
        with pytest.raises(RefusedError, match="in its first 8192 characters"):
            read_data_url("data:" + parameter * 8192 + "base64,AAAA", 1 << 20, jpeg_frames=False)


def test_schemes_are_looked_for_where_urls_begin() -> None:
    for url in ("ab://c", "http:x", " data:,", "\n" * 16 + "h" * 65 + ":"):
        assert has_scheme(url)
    for text in (" " * 17 + "http:", "h" * 66 + ":", "C:", "a/b:"):
        assert not has_scheme(text)


@pytest.mark.parametrize("size", range(1, 10))
def test_size(size: int) -> None:
    url = "data:;base64," + base64.b64encode(b"x" * size).decode()
    assert len(read_data_url(url, size, jpeg_frames=False).data) == size
    with pytest.raises(TooLargeError):
        read_data_url(url, size - 1, jpeg_frames=False)


def test_a_sequence_of_jpegs() -> None:
    url = f"data:video/jpeg;base64,{PAYLOAD},{PAYLOAD}"
    frames = read_data_url(url, 100, jpeg_frames=True)
    assert frames.jpeg_frames and frames.data == f"{PAYLOAD},{PAYLOAD}".encode()
    one = f"data:video/jpeg;base64,{PAYLOAD}"
    whole = read_data_url(one, 100, jpeg_frames=False)
    assert not whole.jpeg_frames and whole.data == b"picture"
    assert whole.digest != read_data_url(one, 100, jpeg_frames=True).digest
    with pytest.raises(TooLargeError):
        read_data_url(one, 5, jpeg_frames=True)
