"""What the steps of an engine add up to: from it routers learn how long a prompt takes there.

A step with prompts is taken to last a constant, and so much for each token that it computes. Least
squares need no more of the steps than these sums, so the steps themselves are never sent. Sums
only grow, so the next message makes up for a lost one.
"""

from typing import Annotated, TypeAlias

import msgspec

Sum: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""Finite, not negative, and no more than years of steps add up to."""


class StepSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Steps with prompts of one rank's engine, since its start.

    Attributes:
        rank: by the card's numbers.
        steps: how many.
        tokens: prompt tokens prefilled and media tokens encoded.
        squares: sum over steps of the square of their tokens.
        ms: length of the steps in milliseconds.
        products: sum over steps of tokens times milliseconds.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
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
