"""A medium that takes memory without end fails alone, and its process goes on or is replaced."""

import resource
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch

from common.request_plane.card import WorkerCard
from common.transfer.arena.arena import Arena
from common.vllm_compat.renderer_patches import HfProcessorRuns
from frontend.bounded.memory_limit import MemoryLimit, is_out_of_memory, private_bytes
from frontend.fetch.allowance import RequestAllowance
from frontend.media_limits.budget import MediaBudgets
from frontend.media_limits.policy import FetchPolicy
from frontend.processing import backends
from frontend.processing.backends import ProcessPool
from frontend.processing.batch import Batch, Processed
from frontend.processing.child_messages import StartUp
from frontend.processing.errors import MediumTooCostlyError
from frontend.processing.store import ArenaStore
from tests.unit.frontend.processing.hungry_child import GREEDY, LEAKING
from tests.unit.frontend.processing.media import batch_of, image

POLICY = FetchPolicy()
MIB = 1 << 20


@pytest.fixture(scope="module")
def hungry(card: WorkerCard, serve_args: Namespace) -> Iterator[ProcessPool]:
    """One process, whose arena is larger than what it may take for a medium."""
    with pytest.MonkeyPatch.context() as patch, closing(Arena(2048 * MIB, prefault=False)) as arena:
        patch.setattr(backends, "MODULE", "tests.unit.frontend.processing.hungry_child")
        runs = HfProcessorRuns(side="frontend", worker_id=None)
        order = StartUp(card, serve_args, POLICY, arena.offer)
        decoding = MediaBudgets.of(POLICY).decoding
        pool = ProcessPool(order, 1, ArenaStore(arena), runs, decoding)
        yield pool
        pool.close()


def run(pool: ProcessPool, batch: Batch) -> list[Processed]:
    return pool.submit(batch, lambda: False, RequestAllowance(POLICY)).result(110)


def test_a_decoder_without_bounds_fails_its_request_alone(hungry: ProcessPool) -> None:
    before = hungry.pids
    with pytest.raises(MediumTooCostlyError, match="this image could not be processed: it takes"):
        run(hungry, batch_of(image("greedy", GREEDY)))
    assert run(hungry, batch_of(image("modest")))
    assert hungry.pids == before, "it goes on"


def test_a_process_that_keeps_too_much_is_replaced(hungry: ProcessPool) -> None:
    (before,) = hungry.pids
    replaced = psutil.Process(before)
    for n in range(2):  # memory that its start gave back since makes room for one
        assert run(hungry, batch_of(image(f"leaking {n}", LEAKING)))
    replaced.wait(60)
    assert run(hungry, batch_of(image("after it")))
    assert hungry.pids != [before]


def test_the_largest_pictures_fit(hungry: ProcessPool) -> None:
    batch = batch_of(image("large", (6000, 6000)), *(image(f"{n}", (16, 16)) for n in range(3)))
    assert len(run(hungry, batch)) == 4


def test_what_a_process_has_already_does_not_count() -> None:
    had = bytearray(64 * MIB)
    with MemoryLimit(128 * MIB) as limit:
        assert bytearray(64 * MIB)
        with pytest.raises(MemoryError):
            bytearray(256 * MIB)
        limit.grow(256 * MIB)
        assert bytearray(256 * MIB)
    assert bytearray(512 * MIB)
    assert had
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def test_libraries_are_understood() -> None:
    with MemoryLimit(128 * MIB):
        for take in (lambda: np.ones(256 * MIB, np.uint8), lambda: torch.ones(256 * MIB)):
            with pytest.raises((MemoryError, RuntimeError)) as caught:
                take()
            assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("a picture"))


def test_what_is_given_back_is_seen() -> None:
    before = private_bytes()
    had = bytearray(256 * MIB)
    assert private_bytes() >= before + 200 * MIB
    del had
    assert private_bytes() < before + 128 * MIB
