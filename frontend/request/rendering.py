"""Where the pictures of a request are processed that nobody has processed yet.

A picture is left to the chosen worker while it would have it before the picture's turn comes in
this frontend, and is the first to be given it: what several workers need is better made once. It
is processed here after all if the worker can't, or is lost.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from common.telemetry import RENDERING_CHOICES, stage
from frontend.processing import MediaItem, Promise
from frontend.request.deadlines import Deadlines
from frontend.router import Decision, Rendering, RenderingChoice
from frontend.workers import MediaSender

logger = logging.getLogger(__name__)


class MediaMaking:
    """Has the items of prompts made, or leaves them to workers."""

    def __init__(self, rendering: Rendering, media_sender: MediaSender) -> None:
        """
        Args:
            rendering: what workers take for it; told what they are left.
        """
        self._rendering = rendering
        self._media_sender = media_sender

    async def place(
        self, decision: Decision, items: Sequence[MediaItem], deadlines: Deadlines
    ) -> list[MediaItem]:
        """Items that the chosen worker lacks, as they are to be sent.

        Raises:
            DeadlineExceededError: the request's own time was over first.
            VLLMError, MmRouterError: a picture is no good, or can't be had now.
        """
        kept, placed = [], []
        for item in items:
            left = item.promise is not None and self._leave(decision, item.promise)
            placed.append(item if left else None)
            if not left:
                kept.append(item)
        made = iter(await self.make(kept, deadlines))
        return [next(made) if item is None else item for item in placed]

    async def make(
        self, items: Sequence[MediaItem], deadlines: Deadlines, *, refused: bool = False
    ) -> list[MediaItem]:
        """Items with tensors, those made that are not there yet. Raises as :meth:`place`.

        Args:
            refused: a worker could not make those that it was left.
        """
        promises = [each.promise for each in items if each.promise is not None]
        if not promises:
            return list(items)
        for promise in promises:
            promise.refused |= refused and promise.left
        try:
            with promises[0].admitted(), stage("process_media"):
                async with asyncio.timeout(deadlines.left_s()):
                    await asyncio.gather(*(promise.keep() for promise in promises))
        except TimeoutError as error:
            raise deadlines.late() from error
        return [await _made(each) for each in items]

    def _leave(self, decision: Decision, promise: Promise) -> bool:
        """Leave a picture to the worker, if that is better."""
        worker_id, wait_ms = decision.worker_id, promise.wait_ms
        worker_ms = self._rendering.worker_ms(worker_id, promise.pixels)
        again = promise.again or self._rendering.held(promise.mm_hash)
        reason = _why_here(promise, again, wait_ms, worker_ms)
        if self._media_sender.transport(worker_id) == "reference" and not promise.refused:
            place, reason = "worker", "no_transfer"
        else:
            place, reason = ("worker", "sooner") if reason is None else ("frontend", reason)
        if place == "worker":
            promise.leave()
            self._rendering.left(decision.request_id, worker_id, promise.pixels)
        RENDERING_CHOICES.labels(place, reason).inc()
        choice = RenderingChoice(promise.mm_hash, place, reason, wait_ms, worker_ms)
        decision.rendering.append(choice)
        logger.debug("request %s: %s", decision.request_id, choice)
        return place == "worker"


def _why_here(promise: Promise, again: bool, wait_ms: float, worker_ms: float | None) -> str | None:
    """Why a picture is processed in this frontend; None if the worker has it sooner."""
    if promise.refused:
        return "refused"
    if again:
        return "again"
    if not wait_ms:
        return "idle"
    if worker_ms is None:
        return "worker_full"
    return None if worker_ms < wait_ms else "sooner"


async def _made(item: MediaItem) -> MediaItem:
    if item.promise is None:
        return item
    source = item.source
    if source is not None:
        source = dataclasses.replace(source, pixels=0, placeholder="")
    return dataclasses.replace(item, item=await item.promise.keep(), promise=None, source=source)
