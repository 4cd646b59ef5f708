"""Contents of message parts that have the wrong type: a 400 with a sentence.

vLLM takes what a part says as it is where the part has a ``uuid`` or no ``type``, and what sounds
and embeddings say always. A list or a number there became a 500, somewhere in a media loader.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from vllm.exceptions import VLLMValidationError

from common.vllm_compat.features import reader_of_parts

_MODULE, _NAME = reader_of_parts()
_parse: Final = vars(_MODULE)[_NAME]


class Wanted(NamedTuple):
    """What a part may have.

    Attributes:
        words: for a sentence.
        fits: whether a content is one; None never comes here, since media may go by their name.
    """

    words: str
    fits: Callable[[object], bool]


def _is_text(content: object) -> bool:
    return isinstance(content, str)


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
    "image_pil": Wanted("left out: send `image_url`", lambda _: False),  # no JSON is one
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
"""By the kinds of parts that vLLM knows."""


def install() -> None:
    """Let all messages of this process be looked at so, whatever route they come by."""
    vars(_MODULE)[_NAME] = parse


def parse(part: Any) -> tuple[str, Any]:
    """Return kind and content of a part, as vLLM does.

    Raises:
        VLLMValidationError: the content has the wrong type.
    """
    if part.get("type") == "input_image":
        part = {"detail": "auto", **part}  # OpenAI's API has a default, and the type here none
    kind, content = _parse(part)
    wanted = WANTED.get(kind)
    if wanted is None:
        return kind, content
    if content is None and (wanted is _TEXT or part.get("uuid") is None):
        # Media may go by their name. vLLM leaves other parts out, and says so on its log alone.
        raise VLLMValidationError(
            f"a content part of type `{kind}` has no content", parameter="messages"
        )
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
