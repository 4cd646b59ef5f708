"""Processes for media: real ones, which die for real."""

import dataclasses
import errno
import json
import os
import pickle
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest
from vllm import envs
from vllm.multimodal.media import AudioMediaIO
from vllm.renderers import BaseRenderer

from common.errors import ArenaFullError, OutOfFilesError, OverloadedError
from common.identity import MmHash
from common.observability.log_lines import LogFormat, LogLevel, LogSetup, current_request
from common.request_plane.card import WorkerCard
from common.transfer.arena.access import Lease, ReservedSegment
from common.transfer.arena.arena import Arena
from common.transfer.arena.layout import SegmentLayout
from common.transfer.codec import encode
from common.vllm_compat.renderer_patches import HfProcessorRuns
from frontend.fetch.allowance import RequestAllowance
from frontend.fetch.content import Content
from frontend.media_limits.budget import Budget, MediaBudgets
from frontend.media_limits.policy import FetchPolicy, RefusedError, RequestLimitError
from frontend.processing.backends import ProcessPool
from frontend.processing.batch import Batch, MediaOptions, Medium, Processed, process
from frontend.processing.child import Child, _failed
from frontend.processing.child_messages import BatchFailed, Fault, StartUp
from frontend.processing.errors import AbandonedError, ProcessingFailedError
from frontend.processing.exchange import _error
from frontend.processing.store import ArenaStore, PrivateStore
from tests.pictures import blank_picture
from tests.unit.frontend.processing.media import batch_of, broken_image, image, made_up, same

POLICY = FetchPolicy(max_pixels=4_000_000)


def wanted() -> bool:
    return False


def allowance(policy: FetchPolicy = POLICY) -> RequestAllowance:
    return RequestAllowance(policy)


def budget(policy: FetchPolicy = POLICY) -> Budget:
    return MediaBudgets.of(policy).decoding


class Pool:
    def __init__(
        self, pool: ProcessPool, arena: Arena, runs: HfProcessorRuns, decoding: Budget
    ) -> None:
        self.pool = pool
        self.arena = arena
        self.runs = runs
        self.decoding = decoding

    def submit(self, batch: Batch, abandoned: Callable[[], bool]) -> Future[list[Processed]]:
        return self.pool.submit(batch, abandoned, allowance())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(scope="module")
def shared(card: WorkerCard, serve_args: Namespace) -> Iterator[Pool]:
    with closing(Arena(64 << 20, prefault=False)) as arena:
        runs = HfProcessorRuns(side="frontend", worker_id=None)
        order = StartUp(card, serve_args, POLICY, arena.offer)
        decoding = budget()
        pool = ProcessPool(order, 2, ArenaStore(arena), runs, decoding)
        yield Pool(pool, arena, runs, decoding)
        pids = pool.pids
        pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def decoded(batch: Batch) -> list[object]:
    return [medium.media_io.load_bytes(medium.content.data) for medium in batch.media]


def test_another_process_makes_what_this_one_would(
    shared: Pool, vllm_renderer: BaseRenderer
) -> None:
    batch = batch_of(image("one"), image("other", (224, 56)), image("one"))
    writes, runs = shared.arena.statistics().writes, shared.runs.total
    made = shared.submit(batch, wanted).result(60)
    own = process(vllm_renderer.get_mm_processor(), batch, decoded(batch))
    assert [each.mm_hash for each in made] == [each.mm_hash for each in own]
    for one, other in zip(made, own, strict=True):
        assert same(one.item, other.item)
        assert [update.content.full for update in one.prompt_updates] == [
            update.content.full for update in other.prompt_updates
        ]
    assert shared.arena.statistics().writes == writes + 2
    assert shared.runs.total >= runs + 1


def test_nothing_stays_leased(shared: Pool) -> None:
    shared.until(lambda: shared.arena.statistics().leases == 0)
    made = shared.submit(batch_of(image("a", (448, 448))), wanted).result(60)
    assert shared.arena.statistics().leases == 1
    del made
    shared.until(lambda: shared.arena.statistics().leases == 0)


def test_without_room_the_tensors_come_by_another_way(
    card: WorkerCard, serve_args: Namespace, shared: Pool, vllm_renderer: BaseRenderer
) -> None:
    blocking = fill(shared.arena)
    try:
        batch = batch_of(image("never seen", (448, 448)))
        (made,) = shared.submit(batch, wanted).result(60)
        (own,) = process(vllm_renderer.get_mm_processor(), batch, decoded(batch))
        assert same(made.item, own.item)
        assert not shared.arena.contains(made.mm_hash)
    finally:
        for lease in blocking:
            lease.release()


def fill(arena: Arena) -> list[Lease]:
    """Lend all of it."""
    leases: list[Lease] = []
    try:
        while True:
            item = made_up(f"filling {len(leases)}", 500_000)
            leases.append(arena.put(item.mm_hash, encode(item.item)))
    except ArenaFullError:
        return leases


def test_without_an_arena_tensors_are_kept_in_private_memory_and_lines_are_the_frontends(
    card: WorkerCard,
    serve_args: Namespace,
    vllm_renderer: BaseRenderer,
    shared: Pool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = PrivateStore(1.0)
    log = LogSetup(LogLevel.DEBUG, LogFormat.JSON, "frontend")
    order = StartUp(card, serve_args, POLICY, None, log)
    pool = ProcessPool(order, 1, store, shared.runs, budget())
    try:
        (made,) = pool.submit(batch_of(image("a")), wanted, allowance()).result(60)
        assert store.get(made.mm_hash) is not None
        names = {f"frontend media {pid}" for pid in pool.pids}
    finally:
        pool.close()
    lines = [line for text in capfd.readouterr() for line in text.splitlines()]
    assert {json.loads(line)["process"] for line in lines if line.startswith("{")} == names


def test_lines_about_a_batch_are_of_the_request_that_it_was_begun_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is logged meanwhile, by whatever library, has nothing that users wrote."""
    token = current_request.set("4f1e")
    begun = batch_of(image("a"))
    current_request.reset(token)
    assert pickle.loads(pickle.dumps(begun)).request == "4f1e"
    batches = [begun, dataclasses.replace(begun, request="")]
    seen: list[str] = []

    class Connection:
        def recv(self) -> Batch:
            if not batches:
                raise EOFError
            return batches.pop(0)

        def send(self, told: BatchFailed) -> None:
            assert not current_request.get()

    def process(self: Child, batch: Batch) -> BatchFailed:
        seen.append(current_request.get())
        return BatchFailed(Fault.INVALID, "")

    monkeypatch.setattr(Child, "_process", process)
    child = Child.__new__(Child)
    child._connection, child._runs = Connection(), SimpleNamespace(total=0)  # type: ignore[assignment]
    child._at_first = sys.maxsize
    child.serve()
    assert seen == ["4f1e", "-"]


def test_bad_media_are_told_apart(shared: Pool) -> None:
    with pytest.raises(RefusedError, match="in no known format, not a picture"):
        shared.submit(batch_of(broken_image(b"not a picture")), wanted).result(60)
    with pytest.raises(RefusedError, match=r"9,000,000 pixels.* at most 4,000,000 "):
        shared.submit(batch_of(broken_image(blank_picture(3000))), wanted).result(60)
    # vLLM's own limit, whose error is no ValueError.
    too_long = Content.of(b"OggS" + bytes(envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB << 20))
    batch = Batch("audio", [Medium(too_long, AudioMediaIO())], MediaOptions({}, {}))
    with pytest.raises(ValueError, match="Maximum file size exceeded"):
        shared.submit(batch, wanted).result(60)
    assert shared.submit(batch_of(image("a")), wanted).result(60)


def test_a_lack_of_files_is_no_mediums_fault() -> None:
    try:
        raise ValueError("Failed to load image") from OSError(errno.EMFILE, "Too many open files")
    except ValueError as error:
        assert isinstance(_error(_failed(batch_of(image("a")), error)), OutOfFilesError)


def test_pixels_are_counted_before_they_are_decoded(shared: Pool) -> None:
    batch = batch_of(image("small"), broken_image(blank_picture(1200)))
    with pytest.raises(RequestLimitError, match="1 megapixels together"):
        limited = allowance(FetchPolicy(max_request_megapixels=1.0))
        shared.pool.submit(batch, wanted, limited).result(60)
    most = int(POLICY.decoding_megapixels * 1_000_000)
    with shared.decoding.reserve(most - 1_000_000), pytest.raises(OverloadedError):
        shared.submit(batch, wanted).result(60)
    assert len(shared.submit(batch, wanted).result(60)) == 2
    assert shared.decoding.reserved == 0


def test_what_nobody_wants_is_not_begun(shared: Pool) -> None:
    with pytest.raises(AbandonedError):
        shared.submit(batch_of(image("a")), lambda: True).result(60)


def test_a_process_that_is_killed_is_replaced_and_its_work_done(shared: Pool) -> None:
    before = set(shared.pool.pids)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    jobs = [shared.submit(batch_of(image(f"after {i}")), wanted) for i in range(4)]
    assert all(job.result(110) for job in jobs)
    shared.until(lambda: not before & set(shared.pool.pids))


def test_a_process_killed_at_work_leaves_nothing_reserved(
    shared: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = ArenaStore.reserve
    killed: list[int] = []

    def reserve_and_kill(
        store: ArenaStore, mm_hash: MmHash, layout: SegmentLayout
    ) -> ReservedSegment | Lease | None:
        room = reserve(store, mm_hash, layout)
        if not killed:
            killed.extend(shared.pool.pids)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return room

    monkeypatch.setattr(ArenaStore, "reserve", reserve_and_kill)
    big = [image(f"big {i}", (1792, 1792)) for i in range(3)]
    made = shared.submit(batch_of(*big), wanted).result(110)
    assert killed
    assert [each.item["image_grid_thw"].data.tolist() for each in made] == [[1, 74, 74]] * 3
    del made
    shared.until(lambda: shared.arena.statistics().leases == 0)


def test_a_batch_that_kills_every_process_is_given_up(shared: Pool) -> None:
    class DeadlyBatch:
        modality = "image"
        media = (None,)

        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return os._exit, (1,)

    with pytest.raises(ProcessingFailedError, match="died of processing this image"):
        shared.submit(DeadlyBatch(), wanted).result(110)  # type: ignore[arg-type] # on purpose
    assert shared.submit(batch_of(image("a")), wanted).result(60)
