"""``block_mm_infos`` says per block what vLLM says."""

from hypothesis import given
from hypothesis import strategies as st

from common.identity import MmIdentifier
from frontend.router.hashing.block_hasher import MediaSpan, block_mm_infos
from tests.unit.frontend.router.vllm_requests import media_spans, vllm_extra_keys, vllm_request

A, B = MmIdentifier("a"), MmIdentifier("b")


def test_a_prompt_without_media_has_empty_entries() -> None:
    assert block_mm_infos(10, 4, []) == [(), ()]


def test_a_continued_item_has_a_negative_offset() -> None:
    assert block_mm_infos(12, 4, [MediaSpan(A, 2, 8)]) == [((A, 2),), ((A, -2),), ((A, -6),)]


def test_an_item_that_ends_on_a_border_does_not_touch_the_next_block() -> None:
    assert block_mm_infos(8, 4, [MediaSpan(A, 1, 3)]) == [((A, 1),), ()]


def test_several_items_in_one_block() -> None:
    spans = [MediaSpan(A, 0, 1), MediaSpan(B, 2, 1), MediaSpan(A, 3, 2)]
    assert block_mm_infos(8, 4, spans) == [((A, 0), (B, 2), (A, 3)), ((A, -1),)]


def test_only_full_blocks_are_listed() -> None:
    assert block_mm_infos(7, 4, [MediaSpan(A, 4, 3)]) == [()]


def test_inside_overlapping_items_vllm_names_the_first_only() -> None:
    spans = [MediaSpan(A, 0, 8), MediaSpan(B, 1, 6)]
    assert block_mm_infos(8, 4, spans) == [((A, 0),), ((A, -4), (B, -3))]


@given(
    num_tokens=st.integers(0, 200),
    block_size=st.integers(1, 32),
    spans=media_spans(max_position=220, overlapping=False),
)
def test_equal_to_vllm_for_disjoint_items(
    num_tokens: int, block_size: int, spans: list[MediaSpan]
) -> None:
    infos = block_mm_infos(num_tokens, block_size, spans)
    assert infos == vllm_extra_keys(vllm_request([0] * num_tokens, spans), block_size)


@given(
    num_tokens=st.integers(0, 200),
    block_size=st.integers(1, 32),
    spans=media_spans(max_position=220, overlapping=True),
)
def test_equal_to_vllm_for_any_spans_at_all(
    num_tokens: int, block_size: int, spans: list[MediaSpan]
) -> None:
    infos = block_mm_infos(num_tokens, block_size, spans)
    assert infos == vllm_extra_keys(vllm_request([0] * num_tokens, spans), block_size)
