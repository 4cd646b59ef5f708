"""Data URLs: what they carry, and what they may not."""

import base64
import binascii

import pytest

from frontend.fetch.data_url import is_data_url, read_data_url
from frontend.media_limits.errors import RefusedError, TooLargeError

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


@pytest.mark.parametrize("payload", ["%%%", "A", "AAA", "pict ure", "💥", PAYLOAD + "\n", "A=A="])
def test_broken_base64_is_named_by_the_decoder(payload: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_data_url("data:;base64," + payload, 100, jpeg_frames=False)
    assert isinstance(caught.value, (binascii.Error, ValueError))


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
