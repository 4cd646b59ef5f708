"""What processing a picture takes on each worker, and who is left one."""

import math
from collections.abc import Iterator

import pytest

from common.identity import MmHash, RequestId, WorkerId
from common.step_sums import RenderingSums
from frontend.router.selection.media_placement import MediaPlacement
from frontend.router.selection.rendering import (
    GUESS_MS,
    MOST_LEFT,
    MOST_PIXELS_LEFT,
    Rendering,
)

MEGAPIXEL = 1_000_000
FAST, SLOW, OLD = WorkerId("fast"), WorkerId("slow"), WorkerId("old")


@pytest.fixture
def rendering() -> Iterator[Rendering]:
    made = Rendering(MediaPlacement())
    made.reported(FAST, RenderingSums(10, 10 * MEGAPIXEL, 100))
    made.reported(SLOW, RenderingSums(10, 10 * MEGAPIXEL, 400))
    yield made


def test_each_worker_has_its_own_rate(rendering: Rendering) -> None:
    assert rendering.worker_ms(FAST, MEGAPIXEL) == pytest.approx(10)
    assert rendering.worker_ms(SLOW, MEGAPIXEL // 2) == pytest.approx(20)


def test_a_worker_that_says_nothing_is_left_nothing(rendering: Rendering) -> None:
    assert rendering.worker_ms(OLD, MEGAPIXEL) is None
    rendering.left(RequestId("r"), OLD, MEGAPIXEL)
    rendering.done(RequestId("r"))
    assert not Rendering(MediaPlacement()).sooner(1, math.inf)


def test_one_that_has_done_nothing_yet_counts_as_the_others(rendering: Rendering) -> None:
    rendering.reported(OLD, RenderingSums())
    assert rendering.worker_ms(OLD, MEGAPIXEL) == pytest.approx(25)  # the median of both
    alone = Rendering(MediaPlacement())
    alone.reported(OLD, RenderingSums())
    assert alone.worker_ms(OLD, MEGAPIXEL) == GUESS_MS


def test_what_is_in_hand_comes_first(rendering: Rendering) -> None:
    for number in range(MOST_LEFT):
        expected = (number + 1) * 10
        assert rendering.worker_ms(FAST, MEGAPIXEL) == pytest.approx(expected)
        rendering.left(RequestId(f"r{number % 4}"), FAST, MEGAPIXEL)
    assert rendering.worker_ms(FAST, MEGAPIXEL) is None
    rendering.done(RequestId("r0"))
    rendering.done(RequestId("r0"))
    assert rendering.worker_ms(FAST, MEGAPIXEL) == pytest.approx((MOST_LEFT - 1) * 10)


def test_a_worker_decodes_only_so_many_pixels_at_a_time(rendering: Rendering) -> None:
    assert rendering.worker_ms(FAST, MOST_PIXELS_LEFT * 2) is not None
    rendering.left(RequestId("r"), FAST, MOST_PIXELS_LEFT * 2)
    assert rendering.worker_ms(FAST, 1) is None
    rendering.done(RequestId("r"))
    assert rendering.worker_ms(FAST, 1) is not None


def test_a_picture_leaves_only_if_somebody_has_it_sooner(rendering: Rendering) -> None:
    assert not rendering.sooner(MEGAPIXEL, 0.0)
    assert not rendering.sooner(MEGAPIXEL, 9.0)
    assert rendering.sooner(MEGAPIXEL, 11.0)
    rendering.left(RequestId("r"), FAST, MEGAPIXEL)
    assert not rendering.sooner(MEGAPIXEL, 11.0)


def test_a_worker_that_comes_back_begins_anew(rendering: Rendering) -> None:
    rendering.left(RequestId("r"), FAST, MEGAPIXEL)
    rendering.drop(FAST)
    assert rendering.worker_ms(FAST, MEGAPIXEL) is None
    rendering.reported(FAST, RenderingSums(5, 5 * MEGAPIXEL, 100))
    rendering.done(RequestId("r"))
    assert rendering.worker_ms(FAST, MEGAPIXEL) == pytest.approx(20)


def test_sums_that_shrink_say_nothing(rendering: Rendering) -> None:
    """The worker's process began anew behind the same session, or says what can't be."""
    rendering.reported(FAST, RenderingSums(1, 1, 1))
    assert rendering.worker_ms(FAST, MEGAPIXEL) == pytest.approx(10)
    rendering.reported(FAST, RenderingSums(101, 1 + 100 * MEGAPIXEL, 3001))
    assert 15 < (rendering.worker_ms(FAST, MEGAPIXEL) or 0) < 30


@pytest.mark.parametrize("ms", [0.0, 1e18])
def test_odd_rates_are_bounded(ms: float) -> None:
    rendering = Rendering(MediaPlacement())
    rendering.reported(FAST, RenderingSums(10, 10, ms))
    found = rendering.worker_ms(FAST, MEGAPIXEL)
    assert found is not None and 0 < found <= 1e6


def test_pictures_that_are_held() -> None:
    media = MediaPlacement()
    media.add(FAST)
    rendering = Rendering(media)
    media.expect(FAST, [MmHash("a")], 0.0)
    assert not rendering.held(MmHash("a"))
    media.acked(FAST, [MmHash("a")])
    assert rendering.held(MmHash("a"))
