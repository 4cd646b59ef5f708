"""Sounds and films are decoded in processes, which one medium may end, and nothing else."""

import asyncio
import errno
import gc
import io
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pybase64
import pytest
from PIL import Image
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, MediaWithBytes, VideoMediaIO

from common.errors import OutOfFilesError, OverloadedError
from frontend.bounded.child_process import Deadline
from frontend.fetch.content import Content
from frontend.fetch.decoded import holder
from frontend.fetch.decoder_processes import (
    DecoderProcesses,
    UndecodableError,
    fork_decoders,
)
from frontend.fetch.decoders import SpeechIO, decode, limit_decoders
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy, RefusedError
from tests.clips import film, sound
from tests.pictures import picture
from tests.unit.frontend.fetch.odd_decoders import Aborts, Grows, Hangs, IsKilledOnce, Keeps, OddIO
from tests.waiting import until

POLICY = FetchPolicy()
FILM = film("a film")


@pytest.fixture(scope="module", autouse=True)
def limited() -> None:
    limit_decoders(POLICY)


@contextmanager
def processes_of(policy: FetchPolicy = POLICY) -> Iterator[DecoderProcesses]:
    processes = DecoderProcesses(policy)
    yield processes
    processes.close()


@pytest.fixture
def processes() -> Iterator[DecoderProcesses]:
    with processes_of() as made:
        yield made


def grant(pixels: int) -> None:
    pass


def decoded(processes: DecoderProcesses, media_io: MediaIO[Any], data: bytes = FILM) -> Any:
    return processes.decode(Content.of(data), media_io, grant, grant)


def pid_of(processes: DecoderProcesses) -> int:
    """Decode, and return the process that did."""
    pid: int = decoded(processes, OddIO())[1]["pid"]
    return pid


def _cut(data: bytes, max_bytes: int) -> Any:
    samples = np.arange(len(data) // 2, dtype=np.float32) / len(data)
    return [samples[:1001], samples[1001:]], 2.0


def stored_as(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture("still"))).convert("P").save(buffer, kind)
    return buffer.getvalue()


PICTURES = b",".join(pybase64.b64encode(picture(name, (64, 48))) for name in "ab")


@pytest.mark.parametrize(
    ("media_io", "content"),
    [
        (AudioMediaIO(), Content.of(sound("a"))),
        (AudioMediaIO(), Content.of(film("heard", audible=True))),
        (VideoMediaIO(ImageMediaIO(), num_frames=5), Content.of(FILM)),
        (VideoMediaIO(ImageMediaIO()), Content.of(PICTURES, jpeg_frames=True)),
        (SpeechIO(_cut), Content.of(sound("b"))),
        (ImageMediaIO(), Content.of(stored_as("GIF"))),
        (ImageMediaIO(image_mode=None), Content.of(stored_as("GIF"))),
    ],
    ids=["sound", "sound of a film", "film", "pictures", "speech", "GIF", "GIF in its colours"],
)
def test_what_comes_back_is_what_a_thread_would_decode(
    media_io: MediaIO[Any], content: Content, processes: DecoderProcesses
) -> None:
    """With the same announced before, and as changeable."""
    announced: list[list[int]] = [[], [], [], []]
    here = decode(content, media_io, POLICY, announced[0].append, announced[1].append)
    there = processes.decode(content, media_io, announced[2].append, announced[3].append)
    if isinstance(here, MediaWithBytes):
        assert there.original_bytes == here.original_bytes
        assert content.jpeg_frames or there.original_bytes is content.data
        here, there = here.media, there.media
    if isinstance(here, Image.Image):
        assert (there.mode, there.size) == (here.mode, here.size)
        assert there.convert("RGB").tobytes() == here.convert("RGB").tobytes()
        return
    (here, told), (there, tells) = here, there
    assert tells == told
    assert announced[:2] == announced[2:]
    heres, theres = (each if isinstance(each, list) else [each] for each in (here, there))
    for mine, other in zip(heres, theres, strict=True):
        np.testing.assert_array_equal(mine, other, strict=True)
        other[:1] = 0


def test_an_abort_ends_one_request(processes: DecoderProcesses) -> None:
    with pytest.raises(UndecodableError, match="a decoder crashed on it, and so did the next"):
        decoded(processes, Aborts())
    assert psutil.pid_exists(pid_of(processes))


def test_a_medium_is_not_blamed_for_one_lost_process(
    processes: DecoderProcesses, tmp_path: Path
) -> None:
    """The pixels that were granted are not asked for again."""
    media_io = VideoMediaIO(ImageMediaIO(), num_frames=4)
    asked: list[int] = []

    def admit(pixels: int) -> None:
        asked.append(pixels)
        if len(asked) == 1:
            (process,) = processes.pids
            os.kill(process, signal.SIGKILL)

    frames, _ = processes.decode(Content.of(FILM), media_io, admit, lambda _: None).media
    assert frames.shape == (4, 112, 112, 3)
    assert len(asked) == 1
    assert decoded(processes, IsKilledOnce(tmp_path / "once"))


async def test_a_decoder_that_hangs_is_killed() -> None:
    with processes_of(FetchPolicy(decode_timeout_s=5.0)) as processes:
        before = pid_of(processes)
        with pytest.raises(UndecodableError, match="did not end within its time limit"):
            decoded(processes, Hangs())
        await until(lambda: not psutil.pid_exists(before))
        assert pid_of(processes) != before


def test_a_decoder_that_grows_has_a_limit(processes: DecoderProcesses) -> None:
    before = pid_of(processes)
    with pytest.raises(RefusedError, match="far more memory to decode than"):
        decoded(processes, Grows())
    assert pid_of(processes) == before


async def test_a_process_that_keeps_memory_is_replaced(processes: DecoderProcesses) -> None:
    (before,) = [decoded(processes, Keeps())[1]["pid"]]
    await until(lambda: not psutil.pid_exists(before))
    assert pid_of(processes) != before


@pytest.mark.parametrize("error", [RefusedError("too much"), OverloadedError("full")])
def test_what_is_not_granted_is_not_decoded(error: Exception, processes: DecoderProcesses) -> None:
    def refuse(pixels: int) -> None:
        raise error

    before = pid_of(processes)
    media_io = VideoMediaIO(ImageMediaIO(), num_frames=4)
    for refused in ((refuse, lambda _: None), (lambda _: None, refuse)):
        with pytest.raises(type(error), match=str(error)):
            processes.decode(Content.of(FILM), media_io, *refused)
    assert pid_of(processes) == before


def test_errors_of_decoders_are_the_same(processes: DecoderProcesses) -> None:
    how: list[Callable[..., Any]] = [partial(decode, policy=POLICY), processes.decode]
    said = set()
    for media_io in (AudioMediaIO(), VideoMediaIO(ImageMediaIO())):
        for data in (FILM[:900], b"neither", film("still", 1)):
            for each in how:
                try:
                    each(Content.of(data), media_io, admit=bool, admit_frame=bool)
                except Exception as error:  # noqa: BLE001 # compared
                    said.add((type(media_io), data, type(error), str(error)))
    assert len(said) == len({(kind, data) for kind, data, *_ in said}) == 5


async def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    children = set(psutil.Process().children())
    processes = DecoderProcesses(POLICY)
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(decoded, processes, Hangs(tmp_path / "begun"))
        await until((tmp_path / "begun").exists)
        await asyncio.to_thread(processes.close)
        with pytest.raises(OverloadedError, match="shutting down"):
            under_way.result()
    with pytest.raises(OverloadedError, match="shutting down"):
        decoded(processes, OddIO())
    assert set(psutil.Process().children()) == children
    assert not processes.pids


def test_what_is_decoded_holds_no_descriptor(processes: DecoderProcesses) -> None:
    """Thousands of sounds are kept in a cache."""
    samples, _ = decoded(processes, AudioMediaIO(), sound("kept"))
    assert type(holder(samples)) is np.ndarray


def test_what_is_refused_is_freed_at_once(processes: DecoderProcesses) -> None:
    """Without a garbage collection: it takes room that others need."""

    def refuse(pixels: int) -> None:
        raise OverloadedError("full")

    gc.disable()
    try:
        for admit, data in ((refuse, FILM), (grant, FILM[:900])):
            content = Content.of(data)
            with suppress(OverloadedError, ValueError, RefusedError):
                processes.decode(content, VideoMediaIO(ImageMediaIO()), admit, grant)
            kept = weakref.ref(content)
            del content
            assert kept() is None
    finally:
        gc.enable()


def test_a_wait_for_room_is_no_decoding() -> None:
    with processes_of(FetchPolicy(decode_timeout_s=4.0)) as processes:
        media_io = VideoMediaIO(ImageMediaIO(), num_frames=4)
        assert processes.decode(Content.of(FILM), media_io, lambda _: time.sleep(5), grant)


def test_a_process_for_which_there_is_no_thread_is_ended(
    processes: DecoderProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Deadline) -> Deadline:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as lacking:
        lacking.setattr(Deadline, "__enter__", fail)
        with pytest.raises(OutOfFilesError):
            decoded(processes, OddIO())
    assert not processes.pids
    assert pid_of(processes)


def test_it_works_with_more_than_1024_descriptors(processes: DecoderProcesses) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(UndecodableError):
            decoded(processes, Aborts())
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("how", ["rests", "is killed"])
async def test_a_fork_server_that_is_gone_starts_again(how: str) -> None:
    others = set(psutil.Process().children())
    with processes_of() as processes:
        (server,) = set(psutil.Process().children()) - others
        if how == "rests":
            processes.rest()
        else:
            server.kill()
        await until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        assert await asyncio.to_thread(pid_of, processes) > 0
    assert set(psutil.Process().children()) <= others


@pytest.mark.parametrize("call", ["pidfd_open", "fork"])
def test_a_host_that_refuses_a_call_decodes_in_threads(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As old container runtimes do."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    before = set(psutil.Process().open_files())
    monkeypatch.setattr(os, call, refuse)
    assert fork_decoders(POLICY) is None
    assert "media are decoded in this process" in caplog.text
    assert set(psutil.Process().open_files()) == before


@pytest.mark.parametrize(
    ("content", "here"),
    [
        (Content.of(picture("everyday")), True),
        (Content.of(picture("large") + bytes(8 << 20)), False),
        (Content.of(stored_as("GIF")), False),
        (Content.of(stored_as("WEBP")), False),
    ],
    ids=["everyday", "large", "GIF", "WebP"],
)
async def test_everyday_pictures_are_decoded_by_threads(
    content: Content, here: bool, processes: DecoderProcesses
) -> None:
    loader = MediaLoader(POLICY, 0, processes=processes)
    assert (await loader.decode(content, ImageMediaIO())).media.size == (224, 224)
    assert bool(processes.pids) is not here
    await loader.close()


async def test_room_is_taken_while_any_array_of_a_medium_lives(
    processes: DecoderProcesses,
) -> None:
    loader = MediaLoader(POLICY, 0, processes=processes)
    threads = ThreadPoolExecutor(1)
    pieces, _ = await loader.decode_speech(sound("c"), _cut, threads)
    taken = loader.budgets.decoding.reserved
    assert taken > 0
    assert holder(pieces[0]) is holder(pieces[1])
    last = pieces.pop()
    del pieces
    assert loader.budgets.decoding.reserved == taken
    del last
    await until(lambda: loader.budgets.decoding.reserved == 0)
    threads.shutdown()
    await loader.close()
