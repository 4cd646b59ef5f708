"""Whatever stands where a part has its content: vLLM's code can read it, or it is a 400."""

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker

from common.vllm_compat.features import reader_of_parts
from common.vllm_compat.renderer_patches import free_media_of_messages
from frontend.http.limits import content_parts
from frontend.http.limits.content_parts import WANTED, parse

WRONG: list[Any] = [
    True, 7, 1.5, -1, 10**300, [], ["x"], [None], [{}], [[]],
    {}, {"x": 1}, {"url": 7}, {"url": ["x"]}, {"data": 7}, {"data": ["x"], "format": "wav"},
]  # fmt: skip
GOOD: dict[str, Any] = {
    "audio_embeds": "AAAA",
    "audio_url": {"url": "http://x"},
    "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": "AAAA"},
    "image_url": {"url": "http://x"},
    "input_audio": {"data": "AAAA", "format": "wav"},
    "input_image": "http://x",
    "input_text": "x",
    "output_text": "x",
    "prompt_embeds": "AAAA",
    "refusal": "x",
    "text": "x",
    "thinking": "x",
    "tool_reference": "x",
    "video_embeds": "AAAA",
    "video_url": {"url": "http://x"},
}
FIELDS = {
    "input_image": "image_url",
    "input_text": "text",
    "output_text": "text",
    "prompt_embeds": "data",
    "tool_reference": "name",
}
"""Of kinds whose content has another name than they."""


def part(kind: str, content: Any) -> dict[str, Any]:
    extra = {"detail": "auto"} if kind == "input_image" else {}
    return {"type": kind, FIELDS.get(kind, kind): content, **extra}


def odd_parts() -> Iterator[tuple[str, Any]]:
    """Of every kind with everything that is wrong, as a part of its kind, with a name of the
    medium, and without a kind."""
    for kind in WANTED:
        for content in WRONG:
            whole = part(kind, content)
            bare = {name: value for name, value in whole.items() if name != "type"}
            for odd in (whole, whole | {"uuid": "u"}, bare, bare | {"uuid": 7}):
                yield json.dumps(odd), odd


@pytest.mark.parametrize(
    "odd", [odd for _, odd in odd_parts()], ids=[name for name, _ in odd_parts()]
)
def test_what_is_wrong_is_named_or_is_nothing_more_than_odd(odd: dict[str, Any]) -> None:
    try:
        kind, content = parse(odd)
    except (VLLMValidationError, ValidationError):  # which are answered 400
        return
    wanted = WANTED.get(kind)
    assert content is None or wanted is None or wanted.fits(content)


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_right_is_read_as_vllm_reads_it(kind: str) -> None:
    good = part(kind, GOOD[kind])
    assert parse(good) == content_parts._parse(good)


@pytest.mark.parametrize("kind", GOOD)
def test_a_part_with_nothing_in_it_is_not_left_out(kind: str) -> None:
    with pytest.raises((VLLMValidationError, ValidationError)):
        parse({"type": kind})
    with pytest.raises((VLLMValidationError, ValidationError)):
        parse(part(kind, None))


def test_media_may_go_by_their_name() -> None:
    assert parse({"type": "image_url", "image_url": None, "uuid": "u"}) == ("image_url", None)


def test_a_sentence_names_kind_and_type() -> None:
    for odd, said in (
        (
            part("input_audio", "x"),
            "`input_audio` of a content part has to be an object with `data`",
        ),
        ({"video_url": ["x"]}, "`video_url` .* has to be a URL, as a string, and is a list"),
        (part("image_embeds", {"x": 1}), "base64, or an object of such strings, and is another"),
        ({"image_pil": "http://x"}, "`image_pil` .* left out: send `image_url`"),
        ({"type": "input_image", "file_id": "f"}, "`file_id`, and no files are stored here"),
    ):
        with pytest.raises(VLLMValidationError, match=said):
            parse(odd)


def test_a_picture_that_a_tool_gave_needs_no_detail() -> None:
    assert parse({"type": "input_image", "image_url": "http://x"}) == ("input_image", "http://x")


def test_a_medium_may_go_by_its_name_alone() -> None:
    for kind in ("image_url", "audio_url", "video_url", "image_embeds", "input_audio"):
        assert parse({kind: None, "uuid": "known"}) == (kind, None)


def test_every_kind_of_vllms_was_thought_about(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = reader_of_parts()
    assert set(WANTED) == set(module.MM_PARSER_MAP)
    monkeypatch.setattr(module, name, content_parts._parse)
    content_parts.install()
    assert vars(module)[name] is parse


def test_media_of_messages_are_free_as_soon_as_they_are_parsed() -> None:
    """Their data URLs, of 40 MB, stayed until garbage was collected."""
    free_media_of_messages()
    free_media_of_messages()  # with each model
    gc.disable()
    try:
        tracker = AsyncMultiModalItemTracker(Mock())
        parser: Any = tracker.create_parser(mm_processor_kwargs=None)
        tracker._items_by_modality["image"].append(parser._image_with_uuid_async)
        assert parser.model_config is tracker.model_config
        freed = weakref.ref(tracker)
        del tracker, parser
        assert freed() is None
    finally:
        gc.enable()
