"""Reject bodies for their content before vLLM validates them, in one pass and without I/O.

The cost grows with the values of a body, not with what is wrong with them.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from common.errors import RequestRejectedError
from frontend.gate.fields import (
    FIELDS,
    INPUTS,
    MAX_FIELDS,
    MESSAGES,
    NESTED,
    OF_EACH_PROMPT,
    RESULTS,
    TEMPLATE_OPTIONS,
    TOKENS,
    UNKNOWN,
    Limit,
)

NOT_FROM_CLIENTS: Final = "image_pil"
"""Type and key of a content part that holds a Pillow image. JSON can't hold one, and an image
processor would take a string in its place for a URL to fetch or a file to open."""

RENDERER_OPTIONS: Final = frozenset(
    {
        "conversation", "load_audio_from_video", "max_length", "messages", "model_config",
        "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict",
        "return_tensors", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip
"""Parameters of ``apply_chat_template`` itself, which vLLM lets a request set. They make a prompt
of any length, or of messages that were not judged. Templates have none of these."""

PROCESSOR_INPUTS: Final = frozenset(
    {
        "audio", "audios", "image", "images", "images_kwargs", "raw_speech", "text", "text_pair",
        "text_target", "video", "videos", "videos_kwargs",
    }
)  # fmt: skip
"""Parameters by which a Hugging Face processor takes media. It would fetch or open a string."""

_NAMES_REFUSED: Final[Mapping[str, frozenset[str]]] = {
    "chat_template_kwargs": RENDERER_OPTIONS,
    "mm_processor_kwargs": PROCESSOR_INPUTS,
}

MAX_LABELS: Final = 1 << 16
"""Probabilities that one request for scores may ask for: labels times items."""

MAX_SHARED: Final = 1 << 22
"""Weight of the parts that the prompts of a request share, times the prompts. vLLM reads them again
for each prompt, on the event loop: 0.7 MB of ``logit_bias`` for 1,024 prompts took 26 seconds."""

MAX_COPIED: Final = 1 << 27
"""The same weight times choices. A worker copies these parts for each: 130,000
``allowed_token_ids`` with a thousand choices, in 400 KB, took its event loop 2.3 seconds."""

MAX_SAMPLED: Final = 1 << 20
"""Tokens that samplers read for each choice, times choices. Whenever a choice joins or leaves, an
engine reads those of all choices again in Python: 92,000 biases of 64 choices took 1.2 seconds."""

_SAMPLED: Final[Mapping[str, int]] = MappingProxyType(
    {"allowed_token_ids": 1, "bad_words": 128, "logit_bias": 1, "stop_token_ids": 1}
)
"""Weights of the entries of these fields. A word is compared at each token: 256 of them with 512
choices took an engine 0.8 seconds between two steps."""

MAX_TOKEN_ID: Final = (1 << 18) + (1 << 15)
"""Beyond any vocabulary. The hash of an integer is the integer modulo 2**61 - 1, so a client could
choose ids that dicts and sets take quadratic time for, before vLLM compares them with a vocabulary:
20,000 ids with the hash 0, in 0.5 MB, took the event loop 10 s. Ids below 2**20 can still follow
each other through a table: 55,000 of them took 2.2 s, and up to here 45,000 take 0.3 s."""

MAX_STREAM_INTERVAL: Final = 64
"""Tokens of one event, which parsers read at once on the event loop, and of which a stream's limit
on parsing looks at the time only afterwards. 768 characters that open 96 objects take gemma4's 0.9
seconds, and 192 at a time half of that, when the stream ends; a whole 1.5 KB would take 4."""

MAX_BEAM_CANDIDATES: Final = 1 << 17
"""Log probabilities that a beam search looks at: twice as many as beams, for each token of each.
The later limit on log probabilities would reject more, but after half a minute."""

MAX_REPEATED: Final = 1 << 24
"""Characters of a request times the choices that repeat its prompt (:data:`_REPEATING`). With
``return_token_ids`` one counts as eight: 8 million tokens took the event loop 0.84 seconds."""

_REPEATING: Final = ("echo", "return_token_ids", "return_prompt_text")

MAX_ASKED: Final = 1 << 23
"""Characters of a request times its ``questions``, for each of which vLLM makes a prompt with all
that they are about. Then it compares the tokens of these prompts on the event loop."""

MAX_COMPARED: Final = 1 << 20
"""Tokens that an engine compares to find repetitions (``repetition_detection``) after each token of
each choice, between two steps of all its requests: up to 50 ms. Patterns of 8,000 took seconds."""

MAX_RENDERED: Final = 1 << 28
"""Characters of ``chat_template_kwargs`` times the values of messages. Templates write variables
such as ``eos_token`` for each message: 0.9 MB became 1.7 GB, and stopped the event loop for 2.5 s.
"""

_MAX_TEXT_FOR_LIST: Final = 8192
"""Characters of a text where a list belongs, which vLLM refuses."""

_LENGTHS: Final = ("max_completion_tokens", "max_tokens")

MAX_LENGTH_PENALTY: Final = 32.0
"""Exponent by which a beam search weighs lengths. Powers of larger ones are no numbers."""

VALUE_WEIGHT: Final = 16
"""Weight of a value, in characters: one of a JSON schema takes as long as so many."""

_QUERIES: Final = frozenset({"data_1", "queries", "query", "text_1"})
"""Fields of which a request to score documents has one."""

_MEDIA: Final = frozenset(
    {"audio_url", "image_url", "input_audio", "prompt_embeds", "source", "video_url"}
)
"""Keys of content parts whose data are no characters of a prompt."""

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""Types of list entries that need no individual check: tokens come by the million."""

Body = Mapping[str, Any]


def judge(body: object, max_choices: int) -> None:
    """Raise RequestRejectedError, with the field and its limit, unless a body may be validated."""
    if isinstance(body, dict):
        _judge_fields(body, max_choices, nested=False)
    else:
        _measure("the body", body, UNKNOWN)


def _judge_fields(body: Body, max_choices: int, *, nested: bool) -> None:
    if len(body) > MAX_FIELDS:
        raise RequestRejectedError(f"the body has more than {MAX_FIELDS} fields")
    unknown, shared, parts, variables = {}, 0, 0, 0
    for name, value in body.items():
        if name in NESTED and not nested and isinstance(value, dict):
            _judge_fields(value, max_choices, nested=True)
        elif (limit := FIELDS.get(name)) is None:
            unknown[name] = value
        else:
            if name == "messages" and isinstance(value, str) and len(value) > _MAX_TEXT_FOR_LIST:
                # vLLM looks at each character as at a message: 60 MB take the event loop 3.6 s.
                raise RequestRejectedError("`messages` must be a list")
            limit = _by_content(limit, value)
            characters, values = _measure(f"`{name}`", value, limit)
            if limit in OF_EACH_PROMPT:
                shared += characters + VALUE_WEIGHT * values
            elif limit is MESSAGES:
                parts += values
            if limit is TEMPLATE_OPTIONS:
                variables += characters
            if limit is TOKENS and isinstance(value, list | dict):
                _refuse_far_ids(f"`{name}`", value)
            refused = _NAMES_REFUSED.get(name)
            if refused is not None and isinstance(value, dict):
                _refuse_names(name, value, refused)
    if unknown:
        _measure("what vLLM does not know of the body", unknown, UNKNOWN)
    if parts > MESSAGES.values:
        raise RequestRejectedError(f"messages and inputs have more than {MESSAGES.values} values")
    if variables * parts > MAX_RENDERED:
        raise RequestRejectedError(
            f"`chat_template_kwargs` has more than {MAX_RENDERED} characters when they are counted "
            "with each value of the messages: send fewer"
        )
    _judge_cost(body, max_choices, shared)


def _by_content(limit: Limit, value: object) -> Limit:
    """Return the limit: inputs may be millions of tokens, but objects in them are like messages."""
    objects = isinstance(value, dict) or (isinstance(value, list) and dict in set(map(type, value)))
    return MESSAGES if limit is INPUTS and objects else limit


def _refuse_names(field: str, value: Body, names: frozenset[str]) -> None:
    if given := sorted(names & value.keys()):
        raise RequestRejectedError(f"`{field}` must not have {given[0]!r}")


def _refuse_far_ids(what: str, tokens: Iterable[Any]) -> None:
    if isinstance(tokens, list) and set(map(type, tokens)) == {int}:
        tokens = min(tokens), max(tokens)  # a fifth of the time
    for token in tokens:
        try:
            far = abs(int(token)) > MAX_TOKEN_ID
        except (OverflowError, TypeError, ValueError):
            continue  # vLLM refuses it
        if far:
            raise RequestRejectedError(f"{what} has a token id that no vocabulary has")


def _measure(what: str, value: object, limit: Limit) -> tuple[int, int]:
    """Return the characters and values of a value. Iterative, and ends beyond the limit."""
    if isinstance(value, list | dict):
        if limit.depth == 0:
            raise RequestRejectedError(f"{what} must not be a list or an object")
        if len(value) > limit.items:
            raise RequestRejectedError(f"{what} has {len(value)} entries, more than {limit.items}")
    characters = values = 0
    level: list[Any] = [value]
    for _ in range(limit.depth + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                characters += len(each)
            elif isinstance(each, dict):
                if each.get("type") == NOT_FROM_CLIENTS or NOT_FROM_CLIENTS in each:
                    raise RequestRejectedError(
                        f"{what} has a part of type {NOT_FROM_CLIENTS!r}: send 'image_url'"
                    )
                values += len(each)
                characters += sum(map(len, each))
                if limit is RESULTS:  # log probabilities are by token id
                    _refuse_far_ids(what, (key for key in each if not key[:1].isalpha()))
                inner.extend(each.values())
            elif isinstance(each, list):
                values += len(each)
                if not _NUMBERS.issuperset(map(type, each)):
                    inner.extend(each)
            if values > limit.values:
                raise RequestRejectedError(f"{what} has more than {limit.values} values")
        if limit.characters is not None and characters > limit.characters:
            raise RequestRejectedError(f"{what} has more than {limit.characters} characters")
        level = inner
    if level:
        raise RequestRejectedError(f"{what} is nested deeper than {limit.depth} levels")
    return characters, values


def _judge_cost(body: Body, max_choices: int, shared: int) -> None:
    prompts = _prompts(body)
    choices = _number(body.get("n")) * prompts
    if choices > max_choices:
        raise RequestRejectedError(
            f"the request asks for {choices} choices (`n` times its prompts, conversations or "
            f"items), more than the {max_choices} of --max-choices: send several requests"
        )
    if _number(body.get("stream_interval")) > MAX_STREAM_INTERVAL:
        raise RequestRejectedError(f"`stream_interval` is more than {MAX_STREAM_INTERVAL}")
    if choices > 1 and shared * choices > MAX_COPIED:
        raise RequestRejectedError(
            f"what the {choices} choices share (stop words, tokens, options or structures) has "
            f"more than {MAX_COPIED} characters when each of them is counted with it, and a value "
            f"as {VALUE_WEIGHT}: ask for fewer with `n`"
        )
    sampled = sum(weight * _entries(body.get(name)) for name, weight in _SAMPLED.items())
    if choices > 1 and sampled * choices > MAX_SAMPLED:
        raise RequestRejectedError(
            f"{', '.join(f'`{name}`' for name in _SAMPLED)} have more than {MAX_SAMPLED} entries "
            f"when each of the {choices} choices is counted with them, and a word as "
            f"{_SAMPLED['bad_words']}: ask for fewer with `n`"
        )
    asked = body.get("questions")
    questions = _entries(asked) or 1
    if questions > 1 and _size(body) * questions > MAX_ASKED:
        raise RequestRejectedError(
            f"the request has more than {MAX_ASKED} characters when all are counted with each of "
            f"its {questions} `questions`: send several requests"
        )
    sharing = max(prompts, questions, _pairs(body))
    if sharing > 1 and shared * sharing > MAX_SHARED:
        raise RequestRejectedError(
            f"what the {sharing} prompts, conversations or documents share (stop words, options, "
            f"tools or structures) has more than {MAX_SHARED} characters when each of them is "
            f"counted with it, and a value as {VALUE_WEIGHT}: send several requests"
        )
    _judge_beams(body)
    if choices > 1 and any(map(body.get, _REPEATING)):
        _judge_repeated(body)
    if isinstance(detection := body.get("repetition_detection"), dict):
        longest = _number(detection.get("max_pattern_size"))
        if longest * longest * _number(detection.get("min_count")) * choices > MAX_COMPARED:
            raise RequestRejectedError(
                "`max_pattern_size` of `repetition_detection`, squared and times `min_count` and "
                f"the choices, is more than {MAX_COMPARED}: look for shorter patterns"
            )
    labels, items = body.get("label_token_ids"), body.get("items")
    if not isinstance(labels, list) or not isinstance(items, list):
        return
    if len(labels) * len(items) > MAX_LABELS:
        raise RequestRejectedError(
            f"`label_token_ids` times `items` is more than {MAX_LABELS}: send several requests"
        )


def _judge_beams(body: Body) -> None:
    if _is_beyond(body.get("length_penalty"), MAX_LENGTH_PENALTY):
        raise RequestRejectedError(f"`length_penalty` is beyond {MAX_LENGTH_PENALTY:g}")
    if not body.get("use_beam_search"):
        return
    if _beam_candidates(body) > MAX_BEAM_CANDIDATES:
        raise RequestRejectedError(
            f"`use_beam_search` with this `n` and `max_tokens` has more than {MAX_BEAM_CANDIDATES} "
            "log probabilities: ask for fewer choices or tokens"
        )
    if 0 in map(body.get, _LENGTHS):
        # Of an empty prompt vLLM has no last token, and no engine would refuse the prompt.
        raise RequestRejectedError("`use_beam_search` needs `max_tokens` of 1 at least")


def _judge_repeated(body: Body) -> None:
    choices, weight = _number(body.get("n")), 8 if body.get("return_token_ids") else 1
    if choices > 1 and _size(body) * choices * weight > MAX_REPEATED:
        raise RequestRejectedError(
            "the choices repeat the prompt (`echo`, `return_token_ids`, `return_prompt_text`) too "
            "often for its length: ask for fewer with `n`, or leave the option out"
        )


def _size(value: object) -> int:
    """Count characters and tokens, without media, of a value whose levels were counted."""
    if isinstance(value, dict):
        return sum(_size(each) for name, each in value.items() if name not in _MEDIA)
    if isinstance(value, list):
        few = _NUMBERS.issuperset(map(type, value))
        return len(value) if few else sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def _beam_candidates(body: Body) -> int:
    beams = _number(body.get("n"))
    # Which of them counts depends on the route.
    tokens = max(map(_number, map(body.get, _LENGTHS)))
    return _prompts(body) * tokens * beams * (2 * beams + 1)


def _prompts(body: Body) -> int:
    """Count the prompts to generate for: a list of prompts, of conversations or of items."""
    embeds = body.get("prompt_embeds")  # in a list they are prompts beside those of `prompt`
    further = len(embeds) if isinstance(embeds, list) else 0
    several = (
        _length_of(body.get("prompt"), (str, list)) + further,
        _length_of(body.get("messages"), (list,)),
        _length_of(body.get("items"), (str, list)) if "label_token_ids" in body else 1,
    )
    return max(several)


def _pairs(body: Body) -> int:
    """Count the documents to score with a query."""
    if not _QUERIES & body.keys():
        return 1
    return max(
        _length_of(body.get(name), (str, dict)) for name in ("documents", "text_2", "data_2")
    )


def _entries(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _length_of(value: object, kinds: tuple[type, ...]) -> int:
    if isinstance(value, list) and value and isinstance(value[0], kinds):
        return len(value)
    return 1


def _number(value: object) -> int:
    """Read ``n`` as pydantic does: a number, or a text of one; 1 if vLLM will refuse it."""
    if isinstance(value, int | float | str):
        try:
            return max(1, int(float(value)))
        except (ValueError, OverflowError):
            return 1
    return 1


def _is_beyond(value: object, most: float) -> bool:
    """Return whether a number, or a text of one, is not within plus or minus ``most``."""
    try:
        return isinstance(value, int | float | str) and not -most <= float(value) <= most
    except (ValueError, OverflowError):
        return False  # vLLM refuses it
