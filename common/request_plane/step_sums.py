"""What an engine's steps add up to: the figures from which routers learn how long work takes.

A step's length is taken for a sum of four parts: a constant, and so much for each prompt token
prefilled, each media token encoded and each request decoding. To find them by least squares nothing
else is needed of the steps than the sums of their features, of the products of these, and of both
with the length. Sums only grow, so a message that was lost is made up for by the next.
"""

from typing import Annotated, TypeAlias

import msgspec

Sum: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
"""Neither negative nor infinite nor no number, and what years of steps add up to."""


class StepSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Steps of one kind, since the engine's start.

    Attributes:
        steps: how many.
        prefill, encode, decode: prompt tokens prefilled, media tokens encoded, requests decoding.
        prefill_prefill, prefill_encode, prefill_decode, encode_encode, encode_decode,
            decode_decode: sums over steps of the products of two of them.
        ms: their length in milliseconds.
        prefill_ms, encode_ms, decode_ms: sums over steps of the products with it.
    """

    steps: Sum = 0
    prefill: Sum = 0
    encode: Sum = 0
    decode: Sum = 0
    prefill_prefill: Sum = 0
    prefill_encode: Sum = 0
    prefill_decode: Sum = 0
    encode_encode: Sum = 0
    encode_decode: Sum = 0
    decode_decode: Sum = 0
    ms: Sum = 0
    prefill_ms: Sum = 0
    encode_ms: Sum = 0
    decode_ms: Sum = 0

    def plus(self, prefill: int, encode: int, decode: int, ms: float) -> "StepSums":
        """The same with one step more."""
        return StepSums(
            self.steps + 1,
            self.prefill + prefill,
            self.encode + encode,
            self.decode + decode,
            self.prefill_prefill + prefill * prefill,
            self.prefill_encode + prefill * encode,
            self.prefill_decode + prefill * decode,
            self.encode_encode + encode * encode,
            self.encode_decode + encode * decode,
            self.decode_decode + decode * decode,
            self.ms + ms,
            self.prefill_ms + prefill * ms,
            self.encode_ms + encode * ms,
            self.decode_ms + decode * ms,
        )


class EngineSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All steps of one rank's engine, since its start.

    The kinds are apart because a router forgets old steps by the number of new ones: those that
    only decode are many, and must not make it forget what prefilling costs.

    Attributes:
        rank: by the card's numbers.
        prompts: that were computed to their end.
        decoding: steps that only decode.
        prefilling: others, in which no media are encoded.
        encoding: steps in which media are.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    prompts: Sum = 0
    decoding: StepSums = StepSums()
    prefilling: StepSums = StepSums()
    encoding: StepSums = StepSums()

    @property
    def kinds(self) -> tuple[StepSums, StepSums, StepSums]:
        """The steps by kind."""
        return self.decoding, self.prefilling, self.encoding


class ShippingSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Media tensors that a worker received, since its start.

    Attributes:
        nbytes: their size.
        ms: that requests waited for them.
    """

    nbytes: Sum = 0
    ms: Sum = 0
