"""Our processing of media against vLLM's own, and what it does not do twice."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.renderers import BaseRenderer

from common.card import WorkerCard
from common.errors import MmRouterError
from common.transfer.arena import Arena
from frontend.fetch.deferred import DeferredMedium
from frontend.fetch.errors import RefusedError
from frontend.fetch.loader import MediaLoader
from frontend.fetch.policy import FetchPolicy
from frontend.processing.backends import Flight, OwnBackend
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import AbandonedError
from frontend.processing.media_processing import MediaProcessing
from frontend.processing.sources import MediaSources
from frontend.processing.store import ArenaStore
from frontend.renderer import build_renderer
from tests.unit.frontend.processing.media import broken_image, image, same
from tests.waiting import until

SMALLER = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}


class WatchedBackend:
    """The renderer's own, with a look at what it is given and a door to hold it up."""

    def __init__(self, inner: OwnBackend) -> None:
        self._inner = inner
        self.width = 2
        self.batches: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails: Callable[[Batch], Exception | None] = lambda _: None

    async def run(self, batch: Batch, flights: Sequence[Flight]) -> list[Processed]:
        self.batches.append(len(batch.media))
        await self.open.wait()
        if error := self.fails(batch):
            raise error
        return await self._inner.run(batch, flights)


class Setting:
    def __init__(self, renderer: BaseRenderer, arena: Arena) -> None:
        self.renderer = renderer
        self.arena = arena
        self.loader = MediaLoader(FetchPolicy(), 1 << 26)
        self.store = ArenaStore(arena)
        self.sources = MediaSources()
        self.backend = WatchedBackend(OwnBackend(renderer, self.store, self.loader.decode))
        self.processing = MediaProcessing(
            renderer,
            self.store,
            self.backend,
            self.loader.decode,
            most_waiting=3,
            sources=self.sources,
        )

    async def show(self, *images: DeferredMedium, **options: Any) -> Any:
        kwargs = options.pop("mm_processor_kwargs", None)
        uuids = options.pop("uuids", None)
        return await self.renderer._process_multimodal_async(
            prompt(self.renderer, len(images)),
            {"image": list(images)},
            None if uuids is None else {"image": uuids},
            kwargs,
            options.pop("media_io_kwargs", None),
        )


def prompt(renderer: BaseRenderer, images: int) -> list[int]:
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": images})
    ids: list[int] = renderer.get_tokenizer().encode("look: " + text)
    return ids


@pytest_asyncio.fixture
async def setting(
    card: WorkerCard, serve_args: Namespace, arena: Arena, our_renderer: BaseRenderer
) -> AsyncIterator[Setting]:
    setting = Setting(our_renderer, arena)
    yield setting
    await setting.processing.close()
    await setting.loader.close()


@pytest.fixture
def our_renderer(card: WorkerCard, serve_args: Namespace) -> Any:
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


def by_vllm(renderer: BaseRenderer, *images: DeferredMedium, **options: Any) -> Any:
    """What vLLM makes of the same media, all by itself."""
    decoded = [each.media_io.load_bytes(each.content.data) for each in images]
    return renderer._process_multimodal(
        prompt(renderer, len(images)),
        {"image": decoded},
        None if options.get("uuids") is None else {"image": options["uuids"]},
        options.get("mm_processor_kwargs"),
        options.get("media_io_kwargs"),
    )


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert ours["mm_hashes"] == theirs["mm_hashes"]
    assert ours["mm_placeholders"] == theirs["mm_placeholders"]
    for one, other in zip(ours["mm_kwargs"]["image"], theirs["mm_kwargs"]["image"], strict=True):
        assert same(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mm_processor_kwargs": SMALLER},
        {"media_io_kwargs": {"image": {"image_mode": "RGB"}}},
        {"uuids": ["mine", None, "mine too"]},
        {"uuids": ["mine", None, None], "mm_processor_kwargs": SMALLER},
    ],
)
async def test_the_result_is_vllms_own(
    setting: Setting, vllm_renderer: BaseRenderer, options: dict[str, Any]
) -> None:
    images = [image("a"), image("b", (224, 56)), image("c")]
    theirs = by_vllm(vllm_renderer, *images, **options)
    assert_equal(await setting.show(*images, **options), theirs)
    # and again, when nothing is processed any more
    assert_equal(await setting.show(*images, **options), theirs)
    assert sum(setting.backend.batches) == 3


async def test_a_request_is_spread_over_what_can_work_at_the_same_time(setting: Setting) -> None:
    await setting.show(image("a"), image("b"), image("c"))
    assert sorted(setting.backend.batches) == [1, 2]


async def test_a_repeat_is_neither_decoded_nor_processed(setting: Setting) -> None:
    first = await setting.show(image("a"))
    setting.backend.fails = lambda _: AssertionError("asked to process")
    second = await setting.show(image("a"), image("a"))
    assert same(second["mm_kwargs"]["image"][0], first["mm_kwargs"]["image"][0])
    assert setting.loader.statistics().cache.contents <= 1


async def test_an_image_in_flight_is_processed_once(setting: Setting) -> None:
    setting.backend.open.clear()
    shown = [asyncio.create_task(setting.show(image("a"))) for _ in range(3)]
    await until(lambda: setting.backend.batches)
    setting.backend.open.set()
    results = await asyncio.gather(*shown)
    assert setting.backend.batches == [1]
    assert len({tuple(each["mm_hashes"]["image"]) for each in results}) == 1


async def test_an_image_twice_in_a_request_is_processed_once(setting: Setting) -> None:
    result = await setting.show(image("a"), image("a"))
    assert setting.backend.batches == [1]
    assert len(result["mm_placeholders"]["image"]) == 2


async def test_one_bad_image_fails_its_request_and_no_other(setting: Setting) -> None:
    """Both wait for the good one, which was processed together with the bad one."""
    setting.backend.width = 1
    setting.backend.open.clear()
    bad = broken_image(b"not a picture")
    both = asyncio.create_task(setting.show(image("a"), bad))
    await until(lambda: setting.backend.batches)
    good = asyncio.create_task(setting.show(image("a")))
    await asyncio.sleep(0)
    setting.backend.open.set()
    with pytest.raises(ValueError, match="cannot identify image"):
        await both
    assert len((await good)["mm_hashes"]["image"]) == 1


async def test_a_refused_medium_names_its_place(setting: Setting) -> None:
    setting.backend.fails = lambda _: RefusedError("it is too large")
    with pytest.raises(VLLMValidationError, match="from a data URL: it is too large"):
        await setting.show(image("a"))


async def test_an_error_of_ours_keeps_its_status(setting: Setting) -> None:
    setting.backend.fails = lambda _: MmRouterError("broken")
    with pytest.raises(Exception, match="broken"):
        await setting.show(image("a"))


async def test_too_many_requests_get_a_429(setting: Setting) -> None:
    setting.backend.open.clear()
    waiting = [asyncio.create_task(setting.show(image(name))) for name in "abc"]
    await until(lambda: len(setting.backend.batches) == 3)
    with pytest.raises(GracefulHTTPError) as refused:
        await setting.show(image("d"))
    assert refused.value.http_status == 429
    setting.backend.open.set()
    await asyncio.gather(*waiting)
    await setting.show(image("d"))


async def test_who_leaves_takes_nothing_from_the_others(setting: Setting) -> None:
    setting.backend.open.clear()
    leaving = asyncio.create_task(setting.show(image("a")))
    staying = asyncio.create_task(setting.show(image("a")))
    await until(lambda: setting.backend.batches)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    setting.backend.open.set()
    assert (await staying)["mm_hashes"]["image"]


async def test_what_nobody_wants_any_more_is_not_begun(setting: Setting) -> None:
    setting.backend.open.clear()
    leaving = asyncio.create_task(setting.show(image("a")))
    await until(lambda: setting.backend.batches)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    setting.backend.open.set()
    await until(lambda: not setting.processing._flights)
    assert setting.arena.statistics().writes == 0


async def test_who_comes_at_the_last_moment_is_served(setting: Setting) -> None:
    first = True

    def fails(_: Batch) -> Exception | None:
        nonlocal first
        was, first = first, False
        return AbandonedError("nobody") if was else None

    setting.backend.fails = fails
    assert (await setting.show(image("a")))["mm_hashes"]["image"]
    assert setting.backend.batches == [1, 1]


async def test_no_lease_outlives_a_request(setting: Setting) -> None:
    result = await setting.show(image("a", (448, 448)), image("b", (448, 448)))
    assert setting.arena.statistics().leases == 2
    del result
    # The event loop has it too, until it turns to something else.
    await until(lambda: setting.arena.statistics().leases == 0)


async def test_media_that_cannot_be_put_off_are_decoded_for_vllm(
    setting: Setting, vllm_renderer: BaseRenderer
) -> None:
    """Some are named only: vLLM's own way with its cache, over our store."""
    await setting.show(image("a"), uuids=["mine"])
    mixed = await setting.renderer._process_multimodal_async(
        prompt(setting.renderer, 2), {"image": [None, image("b")]}, {"image": ["mine", None]}, None
    )
    theirs = by_vllm(vllm_renderer, image("a"), image("b"), uuids=["mine", None])
    assert_equal(mixed, theirs)


async def test_sources_are_kept_for_workers_that_process_media_themselves(
    setting: Setting,
) -> None:
    shown = image("a")
    result = await setting.show(shown, mm_processor_kwargs=SMALLER)
    (mm_hash,) = result["mm_hashes"]["image"]
    source = setting.sources.get(mm_hash)
    assert source is not None
    assert source.encoded == shown.content.data
    assert source.mm_processor_kwargs == SMALLER


async def test_cleared_media_are_processed_anew(setting: Setting) -> None:
    await setting.show(image("a"))
    setting.processing.clear()
    await setting.show(image("a"))
    assert setting.backend.batches == [1, 1]
