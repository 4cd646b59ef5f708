"""Run vLLM's processor on media without their prompt, in any process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from PIL import Image
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.media import ImageMediaIO, MediaIO, MediaWithBytes
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs, TimingContext
from vllm.multimodal.processing.processor import ResolvedPromptUpdate
from vllm.utils.torch_utils import set_default_torch_num_threads

from common.errors import RequestRejectedError
from common.identity import MmHash
from common.media.cache_partition import SHARED, Partition, hash_within
from common.observability.log_lines import current_request
from frontend.fetch import Content, ProcessorMemory, processing_weight
from frontend.processing.errors import said_by_processor

Processor: TypeAlias = BaseMultiModalProcessor[Any]
"""vLLM's, of any model."""

RUN_BYTES: Final = 64 << 20
"""Decoded media of one run of the HF processor: 16 megapixels, whose floats take 10 times as much,
or a minute of sound with all copies. A larger medium gets its own run."""


@dataclass(frozen=True)
class Medium:
    """An encoded medium and its decoder."""

    content: Content
    media_io: MediaIO[Any]


class MediaOptions(NamedTuple):
    """A request's options for the HF processor and the decoders; part of hashes."""

    mm_processor_kwargs: Mapping[str, object]
    media_io_kwargs: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Batch:
    """Media of one modality and one request, in its order.

    Attributes:
        partition: of the request; part of hashes.
        request: internal id of the first request, for log lines.
    """

    modality: str
    media: Sequence[Medium]
    options: MediaOptions
    partition: Partition = SHARED
    request: str = field(default_factory=current_request.get)


@dataclass(frozen=True)
class Processed:
    """Result of vLLM's processor for one medium: its hash within its partition, its tensors, and
    how vLLM puts its placeholders into a prompt.
    """

    mm_hash: MmHash
    item: MultiModalKwargsItem
    prompt_updates: Sequence[ResolvedPromptUpdate]

    @property
    def prompt_tokens(self) -> int:
        """Minimum of tokens in a prompt: vLLM applies one of the updates."""
        return min((len(each.content.full) for each in self.prompt_updates), default=0)


def may_defer(processor: Processor) -> bool:
    """Return whether a model's media may stay encoded until each is processed by itself.

    Some models process several media together differently, bypassing vLLM's cache. For some (Kimi
    K2.5) vLLM merges images and videos into one modality as it reads a chat, and must see them.
    """
    own = type(processor)
    apart = own._cached_apply_hf_processor is BaseMultiModalProcessor._cached_apply_hf_processor
    config = processor.info.ctx.model_config.hf_config
    return apart and not getattr(config, "use_unified_vision_chunk", False)


def inputs_of(
    processor: Processor,
    modality: str,
    media: Sequence[Any],
    options: MediaOptions,
) -> ProcessorInputs:
    """Return media without a prompt as processor inputs. Raises ValueError if the processor
    refuses.
    """
    if processor.info.ctx.model_config.get_multimodal_config().mm_processor_cache_gb > 0:
        media = [_in_rgb(medium) for medium in media]
    return ProcessorInputs(
        [],
        processor.info.parse_mm_data({modality: list(media)}),
        hf_processor_mm_kwargs=options.mm_processor_kwargs,
        media_io_kwargs=options.media_io_kwargs,
    )


def _in_rgb(medium: object) -> object:
    """Convert a picture of another mode (``image_mode``) to RGB, with white for transparency. vLLM
    does so to each picture that its media cache lacks: it parses the picture a second time.
    """
    if not isinstance(medium, MediaWithBytes) or not isinstance(medium.media, Image.Image):
        return medium
    return replace(medium, media=ImageMediaIO()._convert_image_mode(medium.media))


def process(processor: Processor, batch: Batch, decoded: Sequence[Any]) -> list[Processed]:
    """Run the HF processor, in several runs for large media: tens of milliseconds per megapixel.

    ``decoded`` are the batch's media from their ``media_io``. Raises RefusedError or ValueError if
    the processor refuses them, RequestRejectedError if one alone is longer than a prompt: before
    its tensors, gigabytes maybe, take the place of others'.
    """
    processed = [made for some in in_runs(decoded) for made in _run(processor, batch, some)]
    most = longest_prompt(processor)
    for each in processed:
        check_tokens(each.prompt_tokens, most)
    return processed


def longest_prompt(processor: Processor) -> int | None:
    """Return the most tokens of a prompt, None if media take none of it, as of Whisper."""
    config = processor.info.ctx.model_config
    return None if config.is_encoder_decoder else config.max_model_len


def check_tokens(tokens: int, most: int | None) -> None:
    """Raise RequestRejectedError if media have more tokens than a prompt."""
    if most is not None and tokens > most:
        raise RequestRejectedError(
            f"the maximum context length is {most} tokens, and media of this request have "
            f"{tokens} at least: send fewer, or shorter ones"
        )


def in_runs(decoded: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield media that are processed together, a large one by itself."""
    start = taken = 0
    for index, medium in enumerate(decoded):
        taken += (weight := processing_weight(medium))
        if taken > RUN_BYTES and index > start:
            yield decoded[start:index]
            start, taken = index, weight
    yield decoded[start:]


def is_long(modality: str, decoded: Sequence[Any]) -> bool:
    """Return whether a run may take seconds: of a large medium, or of a film, whose frames may be
    small and enlarged.
    """
    return modality == "video" or sum(map(processing_weight, decoded)) > RUN_BYTES


def _run(processor: Processor, batch: Batch, decoded: Sequence[Any]) -> list[Processed]:
    inputs = inputs_of(processor, batch.modality, decoded, batch.options)
    with set_default_torch_num_threads(), said_by_processor(), ProcessorMemory(processor):
        result = processor._apply_hf_processor(inputs, TimingContext(enabled=False))
    return [
        Processed(hash_within(MmHash(mm_hash), batch.partition), item, updates)
        for mm_hash, item, updates in zip(
            result.hashes[batch.modality],
            result.kwargs[batch.modality],
            result.prompt_updates[batch.modality],
            strict=True,
        )
    ]
