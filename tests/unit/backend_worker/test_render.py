"""A worker that processes media itself opens nothing that they name either."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from PIL import Image
from vllm.renderers import BaseRenderer

from backend_worker import render
from backend_worker.render import LocalRenderer
from common.errors import CorruptSegmentError
from common.transfer.media_source import MediaSource
from tests.clips import sound
from tests.hostile_media import CANARY_FILM, CANARY_SOUND, naming, nobody_connects, put_canaries
from tests.opens import Opens, opens_of
from tests.pictures import picture


class Renderer:
    """As much of vLLM's as is needed before a medium is decoded."""

    model_config = None
    mm_processor = None


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Opens]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(render, "get_video_processor_cls_name", lambda _: None)
    put_canaries(tmp_path)
    with opens_of(tmp_path / CANARY_SOUND) as one, opens_of(tmp_path / CANARY_FILM) as other:
        yield [one, other]


@pytest.mark.parametrize("looks_harmless", [False, True])
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
async def test_what_names_files_is_refused(
    modality: str, looks_harmless: bool, canaries: list[Opens], monkeypatch: pytest.MonkeyPatch
) -> None:
    if looks_harmless:
        monkeypatch.setattr(render, "is_known_container", lambda _: True)
    renderer = LocalRenderer(cast(BaseRenderer, Renderer()))
    with nobody_connects() as port:
        for name in (CANARY_SOUND, CANARY_FILM):
            for data in naming(name, port).values():
                with pytest.raises(CorruptSegmentError):
                    await renderer.render(MediaSource(modality, data, {}, {}))
    assert not any(canary.any for canary in canaries)


@pytest.mark.parametrize("modality", ["image", "audio"])
async def test_what_is_too_large_here_is_refused_as_well(
    modality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend's limits may be higher, and the item can come as tensors then."""
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "0")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = picture("cat") if modality == "image" else sound("cat")
    renderer = LocalRenderer(cast(BaseRenderer, Renderer()))
    with pytest.raises(CorruptSegmentError, match=r"exceeds limit|Maximum file size exceeded"):
        await renderer.render(MediaSource(modality, data, {}, {}))
