"""What a medium's placeholder in a prompt is, in a word that two processes can compare."""

from array import array
from collections.abc import Sequence

from blake3 import blake3


def placeholder_digest(token_ids: Sequence[int], is_embed: bytes | None) -> str:
    """Equal for equal placeholders.

    Args:
        token_ids: of the placeholder.
        is_embed: one byte (0 or 1) for each of them; None for all ones.
    """
    hasher = blake3(array("q", token_ids).tobytes())
    hasher.update(is_embed if is_embed is not None else bytes([1]) * len(token_ids))
    return hasher.hexdigest()
