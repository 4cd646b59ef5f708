"""What is kept, for how long, and under which key."""

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes, VideoMediaIO
from yarl import URL

from frontend.fetch.cache import EntityTags, MediaCache
from frontend.fetch.content import Content, Mode, decoding_mode
from frontend.fetch.decoded import own_copy, weight
from tests.unit.frontend.fetch.sites import PUBLIC

RGB, GREY = Mode(("rgb",)), Mode(("grey",))


def array(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def test_what_was_kept_is_found_by_content_and_mode() -> None:
    cache = MediaCache(1000)
    content = Content.of(b"x" * 100)
    kept = array(200)
    assert cache.add(content, RGB, kept)
    assert cache.get(Content.of(b"x" * 100).digest, RGB) is kept
    assert cache.get(content.digest, GREY) is None
    assert cache.get(Content.of(b"y").digest, RGB) is None
    assert cache.content(content.digest) == content
    assert cache._entries.weight == 300
    cache.add(content, GREY, array(50))
    cache.add(content, GREY, array(50))
    assert cache._entries.weight == 350


def test_the_least_recently_used_goes_first() -> None:
    cache = MediaCache(1000)
    contents = [Content.of(bytes([n]) * 100) for n in range(4)]
    for content in contents[:3]:
        assert cache.add(content, RGB, array(200))
    cache.get(contents[0].digest, RGB)
    assert cache.add(contents[3], RGB, array(200))
    held = [cache.content(content.digest) is not None for content in contents]
    assert held == [True, False, True, True]
    assert cache._entries.weight == 900 == 3 * 300
    cache.clear()
    assert cache._entries.weight == len(cache._entries) == 0


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = MediaCache(1000)
    small = Content.of(b"small")
    cache.add(small, RGB, array(10))
    assert not cache.add(Content.of(b"x" * 900), RGB, array(200))
    assert cache.get(small.digest, RGB) is not None
    assert not MediaCache(0).add(small, RGB, array(1))


def test_many_modes_of_one_content_are_bounded_too() -> None:
    cache = MediaCache(1000)
    content = Content.of(b"x" * 100)
    for n in range(20):
        cache.add(content, Mode((n,)), array(200))
        assert cache._entries.weight <= 1000


def test_entity_tags_need_the_content() -> None:
    cache = MediaCache(1000)
    tags = EntityTags(cache)
    url, content = URL(f"http://{PUBLIC}/x?secret"), Content.of(b"x" * 900)
    tags.remember(url, '"a"', content)
    assert tags.recall(url) is None
    cache.add(content, RGB, array(10))
    assert tags.recall(url) == ('"a"', content)
    assert tags.recall(url.with_query("other")) is None
    cache.add(Content.of(b"y" * 900), RGB, array(10))
    assert tags.recall(url) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ImageMediaIO("RGB"), ImageMediaIO("RGBA")),
        (ImageMediaIO(), ImageMediaIO(rgba_background_color=[0, 0, 0])),
        (ImageMediaIO(a=1), ImageMediaIO(a=1.0)),
        (ImageMediaIO(a=1), ImageMediaIO(a=True)),
        (ImageMediaIO(a=[1, 2]), ImageMediaIO(a=[2, 1])),
        (ImageMediaIO(a={"b": 1}), ImageMediaIO(a={"b": 2})),
        (ImageMediaIO(), VideoMediaIO(ImageMediaIO())),
        (VideoMediaIO(ImageMediaIO(), 8), VideoMediaIO(ImageMediaIO(), 9)),
        (VideoMediaIO(ImageMediaIO("L")), VideoMediaIO(ImageMediaIO())),
        (VideoMediaIO(ImageMediaIO(), fps=1), VideoMediaIO(ImageMediaIO(), fps=2)),
        (
            VideoMediaIO(ImageMediaIO(), video_backend="opencv"),
            VideoMediaIO(ImageMediaIO(), video_backend="opencv_dynamic"),
        ),
    ],
)
def test_modes_that_differ(one: ImageMediaIO, other: ImageMediaIO) -> None:
    assert decoding_mode(one) is not None
    assert decoding_mode(one) != decoding_mode(other)


def test_modes_that_do_not() -> None:
    assert decoding_mode(ImageMediaIO(a=1, b=[{}])) == decoding_mode(ImageMediaIO(b=[{}], a=1))
    video = [VideoMediaIO(ImageMediaIO(), 8, fps=2) for _ in range(2)]
    assert decoding_mode(video[0]) == decoding_mode(video[1])


def test_a_mode_that_can_not_be_compared() -> None:
    assert decoding_mode(ImageMediaIO(a=object())) is None


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (Image.new("RGB", (20, 10)), 800),
        (Image.new("L", (20, 10)), 200),
        (MediaWithBytes(Image.new("RGBA", (20, 10)), b"x" * 99), 800),
        (MediaWithBytes((array(5), {"fps": 1}), b""), 5),
        ((array(8), 16_000), 8),
        (torch.zeros(4), 16),
        (object(), None),
        ((array(8), object()), None),
    ],
)
def test_weights(value: object, nbytes: int | None) -> None:
    assert weight(value) == nbytes


def test_a_copy_shares_nothing_that_could_be_changed() -> None:
    picture = MediaWithBytes(Image.new("RGB", (2, 2)), b"bytes", {"image_mode": "RGB"})
    mine = own_copy(picture)
    assert type(mine) is MediaWithBytes
    assert mine.original_bytes is picture.original_bytes and mine.io_config == picture.io_config
    mine.media.putpixel((0, 0), (1, 2, 3))
    mine.io_config["image_mode"] = "L"
    assert picture.media.getpixel((0, 0)) == (0, 0, 0)
    assert picture.io_config == {"image_mode": "RGB"}

    video = MediaWithBytes((array(4), {"frames_indices": [0]}), b"bytes")
    frames, metadata = own_copy(video).media
    frames[0] = 9
    metadata["frames_indices"].append(1)
    assert video.media[0][0] == 0 and video.media[1] == {"frames_indices": [0]}

    samples, rate = own_copy((array(4), 16_000))
    assert isinstance(samples, np.ndarray) and rate == 16_000
    tensor = torch.zeros(2)
    own_copy(tensor)[0] = 1
    assert tensor[0] == 0
