"""How long a processed item takes from the frontend's process to the worker's.

    python -m tests.benchmarks.bench_transfer

This process is the worker and a second one the frontend. Times are medians in milliseconds.
``send`` runs from the processor's tensors to metadata, ``receive`` from metadata to tensors;
the message between them is left out, except for inline, where it carries the bytes. A memcpy
of the same bytes is timed between the sends, into memory that is no more in the caches than
the arena's is.

Ends with one line of JSON; docs/transfer.md says what its fields mean.
"""

import asyncio
import ctypes
import gc
import json
import math
import os
import selectors
import struct
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from statistics import median
from typing import Any, Final, TypeVar

import psutil
import torch
import zmq
import zmq.asyncio
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.utils.gc_utils import freeze_gc_heap

from common.identity import MmHash
from common.transfer import pages
from common.transfer.arena.arena import Arena
from common.transfer.arena.layout import ArenaOffer, aligned
from common.transfer.base import MediaHandle, MmKwargsReceiver
from common.transfer.checksum import checksum, new_key
from common.transfer.codec import decode, encode
from common.transfer.handshake import NixlOffer
from common.transfer.inline import InlineReceiver, InlineSender
from common.transfer.metadata import TransferMetadata, decode_metadata, encode_metadata
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.agent import NixlAgent
from common.transfer.nixl_processes.network import nixl_installed
from common.transfer.settings import NixlSettings
from common.transfer.shm import ArenaSender, ShmReceiver, ShmSender
from tests.benchmarks.telling import telling
from tests.unit.common.transfer.process import Process

_T = TypeVar("_T")

ARENA_SIZE: Final = 512 << 20
ROTATE: Final = 96 << 20
"""Sources and targets of copies go round in this much memory: three times the caches."""

SHAPES: Final[dict[str, tuple[tuple[int, int], torch.dtype, int]]] = {
    # name: shape and dtype of the pixels, items per request
    "0.4 MB": ((340, 1176), torch.uint8, 1),
    "6.4 MB": ((5476, 1176), torch.uint8, 1),
    "25.8 MB": ((5476, 1176), torch.float32, 1),
    "4 x 6.4 MB": ((5476, 1176), torch.uint8, 4),
}
ROUNDS: Final = {"0.4 MB": 20, "6.4 MB": 15, "25.8 MB": 8, "4 x 6.4 MB": 8}

BURST: Final = 8
"""Items behind each other, as from a busy frontend. Rows "after a pause" have one request,
when both processes have slept and lost their caches."""

IN_FLIGHT: Final = 50
SEND_THREADS: Final = max(1, (os.cpu_count() or 1) - 1)
STALL_RUNS: Final = 15
IDLE_SECONDS: Final = 3.0

NETWORK: Final = NixlSettings.from_args(Namespace()).network()
"""What NIXL may use: copies between processes, or TCP over loopback as our flag says."""


def make_item(shape: tuple[int, int], dtype: torch.dtype) -> MultiModalKwargsItem:
    pixels = torch.randint(0, 255, shape, dtype=torch.uint8).to(dtype)
    flat = MultiModalFieldConfig.flat("image", [slice(0, shape[0])]).field
    batched = MultiModalFieldConfig.batched("image", keep_on_cpu=True).field
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=flat),
            "image_grid_thw": MultiModalFieldElem(data=torch.tensor([1, 74, 74]), field=batched),
        }
    )


def read_all(tensor: torch.Tensor) -> int:
    """Look at every byte."""
    return int(tensor.view(torch.int64).max())


def milliseconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


def cpu_seconds(pid: int | None) -> float:
    """Processor time of another process, in steps of 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class TimedSelector(selectors.DefaultSelector):
    """Knows for how long an event loop answered nobody.

    Either its callbacks ran, or it was late in coming back from waiting because another
    thread had the interpreter's lock. What the kernel counts as waiting for a core is left
    out: on a machine with few of them that says more about what else runs there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.worst = 0.0
        self.worst_with_waits = 0.0
        self.watching = False
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._returned = self._now()

    def _now(self) -> tuple[float, float]:
        """The time, and how long this thread has waited for a core so far, in seconds."""
        return time.perf_counter(), int(os.pread(self._schedstat, 64, 0).split()[1]) * 1e-9

    def _note(self, began: tuple[float, float], ended: tuple[float, float], due: float) -> None:
        late = ended[0] - began[0] - due
        self.worst_with_waits = max(self.worst_with_waits, late)
        self.worst = max(self.worst, late - (ended[1] - began[1]))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.watching:
            return super().select(timeout)
        called = self._now()
        self._note(self._returned, called, 0.0)
        events = super().select(timeout)
        self._returned = self._now()
        if timeout is not None:
            # The kernel's timer is asked in whole milliseconds.
            due = math.ceil(max(timeout, 0.0) * 1e3) * 1e-3
            self._note(called, self._returned, due)
        return events

    def close(self) -> None:
        os.close(self._schedstat)
        super().close()


def run_timed(main: Callable[[TimedSelector], Coroutine[Any, Any, _T]]) -> _T:
    selector = TimedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(main(selector))


async def worst_stall(selector: TimedSelector, work: Iterable[Any]) -> list[float]:
    """For how long at most the event loop was blocked during ``work``, in milliseconds;
    then the same with waits for a core.
    """
    selector.watching = True
    await asyncio.sleep(0.005)
    selector.worst = selector.worst_with_waits = 0.0
    running = asyncio.gather(*work)
    while not running.done():  # noqa: ASYNC110 # the delay is the point
        # So that there is always something for which it can be late.
        await asyncio.sleep(0.001)
    await running
    selector.watching = False
    return [selector.worst * 1e3, selector.worst_with_waits * 1e3]


# The other system's way, after its published description: a new segment per request, bytes
# framed into one string, the string copied in, and out again at the other end.


def peer_send(item: MultiModalKwargsItem) -> tuple[shared_memory.SharedMemory, int]:
    encoded = encode(item)
    parts = [encoded.envelope, *(bytes(buffer) for buffer in encoded.buffers)]
    framed = b"".join(piece for part in parts for piece in (struct.pack("<Q", len(part)), part))
    segment = shared_memory.SharedMemory(create=True, size=len(framed))
    assert segment.buf is not None
    segment.buf[: len(framed)] = framed
    return segment, len(framed)


def peer_receive(name: str, size: int) -> MultiModalKwargsItem:
    segment = shared_memory.SharedMemory(name)
    assert segment.buf is not None
    data = bytearray(segment.buf[:size])
    segment.close()
    # Python's tracker would remove it a second time when this process ends.
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    parts, at, view = [], 0, memoryview(data)
    while at < size:
        (length,) = struct.unpack_from("<Q", data, at)
        parts.append(view[at + 8 : at + 8 + length])
        at += 8 + length
    return decode(parts[0], parts[1:])


PEER_COPIES: Final = 4
"""As its description says and :func:`peer_send` and :func:`peer_receive` do: bytes of each
tensor, the frame, the segment, and out of it."""


class Frontend:
    """The second process. Each method is a command that gives one answer."""

    def __init__(self) -> None:
        self.arena = Arena(ARENA_SIZE)
        self.shm = ShmSender(self.arena)
        self.inline = InlineSender()
        self.nixl = NixlSender(self.arena, NETWORK) if nixl_installed() else None
        self.push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self.address = f"ipc:///tmp/mmrouter-bench-{os.getpid()}"
        self.push.bind(self.address)
        self.handles: list[MediaHandle] = []
        self.segments: list[shared_memory.SharedMemory] = []
        self.sources: list[MultiModalKwargsItem] = []
        self.targets: list[torch.Tensor] = []
        self.shape_name = ""
        self.sent = 0

    def offers(self) -> dict[str, Any]:
        nixl = None
        if self.nixl is not None:
            assert self.nixl.offer is not None
            nixl = self.nixl.offer.model_dump()
        return {"shm": self.arena.offer.model_dump(), "nixl": nixl, "inline": self.address}

    def shape(self, name: str) -> None:
        """Make items of one size to send from now on."""
        self.sources.clear()
        self.targets.clear()
        gc.collect()
        self.shape_name = name
        shape, dtype, _ = SHAPES[name]
        count = max(2, ROTATE // (shape[0] * shape[1] * dtype.itemsize))
        self.sources = [make_item(shape, dtype) for _ in range(count)]
        self.targets = [torch.zeros(shape, dtype=dtype) for _ in range(count)]

    def memcpy(self, count: int, requests: int) -> list[float]:
        def copy() -> None:
            for _ in range(count):
                pixels = self._source()["pixel_values"].data
                target = self.targets[self.sent % len(self.targets)]
                ctypes.memmove(target.data_ptr(), pixels.data_ptr(), pixels.nbytes)

        return [milliseconds(copy) for _ in range(requests)]

    def send(self, transport: str, count: int, requests: int, held: bool) -> list[list[Any]]:
        """Send new items, or one again that is in the arena.

        Gives for each request its time and its items' metadata.
        """
        return [self._send(self._sender(transport), count, held) for _ in range(requests)]

    def written(self) -> int:
        """Items that were copied into the arena so far."""
        return self.arena.statistics().writes

    def release(self) -> None:
        for handle in self.handles:
            handle.release()
        self.handles.clear()

    def send_inline(self, count: int) -> float:
        """Send items as frames; gives when that began."""
        items = [self._source() for _ in range(count)]
        began = time.monotonic()
        for item in items:
            handle = self.inline.send(MmHash("inline"), item)
            self.push.send_multipart([encode_metadata(handle.metadata), *handle.frames], copy=False)
        return began

    def peer(self, requests: int) -> list[list[Any]]:
        """Gives for each request its time, and name and size of its segment."""
        answer = []
        for _ in range(requests):
            item = self._source()
            began = time.perf_counter()
            segment, size = peer_send(item)
            answer.append([(time.perf_counter() - began) * 1e3, segment.name, size])
            self.segments.append(segment)
        return answer

    def peer_release(self) -> None:
        for segment in self.segments:
            segment.close()
            segment.unlink()
        self.segments.clear()

    def stall(self, transport: str) -> list[float]:
        """Worst stall of an event loop whose process sends many items at once."""
        sender = self._sender(transport)

        async def run(selector: TimedSelector) -> list[float]:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(SEND_THREADS) as pool:
                jobs = [
                    loop.run_in_executor(
                        pool, sender.send, MmHash(f"{self.sent}-{index}"), self._source()
                    )
                    for index in range(IN_FLIGHT)
                ]
                worst = await worst_stall(selector, jobs)
            for job in jobs:
                (await job).release()
            return worst

        return run_timed(run)

    def cpu(self) -> float:
        """Seconds of the process that serves the arena, or of this one if it used more."""
        served = 0.0 if self.nixl is None else cpu_seconds(self.nixl.pid)
        return max(time.process_time(), served)

    def checksums(self) -> list[float]:
        """Times of one checksum of an item that is no longer in the caches."""
        key = new_key()
        return [
            milliseconds(
                partial(checksum, key, index, MmHash("a"), memoryview(pixels.numpy()).cast("B"))
            )
            for index, pixels in enumerate(each["pixel_values"].data for each in self.sources)
        ]

    def close(self) -> None:
        self.release()
        if self.nixl is not None:
            self.nixl.close()
        self.arena.close()
        self.push.close()

    def _source(self) -> MultiModalKwargsItem:
        self.sent += 1
        return self.sources[self.sent % len(self.sources)]

    def _sender(self, transport: str) -> ArenaSender:
        sender = {"shm": self.shm, "nixl": self.nixl}[transport]
        assert sender is not None
        return sender

    def _send(self, sender: ArenaSender, count: int, held: bool) -> list[Any]:
        items = [self._source() for _ in range(count)]
        hashes = [
            MmHash(f"held {self.shape_name}" if held else f"{self.sent:056x}{index:08x}")
            for index in range(count)
        ]
        began = time.perf_counter()
        handles = [sender.send(*pair) for pair in zip(hashes, items, strict=True)]
        elapsed = (time.perf_counter() - began) * 1e3
        self.handles.extend(handles)
        return [elapsed, [encode_metadata(handle.metadata).decode() for handle in handles]]


def frontend() -> Generator[Any, Any, None]:
    process = Frontend()
    freeze_gc_heap()  # as a frontend does: else what was imported is looked through, for 0.3 s
    answer: Any = process.offers()
    try:
        while True:
            command, *arguments = yield answer
            answer = getattr(process, command)(*arguments)
    finally:
        process.close()


class Worker:
    """This process. Each round gives a row per request, of times in milliseconds."""

    def __init__(self) -> None:
        self.process = Process("tests.benchmarks.bench_transfer:frontend")
        self.offers = self.process.read()
        self.shm = ShmReceiver()
        self.inline = InlineReceiver()
        self.pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self.pull.connect(self.offers["inline"])
        self.nixl: NixlReceiver | None = None
        self.bare_offset = 0
        self.bare: NixlAgent | None = None
        self.bare_memory = memoryview(b"")

    async def attach(self) -> None:
        offer = ArenaOffer.model_validate(self.offers["shm"])
        await self.shm.attach(offer)
        pages.populate(self.shm.mapping(offer.name).memory, for_writing=False)
        if self.offers["nixl"] is not None:
            self.nixl = NixlReceiver(NETWORK)
            served = NixlOffer.model_validate(self.offers["nixl"])
            await self.nixl.attach(served)
            # NIXL alone, in this process: what our own reads are compared with.
            os.environ.update(NETWORK.environment({}, []))
            self.bare = NixlAgent("bare", NETWORK.error_handling)
            self.bare_memory = pages.private_memory(32 << 20)
            pages.populate(self.bare_memory, for_writing=True)
            self.bare.register(pages.address_of(self.bare_memory), self.bare_memory.nbytes)
            self.bare.connect(served.unpack_metadata())

    async def close(self) -> None:
        await self.shm.close()
        if self.nixl is not None:
            await self.nixl.close()
        self.pull.close()
        self.process.__exit__()

    def ask(self, *command: Any) -> Any:
        return self.process.ask(list(command))

    async def arena_round(
        self, transport: str, count: int, requests: int, *, held: bool = False
    ) -> list[list[float]]:
        """Times of send, of receive, and of reading all pixels once."""
        receiver = self._receiver(transport)
        rows = []
        for sent, metadata in self.ask("send", transport, count, requests, held):
            parsed = [decode_metadata(each.encode()) for each in metadata]
            began = time.perf_counter()
            received = await asyncio.gather(*map(receiver.receive, parsed))
            usable = time.perf_counter()
            for each in received:
                read_all(each.item["pixel_values"].data)
            read = time.perf_counter()
            for each in received:
                each.verify()
                each.release()
            rows.append([sent, (usable - began) * 1e3, (read - usable) * 1e3])
        self.ask("release")
        return rows

    async def copies(self, transport: str, *, held: bool) -> float:
        """How often a byte of an item is copied until its tensors can be used: what the
        frontend wrote, and whether the tensors lie in its memory or were read out of it.
        """
        self.ask("shape", "6.4 MB")
        self.ask("send", transport, 1, 1, held)
        before = self.ask("written")
        ((_, (metadata,)),) = self.ask("send", transport, 1, 1, held)
        copies = self.ask("written") - before
        received = await self._receiver(transport).receive(decode_metadata(metadata.encode()))
        offer = ArenaOffer.model_validate(self.offers["shm"])
        start = pages.address_of(self.shm.mapping(offer.name).memory)
        pixels = received.item["pixel_values"].data.data_ptr()
        received.release()
        self.ask("release")
        copies += not start <= pixels < start + offer.size
        # Where a network can be reached, what arrived is copied before it is checked.
        return float(copies + (transport == "nixl" and NETWORK.leaves_user))

    async def inline_round(self, count: int) -> list[list[float]]:
        began = self.ask("send_inline", count)
        for _ in range(count):
            head, *frames = await self.pull.recv_multipart(copy=False)
            metadata = decode_metadata(bytes(head.buffer))
            (await self.inline.receive(metadata, [frame.buffer for frame in frames])).release()
        return [[(time.monotonic() - began) * 1e3]]

    def peer_round(self, requests: int) -> list[list[float]]:
        rows = []
        for sent, name, size in self.ask("peer", requests):
            rows.append([sent, milliseconds(partial(peer_receive, name, size))])
        self.ask("peer_release")
        return rows

    def bare_round(self, size: int, requests: int) -> list[list[float]]:
        """READs between registered memory, by an agent of this process."""
        assert self.bare is not None
        # While something is leased the arena is served often, as it is for our own reads.
        self.ask("send", "nixl", 1, 1, False)
        offer = NixlOffer.model_validate(self.offers["nixl"])
        target = pages.address_of(self.bare_memory)
        rows = []
        for _ in range(requests):
            self.bare_offset = (self.bare_offset + aligned(size, 4096)) % (ARENA_SIZE - size)
            began = time.perf_counter()
            read = self.bare.read(offer.agent, target, offer.address + self.bare_offset, size)
            while not read.poll():
                pass
            rows.append([(time.perf_counter() - began) * 1e3])
        self.ask("release")
        return rows

    async def stall(self, selector: TimedSelector, transport: str) -> list[float]:
        """Worst stall of this process's event loop while it receives many items at once."""
        ((_, metadata),) = self.ask("send", transport, IN_FLIGHT, 1, False)
        receiver = self._receiver(transport)

        async def one(each: TransferMetadata) -> None:
            item = await receiver.receive(each)
            item.verify()
            item.release()

        parsed = [decode_metadata(each.encode()) for each in metadata]
        worst = await worst_stall(selector, map(one, parsed))
        self.ask("release")
        return worst

    async def idle_cpu(self) -> float:
        """Fraction of a core that the busiest of the processes uses, doing nothing."""
        began, before = time.monotonic(), self._cpu()
        await asyncio.sleep(IDLE_SECONDS)
        elapsed = time.monotonic() - began
        used = [now - then for now, then in zip(self._cpu(), before, strict=True)]
        return float(max(used) / elapsed)

    def _cpu(self) -> list[float]:
        reading = 0.0 if self.nixl is None else cpu_seconds(self.nixl._reading.pid)
        return [time.process_time(), reading, self.ask("cpu")]

    def _receiver(self, transport: str) -> MmKwargsReceiver[Any]:
        receiver = {"shm": self.shm, "nixl": self.nixl}[transport]
        assert receiver is not None
        return receiver


async def measure_size(worker: Worker, name: str) -> dict[str, float]:
    """All transports, taking turns so that what else the machine does hits them alike."""
    shape, dtype, count = SHAPES[name]
    size = shape[0] * shape[1] * dtype.itemsize
    burst = BURST // count
    worker.ask("shape", name)
    own = [make_item(shape, dtype)["pixel_values"].data for _ in range(max(2, ROTATE // size))]
    # Twice the arena, so that every page was used and eviction is part of what is timed.
    for _ in range(min(500, 2 * ARENA_SIZE // (size * count))):
        worker.ask("send", "shm", count, 1, False)
        worker.ask("release")
    rounds: dict[str, list[list[float]]] = {}
    for number in range(ROUNDS[name] + 2):
        now: dict[str, list[list[float]]] = {
            "memcpy": [[each] for each in worker.ask("memcpy", count, burst)],
            "own": [[count * milliseconds(partial(read_all, each))] for each in own],
            "shm": await worker.arena_round("shm", count, burst),
            "shm held": await worker.arena_round("shm", 1, burst, held=True),
            "memcpy alone": [worker.ask("memcpy", count, 1)],
            "shm alone": await worker.arena_round("shm", count, 1),
            "shm held alone": await worker.arena_round("shm", 1, 1, held=True),
            "inline": await worker.inline_round(count),
        }
        if count == 1:
            now["peer"] = worker.peer_round(burst)
        if worker.nixl is not None:
            now["nixl"] = await worker.arena_round("nixl", count, burst)
            now["nixl held"] = await worker.arena_round("nixl", 1, burst, held=True)
            now["nixl alone"] = await worker.arena_round("nixl", count, 1)
            now["bare"] = [[count * each] for (each,) in worker.bare_round(size, burst)]
        # The first two warm up.
        if number >= 2:
            for key, rows in now.items():
                rounds.setdefault(key, []).extend(rows)
    result: dict[str, float] = {}
    for key, rows in rounds.items():
        columns = [median(column) for column in zip(*rows, strict=True)]
        result[key] = sum(columns[:2])
        if len(columns) == 3:
            result[f"{key} send"], result[f"{key} receive"], result[f"{key} read"] = columns
    return result


async def measure_stalls(worker: Worker, selector: TimedSelector) -> dict[str, list[float]]:
    """Worst stall of a run, without and with waits for a core: medians of several runs."""
    worker.ask("shape", "6.4 MB")
    runs: dict[str, list[list[float]]] = {}
    for _ in range(STALL_RUNS):
        now = {
            "no transfer": await worst_stall(selector, [asyncio.sleep(0.05)]),
            "shm send": worker.ask("stall", "shm"),
            "shm receive": await worker.stall(selector, "shm"),
        }
        if worker.nixl is not None:
            now["nixl receive"] = await worker.stall(selector, "nixl")
        for key, value in now.items():
            runs.setdefault(key, []).append(value)
    return {
        key: [median(column) for column in zip(*rows, strict=True)] for key, rows in runs.items()
    }


ROWS: Final = {
    "memcpy": "memcpy",
    "shm send": "shm send",
    "shm receive": "shm receive",
    "shm": "shm together",
    "shm held": "shm, item held",
    "bare": "bare NIXL READ",
    "nixl send": "nixl send",
    "nixl receive": "nixl receive",
    "nixl": "nixl together",
    "nixl held": "nixl, item held",
    "inline": "inline, with its message",
    "peer": "segment per request",
    "memcpy alone": "memcpy after a pause",
    "shm alone": "shm after a pause",
    "shm held alone": "shm held after a pause",
    "nixl alone": "nixl after a pause",
    "own": "read all of own memory",
    "shm read": "read all from shm",
    "nixl read": "read all from nixl",
}


def print_sizes(results: dict[str, dict[str, float]]) -> None:
    print(f"{'milliseconds':26}" + "".join(f"{name:>12}" for name in results))
    for key, label in ROWS.items():
        cells = [f"{row[key]:12.3f}" if key in row else " " * 12 for row in results.values()]
        if any(cell.strip() for cell in cells):
            print(f"{label:26}" + "".join(cells))


async def run(selector: TimedSelector) -> dict[str, float | None]:
    worker = Worker()
    await worker.attach()
    freeze_gc_heap()  # likewise a worker
    results = {name: await measure_size(worker, name) for name in SHAPES}
    print_sizes(results)
    stalls = await measure_stalls(worker, selector)
    print(f"\nworst stall of an event loop, {IN_FLIGHT} items of 6.4 MB in flight, milliseconds")
    print(f"{'':26}{'own':>12}{'with waits':>12} for a core")
    for key, (own, with_waits) in stalls.items():
        print(f"{key:26}{own:12.3f}{with_waits:12.3f}")
    nixl = worker.nixl is not None
    print("\ncopies of each byte of an item until its tensors can be used")
    for transport in ("shm", "nixl") if nixl else ("shm",):
        for held in (False, True):
            label = f"{transport}, item held" if held else transport
            print(f"{label:26}{await worker.copies(transport, held=held):12.1f}")
    print(f"{'inline':26}{0:12.1f}  and what the sockets copy")
    print(f"{'segment per request':26}{PEER_COPIES:12.1f}")
    worker.ask("shape", "6.4 MB")
    sums = median(worker.ask("checksums"))
    print(f"\nchecksum of 6.4 MB, computed on each side once: {sums:.3f} ms")
    idle = await worker.idle_cpu()
    print(f"\ncores used by a process while nothing moves: {idle:.4f}\n")
    await worker.close()
    six, large = results["6.4 MB"], results["25.8 MB"]
    return {
        "memcpy_ms_6mb": six["memcpy"],
        "shm_vs_memcpy_6mb": six["shm"] / six["memcpy"],
        "shm_vs_memcpy_26mb": large["shm"] / large["memcpy"],
        "held_ms": six["shm held"],
        "nixl_vs_bare_6mb": six["nixl"] / (six["bare"] + six["memcpy"]) if nixl else None,
        "nixl_vs_bare_26mb": large["nixl"] / (large["bare"] + large["memcpy"]) if nixl else None,
        "nixl_held_vs_bare_6mb": six["nixl held"] / six["bare"] if nixl else None,
        "nixl_checksum_ms_6mb": sums,
        "nixl_idle_cpu": idle if nixl else None,
        "loop_stall_ms_max": max(own for key, (own, _) in stalls.items() if key != "no transfer"),
        "peer_vs_ours_6mb": six["peer"] / six["shm"],
    }


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"NIXL over {', '.join(NETWORK.transports())}\n"
    )
    with telling("measuring transfer"):
        figures = run_timed(run)
    print(json.dumps({k: None if v is None else round(v, 4) for k, v in figures.items()}))


if __name__ == "__main__":
    main()
