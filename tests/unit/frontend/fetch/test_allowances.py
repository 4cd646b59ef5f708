"""What one request, and all of them together, may make the frontend hold."""

import asyncio
import gc
import io
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped] # it has no types
from PIL import Image
from vllm import envs
from vllm.exceptions import GracefulHTTPError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.video_decoders.base import VideoSourceMetadata
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

from common.errors import OverloadedError
from frontend.asgi import Door, Message, Receive, Scope, Send
from frontend.fetch import decoders as decoding
from frontend.fetch import loader as loader_module
from frontend.fetch import resolver as resolver_module
from frontend.fetch.allowance import (
    MAX_DECODES,
    MAX_FETCHES,
    RequestAllowance,
    allow_media,
    current_allowance,
)
from frontend.fetch.connector import FrontendMediaConnector
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode, limit_decoders
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy, RefusedError, RequestLimitError
from tests.clips import data_url, film, sound
from tests.pictures import blank_picture, data_uri, picture
from tests.unit.frontend.fetch.conftest import MakeLoader, Names
from tests.unit.frontend.fetch.sites import PUBLIC, Site, answer, gated
from tests.unit.frontend.fetch.videos import jpeg_sequence, video
from tests.unit.frontend.http.asking import asking
from tests.waiting import until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def limited_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_MAX_IMAGE_PIXELS", envs.VLLM_MAX_IMAGE_PIXELS, raising=False)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    limit_decoders(FetchPolicy())


async def as_a_request(policy: FetchPolicy, work: Coroutine[Any, Any, Any]) -> Any:
    """Run something as a request of its own."""
    results: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        results.append(await work)

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        pass

    door = Door(app, [partial(allow_media, policy=policy)])
    task = asyncio.create_task(door({"type": "http"}, receive, send))
    try:
        await task
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return results[0]


async def until_held(loader: MediaLoader, *, nbytes: int = 0, pixels: int = 0) -> None:
    """Wait until so much is held, nothing if it isn't said: the thread that decoded has a result
    for a moment longer than the event loop needs to hand it on."""

    def is_held() -> bool:
        gc.collect()  # errors hold the frames that they went through
        budgets = loader.budgets
        return (budgets.held.reserved, budgets.decoding.reserved) == (nbytes, pixels)

    await until(is_held)


def incompressible(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


# One request


async def test_a_request_may_have_so_many_media(make_loader: MakeLoader) -> None:
    loader = make_loader(max_per_request=3)

    async def ask(count: int) -> None:
        for n in range(count):
            # One for each message, as vLLM makes them.
            connector = FrontendMediaConnector(loader)
            await asyncio.gather(connector.fetch_image_async(data_uri(picture(f"{n}", (8, 8)))))

    await as_a_request(loader.policy, ask(3))
    with pytest.raises(VLLMValidationError, match="may have 3 media at most"):
        await as_a_request(loader.policy, ask(4))
    await as_a_request(loader.policy, ask(3))


async def test_media_behind_one_that_failed_are_not_fetched(
    make_loader: MakeLoader, site: Site
) -> None:
    """256 addresses that never answer held a request for eight minutes: vLLM waits for all."""
    paths = [f"/{n}" for n in range(3 * MAX_FETCHES)]
    site.routes |= {path: answer(status=404) for path in paths}
    loader = make_loader()

    async def ask() -> list[object]:
        connector = FrontendMediaConnector(loader)
        fetches = (connector.fetch_image_async(site.url(path)) for path in paths)
        return list(await asyncio.gather(*fetches, return_exceptions=True))

    found: list[object] = []

    async def noted() -> None:
        found.extend(await ask())

    await as_a_request(loader.policy, noted())
    assert {type(each) for each in found} == {VLLMUnprocessableEntityError}
    assert {str(each) for each in found[MAX_FETCHES:]} <= {
        str(each) for each in found[:MAX_FETCHES]
    }
    assert len(site.requests) == MAX_FETCHES
    await until_held(loader)


async def test_embeddings_are_counted_too(make_loader: MakeLoader) -> None:
    loader = make_loader(max_per_request=1, max_request_mb=1.0)
    connector = FrontendMediaConnector(loader)

    async def ask(data: str) -> None:
        await connector.fetch_image_embedding_async(data)
        await connector.fetch_image_embedding_async(data)

    file = io.BytesIO()
    np.save(file, np.zeros(8, np.float32))
    with pytest.raises(VLLMValidationError, match="1 media at most"):
        await as_a_request(loader.policy, ask(data_uri(file.getvalue()).partition(",")[2]))
    with pytest.raises(VLLMValidationError, match="1 MiB together"):
        await as_a_request(loader.policy, ask("A" * (2 * MIB)))
    await until_held(loader)


async def test_a_request_may_have_so_many_bytes(
    make_loader: MakeLoader, site: Site, tmp_path: Path
) -> None:
    bulk = incompressible(MIB)
    loader = make_loader(max_request_mb=2.5, local_root=tmp_path)
    for n in range(3):
        site.routes[f"/{n}"] = answer(bulk)
        (tmp_path / f"{n}").write_bytes(bulk)
    sources = {
        "http": [site.url(f"/{n}") for n in range(3)],
        "data": [data_url("image/png", bulk)] * 3,
        "file": [f"file://{tmp_path}/{n}" for n in range(3)],
    }

    async def ask(urls: list[str]) -> None:
        await asyncio.gather(*(loader.fetch(url, ImageMediaIO()) for url in urls))

    mixed = [urls[0] for urls in sources.values()]
    for urls in [*sources.values(), mixed]:
        with pytest.raises(RequestLimitError, match=r"2.5 MiB together"):
            await as_a_request(loader.policy, ask(urls))
        await as_a_request(loader.policy, ask(urls[:2]))
    await until_held(loader)


async def test_a_request_may_decode_so_many_pixels(make_loader: MakeLoader) -> None:
    loader = make_loader(max_request_megapixels=2.5, cache_bytes=0)

    async def ask(count: int) -> None:
        for n in range(count):
            await loader.load(data_uri(blank_picture(1000 + n)), ImageMediaIO())

    await as_a_request(loader.policy, ask(2))
    with pytest.raises(RequestLimitError, match=r"2.5 megapixels together"):
        await as_a_request(loader.policy, ask(3))
    await until_held(loader)


async def test_what_is_known_is_not_decoded_so_it_costs_nothing(make_loader: MakeLoader) -> None:
    loader = make_loader(max_request_megapixels=1.5)

    async def ask() -> None:
        for _ in range(5):
            await loader.load(data_uri(blank_picture(1000)), ImageMediaIO())

    await as_a_request(loader.policy, ask())
    await until_held(loader)


async def test_another_request_for_the_same_is_not_refused_with_it(
    make_loader: MakeLoader, site: Site
) -> None:
    """Who began the fetch may not have it; who joined it may."""
    bulk = incompressible(MIB)
    go = asyncio.Event()
    site.routes |= {"/first": answer(bulk), "/shared": gated(go, answer(bulk))}
    loader = make_loader(max_request_mb=1.5)

    async def greedy() -> None:
        await loader.fetch(site.url("/first"), ImageMediaIO())
        await loader.fetch(site.url("/shared"), ImageMediaIO())

    first = asyncio.create_task(as_a_request(loader.policy, greedy()))
    await until(lambda: any("/shared" in str(request) for request in site.requests))
    second = asyncio.create_task(
        as_a_request(loader.policy, loader.fetch(site.url("/shared"), ImageMediaIO()))
    )
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(RequestLimitError):
        await first
    assert (await second).data == bulk


async def test_urls_whose_name_servers_never_answer_leave_others_theirs(
    make_loader: MakeLoader, site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of 256 of them took all threads for names."""
    answered = threading.Event()
    lookup = names.lookup

    def often_stuck(host: str) -> list[str]:
        if host.startswith("stuck"):
            answered.wait(60)
        return lookup(host)

    monkeypatch.setattr(names, "lookup", often_stuck)
    site.routes["/x"] = answer(b"picture")
    loader = make_loader()

    async def greedy() -> None:
        urls = (site.url(host=f"stuck{n}.example") for n in range(256))
        await asyncio.gather(*(loader.fetch(url, ImageMediaIO()) for url in urls))

    first = asyncio.create_task(as_a_request(loader.policy, greedy()))
    try:
        await until(lambda: len(loader._fetches) >= 16)
        url = site.url("/x", host="site.example")
        content = await as_a_request(loader.policy, loader.fetch(url, ImageMediaIO()))
        assert content.data == b"picture"
        assert len(loader._fetches) == 16
    finally:
        first.cancel()
        answered.set()
        await asyncio.gather(first, return_exceptions=True)


async def test_look_ups_that_nobody_waits_for_count_until_their_threads_return(
    make_loader: MakeLoader, site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    asked: list[str] = []

    def stuck(host: str) -> list[str]:
        asked.append(host)
        answered.wait(60)
        return [PUBLIC]

    monkeypatch.setattr(names, "lookup", stuck)
    monkeypatch.setattr(resolver_module, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(resolver_module, "MAX_CLIENT_LOOKUPS", 20)
    site.routes["/x"] = answer(b"picture")
    loader = make_loader()

    async def ask(count: int) -> list[object]:
        fetches = (
            loader.fetch(site.url("/x", host=f"{n}.example"), ImageMediaIO()) for n in range(count)
        )
        return await asyncio.gather(*fetches, return_exceptions=True)

    try:
        refused = await as_a_request(loader.policy, ask(40))
        assert len(asked) == 16, "of one request"
        assert [str(each) for each in refused[16:]] == [
            "too many names of hosts are still looked up"
        ] * 24
        late = await as_a_request(loader.policy, ask(16))
        assert len(asked) == 20, "of one client"
        assert [str(each) for each in late] == ["its host's name was not found in time"] * 16
        with asking(key="another"):
            one = asyncio.create_task(
                loader.fetch(site.url("/x", host="y.example"), ImageMediaIO())
            )
            await until(lambda: len(asked) == 21)
            await asyncio.gather(one, return_exceptions=True)
    finally:
        answered.set()
    assert (await ask(1))[0].data == b"picture"  # type: ignore[attr-defined]


async def test_a_shared_fetch_counts_for_each(make_loader: MakeLoader, site: Site) -> None:
    bulk = incompressible(MIB)
    site.routes |= {"/x": answer(bulk)}
    loader = make_loader(max_request_mb=1.5)

    async def ask() -> None:
        await asyncio.gather(*(loader.fetch(site.url("/x"), ImageMediaIO()) for _ in range(2)))

    with pytest.raises(RequestLimitError):
        await as_a_request(loader.policy, ask())


# All requests together


async def test_bytes_of_all_requests(make_loader: MakeLoader, site: Site) -> None:
    bulk = incompressible(MIB)
    site.routes |= {f"/{n}": answer(bulk) for n in range(3)}
    loader = make_loader(held_mb=2.5, cache_bytes=0)
    held = [
        await as_a_request(loader.policy, loader.fetch(site.url(f"/{n}"), ImageMediaIO()))
        for n in range(2)
    ]
    with pytest.raises(OverloadedError, match=r"all 2.5 MiB .* try again later"):
        await as_a_request(loader.policy, loader.fetch(site.url("/2"), ImageMediaIO()))
    with pytest.raises(GracefulHTTPError) as refused:
        await FrontendMediaConnector(loader).fetch_image_async(site.url("/2"))
    assert isinstance(refused.value.__cause__, OverloadedError), "which makes the Retry-After"
    held.pop()
    del refused
    await until_held(loader, nbytes=MIB)
    assert (await loader.fetch(site.url("/2"), ImageMediaIO())).data == bulk
    held.clear()
    await until_held(loader)


async def test_the_same_bytes_are_held_once(make_loader: MakeLoader, site: Site) -> None:
    go = asyncio.Event()
    site.routes |= {"/x": gated(go, answer(incompressible(MIB)))}
    loader = make_loader(held_mb=1.5, cache_bytes=0)
    loads = [asyncio.create_task(loader.fetch(site.url("/x"), ImageMediaIO())) for _ in range(9)]
    await until(lambda: site.requests)
    go.set()
    assert len({id(content) for content in await asyncio.gather(*loads)}) == 1


async def test_the_cache_has_a_budget_of_its_own(make_loader: MakeLoader) -> None:
    loader = make_loader(held_mb=1.5, cache_bytes=16 * MIB)
    for n in range(5):
        await loader.fetch(data_url("image/png", incompressible(MIB + n)), ImageMediaIO())
        await until_held(loader)
    await loader.load(data_uri(blank_picture(1000)), ImageMediaIO())
    assert loader._cache._entries.weight > 5 * MIB
    await until_held(loader)


async def test_pixels_of_all_requests(make_loader: MakeLoader) -> None:
    loader = make_loader(decoding_megapixels=2.5, cache_bytes=0)
    held = [await loader.load(data_uri(blank_picture(1000 + n)), ImageMediaIO()) for n in range(2)]
    with pytest.raises(OverloadedError, match=r"2.5 megapixels .* try again later"):
        await loader.load(data_uri(blank_picture(1003)), ImageMediaIO())
    with pytest.raises(RefusedError, match=r"2.5 megapixels"):
        await loader.load(data_uri(blank_picture(1700)), ImageMediaIO())
    held.pop()
    await until_held(loader, pixels=1_000_000)
    assert await loader.load(data_uri(blank_picture(1003)), ImageMediaIO())
    held.clear()
    await until_held(loader)


async def test_copies_of_what_is_cached_take_room_too(make_loader: MakeLoader) -> None:
    loader = make_loader(decoding_megapixels=2.5)
    url = data_uri(picture("copied", (1000, 1000)))
    held = [await loader.load(url, ImageMediaIO()) for _ in range(2)]
    with pytest.raises(OverloadedError):
        await loader.load(url, ImageMediaIO())
    held.clear()
    await until_held(loader)


async def test_copies_of_a_sound_take_room_as_it_is_resampled(make_loader: MakeLoader) -> None:
    loader = make_loader(decoding_megapixels=2.5)
    media_io = AudioMediaIO(audio_backend="soundfile")
    url = data_url("audio/wav", wav(1000, 7_000))
    held = [await loader.load(url, media_io) for _ in range(2)]
    with pytest.raises(OverloadedError):
        await loader.load(url, media_io)
    held.clear()
    await until_held(loader)


async def test_a_body_that_breaks_off_leaves_nothing_held(
    make_loader: MakeLoader, site: Site
) -> None:
    loader = make_loader(max_mb=0.5)
    site.routes |= {"/x": answer(incompressible(MIB))}
    bad = [site.url("/x"), site.url("/missing"), data_url("image/png", bytes(MIB)), "data:,", "x:"]
    bad += [data_uri(b"no picture"), "data:image/png;base64,!!!!", "file:///etc/passwd"]
    for url in bad:
        with pytest.raises((ValueError, Exception)):
            await loader.load(url, ImageMediaIO())
    await until_held(loader)


async def test_cancelling_leaves_nothing_held(
    make_loader: MakeLoader, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bytes arrive, and while a thread decodes: there it is held until that ends."""
    go = asyncio.Event()
    site.routes |= {"/x": gated(go, answer(picture("x")))}
    loader = make_loader(cache_bytes=0)
    fetching = asyncio.create_task(
        as_a_request(loader.policy, loader.fetch(site.url("/x"), ImageMediaIO()))
    )
    await until(lambda: site.requests)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    del fetching
    go.set()
    await until_held(loader)

    decoding, end = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        args[3](1_000_000)
        decoding.set()
        assert end.wait(60)
        return decode(*args)

    monkeypatch.setattr(loader_module, "decode", slow)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(loader, "pool", pool)
        load = asyncio.create_task(loader.load(data_uri(picture("x")), ImageMediaIO()))
        await until(decoding.is_set)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        del load
        assert loader.budgets.decoding.reserved == 1_000_000
        end.set()
    await until_held(loader)


async def test_large_pictures_of_one_request_take_turns_for_their_copies(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads for all of them would take four times what is reserved."""
    most = _at_once(monkeypatch)
    loader = make_loader(decoding_megapixels=60, cache_bytes=0)  # copies of one picture
    urls = [data_uri(blank_picture(2001 + index)) for index in range(8)]
    loaded = await asyncio.gather(*(loader.load(url, ImageMediaIO()) for url in urls))
    assert [each.media.width for each in loaded] == [2001 + index for index in range(8)]
    assert most() == 1


async def test_a_request_does_not_take_all_threads(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of its largest pictures kept others' smallest waiting for seconds."""
    most = _at_once(monkeypatch)
    loader = make_loader(cache_bytes=0)
    urls = [data_uri(blank_picture(2001 + index)) for index in range(8)]

    async def load_all() -> None:
        await asyncio.gather(*(loader.load(url, ImageMediaIO()) for url in urls))

    await as_a_request(loader.policy, load_all())
    assert 1 <= most() <= MAX_DECODES


async def test_a_picture_waits_for_no_film(make_loader: MakeLoader) -> None:
    """The codec of a film of 8K took the room of all large pictures, for as long as it decodes."""
    loader = make_loader(decoding_megapixels=40, cache_bytes=0)
    with loader.budgets.codecs.share(1 << 40):
        await asyncio.wait_for(loader.load(data_uri(blank_picture(2001)), ImageMediaIO()), 30)


async def test_large_films_take_turns_for_the_frames_of_their_codecs(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A film of 200 KB took 3.7 GB, most of them in its codec, and of eight there was no limit."""
    most = _at_once(monkeypatch)
    loader = make_loader(decoding_megapixels=400, cache_bytes=0)  # for one codec
    films = [video(tmp_path, 1, 2016 + 16 * index, 2000) for index in range(4)]
    loads = (
        loader.load(data_url("video/avi", each), VideoMediaIO(ImageMediaIO())) for each in films
    )
    loaded = await asyncio.gather(*loads)
    assert [each.media[0].shape[2] for each in loaded] == [2016, 2032, 2048, 2064]
    assert most() == 1


def _at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what says how many decoders were under way at once at most."""
    under_way = most = 0
    changing = threading.Lock()

    def counted(
        content: Content, media_io: Any, policy: FetchPolicy, admit: Any, admit_frame: Any
    ) -> Any:
        nonlocal under_way

        def counted_after(admit: Any, pixels: int) -> None:
            nonlocal under_way, most
            admit(pixels)
            with changing:
                under_way += 1
                most = max(most, under_way)

        # The last that is asked before a decoder begins: a film's frame, or the whole picture.
        if isinstance(media_io, VideoMediaIO):
            admit_frame = partial(counted_after, admit_frame)
        else:
            admit = partial(counted_after, admit)
        try:
            return decode(content, media_io, policy, admit, admit_frame)
        finally:
            with changing:
                under_way -= 1

    monkeypatch.setattr(loader_module, "decode", counted)
    return lambda: most


# What media take


def pixels_of(data: bytes | Content, media_io: Any, **limits: object) -> int:
    admitted: list[int] = []
    content = data if isinstance(data, Content) else Content.of(data)
    decode(content, media_io, FetchPolicy.model_validate(limits), admitted.append)
    return sum(admitted)


def test_pixels_are_counted_before_anything_is_decoded() -> None:
    assert pixels_of(blank_picture(1000), ImageMediaIO()) == 1_000_000
    frames = VideoMediaIO(ImageMediaIO()).load_bytes(film("x")).media[0]
    assert pixels_of(film("x"), VideoMediaIO(ImageMediaIO())) == frames[..., 0].size
    sequence = Content.of(jpeg_sequence(3).partition(",")[2].encode(), jpeg_frames=True)
    assert pixels_of(sequence, VideoMediaIO(ImageMediaIO())) == 3 * 64 * 48


def test_rows_of_one_pixel_take_more_than_a_pixel() -> None:
    """60 million of them took 1.4 GB, of 0.2 MB."""
    buffer = io.BytesIO()
    Image.new("L", (1, 50_000)).save(buffer, "PNG")
    assert pixels_of(buffer.getvalue(), ImageMediaIO()) == 16 * 50_000
    with pytest.raises(RefusedError, match="800,000 pixels, which is too large"):
        pixels_of(buffer.getvalue(), ImageMediaIO(), max_pixels=799_999)


def test_an_icon_counts_as_the_largest_picture() -> None:
    """Since it holds another, of any size."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "ICO")
    assert pixels_of(buffer.getvalue(), ImageMediaIO(), max_pixels=1_000_000) == 1_000_000


def test_a_sound_counts_with_the_copies_of_a_processor() -> None:
    assert pixels_of(sound("x", 1.0), AudioMediaIO()) == 2 * 16_000 + 3 * 48_000
    heard, rate = AudioMediaIO().load_bytes(film("x", audible=True))
    counted = pixels_of(film("x", audible=True), AudioMediaIO())
    assert len(heard) <= counted / (2 + 3 * 48_000 / rate) < 2 * len(heard)


def wav(rate: int, samples: int, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    silence = np.zeros((samples, channels), np.float32)
    soundfile.write(buffer, silence, rate, format="WAV", subtype="PCM_U8")
    return buffer.getvalue()


@pytest.mark.parametrize(("rate", "pixels"), [(1000, 87_600), (8000, 12_000), (96_000, 2_100)])
def test_sound_counts_as_it_is_resampled(rate: int, pixels: int) -> None:
    """600 bytes at a low rate became 38 MB."""
    assert pixels_of(wav(rate, 600), AudioMediaIO()) == pixels


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2_000_000_000])
@pytest.mark.parametrize("backend", ["auto", "pyav"])
def test_rates_that_no_sound_has(rate: int, backend: str) -> None:
    with pytest.raises(RefusedError, match=f"sample rate is {rate} Hz, which is not between"):
        pixels_of(wav(rate, 600), AudioMediaIO(audio_backend=backend))


def test_a_sound_of_as_much_as_vllm_decodes_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg decodes one byte a sample, of which the guard makes four."""
    monkeypatch.setattr(envs, "VLLM_MAX_AUDIO_DECODE_BYTES", 4 * 1001, raising=False)
    assert pixels_of(wav(48_000, 1001), AudioMediaIO(audio_backend="pyav")) == 5 * 1001


def test_a_sound_at_another_rate_than_was_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little more at a low rate is a lot more at the model's."""

    def longer(*args: object, **kwargs: object) -> object:
        return np.zeros(10_000, np.float32), 1000

    monkeypatch.setattr(decoding, "load_audio", longer)
    with pytest.raises(RefusedError, match="longer than it says"):
        pixels_of(wav(1000, 600), AudioMediaIO())


def liar() -> bytes:
    """An MP4 file of 30 s of sound, whose header says that it is a hundredth as long."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=48_000, layout="mono")
        for start in range(0, 30 * 48_000, 1024):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = 48_000, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    data = bytearray(buffer.getvalue())
    ticks_per_second = data.index(b"mdhd") + 16
    assert struct.unpack_from(">I", data, ticks_per_second) == (48_000,)
    struct.pack_into(">I", data, ticks_per_second, 4_800_000)
    return bytes(data)


def test_a_sound_that_lies_about_its_length_is_stopped() -> None:
    assert AudioMediaIO().load_bytes(liar())[0].size > 30 * 48_000
    with pytest.raises(ValueError, match="exceeded"):
        pixels_of(liar(), AudioMediaIO())


def test_a_sound_of_many_channels_counts_each() -> None:
    assert pixels_of(wav(16_000, 1000, 8), AudioMediaIO()) == 8 * (2 * 1000 + 3 * 3000)


def test_the_picture_of_21_kilobytes() -> None:
    bomb = blank_picture(13_000)
    assert len(bomb) < 25_000
    with pytest.raises(RefusedError, match="at most 67,108,864 "):
        pixels_of(bomb, ImageMediaIO())


def test_frames_that_nobody_will_ever_see_end_in_time() -> None:
    """A header may claim billions of frames, each of which vLLM would try to read."""
    with pytest.raises(RefusedError, match="in time"):
        pixels_of(film("x", 4), VideoMediaIO(ImageMediaIO()), decode_timeout_s=1e-9)


def test_frames_that_are_not_there_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Claims:
        """Of a film: as if it had very many frames."""

        @staticmethod
        def get_video_metadata(cap: object) -> VideoSourceMetadata:
            return VideoSourceMetadata(2_000_000_000, 25.0, 80_000_000.0)

    monkeypatch.setattr(OpenCVVideoBackendMixin, "get_video_metadata", Claims.get_video_metadata)
    with pytest.raises(RefusedError, match="at most 4,194,304 are taken"):
        pixels_of(film("x"), VideoMediaIO(ImageMediaIO()))


async def test_without_a_request_each_medium_has_an_allowance_of_its_own() -> None:
    policy = FetchPolicy(max_per_request=1)
    current_allowance(policy).take_medium()
    current_allowance(policy).take_medium()
    with pytest.raises(RequestLimitError):
        limited = RequestAllowance(policy)
        limited.take_medium()
        limited.take_medium()
