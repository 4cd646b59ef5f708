"""Tokenize texts: long ones on a thread aside, and no more of one than its request can use.

vLLM has one thread for the texts of all prompts. A text of a megabyte took it for seconds, only to
be refused for its length or cut to ten tokens afterwards.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.utils.async_utils import make_async

from common.aio.watched_threads import WatchedThreads
from common.errors import RequestRejectedError, ThreadStuckError
from frontend.asgi import as_vllm_error
from frontend.client_turns import ClientTurns
from frontend.request_context import current_context

T = TypeVar("T")

LONG: Final = 64 << 10
"""Characters from which a text goes aside: some 50 ms of a thread."""

CHARACTERS_A_TOKEN: Final = 8
"""Twice the usual. A text of longer tokens is retried with a larger part."""

MARGIN_TOKENS: Final = 256
"""Extra tokens that a part must have: a cut may change the tokens next to it."""

AT_ONCE: Final = 2
"""Texts of one request that are tokenized or wait for a thread at a time, and of one client for
each thread. 1,024 texts of a kilobyte, all in the queue at once, kept others waiting for a second;
200 requests of 8 KB of one client did so for 8 seconds, and eight with documents of 60 KB for 6."""

MIN_LIMIT: Final = 256 << 10
"""Maximum characters of a text that is only counted; more for a larger context. The answer has each
of its tokens, and a million of them block the event loop."""

FAR_WEIGHT: Final = 4
"""Characters that one beyond U+FFFF counts as: 250,000 notes (U+1D160) are three million tokens,
which took 351 MB."""


class _Turns:
    """Limits the texts at a time of one request, and of one client, so that others' go between."""

    def __init__(self, threads: int) -> None:
        """``threads`` is the number of threads that one client may keep busy."""
        self._clients = ClientTurns(threads * AT_ONCE)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn of this task's request and its client, and hold it."""
        context = current_context()
        if (own := context.find(_OfRequest)) is None:
            context.put(own := _OfRequest(AT_ONCE))
        async with own, self._clients.of_client():
            yield


class _OfRequest(asyncio.Semaphore):
    """Limits the texts of one request."""


class Tokenizing:
    """Replaces the renderer's tokenizing of one text."""

    def __init__(self, renderer: BaseRenderer, limit_s: float) -> None:
        """``limit_s`` bounds the seconds for which a long text may keep the thread."""
        self._renderer = renderer
        self._others = renderer._tokenize_prompt_async
        self._decode = renderer._async_tokenizer_decode
        self._apply: Any = getattr(renderer, "_apply_chat_template_async", None)
        # One at a time: a megabyte of text takes 200 MB meanwhile.
        self._own = WatchedThreads("long texts", 1, limit_s)
        shared = isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin)
        self._others_thread: Executor = renderer._executor
        self._thread = self._own if shared else self._others_thread
        self._turns = _Turns(getattr(renderer.model_config, "renderer_num_workers", 1))
        # A proxy may be one client for many people, whose short texts wait for no long ones.
        self._long_turns = _Turns(1)
        self._long = make_async(renderer._tokenize_prompt, executor=self._thread)
        self._context = renderer.model_config.max_model_len
        self._limit = max(MIN_LIMIT, self._context * CHARACTERS_A_TOKEN)

    def close(self) -> None:
        """Release the thread; its current work ends unseen."""
        self._own.shutdown(wait=False, cancel_futures=True)

    async def among_others(self, work: Callable[[], T]) -> T:
        """Run work that tokenizes short texts on the thread for all prompts'."""
        async with self._turns.turn():
            return await asyncio.get_running_loop().run_in_executor(self._others_thread, work)

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work that tokenizes several texts on the thread for long ones."""
        async with self._long_turns.turn():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        async with self._turns.turn():
            return await self._decode(tokens)

    async def __call__(self, prompt: TextPrompt, params: TokenizeParams) -> TokensPrompt:
        """Return a text's tokens, or enough of them to tell that there are too many. Raises
        VLLMError if the text is too long to count, or keeps its thread for too long.
        """
        turns = self._turns if len(prompt["prompt"]) <= LONG else self._long_turns
        try:
            async with turns.turn():
                return await self._tokens(prompt, params)
        except ThreadStuckError as error:
            raise as_vllm_error(error) from error

    async def _tokens(self, prompt: TextPrompt, params: TokenizeParams) -> TokensPrompt:
        text = prompt["prompt"]
        if len(text) <= LONG:
            return await self._others(prompt, params)
        wanted = _wanted(params)
        if wanted is None:
            self.check_length(text)
            return await self._long(prompt, params)
        size = wanted * CHARACTERS_A_TOKEN + LONG
        from_left = _keeps_end(params, self._renderer.tokenizer)
        while size < len(text):
            part = text[-size:] if from_left else text[:size]
            cut: Any = {**prompt, "prompt": part}
            counted = await self._long(dict(cut), _unlimited(params))
            if len(counted["prompt_token_ids"]) >= wanted + MARGIN_TOKENS:
                tokens = await self._long(cut, params)
                before = len(text) - len(part) if from_left else 0
                tokens = self._renderer._apply_prompt_char_offset(tokens, before)
                return {**tokens, "prompt": text}
            size *= 4
        return await self._long(prompt, params)

    async def apply_template(
        self, config: Any, tokenizer: Any, chat: Any, /, **options: Any
    ) -> Any:
        """Render a chat as vLLM does. Check its length first if that tokenizes on the thread of all
        prompts. Raises VLLMError if it is too long.
        """
        if options.get("tokenize"):
            self.check_length(*texts_in([chat, options]))
        async with self._turns.turn():
            return await self._apply(config, tokenizer, chat, **options)

    def check_length(self, *texts: str) -> None:
        """Raise VLLMError if texts are too long to be tokenized as a whole."""
        length = sum(map(len, texts))
        if length <= self._limit:  # or megabytes would be searched for nothing
            length += (FAR_WEIGHT - 1) * sum(map(_count_far, texts))
        if length > self._limit:
            error = RequestRejectedError(
                f"the text has {length} characters, more than {self._limit} (one beyond U+FFFF "
                f"counts as {FAR_WEIGHT}; the maximum context length is {self._context} "
                "tokens): send parts of it"
            )
            raise as_vllm_error(error) from error


class TextCut:
    """Cuts the texts to score of one request to the tokens it can use.

    A tokenizer that truncates a pair keeps each combination of what it cut off: 175 KB of text for
    a context of 512 tokens took 6 GB, and twice as much text takes four times that.

    Attributes:
        tokens: sum of the tokens of all texts that were long enough to be counted.
    """

    def __init__(self, tokenizer: Any, params: TokenizeParams, most: int) -> None:
        """``most`` is the limit where ``params`` has none."""
        self.tokens = 0
        self._tokenizer = tokenizer
        self._is_fast = getattr(tokenizer, "is_fast", False)  # it knows where tokens end
        wanted = _wanted(params)
        self._most = (most if wanted is None else min(wanted, most)) + MARGIN_TOKENS
        self._keeps_end = _keeps_end(params, tokenizer)

    def __call__(self, data: Any, limit: int = 0) -> Any:
        """Return a text, or content parts, without what is too much. Raises VLLMError.

        Args:
            limit: tokens at the start of it that its request asks for; 0 for all.
        """
        most, end = self._most, self._keeps_end
        if limit > 0:
            if not self._is_fast:
                raise as_vllm_error(
                    RequestRejectedError(
                        "this model's tokenizer can't cut texts by `max_tokens_per_query` and "
                        "`max_tokens_per_doc`: use `truncate_prompt_tokens`"
                    )
                )
            most, end = limit + MARGIN_TOKENS if end else min(most, limit + MARGIN_TOKENS), False
        if isinstance(data, str):
            return self._cut(data, most, end)[0]
        kept, left = [], most
        for part in reversed(data) if end else data:
            if isinstance(text := part.get("text"), str):
                if left <= 0:
                    continue
                text, tokens = self._cut(text, left, end)
                part, left = {**part, "text": text}, left - tokens
            kept.append(part)
        return kept[::-1] if end else kept

    def _cut(self, text: str, most: int, end: bool) -> tuple[str, int]:
        """Return what is left of a text, and its tokens."""
        if len(text) * 4 <= most:  # a token is a byte at least
            return text, len(text)
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        if not self._is_fast:
            del options["return_offsets_mapping"]
        size = most * 2  # a text may have a token for each character
        while True:
            part = text[-size:] if end else text[:size]
            found = self._tokenizer(part, **options)
            count = len(found["input_ids"])
            if count >= most or len(part) == len(text):
                break
            size *= 2
        if self._is_fast and count > most:
            spans = found["offset_mapping"]
            part = part[spans[-most][0] :] if end else part[: spans[most - 1][1]]
        self.tokens += min(most, count)
        return part, min(most, count)


def _count_far(text: str) -> int:
    return 0 if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)


def texts_in(value: object) -> Iterator[str]:
    """Yield all strings within lists and objects, except field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        inner: Iterable[object] = value.values() if isinstance(value, Mapping) else value
        for each in inner:
            yield from texts_in(each)


def _wanted(params: TokenizeParams) -> int | None:
    """Return how many tokens of a text are used at most; None for all."""
    if params.truncate_prompt_tokens is None:
        return params.max_input_tokens
    if params.truncate_prompt_tokens < 0:
        return params.max_truncation_tokens
    return params.truncate_prompt_tokens


def _keeps_end(params: TokenizeParams, tokenizer: Any) -> bool:
    truncates = params.truncate_prompt_tokens is not None
    return truncates and (params.truncation_side or tokenizer.truncation_side) == "left"


def _unlimited(params: TokenizeParams) -> TokenizeParams:
    return replace(params, max_total_tokens=None, truncate_prompt_tokens=None)
