"""Give vLLM's serving objects threads of ours: to decode speech, to tokenize for scores and for
gpt-oss, and to write the tokens of a text.

Speech in an unknown language gets a clear error if the model can't detect languages.
"""

import asyncio
import pickle
import re
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from copy import copy
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.processing import cached_encode

from common.aio.watched_threads import WatchedThreads
from common.errors import OverloadedError, RequestRejectedError
from frontend.asgi import App, Receive, Scope, Send, as_vllm_error, blaming_a_lack_of_files
from frontend.bounded.forks import forked
from frontend.fetch import MediaLoader, for_user
from frontend.http.streaming.parsing import BOUNDS, aside
from frontend.http.streaming.whole_answers import DeferredParts, entries
from frontend.media_limits import MediaError
from frontend.processing import Tokenizing
from frontend.request_context import current_context

_TOKENS_AT_ONCE: Final = 4096

LONG_WORD: Final = re.compile(r"[^ \t-\r0-9]{64}|[\s/]{64}")
"""All that gpt-oss's tokenizer may take for one word of more than 130 characters. It holds the GIL
for the square of a word's length: 100 KB of one letter stopped a frontend for 26 s, 1 MB of words
for 0.8 s. Honest texts match too, and then cost a fork."""

FEW_BYTES: Final = 4 << 10
"""Of a conversation that is tokenized here, whatever its words are."""

FEW_BYTES_IN_WORDS: Final = 128 << 10

MAX_SEARCHED: Final = 1 << 24
"""Characters of a ``prompt`` of speech times its ``<``. Qwen3-ASR looks through it anew for each
token of a chat within another: 400 KB of ``<asr_te`` stopped the event loop for 21 s."""

_SERVINGS: Final = ("openai_serving_transcription", "openai_serving_translation")

_MAX_BYTES: Final = "max_audio_decode_bytes"
_SETTINGS: Final = (_MAX_BYTES, "max_audio_decode_duration_s", "asr_config")
"""Attributes of a serving object with which vLLM decodes and cuts a sound."""

Vllms: TypeAlias = Any
"""An object of vLLM's: a request, its tokenizer, a prompt."""


def limit_speech(app: FastAPI, loader: MediaLoader) -> None:
    """Decode speech within the limits on media, in watched threads."""
    for name in _SERVINGS:
        if (serving := getattr(app.state, name, None)) is None:
            continue
        serving._preprocess_executor.shutdown(wait=False)
        serving._preprocess_executor = WatchedThreads(
            "speech", envs.VLLM_MAX_AUDIO_PREPROCESS_WORKERS, loader.policy.decode_timeout_s
        )
        serving._decode_and_chunk_speech_async = partial(_decode_speech, serving, loader)
        if _lacks_languages(serving):
            serving._detect_language = _refuse_detection


async def _decode_speech(serving: Vllms, loader: MediaLoader, sound: bytes) -> Vllms:
    """Return a sound in pieces and its seconds. Raises VLLMError for a sound that is refused."""
    load = partial(_chunked, type(serving), {name: getattr(serving, name) for name in _SETTINGS})
    try:
        with blaming_a_lack_of_files():
            return await loader.decode_speech(sound, load, serving._preprocess_executor)
    except MediaError as error:
        raise for_user(error, "the file") from error
    except OverloadedError as error:
        raise as_vllm_error(error) from error


def _chunked(serving: Vllms, settings: Mapping[str, Vllms], data: bytes, max_bytes: int) -> Vllms:
    """Call a serving class's method for an object of these settings, in any process."""
    most = min(max_bytes, settings[_MAX_BYTES])
    return serving._decode_and_chunk_speech(SimpleNamespace(**{**settings, _MAX_BYTES: most}), data)


def _lacks_languages(serving: Vllms) -> bool:
    """Return whether a model detects languages by tokens that its tokenizer does not have."""
    model: Vllms = getattr(serving, "model_cls", None)
    if not getattr(model, "supports_explicit_language_detection", False):
        return False
    tokens = model.get_language_token_ids(serving.tokenizer)
    return not {None, serving.tokenizer.unk_token_id}.isdisjoint(tokens)


async def _refuse_detection(audio: Vllms, request_id: str) -> str:
    raise VLLMValidationError(
        "this model can't detect the language of a sound: set language to its ISO 639-1 code, "
        "for example en",
        parameter="language",
    )


def prompt_speech_aside(app: FastAPI, tokenizing: Tokenizing) -> None:
    """Make prompts of speech in a thread: models tokenize them on the event loop, for each piece of
    a sound anew. Those that detect languages leave it to the renderer.
    """
    for name in _SERVINGS:
        serving = getattr(app.state, name, None)
        model: Vllms = getattr(serving, "model_cls", None)
        if serving and not getattr(model, "supports_explicit_language_detection", False):
            serving._preprocess_speech_to_text = partial(_prompt_speech, serving, tokenizing)


async def _prompt_speech(
    serving: Vllms, tokenizing: Tokenizing, request: Vllms, audio_data: bytes, request_id: str
) -> Vllms:
    """Return the inputs, seconds and starts of the pieces, as vLLM does."""
    texts = [request.prompt or "", getattr(request, "hotwords", None) or ""]
    tokenizing.check_length(*texts)
    if any(len(text) * text.count("<") > MAX_SEARCHED for text in texts):
        error = RequestRejectedError("`prompt` or `hotwords` has too many `<` for its length")
        raise as_vllm_error(error)
    pieces, seconds = await serving._decode_and_chunk_speech_async(audio_data)
    make = type(serving)._preprocess_speech_to_text
    prompts, starts = [], [0.0]
    try:
        for piece in pieces:
            alone = copy(serving)
            alone._decode_and_chunk_speech_async = partial(_same, ([piece], 0.0))
            alone.renderer = SimpleNamespace(render_cmpl_async=_same)
            work = partial(make, alone, request, b"", request_id)
            prompts += (await tokenizing.aside(partial(_run, work)))[0]
            starts.append(starts[-1] + piece.shape[-1] / serving.asr_config.sample_rate)
    finally:
        cached_encode.cache_clear()  # Qwen3-ASR's: 2,048 prompts, of up to 20 MB each
    return await serving.renderer.render_cmpl_async(prompts), seconds, starts[:-1]


def _run(work: Callable[[], Coroutine[Vllms, Vllms, Vllms]]) -> Vllms:
    return asyncio.run(work())


async def _same(value: Vllms, *_: Vllms) -> Vllms:
    return value


def tokenize_scores_aside(
    app: FastAPI, tokenizing: Tokenizing, check_tokens: Callable[[int], None]
) -> None:
    """Tokenize for generative scoring in a thread, not on the event loop. ``check_tokens`` raises
    RequestRejectedError for more tokens than one request may have workers compute.
    """
    serving = getattr(app.state, "serving_generative_scoring", None)
    if serving is None:
        return
    build = serving._build_prompts

    async def build_aside(asked: Vllms, tokenizer: Vllms, max_model_len: int) -> Vllms:
        query, items = asked.query, asked.items
        tokenizing.check_length(*(text for text in (query, *items) if isinstance(text, str)))
        try:
            if isinstance(query, str):
                special = asked.add_special_tokens
                encode = partial(tokenizer.encode, query, add_special_tokens=special)
                query = await tokenizing.aside(encode)
                asked = asked.model_copy(update={"query": query})
            check_tokens(len(query) * len(items))  # or lists of a million tokens would be joined
            made = await tokenizing.aside(
                lambda: asyncio.run(build(asked, tokenizer, max_model_len))
            )
            check_tokens(sum(made[1]))
        except RequestRejectedError as error:
            raise as_vllm_error(error) from error
        return made

    serving._build_prompts = build_aside


def tokenize_decisions_aside(app: FastAPI, tokenizing: Tokenizing) -> None:
    """Tokenize in a thread what some models decide on, where vLLM does so on the event loop."""
    for serving in [*vars(app.state)["_state"].values()]:
        strategy: Vllms = getattr(serving, "strategy", None)
        if hasattr(strategy, "_tokens") and "read" not in vars(strategy):  # two may share it
            strategy.read = partial(_decide, strategy, tokenizing)


async def _decide(
    strategy: Vllms,
    tokenizing: Tokenizing,
    questions: Vllms,
    instructions: str | None,
    state: str,
    media: Vllms = None,
    **options: Vllms,
) -> Vllms:
    asked = [text for each in questions for text in (each.instructions, *_strings(_options(each)))]
    tokenizing.check_length(state, *asked)
    once, alone = cache(strategy._tokens), copy(strategy)
    alone._tokens = lambda text: [*once(text)]  # vLLM appends to one
    if hasattr(alone, "encode"):
        await tokenizing.aside(partial(alone.encode, questions, state))
    else:
        for text in await tokenizing.aside(partial(_prompts, alone, questions, state, media or {})):
            await tokenizing.aside(partial(once, text))
    return await type(strategy).read(alone, questions, instructions, state, media=media, **options)


def _options(question: Vllms) -> list[list[str | None]]:
    return [[option.name, option.description] for option in question.options]


def _prompts(strategy: Vllms, questions: Vllms, state: str, media: Vllms) -> list[str]:
    """Return the texts that D3 tokenizes: what precedes the end of the media, and what follows."""
    shown = [kind for kind in ("image", "video") for _ in media.get(kind, ())]
    prompts = [strategy._prompt(state, question, shown) for question in questions]
    if not shown:
        return prompts
    split = prompts[0].rindex(strategy.VISION_END) + len(strategy.VISION_END)
    return [prompts[0][:split], *(prompt[split:] for prompt in prompts)]


def tokenize_harmony_aside(app: FastAPI) -> None:
    """Render conversations for gpt-oss in a thread, where vLLM does so on the event loop."""
    chats = app.state.online_renderer
    if chats.use_harmony:
        for name in ("render_chat", "render_responses"):
            setattr(chats, name, partial(_render_aside, getattr(chats, name)))


async def _render_aside(
    render: Callable[..., Coroutine[Any, Any, Vllms]], *args: Vllms, **options: Vllms
) -> Vllms:
    async def work() -> Vllms:
        encoding = harmony_utils.get_encoding()  # before any fork, which would load it again
        if (name := "render_conversation_for_completion") not in vars(encoding):
            vars(encoding)[name] = partial(tokens_of_harmony, getattr(encoding, name))
        return await render(*args, **options)

    return await aside(work())


def tokens_of_harmony(
    encode: Callable[..., list[int]], conversation: Vllms, *args: Vllms, **options: Vllms
) -> list[int]:
    """Tokenize in a fork what may take long. Raises VLLMError if it takes too long there too."""
    texts = list(_strings(conversation.to_dict()))
    length = sum(len(text.encode()) for text in texts)
    in_words = length <= FEW_BYTES_IN_WORDS and not any(map(LONG_WORD.search, texts))
    if length <= FEW_BYTES or in_words:
        return encode(conversation, *args, **options)
    said = forked(None, lambda _: pickle.dumps(encode(conversation, *args, **options)), BOUNDS)
    if not said:
        error = RequestRejectedError(
            f"the conversation takes more than {BOUNDS.cpu_s} s of a core to be tokenized: send "
            "fewer characters, or put spaces into words of thousands of characters"
        )
        raise as_vllm_error(error)
    tokens: list[int] = pickle.loads(said)
    return tokens


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def write_tokens_aside(app: FastAPI) -> None:
    """Write tokens, and their texts, for which ``/tokenize`` can be asked, as its answer is sent:
    760,000 texts kept the event loop for 0.5 seconds, and three million tokens for 1.7.
    """
    serving = app.state.serving_tokenization
    create = serving.create_tokenize

    async def create_aside(asked: Vllms, raw_request: Vllms) -> Vllms:
        parts = current_context().find(DeferredParts)
        if parts is None:
            return await create(asked, raw_request)
        answer = await create(asked.model_copy(update={"return_token_strs": False}), raw_request)
        if (tokens := getattr(answer, "tokens", None)) is None:
            return answer

        def defer(stand_in: Vllms, made: Callable[[slice], Vllms]) -> Vllms:
            pieces = entries(len(tokens), made, _TOKENS_AT_ONCE)
            parts.add(stand_in, chain([b"["], pieces, [b"]"]))
            return stand_in

        if asked.return_token_strs:
            convert = serving.renderer.get_tokenizer().convert_ids_to_tokens
            answer.token_strs = defer([secrets.token_hex(16)], lambda part: convert(tokens[part]))
        if len(tokens) > _TOKENS_AT_ONCE:
            answer.tokens = defer([secrets.randbits(64)], tokens.__getitem__)
        return answer

    serving.create_tokenize = create_aside


def describe_aside(app: FastAPI) -> None:
    """Make what ``/openapi.json`` says in a thread, when it is first asked for: FastAPI would on
    the event loop, for more than a second.
    """
    routes: list[Vllms] = [*app.routes]
    for route in routes:
        if route.path == app.openapi_url:
            route.app = _after(app.openapi, route.app)


def _after(work: Callable[[], object], answer: App) -> App:
    """Return an app that answers when some work is done, which is nothing from the second time."""
    one = asyncio.Lock()

    async def answer_after(scope: Scope, receive: Receive, send: Send) -> None:
        async with one:
            await asyncio.to_thread(work)
        await answer(scope, receive, send)

    return answer_after
