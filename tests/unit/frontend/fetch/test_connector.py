"""What vLLM and its users see of all this."""

import asyncio
import base64
import errno
import gc
import io
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from vllm import envs
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal import image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    ImageMediaIO,
    MediaConnector,
    MediaWithBytes,
)

from common.media.decoder_guard import guard_decoders
from common.media.formats import IMAGE_FORMATS
from frontend.fetch.allowance import RequestAllowance
from frontend.fetch.connector import CONNECTOR_NAME, FrontendMediaConnector, register
from frontend.fetch.content import arrived
from frontend.fetch.http import HttpFetcher
from frontend.fetch.loader import MediaLoader
from frontend.fetch.resolver import MAX_CLIENT_LOOKUPS, system_lookup
from frontend.media_limits.policy import FetchPolicy
from frontend.request_context import begin
from tests.odd_urls import ODD
from tests.pictures import data_uri, picture
from tests.unit.frontend.fetch.conftest import MakeLoader, Names
from tests.unit.frontend.fetch.sites import PRIVATE, Site, answer, redirect, silence
from tests.unit.frontend.fetch.videos import jpeg_sequence, video
from tests.waiting import until


def encoded(format_: str, mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    source = Image.open(io.BytesIO(picture("source", (64, 48))))
    source.convert(mode).save(buffer, format_, **options)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded("JPEG", exif=exif)


def animated() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (32, 32), (n * 40, 0, 0)) for n in range(5)]
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


PICTURES = {
    "png": encoded("PNG"),
    "jpeg": encoded("JPEG"),
    "transparent": encoded("PNG", "RGBA"),
    "palette": encoded("PNG", "P"),
    "grey": encoded("PNG", "L"),
    "black and white": encoded("PNG", "1"),
    "cmyk": encoded("JPEG", "CMYK"),
    "tiff": encoded("TIFF"),
    "rotated": rotated(),
    "animated": animated(),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("io_kwargs", [{}, {"image": {"image_mode": None}}], ids=["rgb", "as is"])
async def test_pictures_are_what_vllm_makes_of_them(
    make_loader: MakeLoader, name: str, io_kwargs: dict[str, dict[str, object]]
) -> None:
    """Fresh, kept and handed out again: same type, same pixels, same hash."""
    url = data_uri(PICTURES[name])
    theirs = MediaConnector(io_kwargs).fetch_image(url)
    ours = FrontendMediaConnector(make_loader(), io_kwargs)
    for _ in range(3):
        loaded = await ours.fetch_image_async(url)
        assert type(loaded) is type(theirs) is MediaWithBytes
        assert isinstance(loaded.media, Image.Image)
        assert (loaded.media.mode, loaded.media.size) == (theirs.media.mode, theirs.media.size)
        assert np.array_equal(np.asarray(loaded.media), np.asarray(theirs.media))
        assert loaded.original_bytes == theirs.original_bytes
        assert loaded.io_config == theirs.io_config
        assert hashed(loaded) == hashed(theirs)


def grey(format_: str) -> bytes:
    """A ramp of 16 bits from black to white."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    buffer = io.BytesIO()
    if format_ == "PPM":
        return b"P5 16 16 65535 " + ramp.astype(">u2").tobytes()
    Image.fromarray(ramp).save(buffer, format_)
    return buffer.getvalue()


def tiff(bits: int, kind: int, pixels: bytes) -> bytes:
    """A grey TIFF of 16 by 16 pixels, from the first to the last."""
    short, long = 3, 4
    tags = (
        (256, short, 16),
        (257, short, 16),
        (258, short, bits),
        (259, short, 1),
        (262, short, 1),
        (273, long, 8),
        (277, short, 1),
        (278, short, 16),
        (279, long, len(pixels)),
        (339, short, kind),
    )
    entries = b"".join(struct.pack("<HHII", tag, type_, 1, value) for tag, type_, value in tags)
    head = b"II*\0" + struct.pack("<I", 8 + len(pixels))
    return head + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


def twelve_bits() -> bytes:
    """Two numbers in each three bytes."""
    ramp = np.linspace(0, 4095, 256).astype(int).reshape(-1, 2)
    return b"".join(int(first << 12 | second).to_bytes(3, "big") for first, second in ramp)


async def test_grey_of_12_bits_is_scaled_to_8(make_loader: MakeLoader) -> None:
    """In the 16 bits that Pillow gives it, it was nearly black."""
    guard_decoders()
    url = data_uri(tiff(12, 1, twelve_bits()))
    loaded = await FrontendMediaConnector(make_loader()).fetch_image_async(url)
    expected = np.repeat(np.arange(256).reshape(16, 16, 1), 3, 2)
    assert np.abs(np.asarray(loaded.media).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("bits", "kind", "dtype"), [(16, 2, "<i2"), (32, 1, "<u4"), (32, 2, "<i4"), (32, 3, "<f4")]
)
async def test_grey_of_an_unknown_range_is_refused(
    make_loader: MakeLoader, bits: int, kind: int, dtype: str
) -> None:
    guard_decoders()

    async def loaded(values: np.ndarray, **options: dict[str, object]) -> np.ndarray:
        url = data_uri(tiff(bits, kind, values.astype(dtype).tobytes()))
        connector = FrontendMediaConnector(make_loader(), options)
        return np.asarray((await connector.fetch_image_async(url)).media)

    levels = np.arange(256)
    assert (await loaded(levels)).reshape(256, 3)[:, 0].tolist() == levels.tolist()
    from_0_to_1 = [levels / 255] if dtype == "<f4" else []
    for values in (levels * 100, *from_0_to_1):
        with pytest.raises(ValueError, match="not from 0 to 255: send a picture of 8 or 16 bits"):
            await loaded(values)
        as_it_is = await loaded(values, image={"image_mode": None})
        assert as_it_is.max() == values.astype(dtype).max()


@pytest.mark.parametrize("format_", ["PNG", "TIFF", "PPM"])
async def test_grey_of_16_bits_is_scaled_to_8(make_loader: MakeLoader, format_: str) -> None:
    """vLLM cuts all above 255 of 65,535 to white, so its hash is another."""
    url = data_uri(grey(format_))
    guard_decoders()
    loaded = await FrontendMediaConnector(make_loader()).fetch_image_async(url)
    assert loaded.media.mode == "RGB"
    expected = np.repeat(np.arange(256).reshape(16, 16, 1), 3, 2)
    assert np.abs(np.asarray(loaded.media).astype(int) - expected).max() <= 1
    as_vllms = MediaWithBytes(
        loaded.media,
        loaded.original_bytes,
        {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)},
    )
    assert hashed(loaded) != hashed(as_vllms)
    as_it_is = FrontendMediaConnector(make_loader(), {"image": {"image_mode": None}})
    assert np.asarray((await as_it_is.fetch_image_async(url)).media).max() == 65535


def hashed(item: object) -> str:
    return str(MultiModalHasher.hash_kwargs("blake3", image=item))


async def test_videos_are_what_vllm_makes_of_them(make_loader: MakeLoader, tmp_path: Path) -> None:
    (tmp_path / "v.avi").write_bytes(video(tmp_path))
    io_kwargs = {"video": {"num_frames": 4}}
    for url in (f"file://{tmp_path}/v.avi", jpeg_sequence(3)):
        plain = MediaConnector(io_kwargs, allowed_local_media_path=str(tmp_path))
        theirs = plain.fetch_video(url)
        ours = FrontendMediaConnector(make_loader(local_root=tmp_path), io_kwargs)
        for _ in range(2):
            loaded = await ours.fetch_video_async(url)
            assert type(loaded) is MediaWithBytes and type(loaded.media) is tuple
            assert np.array_equal(loaded.media[0], theirs.media[0])
            assert loaded.media[1] == theirs.media[1]
            assert loaded.original_bytes == theirs.original_bytes


@pytest.mark.parametrize("name", ["nothing", "x" * 500, 7, ["opencv"]])
async def test_a_decoder_that_there_is_not_is_named(
    make_loader: MakeLoader, tmp_path: Path, name: object
) -> None:
    ours = FrontendMediaConnector(make_loader(), {"video": {"video_backend": name}})
    with pytest.raises(VLLMValidationError, match="there is no video_backend") as refused:
        await ours.fetch_video_async(jpeg_sequence(3))
    assert len(str(refused.value)) < 200
    with pytest.raises(VLLMValidationError, match="there is no video_backend"):
        ours.fetch_video(jpeg_sequence(3))
    assert await ours.fetch_image_async(data_uri(picture("beside it")))


@pytest.mark.parametrize(
    ("url", "status", "sentence"),
    [
        (
            "http://user:secret@nowhere.example/a/b.png?token=secret#secret",
            422,
            "Failed to load media from http://nowhere.example/a/b.png: "
            "no public address is known for its host",
        ),
        (
            "http://internal.example/x.png?secret",
            422,
            "Failed to load media from http://internal.example/x.png: "
            "no public address is known for its host",
        ),
        (
            "http://169.254.169.254/latest/?secret",
            400,
            "Failed to load media from http://169.254.169.254/latest/: its address is not public",
        ),
        (
            "http://[::1]:8000/x",
            400,
            "Failed to load media from http://[::1]:8000/x: its address is not public",
        ),
        (
            "gopher://host/x.png?secret",
            400,
            "Failed to load media from gopher://host/x.png: "
            "only http, https and data URLs are fetched",
        ),
        (
            "http://user:secret@host:port/",
            400,
            "Failed to load media from a URL: its URL is malformed",
        ),
        (
            "file:///etc/passwd",
            400,
            "Failed to load media from file:///etc/passwd: "
            "local files are not read (see --allowed-local-media-path)",
        ),
        (
            "iVBORw0KGgo" + "A" * 100_000,
            400,
            "Failed to load media from 'iVBORw0KGgo" + "A" * 69 + "…': it is no URL; send an "
            "http(s) URL, or the data as data:<type>;base64,<data>",
        ),
        (
            "C:\\cat.png",
            400,
            "Failed to load media from 'C:\\\\cat.png': it is no URL; send an "
            "http(s) URL, or the data as data:<type>;base64,<data>",
        ),
        (
            "data:image/png;base64,bm90IGFuIGltYWdl",
            400,
            "Failed to load media from a data URL: it is in no known format, not a picture that is "
            "read here: AVIF, BMP, GIF, ICO, JPEG, PNG, PPM, QOI, TIFF or WEBP",
        ),
        (
            "data:image/png,secret",
            400,
            "Failed to load media from a data URL: only data URLs in base64 are understood",
        ),
    ],
)
async def test_errors(make_loader: MakeLoader, url: str, status: int, sentence: str) -> None:
    await told(FrontendMediaConnector(make_loader()), url, status, sentence)


async def told(connector: FrontendMediaConnector, url: str, status: int, sentence: str) -> None:
    """Assert what a user is told of a picture."""
    with pytest.raises((VLLMValidationError, VLLMUnprocessableEntityError)) as caught:
        await connector.fetch_image_async(url)
    # Not the response's own sentence: vLLM puts <path> for what looks like a path to it.
    assert str(caught.value) == sentence
    assert create_error_response(caught.value).error.code == status


async def test_which_of_several_data_urls_is_no_good(make_loader: MakeLoader) -> None:
    bad = "data:image/png;base64,%%%"

    async def request() -> None:
        begin().put(RequestAllowance(FetchPolicy()))
        connector = FrontendMediaConnector(make_loader())
        await connector.fetch_image_async(data_uri(picture("fine")))
        with pytest.raises(VLLMValidationError, match="a data URL, medium 2 of the request: "):
            await connector.fetch_image_async(bad)

    await asyncio.create_task(request())


async def test_an_error_about_a_medium_is_no_cycle(make_loader: MakeLoader) -> None:
    """The second of two kept all that its fetch had read until garbage was collected."""
    loader = make_loader()
    gc.disable()
    try:
        with pytest.raises(VLLMValidationError) as refused:
            await FrontendMediaConnector(loader).fetch_image_async("data:image/png;base64,!")
        cause = weakref.ref(refused.value.__cause__)
        begin()  # of another request
        del refused
        await until(lambda: cause() is None)
    finally:
        gc.enable()


async def test_errors_of_servers(make_loader: MakeLoader, site: Site, internal: Site) -> None:
    site.routes |= {
        "/404": answer(status=404),
        "/slow": silence,
        "/away": redirect(internal.url("/secret?secret")),
        "/large": answer(b"x" * 200_000),
        "/page": answer(b"\n<!doctype HTML><title>Sign in</title>"),
    }
    patient = FrontendMediaConnector(make_loader(max_mb=0.125))
    hasty = FrontendMediaConnector(make_loader(timeout_s=0.2))
    for path, reason in {
        "/404": "the server answered 404",
        "/page": "the address gave a web page (HTML)",
        "/slow": "the server did not answer in time",
        "/away": "it redirects to where nothing is fetched from: its address is not public",
        "/large": "it is larger than 0.125 MiB",
    }.items():
        url = site.url(path, host="site.example")
        connector = hasty if path == "/slow" else patient
        await told(connector, f"{url}?secret", 422, f"Failed to load media from {url}: {reason}")


@pytest.mark.parametrize(
    "replaced", [(image, "open_image"), (HttpFetcher, "_socket"), (Names, "lookup")]
)
async def test_a_lack_of_files_is_no_mediums_fault(
    make_loader: MakeLoader,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    replaced: tuple[Any, str],
) -> None:
    """Pillow imports its plugins when a picture needs one, and each fetch needs a socket."""

    def lacks(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/srv/venv/plugin.py")

    monkeypatch.setattr(*replaced, lacks)
    site.routes["/picture"] = answer(picture("a"))
    url = site.url("/picture", host="site.example")
    with pytest.raises(GracefulHTTPError, match="can open no more files or threads") as caught:
        await FrontendMediaConnector(make_loader()).fetch_image_async(url)
    assert caught.value.http_status == 503


async def test_look_ups_for_which_no_thread_starts_keep_no_turns(
    make_loader: MakeLoader, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.routes["/picture"] = answer(picture("a"))
    url = site.url("/picture", host="site.example")
    connector = FrontendMediaConnector(make_loader())
    with monkeypatch.context() as lacking:
        lacking.setattr(threading, "_start_new_thread", no_thread)
        for _ in range(MAX_CLIENT_LOOKUPS + 1):
            with pytest.raises(GracefulHTTPError, match="no more files or threads") as caught:
                await connector.fetch_image_async(url)
            assert caught.value.http_status == 503
    assert await connector.fetch_image_async(url)


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_look_up_for_which_no_file_can_be_opened_does_not_say_that_a_name_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise OSError(errno.ENFILE, "Too many open files in system")

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(socket.gaierror):
        system_lookup("site.example")
    monkeypatch.setattr(os, "open", lacks)
    with pytest.raises(OSError, match="in system"):
        system_lookup("site.example")


def test_the_plugins_for_pictures_are_imported_with_the_guard() -> None:
    guard_decoders()
    assert set(IMAGE_FORMATS) <= set(Image.OPEN)


async def test_a_long_path_is_cut(make_loader: MakeLoader) -> None:
    with pytest.raises(VLLMUnprocessableEntityError) as caught:
        await FrontendMediaConnector(make_loader()).fetch_image_async(
            "http://nowhere.example/" + "a" * 5000
        )
    assert len(str(caught.value)) < 400


async def test_vllm_finds_it(make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its chat parser makes one, with vLLM's flags beside ours."""
    monkeypatch.setattr(envs, "VLLM_MAX_IMAGE_PIXELS", envs.VLLM_MAX_IMAGE_PIXELS, raising=False)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    monkeypatch.setattr(
        MEDIA_CONNECTOR_REGISTRY, "name2class", dict(MEDIA_CONNECTOR_REGISTRY.name2class)
    )
    register(make_loader(max_pixels=1000))
    made = MEDIA_CONNECTOR_REGISTRY.load(
        CONNECTOR_NAME,
        media_io_kwargs=None,
        allowed_local_media_path="",
        allowed_media_domains=None,
    )
    assert isinstance(made, MediaConnector)
    with pytest.raises(VLLMValidationError, match="at most 1,000 "):
        await made.fetch_image_async(data_uri(picture("large")))


@pytest.fixture
def lab() -> Iterator[str]:
    """A server that does not need this thread's event loop."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(PICTURES["png"])))
            self.end_headers()
            self.wfile.write(PICTURES["png"])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((PRIVATE, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://{PRIVATE}:{server.server_address[1]}/x.png"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("on_the_loop", [True, False])
async def test_the_synchronous_way_fetches_later(lab: str, on_the_loop: bool) -> None:
    """It must not wait; whoever processes the medium fetches it, under the same policy."""
    for allowed in (True, False):
        loader = MediaLoader(FetchPolicy(allow_private=allowed), 0)
        connector = FrontendMediaConnector(loader)
        try:
            if on_the_loop:
                pending = connector.fetch_image(lab)
            else:
                pending = await asyncio.to_thread(connector.fetch_image, lab)
            same, loaded = await arrived(["as it is", pending])
            assert (same, loaded.original_bytes) == ("as it is", PICTURES["png"])
            assert allowed
        except VLLMValidationError as error:
            assert not allowed and "not public" in str(error)
        finally:
            await loader.close()


async def test_the_synchronous_way_takes_no_embeddings(make_loader: MakeLoader) -> None:
    connector = FrontendMediaConnector(make_loader())
    for fetch in (
        connector.fetch_image_embedding,
        connector.fetch_audio_embedding,
        connector.fetch_video_embedding,
    ):
        with pytest.raises(VLLMValidationError, match="in messages only"):
            fetch("AAAA")


@pytest.mark.parametrize("url", ODD)
async def test_every_odd_url_is_the_users_error(make_loader: MakeLoader, url: str) -> None:
    with pytest.raises((VLLMValidationError, VLLMUnprocessableEntityError)) as caught:
        await FrontendMediaConnector(make_loader()).fetch_image_async(url)
    assert str(caught.value).startswith("Failed to load media from ")


def in_base64(value: object) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
async def test_embeddings(make_loader: MakeLoader, kind: str) -> None:
    fetch = getattr(FrontendMediaConnector(make_loader()), f"fetch_{kind}_embedding_async")
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(await fetch(in_base64(tensor)), tensor)
    for data in ("", "AAAA", in_base64(tensor)[:200], in_base64(os.getcwd), "%%%"):
        with pytest.raises((ValueError, VLLMValidationError)):
            await fetch(data)
    small = FrontendMediaConnector(make_loader(max_mb=0.0001))
    with pytest.raises(VLLMUnprocessableEntityError, match="larger than"):
        await getattr(small, f"fetch_{kind}_embedding_async")(in_base64(tensor))


@pytest.mark.parametrize("orientation", [None, *range(10)])
def test_pictures_are_turned_as_vllm_turns_them(orientation: int | None) -> None:
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    data = encoded("JPEG", exif=exif)
    guard_decoders()
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(ImageMediaIO().load_bytes(data).media), np.asarray(turned))


def test_an_upright_picture_is_not_copied() -> None:
    guard_decoders()
    loaded = ImageMediaIO().load_bytes(encoded("PNG")).media
    assert isinstance(loaded, PngImageFile), "as it was opened"
