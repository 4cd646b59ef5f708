"""All that is replaced on vLLM's renderer and its media processor, on both sides.

Nothing else assigns to them. Whoever has the logic offers it here: the frontend's processing of
media, the worker's hashes. Both sides count the runs of the Hugging Face processor, so that anyone
can see that an item is processed once and by the frontend.
"""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol, TypeAlias

from vllm.inputs import TextPrompt, TokensPrompt
from vllm.multimodal.cache.base import BaseMultiModalProcessorCache
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.utils.async_utils import make_async

from common.identity import MmHash, WorkerId
from common.media.decoded_media import check_decoded, check_options
from common.observability.telemetry import HF_PROCESSOR_RUNS


class HfProcessorRuns:
    """The count of one renderer's processor since the start. Text-only models never count."""

    def __init__(self, *, side: str, worker_id: WorkerId | None) -> None:
        """Start from none; the side (``frontend`` or ``worker``) and a worker's id are labels."""
        self.total = 0
        self._gauge = HF_PROCESSOR_RUNS.labels(side, worker_id or "")

    def reset(self) -> None:
        """Start again from none, so that warm-up is left out."""
        self._gauge.dec(self.total)
        self.total = 0

    def add(self, runs: int) -> None:
        """Count runs, here or by another process on this one's behalf."""
        self.total += runs
        self._gauge.inc(runs)


ByContent: TypeAlias = Callable[[ProcessorInputs], Mapping[str, list[MmHash]]]
"""vLLM's own hashes of media: for each modality, in the order of its media."""

Hashes: TypeAlias = Callable[[ByContent, ProcessorInputs], Mapping[str, list[MmHash]]]
"""Ours of the same media, with vLLM's to make them of. Called on the renderer's thread."""

Tokenize: TypeAlias = Callable[[TextPrompt, TokenizeParams], Awaitable[TokensPrompt]]
"""Makes tokens of a text, on the event loop; slow work is for its threads."""


class MediaProcess(Protocol):
    """Takes the place of the renderer's ``_process_multimodal_async``, on the event loop."""

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
        """A prompt with its media, as vLLM's renderer has it."""
        ...


def patch_renderer(
    renderer: BaseRenderer,
    *,
    runs: HfProcessorRuns,
    hashes: Hashes | None = None,
    cache: BaseMultiModalProcessorCache | None = None,
    process: MediaProcess | None = None,
) -> None:
    """Replace what is ours to do. Once for each renderer; nothing for text-only models.

    The order is that of what relies on what: ``process`` comes last, because it has vLLM
    process media over ``cache``, whose items are known by ``hashes``, and that runs the Hugging
    Face processor, which is counted. No replacement wraps another one.

    Everything is replaced on the instance: vLLM makes other processors of the same class, for
    its own profiling.

    Args:
        runs: counts from now on, so warm-up that is over is left out.
        hashes: of media that vLLM processes; without them, its own.
        cache: instead of both of the renderer's, which are closed.
        process: instead of the renderer's own processing of a prompt's media.
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


def replace_threads(
    renderer: BaseRenderer, media: Executor, make_text_threads: Callable[[], Executor]
) -> None:
    """Replace the threads of a renderer, which nobody watches. Before anything uses them.

    Args:
        media: one thread, in place of that for its processor.
        make_text_threads: makes those in which chats become text and text becomes tokens. vLLM
            abandons them where a chat's template takes too long, and goes on with others.
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


def replace_tokenizing(renderer: BaseRenderer, tokenize: Tokenize) -> None:
    """Replace how the renderer makes tokens of one text, for all routes."""
    renderer._tokenize_prompt_async = tokenize


def replace_messages(
    renderer: BaseRenderer, now: Callable[..., Any], later: Callable[..., Awaitable[Any]]
) -> None:
    """Replace how a renderer turns the messages of a chat into a prompt, now and asynchronously.
    Once."""
    for name, ours in (("render_messages", now), ("render_messages_async", later)):
        assert name not in vars(renderer), f"{name} is replaced already"
        setattr(renderer, name, ours)


def replace_template(renderer: BaseRenderer, apply: Callable[..., Awaitable[Any]]) -> None:
    """Replace how a renderer applies a chat template. Once."""
    renderer._apply_chat_template_async = apply


def _count_runs(processor: BaseMultiModalProcessor[Any], runs: HfProcessorRuns) -> None:
    """Where media are sorted for the Hugging Face processor: many models call it in ways of their
    own, some of them for each frame, but all of them sort first and call it for what is there. So
    this is also where nothing but decoded media may pass."""
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
