"""A worker that processes media itself opens nothing that they name either."""

from asyncio import gather
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image
from vllm.model_executor.models.kimi_audio import (
    KimiAudioDummyInputsBuilder,
    KimiAudioMultiModalProcessor,
)
from vllm.model_executor.models.pixtral import PixtralMultiModalProcessor
from vllm.model_executor.models.voxtral import VoxtralMultiModalProcessor
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer

from backend_worker.engine import render
from backend_worker.engine.render import LocalRenderer
from common.errors import CorruptSegmentError
from common.transfer.base import MediaSource
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


class Text:
    """As much of a processor as makes a prompt, for which a text names a medium."""

    def __init__(self) -> None:
        self.dummy_inputs = self

    def get_dummy_text(self, counts: dict[str, int]) -> str:
        return "<image>" * counts["image"]

    def get_dummy_inputs(self, seq_len: int, mm_counts: object, mm_options: object) -> object:
        raise AssertionError("it makes a medium of its own")


class Written(Text):
    """One whose placeholders a tokenizer writes, as it sees the medium."""

    def get_dummy_text(self, counts: dict[str, int]) -> str:
        return ""

    def get_dummy_inputs(
        self,
        seq_len: int,
        mm_counts: object,
        mm_options: object,
        mm_data: dict[str, list[str]] | None = None,
    ) -> object:
        assert mm_data == {"image": ["a medium"]}
        return SimpleNamespace(prompt=(1, 10, 10))


class Fixed(Text):
    """One that has no text, but tokens that are the same for every medium."""

    def get_dummy_text(self, counts: dict[str, int]) -> str:
        return ""

    def get_dummy_inputs(self, seq_len: int, mm_counts: object, mm_options: object) -> object:
        return SimpleNamespace(prompt=[7, 8, 9])


class Nameless(Text):
    """One whose media stand before all text."""

    get_dummy_inputs = BaseMultiModalProcessor.get_dummy_inputs

    def get_dummy_text(self, counts: dict[str, int]) -> str:
        return ""


async def test_a_package_that_is_missing_here_sends_the_frontend_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frontend has processed the sound, so it has the resampler."""

    def resample(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torchaudio'", name="torchaudio")

    monkeypatch.setattr(render, "parse_model_prompt", resample)
    monkeypatch.setattr(render, "_place_for", nothing)
    monkeypatch.setattr(Renderer, "get_mm_processor", lambda _: None, raising=False)
    renderer = LocalRenderer(cast(BaseRenderer, Renderer()))
    with pytest.raises(CorruptSegmentError, match=r"can't process the audio: .*'torchaudio'"):
        await renderer.render(MediaSource("audio", sound("a"), {}, {}))


async def nothing(*_: object) -> dict[str, str]:
    return {"prompt": ""}


async def test_a_prompt_has_the_tokens_of_its_one_medium() -> None:
    text, written, fixed, nameless = await gather(
        *(
            render._place_for(cast(BaseMultiModalProcessor[Any], processor), "image", "a medium")
            for processor in (Text(), Written(), Fixed(), Nameless())
        )
    )
    assert text == {"prompt": "<image>"}
    assert written == {"prompt_token_ids": [1, 10, 10]}
    assert fixed == {"prompt_token_ids": [7, 8, 9]}
    assert nameless == {"prompt": ""}


def test_kimi_audios_processor_has_no_text_for_a_sound() -> None:
    """``families kimi-audio`` shows what comes of it."""
    builder = cast(Any, KimiAudioDummyInputsBuilder)
    assert not builder.get_dummy_text(None, {"audio": 1})
    own = KimiAudioMultiModalProcessor.get_dummy_inputs
    assert own is not BaseMultiModalProcessor.get_dummy_inputs


@pytest.mark.parametrize("processor", [PixtralMultiModalProcessor, VoxtralMultiModalProcessor])
def test_mistrals_processors_take_a_medium_for_their_prompt(processor: type) -> None:
    """``families pixtral`` shows what comes of it."""
    assert "mm_data" in signature(processor.get_dummy_inputs).parameters  # type: ignore[attr-defined]
