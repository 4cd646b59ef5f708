"""Pictures that a prompt needs and nobody has processed yet, since a worker may do it sooner.

A picture's hash and placeholder are known by its outline. So it can be routed before anybody has
decoded it, and where it is decoded is decided once it is known which worker it goes to.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from vllm.exceptions import VLLMError
from vllm.multimodal.inputs import MultiModalKwargsItem

from common.cache_partition import Partition
from common.errors import RequestRejectedError
from common.identity import MmHash
from common.telemetry import RENDERING_CHOICES
from common.transfer.media_source import MediaSource
from frontend.asgi import App, Receive, Scope, Send, route_path
from frontend.fetch import RequestAllowance, current_allowance
from frontend.media_limits import FetchPolicy
from frontend.processing.batch import MediaOptions, Processed, Processor
from frontend.processing.errors import OutlineError
from frontend.processing.known_shapes import KnownShapes, placement
from frontend.processing.outline import Outline, outline
from frontend.processing.pace import Pace
from frontend.processing.prompt_media import Shown
from frontend.processing.sources import source_of

_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""Whose prompts go to workers and nowhere else. What others render may go to clients, whole."""

_for_workers: Final[ContextVar[bool]] = ContextVar("for_workers", default=False)

PLACED: Final = 100_000
"""Pictures that were left to a worker, of which it is remembered."""

MOST_REFUSED: Final = 3
"""Pictures that were fine and that workers could not process, before none is left to them."""

MOST_REFUSED_SHARE: Final = 0.01
"""The same as a share of those left to them."""


class Elsewhere(Protocol):
    """What is known of workers that process pictures."""

    def sooner(self, pixels: int, wait_ms: float) -> bool:
        """Whether some worker would have a picture before its turn comes here."""

    def held(self, mm_hash: MmHash) -> bool:
        """Whether a worker has acknowledged a picture."""


class Obtain(Protocol):
    """Processes media here, as :meth:`ProcessedOnce.obtain`."""

    async def __call__(
        self, shown: Sequence[Shown], options: MediaOptions, partition: Partition
    ) -> list[Processed]: ...


class PromisedItem(MultiModalKwargsItem):
    """Stands in a prompt for tensors that nobody has made yet.

    Attributes:
        promise: has them made.
    """

    def __init__(self, promise: "Promise") -> None:
        super().__init__()
        self.promise = promise


@dataclass(kw_only=True)
class Promise:
    """A picture of one request that nobody has processed yet.

    Attributes:
        source: the picture as it came; its placeholder is not known yet.
        nbytes: of its tensors.
        wait_ms: until its turn would have come here, when it was promised. What waits for workers
            makes no queue here, so that later there may be none.
        left: a worker was given it to process.
        refused: the worker could not.
    """

    mm_hash: MmHash
    source: MediaSource
    nbytes: int
    wait_ms: float
    left: bool = False
    refused: bool = False
    _outline: Outline
    _promised: Hashable
    _process: Callable[[], Awaitable[Processed]]
    _promises: "Promises"
    _allowance: RequestAllowance
    _kept: Processed | None = None

    @property
    def pixels(self) -> int:
        """Of the picture."""
        return self._outline.pixels

    @property
    def again(self) -> bool:
        """Whether it was left to a worker before, for this request or another."""
        return self.left or self._promises.was_left(self.mm_hash)

    def admitted(self) -> AbstractContextManager[None]:
        """A place for its request among those whose media are being processed. Raises
        OverloadedError if there is none.
        """
        return self._promises.admitted()

    def leave(self) -> None:
        """A worker is given it to process. Raises RequestLimitError if a request may not have so
        many pixels."""
        self._allowance.take_pixels(self.pixels)
        self.left = True
        self._promises.note_left(self.mm_hash)

    async def keep(self) -> MultiModalKwargsItem:
        """Process it here, once.

        Raises:
            VLLMError, MmRouterError: it is no good, or can't be had now.
        """
        if self._kept is None:
            if self.left:
                self._allowance.return_pixels(self.pixels)  # they are counted again
            try:
                processed = await self._process()
            except VLLMError:
                raise
            except ValueError as error:
                raise RequestRejectedError(str(error)) from error
            if (processed.mm_hash, placement(processed.prompt_updates)) != (
                self.mm_hash,
                self._promised,
            ):
                self._promises.shapes.doubt("a picture was not what its outline said")
                raise OutlineError("a picture's prompt has to be made anew: try again")
            if self.refused:
                self._promises.note_refused()
            self._kept = processed
        return self._kept.item


class Promises:
    """Which pictures are promised instead of processed. For one event loop.

    Attributes:
        shapes: what is known of pictures by their outlines.
    """

    def __init__(
        self,
        processor: Processor,
        obtain: Obtain,
        pace: Pace,
        elsewhere: Elsewhere,
        policy: FetchPolicy,
        admitted: Callable[[], AbstractContextManager[None]],
        *,
        always: bool,
    ) -> None:
        """
        Args:
            obtain: processes a picture here after all.
            pace: how long that takes.
            elsewhere: what workers would take.
            policy: which pictures are taken at all.
            admitted: a place among the requests whose media are being processed.
            always: whatever that is, since workers process all media themselves.
        """
        self.shapes = KnownShapes()
        self._processor = processor
        self._obtain = obtain
        self._pace = pace
        self._elsewhere = elsewhere
        self._policy = policy
        self.admitted = admitted
        self._always = always
        self._left: OrderedDict[MmHash, None] = OrderedDict()
        self._count_left = self._refused = 0

    async def outlines(
        self, shown: Sequence[Shown], options: MediaOptions, partition: Partition
    ) -> Mapping[Hashable, Outline]:
        """Those of a request's new pictures, by key, as far as they can be told.

        Args:
            shown: media that are neither kept nor in flight here.
        """
        if not (self.shapes.hold and _for_workers.get()):
            return {}
        pictures = {each.key: each for each in shown if each.modality == "image"}
        found = await asyncio.gather(
            *(
                asyncio.to_thread(
                    outline, self._processor, each.medium, options, partition, self._policy
                )
                for each in pictures.values()
            )
        )
        if None in found:
            RENDERING_CHOICES.labels("frontend", "format").inc(found.count(None))
        return {key: one for key, one in zip(pictures, found, strict=True) if one is not None}

    def promise(
        self, shown: Shown, outline: Outline, options: MediaOptions, partition: Partition
    ) -> Processed | None:
        """Stands for a picture in its prompt; None if it is better processed now."""
        reason = self._reason(outline)
        shape = self.shapes.recall(outline.shape)
        if shape is None or reason is not None:
            RENDERING_CHOICES.labels("frontend", reason or "new_size").inc()
            return None

        async def process() -> Processed:
            (processed,) = await self._obtain([shown], options, partition)
            return processed

        promise = Promise(
            mm_hash=outline.mm_hash,
            source=source_of(shown, options, partition, outline.pixels),
            nbytes=shape.nbytes,
            wait_ms=self._pace.wait_ms,
            _outline=outline,
            _promised=placement(shape.prompt_updates),
            _process=process,
            _promises=self,
            _allowance=current_allowance(self._policy),
        )
        return Processed(outline.mm_hash, PromisedItem(promise), shape.prompt_updates)

    def _reason(self, outline: Outline) -> str | None:
        """Why a picture is processed here and now; None if it isn't."""
        if self._always or self._elsewhere.held(outline.mm_hash):
            return None
        if self.was_left(outline.mm_hash):
            return "again"
        wait_ms = self._pace.wait_ms
        if self._elsewhere.sooner(outline.pixels, wait_ms):
            return None
        return "sooner" if wait_ms else "idle"

    def was_left(self, mm_hash: MmHash) -> bool:
        """Whether a worker was given a picture to process."""
        return mm_hash in self._left

    def note_left(self, mm_hash: MmHash) -> None:
        """A worker is given a picture to process."""
        self._count_left += 1
        self._left[mm_hash] = None
        self._left.move_to_end(mm_hash)
        if len(self._left) > PLACED:
            self._left.popitem(last=False)

    def note_refused(self) -> None:
        """A picture is fine that a worker could not process."""
        self._refused += 1
        if self._refused >= MOST_REFUSED and self._refused > MOST_REFUSED_SHARE * self._count_left:
            self.shapes.doubt(f"workers could not process {self._refused} that were fine")


class ForWorkers:
    """ASGI middleware that says which requests' pictures may be promised."""

    def __init__(self, app: App, root_path: str = "") -> None:
        """
        Args:
            root_path: prefix under which a proxy serves the app.
        """
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            _for_workers.set(route_path(scope, self._root_path).rstrip("/") in _PATHS)
        await self._app(scope, receive, send)
