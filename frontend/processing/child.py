"""A process that decodes and processes media for a frontend, forked by its fork server.

It has its own renderer and writes tensors straight into the frontend's arena, at offsets that the
frontend assigns. It ends when the frontend does.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle
from vllm.exceptions import VLLMClientError

from common.cli.vllm_command_line import configure_vllms_logging
from common.errors import OutOfFilesError, RequestRejectedError, UnsupportedItemError
from common.observability.log_lines import configure_logging, current_request
from common.observability.watchdog import WATCHDOG, allow
from common.transfer.arena import ArenaMapping, EncodedItem, SegmentLayout, write_parts
from common.transfer.codec import encode
from common.vllm_compat.renderer_patches import HfProcessorRuns, patch_renderer
from frontend.bounded.child_process import Ready
from frontend.bounded.memory_limit import MemoryLimit, is_out_of_memory, private_bytes
from frontend.fetch import decode, limit_decoders
from frontend.media_limits import FetchPolicy, MediaError, seconds_for
from frontend.processing.batch import Batch, Medium, Processed, process
from frontend.processing.child_messages import (
    Answer,
    BatchFailed,
    Fault,
    NoRoom,
    Offsets,
    Result,
    Results,
    StartUp,
    Wants,
    Written,
)
from frontend.processing.errors import missing_package
from frontend.processing.renderer import build_renderer

logger = logging.getLogger("frontend.processing.child")

ANY_MEDIUM_BYTES: Final = 1 << 30
"""Base memory for decoding any medium: codecs keep frames, threads have stacks."""

_DECODED: Final = (4, 48)
"""Further bytes for decoding, for each encoded byte and each granted pixel."""

_PROCESSED: Final = (128 << 20, 96)
"""Bytes for processing, for each medium and each granted pixel. Processors enlarge small pictures,
cut them into tiles and make floats of them, with copies."""

KEPT_BYTES: Final = 1 << 30
"""Growth since start-up beyond which a process is replaced."""


class _DeniedError(Exception):
    """The frontend has no room for a decoded medium, and tells its users."""


class Child:
    """One process's end of the socket pair."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        """Take the order and load the renderer: seconds."""
        self._connection = connection
        order: StartUp = connection.recv()
        if order.log is not None:
            name = f"{order.log.process} media {os.getpid()}"
            configure_logging(replace(order.log, process=name))
            configure_vllms_logging(order.serve_args)
        limit_decoders(order.policy)
        self._policy: FetchPolicy = order.policy
        self._arena = None if order.arena is None else _map(order)
        renderer = build_renderer(order.card, order.serve_args)
        renderer.warmup_mm()
        self._runs = HfProcessorRuns(side="frontend", worker_id=None)
        patch_renderer(renderer, runs=self._runs)
        self._processor = renderer.get_mm_processor()
        self._pixels = 0
        self._at_first = private_bytes()
        connection.send(Ready())

    def serve(self) -> None:
        """Process batches until the frontend is gone."""
        while True:
            try:
                batch: Batch = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return
            before = self._runs.total
            # A set id, even "-", keeps users' text out of vLLM's log lines.
            about = current_request.set(batch.request or "-")
            try:
                with WATCHDOG.telling("media"):
                    outcome = self._process(batch)
            except _DeniedError:
                continue
            finally:
                current_request.reset(about)
            if isinstance(outcome, BatchFailed):
                self._connection.send(outcome)
            else:
                self._deliver(*outcome, self._runs.total - before)
            del outcome
            if self._keeps_too_much():
                return

    def _keeps_too_much(self) -> bool:
        """Return whether media leaked so much memory that the process must be replaced."""
        if private_bytes() - self._at_first <= KEPT_BYTES:
            return False
        gc.collect()
        kept = private_bytes() - self._at_first
        if kept > KEPT_BYTES:
            logger.warning("this media process leaked %d MiB; replacing it", kept >> 20)
        return kept > KEPT_BYTES

    def _process(self, batch: Batch) -> BatchFailed | tuple[list[EncodedItem], list[Processed]]:
        self._pixels = 0
        for_each, for_pixel = _PROCESSED
        try:
            decoded = [self._decode(medium) for medium in batch.media]
            taken = for_each * len(decoded) + for_pixel * self._pixels
            with MemoryLimit(ANY_MEDIUM_BYTES + taken):
                processed = process(self._processor, batch, decoded)
            return [encode(each.item) for each in processed], processed
        except _DeniedError:
            raise
        except Exception as error:  # noqa: BLE001 # told to the frontend, which raises it
            return _failed(batch, error)

    def _decode(self, medium: Medium) -> Any:
        for_byte, for_pixel = _DECODED
        with MemoryLimit(ANY_MEDIUM_BYTES + for_byte * len(medium.content.data)) as limit:

            def admit(pixels: int) -> None:
                self._admit(pixels)
                limit.grow(for_pixel * pixels)

            return decode(medium.content, medium.media_io, self._policy, admit)

    def _admit(self, pixels: int) -> None:
        try:
            self._connection.send(Wants(pixels))
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionError):  # decoding would blame the medium
            sys.exit("the frontend is gone")
        if answer is not Answer.GRANTED:
            raise _DeniedError
        allow(seconds_for(pixels))
        self._pixels += pixels

    def _deliver(
        self, encoded: Sequence[EncodedItem], processed: Sequence[Processed], hf_runs: int
    ) -> None:
        layouts = [_layout(each) for each in encoded]
        self._connection.send(
            Results(
                [
                    Result(item.mm_hash, each.envelope, layout.buffer_sizes)
                    for item, each, layout in zip(processed, encoded, layouts, strict=True)
                ],
                cloudpickle.dumps([each.prompt_updates for each in processed]),
                hf_runs,
            )
        )
        rooms: Offsets = self._connection.recv()
        for each, layout, offset in zip(encoded, layouts, rooms.offsets, strict=True):
            if offset is NoRoom.SEND:
                for buffer in each.buffers:
                    self._connection.send_bytes(buffer)
            elif isinstance(offset, int):
                assert self._arena is not None, "an offset in no arena"
                segment = self._arena.segment(offset, layout.length)
                write_parts(segment, layout, [each.envelope, *each.buffers])
        self._connection.send(Written())


def _failed(batch: Batch, error: Exception) -> BatchFailed:
    if is_out_of_memory(error):
        logger.warning("%s processing exceeded its memory limit: %s", batch.modality, error)
        return BatchFailed(Fault.MEMORY, f"this {batch.modality}")
    if OutOfFilesError.caused(error):
        return BatchFailed(Fault.FILES, "")
    match error:
        case MediaError():
            return BatchFailed(Fault.REFUSED, error.reason)
        case ValueError() | VLLMClientError() | UnsupportedItemError() | RequestRejectedError():
            return BatchFailed(Fault.INVALID, str(error))
    logger.error("processing of %s media failed", batch.modality, exc_info=error)
    if (package := missing_package(error)) is not None:
        return BatchFailed(Fault.MISSING, package)
    return BatchFailed(Fault.BROKEN, str(error))


def _layout(encoded: EncodedItem) -> SegmentLayout:
    return SegmentLayout(len(encoded.envelope), tuple(buffer.nbytes for buffer in encoded.buffers))


def _map(order: StartUp) -> ArenaMapping:
    assert order.arena is not None
    return ArenaMapping.open(order.arena, writable=True)


def main(descriptor: int) -> None:
    """Serve the frontend at the other end of a socket pair."""
    # Ctrl-C reaches the whole group; the frontend decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    Child(connection).serve()
