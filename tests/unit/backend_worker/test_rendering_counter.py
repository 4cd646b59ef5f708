"""What pictures take that a worker processes itself."""

import pytest

from backend_worker.step_counter import RenderingCounter
from common.step_sums import RenderingSums


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_time_with_several_pictures_counts_once() -> None:
    clock = Clock()
    counter = RenderingCounter(clock)
    assert counter.sums == RenderingSums()
    one, other = counter.picture(100), counter.picture(200)
    clock.now += 3
    one.__enter__()
    clock.now += 1
    other.__enter__()
    clock.now += 1
    one.__exit__(None, None, None)
    clock.now += 1
    other.__exit__(None, None, None)
    clock.now += 3
    assert counter.sums == RenderingSums(2, 300, 3000)


def test_a_picture_that_is_no_good_counts_as_time_only() -> None:
    clock = Clock()
    counter = RenderingCounter(clock)
    with pytest.raises(ValueError, match="no good"), counter.picture(100):
        clock.now += 1
        raise ValueError("no good")
    assert counter.sums == RenderingSums(0, 0, 1000)
