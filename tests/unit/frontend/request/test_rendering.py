"""Requests with pictures that nobody has processed yet, over workers with scripted engines and
scripted processing. Links, sessions, routing and retries are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from common.errors import CorruptSegmentError, EngineGoneError, OverloadedError
from common.identity import MmHash, MmIdentifier, WorkerId
from common.protocol import MediaPart
from common.step_sums import RenderingSums
from common.transfer.media_source import MediaSource
from frontend.fetch.allowance import RequestAllowance
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.batch import Processed
from frontend.processing.known_shapes import KnownShapes
from frontend.processing.outline import Outline
from frontend.processing.preprocessor import MediaItem
from frontend.processing.promises import Promise, PromisedItem, Promises
from frontend.request.settings import FaultSettings
from frontend.router.decision import Decision
from tests.fakes.request_lab import ANSWER, Lab
from tests.waiting import until

PIXELS = 1_000_000


class Here:
    """The processing of a frontend, which does what a test says."""

    def __init__(self) -> None:
        self.shapes = KnownShapes()
        self.wait_ms = 1000.0
        self.left: set[MmHash] = set()
        self.refused = 0
        self.made: list[str] = []
        self.error: Exception | None = None
        self.full = False
        self.open = asyncio.Event()
        self.open.set()

    def was_left(self, mm_hash: MmHash) -> bool:
        return mm_hash in self.left

    def note_left(self, mm_hash: MmHash) -> None:
        self.left.add(mm_hash)

    def note_refused(self) -> None:
        self.refused += 1

    @contextmanager
    def _full(self) -> Any:
        raise OverloadedError("too many wait")
        yield

    def admitted(self) -> Any:
        return self._full() if self.full else nullcontext()

    def promise(self, name: str, pixels: int = PIXELS) -> MediaItem:
        async def process() -> Processed:
            self.made.append(name)
            await self.open.wait()
            if self.error is not None:
                raise self.error
            return Processed(MmHash(name), tensors(name), [])

        source = MediaSource("image", name.encode(), {}, {}, pixels=pixels, placeholder="p")
        promise = Promise(
            mm_hash=MmHash(name),
            source=source,
            nbytes=64,
            wait_ms=self.wait_ms,
            _outline=Outline(MmHash(name), "shape", pixels),
            _promised=(),
            _process=process,
            _promises=cast(Promises, self),
            _allowance=RequestAllowance(FetchPolicy(max_request_megapixels=4)),
        )
        part = MediaPart("image", MmHash(name), 0, 4, None)
        item = PromisedItem(promise)
        return MediaItem(part, MmIdentifier(name), 4, 64, item, source, promise)


def tensors(name: str) -> MultiModalKwargsItem:
    data = torch.full((8, 8), len(name), dtype=torch.uint8)
    return MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(data=data, field=MultiModalBatchedField())}
    )


class Setting:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.here = Here()
        self.rendered: list[MediaSource] = []
        self.error: Exception | None = None

    async def render(self, source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
        self.rendered.append(source)
        if self.error is not None:
            raise self.error
        name = source.encoded.decode()
        return MmHash(name), tensors(name)

    def can_render(self, *names: str) -> None:
        for name in names:
            sums = RenderingSums(10, 10 * PIXELS, 100)
            self.lab.router.roster.rendered(WorkerId(name), sums)

    async def ask(self, *media: MediaItem, name: str = "r") -> str:
        self.lab.media = list(media)
        outputs = await self.lab.ask(name=name)
        return "".join(each.outputs[0].text for each in outputs)

    def decision(self, name: str = "r") -> Decision:
        return self.lab.router.decisions.find(name)[-1]

    def choices(self, name: str = "r") -> list[tuple[str, str]]:
        return [(each.place, each.reason) for each in self.decision(name).rendering]

    def ways(self, name: str = "r") -> list[tuple[str, str]]:
        return [(each.how, each.transport) for each in self.decision(name).media]


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    lab = Lab(FaultSettings())
    setting = Setting(lab)
    lab.render = setting.render
    await lab.add("w0")
    await lab.add("w1")
    setting.can_render("w0", "w1")
    yield setting
    await lab.close()


async def test_a_picture_that_would_wait_is_left_to_its_worker(setting: Setting) -> None:
    assert await setting.ask(setting.here.promise("new")) == ANSWER
    assert setting.here.made == []
    (source,) = setting.rendered
    assert (source.encoded, source.pixels, source.placeholder) == (b"new", PIXELS, "p")
    (choice,) = setting.decision().rendering
    assert (choice.place, choice.reason) == ("worker", "sooner")
    assert choice.frontend_ms == 1000.0
    assert choice.worker_ms == pytest.approx(10.0)
    assert setting.ways() == [("shipped", "reference")]
    assert "rendering" in setting.decision().as_json()


async def test_the_worker_then_holds_it(setting: Setting) -> None:
    await setting.ask(setting.here.promise("new"))
    first = setting.decision().worker_id
    await setting.ask(setting.here.promise("new"), name="again")
    assert setting.decision("again").worker_id == first
    assert setting.ways("again") == [("held", "")]
    assert len(setting.rendered) == 1
    assert setting.here.made == []


@pytest.mark.parametrize(
    ("wait_ms", "reason"), [(0.0, "idle"), (9.0, "sooner")], ids=["no queue", "a short one"]
)
async def test_a_picture_that_would_not_wait_is_processed_here(
    setting: Setting, wait_ms: float, reason: str
) -> None:
    setting.here.wait_ms = wait_ms
    assert await setting.ask(setting.here.promise("new")) == ANSWER
    assert setting.here.made == ["new"]
    assert setting.rendered == []
    assert setting.choices() == [("frontend", reason)]
    assert setting.ways() == [("shipped", "inline")]


async def test_a_worker_that_does_not_say_what_it_takes_is_left_nothing(setting: Setting) -> None:
    """One of an older version, which would not look whether the placeholder fits."""
    for name in ("w0", "w1"):
        setting.lab.router.rendering.drop(WorkerId(name))
    assert await setting.ask(setting.here.promise("new")) == ANSWER
    assert setting.choices() == [("frontend", "worker_full")]
    assert setting.decision().rendering[0].worker_ms is None
    assert setting.rendered == []


async def test_a_worker_that_is_left_many_is_left_no_more(setting: Setting) -> None:
    media = [setting.here.promise(f"p{number}", 1000) for number in range(12)]
    assert await setting.ask(*media) == ANSWER
    assert setting.choices() == [("worker", "sooner")] * 8 + [("frontend", "worker_full")] * 4
    assert setting.here.made == ["p8", "p9", "p10", "p11"]
    for name in ("w0", "w1"):  # all is given back at the end
        assert setting.lab.router.rendering.worker_ms(WorkerId(name), PIXELS) == pytest.approx(10)


async def test_a_picture_that_another_worker_has_is_processed_here(setting: Setting) -> None:
    await setting.ask(setting.here.promise("new"))
    worker = setting.decision().worker_id
    await setting.lab.remove(worker)
    assert await setting.ask(setting.here.promise("new"), name="again") == ANSWER
    assert setting.choices("again") == [("frontend", "again")]
    assert setting.here.made == ["new"]


async def test_a_picture_that_the_worker_refuses_is_processed_here(setting: Setting) -> None:
    setting.error = CorruptSegmentError("the image needs another placeholder")
    assert await setting.ask(setting.here.promise("new")) == ANSWER
    assert setting.here.made == ["new"]
    assert setting.here.refused == 1
    ((how, _), *_) = setting.ways()
    assert setting.ways() == [("shipped", "reference"), ("CorruptSegmentError", "inline")]
    assert how == "shipped"


async def test_a_picture_that_nobody_can_process_is_the_users_fault(setting: Setting) -> None:
    setting.error = CorruptSegmentError("the worker can't process it")
    setting.here.error = ValueError("cannot identify image file")
    with pytest.raises(VLLMValidationError, match="cannot identify image file"):
        await setting.ask(setting.here.promise("bad"))
    assert setting.here.refused == 0
    setting.error = setting.here.error = None
    assert await setting.ask(setting.here.promise("good"), name="next") == ANSWER
    await until(lambda: not any(each.running for each in setting.lab.engines.values()))


async def test_a_worker_that_dies_of_it_takes_no_other_along(setting: Setting) -> None:
    """The next worker gets it processed, so what killed the first one is found out here."""
    setting.lab.disturb(0, EngineGoneError("it died"))
    assert await setting.ask(setting.here.promise("deadly")) == ANSWER
    assert len(setting.rendered) == 1
    assert setting.here.made == ["deadly"]
    assert setting.choices() == [("frontend", "again")]


async def test_where_nothing_is_transferred_it_is_always_left(setting: Setting) -> None:
    setting.here.wait_ms = 0.0
    sender = setting.lab.media_sender
    sender.transport = lambda worker_id: "reference"  # type: ignore[method-assign]
    assert await setting.ask(setting.here.promise("new")) == ANSWER
    assert setting.choices() == [("worker", "no_transfer")]
    assert setting.here.made == []


async def test_pixels_of_one_request(setting: Setting) -> None:
    item = setting.here.promise("large", 5_000_000)
    with pytest.raises(VLLMError, match="4 megapixels"):
        await setting.ask(item)
    assert setting.rendered == []


async def test_too_many_that_wait(setting: Setting) -> None:
    setting.here.wait_ms, setting.here.full = 0.0, True
    with pytest.raises(VLLMError, match="too many wait"):
        await setting.ask(setting.here.promise("new"))
    assert setting.here.made == []
    assert not len(setting.lab.router.in_flight)


async def test_who_leaves_while_it_is_processed_leaves_nothing(setting: Setting) -> None:
    setting.here.wait_ms = 0.0
    setting.here.open.clear()
    task = asyncio.create_task(setting.ask(setting.here.promise("new")))
    await until(lambda: setting.here.made == ["new"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not len(setting.lab.router.in_flight)


async def test_a_request_that_is_late_while_its_picture_waits() -> None:
    lab = Lab(FaultSettings(request_timeout_s=0.5))
    setting = Setting(lab)
    await lab.add("w0")
    setting.here.wait_ms = 0.0
    setting.here.open.clear()
    with pytest.raises(VLLMError, match="was not done within"):
        await setting.ask(setting.here.promise("new"))
    assert not len(lab.router.in_flight)
    await lab.close()
