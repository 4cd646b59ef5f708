"""What a worker says of a rank."""

from common.request_plane.step_sums import RankStatus


def rank_report(
    rank: int = 0,
    *,
    active: int = 0,
    waiting: int = 0,
    prefill_tokens: int = 0,
    decode_tokens: int = 0,
    kv_usage: float = 0.0,
) -> RankStatus:
    """The requests in its queue, the use of its KV cache, and what others have there."""
    return RankStatus(rank, 0, waiting, kv_usage, active, prefill_tokens, decode_tokens)
