"""Once for all who ask at the same time, kept by content, and never a stale picture."""

import asyncio
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client import REGISTRY
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes, VideoMediaIO

from frontend.fetch import decoders as decode_module
from frontend.fetch import loader as loader_module
from frontend.fetch.content import Content, Digest
from frontend.fetch.loader import MediaLoader
from frontend.fetch.single_flight import SingleFlight
from frontend.media_limits.policy import FetchPolicy, RefusedError, TooLargeError, UnfetchableError
from frontend.request_context import begin
from tests.pictures import data_uri, picture
from tests.unit.frontend.fetch.conftest import MakeLoader
from tests.unit.frontend.fetch.sites import Site, answer, gated, hang_up, in_turn, revalidated
from tests.unit.frontend.fetch.videos import jpeg_sequence, video
from tests.unit.frontend.http.asking import asking
from tests.waiting import until


class Decodes:
    """Counts decodes, and holds them up if told."""

    def __init__(self) -> None:
        self.count = 0
        self.pool = ThreadPoolExecutor(1)

    def hold(self) -> Callable[[], None]:
        """Decode nothing until the returned function is called."""
        gate = threading.Event()
        self.pool.submit(gate.wait, 10)
        return gate.set


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    counted = Decodes()
    original = decode_module.decode

    def decode(*args: object) -> object:
        counted.count += 1
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(loader_module, "decode", decode)
    return counted


def waiting(flights: SingleFlight[Any]) -> int:
    """How many callers wait for calls under way."""
    return sum(flight.waiters for flight in flights._flights.values())


def image(loaded: object) -> np.ndarray:
    assert isinstance(loaded, MediaWithBytes) and isinstance(loaded.media, Image.Image)
    return np.asarray(loaded.media)


def truth(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


A, B = picture("a"), picture("b")


# One at a time


async def test_the_same_picture_from_everywhere_is_decoded_once(
    make_loader: MakeLoader, site: Site, decodes: Decodes, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(A)
    site.routes |= {"/a.png": answer(A), "/copy-of-a.png": answer(A)}
    loader = make_loader(local_root=tmp_path)
    cached = metric("mmrouter_media_decodes_total", result="cached")
    for url in (
        site.url("/a.png"),
        site.url("/copy-of-a.png"),
        data_uri(A),
        data_uri(A).replace("image/png", "image/whatever"),
        f"file://{tmp_path}/a.png",
    ):
        assert np.array_equal(image(await loader.load(url, ImageMediaIO())), truth(A))
    assert decodes.count == 1
    assert metric("mmrouter_media_decodes_total", result="cached") == cached + 4


async def test_a_changed_picture_is_seen_at_once(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = in_turn(answer(A), answer(B), answer(A))
    loader = make_loader()
    for expected in (A, B, A):
        loaded = await loader.load(site.url(), ImageMediaIO())
        assert loaded.original_bytes == expected
        assert np.array_equal(image(loaded), truth(expected))


async def test_a_changed_picture_is_seen_with_entity_tags(
    make_loader: MakeLoader, site: Site
) -> None:
    loader = make_loader()
    unchanged = metric("mmrouter_media_fetches_total", source="http", outcome="unchanged")
    for png, etag in ((A, '"a"'), (A, '"a"'), (B, '"b"'), (A, '"a"'), (A, '"a"')):
        site.routes["/x.png"] = revalidated(png, etag)
        loaded = await loader.load(site.url(), ImageMediaIO())
        assert loaded.original_bytes == png
    assert len(site.requests) == 5
    now = metric("mmrouter_media_fetches_total", source="http", outcome="unchanged")
    assert now == unchanged + 2


async def test_a_tag_is_not_sent_without_the_bytes(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = revalidated(A, '"a"')
    loader = make_loader(cache_bytes=0)
    for _ in range(2):
        assert np.array_equal(image(await loader.load(site.url(), ImageMediaIO())), truth(A))
    assert all("If-None-Match" not in request.headers for request in site.requests)


async def test_salts_share_no_bytes_tags_or_decoded_pictures(
    make_loader: MakeLoader, site: Site, decodes: Decodes, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(A)
    site.routes["/x.png"] = revalidated(A, '"a"')
    loader = make_loader(local_root=tmp_path)
    for count, salt in enumerate((None, "one", "two"), 1):
        with asking(salt=salt):
            for url in (site.url(), data_uri(A), f"file://{tmp_path}/a.png", site.url()):
                assert np.array_equal(image(await loader.load(url, ImageMediaIO())), truth(A))
        assert decodes.count == count
    asked = ["If-None-Match" in request.headers for request in site.requests]
    assert asked == [False, True] * 3


async def test_isolated_keys_share_nothing_either(
    make_loader: MakeLoader, decodes: Decodes
) -> None:
    loader = make_loader()
    for key in ("me", "you", "me"):
        with asking(key=key, apart=True):
            await loader.load(data_uri(A), ImageMediaIO())
    assert decodes.count == 2
    for key in ("me", "you"):  # but do without isolation, as in vLLM
        with asking(key=key):
            await loader.load(data_uri(A), ImageMediaIO())
    assert decodes.count == 3


async def test_what_is_under_way_is_not_shared_across_salts(
    make_loader: MakeLoader, site: Site, decodes: Decodes
) -> None:
    opened = asyncio.Event()
    site.routes["/x.png"] = gated(opened, answer(A))
    loader = make_loader()
    loading = []
    for salt in ("one", "two", "one"):
        with asking(salt=salt):
            loading.append(asyncio.create_task(loader.load(site.url(), ImageMediaIO())))
    await until(lambda: len(site.requests) == 2)
    opened.set()
    for loaded in await asyncio.gather(*loading):
        assert np.array_equal(image(loaded), truth(A))
    assert len(site.requests) == decodes.count == 2


async def test_modes_are_told_apart(make_loader: MakeLoader, decodes: Decodes) -> None:
    loader = make_loader()
    for _ in range(2):
        for mode in ("RGB", "L", None):
            loaded = await loader.load(data_uri(A), ImageMediaIO(mode))
            assert loaded.media.mode == (mode or "RGB")
    assert decodes.count == 3


async def test_everybody_gets_their_own(make_loader: MakeLoader) -> None:
    loader = make_loader()
    first = await loader.load(data_uri(A), ImageMediaIO())
    first.media.paste((1, 2, 3), (0, 0, 100, 100))
    second, third = await asyncio.gather(
        *(loader.load(data_uri(A), ImageMediaIO()) for _ in range(2))
    )
    second.media.paste((1, 2, 3), (0, 0, 100, 100))
    assert np.array_equal(image(third), truth(A))


async def test_videos_are_kept_too(
    make_loader: MakeLoader, decodes: Decodes, tmp_path: Path
) -> None:
    (tmp_path / "v.avi").write_bytes(video(tmp_path))
    loader = make_loader(local_root=tmp_path)
    for frames in (4, 4, 5):
        loaded = await loader.load(f"file://{tmp_path}/v.avi", VideoMediaIO(ImageMediaIO(), frames))
        pixels, metadata = loaded.media
        assert len(pixels) == len(metadata["frames_indices"]) == frames
        pixels[:] = 0
        metadata.clear()
    assert decodes.count == 2
    for _ in range(2):
        loaded = await loader.load(jpeg_sequence(3), VideoMediaIO(ImageMediaIO()))
        assert loaded.media[0].shape == (3, 48, 64, 3)
    assert decodes.count == 3


async def test_without_a_cache_nothing_is_kept(make_loader: MakeLoader, decodes: Decodes) -> None:
    loader = make_loader(cache_bytes=0)
    for _ in range(2):
        await loader.load(data_uri(A), ImageMediaIO())
    assert decodes.count == 2
    assert loader._cache._entries.weight == 0


async def test_what_can_not_be_compared_is_decoded_each_time(
    make_loader: MakeLoader, decodes: Decodes
) -> None:
    loader = make_loader()
    for _ in range(2):
        await loader.load(data_uri(A), ImageMediaIO(odd=object()))
    assert decodes.count == 2


async def test_failures_are_not_kept(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = in_turn(answer(status=404), answer(b"no picture"), answer(A))
    loader = make_loader()
    with pytest.raises(UnfetchableError):
        await loader.load(site.url(), ImageMediaIO())
    with pytest.raises(RefusedError, match="not a picture"):
        await loader.load(site.url(), ImageMediaIO())
    assert len(loader._cache._entries) == 0
    assert np.array_equal(image(await loader.load(site.url(), ImageMediaIO())), truth(A))


# Many at a time


async def test_one_url_is_fetched_and_decoded_once(
    make_loader: MakeLoader, site: Site, decodes: Decodes
) -> None:
    gate = asyncio.Event()
    site.routes["/x.png"] = gated(gate, answer(A))
    loader = make_loader()
    shared = metric("mmrouter_media_fetches_total", source="http", outcome="shared")
    loads = [asyncio.create_task(loader.load(site.url(), ImageMediaIO())) for _ in range(5)]
    await until(lambda: waiting(loader._fetches) == 5)
    assert len(loader._fetches) == 1
    gate.set()
    loaded = await asyncio.gather(*loads)
    assert len(site.requests) == 1 and decodes.count == 1
    assert len({id(one.media) for one in loaded}) == 5
    assert metric("mmrouter_media_fetches_total", source="http", outcome="shared") == shared + 4


async def test_the_same_bytes_are_decoded_once(decodes: Decodes) -> None:
    loader = MediaLoader(FetchPolicy(), 0, pool=decodes.pool)
    contents = [await loader.fetch(data_uri(A), ImageMediaIO()) for _ in range(5)]
    release = decodes.hold()
    loads = [asyncio.create_task(loader.decode(one, ImageMediaIO())) for one in contents]
    await until(lambda: waiting(loader._decodes) == 5)
    release()
    loaded = await asyncio.gather(*loads)
    assert decodes.count == 1
    assert len({id(one.media) for one in loaded}) == 5
    assert all(np.array_equal(image(one), truth(A)) for one in loaded)
    await loader.close()


async def test_one_who_leaves_does_not_disturb_the_others(
    make_loader: MakeLoader, site: Site
) -> None:
    gate = asyncio.Event()
    site.routes["/x.png"] = gated(gate, answer(A))
    loader = make_loader()
    first, *others = [
        asyncio.create_task(loader.load(site.url(), ImageMediaIO())) for _ in range(3)
    ]
    await until(lambda: waiting(loader._fetches) == 3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    for loaded in await asyncio.gather(*others):
        assert np.array_equal(image(loaded), truth(A))
    assert len(site.requests) == 1


async def test_when_all_leave_nothing_stays(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = gated(asyncio.Event(), answer(A))
    loader = make_loader()
    before = asyncio.all_tasks()
    loads = [asyncio.create_task(loader.load(site.url(), ImageMediaIO())) for _ in range(3)]
    await until(lambda: waiting(loader._fetches) == 3 and site.open == 1)
    cancelled = metric("mmrouter_media_fetches_total", source="http", outcome="cancelled")
    for load in loads:
        load.cancel()
    await asyncio.wait(loads)
    await site.closed()
    assert len(loader._fetches) == len(loader._decodes) == len(loader._cache._entries) == 0
    assert asyncio.all_tasks() == before
    now = metric("mmrouter_media_fetches_total", source="http", outcome="cancelled")
    assert now == cancelled + 1


async def test_a_decode_that_nobody_waits_for(decodes: Decodes) -> None:
    loader = MediaLoader(FetchPolicy(), 1 << 20, pool=decodes.pool)
    content = await loader.fetch(data_uri(A), ImageMediaIO())
    release = decodes.hold()
    load = asyncio.create_task(loader.decode(content, ImageMediaIO()))
    await until(lambda: waiting(loader._decodes) == 1)
    load.cancel()
    await asyncio.wait([load])
    assert load.cancelled() and len(loader._decodes) == 0
    release()
    assert np.array_equal(image(await loader.load(data_uri(A), ImageMediaIO())), truth(A))
    await loader.close()


async def test_a_client_leaves_threads_to_others(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader
) -> None:
    """Beside eight of one client's films another's small picture waited for 12 s and more."""
    gate, begun = threading.Event(), threading.Semaphore(0)
    original = decode_module.decode

    def decode(content: Content, *args: Any) -> object:
        if content.data == A:
            begun.release()
            gate.wait(30)
        return original(content, *args)

    monkeypatch.setattr(loader_module, "decode", decode)
    loader = make_loader()

    async def load(peer: str, data: bytes) -> object:
        begin().peer = peer
        return await loader.decode_once(Content(data, Digest(data)), ImageMediaIO())

    async def loads(peer: str, data: bytes, count: int) -> list[asyncio.Task[object]]:
        return [asyncio.create_task(load(peer, data)) for _ in range(count)]

    gone = await loads("10.0.0.1", A, 4)
    assert await asyncio.to_thread(lambda: all(begun.acquire(timeout=10) for _ in gone))
    for one in gone:
        one.cancel()
    left = await loads("10.0.0.1", A, 8)
    (other,) = await loads("10.0.0.2", B, 1)
    assert np.array_equal(image(await asyncio.wait_for(other, 10)), truth(B))
    assert not begun.acquire(blocking=False), "threads count until they return"
    gate.set()
    assert len(await asyncio.gather(*left)) == 8


async def test_a_failure_is_told_to_all(make_loader: MakeLoader, site: Site) -> None:
    gate = asyncio.Event()
    site.routes["/x.png"] = gated(gate, answer(status=404))
    loader = make_loader()
    loads = [asyncio.create_task(loader.load(site.url(), ImageMediaIO())) for _ in range(3)]
    await until(lambda: waiting(loader._fetches) == 3)
    gate.set()
    results = await asyncio.gather(*loads, return_exceptions=True)
    assert all(isinstance(result, UnfetchableError) for result in results)
    assert len(site.requests) == 1


# Limits


@pytest.mark.parametrize("source", ["http", "data", "file"])
async def test_every_source_has_the_same_size_limit(
    make_loader: MakeLoader, site: Site, tmp_path: Path, source: str
) -> None:
    (tmp_path / "a.png").write_bytes(A)
    site.routes["/a.png"] = answer(A)
    url = {
        "http": site.url("/a.png"),
        "data": data_uri(A),
        "file": f"file://{tmp_path}/a.png",
    }[source]
    mb = len(A) / 2**20
    assert await make_loader(local_root=tmp_path, max_mb=mb).load(url, ImageMediaIO())
    with pytest.raises(TooLargeError):
        await make_loader(local_root=tmp_path, max_mb=mb - 2e-6).load(url, ImageMediaIO())


class Small(ImageMediaIO):
    """A medium with a limit of its own, as vLLM's audio has."""

    def get_max_bytes(self) -> int:
        return 100


async def test_a_modality_may_have_a_lower_limit(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = revalidated(A, '"a"')
    loader = make_loader()
    await loader.load(site.url(), ImageMediaIO())
    for _ in range(2):
        with pytest.raises(TooLargeError):
            await loader.load(site.url(), Small())


@pytest.mark.parametrize("url", ["gopher://x/", "http://127.1/", "x", "", "file:///etc/passwd"])
async def test_what_is_refused(make_loader: MakeLoader, url: str) -> None:
    refused = sum(
        metric("mmrouter_media_fetches_total", source=source, outcome="refused")
        for source in ("http", "file")
    )
    with pytest.raises(RefusedError):
        await make_loader().load(url, ImageMediaIO())
    now = sum(
        metric("mmrouter_media_fetches_total", source=source, outcome="refused")
        for source in ("http", "file")
    )
    assert now == refused + 1


async def test_the_event_loop_is_not_held_up(make_loader: MakeLoader) -> None:
    """Ten megabytes of base64 are read, digested and decoded while it goes on."""
    noise = np.random.default_rng(0).integers(0, 256, (1600, 2000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG", compress_level=0)
    loader, uri = make_loader(cache_bytes=1 << 27), data_uri(buffer.getvalue())
    here, everywhere = time.thread_time(), time.process_time()
    for _ in range(2):
        await loader.load(uri, ImageMediaIO())
    here, everywhere = time.thread_time() - here, time.process_time() - everywhere
    assert here < everywhere / 3, "the event loop's thread does the smaller part of the work"


async def test_a_lost_connection_leaves_nothing(make_loader: MakeLoader, site: Site) -> None:
    site.routes["/x.png"] = hang_up
    loader = make_loader()
    with pytest.raises(UnfetchableError):
        await loader.load(site.url(), ImageMediaIO())
    assert len(loader._fetches) == 0


async def test_what_is_decoded_once_is_not_kept(make_loader: MakeLoader) -> None:
    loader = make_loader()
    content = Content.of(picture("once"))
    await loader.decode_once(content, ImageMediaIO())
    assert len(loader._cache._entries) == 0
    kept = await loader.decode(content, ImageMediaIO())
    again = await loader.decode_once(content, ImageMediaIO())
    assert again.media is not kept.media
    assert len(loader._cache._entries) == 1
