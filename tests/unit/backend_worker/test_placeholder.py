"""The place of a media item in a prompt, on its way to the engine."""

from backend_worker.engine.calls import _placeholder
from common.identity import MmHash
from common.request_plane.protocol import MediaPart


def test_a_placeholder_with_holes_keeps_them() -> None:
    """Some models write words between the tokens of one video."""
    holes = bytes([1, 1, 0, 0, 1, 0, 1])
    placeholder = _placeholder(MediaPart("video", MmHash("v"), 3, len(holes), holes))
    assert (placeholder.offset, placeholder.length) == (3, 7)
    assert placeholder.is_embed.tolist() == [bool(one) for one in holes]
    assert placeholder.get_num_embeds() == 4


def test_a_placeholder_without_holes_needs_no_mask() -> None:
    placeholder = _placeholder(MediaPart("image", MmHash("i"), 0, 4, None))
    assert placeholder.is_embed is None and placeholder.get_num_embeds() == 4
