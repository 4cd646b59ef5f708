"""What is said of a picture without decoding it, against what vLLM says when it has."""

from argparse import Namespace
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from vllm.multimodal.media import ImageMediaIO
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer

from common.cache_partition import SHARED, partition_of
from common.card import WorkerCard
from frontend.fetch.content import Content
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.batch import Batch, MediaOptions, Medium, may_defer, process
from frontend.processing.known_shapes import placement
from frontend.processing.outline import NUMBERING, Outline, outline, outlines
from frontend.processing.renderer import build_renderer

OPTIONS = MediaOptions({}, {})
ORIENTATION = 0x0112
SMALLER = {"size": {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}}


@pytest.fixture(scope="module")
def renderer(card: WorkerCard, serve_args: Namespace) -> Iterator[BaseRenderer]:
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


def drawn(name: str, size: tuple[int, int] = (140, 84), mode: str = "RGB") -> Image.Image:
    seed = sum(name.encode())
    bands = [Image.linear_gradient("L").rotate(seed * (n + 1)).resize(size) for n in range(3)]
    return Image.merge("RGB", bands).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **more: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def turned(way: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = way
    return exif


def medium(data: bytes, **options: Any) -> Medium:
    return Medium(Content.of(data), ImageMediaIO(**options))


def said(
    renderer: BaseRenderer, one: Medium, options: MediaOptions = OPTIONS, salt: str | None = None
) -> Outline | None:
    return outline(renderer.get_mm_processor(), one, options, partition_of(salt), FetchPolicy())


ALIKE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "JPEG": (encoded(drawn("a")), {}),
    "progressive JPEG": (encoded(drawn("a"), progressive=True), {}),
    "PNG": (encoded(drawn("a"), "PNG"), {}),
    "WebP": (encoded(drawn("a"), "WEBP"), {}),
    "turned JPEG": (encoded(drawn("a"), exif=turned(6)), {}),
    "turned WebP": (encoded(drawn("a"), "WEBP", exif=turned(8)), {}),
    "any mode": (encoded(drawn("a")), {"image_mode": None}),
    "odd EXIF": (encoded(drawn("a"), exif=b"Exif\0\0no TIFF"), {}),
}


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("salt", [None, "ours"])
def test_an_outline_has_the_hash_of_the_processed_picture(
    renderer: BaseRenderer, kind: str, salt: str | None
) -> None:
    data, decoding = ALIKE[kind]
    one = medium(data, **decoding)
    for options in (OPTIONS, MediaOptions(SMALLER, {"image": {"image_mode": "RGB"}})):
        found = said(renderer, one, options, salt)
        if found is None:
            assert kind == "odd EXIF"
            continue
        batch = Batch("image", [one], options, partition_of(salt))
        decoded = one.media_io.load_bytes(data)
        (processed,) = process(renderer.get_mm_processor(), batch, [decoded])
        assert found.mm_hash == processed.mm_hash
        assert found.pixels == 140 * 84


@pytest.mark.parametrize(
    "data",
    [
        encoded(drawn("a", mode="L")),
        encoded(drawn("a", mode="CMYK")),
        encoded(drawn("a", mode="RGBA"), "PNG"),
        encoded(drawn("a", mode="P"), "PNG"),
        encoded(drawn("a", mode="P"), "GIF"),
        encoded(drawn("a"), "BMP"),
        encoded(drawn("a"), "PNG", exif=turned(6)),
        encoded(drawn("a"), "PNG", save_all=True, append_images=[drawn("b")]),
        encoded(drawn("a"), "WEBP", save_all=True, append_images=[drawn("b")]),
        encoded(drawn("a"))[:60],
        b"",
        b"\xff\xd8\xff" + bytes(1000),
    ],
)
def test_what_must_be_decoded_has_none(renderer: BaseRenderer, data: bytes) -> None:
    assert said(renderer, medium(data)) is None


def test_a_png_with_text_has_none(renderer: BaseRenderer) -> None:
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", "<x/>")
    assert said(renderer, medium(encoded(drawn("a"), "PNG", pnginfo=text))) is None


def test_nothing_is_decoded(renderer: BaseRenderer) -> None:
    """Half a file has an outline: whoever decodes it says what is wrong with it."""
    for kind in ("JPEG", "PNG", "WEBP"):
        whole = encoded(drawn("a", (640, 480)), kind)
        half = said(renderer, medium(whole[: len(whole) // 2]))
        assert half is None or half.pixels == 640 * 480
    assert half is None  # Pillow reads WebP files whole


def test_limits_hold(renderer: BaseRenderer) -> None:
    data = encoded(drawn("a", (200, 200)))
    processor = renderer.get_mm_processor()
    small = FetchPolicy(max_pixels=200 * 200 - 1)
    assert outline(processor, medium(data), OPTIONS, SHARED, small) is None


def test_what_decides_on_the_shape(renderer: BaseRenderer) -> None:
    def shape(data: bytes, options: MediaOptions = OPTIONS, **decoding: Any) -> object:
        found = said(renderer, medium(data, **decoding), options)
        assert found is not None
        return found.shape

    plain = shape(encoded(drawn("a")))
    assert plain == shape(encoded(drawn("b"), quality=20))
    assert plain != shape(encoded(drawn("a", (84, 140))))
    assert plain != shape(encoded(drawn("a"), exif=turned(6)))
    assert plain != shape(encoded(drawn("a"), "PNG"))
    assert plain != shape(encoded(drawn("a")), MediaOptions(SMALLER, {}))
    assert plain != shape(encoded(drawn("a")), image_mode=None)


def test_pictures_of_one_shape_get_one_placement(renderer: BaseRenderer) -> None:
    processor = renderer.get_mm_processor()
    assert outlines(processor)
    assert hasattr(BaseMultiModalProcessor, NUMBERING)
    seen: dict[object, object] = {}
    for name in ("a", "b"):
        for exif in (turned(1), turned(6)):
            one = medium(encoded(drawn(name), exif=exif))
            found = said(renderer, one)
            assert found is not None
            decoded = one.media_io.load_bytes(one.content.data)
            (made,) = process(processor, Batch("image", [one], OPTIONS), [decoded])
            now = placement(made.prompt_updates)
            assert seen.setdefault(found.shape, now) == now
    assert len(seen) == 2


def test_what_vllm_must_see_in_a_chat_is_decoded_before(
    renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi K2.5's images and videos, which are one kind of medium. ``families kimi-k25`` has it."""
    processor = renderer.get_mm_processor()
    assert may_defer(processor)
    config = processor.info.ctx.model_config.hf_config
    monkeypatch.setattr(config, "use_unified_vision_chunk", True, raising=False)
    assert not may_defer(processor) and not outlines(processor)
