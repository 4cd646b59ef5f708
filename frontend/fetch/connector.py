"""vLLM's media connector named ``mmrouter``, through which its serving code uses the loader.

Errors become vLLM's own here, so that users get a 400 or 422 with one sentence. It names the place
as the user wrote it, without possible secrets.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.exceptions import (
    VLLMClientError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    AudioEmbeddingMediaIO,
    AudioMediaIO,
    ImageEmbeddingMediaIO,
    ImageMediaIO,
    MediaConnector,
    MediaIO,
    VideoMediaIO,
)
from vllm.multimodal.media.video import VideoEmbeddingMediaIO

from common.errors import OverloadedError, ThreadStuckError
from common.media.tensor_files import TensorFileError
from common.observability.telemetry import MEDIA_HELD_BYTES, MEDIA_HELD_PIXELS
from frontend.asgi import as_vllm_error, blaming_a_lack_of_files
from frontend.fetch.allowance import HeldBytes, current_allowance
from frontend.fetch.content import DeferredMedium, PendingMedium, check_video_backend
from frontend.fetch.data_url import has_scheme, is_data_url
from frontend.fetch.decoders import MISLED_DECODER_ERRORS, limit_decoders
from frontend.fetch.loader import MediaLoader
from frontend.media_limits import (
    MediaError,
    RefusedError,
    RequestLimitError,
    TooLargeError,
    UnfetchableError,
    parse_url,
)
from frontend.request_context import current_context

CONNECTOR_NAME = "mmrouter"
_DEFERRABLE = (AudioMediaIO, ImageMediaIO, VideoMediaIO)

MAX_PATH_CHARACTERS = 80
"""Limit of a URL's path, or of text that is no URL, in an error."""


class FrontendMediaConnector(MediaConnector):
    """One request's view of the loader. vLLM makes one per request that has media."""

    def __init__(
        self,
        loader: MediaLoader,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        **also_in_the_policy: object,
    ) -> None:
        """``media_io_kwargs`` are decoding options by modality. vLLM's flags in the other arguments
        are part of the policy already.
        """
        # The base class's set-up would prepare a cache on disk, by URL.
        self.media_io_kwargs = media_io_kwargs or {}
        # From vLLM 0.33 on each request has budgets of vLLM's own, which hold locks. The allowance
        # of the request replaces them: with vLLM's, no two requests would decode a medium in the
        # same way (content.py), and none could leave this process.
        self.decoded_budget = self.download_budget = None
        self._loader = loader
        self.defers: bool | None = None
        """Whether media are decoded where they are processed; None where the model decides."""
        self.then: Callable[[Any], Any] | None = None
        """What to make of a decoded medium, in a thread."""

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
    ) -> Any:
        """Fetch one medium, and decode it unless deferred. The policy's time-out replaces
        ``fetch_timeout``.

        Raises:
            VLLMUnprocessableEntityError: it can't be fetched; 422.
            VLLMValidationError, ValueError: the policy refuses it, or it can't be decoded; 400.
            VLLMError: no room for it now; 429 or 503.
        """
        number = 1
        allowance = current_allowance(self._loader.policy)
        with blaming_a_lack_of_files():
            try:
                number = allowance.take_medium()
                defers = current_context().defers if self.defers is None else self.defers
                if defers is None:
                    defers = self._loader.defers
                if defers and isinstance(media_io, _DEFERRABLE):
                    content = await self._loader.fetch(url, media_io)
                    return DeferredMedium(content, media_io, _place(url))
                decoded = await self._loader.load(url, media_io)
                if self.then is not None:
                    decoded = await self._loader.aside(partial(self.then, decoded))
                return decoded
            except MediaError as error:
                # Without its traceback, whose frames and ``refused`` would be a cycle, with media.
                refused = partial(for_user, error.with_traceback(None), _place(url, number))
                allowance.failure = allowance.failure or refused
                raise refused() from error
            except (OverloadedError, ThreadStuckError) as error:
                raise as_vllm_error(error) from error

    async def fetch_video_async(self, video_url: str, **options: str | None) -> Any:
        """Fetch a video; answer an unknown decoder with a 400."""
        check_video_backend(self.media_io_kwargs)
        return await super().fetch_video_async(video_url, **options)

    def fetch_video(self, video_url: str, **options: str | None) -> Any:
        check_video_backend(self.media_io_kwargs)
        return super().fetch_video(video_url, **options)

    def load_from_url(
        self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
    ) -> Any:
        """Return a pending medium to vLLM's synchronous parser, which must not wait."""
        return PendingMedium(partial(self.load_from_url_async, url, media_io))

    def fetch_image_embedding(self, data: str) -> torch.Tensor:
        """Refuse, as for all modalities: synchronous calls have no budget."""
        raise VLLMValidationError("Embeddings of media are taken in messages only")

    fetch_audio_embedding = fetch_video_embedding = fetch_image_embedding

    async def fetch_image_embedding_async(self, data: str) -> torch.Tensor:
        return await self._tensor(ImageEmbeddingMediaIO(), data)

    async def fetch_audio_embedding_async(self, data: str) -> torch.Tensor:
        return await self._tensor(AudioEmbeddingMediaIO(), data)

    async def fetch_video_embedding_async(self, data: str) -> torch.Tensor:
        return await self._tensor(VideoEmbeddingMediaIO(), data)

    async def _tensor(self, media_io: MediaIO[torch.Tensor], data: str) -> torch.Tensor:
        policy = self._loader.policy
        nbytes = len(data) * 3 // 4
        try:
            allowance = current_allowance(policy)
            allowance.take_medium()
            if nbytes > policy.max_bytes + 2:
                raise TooLargeError(policy.max_bytes)
            held = HeldBytes(allowance, self._loader.budgets.held)
            held.grow(nbytes)
            loading = partial(media_io.load_base64, "", data)
            tensor = await asyncio.get_running_loop().run_in_executor(self._loader.pool, loading)
            held.keep_with(tensor)
            return tensor
        except TooLargeError as error:
            raise VLLMUnprocessableEntityError(
                f"Failed to load embeddings: {error.reason}"
            ) from error
        except RefusedError as error:
            raise VLLMValidationError(f"Failed to load embeddings: {error.reason}") from error
        except TensorFileError as error:
            raise VLLMValidationError(f"Failed to load embeddings: {error}") from error
        except (OverloadedError, ThreadStuckError) as error:
            raise as_vllm_error(error) from error
        except (*MISLED_DECODER_ERRORS, MemoryError) as error:
            raise VLLMValidationError("Failed to load embeddings: they are no tensor") from error


def register(loader: MediaLoader) -> None:
    """Make vLLM load media through a loader, under its policy, from now on."""
    limit_decoders(loader.policy)
    MEDIA_HELD_BYTES.set_function(lambda: loader.budgets.held.reserved)
    MEDIA_HELD_PIXELS.set_function(lambda: loader.budgets.decoding.reserved)
    make: Callable[..., FrontendMediaConnector] = partial(FrontendMediaConnector, loader)
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)(make)


def for_user(error: MediaError, place: str) -> VLLMClientError:
    """Return the error that vLLM's server answers with a sentence and the right status."""
    if isinstance(error, RequestLimitError):  # of all media together, not of one place
        return VLLMValidationError(error.reason[:1].upper() + error.reason[1:])
    sentence = f"Failed to load media from {place}: {error.reason}"
    if isinstance(error, UnfetchableError):
        return VLLMUnprocessableEntityError(sentence)
    return VLLMValidationError(sentence)


def _place(url: str, number: int = 1) -> str:
    """Return a URL without user information, query and fragment; a data URL's number instead."""
    if is_data_url(url):
        return "a data URL" if number == 1 else f"a data URL, medium {number} of the request"
    if not has_scheme(url):
        return repr(_shortened(url))
    try:
        parsed = parse_url(url)
    except RefusedError:
        return "a URL"
    path = _shortened(parsed.raw_path)
    port = "" if parsed.explicit_port is None else f":{parsed.explicit_port}"
    return f"{parsed.scheme}://{parsed.host_subcomponent or ''}{port}{path}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PATH_CHARACTERS else text[:MAX_PATH_CHARACTERS] + "…"
