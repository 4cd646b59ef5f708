"""Reject message parts whose content has the wrong type, with a 400 and a sentence.

vLLM does not check contents of parts with a ``uuid`` or without a ``type``, nor those of sounds and
embeddings. A list or a number there became a 500, in a media loader.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from vllm.exceptions import VLLMValidationError

from common.vllm_compat.features import reader_of_parts

_MODULE, _NAME = reader_of_parts()
_parse: Final = vars(_MODULE)[_NAME]


class Wanted(NamedTuple):
    """Content that a part may have. ``fits`` never gets None, since media may go by their uuid."""

    words: str
    fits: Callable[[object], bool]


def _is_text(content: object) -> bool:
    return isinstance(content, str)


def _is_medium(content: object) -> bool:
    return not isinstance(content, (str, int, float, list, Mapping))


def _is_sound(content: object) -> bool:
    # Its format is no more than part of a data URL.
    return isinstance(content, Mapping) and _is_text(content.get("data"))


def _is_embeddings(content: object) -> bool:
    return _is_text(content) or (
        isinstance(content, Mapping) and bool(content) and all(map(_is_text, content.values()))
    )


_ADDRESS: Final = Wanted("a URL, as a string", _is_text)
_EMBEDDINGS: Final = Wanted("a string in base64, or an object of such strings", _is_embeddings)
_TEXT: Final = Wanted("a string", _is_text)

WANTED: Final[Mapping[str, Wanted]] = {
    "audio_embeds": _EMBEDDINGS,
    "audio_url": _ADDRESS,
    "image_embeds": _EMBEDDINGS,
    # vLLM's routes for decisions make such parts, of decoded or deferred media. No JSON is one.
    "image_pil": Wanted("left out: send `image_url`", _is_medium),
    "image_url": _ADDRESS,
    "input_audio": Wanted("an object with `data`, a string in base64, and `format`", _is_sound),
    "input_image": _ADDRESS,
    "input_text": _TEXT,
    "output_text": _TEXT,
    "prompt_embeds": Wanted("a string in base64", _is_text),
    "refusal": _TEXT,
    "text": _TEXT,
    "thinking": _TEXT,
    "tool_reference": _TEXT,
    "video_embeds": _EMBEDDINGS,
    "video_url": _ADDRESS,
}
"""Contents of the part types that vLLM knows."""


def install() -> None:
    """Check all messages of this process, on any route."""
    vars(_MODULE)[_NAME] = parse


def parse(part: Any) -> tuple[str, Any]:
    """Return type and content of a part, as vLLM does. Raises VLLMValidationError."""
    if part.get("type") == "input_image":
        part = {"detail": "auto", **part}  # OpenAI's default, which vLLM's type lacks
    kind, content = _parse(part)
    wanted = WANTED.get(kind)
    if wanted is None:
        return kind, content
    if content is None and (wanted is _TEXT or part.get("uuid") is None):
        # Media may go by their uuid. vLLM would drop other parts, with no more than a log line.
        reason = "has no content"
        if part.get("file_id"):
            reason = "is named by `file_id`, and no files are stored here: send its content"
        raise VLLMValidationError(f"a content part of type `{kind}` {reason}", parameter="messages")
    if content is not None and not wanted.fits(content):
        raise VLLMValidationError(
            f"`{kind}` of a content part has to be {wanted.words}, and is {_named(content)}",
            parameter="messages",
        )
    return kind, content


def _named(content: object) -> str:
    if isinstance(content, Mapping):
        return "another object"
    if isinstance(content, list):
        return "a list"
    return f"of type {type(content).__name__}"
