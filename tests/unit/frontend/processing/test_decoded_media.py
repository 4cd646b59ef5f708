"""No string reaches a model's processor, which would fetch or open what it names."""

from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaWithBytes
from vllm.renderers import BaseRenderer

from common.media.decoded_media import check_decoded, check_options
from common.request_plane.card import WorkerCard
from common.vllm_compat.renderer_patches import HfProcessorRuns, patch_renderer
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.backends import OwnBackend
from frontend.processing.media_processing import MediaProcessing
from frontend.processing.renderer import build_renderer
from frontend.processing.store import PrivateStore
from tests.hostile_media import nobody_connects

PICTURE = Image.new("RGB", (56, 56))


@pytest.fixture
def renderer(card: WorkerCard, serve_args: Namespace) -> Iterator[BaseRenderer]:
    renderer = build_renderer(card, serve_args)
    yield renderer
    renderer.shutdown()


def named(port: int) -> list[Any]:
    address = f"http://127.0.0.1:{port}/x.png"
    return [
        address,
        address.encode(),
        Path("/etc/hostname"),
        "/etc/hostname",
        [address],
        (address,),
    ]


@pytest.mark.parametrize("modality", ["image", "video"])
async def test_processing_refuses_references(renderer: BaseRenderer, modality: str) -> None:
    loader = MediaLoader(FetchPolicy(), 0)
    store = PrivateStore(1 << 20)
    runs = HfProcessorRuns(side="frontend", worker_id=None)
    backend = OwnBackend(renderer, store, loader.decode_once, ThreadPoolExecutor(1), runs)
    processing = MediaProcessing(renderer, store, backend, loader.decode, most_waiting=3)
    processing.take_over(runs)
    text = renderer.get_mm_processor().dummy_inputs.get_dummy_text({modality: 1})
    prompt = renderer.get_tokenizer().encode(text)
    with nobody_connects() as port:
        for reference in named(port):
            with pytest.raises(VLLMValidationError, match="can't be a reference"):
                await renderer._process_multimodal_async(prompt, {modality: [reference]}, None, {})
            with pytest.raises((ValueError, VLLMValidationError, TypeError, AssertionError)):
                renderer._process_multimodal(prompt, {modality: [reference]}, None, {}, {})
    await loader.close()


def test_a_processor_by_itself_refuses_them(renderer: BaseRenderer) -> None:
    """As in a process for media, and in a worker."""
    patch_renderer(renderer, runs=HfProcessorRuns(side="frontend", worker_id=None))
    processor = renderer.get_mm_processor()
    with nobody_connects() as port:
        url = f"http://127.0.0.1:{port}/x.png"
        for options in ({"videos": [url]}, {"images_kwargs": {"images": [url]}}):
            items = processor.info.parse_mm_data({"image": [PICTURE]})
            with pytest.raises(VLLMValidationError, match="is no option of a processor"):
                processor._get_hf_mm_inputs(items, options)
        items = processor.info.parse_mm_data({"image": [url]})
        with pytest.raises(VLLMValidationError, match="can't be a reference"):
            processor._get_hf_mm_inputs(items, {})


@pytest.mark.parametrize(
    "medium",
    [
        "x",
        b"x",
        bytearray(b"x"),
        Path("x"),
        ["x"],
        [PICTURE, "x"],
        ("x", 16_000),
        [["x"]],
        MediaWithBytes("x", b"y"),
        {"type": "image", "image": "x"},
        {"image_embeds": ["x"]},
    ],
)
def test_references_of_any_shape(medium: Any) -> None:
    with pytest.raises(VLLMValidationError, match="image content can't be a reference"):
        check_decoded("image", [PICTURE, medium])


def test_decoded_media_pass() -> None:
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    check_decoded("image", [PICTURE, None, MediaWithBytes(PICTURE, b"png")])
    check_decoded("image", np.zeros((2, 5, 8)))
    check_decoded("video", [(frames, {"video_backend": "opencv"}), frames, [PICTURE]])
    check_decoded("audio", [(np.zeros(9), 16_000), np.zeros(9), [0.5] * 9])
    check_decoded("vision_chunk", [{"type": "image", "image": PICTURE, "uuid": "u"}])
    check_options({"max_pixels": 3, "images_kwargs": {"do_resize": False}, "size": {"height": 1}})
