"""Parse the JSON of a request's body, at a cost that grows with its bytes alone."""

import json
from typing import Any, Final

import msgspec

from common.errors import RequestRejectedError

MAX_BRACKETS: Final = 1 << 18
"""Lists and objects of one body, and brackets in its texts. 64 MB of ``{}`` are 20 million objects,
and seconds of the event loop. JSON within a text has one per 40 characters."""

MAX_COMMAS: Final = 1 << 21
"""Entries of them: token ids above all."""

DECODER: Final = msgspec.json.Decoder(float_hook=float)
"""msgspec's own reader of floats takes 9 µs for each near the ends of their range, such as
``1e308``: a second and a half of the event loop for 1 MB. Python's takes 0.3 µs for any."""


def read(body: bytes) -> Any:
    """Return Python's types.

    Raises:
        RequestRejectedError: it has too many values, or is nested beyond what a parser takes.
        json.JSONDecodeError: it isn't JSON; Python's error, as users know it.
        UnicodeDecodeError: it isn't in UTF-8, UTF-16 or UTF-32.
    """
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise RequestRejectedError(f"the body has more than {MAX_BRACKETS} lists and objects")
    if body.count(b",") > MAX_COMMAS:
        raise RequestRejectedError(f"the body has more than {MAX_COMMAS} values")
    try:
        try:
            return DECODER.decode(body)
        except msgspec.DecodeError:
            return json.loads(body)  # takes NaN, large numbers, halves of surrogate pairs
    except RecursionError:
        raise RequestRejectedError("the body is nested too deeply") from None
