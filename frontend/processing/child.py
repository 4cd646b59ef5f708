"""A process that decodes and processes media for a frontend, forked by its fork server.

It has a renderer of its own and writes tensors straight into the frontend's arena, at
places that the frontend gives it. It ends when the frontend does.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
from vllm.exceptions import VLLMClientError

from common.cli.vllm_command_line import configure_vllms_logging
from common.errors import RequestRejectedError, UnsupportedItemError
from common.observability.log_lines import configure_logging, current_request
from common.observability.thread_watchdog import WATCHDOG, allow
from common.transfer.arena import ArenaMapping, EncodedItem, SegmentLayout, write_parts
from common.transfer.codec import encode
from common.vllm_compat.hf_processor_runs import HfProcessorRuns
from common.vllm_compat.renderer_patches import patch_renderer
from frontend.fetch import decode, limit_decoders
from frontend.media_limits import FetchPolicy, MediaError, seconds_for
from frontend.media_processes import (
    Answer,
    BatchFailed,
    Fault,
    NoRoom,
    Offsets,
    Ready,
    Result,
    Results,
    StartUp,
    Wants,
    Written,
)
from frontend.processing.batch import Batch, Processed, process
from frontend.processing.errors import missing_package
from frontend.processing.renderer import build_renderer

logger = logging.getLogger("frontend.processing.child")


class _DeniedError(Exception):
    """The frontend has no room for what a medium decodes to, and says so to its users."""


class Child:
    """One process's end of the socket pair."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        """Take the order and get ready for it: seconds."""
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
        connection.send(Ready())

    def serve(self) -> None:
        """Process batches until the frontend is gone."""
        while True:
            try:
                batch: Batch = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return
            before = self._runs.total
            # Lines of vLLM's have nothing that users wrote then, with an id or without.
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
                continue
            encoded, processed = outcome
            self._deliver(encoded, processed, self._runs.total - before)

    def _process(self, batch: Batch) -> BatchFailed | tuple[list[EncodedItem], list[Processed]]:
        try:
            decoded = [
                decode(medium.content, medium.media_io, self._policy, self._admit)
                for medium in batch.media
            ]
            processed = process(self._processor, batch, decoded)
            return [encode(each.item) for each in processed], processed
        except _DeniedError:
            raise
        except MediaError as error:
            return BatchFailed(Fault.REFUSED, error.reason)
        except (ValueError, VLLMClientError, UnsupportedItemError, RequestRejectedError) as error:
            return BatchFailed(Fault.INVALID, str(error))
        except Exception as error:  # told to the frontend, which raises it
            logger.exception("processing of %s media failed", batch.modality)
            if (package := missing_package(error)) is not None:
                return BatchFailed(Fault.MISSING, package)
            return BatchFailed(Fault.BROKEN, str(error))

    def _admit(self, pixels: int) -> None:
        try:
            self._connection.send(Wants(pixels))
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionError):  # which decoding would take for a broken medium
            sys.exit("the frontend is gone")
        if answer is not Answer.GRANTED:
            raise _DeniedError
        allow(seconds_for(pixels))

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


def _layout(encoded: EncodedItem) -> SegmentLayout:
    return SegmentLayout(len(encoded.envelope), tuple(buffer.nbytes for buffer in encoded.buffers))


def _map(order: StartUp) -> ArenaMapping:
    assert order.arena is not None
    return ArenaMapping.open(order.arena, writable=True)


def main(descriptor: int) -> None:
    """Serve the frontend at the other end of a socket pair."""
    # Ctrl-C reaches the whole group; the frontend says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    Child(connection).serve()
