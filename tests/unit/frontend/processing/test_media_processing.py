"""Our processing of media against vLLM's own, and what it does not do twice."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import sys
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NoReturn

import pytest
import pytest_asyncio
import torch
from PIL import Image
from prometheus_client import REGISTRY
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.media import ImageMediaIO
from vllm.renderers import BaseRenderer
from vllm.utils.import_utils import PlaceholderModule

from backend_worker.engine.render import LocalRenderer, partitioned_hashes
from common.errors import MmRouterError, OverloadedError
from common.lru import Lru
from common.request_plane.card import WorkerCard
from common.transfer.arena.arena import Arena
from common.vllm_compat.renderer_patches import HfProcessorRuns, patch_renderer
from frontend.fetch import loader
from frontend.fetch.content import Content, DeferredMedium
from frontend.fetch.loader import MediaLoader
from frontend.fetch.processor_memory import limit_processors
from frontend.media_limits.policy import FetchPolicy, RefusedError, RequestLimitError
from frontend.processing import backends, processed_once
from frontend.processing import batch as batches
from frontend.processing.backends import OwnBackend
from frontend.processing.batch import Batch, Processed, process
from frontend.processing.errors import AbandonedError
from frontend.processing.media_processing import MediaProcessing, MediaSources
from frontend.processing.renderer import build_renderer
from frontend.processing.store import ArenaStore
from frontend.request_context import current_partition
from tests.clips import data_url
from tests.odd_media import encoded
from tests.pictures import picture
from tests.unit.frontend.http.asking import asking
from tests.unit.frontend.processing.media import broken_image, image, same
from tests.waiting import until

SMALLER = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}


class WatchedBackend:
    """The renderer's own, with a look at what it is given and a door to hold it up."""

    def __init__(self, inner: OwnBackend) -> None:
        self._inner = inner
        self.width = 2
        self.batches: list[int] = []
        self.ended = 0
        self.open = asyncio.Event()
        self.open.set()
        self.fails: Callable[[Batch], Exception | None] = lambda _: None

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        self.batches.append(len(batch.media))
        await self.open.wait()
        try:
            if error := self.fails(batch):
                raise error
            return await self._inner.run(batch, abandoned)
        finally:
            self.ended += 1


class Setting:
    def __init__(self, renderer: BaseRenderer, arena: Arena) -> None:
        self.renderer = renderer
        self.arena = arena
        self.loader = MediaLoader(FetchPolicy(), 1 << 26)
        self.store = ArenaStore(arena)
        self.sources: MediaSources = Lru(1 << 20, lambda source: len(source.encoded))
        self.long_thread = ThreadPoolExecutor(1)
        self.runs = HfProcessorRuns(side="frontend", worker_id=None)
        self.backend = WatchedBackend(
            OwnBackend(renderer, self.store, self.loader.decode_once, self.long_thread, self.runs)
        )
        self.processing = MediaProcessing(
            renderer,
            self.store,
            self.backend,
            self.loader.decode,
            most_waiting=3,
            sources=self.sources,
        )
        self.processing.take_over(self.runs)

    async def show(self, *images: DeferredMedium | None, **options: Any) -> Any:
        kwargs = options.pop("mm_processor_kwargs", None)
        uuids = options.pop("uuids", None)
        return await self.renderer._process_multimodal_async(
            prompt(self.renderer, len(images)),
            {"image": list(images)},
            None if uuids is None else {"image": uuids},
            kwargs,
            options.pop("media_io_kwargs", None),
        )


def decoded(name: str) -> Any:
    medium = image(name)
    return medium.media_io.load_bytes(medium.content.data)


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
def workers_renderer(card: WorkerCard, serve_args: Namespace) -> Iterator[BaseRenderer]:
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


@pytest.fixture
def our_renderer(card: WorkerCard, serve_args: Namespace) -> Any:
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


def by_vllm(renderer: BaseRenderer, *images: DeferredMedium, **options: Any) -> Any:
    """What vLLM makes of the same media, all by itself."""
    pictures = [each.media_io.load_bytes(each.content.data) for each in images]
    return renderer._process_multimodal(
        prompt(renderer, len(images)),
        {"image": pictures},
        None,
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
    ],
)
async def test_the_result_is_vllms_own(
    setting: Setting, vllm_renderer: BaseRenderer, options: dict[str, Any]
) -> None:
    images = [image("a"), image("b", (224, 56)), image("c")]
    theirs = by_vllm(vllm_renderer, *images, **options)
    named = ["mine", None, "mine too"]
    assert_equal(await setting.show(*images, **options), theirs)
    # and again, when nothing is processed any more, whether they have names or are only named
    assert_equal(await setting.show(*images, **options), theirs)
    assert_equal(await setting.show(*images, uuids=named, **options), theirs)
    assert_equal(await setting.show(None, images[1], None, uuids=named, **options), theirs)
    assert sum(setting.backend.batches) == 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", None])
async def test_transparency_that_decoders_keep_becomes_white(
    setting: Setting, vllm_renderer: BaseRenderer, mode: str | None
) -> None:
    see_through = encoded(Image.new("RGBA", (112, 112), (200, 20, 90, 100)), "PNG")
    medium = dataclasses.replace(broken_image(see_through), media_io=ImageMediaIO(mode))
    assert_equal(await setting.show(medium), by_vllm(vllm_renderer, medium))


async def test_a_request_is_spread_over_what_can_work_at_the_same_time(setting: Setting) -> None:
    await setting.show(image("a"), image("b"), image("c"))
    assert sorted(setting.backend.batches) == [1, 2]


async def test_a_repeat_is_neither_decoded_nor_processed(setting: Setting) -> None:
    first = await setting.show(image("a"))
    setting.backend.fails = lambda _: AssertionError("asked to process")
    second = await setting.show(image("a"), image("a"))
    assert same(second["mm_kwargs"]["image"][0], first["mm_kwargs"]["image"][0])
    assert len(setting.loader._cache._entries) <= 1


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


async def test_a_long_document_is_processed_in_parts(
    setting: Setting, vllm_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that media of other requests have their turn in between."""
    monkeypatch.setattr(processed_once, "_MAX_AT_ONCE", {"image": 1})
    pages = [image(f"page {number}") for number in range(4)]
    result = await setting.show(*pages)
    assert setting.backend.batches == [1, 1, 1, 1]
    assert_equal(result, by_vllm(vllm_renderer, *pages))


async def test_a_medium_longer_than_a_prompt_takes_the_place_of_no_other(
    card: WorkerCard, arena: Arena, our_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a film of 460 KB had 1.8 GB."""
    monkeypatch.setattr(our_renderer.model_config, "max_model_len", 15)
    setting = Setting(our_renderer, arena)
    with pytest.raises(VLLMValidationError, match="maximum context length is 15 tokens"):
        await setting.show(image("a page"))
    assert arena.statistics().writes == 0
    await setting.processing.close()
    await setting.loader.close()


async def test_small_media_do_not_wait_for_large_ones(
    setting: Setting, vllm_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = image("a"), image("b", (224, 112))
    monkeypatch.setattr(batches, "RUN_BYTES", 112 * 112 * 4)
    until_told = threading.Event()
    setting.long_thread.submit(until_told.wait)
    waiting = asyncio.create_task(setting.show(large))
    assert_equal(await setting.show(small), by_vllm(vllm_renderer, small))
    assert not waiting.done()
    until_told.set()
    assert_equal(await waiting, by_vllm(vllm_renderer, large))
    assert setting.runs.total == 2


async def test_large_media_of_a_batch_are_processed_one_by_one(
    setting: Setting, vllm_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor has copies of what it works on, and pads sounds to the longest. Between the runs
    come others' media: four pictures of 67 megapixels kept a small one waiting for 17 s.
    """
    calls: list[int] = []

    def counted(processor: Any, batch: Any, some: Any) -> Any:
        calls.append(len(some))
        return process(processor, batch, some)

    monkeypatch.setattr(backends, "process", counted)
    setting.backend.width = 1
    monkeypatch.setattr(batches, "RUN_BYTES", 2 * 112 * 112 * 4)
    pages = [image(f"page {number}") for number in range(3)]
    result = await setting.show(*pages)
    assert (setting.backend.batches, setting.runs.total, calls) == ([3], 2, [2, 1])
    assert_equal(result, by_vllm(vllm_renderer, *pages))


async def test_what_follows_media_longer_than_a_prompt_is_not_processed(
    card: WorkerCard, arena: Arena, our_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_renderer.model_config, "max_model_len", 3 * 16 - 1)
    monkeypatch.setattr(processed_once, "_MAX_AT_ONCE", {})
    setting = Setting(our_renderer, arena)
    setting.backend.width = 1
    pages = [image(f"page {number}") for number in range(20)]
    with pytest.raises(VLLMValidationError, match="maximum context length is 47 tokens"):
        await setting.show(*pages)
    await until(lambda: setting.backend.ended == len(setting.backend.batches))
    assert len(setting.backend.batches) < 10
    with pytest.raises(VLLMValidationError, match="maximum context length is 47 tokens"):
        await setting.show(*pages[:1] * 3)  # processed already
    assert len((await setting.show(*pages[:1] * 2))["mm_hashes"]["image"]) == 2
    await setting.processing.close()
    await setting.loader.close()


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
    with pytest.raises(VLLMValidationError, match="in no known format, not a picture"):
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


async def test_a_prompt_without_a_place_for_a_medium_is_refused(setting: Setting) -> None:
    """vLLM's own server has a 500, when truncate_prompt_tokens has cut a placeholder off."""
    for decoding in (True, False):  # together by vLLM's processor, and apart
        shown = [decoded("a") if decoding else image("a")]
        for cut in ([], prompt(setting.renderer, 1)[:2]):
            with pytest.raises(VLLMValidationError, match="no place for some of its media"):
                await setting.renderer._process_multimodal_async(cut, {"image": shown}, None, None)
    await setting.show(image("a"))


def lacking_files() -> Exception:
    """What vLLM raises where a processor can't open a file of its own."""
    try:
        raise ValueError("Failed to apply a processor") from OSError(errno.EMFILE, "too many")
    except ValueError as error:
        return error


def not_installed() -> Exception:
    """What vLLM raises where it would use a package that is not there."""
    try:
        getattr(PlaceholderModule("none"), "anything")  # noqa: B009 # mypy: it never returns
    except ImportError as error:
        return error
    raise AssertionError("it is installed")


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (IndexError("out of range"), "422 a medium could not be processed: out of range"),
        (ZeroDivisionError("by zero"), "422 a medium could not be processed: by zero"),
        (RuntimeError("size of tensor"), "422 a medium could not be processed: size of tensor"),
        (MemoryError(), "422 a medium could not be processed: the model's processor can't"),
        (not_installed(), "415 this frontend can't process the medium: the Python package none"),
        (TypeError("not an int"), "400 not an int"),
        (OverflowError("too large"), "400 too large"),
        (OSError(errno.ENFILE, "in system"), "503 this frontend can open no more files"),
        (lacking_files(), "503 this frontend can open no more files"),
    ],
)
async def test_odd_options_that_break_a_processor_are_no_fault_of_the_server(
    setting: Setting, error: Exception, answered: str
) -> None:
    setting.backend.fails = lambda _: error
    with pytest.raises(Exception, match=r".") as raised:
        await setting.show(image("a"))
    said = create_error_response(raised.value).error
    assert f"{said.code} {said.message}".startswith(answered)
    assert type(error).__name__ not in said.message


async def test_a_processors_own_reason_is_told_and_which_picture_it_is_about(
    setting: Setting,
) -> None:
    """vLLM says that it failed, with all arguments and without the reason."""
    strip = broken_image(picture("strip", (2000, 5)))
    reason = "the model's processor refuses it: absolute aspect ratio must be smaller than 200"
    with pytest.raises(VLLMValidationError, match=f"^Failed .* from a data URL: {reason}"):
        await setting.show(strip)
    with pytest.raises(VLLMValidationError, match=f"a data URL, image 2 of 3: {reason}") as told:
        await setting.show(image("a"), strip, image("b"))
    assert create_error_response(told.value).error.code == 400
    assert len(str(told.value)) < 250


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


async def test_pixels_of_all_requests_that_are_too_many_get_a_429(setting: Setting) -> None:
    decoding = setting.loader.budgets.decoding
    with decoding.reserve(2_000_000_000 - 112 * 112):
        with pytest.raises(GracefulHTTPError) as refused:
            await setting.show(image("a"), image("b"))
        assert refused.value.http_status == 429
        assert isinstance(refused.value.__cause__, OverloadedError)
    del refused
    await setting.show(image("a"), image("b"))
    await until(lambda: decoding.reserved == 0)


async def test_what_a_failed_request_held_is_given_back_at_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the garbage collector comes, until which others would get 429."""

    def refuses(*_: object) -> None:
        raise ValueError("its sides are too different")

    monkeypatch.setattr(backends, "process", refuses)
    budgets = setting.loader.budgets
    gc.collect()
    gc.disable()
    try:
        encoded = data_url("image/png", picture("big"))
        content = await setting.loader.fetch(encoded, ImageMediaIO())
        medium = DeferredMedium(content, ImageMediaIO(), "a data URL")
        del content
        with contextlib.suppress(ValueError):
            await setting.show(medium)
        del medium
        await until(lambda: budgets.decoding.reserved == 0 and budgets.held.reserved == 0)
    finally:
        gc.enable()


async def test_a_prompt_whose_media_are_ready_passes_media_that_wait(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none of a burst of new pictures would reach an engine before the last is processed."""
    await setting.show(image("ready"))
    let_through = threading.Semaphore(0)
    begun = 0

    def held(*batch: Any) -> list[Processed]:
        nonlocal begun
        begun += 1
        let_through.acquire(timeout=120)
        return process(*batch)

    monkeypatch.setattr(backends, "process", held)
    new = [
        asyncio.create_task(setting.show(image(f"{number} a"), image(f"{number} b")))
        for number in range(2)
    ]
    waiting = setting.renderer._mm_executor._work_queue
    await until(lambda: begun == 1 and waiting.qsize() == 1)
    ready = asyncio.create_task(setting.show(image("ready")))
    await until(lambda: waiting.qsize() == 2)
    let_through.release(2)
    await ready
    let_through.release(2)
    await asyncio.gather(*new)


async def test_what_one_request_may_not_have_another_may(setting: Setting) -> None:
    """Who joined the processing that was begun for the first."""
    first = True

    def fails(_: Batch) -> Exception | None:
        nonlocal first
        was, first = first, False
        return RequestLimitError("too many pixels") if was else None

    setting.backend.fails = fails
    setting.backend.open.clear()
    greedy = asyncio.create_task(setting.show(image("a"), image("b")))
    await until(lambda: setting.backend.batches)
    modest = asyncio.create_task(setting.show(image("a")))
    await until(lambda: REGISTRY.get_sample_value("mmrouter_preprocess_waiting") == 2)
    setting.backend.open.set()
    with pytest.raises(VLLMValidationError, match=r"^Too many pixels"):
        await greedy
    assert (await modest)["mm_hashes"]["image"]


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
    await until(lambda: setting.backend.ended)
    assert setting.arena.statistics().writes == 0


async def test_what_nobody_wants_any_more_is_not_decoded(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 large pictures of clients that had left kept their next requests waiting for 88 s."""
    begun = []
    go_on = threading.Event()

    def decode(content: Content, *_: object) -> NoReturn:
        begun.append(content)
        go_on.wait(30)
        raise ValueError("no picture")

    monkeypatch.setattr(loader, "decode", decode)
    pictures = [image(f"{each}") for each in range(8)]
    leaving = asyncio.create_task(setting.show(*pictures))
    await until(lambda: len(begun) == 4)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    go_on.set()
    await until(lambda: setting.backend.ended == len(setting.backend.batches))
    assert len(begun) == 4


async def test_pictures_that_failed_together_are_free_at_once(setting: Setting) -> None:
    """Five of eight kept their bytes, and room for them, until garbage was collected."""
    gc.collect()
    gc.disable()
    try:
        urls = [data_url("image/png", b"%d is no picture" % each) for each in range(8)]
        contents = [await setting.loader.fetch(each, ImageMediaIO()) for each in urls]
        media = [DeferredMedium(each, ImageMediaIO(), "a data URL") for each in contents]
        del contents
        with contextlib.suppress(VLLMValidationError):
            await setting.show(*media)
        media.clear()
        await until(lambda: setting.loader.budgets.held.reserved == 0)
    finally:
        gc.enable()


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
    """Some came decoded: vLLM's own way with its cache, over our store."""
    theirs = by_vllm(vllm_renderer, image("a"), image("b"))
    for _ in range(2):
        assert_equal(await setting.show(image("a"), decoded("b"), uuids=["mine", "too"]), theirs)
    assert_equal(await setting.show(None, decoded("b"), uuids=["mine", None]), theirs)
    assert_equal(await setting.show(decoded("a"), None, uuids=[None, "too"]), theirs)
    assert_equal(await setting.show(None, None, uuids=["mine", "too"]), theirs)
    assert not setting.backend.batches


async def test_options_enlarge_all_media_of_a_request_to_one_limit(setting: Setting) -> None:
    """256 pictures, or films with their sound, had as many limits."""
    larger = {"size": {"shortest_edge": 1_200_000, "longest_edge": 1_300_000}}
    limit_processors(FetchPolicy(max_processor_mb=20))
    try:
        assert await setting.show(decoded("a"), mm_processor_kwargs=larger)
        with pytest.raises(VLLMValidationError, match="--media-max-processor-mb"):
            await setting.show(decoded("b"), decoded("c"), mm_processor_kwargs=larger)
    finally:
        limit_processors(FetchPolicy())


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


# Names

SHOWN = pytest.mark.parametrize("shown", [image, decoded], ids=["encoded", "decoded"])
"""Pictures that we process, and such that vLLM does."""


@SHOWN
async def test_tensors_that_options_made_are_known(
    setting: Setting, shown: Callable[[str], Any]
) -> None:
    """An engine may end with them: no second one gets them."""
    usual = await setting.show(shown("a"))
    odd = await setting.show(shown("a"), mm_processor_kwargs=SMALLER)
    assert usual["mm_kwargs"]["image"][0] not in setting.processing.by_options
    assert odd["mm_kwargs"]["image"][0] in setting.processing.by_options


def made_of(result: Any) -> Any:
    (item,) = result["mm_kwargs"]["image"]
    return item["pixel_values"].data


async def assert_unknown(setting: Setting, name: str) -> None:
    with pytest.raises(ValueError, match="image 1 is only named, and nothing is kept"):
        await setting.show(None, uuids=[name])


@SHOWN
async def test_a_name_is_its_api_keys_own(setting: Setting, shown: Callable[[str], Any]) -> None:
    with asking(key="me"):
        mine = made_of(await setting.show(shown("mine"), uuids=["logo"]))
    with asking(key="you"):
        await assert_unknown(setting, "logo")
        yours = made_of(await setting.show(shown("yours"), uuids=["logo"]))
        assert torch.equal(made_of(await setting.show(None, uuids=["logo"])), yours)
    with asking(key="me"):
        assert torch.equal(made_of(await setting.show(None, uuids=["logo"])), mine)
        with asking(key="me", salt="pepper"):
            await assert_unknown(setting, "logo")
    assert not torch.equal(mine, yours)


@SHOWN
async def test_what_comes_under_a_known_name_is_looked_at(
    setting: Setting, shown: Callable[[str], Any]
) -> None:
    expected = {name: made_of(await setting.show(shown(name))) for name in "ab"}
    for name in "aba":
        assert torch.equal(made_of(await setting.show(shown(name), uuids=["logo"])), expected[name])
        assert torch.equal(made_of(await setting.show(None, uuids=["logo"])), expected[name])


@SHOWN
async def test_a_name_stands_for_what_the_same_request_has_shown_under_it(
    setting: Setting, shown: Callable[[str], Any]
) -> None:
    """And not for what an earlier request has."""
    await setting.show(shown("a"), uuids=["logo"])
    for name in "bc":
        expected = (await setting.show(shown(name)))["mm_hashes"]["image"]
        made = await setting.show(None, shown(name), None, uuids=["logo", "logo", "logo"])
        assert made["mm_hashes"]["image"][1:] == expected * 2
        again = await setting.show(None, uuids=["logo"])
        assert again["mm_hashes"]["image"] == expected
    await setting.show(shown("a"), None, uuids=["new", "new"])


async def test_a_medium_is_shown_or_named(setting: Setting) -> None:
    for shown, uuids in (
        ((None,), None),
        ((image("a"), None), None),
        ((image("a"), None), ["logo", None]),
    ):
        with pytest.raises(ValueError, match="has neither content nor a uuid"):
            await setting.show(*shown, uuids=uuids)


async def test_a_name_is_no_hash_of_somebody_elses_medium(setting: Setting) -> None:
    """Guessed, or read where hashes are shown."""
    (mm_hash,) = (await setting.show(image("a")))["mm_hashes"]["image"]
    await assert_unknown(setting, mm_hash)
    planted = await setting.show(image("b"), uuids=[mm_hash])
    assert planted["mm_hashes"]["image"] != [mm_hash]
    again = await setting.show(image("a"))
    assert again["mm_hashes"]["image"] == [mm_hash]
    assert not torch.equal(made_of(again), made_of(planted))


async def test_a_name_stands_for_a_medium_processed_in_one_way(setting: Setting) -> None:
    await setting.show(image("a"), uuids=["logo"])
    with pytest.raises(ValueError, match="only named"):
        await setting.show(None, uuids=["logo"], mm_processor_kwargs=SMALLER)


async def test_a_name_is_forgotten_with_what_it_stood_for(setting: Setting) -> None:
    await setting.show(image("a"), uuids=["logo"])
    setting.store.clear()
    await assert_unknown(setting, "logo")
    await setting.show(image("a"), uuids=["logo"])
    setting.processing.clear()
    await assert_unknown(setting, "logo")


async def test_a_medium_that_is_no_good_gets_no_name(setting: Setting) -> None:
    await setting.show(image("a"), uuids=["logo"])
    with pytest.raises(VLLMValidationError, match="in no known format, not a picture"):
        await setting.show(broken_image(b"not a picture"), uuids=["logo"])
    with pytest.raises(VLLMValidationError, match="in no known format, not a picture"):
        await setting.show(broken_image(b"not a picture"), uuids=["other"])
    await setting.show(None, uuids=["logo"])
    await assert_unknown(setting, "other")


async def test_media_are_known_by_content_also_where_vllm_would_number_them(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without caches it calls the first image of every frontend ``renderer0-mm-1-image-0``."""
    expected = (await setting.show(decoded("a")))["mm_hashes"]
    renderer = setting.renderer
    monkeypatch.setattr(renderer.model_config.multimodal_config, "mm_processor_cache_gb", 0)
    monkeypatch.setattr(renderer.config.cache_config, "enable_prefix_caching", False)
    assert (await setting.show(decoded("a")))["mm_hashes"] == expected


async def test_a_renderer_is_taken_over_once(setting: Setting) -> None:
    """A second time would wrap what is ours: runs would count twice, hashes be hashed again."""
    with pytest.raises(AssertionError, match="replaced already"):
        setting.processing.take_over(setting.runs)


# Salts


@SHOWN
async def test_equal_pictures_under_two_salts_are_two(
    setting: Setting, shown: Callable[[str], Any]
) -> None:
    results = []
    for salt in (None, "one", "two"):
        with asking(salt=salt):
            results.append(await setting.show(within(shown("a"))))
            again = await setting.show(within(shown("a")))
            assert again["mm_hashes"] == results[-1]["mm_hashes"]
    assert setting.runs.total == 3
    assert len({tuple(each["mm_hashes"]["image"]) for each in results}) == 3
    for other in results[1:]:
        assert same(other["mm_kwargs"]["image"][0], results[0]["mm_kwargs"]["image"][0])
        assert other["mm_placeholders"] == results[0]["mm_placeholders"]


async def test_a_picture_in_flight_is_not_shared_across_salts(setting: Setting) -> None:
    setting.backend.open.clear()
    shown = []
    for salt in ("one", "two", "one"):
        with asking(salt=salt):
            shown.append(asyncio.create_task(setting.show(within(image("a")))))
    await until(lambda: len(setting.backend.batches) == 2)
    setting.backend.open.set()
    hashes = [each["mm_hashes"]["image"][0] for each in await asyncio.gather(*shown)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert len(setting.backend.batches) == 2


def within(medium: Any) -> Any:
    """As the loader would have fetched it."""
    if not isinstance(medium, DeferredMedium):
        return medium
    return dataclasses.replace(medium, content=medium.content.within(current_partition()))


async def test_a_worker_that_processes_a_salted_medium_gets_the_same_hash(
    setting: Setting, workers_renderer: BaseRenderer
) -> None:
    worker = LocalRenderer(workers_renderer)
    runs = HfProcessorRuns(side="worker", worker_id=None)
    patch_renderer(workers_renderer, runs=runs, hashes=partitioned_hashes)
    for count, salt in enumerate((None, "one", "two", "one"), 1):
        with asking(salt=salt):
            shown = await setting.show(within(image("salted")), uuids=["named"])
        (mm_hash,) = shown["mm_hashes"]["image"]
        source = setting.sources.get(mm_hash)
        assert source is not None
        processed, item = await worker.render(source)
        assert processed == mm_hash
        assert same(item, shown["mm_kwargs"]["image"][0])
        assert runs.total == min(count, 3)  # its cache is apart too


async def test_a_film_makes_no_processor(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backends, "second_processor")
    monkeypatch.setattr(backends, "is_long", lambda *_: True)
    assert await setting.show(image("long"))


async def test_processors_that_run_parallel_numba_have_one_thread(
    our_renderer: BaseRenderer, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backends._PARALLEL_NUMBA, ModuleType("numba"))
    setting = Setting(our_renderer, arena)
    backend = setting.backend._inner
    assert backend._long is backend._short
    await setting.loader.close()
