"""Chats with a Mistral tokenizer against vLLM's own renderer: same tokens, no address inside."""

import base64
import io
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import av
import numpy as np
import pytest
import pytest_asyncio
import requests
from openai_harmony import Message, Role  # type: ignore[import-untyped]
from PIL import Image
from vllm.exceptions import VLLMError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.params import ChatParams

from common.observability.watchdog import WATCHDOG
from common.request_plane.card import WorkerCard
from frontend.args import parse
from frontend.fetch.connector import CONNECTOR_NAME, register
from frontend.fetch.loader import MediaLoader
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.preprocessor import Preprocessor
from frontend.processing.renderer import build_renderer
from frontend.processing.settings import PreprocessSettings
from frontend.processing.tokenizing import MIN_LIMIT
from tests.clips import sound
from tests.fakes.cards import make_card
from tests.fakes.hanging import Hanging
from tests.families.makers import MAKERS
from tests.pictures import data_uri, picture, picture_server
from tests.waiting import until

SIZES = [(56, 56), (200, 31), (31, 200), (500, 400), (1, 1)]
SECONDS = [0.01, 1.0, 2.0, 2.1, 5.0]


def shown(url: str | None, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def heard(wav: bytes) -> dict[str, Any]:
    data = base64.b64encode(wav).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def linked(wav: bytes) -> dict[str, Any]:
    url = "data:audio/wav;base64," + base64.b64encode(wav).decode()
    return {"type": "audio_url", "audio_url": {"url": url}}


def asked(*parts: Any) -> list[Any]:
    text = {"type": "text", "text": "what is it?"}
    return [
        {"role": "user", "content": [*parts, text]},
        {"role": "assistant", "content": "nothing"},
        {"role": "user", "content": "and now?"},
    ]


def card_of(family: str, directories: pytest.TempPathFactory, **limits: object) -> WorkerCard:
    model = directories.mktemp(family)
    MAKERS[family]().save(model)
    return make_card(
        model={
            "model": str(model),
            "tokenizer": str(model),
            "tokenizer_mode": "mistral",
            "mm_device_do_normalize": False,
            "limit_mm_per_prompt": limits,
        }
    )


class Both:
    """vLLM's renderer as it is, and ours. vLLM keeps one tokenizer for each directory."""

    def __init__(self, theirs: WorkerCard, ours: WorkerCard, loader: MediaLoader) -> None:
        self.plain: BaseRenderer = build_renderer(theirs, parse([]).serve)
        self.ours = Preprocessor(
            ours, parse([]).serve, loader=loader, arena=None, settings=PreprocessSettings()
        )

    async def tokens(self, renderer: BaseRenderer, messages: list[Any]) -> list[int]:
        _, prompt = await renderer.render_messages_async(messages, ChatParams())
        return list(prompt["prompt_token_ids"])

    async def processed(self, messages: list[Any]) -> Any:
        conversations = await self.ours.renderer.render_chat_async([messages], ChatParams())
        return conversations[1][0]

    async def close(self) -> None:
        await self.ours.close()
        self.plain.shutdown()


@pytest.fixture(autouse=True)
def connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def loader() -> AsyncIterator[MediaLoader]:
    loader = MediaLoader(FetchPolicy(allow_private=True), 1 << 26)
    register(loader)
    yield loader
    await loader.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pixtral(
    tmp_path_factory: pytest.TempPathFactory, loader: MediaLoader
) -> AsyncIterator[Both]:
    theirs, ours = (card_of("pixtral", tmp_path_factory, image={"count": 9}) for _ in range(2))
    both = Both(theirs, ours, loader)
    yield both
    await both.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def voxtral(
    tmp_path_factory: pytest.TempPathFactory, loader: MediaLoader
) -> AsyncIterator[Both]:
    theirs, ours = (card_of("voxtral", tmp_path_factory, audio={"count": 5}) for _ in range(2))
    both = Both(theirs, ours, loader)
    yield both
    await both.close()


@pytest.fixture
def no_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What mistral_common fetches by itself."""
    fetched: list[str] = []

    def get(url: str, **_: object) -> None:
        fetched.append(url)
        raise requests.RequestException("nothing is fetched here")

    monkeypatch.setattr(requests, "get", get)
    yield fetched
    assert not fetched


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_measuring_that_hangs_fails_its_request_alone(
    pixtral: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = WATCHDOG.stuck
    asking = asked(shown(data_uri(picture("hangs"))))
    info = pixtral.ours.renderer.get_mm_processor().info
    with Hanging(info.parse_mm_data) as hanging:
        monkeypatch.setattr(info, "parse_mm_data", hanging)
        with pytest.raises(VLLMError, match="media thread"):
            await pixtral.tokens(pixtral.ours.renderer, asking)
        hanging.hangs = False
        assert await pixtral.tokens(pixtral.ours.renderer, asking)
    await until(lambda: WATCHDOG.stuck == stuck)


async def test_pictures_have_vllms_tokens(pixtral: Both) -> None:
    pictures = [shown(data_uri(picture(str(size), size))) for size in SIZES]
    for parts in ([], *([each] for each in pictures), pictures):
        theirs = await pixtral.tokens(pixtral.plain, asked(*parts))
        assert await pixtral.tokens(pixtral.ours.renderer, asked(*parts)) == theirs


async def test_and_vllms_places(pixtral: Both) -> None:
    parts = [shown(data_uri(picture(str(size), size))) for size in SIZES]
    placed = (await pixtral.processed(asked(*parts)))["mm_placeholders"]["image"]
    assert len(placed) == len(SIZES)


async def test_a_picture_that_lies_on_its_side_is_as_large_as_the_model_sees_it(
    pixtral: Both,
) -> None:
    """mistral_common does not turn it, so plain vLLM finds no place for it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (400, 100)).save(buffer, "JPEG", exif=exif)
    made = await pixtral.processed(asked(shown(data_uri(buffer.getvalue()))))
    assert len(made["mm_placeholders"]["image"]) == 1


async def test_sounds_have_vllms_tokens(voxtral: Both) -> None:
    sounds = [sound(str(seconds), seconds) for seconds in SECONDS]
    for parts in ([heard(each)] for each in sounds):
        theirs = await voxtral.tokens(voxtral.plain, asked(*parts))
        assert await voxtral.tokens(voxtral.ours.renderer, asked(*parts)) == theirs
    several = asked(*map(heard, sounds))
    assert await voxtral.tokens(voxtral.ours.renderer, several) == await voxtral.tokens(
        voxtral.plain, several
    )


async def test_a_sound_behind_an_address_is_taken(voxtral: Both) -> None:
    inline = await voxtral.tokens(voxtral.ours.renderer, asked(heard(sound("a"))))
    assert await voxtral.tokens(voxtral.ours.renderer, asked(linked(sound("a")))) == inline
    made = await voxtral.processed(asked(linked(sound("a"))))
    assert len(made["mm_placeholders"]["audio"]) == 1


async def test_a_sound_in_stereo_is_as_long_as_in_mono(voxtral: Both) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as file:
        stream = file.add_stream("pcm_s16le", rate=16_000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 2 * 16_000 * 3), np.int16), format="s16", layout="stereo"
        )
        frame.sample_rate = 16_000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    messages = asked(heard(buffer.getvalue()))
    tokens = await voxtral.tokens(voxtral.ours.renderer, messages)
    config = voxtral.ours.renderer.get_tokenizer().instruct.audio_encoder.audio_config
    pieces = math.ceil(3.0 / config.chunk_length_s)
    expected = pieces * config.chunk_length_s * config.frame_rate
    audio = voxtral.ours.renderer.get_tokenizer().instruct.audio_encoder.special_ids.audio
    assert tokens.count(audio) == expected
    made = await voxtral.processed(messages)
    assert len(made["mm_placeholders"]["audio"]) == 1


async def test_a_picture_is_fetched_once(pixtral: Both, no_requests: list[str]) -> None:
    with picture_server() as site:
        messages = asked(shown(f"{site}/seen.png"))
        fetched = await pixtral.tokens(pixtral.ours.renderer, messages)
    inline = asked(shown(data_uri(picture("seen"))))
    assert fetched == await pixtral.tokens(pixtral.plain, inline)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "uuid": "u", "image_url": data_uri(picture("a"))},
        {"type": "image", "url": "http://127.0.0.1/x", "uuid": "u", "image_url": "data:x"},
        {"type": "image", "path": "/etc/hostname", "uuid": "u", "image_url": None},
        {"type": "audio", "path": "/etc/hostname", "uuid": "u", "image_url": None},
        {"image_url": data_uri(picture("a"))},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": None, "uuid": "u"},
    ],
)
async def test_what_vllm_and_mistral_common_take_for_different_things_is_refused(
    pixtral: Both, no_requests: list[str], part: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, VLLMValidationError, VLLMUnprocessableEntityError)):
        await pixtral.tokens(pixtral.ours.renderer, asked(part))


@pytest.mark.parametrize("where", ["content", "part", "tool call", "tools"])
async def test_a_chat_is_measured_before_it_is_tokenized(
    pixtral: Both, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """4 MB of one took 2 s of the thread that all prompts need, cut to ten tokens or not."""
    long, messages, tools = "a" * (4 * MIN_LIMIT), asked(), []
    match where:
        case "content":
            messages[0] = {"role": "user", "content": long}
        case "part":
            messages = asked({"type": "text", "text": long})
        case "tool call":
            function = {"name": "f", "arguments": json.dumps({"a": long})}
            messages[1]["tool_calls"] = [{"function": function}]
        case "tools":
            tools = [{"type": "function", "function": {"name": "f", "description": long}}]
    renderer = pixtral.ours.renderer
    monkeypatch.setattr(renderer, "_apply_chat_template_async", None)
    params = ChatParams(chat_template_kwargs={"tools": tools})
    with pytest.raises(VLLMError, match=r"characters, more than .* maximum context length"):
        await renderer.render_messages_async(messages, params)
    with pytest.raises(VLLMError, match="characters, more than"):
        renderer.render_messages(messages, params)


async def test_the_encoders_take_no_address_by_themselves(
    pixtral: Both, voxtral: Both, no_requests: list[str]
) -> None:
    pictures = pixtral.ours.renderer.get_tokenizer()
    sounds = voxtral.ours.renderer.get_tokenizer()
    for url in ("http://127.0.0.1:9/x", "file:///etc/hostname", data_uri(picture("a"))):
        with pytest.raises(ValueError, match="fetched by the frontend only"):
            pictures.apply_chat_template(asked(shown(url)))
        with pytest.raises(ValueError, match="fetched by the frontend only"):
            part = {"type": "audio_url", "audio_url": {"url": url}}
            sounds.apply_chat_template(asked(part))


async def test_the_synchronous_way_has_text_only(pixtral: Both, no_requests: list[str]) -> None:
    renderer = pixtral.ours.renderer
    _, prompt = renderer.render_messages(asked(), ChatParams())
    assert prompt["prompt_token_ids"] == await pixtral.tokens(renderer, asked())
    with pytest.raises(VLLMValidationError, match="has no content"):
        renderer.render_messages(asked(shown("http://127.0.0.1:9/x")), ChatParams())


async def test_a_message_in_the_form_of_gpt_oss_is_the_clients_mistake(pixtral: Both) -> None:
    message: Any = Message.from_role_and_content(Role.USER, "hi")
    with pytest.raises(VLLMValidationError, match="none may have an author"):
        await pixtral.tokens(pixtral.ours.renderer, [message])


async def test_a_picture_that_is_none_is_the_clients_mistake(pixtral: Both) -> None:
    with pytest.raises(VLLMValidationError, match=r"from a data URL: .*not a picture"):
        await pixtral.tokens(pixtral.ours.renderer, asked(shown("data:image/png;base64,AAAA")))
