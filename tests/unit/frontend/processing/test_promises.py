"""Pictures that are promised: prompts as if they were processed, and what keeps a promise."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY
from vllm.exceptions import VLLMClientError
from vllm.renderers import BaseRenderer

from backend_worker.render import LocalRenderer, partitioned_hashes
from common.cache_partition import SHARED
from common.card import WorkerCard
from common.errors import CorruptSegmentError
from common.hf_processor_runs import HfProcessorRuns
from common.identity import MmHash
from common.placeholder import placeholder_digest
from common.renderer_patches import patch_renderer
from common.transfer.arena.arena import Arena
from common.transfer.media_source import MediaSource
from frontend.asgi import Receive, Scope, Send
from frontend.fetch.allowance import RequestAllowance
from frontend.fetch.deferred import DeferredMedium
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.errors import RequestLimitError
from frontend.media_limits.policy import FetchPolicy
from frontend.processing import known_shapes, promises
from frontend.processing.backends import OwnBackend
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import OutlineError
from frontend.processing.media_processing import MediaProcessing
from frontend.processing.promises import ForWorkers, Promise, PromisedItem
from frontend.processing.renderer import build_renderer
from frontend.processing.sources import MediaSources
from frontend.processing.store import ArenaStore
from tests.pictures import blank_picture
from tests.unit.frontend.processing.media import broken_image, image, same
from tests.waiting import until


class Workers:
    """What a router would say of them."""

    def __init__(self) -> None:
        self.idle = True
        self.holds: set[MmHash] = set()

    def sooner(self, pixels: int, wait_ms: float) -> bool:
        return self.idle

    def held(self, mm_hash: MmHash) -> bool:
        return mm_hash in self.holds


class HeldUp:
    """A backend with a door."""

    width = 1

    def __init__(self, inner: OwnBackend) -> None:
        self._inner = inner
        self.batches = 0
        self.open = asyncio.Event()
        self.open.set()

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        self.batches += 1
        await self.open.wait()
        return await self._inner.run(batch, abandoned)


class Setting:
    def __init__(self, renderer: BaseRenderer, arena: Arena, *, sources: bool = False) -> None:
        self.renderer = renderer
        self.workers = Workers()
        self.loader = MediaLoader(FetchPolicy(), 1 << 26)
        store = ArenaStore(arena)
        self.backend = HeldUp(OwnBackend(renderer, store, self.loader.decode))
        self.processing = MediaProcessing(
            renderer,
            store,
            self.backend,
            self.loader.decode,
            most_waiting=3,
            sources=MediaSources() if sources else None,
            elsewhere=self.workers,
            policy=FetchPolicy(),
        )
        self.processing.take_over(HfProcessorRuns(side="frontend", worker_id=None))

    async def show(self, *images: DeferredMedium, **options: Any) -> Any:
        text = self.renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(images)})
        uuids = options.pop("uuids", None)
        return await self.renderer._process_multimodal_async(
            self.renderer.get_tokenizer().encode("look: " + text),
            {"image": list(images)},
            None if uuids is None else {"image": uuids},
            options.pop("mm_processor_kwargs", None),
            None,
        )

    async def learn(self) -> None:
        """Process two pictures, as must be before one of their size is promised."""
        idle, self.workers.idle = self.workers.idle, False
        await self.show(image("one"), image("other"))
        self.workers.idle = idle

    async def promised(self, picture: DeferredMedium) -> Promise:
        (item,) = (await self.show(picture))["mm_kwargs"]["image"]
        assert isinstance(item, PromisedItem)
        return item.promise


@pytest_asyncio.fixture
async def setting(card: WorkerCard, serve_args: Namespace, arena: Arena) -> AsyncIterator[Setting]:
    renderer = await asyncio.to_thread(build_renderer, card, serve_args)
    promises._for_workers.set(True)
    setting = Setting(renderer, arena)
    yield setting
    await setting.processing.close()
    await setting.loader.close()
    renderer.shutdown()


@pytest.fixture(autouse=True)
def for_a_worker() -> Iterator[None]:
    token = promises._for_workers.set(True)
    yield
    promises._for_workers.reset(token)


def by_vllm(renderer: BaseRenderer, *images: DeferredMedium) -> Any:
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": len(images)})
    pictures = [each.media_io.load_bytes(each.content.data) for each in images]
    ids = renderer.get_tokenizer().encode("look: " + text)
    return renderer._process_multimodal(ids, {"image": pictures}, None, None, None)


async def test_a_prompt_with_promises_is_vllms_own(
    setting: Setting, vllm_renderer: BaseRenderer
) -> None:
    await setting.learn()
    images = [image("new"), image("of another size", (56, 168)), image("one"), image("new")]
    ours, theirs = await setting.show(*images), by_vllm(vllm_renderer, *images)
    for what in ("prompt_token_ids", "mm_hashes", "mm_placeholders"):
        assert ours[what] == theirs[what]
    items = ours["mm_kwargs"]["image"]
    assert [isinstance(each, PromisedItem) for each in items] == [True, False, False, True]
    assert setting.backend.batches == 2  # those learned from, and that of another size
    for item, expected in zip(items, theirs["mm_kwargs"]["image"], strict=True):
        made = await item.promise.keep() if isinstance(item, PromisedItem) else item
        assert same(made, expected)
    assert setting.backend.batches == 3


async def test_what_is_learned_of_large_pictures_has_a_limit(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends them chooses how many tokens they have."""
    await setting.learn()
    (place,) = (await setting.show(image("new")))["mm_placeholders"]["image"]
    monkeypatch.setattr(known_shapes, "TOKENS_KEPT", place.length)
    await setting.promised(image("newer"))
    setting.workers.idle = False
    await setting.show(image("of another size", (56, 168)))
    setting.workers.idle = True
    (item,) = (await setting.show(image("newest")))["mm_kwargs"]["image"]
    assert not isinstance(item, PromisedItem)


async def test_a_worker_makes_of_a_promise_what_is_made_here(
    setting: Setting, card: WorkerCard, serve_args: Namespace
) -> None:
    await setting.learn()
    shown = await setting.show(image("new"))
    (item,) = shown["mm_kwargs"]["image"]
    (place,) = shown["mm_placeholders"]["image"]
    tokens = shown["prompt_token_ids"][place.offset : place.offset + place.length]
    renderer = await asyncio.to_thread(build_renderer, card, serve_args)
    runs = HfProcessorRuns(side="worker", worker_id=None)
    patch_renderer(renderer, runs=runs, hashes=partitioned_hashes)

    def source(digest: str) -> MediaSource:
        made = item.promise.source
        return MediaSource("image", made.encoded, {}, {}, SHARED, made.pixels, digest)

    mm_hash, made = await LocalRenderer(renderer).render(source(placeholder_digest(tokens, None)))
    assert mm_hash == item.promise.mm_hash
    assert same(made, await item.promise.keep())
    for other in (tokens[1:], [*tokens, 1], [tokens[0] + 1, *tokens[1:]]):
        with pytest.raises(CorruptSegmentError, match="another placeholder"):
            await LocalRenderer(renderer).render(source(placeholder_digest(other, None)))
    renderer.shutdown()


async def test_what_is_not_promised(setting: Setting) -> None:
    """Without two pictures of a size or a worker that is sooner, with names or options, for
    others."""
    assert not _promises(await setting.show(image("a")))
    assert not _promises(await setting.show(image("b")))
    assert _promises(await setting.show(image("c")))
    assert not _promises(await setting.show(image("d"), uuids=["mine"]))
    assert _promises(await setting.show(image("e"), uuids=[None]))
    # What workers make of a request's options is compared with nothing.
    assert not _promises(await setting.show(image("e"), mm_processor_kwargs={"nothing": 1}))
    setting.workers.idle = False
    assert not _promises(await setting.show(image("f")))
    setting.workers.idle = True
    token = promises._for_workers.set(False)
    assert not _promises(await setting.show(image("g")))
    promises._for_workers.reset(token)


def _promises(shown: Any) -> bool:
    return any(isinstance(each, PromisedItem) for each in shown["mm_kwargs"]["image"])


async def test_what_is_kept_or_in_flight_is_not_promised(setting: Setting) -> None:
    await setting.learn()
    assert not _promises(await setting.show(image("one")))
    setting.workers.idle = False
    setting.backend.open.clear()
    first = asyncio.create_task(setting.show(image("new")))
    await until(lambda: setting.backend.batches == 2)
    setting.workers.idle = True
    second = asyncio.create_task(setting.show(image("new")))
    setting.backend.open.set()
    assert not _promises(await first)
    assert not _promises(await second)
    assert setting.backend.batches == 2


async def test_a_picture_that_was_left_is_promised_only_where_a_worker_has_it(
    setting: Setting,
) -> None:
    await setting.learn()
    promise = await setting.promised(image("new"))
    assert not promise.again
    promise.leave()
    assert promise.again
    setting.workers.holds.add(promise.mm_hash)
    assert (await setting.promised(image("new"))).again
    setting.workers.holds.clear()
    assert not _promises(await setting.show(image("new")))


async def test_two_requests_with_one_new_picture(setting: Setting) -> None:
    """Only one of them leaves it to a worker; those who keep it share that."""
    await setting.learn()
    one, other, third = await asyncio.gather(*(setting.promised(image("new")) for _ in range(3)))
    one.leave()
    assert other.again and third.again
    first, second = await asyncio.gather(other.keep(), third.keep())
    assert setting.backend.batches == 2
    assert same(first, second)


async def test_a_promise_of_a_broken_picture_fails_as_the_picture_would(setting: Setting) -> None:
    whole = image("cut", (400, 400)).content.data
    setting.workers.idle = False
    await setting.show(image("one", (400, 400)), image("other", (400, 400)))
    cut = broken_image(whole[: len(whole) // 2])
    with pytest.raises(Exception) as directly:
        await setting.show(cut)
    setting.workers.idle = True
    with pytest.raises(VLLMClientError) as later:  # its header is enough to see that it is cut off
        await setting.promised(cut)
    assert str(later.value) == str(directly.value)


async def test_a_request_may_leave_no_more_pixels_than_it_may_have(setting: Setting) -> None:
    await setting.learn()
    promise = await setting.promised(image("new"))
    promise._allowance = RequestAllowance(FetchPolicy(max_request_megapixels=1))
    promise._allowance.take_pixels(1_000_000 - 112 * 112)
    promise.leave()
    await promise.keep()  # they are not counted twice
    promise.leave()
    with pytest.raises(RequestLimitError):
        promise.leave()


async def test_a_place_among_those_that_wait(setting: Setting) -> None:
    await setting.learn()
    promise = await setting.promised(image("new"))
    taken = [promise.admitted() for _ in range(3)]
    for each in taken:
        each.__enter__()
    with pytest.raises(Exception, match="being processed already"), promise.admitted():
        pass
    for each in taken:
        each.__exit__(None, None, None)
    with promise.admitted():
        pass


async def test_a_model_whose_pictures_are_not_what_they_seem_gets_no_promises(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """An outline that is wrong: the request fails once, and nothing goes by outlines any more."""
    await setting.learn()
    promise = await setting.promised(image("new"))
    other = await setting.promised(image("newer"))
    promise._promised = ()
    with pytest.raises(OutlineError, match="try again"):
        await promise.keep()
    assert not _promises(await setting.show(image("newest")))
    assert "from now on: a picture was not what its outline said" in caplog.text
    await other.keep()


async def test_workers_that_can_not_are_left_nothing(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    await setting.learn()
    for name in ("a", "b", "c"):
        promise = await setting.promised(image(name))
        promise.leave()
        promise.refused = True
        await promise.keep()
    assert not _promises(await setting.show(image("d")))
    assert "workers could not process 3 that were fine" in caplog.text


async def test_choices_are_counted(setting: Setting) -> None:
    def count(reason: str) -> float:
        labels = {"place": "frontend", "reason": reason}
        return REGISTRY.get_sample_value("mmrouter_rendering_choices_total", labels) or 0.0

    before = {reason: count(reason) for reason in ("idle", "format", "new_size")}
    setting.workers.idle = False
    await setting.show(image("a"), broken_image(blank_picture(112)))
    setting.workers.idle = True
    await setting.show(image("x", (56, 112)))
    assert count("idle") == before["idle"] + 1
    assert count("format") == before["format"] + 1
    assert count("new_size") == before["new_size"] + 1


async def test_only_what_goes_to_workers(setting: Setting) -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(promises._for_workers.get())

    async def nothing(*_: Any) -> Any: ...

    guard = ForWorkers(app, "/prefix")
    for path in (
        "/prefix/v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/messages",
        "/v1/responses",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/inference/v1/generate",
    ):
        await guard({"type": "http", "path": path}, nothing, nothing)
    assert seen == [True] * 4 + [False] * 4
