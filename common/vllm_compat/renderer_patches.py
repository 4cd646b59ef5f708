"""All replacements on vLLM's renderer and its media processor, on both sides.

No other module assigns to them. The frontend passes its media processing, the worker its hashes.
Both count the Hugging Face processor's runs, as a proof that each item is processed once, by the
frontend.
"""

import copy
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol, TypeAlias
from weakref import proxy

from vllm.inputs import TextPrompt, TokensPrompt
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.utils.async_utils import make_async

from common.identity import MmHash, WorkerId
from common.media.decoded_media import check_decoded, check_options
from common.observability.telemetry import HF_PROCESSOR_RUNS

_create_parser: Final = AsyncMultiModalItemTracker.create_parser


class HfProcessorRuns:
    """Processor runs of one renderer since the start. Text-only models have none."""

    def __init__(self, *, side: str, worker_id: WorkerId | None) -> None:
        """Start from zero; ``side`` (``frontend`` or ``worker``) and the worker's id are labels."""
        self.total = 0
        self._gauge = HF_PROCESSOR_RUNS.labels(side, worker_id or "")

    def reset(self) -> None:
        """Reset to zero, to exclude the warm-up."""
        self._gauge.dec(self.total)
        self.total = 0

    def add(self, runs: int) -> None:
        """Count runs of this process, or of another one on its behalf."""
        self.total += runs
        self._gauge.inc(runs)


ByContent: TypeAlias = Callable[[ProcessorInputs], Mapping[str, list[MmHash]]]
"""vLLM's own hashes of media: for each modality, in the order of its media."""

Hashes: TypeAlias = Callable[[ByContent, ProcessorInputs], Mapping[str, list[MmHash]]]
"""Ours of the same media, with vLLM's to make them of. Called on the renderer's thread."""

Tokenize: TypeAlias = Callable[[TextPrompt, TokenizeParams], Awaitable[TokensPrompt]]
"""Makes tokens of a text, on the event loop; slow work is for its threads."""


class MediaProcess(Protocol):
    """Replacement of the renderer's ``_process_multimodal_async``, on the event loop."""

    async def __call__(
        self,
        prompt: list[int],
        mm_data: Mapping[str, Any],
        mm_uuids: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, object] | None,
        media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> Any:
        """Return a prompt with its media, as vLLM's renderer does."""
        ...


def patch_renderer(
    renderer: BaseRenderer,
    *,
    runs: HfProcessorRuns,
    hashes: Hashes | None = None,
    cache: BaseMultiModalProcessorCache | None = None,
    process: MediaProcess | None = None,
) -> None:
    """Replace our parts of a renderer, once; do nothing for text-only models.

    The order follows the dependencies: ``process`` comes last, because it has vLLM process media
    over ``cache``, whose keys are ``hashes``, which runs the counted processor. No replacement
    wraps another one. Only the instance is changed: vLLM creates other processors of the class, for
    profiling.

    Args:
        runs: counts from now on, without a finished warm-up.
        hashes: of media that vLLM processes; by default its own.
        cache: replaces both of the renderer's, which are closed.
        process: replaces the processing of a prompt's media.
    """
    processor = renderer.mm_processor
    if processor is None:
        return
    _count_runs(processor, runs)
    if hashes is not None:
        _replace_method(processor, "_get_mm_hashes", partial(hashes, processor._get_mm_hashes))
    if cache is not None:
        for replaced in (renderer._mm_processor_cache, renderer._mm_processor_only_cache):
            if replaced is not None:
                replaced.close()
        renderer._mm_processor_cache = renderer._mm_processor_only_cache = cache
    if process is not None:
        renderer._process_multimodal_async = process


def free_media_of_messages() -> None:
    """Have parsers of messages refer weakly to their tracker, which refers to them: data URLs of
    each request stayed until old garbage was collected.
    """

    def create_parser(tracker: Any, mm_processor_kwargs: dict[str, Any] | None = None) -> Any:
        return _create_parser(proxy(tracker), mm_processor_kwargs)

    AsyncMultiModalItemTracker.create_parser = create_parser


def second_processor(renderer: BaseRenderer, runs: HfProcessorRuns) -> BaseMultiModalProcessor[Any]:
    """Return a processor like the renderer's, with a tokenizer of its own, for use in another
    thread: vLLM's are not thread-safe. ``runs`` counts its runs too.
    """
    made: BaseMultiModalProcessor[Any] = MULTIMODAL_REGISTRY.create_processor(
        renderer.model_config, tokenizer=copy.deepcopy(renderer.tokenizer)
    )
    _count_runs(made, runs)
    return made


def replace_threads(
    renderer: BaseRenderer, media: Executor, make_text_threads: Callable[[], Executor]
) -> None:
    """Replace the threads of a renderer, which have no watchdog, before their first use.

    Args:
        media: one thread, for the processor.
        make_text_threads: makes threads for templates and tokenization. vLLM abandons them if a
            chat template takes too long, and asks for others.
    """
    renderer._mm_executor.shutdown(wait=False)
    renderer._mm_executor = media
    renderer._clear_mm_cache_async = make_async(renderer.clear_mm_cache, executor=media)
    texts: Any = renderer._executor  # vLLM's code holds on to this one

    def replace() -> None:
        texts._inner.shutdown(wait=False)
        texts._inner = make_text_threads()

    texts.replace_inner = replace
    replace()


def replace_tokenizing(
    renderer: BaseRenderer, tokenize: Tokenize, decode: Callable[[list[int]], Awaitable[str]]
) -> None:
    """Replace the tokenization of one text, and the way back, for all routes."""
    renderer._tokenize_prompt_async = tokenize
    renderer._async_tokenizer_decode = decode


def replace_messages(
    renderer: BaseRenderer, now: Callable[..., Any], later: Callable[..., Awaitable[Any]]
) -> None:
    """Replace the rendering of chat messages, synchronous and asynchronous, once."""
    assert "render_messages" not in vars(renderer), "it is replaced already"
    renderer.render_messages = now
    renderer.render_messages_async = later


def replace_template(renderer: BaseRenderer, apply: Callable[..., Awaitable[Any]]) -> None:
    """Replace the application of a chat template, once."""
    renderer._apply_chat_template_async = apply


def _count_runs(processor: BaseMultiModalProcessor[Any], runs: HfProcessorRuns) -> None:
    """Count runs and refuse undecoded media where media are sorted for the HF processor: models
    call it in many ways, some for each frame, but all sort first."""
    original = processor._get_hf_mm_inputs

    def counted(mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        check_options(hf_kwargs)
        for modality, items in mm_items.items():
            check_decoded(modality, items.get_all())
        inputs = original(mm_items, hf_kwargs)
        if inputs.hf_data:
            runs.add(1)
        return inputs

    _replace_method(processor, "_get_hf_mm_inputs", counted)


def _replace_method(
    processor: BaseMultiModalProcessor[Any], name: str, ours: Callable[..., Any]
) -> None:
    assert name not in vars(processor), f"{name} is replaced already"
    setattr(processor, name, ours)
