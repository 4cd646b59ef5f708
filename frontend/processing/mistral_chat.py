"""Chats of models with a Mistral tokenizer: media are fetched once, under the media policy.

vLLM passes such a chat with its addresses to mistral_common, which fetches each itself without
limits, follows redirects, and opens ``file:``. Only the size of a medium decides its tokens, so
mistral_common gets the size of the decoded medium instead of an address; its encoders refuse any
other reference. It tokenizes at once, on the thread of all prompts, so a chat that is too long is
refused before.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final

import numpy as np
from mistral_common.protocol.instruct.chunk import (
    AudioChunk,
    AudioURLChunk,
    ImageChunk,
    ImageURLChunk,
)
from mistral_common.tokens.tokenizers.audio import Audio, AudioEncoder, AudioEncoding
from mistral_common.tokens.tokenizers.image import ImageEncoder, ImageEncoding
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import AudioProcessorItems, ImageProcessorItems
from vllm.renderers import BaseRenderer
from vllm.renderers.chat_utils import parse_chat_messages_async
from vllm.renderers.inputs import DictPrompt
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.renderers.mistral import MistralRenderer
from vllm.renderers.params import ChatParams

from common.errors import OverloadedError, ThreadStuckError
from common.observability.watchdog import allow
from common.vllm_compat.renderer_patches import replace_messages
from frontend.asgi import as_vllm_error
from frontend.fetch import DeferredMedium, for_user, seconds_to_process
from frontend.media_limits import MediaError
from frontend.processing.backends import Decodes
from frontend.processing.tokenizing import Tokenizing, texts_in

_SIZE: Final = "mmrouter size "
"""Prefix of a size in place of a medium: neither base64 nor an address."""

_MEDIA: Final = {"image_url": "image", "audio_url": "audio", "input_audio": "audio"}
"""Types of content parts that mistral_common knows -> vLLM's name of the modality."""

_TEXTS: Final = ("text", "thinking")


class MistralChat:
    """Renders the chats of one renderer. For one event loop."""

    def __init__(
        self,
        renderer: BaseRenderer,
        tokenizing: Tokenizing,
        decode: Decodes,
        threads: Executor,
    ) -> None:
        """Changes nothing before :meth:`take_over`. Even a model without media needs this: parts
        that vLLM ignores may have addresses too. ``threads`` measure decoded media.
        """
        assert isinstance(renderer, MistralRenderer), "a Mistral tokenizer with another renderer"
        self._renderer = renderer
        self._tokenizing = tokenizing
        self._decode = decode
        self._threads = threads
        self._by_vllm = renderer.render_messages

    def take_over(self) -> None:
        """Render the renderer's chats from now on. Call once."""
        instruct = self._renderer.get_tokenizer().instruct
        if instruct.image_encoder is not None:
            instruct.image_encoder = SizedPictures(instruct.image_encoder)
        if instruct.audio_encoder is not None:
            instruct.audio_encoder = SizedSounds(instruct.audio_encoder)
        replace_messages(self._renderer, self.render_text, self.render)

    def render_text(
        self, messages: Sequence[Mapping[str, Any]], params: ChatParams
    ) -> tuple[list[Any], DictPrompt]:
        """Render for vLLM's synchronous callers, which can't wait for media. Raises
        VLLMValidationError for media, VLLMError for a long chat; 400.
        """
        texts = _with_sizes([_listed(message) for message in messages], {})
        self._check_length(texts, params)
        return self._by_vllm(texts, params)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], params: ChatParams
    ) -> tuple[list[Any], DictPrompt]:
        """Return a chat's conversation and prompt, as the renderer's method of that name.

        Raises:
            VLLMValidationError, ValueError: vLLM or mistral_common refuses the chat; 400.
            VLLMError: a medium is unavailable, with the error's status.
        """
        messages = [_listed(message) for message in messages]
        conversation, mm_data, mm_uuids = await parse_chat_messages_async(
            messages,
            self._renderer.model_config,
            content_format="string",
            media_io_kwargs=params.media_io_kwargs,
            mm_processor_kwargs=params.mm_processor_kwargs,
        )
        try:
            sizes = {
                modality: [await self._size(modality, medium) for medium in media]
                for modality, media in (mm_data or {}).items()
            }
        except ThreadStuckError as error:
            raise as_vllm_error(error) from error
        written = _with_sizes(messages, sizes)
        self._check_length(written, params)
        tokens = await self._renderer._apply_chat_template_async(
            self._renderer.get_tokenizer(),
            written,
            **params.get_apply_chat_template_kwargs(),
        )
        prompt = parse_dec_only_prompt(tokens)
        if mm_data is not None:
            prompt["multi_modal_data"] = mm_data
        if mm_uuids is not None:
            prompt["multi_modal_uuids"] = mm_uuids
        return conversation, prompt

    def _check_length(self, messages: object, params: ChatParams) -> None:
        tools = params.get_apply_chat_template_kwargs().get("tools")
        self._tokenizing.check_length(*texts_in([messages, tools]))

    async def _size(self, modality: str, medium: Any) -> str:
        """Return the text that replaces a medium in the chat."""
        if isinstance(medium, DeferredMedium):
            try:
                medium = await self._decode(medium.content, medium.media_io)
            except MediaError as error:
                raise for_user(error, medium.place) from error
            except OverloadedError as error:
                raise as_vllm_error(error) from error
        if medium is None:
            raise VLLMValidationError(
                f"With a Mistral tokenizer, {modality} content needs its data: a uuid alone says "
                "nothing about its size"
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._measured, modality, medium)

    def _measured(self, modality: str, medium: Any) -> str:
        allow(seconds_to_process(medium))
        # Measure what the model's processor sees: resampled sound, for example.
        info = self._renderer.get_mm_processor().info
        items = info.parse_mm_data({modality: [medium]})[modality]
        match items:
            case ImageProcessorItems():
                width, height = items.get_image_size(0)
                return f"{_SIZE}{width}x{height}"
            case AudioProcessorItems():
                return f"{_SIZE}{items.get_audio_length(0)}"
        raise VLLMValidationError(f"With a Mistral tokenizer, {modality} content must be encoded")


class SizedPictures(ImageEncoder):
    """mistral_common's encoder of pictures, given a size in place of an address."""

    def __init__(self, original: ImageEncoder) -> None:
        super().__init__(original.image_config, original.special_ids)

    def __call__(self, content: ImageChunk | ImageURLChunk) -> ImageEncoding:
        """Return a picture's tokens, with its pixels if vLLM passed them. Raises ValueError for an
        address.
        """
        if isinstance(content, ImageChunk):
            return super().__call__(content)
        width, height = map(int, _said(content.get_url()).split("x"))
        columns, rows = self._image_to_num_tokens(_OfSize((width, height)))  # type: ignore[arg-type] # it is asked for its size only
        tokens = ([self.special_ids.img] * columns + [self.special_ids.img_break]) * rows
        tokens[-1] = self.special_ids.img_end
        return ImageEncoding(tokens, np.empty(0, np.float32))


class SizedSounds(AudioEncoder):
    """mistral_common's encoder of sounds, given a number of samples in place of an address."""

    def __init__(self, original: AudioEncoder) -> None:
        super().__init__(original.audio_config, original.special_ids)

    def __call__(self, content: AudioChunk | AudioURLChunk) -> AudioEncoding:
        """Return a sound's tokens, with its samples if vLLM passed them. Raises ValueError for an
        address.
        """
        if isinstance(content, AudioChunk):
            given = content.input_audio
            if isinstance(given, bytes) or not given.startswith(_SIZE):
                return super().__call__(content)
        else:
            given = content.url
        silence = np.zeros(int(_said(given)), np.float32)
        return self.encode_audio(Audio(silence, self.audio_config.sampling_rate, "wav"))


class _OfSize:
    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size


def _said(reference: str) -> str:
    if not reference.startswith(_SIZE):
        raise ValueError("media of a chat are fetched by the frontend only")
    return reference.removeprefix(_SIZE)


def _listed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content can be read twice: Pydantic makes one-shot iterators. Raises
    VLLMValidationError for one in gpt-oss's form.
    """
    if not isinstance(message, Mapping):
        raise VLLMValidationError("messages: with a Mistral tokenizer, none may have an author")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": list(content)}


def _with_sizes(
    messages: Sequence[Mapping[str, Any]], sizes: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Replace each medium by its size. Raises VLLMValidationError for content that vLLM and
    mistral_common interpret differently.
    """
    coming = {modality: iter(each) for modality, each in sizes.items()}
    written = [
        {**message, "content": [_part(part, coming) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]
    if any(next(each, None) is not None for each in coming.values()):
        raise _odd("a part has content of another type than it says")
    return written


def _part(part: Any, coming: Mapping[str, Iterator[str]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return dict(part)
    modality = _MEDIA.get(str(kind))
    if modality is None:
        raise _odd(f"there is no {str(kind)[:40]!r}")
    size = next(coming.get(modality, iter(())), None)
    if size is None:
        raise _odd(f"a part of type {kind} has no content")
    return {"type": kind, str(kind): size if kind == "input_audio" else {"url": size}}


def _odd(why: str) -> VLLMValidationError:
    known = ", ".join((*_TEXTS, *_MEDIA))
    return VLLMValidationError(
        f"With a Mistral tokenizer, parts of content may be of type {known}: {why}"
    )
