"""Load and step sums of an engine, as workers report them.

From the sums routers learn the prefill time of a prompt: a step with prompts is modelled as a
constant plus a cost per computed token. Least squares need only these sums, so steps are never
sent. Sums only grow, so the next message makes up for a lost one.
"""

from typing import Annotated, TypeAlias

import msgspec

Sum: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""Finite, not negative, and no more than years of steps add up to."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Requests or tokens: no more than any machine has."""

Fraction: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""From 0 to 1; neither infinite nor no number."""


class StepSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over steps with prompts of one rank's engine, since its start.

    Attributes:
        rank: by the card's numbers.
        steps: number of steps.
        tokens: prompt tokens prefilled and media tokens encoded.
        squares: sum over steps of the square of their tokens.
        ms: duration of the steps in milliseconds.
        products: sum over steps of tokens times milliseconds.
    """

    rank: Count
    steps: Sum = 0
    tokens: Sum = 0
    squares: Sum = 0
    ms: Sum = 0
    products: Sum = 0

    def plus(self, tokens: int, ms: float) -> "StepSums":
        return StepSums(
            self.rank,
            self.steps + 1,
            self.tokens + tokens,
            self.squares + tokens * tokens,
            self.ms + ms,
            self.products + tokens * ms,
        )


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    """Load of one rank: its engine over all frontends, and the share of the other frontends.

    The receiver adds its own requests, counted the same way, so that the sum is exact.

    Attributes:
        rank: by the card's numbers.
        running: requests the engine is computing.
        waiting: requests queued in the engine.
        kv_usage: fraction of KV blocks in use.
        others_active: in-flight requests of other frontends.
        others_prefill_tokens: :attr:`Submit.prefill_tokens` of those without an output.
        others_decode_tokens: prompt tokens of those with one.
    """

    rank: Count
    running: Count
    waiting: Count
    kv_usage: Fraction
    others_active: Count
    others_prefill_tokens: Count
    others_decode_tokens: Count
