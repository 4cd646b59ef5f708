"""Steps are counted by kind; how long one took comes from whoever knows."""

import math

import pytest

from backend_worker.engine.step_counter import LONGEST_STEP_MS, ShippingCounter, StepCounter
from common.request_plane.step_sums import ShippingSums, StepSums


def test_steps_by_kind() -> None:
    counter = StepCounter()
    counter.add(prefill=10, encode=4, decode=2, prompts=1, waited_ms=20.0, since_last_ms=())
    counter.add(prefill=5, encode=0, decode=1, prompts=1, waited_ms=9.0, since_last_ms=())
    counter.add(prefill=0, encode=0, decode=3, prompts=0, waited_ms=8.0, since_last_ms=())
    sums = counter.sums(7)
    assert (sums.rank, sums.prompts) == (7, 2)
    assert sums.encoding == StepSums(1, 10, 4, 2, 100, 40, 20, 16, 8, 4, 20.0, 200.0, 80.0, 40.0)
    assert sums.prefilling == StepSums(1, 5, 0, 1, 25, 0, 5, 0, 0, 1, 9.0, 45.0, 0, 9.0)
    assert sums.decoding == StepSums(1, 0, 0, 3, 0, 0, 0, 0, 0, 9, 8.0, 0, 0, 24.0)


def test_the_step_is_what_requests_that_decode_waited_if_that_is_more() -> None:
    counter = StepCounter()
    for waited_ms, since_last_ms in ((3.0, [8.0, 16.0]), (9.0, [8.0]), (5.0, [])):
        counter.add(prefill=0, encode=0, decode=1, prompts=0, waited_ms=waited_ms,
                    since_last_ms=since_last_ms)  # fmt: skip
    assert counter.sums(0).decoding.ms == 8.0 + 9.0 + 5.0


@pytest.mark.parametrize("ms", [LONGEST_STEP_MS + 1, math.inf, math.nan])
def test_what_is_no_step_does_not_count(ms: float) -> None:
    counter = StepCounter()
    counter.add(prefill=1, encode=1, decode=1, prompts=1, waited_ms=ms, since_last_ms=())
    assert all(kind.steps == 0 for kind in counter.sums(0).kinds)


def test_media_that_arrived() -> None:
    counter = ShippingCounter()
    counter.add(10, 1.5)
    counter.add(0, 9.0)  # what came by reference has no tensors
    counter.add(20, 2.0)
    assert counter.sums == ShippingSums(30, 3.5)
